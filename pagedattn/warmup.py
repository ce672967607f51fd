"""Compiling what a problem needs before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib import import_module

from pagedattn.dispatch import select
from pagedattn.jit.compiler import MAX_SHARED_BYTES, arch_of, default_compiler
from pagedattn.jit.cuda import nvrtc
from pagedattn.jit.launch import Compilation, Recorder
from pagedattn.problem import Problem
from pagedattn.support import Row

# Of the device: they decide how work is split, and from which batch on it is one kernel's and not another's.
MULTIPROCESSORS = 132
# Decoding batches shrink and grow, and their size decides which kernel attends, and which form of it: whether sequences
# have splits, and whether these fill the device once. Beyond two sequences a multiprocessor nothing changes any more.
BATCH_SIZES = (*range(1, 2 * MULTIPROCESSORS + 1), 1024)


def record(row: Row, problems: Iterable[Problem], capability: int, archs: Sequence[int]) -> Recorder:
    """What a backend's plans load on a device of a compute capability (80 for 8.0) where NVRTC knows ``archs``."""
    like = max(known for known in MAX_SHARED_BYTES if known <= capability)
    recorder = Recorder(arch_of(divmod(capability, 10), archs), MAX_SHARED_BYTES[like], MULTIPROCESSORS)
    plan = import_module(row.module).plan
    for problem in problems:
        plan(problem, recorder)
    return recorder


def kernels_of(problem: Problem, capability: int, backend: str | None = None) -> list[Compilation]:
    """Kernels that a problem needs, as they would be compiled for a compute capability; some may be there twice.

    Of a problem with one new token a sequence, those that smaller and larger batches need as well.

    Parameters
    ----------
    problem : Problem
    capability : int
        80 for 8.0.
    backend : str, optional
        Force one.
    """
    row = select(problem, capability, backend).row
    if not row.min_arch:
        return []
    problems = [problem]
    if problem.token_count == problem.batch_size:
        problems += [replace(problem, token_count=size, batch_size=size) for size in BATCH_SIZES]
    return record(row, problems, capability, nvrtc().archs).loaded


def warm_up(
    problems: Iterable[Problem],
    capability: int,
    backend: str | None = None,
    jobs: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile every kernel of some problems into the cache on disk; needs NVRTC and no GPU.

    Parameters
    ----------
    problems : iterable of Problem
        `PagedAttention.problem_of` makes one from a call's inputs.
    capability : int
        Compute capability of the device, 90 for 9.0.
    backend : str, optional
        Force one.
    jobs : int
        Compilations at a time.
    progress : callable, optional
        Called with the number of kernels that are ready and of all.

    Returns
    -------
    int
        Number of kernels.

    Raises
    ------
    MissingDependencyError, CompileError, UnsupportedError
    """
    wanted = list(dict.fromkeys(item for problem in problems for item in kernels_of(problem, capability, backend)))
    arch = arch_of(divmod(capability, 10), nvrtc().archs)
    compiler = default_compiler()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(compiler.compile, kernel, spec, arch) for kernel, spec in wanted]
        for ready, done in enumerate(as_completed(running), start=1):
            done.result()
            if progress is not None:
                progress(ready, len(wanted))
    return len(wanted)

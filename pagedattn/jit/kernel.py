"""Kernel: the record that ties a ``.cu`` file to its Spec, its Params and the two numbers a launch takes from the Spec.

``pagedattn/kernels/<stem>.py`` holds one::

    def threads(spec: DecodeSpec) -> int: ...
    def shared_bytes(spec: DecodeSpec) -> int: ...

    KERNEL = Kernel("decode_split_kv", DecodeSpec, PARAMS, threads, shared_bytes)

    function = executor.load(KERNEL, spec)              # compiled at first use, then cached
    launch = KERNEL.launch(function, spec, grid, PARAMS.pack(...))
    issue = executor.prepare([launch], stream)
    issue()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pagedattn.jit.launch import Launch
from pagedattn.jit.spec import Spec

if TYPE_CHECKING:
    from pagedattn.jit.params import Layout
    from pagedattn.jit.sources import Sources

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, eq=False)  # one object a kernel, so identity is equality and the hash is cheap
class Kernel(Generic[S]):
    """One kernel template.

    Attributes
    ----------
    stem : str
        Name of the ``.cu`` file, without its suffix, and of the ``__global__`` function template in it.
    spec_type : type
        The Spec, named as the C++ struct that is the template's one parameter.
    params : Layout
        The struct that is the function's one parameter.
    threads, shared_bytes : callable
        Threads of a CTA, and bytes of its dynamic shared memory, each a function of the Spec.
    archs : tuple of str, or None
        Architectures that the source can be compiled for, such as ``("sm_90a",)``; None is every one.
    waits_itself : bool
        Every thread calls ``ptx::wait_for_previous_kernel`` before it reads what the kernel ahead of it in the stream
        writes, or writes what that one reads. Where the device can, and the two are of one call, it then starts before
        that one has ended; the first one of a call where its launch says so (`Launch.starts_early`).
    """

    stem: str
    spec_type: type[S]
    params: Layout
    threads: Callable[[S], int]
    shared_bytes: Callable[[S], int]
    archs: tuple[str, ...] | None = None
    waits_itself: bool = False

    def expression(self, spec: S) -> str:
        """C++ name of the instantiation: ``stem<XSpec{.io = DType::bf16, ...}>``."""
        if type(spec) is not self.spec_type:
            raise TypeError(f"{self.stem}: expected {self.spec_type.__name__}, got {type(spec).__name__}")
        return f"{self.stem}<{spec.cpp()}>"

    def launch(self, function: Any, spec: S, grid: tuple[int, int, int], packed: bytes) -> Launch:
        """Launch of what ``executor.load(kernel, spec)`` returned, with packed ``params``."""
        return Launch(function, grid, self.threads(spec), self.shared_bytes(spec), packed)

    def translation_unit(self, spec: S, sources: Sources) -> str:
        """Text that is compiled: the ``.cu``, the checks of Spec and Params, and one explicit instantiation.

        The first line holds the digest of the ``.cu`` and of every header of ours that it reaches, so equal text means
        equal code.
        """
        return (
            f"// {sources.digest(self.stem)}\n"
            f'#line 1 "kernels/{self.stem}.cu"\n'
            f"{sources.kernel(self.stem)}\n"
            f'#line 1 "{self.stem}.spec"\n'
            f"{self.spec_type.field_check()}"
            f'#line 1 "{self.stem}.params"\n'
            f"{self.params.static_asserts()}"
            f'#line 1 "{self.stem}.instance"\n'
            f"template __global__ void {self.expression(spec)}(const __grid_constant__ {self.params.name});\n"
        )

"""Executors: load a kernel for a Spec, and launch it.

Everything above this module talks to the :class:`Executor` protocol alone; :class:`CudaExecutor` is the one that runs
on a GPU, and the tests have another that runs the same sources on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from pagedattn.jit.spec import Spec

if TYPE_CHECKING:
    from pagedattn.jit.kernel import Kernel

Function = TypeVar("Function")
S = TypeVar("S", bound=Spec)


class Executor(Protocol[Function]):
    """What runs kernels. ``Function`` is its own handle of a loaded kernel, opaque to callers."""

    @property
    def arch(self) -> str:
        """Architecture the kernels are compiled for, as ``sm_90a``."""
        ...

    def load(self, kernel: Kernel[S], spec: S) -> Function:
        """Return the kernel for this Spec, compiled and loaded; quick from the second time on."""
        ...

    def launch(
        self, function: Function, grid: tuple[int, int, int], block: int, shared_bytes: int, params: bytes
    ) -> None:
        """Run ``function`` in stream order.

        Parameters
        ----------
        function : what :meth:`load` returned
        grid : three int
            CTAs along x, y and z. Nothing runs when one of them is 0.
        block : int
            Threads of a CTA, all along x: ``kernel.threads(spec)``.
        shared_bytes : int
            Bytes of dynamic shared memory: ``kernel.shared_bytes(spec)``.
        params : bytes
            What ``kernel.params.pack(...)`` returned.
        """
        ...

"""The choice of a backend, from static facts only."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.errors import InvalidArgumentError, UnsupportedError
from pagedattn.problem import Problem
from pagedattn.support import BY_NAME, ROWS, Row, features_of, why_not


@dataclass(frozen=True)
class Choice:
    """The backend that serves a problem.

    Attributes
    ----------
    row : Row
        The chosen backend's row of the support table.
    passed_over : tuple of (str, str)
        Every backend of higher priority, with the reason why it was not chosen.
    kernels : tuple of str
        Kernels that it would launch, in order, where `explain` was asked about arrays on a GPU; else empty.
    """

    row: Row
    passed_over: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"backend: {self.row.name} (SdpaKernel={self.row.sdpa_kernel})"]
        if self.kernels:
            lines.append(f"kernels: {', '.join(self.kernels)}")
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.passed_over])


def select(problem: Problem, arch: int, backend: str | None = None) -> Choice:
    """Choose the backend for a problem.

    The first row of the support table that can serve the problem and prefers it wins; else the first that can.

    Parameters
    ----------
    problem : Problem
    arch : int
        Compute capability of the device, 90 for 9.0; 0 for the CPU.
    backend : str, optional
        Force this one.

    Raises
    ------
    InvalidArgumentError
        ``backend`` names none.
    UnsupportedError
        The forced backend, or every one, cannot serve the problem; the message gives each one's reason.
    """
    if backend is not None:
        if backend not in BY_NAME:
            raise InvalidArgumentError(f"backend: expected one of {', '.join(BY_NAME)}, got {backend!r}.")
        reason = why_not(BY_NAME[backend], problem, arch)
        if reason:
            raise UnsupportedError(f"backend {backend} cannot serve this call: {reason}.")
        return Choice(
            BY_NAME[backend],
            tuple((row.name, f"backend {backend} was asked for") for row in ROWS[: ROWS.index(BY_NAME[backend])]),
        )
    reasons = [(row, why_not(row, problem, arch)) for row in ROWS]
    able = [row for row, reason in reasons if reason is None]
    if not able:
        needs = ", ".join(feature.value for feature in features_of(problem))
        raise UnsupportedError(
            f"no backend serves this call ({needs}) on {_arch_name(arch)}: "
            + "; ".join(f"{row.name}: {reason}" for row, reason in reasons)
            + "."
        )
    chosen = next((row for row in able if row.prefers(problem)), able[0])
    passed = tuple(
        (row.name, reason or f"can, but is meant for: {row.prefers_text}")
        for row, reason in reasons[: ROWS.index(chosen)]
    )
    return Choice(chosen, passed)


def _arch_name(arch: int) -> str:
    return f"sm_{arch}" if arch else "the CPU"

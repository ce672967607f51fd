"""The exceptions that pagedattn raises."""

from __future__ import annotations


class PagedAttentionError(Exception):
    """Base class of every error raised on purpose by this package."""


class InvalidArgumentError(PagedAttentionError, ValueError):
    """An input or attribute breaks the operator's contract.

    The message names the tensor or attribute, what was expected and what came.
    """

    code = "INVALID_ARGUMENT"


class UnsupportedError(InvalidArgumentError):
    """A well-formed call that no backend (or not the forced one) can serve."""


class CompileError(PagedAttentionError, RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    kernel, spec, arch : str
        What was being compiled, for which architecture.
    log : str
        The compiler's output.
    source_path : str
        Where the translation unit was written, for a look or a bug report.
    """

    def __init__(self, kernel: str, spec: str, arch: str, log: str, source_path: str) -> None:
        self.kernel, self.spec, self.arch, self.log, self.source_path = kernel, spec, arch, log, source_path
        super().__init__(f"{kernel}: {spec} did not compile for {arch}; source: {source_path}\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, ...]]:
        return type(self), (self.kernel, self.spec, self.arch, self.log, self.source_path)


class MissingDependencyError(PagedAttentionError, ImportError):
    """An optional dependency is absent or unusable; the message holds the command that cures it."""

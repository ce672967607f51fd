"""The one module that imports CuPy: its arrays and driver calls, and the NVRTC binding that comes with it.

Nothing here runs at import. Each function either gives a working part or raises :class:`MissingDependencyError` with
the command that cures it. Compiling needs NVRTC and the runtime headers, no driver and no GPU.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedattn.errors import MissingDependencyError, PagedAttentionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # cudaDeviceAttr
_MULTIPROCESSOR_COUNT = 16
_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")


def cupy() -> Any:
    """Import CuPy."""
    # OSError: CuPy makes its cache folder when it is imported, which fails in a read-only home.
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise MissingDependencyError(f"CuPy cannot be imported: {error}; reinstall it: {_pip()}") from error
        raise MissingDependencyError(f"CuPy is not installed: {_pip()}") from error
    except ImportError as error:
        raise MissingDependencyError(f"CuPy cannot be imported: {error}; reinstall it: {_pip()}") from error
    except OSError as error:
        raise MissingDependencyError(
            f"CuPy cannot be imported: {error}; set CUPY_CACHE_DIR to a folder that can be written"
        ) from error


def require_device() -> None:
    """Raise unless there is a driver and at least one GPU."""
    if not cupy().cuda.is_available():
        raise MissingDependencyError(
            "no GPU is usable: the NVIDIA driver is missing or too old, or no device is visible "
            "(see nvidia-smi and CUDA_VISIBLE_DEVICES); NumPy arrays need none"
        )


class CompilationFailed(PagedAttentionError):
    """NVRTC refused a source; the text is its log."""


class Nvrtc:
    """NVRTC, and the CUDA headers that belong to it.

    Attributes
    ----------
    version : tuple of int
        Major and minor version of the library in use.
    archs : tuple of int
        Compute capabilities it can compile for, as 80 or 120.
    include_dir : Path
        Folder of ``cuda_fp16.h`` and its companions.
    header_version : tuple of int
        Version of those headers.
    """

    def __init__(self) -> None:
        cupy()
        try:
            self._binding = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
            major, minor = self._binding.getVersion()
        except (ImportError, OSError, RuntimeError) as error:
            # RuntimeError: the binding loads the library when it is first called.
            raise MissingDependencyError(f"NVRTC, the CUDA compiler library, is not installed: {_pip()}") from error
        self.version = (int(major), int(minor))
        self.archs: tuple[int, ...] = tuple(self._binding.getSupportedArchs())
        self.include_dir, self.header_version = _find_headers(self.version)

    def compile(self, source: str, name: str, expression: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Compile one translation unit; return the cubin and the mangled name of ``expression`` in it.

        The interpreter's lock is released meanwhile, so threads compile side by side.
        """
        binding = self._binding
        program = binding.createProgram(source, name, (), ())
        try:
            binding.addNameExpression(program, expression)
            binding.compileProgram(program, (*options, f"-I{self.include_dir}"))
            return bytes(binding.getCUBIN(program)), str(binding.getLoweredName(program, expression))
        except binding.NVRTCError as error:
            raise CompilationFailed(binding.getProgramLog(program) or str(error)) from None
        finally:
            binding.destroyProgram(program)


class Api:
    """The few calls that loading takes, of CuPy's own binding of the driver; launches are in `pagedattn.jit.driver`."""

    def __init__(self) -> None:
        module = cupy()
        self.device = module.cuda.Device
        self.current_stream = module.cuda.get_current_stream  # the calling thread's, of the current device
        self._module = importlib.import_module("cupy.cuda.function").Module
        self._driver = importlib.import_module("cupy_backends.cuda.api.driver")
        self._runtime = importlib.import_module("cupy_backends.cuda.api.runtime")

    def capability(self, device_id: int) -> tuple[int, int]:
        """Compute capability of a device."""
        text = self.device(device_id).compute_capability  # as "90" or "120"
        return int(text[:-1]), int(text[-1])

    def driver_version(self) -> int:
        """Version of the driver, 12030 for 12.3."""
        return int(self._runtime.driverGetVersion())

    def max_shared_bytes(self, device_id: int) -> int:
        """Return the dynamic shared memory that a CTA may ask for."""
        return int(self._runtime.deviceGetAttribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device_id))

    def multiprocessors(self, device_id: int) -> int:
        """Multiprocessors of a device."""
        return int(self._runtime.deviceGetAttribute(_MULTIPROCESSOR_COUNT, device_id))

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> tuple[Any, int]:
        """Load a cubin on the current device; return the module, which owns the code, and the function's handle.

        Launches may have up to ``shared_bytes`` of dynamic shared memory; the kernel has no other.
        """
        self._runtime.free(0)  # makes sure that the device has a context, if nothing has run on it yet
        module = self._module()
        module.load(cubin)
        function = int(module.get_function(entry).ptr)
        limit = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._driver.funcSetAttribute(function, limit, shared_bytes)
        return module, function


@functools.cache
def nvrtc() -> Nvrtc:
    """Return NVRTC, loaded once."""
    return Nvrtc()


def _find_headers(version: tuple[int, int]) -> tuple[Path, tuple[int, int]]:
    """Return the folder of the CUDA headers for this NVRTC, and their version.

    Headers of another major version are passed over: they fail with a page of template errors.
    """
    passed_over = []
    for folder in _header_folders():
        if not all((folder / name).is_file() for name in _HEADERS):
            continue
        found = _header_version(folder)
        if found is not None and found[0] == version[0]:
            return folder, found
        passed_over.append(f"{folder} is of another version")
    reason = f" ({'; '.join(passed_over)})" if passed_over else ""
    raise MissingDependencyError(
        f"the CUDA headers for NVRTC {version[0]}.{version[1]} are not installed{reason}: {_pip(version[0])}"
    )


def _header_folders() -> Iterator[Path]:
    """Folders that may hold the CUDA headers, those nearest to the NVRTC in use first."""
    try:
        from cuda import pathfinder

        library = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
        if library:
            parent = Path(library).resolve().parent  # a lib folder, whatever its name
            yield parent.parents[1] / "cuda_runtime" / "include"  # wheels of CUDA 12: one folder a package
            yield parent.parent / "include"  # wheels of CUDA 13, conda, a toolkit
            yield parent.parents[2] / "include"  # a toolkit's targets/<machine>/lib
        found = pathfinder.find_nvidia_header_directory("cudart")
        if found:
            yield Path(found)
    except (ImportError, OSError, RuntimeError, AttributeError, IndexError):
        pass  # pathfinder is a dependency of CuPy; without it only the classic places are left
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield Path(root) / "include"


def _header_version(folder: Path) -> tuple[int, int] | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return divmod(int(match[1]) // 10, 100) if match else None


def _pip(major: int | None = None) -> str:
    if major is None:
        return 'pip install "pagedattn[cuda12]" (or [cuda13], as the driver allows)'
    return f'pip install "pagedattn[cuda{major}]"'

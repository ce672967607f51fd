"""What a user reads when a part of CUDA is missing, and which headers go with which NVRTC."""

import builtins
import importlib
import sys
from types import SimpleNamespace

import pytest

from pagedattn.errors import MissingDependencyError
from pagedattn.jit import cuda


@pytest.fixture
def import_fails(monkeypatch):
    """Make ``import name`` raise."""

    def arrange(name, error):
        real = importlib.import_module

        def fake(wanted, package=None):
            if wanted == name:
                raise error
            return real(wanted, package)

        monkeypatch.setattr(cuda.importlib, "import_module", fake)

    return arrange


def test_no_cupy(import_fails):
    import_fails("cupy", ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    with pytest.raises(MissingDependencyError, match=r'CuPy is not installed: pip install "pagedattn\[cuda12\]"'):
        cuda.cupy()
    with pytest.raises(ImportError):
        cuda.cupy()


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"), ImportError("libcudart is missing")]
)
def test_a_broken_cupy_keeps_its_reason(import_fails, error):
    import_fails("cupy", error)
    with pytest.raises(MissingDependencyError, match=rf"{error}.*pip install") as caught:
        cuda.cupy()
    assert caught.value.__cause__ is error


def test_a_home_that_cannot_be_written(import_fails):
    import_fails("cupy", PermissionError(13, "Permission denied", "/home/user/.cupy"))
    with pytest.raises(MissingDependencyError, match=r"Permission denied.*/home/user/\.cupy.*CUPY_CACHE_DIR"):
        cuda.cupy()


@pytest.mark.parametrize("error", [ImportError("no binding"), RuntimeError("libnvrtc.so.12 cannot be loaded")])
def test_no_nvrtc(monkeypatch, import_fails, error):
    monkeypatch.setattr(cuda, "cupy", lambda: None)
    import_fails("cupy_backends.cuda.libs.nvrtc", error)
    with pytest.raises(MissingDependencyError, match=r'NVRTC.*not installed: pip install "pagedattn\[cuda12\]"'):
        cuda.Nvrtc()


def test_no_device(monkeypatch):
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(MissingDependencyError, match="no GPU is usable: the NVIDIA driver"):
        cuda.require_device()


def headers(folder, version):
    folder.mkdir(parents=True)
    for name in cuda._HEADERS:
        (folder / name).write_text("")
    (folder / "cuda_runtime_api.h").write_text(f"/* header */\n#define CUDART_VERSION  {version}\n")
    return folder


class TestHeaders:
    def test_the_first_folder_of_the_right_version(self, monkeypatch, tmp_path):
        incomplete = headers(tmp_path / "incomplete", 12090)
        (incomplete / "cuda_fp8.h").unlink()
        old = headers(tmp_path / "old", 11080)
        good, later = headers(tmp_path / "good", 12060), headers(tmp_path / "later", 12090)
        monkeypatch.setattr(cuda, "_header_folders", lambda: iter([tmp_path / "absent", incomplete, old, good, later]))
        assert cuda._find_headers((12, 9)) == (good, (12, 6))

    def test_none(self, monkeypatch, tmp_path):
        old = headers(tmp_path / "old", 11080)
        monkeypatch.setattr(cuda, "_header_folders", lambda: iter([old]))
        with pytest.raises(MissingDependencyError) as caught:
            cuda._find_headers((13, 0))
        assert "headers for NVRTC 13.0" in str(caught.value)
        assert f"{old} is of another version" in str(caught.value)
        assert 'pip install "pagedattn[cuda13]"' in str(caught.value)

    @pytest.mark.parametrize(
        ("library", "include"),
        [
            ("nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cuda_runtime/include"),
            ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/include"),
            ("cuda/targets/x86_64-linux/lib/libnvrtc.so.12", "cuda/targets/x86_64-linux/include"),
            ("cuda/lib64/libnvrtc.so.12", "cuda/include"),
        ],
    )
    def test_those_beside_nvrtc_come_before_a_toolkit_that_the_environment_names(
        self, monkeypatch, tmp_path, library, include
    ):
        beside = headers(tmp_path / include, 12090)
        toolkit = headers(tmp_path / "toolkit" / "include", 12020)
        path = tmp_path / library
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))
        pathfinder = SimpleNamespace(
            load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=str(path)),
            find_nvidia_header_directory=lambda name: None,
        )
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
        assert cuda._find_headers((12, 9)) == (beside, (12, 9))

    def test_without_pathfinder_the_environment_is_left(self, monkeypatch, tmp_path):
        toolkit = headers(tmp_path / "toolkit" / "include", 12020)
        monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))
        monkeypatch.setitem(sys.modules, "cuda", None)
        assert cuda._find_headers((12, 9)) == (toolkit, (12, 2))

    def test_an_empty_cuda_path_is_harmless(self, monkeypatch, tmp_path):
        try:
            used = cuda.nvrtc()
        except MissingDependencyError as error:
            pytest.skip(str(error))
        monkeypatch.setenv("CUDA_PATH", str(tmp_path))
        assert cuda._find_headers(used.version) == (used.include_dir, used.header_version)


def test_import_touches_no_cupy(monkeypatch):
    real = builtins.__import__

    def guard(name, *args, **kwargs):
        assert not name.startswith("cupy"), name
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guard)
    importlib.reload(cuda)

"""What the wheel and the sdist hold, and that each way of installing finds the CUDA sources."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds need hatchling")

ROOT = Path(__file__).resolve().parents[2]
FIND_SOURCES = "from pagedattn.jit.sources import default_sources; print(default_sources().root)"


def build(project, target, folder):
    """Build with the backend itself: no network, no isolated environment."""
    call = f"from hatchling import build; print(build.build_{target}({str(folder)!r}))"
    run = subprocess.run([sys.executable, "-c", call], cwd=project, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_below(folder):
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run_isolated(code, *, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=cwd,
        env=environment or None,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_package_and_the_cuda_sources_and_nothing_else(wheel):
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    expected = files_below("pagedattn") | {f"pagedattn/{name}" for name in files_below("kernels_cu")}
    assert names == expected
    assert "pagedattn/py.typed" in names


def test_the_wheel_s_metadata(wheel):
    (metadata,) = [text.decode() for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0] for line in required) == ["ml-dtypes", "numpy"]
    assert any(name.endswith("/licenses/LICENSE") for name in contents(wheel))


def test_a_wheel_from_the_sdist_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(tmp_path)
    (project,) = tmp_path.iterdir()
    again = build(project, "wheel", tmp_path)
    assert contents(again) == contents(wheel)


def test_the_sdist_holds_tests_and_scripts(sdist):
    with tarfile.open(sdist) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames()}
    assert {"pagedattn", "kernels_cu", "tests", "scripts", "pyproject.toml", "README.md", "LICENSE"} <= tops


def test_an_installed_wheel_finds_its_sources(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    run = run_isolated(f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {FIND_SOURCES}", cwd=tmp_path)
    assert run.stdout.strip() == str(tmp_path / "site" / "pagedattn" / "kernels_cu"), run.stderr


def test_an_editable_install_finds_the_sources_of_the_checkout(tmp_path):
    editable = build(ROOT, "editable", tmp_path)
    with zipfile.ZipFile(editable) as archive:
        assert not [name for name in archive.namelist() if "kernels_cu" in name]  # a copy would go stale
        archive.extractall(tmp_path / "site")
    run = run_isolated(f"import site; site.addsitedir({str(tmp_path / 'site')!r}); {FIND_SOURCES}", cwd=tmp_path)
    assert run.stdout.strip() == str(ROOT / "kernels_cu"), run.stderr


def test_import_is_quiet_and_needs_no_cupy(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["cupy"] = sys.modules["cupy_backends"] = None   # as if not installed
import pagedattn
heavy = {{"torch", "onnx", "platformdirs", "pynvml", "cuda"}} & set(sys.modules)
assert not heavy, heavy
"""
    run = run_isolated(code, cwd=tmp_path, HOME=str(tmp_path), PATH="/usr/bin:/bin", PYTHONDONTWRITEBYTECODE="1")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "extra"), [("onnx", "onnx"), ("integrations.transformers", "models")])
def test_an_optional_module_names_its_extra(module, extra, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["onnx"] = sys.modules["torch"] = sys.modules["transformers"] = None
from pagedattn import MissingDependencyError
try:
    import pagedattn.{module}
except MissingDependencyError as error:
    print(error)
"""
    run = run_isolated(code, cwd=tmp_path)
    assert run.stdout.strip().endswith(f'pip install "pagedattn[{extra}]"'), run.stderr


def test_every_module_imports_without_cupy(tmp_path):
    code = f"""
import importlib, pkgutil, sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
import pagedattn
for module in pkgutil.walk_packages(pagedattn.__path__, "pagedattn."):
    optional = module.name.startswith(("pagedattn.onnx", "pagedattn.integrations"))
    if not optional and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    run = run_isolated(code, cwd=tmp_path, HOME=str(tmp_path), PATH="/usr/bin:/bin")
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    assert list(tmp_path.iterdir()) == []

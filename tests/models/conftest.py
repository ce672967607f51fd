"""Options of the model tests. They need the extra `models` (torch and transformers) and are skipped without it."""

import importlib.util
import os

import pytest

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the model tests in bfloat16 on CUDA too")


def pytest_configure(config):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: every model is random
    if not MISSING:
        import torch
        import transformers

        torch.set_num_threads(1)  # the models are tiny
        transformers.logging.set_verbosity_error()


class Absent(pytest.Module):
    """A module of tests that cannot be imported here."""

    def collect(self):
        pytest.skip(f"needs {' and '.join(MISSING)}: pip install 'pagedattn[models]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Absent.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def gpu(request):
    """Skips unless --gpu is given and there is one."""
    if not request.config.getoption("--gpu", default=False):
        pytest.skip("needs --gpu")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


@pytest.fixture(params=["cpu", "cuda"])
def half(request):
    """Where to run in bfloat16; with PAGEDATTN_EMULATE=1 the CPU runs the kernels' sources."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    from .driver import Place

    return Place(request.param, "bfloat16")

"""``python -m pagedattn``, and what a user reads when a part of CUDA is missing: there and from the operator."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import pagedattn
from pagedattn import MissingDependencyError, env
from pagedattn.__main__ import main
from pagedattn.graph import GraphedStep
from pagedattn.jit import cuda
from pagedattn.support import ROWS


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    for variable in env.TABLE:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def run(capsys):
    """Run a command: status, output and error text, blanks collapsed."""

    def command(*arguments):
        status = main(arguments)
        captured = capsys.readouterr()
        return status, " ".join(captured.out.split()), captured.err

    return command


class FakeDevice:
    """What CuPy's Device is used for."""

    compute_capability = "90"

    def __init__(self, device_id=0):
        self.id = device_id

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def fake_cupy(available=True):
    """CuPy as far as it is looked at before a kernel is compiled, with two devices if it is available."""
    names = {0: (b"NVIDIA H200", 141), 1: (b"Tesla T4", 16)}
    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: 12040,
        getDeviceCount=lambda: 2,
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: {"name": names[device][0], "totalGlobalMem": names[device][1] << 30},
    )
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    return SimpleNamespace(
        __version__="14.2.0",
        cuda=SimpleNamespace(
            runtime=runtime,
            is_available=lambda: available,
            Device=FakeDevice,
            get_current_stream=lambda: stream,
        ),
    )


@pytest.fixture
def cupy_with_devices(monkeypatch):
    monkeypatch.setattr(cuda, "cupy", fake_cupy)
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(
        cuda, "Api", lambda: SimpleNamespace(capability=capabilities.__getitem__, max_shared_bytes=lambda _: 232448)
    )
    nvrtc = SimpleNamespace(version=(12, 9), header_version=(12, 9), archs=(75, 80, 90), include_dir="/include")
    monkeypatch.setattr(cuda, "nvrtc", lambda: nvrtc)


# What is missing, and the words that both `info` and the operator say about it.


def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    return 'CuPy is not installed: pip install "pagedattn[cuda12]" (or [cuda13], as the driver allows)'


def read_only_home(monkeypatch):
    def refuse(name, package=None):
        raise PermissionError(13, "Permission denied", "/home/user/.cupy")

    monkeypatch.setattr(cuda, "importlib", SimpleNamespace(import_module=refuse))
    return (
        "CuPy cannot be imported: [Errno 13] Permission denied: '/home/user/.cupy'; "
        "set CUPY_CACHE_DIR to a folder that can be written"
    )


def no_driver(monkeypatch):
    monkeypatch.setattr(cuda, "cupy", lambda: fake_cupy(available=False))
    return "no GPU is usable: the NVIDIA driver is missing or too old, or no device is visible"


def no_nvrtc(monkeypatch):
    def refuse(name, package=None):
        raise ImportError("libnvrtc.so.12: cannot open shared object file")

    monkeypatch.setattr(cuda, "importlib", SimpleNamespace(import_module=refuse))
    monkeypatch.setattr(cuda, "nvrtc", cuda.Nvrtc)
    return (
        "NVRTC, the CUDA compiler library, is not installed: "
        'pip install "pagedattn[cuda12]" (or [cuda13], as the driver allows)'
    )


def headers_of_another_major(monkeypatch, tmp_path):
    folder = tmp_path / "cuda-11" / "include"
    folder.mkdir(parents=True)
    for name in cuda._HEADERS:
        (folder / name).write_text("")
    (folder / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 11080\n")
    monkeypatch.setattr(cuda, "_header_folders", lambda: iter([folder]))
    binding = SimpleNamespace(getVersion=lambda: (12, 9), getSupportedArchs=lambda: [80, 90])
    monkeypatch.setattr(cuda, "importlib", SimpleNamespace(import_module=lambda name: binding))
    monkeypatch.setattr(cuda, "nvrtc", cuda.Nvrtc)
    return (
        f"the CUDA headers for NVRTC 12.9 are not installed ({folder} is of another version): "
        'pip install "pagedattn[cuda12]"'
    )


# ---- info --------------------------------------------------------------------------------------------------------


def test_info_runs_as_a_module_and_imports_no_array_library():
    script = (
        "import runpy, sys; sys.argv = ['pagedattn', '--version']\n"
        "try: runpy.run_module('pagedattn', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "loaded = {'torch', 'transformers', 'cupy', 'onnx'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"pagedattn {pagedattn.__version__}\n"), done.stderr


def test_info_here(run):
    status, text, _ = run("info")
    assert status == 0
    assert text.startswith(f"pagedattn {pagedattn.__version__}, Python {sys.version.split()[0]}")
    assert f"numpy {np.__version__}" in text
    assert all(row.name in text for row in ROWS)
    assert "numpy yes, on arrays in host memory" in text
    for variable in env.TABLE:
        assert f"{variable.name} " in text
        assert variable.doc in text


def test_info_with_devices(run, cupy_with_devices):
    _, text, _ = run("info")
    assert "CuPy 14.2.0, built for CUDA 12.9" in text
    assert "NVRTC 12.9, compiles for sm_75 to sm_90" in text
    assert "headers 12.9 in /include" in text
    assert "driver supports CUDA 12.4" in text
    assert "device 0 NVIDIA H200, compute capability 9.0, 141.0 GiB" in text
    assert "device 1 Tesla T4, compute capability 7.5, 16.0 GiB" in text
    assert "device 0: yes, compiled for sm_90a device 1: no: needs compute capability 8.0" in text


def test_info_without_cupy(run, monkeypatch):
    message = no_cupy(monkeypatch)
    _, text, _ = run("info")
    assert f"CuPy not usable: {message}" in text
    assert "decode no: needs a GPU" in text
    assert "numpy yes" in text


def test_info_with_a_read_only_home(run, monkeypatch):
    message = read_only_home(monkeypatch)
    assert f"CuPy not usable: {message}" in run("info")[1]


def test_info_without_a_driver(run, monkeypatch):
    message = no_driver(monkeypatch)
    _, text, _ = run("info")
    assert f"devices none: {message}" in text
    assert "decode no: needs a GPU" in text


def test_info_without_nvrtc(run, cupy_with_devices, monkeypatch):
    message = no_nvrtc(monkeypatch)
    _, text, _ = run("info")
    assert f"NVRTC not usable: {message}" in text
    assert "device 0 NVIDIA H200" in text
    assert "decode no: needs NVRTC" in text


def test_info_with_headers_of_another_major(run, cupy_with_devices, monkeypatch, tmp_path):
    message = headers_of_another_major(monkeypatch, tmp_path)
    assert f"NVRTC not usable: {message}" in run("info")[1]


def test_info_of_the_emulator(run, monkeypatch):
    no_cupy(monkeypatch)
    monkeypatch.setenv("PAGEDATTN_EMULATE", "1")
    _, text, _ = run("info")
    assert "latent yes, on arrays in host memory, emulated" in text
    assert "numpy yes, on arrays in host memory if asked for by name" in text
    monkeypatch.setitem(sys.modules, "tests.emulator.runtime", None)
    _, text, _ = run("info")
    assert "latent no: the kernel emulator lives in the repository's tests/emulator" in text


def test_info_of_the_emulator_beside_devices(run, monkeypatch, cupy_with_devices):
    monkeypatch.setenv("PAGEDATTN_EMULATE", "1")
    _, text, _ = run("info")
    assert "latent yes, on arrays in host memory, emulated device 0: yes, compiled for sm_90a device 1: no" in text


def test_info_with_two_cupys(run, monkeypatch):
    installed = [SimpleNamespace(name=f"cupy-cuda{major}x", version="14.2.0") for major in (12, 13)]
    monkeypatch.setattr("pagedattn.__main__.metadata.distributions", lambda: installed)
    assert "cupy-cuda12x and cupy-cuda13x exclude each other: keep one" in run("info")[1]


@pytest.mark.parametrize("tail", ["file/cache", "a" * 300])
def test_info_about_a_kernel_cache_that_cannot_be(run, monkeypatch, tmp_path, tail):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(tmp_path / tail))
    code, text, _ = run("info")
    assert code == 0
    assert ("kept in memory only: set PAGEDATTN_CACHE_DIR" in text) == tail.startswith("file")


def test_info_about_the_kernel_cache(run, monkeypatch, tmp_path):
    assert f"{tmp_path / 'cache'} 0 kernels, 0.0 MiB" in run("info")[1]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "decode-sm_90a-1.kernel").write_bytes(bytes(3 << 19))
    assert "1 kernels, 1.5 MiB" in run("info")[1]
    assert f"PAGEDATTN_CACHE_DIR {tmp_path / 'cache'} Folder" in run("info")[1]
    monkeypatch.setattr("pagedattn.__main__.os.access", lambda path, mode: False)
    assert "cannot be written, so kernels are kept in memory only: set PAGEDATTN_CACHE_DIR" in run("info")[1]
    monkeypatch.setattr("pagedattn.__main__.default_directory", lambda: None)
    assert "the user has no home, so kernels are kept in memory only" in run("info")[1]


# ---- explain -----------------------------------------------------------------------------------------------------


def test_explain_names_the_backend_and_why_not_the_others(run):
    status, text, _ = run("explain", "--num-heads", "32", "--kv-num-heads", "8", "--head-size", "128", "--arch", "cpu")
    assert status == 0
    assert "token_count=1, batch_size=1, num_heads=32, kv_num_heads=8, head_size=128" in text
    assert "backend: numpy (SdpaKernel=NUMPY_REFERENCE)" in text
    for row in ROWS[:-1]:
        assert f"not {row.name}: needs arrays on a CUDA device" in text


@pytest.mark.parametrize(
    ("arch", "compiled", "shown"),
    [
        ("sm_80", "sm_80", "decode_split_kv io=bf16,cache=bf16,head_size=128,"),
        ("sm_90", "sm_90a", "decode_heads_sm90 io=bf16,cache=bf16,head_size=128,heads=8,"),
        ("sm_121", "sm_121", "decode_split_kv io=bf16,cache=bf16,head_size=128,"),
    ],
)
def test_explain_names_the_kernels_that_a_gpu_would_run(run, monkeypatch, arch, compiled, shown):
    no_cupy(monkeypatch)
    no_nvrtc(monkeypatch)
    sizes = ("--num-heads", "64", "--kv-num-heads", "8", "--head-size", "128", "--batch", "64", "--context", "8192")
    status, text, error = run("explain", *sizes, "--arch", arch)
    assert status == 0, error
    assert f"kernels, compiled for {compiled} and chosen for 132 multiprocessors: write_cache io=bf16," in text
    assert shown in text


CALL = ("explain", "--num-heads", "8", "--head-size", "64", "--arch", "cpu")


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--batch", "3", "--query-len", "7", "--context", "100"], "token_count=21, batch_size=3"),
        (["--context", "100", "--block-size", "32"], "num_blocks=4, block_size=32, max_blocks_per_sequence=4"),
        (["--dtype", "float16"], "io_dtype=float16, cache_dtype=float16"),
        (["--cache-dtype", "int8"], "cache_dtype=int8, mode=separate, k_quant_type=PER_TENSOR"),
        (["--cache-dtype", "int4", "--per-channel"], "cache_dtype=int4, mode=separate, k_quant_type=PER_CHANNEL"),
        (["--cache-dtype", "float8e4m3fn"], "cache_dtype=float8e4m3fn"),
        (["--packed"], "mode=packed"),
        (["--layout", "LATENT", "--v-head-size", "32"], "kv_num_heads=1, head_size=64, v_head_size=32"),
        (["--layout", "LATENT", "--cache-dtype", "int4"], "mode=latent, k_quant_type=PER_TENSOR backend: numpy"),
        (["--window", "9", "--softcap", "30"], "softcap=30.0, local_window_size=9"),
        (["--metadata", "--query-len", "2"], "max_query_len_bound=2, max_kv_len_bound=4096"),
        (["--head-sink", "--query-positions"], "has_head_sink=True, has_query_positions=True"),
        (["--attention-bias", "--context", "50"], "bias_shape=(1, 1, 1, 50)"),
        (["--non-causal", "--lse", "--qk-output", "2"], "is_causal=False, qk_output=2, qk_dtype=float32, return_lse"),
    ],
)
def test_explain_takes_every_feature(run, flags, shown):
    status, text, error = run(*CALL, *flags)
    assert status == 0, error
    assert shown in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-num-heads", "3"], "num_heads: expected a multiple of kv_num_heads = 3, got 8.\n"),
        (["--block-size", "24"], "block_size (dimension 1) to be a power of two >= 16, got 24"),
        (["--batch", "0"], "--batch: expected a value >= 1, got 0."),
        (["--batch", "3000000000"], "--batch: expected a value <= 2147483647, got 3000000000."),
        (
            ["--batch", "65536", "--query-len", "65536", "--context", "65536"],
            "--batch: expected at most 2147483647 new tokens in all, got 65536 sequences with 65536 each.",
        ),
        (["--query-len", "-1"], "--query-len: expected a value >= 1, got -1."),
        (["--block-size", "0"], "--block-size: expected a value >= 1, got 0."),
        (
            ["--query-len", "9", "--context", "8"],
            "--context: expected a value >= 9, the new tokens included, got 8.",
        ),
        (["--arch", "hopper"], "--arch: expected cpu, or sm_ and a number as in sm_90, got 'hopper'."),
        (["--backend", "fastest"], "backend: expected one of "),
        (["--arch", "sm_75"], "needs compute capability 8.0, the device has 7.5"),
        (["--backend", "numpy", "--arch", "sm_90"], "backend numpy cannot serve this call: runs on arrays in host"),
    ],
)
def test_explain_refuses_as_a_call_would(run, flags, message):
    status, text, error = run(*CALL, *flags)
    assert (status, text) == (1, "")
    assert message in error


@pytest.mark.parametrize("command", ["explain", "warmup"])
def test_a_gpu_that_nothing_is_compiled_for_is_refused(run, cupy_with_devices, command):
    status, text, error = run(command, *CALL[1:-2], "--arch", "sm_999")
    assert (status, text) == (1, "")
    assert "NVRTC compiles for none of compute capability 99.x" in error


def test_explain_takes_the_keys_of_a_split(run):
    status, text, _ = run(*CALL, "--split-keys", "64")
    assert status == 0
    assert "split_keys=64" in text
    status, _, error = run(*CALL, "--split-keys", "24")
    assert status != 0
    assert "split_keys: expected a multiple of 16" in error


def test_warmup_is_for_gpus(run):
    status, text, error = run("warmup", *CALL[1:])
    assert (status, text) == (1, "")
    assert error == "--arch: expected a GPU: sm_ and a number as in sm_90, got 'cpu'.\n"


def test_explain_follows_the_environment(run, monkeypatch):
    monkeypatch.setenv("PAGEDATTN_BACKEND", "numpy")
    assert run(*CALL)[0] == 0
    assert run(*CALL, "--arch", "sm_90")[0] == 1


def test_a_command_is_required():
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


# ---- the operator ------------------------------------------------------------------------------------------------


def tensor(shape, dtype):
    """A torch tensor on a GPU, as far as it is looked at before the device is touched."""
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    attributes = {
        "shape": shape,
        "dtype": f"torch.{dtype}",
        "device": SimpleNamespace(type="cuda", index=0),
        "is_cuda": True,
        "get_device": lambda: 0,
        "stride": lambda: strides,
        "data_ptr": lambda: id(shape) * 256,
    }
    kind = type("Tensor", (SimpleNamespace,), {"__module__": "torch"})
    return kind(**attributes)


def call_on_a_gpu():
    return pagedattn.paged_attention(
        query=tensor((1, 128), "float16"),
        key=tensor((1, 64), "float16"),
        value=tensor((1, 64), "float16"),
        key_cache=tensor((2, 16, 1, 64), "float16"),
        value_cache=tensor((2, 16, 1, 64), "float16"),
        cumulative_sequence_length=tensor((2,), "int32"),
        past_seqlens=tensor((1,), "int32"),
        block_table=tensor((1, 2), "int32"),
        num_heads=2,
        kv_num_heads=1,
    )


@pytest.mark.parametrize("missing", [no_cupy, read_only_home, no_driver])
def test_a_call_says_what_is_missing(monkeypatch, missing):
    message = missing(monkeypatch)
    with pytest.raises(MissingDependencyError) as caught:
        call_on_a_gpu()
    assert message in str(caught.value)


def test_a_graph_says_that_there_is_no_gpu(monkeypatch):
    message = no_driver(monkeypatch)
    with pytest.raises(MissingDependencyError, match=message.split(":")[0]):
        GraphedStep(lambda: None)


def test_a_call_says_that_nvrtc_is_missing(monkeypatch, cupy_with_devices):
    message = no_nvrtc(monkeypatch)
    with pytest.raises(MissingDependencyError) as caught:
        call_on_a_gpu()
    assert message in str(caught.value)


def test_a_call_says_that_the_headers_are_of_another_major(monkeypatch, cupy_with_devices, tmp_path):
    message = headers_of_another_major(monkeypatch, tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        call_on_a_gpu()
    assert message in str(caught.value)


def test_numpy_arrays_need_none_of_it(monkeypatch):
    no_cupy(monkeypatch)
    caches = np.zeros((2, 1, 16, 1, 8), np.float32)
    rows = np.ones((1, 8), np.float32)
    result = pagedattn.paged_attention(
        rows, rows, rows, *caches, np.array([0, 1], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32),
        num_heads=1, kv_num_heads=1,
    )  # fmt: skip
    assert (result.output == 1).all()

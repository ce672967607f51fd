"""The compiler and its caches; nothing here needs a GPU, and what runs NVRTC is skipped where there is none."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedattn import dtypes
from pagedattn.errors import CompileError, MissingDependencyError, UnsupportedError
from pagedattn.jit import cuda, disk_cache
from pagedattn.jit.compiler import Compiler, arch_of
from pagedattn.jit.disk_cache import Binary, DiskCache
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.spec import Spec
from tests.support import tiny_kernel
from tests.support.tiny_kernel import KERNEL, KERNEL_TEXT, TinySpec, write_sources

ROOT = Path(__file__).resolve().parents[2]
SPEC = TinySpec(dtypes.BFLOAT16, 128, True)
ARCH = "sm_80"


@pytest.fixture
def nvrtc():
    try:
        return cuda.nvrtc()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(tmp_path):
    return write_sources(tmp_path / "sources")


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def entries(cache):
    return sorted(path for path in cache.directory.iterdir() if path.is_file()) if cache.directory.exists() else []


def test_compiles_once(nvrtc, sources, cache, caplog):
    compiler = Compiler(sources, cache)
    with caplog.at_level(logging.INFO, "pagedattn"):
        binary = compiler.compile(KERNEL, SPEC, ARCH)
    assert [record.message for record in caplog.records] == [f"compiling {KERNEL.expression(SPEC)} for {ARCH}"]
    assert binary.cubin.startswith(b"\x7fELF")
    assert "tiny" in binary.entry
    assert compiler.compile(KERNEL, TinySpec(dtypes.BFLOAT16, 128, True), ARCH) is binary
    assert compiler.compilations == 1
    assert [path.name for path in entries(cache)] == [compiler.entry_name(KERNEL, SPEC, ARCH)]


def test_the_next_compiler_finds_it_on_disk(nvrtc, sources, cache):
    first, second = Compiler(sources, cache), Compiler(sources, cache)
    assert first.compile(KERNEL, SPEC, ARCH) == second.compile(KERNEL, SPEC, ARCH)
    assert (first.compilations, second.compilations) == (1, 0)


def test_threads_wait_for_each_other(nvrtc, sources, cache):
    compiler, binaries = Compiler(sources, cache), []
    threads = [threading.Thread(target=lambda: binaries.append(compiler.compile(KERNEL, SPEC, ARCH))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.compilations == 1
    assert len({id(binary) for binary in binaries}) == 1
    assert len(binaries) == 8


def test_compile_many_keeps_order(nvrtc, sources, cache):
    compiler = Compiler(sources, cache)
    specs = [TinySpec(dtypes.FLOAT16, width, False) for width in (16, 32, 64)]
    binaries = compiler.compile_many([(KERNEL, spec) for spec in specs], ARCH, jobs=2)
    assert binaries == [compiler.compile(KERNEL, spec, ARCH) for spec in specs]
    assert compiler.compilations == 3


def test_the_entry_s_name_follows_everything_that_matters(nvrtc, sources, cache, tmp_path, monkeypatch):
    base = Compiler(sources, cache).entry_name(KERNEL, SPEC, ARCH)
    header = tmp_path / "changed" / "include" / "pagedattn" / "deep" / "sign.cuh"
    write_sources(tmp_path / "changed")
    header.write_text(header.read_text() + "// changed\n")
    names = {
        "nothing": Compiler(write_sources(tmp_path / "moved"), cache).entry_name(KERNEL, SPEC, ARCH),
        "arch": Compiler(sources, cache).entry_name(KERNEL, SPEC, "sm_90a"),
        "spec": Compiler(sources, cache).entry_name(KERNEL, TinySpec(dtypes.BFLOAT16, 128, False), ARCH),
        "options": Compiler(sources, cache, ["-lineinfo"]).entry_name(KERNEL, SPEC, ARCH),
        "header": Compiler(tiny_kernel.Sources(tmp_path / "changed"), cache).entry_name(KERNEL, SPEC, ARCH),
    }
    for attribute in ("version", "header_version"):
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, attribute, (99, 9))
            names[attribute] = Compiler(sources, cache).entry_name(KERNEL, SPEC, ARCH)
    assert names.pop("nothing") == base
    assert len({base, *names.values()}) == 1 + len(names)


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "renamed", "other text"])
def test_a_damaged_entry_is_built_again(nvrtc, sources, cache, damage, caplog):
    first = Compiler(sources, cache)
    binary = first.compile(KERNEL, SPEC, ARCH)
    other = TinySpec(dtypes.FLOAT16, 16, False)
    first.compile(KERNEL, other, ARCH)
    path = cache.directory / first.entry_name(KERNEL, SPEC, ARCH)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "half": whole[: len(whole) // 2],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "renamed": (cache.directory / first.entry_name(KERNEL, other, ARCH)).read_bytes(),
            "other text": b"pagedattn kernel 1\n",
        }[damage]
    )
    second = Compiler(sources, cache)
    assert second.compile(KERNEL, SPEC, ARCH) == binary
    assert second.compilations == 1
    assert path.read_bytes() == whole
    assert f"{path} is damaged" in caplog.text


def test_a_folder_that_cannot_be_made_falls_back_to_memory(nvrtc, sources, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    compiler = Compiler(sources, DiskCache(tmp_path / "file" / "cache"))
    for width in (16, 32):
        assert compiler.compile(KERNEL, TinySpec(dtypes.FLOAT16, width, False), ARCH).cubin
    assert caplog.text.count("kept in memory only") == 1


def test_a_folder_that_cannot_be_written_falls_back_to_memory(nvrtc, sources, cache, monkeypatch, caplog):
    # By a failing call, since permissions do not bind a test that runs as root.
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_cache.tempfile, "mkstemp", refuse)
    compiler = Compiler(sources, cache)
    assert compiler.compile(KERNEL, SPEC, ARCH) is compiler.compile(KERNEL, SPEC, ARCH)
    assert compiler.compilations == 1
    assert entries(cache) == []
    assert "Permission denied" in caplog.text


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(disk_cache.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    cache.put("x.kernel", Binary(b"code", "name"))
    assert list(cache.directory.iterdir()) == []


def test_the_folder_s_place(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(tmp_path / "mine"))
    assert DiskCache().directory == tmp_path / "mine"
    monkeypatch.delenv("PAGEDATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.default_directory() == tmp_path / "xdg" / "pagedattn"
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # makes its import fail
    assert disk_cache.default_directory() == tmp_path / "xdg" / "pagedattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert disk_cache.default_directory() == tmp_path / "home" / ".cache" / "pagedattn"
    assert list(tmp_path.iterdir()) == []


def test_a_compile_error_says_what_where_and_why(nvrtc, cache, tmp_path):
    sources = write_sources(tmp_path / "broken", KERNEL_TEXT.replace("p.factor;", "p.fctor;"))
    with pytest.raises(CompileError) as caught:
        Compiler(sources, cache).compile(KERNEL, SPEC, ARCH)
    error = caught.value
    assert (error.kernel, error.spec, error.arch) == ("tiny", str(SPEC), ARCH)
    line = KERNEL_TEXT.splitlines().index(next(text for text in KERNEL_TEXT.splitlines() if "p.factor" in text)) + 1
    assert f"kernels/tiny.cu({line}): error" in error.log
    assert "fctor" in error.log
    assert Path(error.source_path).read_text() == KERNEL.translation_unit(SPEC, sources)
    for part in ("tiny", str(SPEC), ARCH, "fctor", error.source_path):
        assert part in str(error)
    assert entries(cache) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int n; float factor;", "float factor; int n;", "TinyParams.n: int32_t of 4 bytes at offset 32"),
        ("long long stride; int count;", "int stride; int count;", "TinyParams.rows: Rows of 24 bytes at offset 8"),
        ("int n; float factor;", "int n; float factor; void* more;", "TinyParams: 40 bytes"),
        ("float factor;", "int factor;", "TinyParams.factor: float of 4 bytes"),
        ("int width; bool negate;", "bool negate; int width;", "tiny.instance(1): error"),
        ("int width; bool negate;", "int width; bool negate, more;", "tiny.spec(2): error"),
        ("int width; bool negate;", "int width;", "negate"),
    ],
)
def test_drift_between_the_sides_does_not_compile(nvrtc, cache, tmp_path, old, new, message):
    sources = write_sources(tmp_path / "drift", KERNEL_TEXT.replace(old, new, 1))
    with pytest.raises(CompileError) as caught:
        Compiler(sources, cache).compile(KERNEL, SPEC, ARCH)
    assert message in caught.value.log


def test_a_spec_without_fields(nvrtc, cache, tmp_path):
    @dataclass(frozen=True)
    class EmptySpec(Spec):
        pass

    text = "struct EmptySpec {};\nstruct P { int n; };\ntemplate <EmptySpec S>\n"
    text += "__global__ void tiny(const __grid_constant__ P p) {}\n"
    layout = tiny_kernel.params("P", n=tiny_kernel.i32)
    kernel = Kernel("tiny", EmptySpec, layout, lambda _: 32, lambda _: 0)
    assert Compiler(write_sources(tmp_path / "empty", text), cache).compile(kernel, EmptySpec(), ARCH).cubin


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_arch_of_known_devices(capability, arch):
    assert arch_of(capability, (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)) == arch


def test_a_minor_version_that_nvrtc_does_not_know_runs_an_older_one():
    assert arch_of((12, 1), (80, 90, 100, 120)) == "sm_120"
    assert arch_of((8, 9), (80, 86)) == "sm_86"


def test_devices_that_cannot_be_served():
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.0 or higher.*got 7\.5"):
        arch_of((7, 5), (75, 80))
    with pytest.raises(MissingDependencyError, match=r"compute capability 12\.x.*\(12\.0\).*pip install"):
        arch_of((12, 0), (80, 90))


WORKER = """
import hashlib, sys
from pagedattn import dtypes
from pagedattn.jit.compiler import Compiler
from pagedattn.jit.disk_cache import DiskCache
from pagedattn.jit.sources import Sources
from tests.support.tiny_kernel import KERNEL, TinySpec
compiler = Compiler(Sources(sys.argv[1]), DiskCache(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
binaries = [compiler.compile(KERNEL, TinySpec(dtypes.FLOAT16, width, False), "sm_80") for width in (16, 32)]
print(compiler.compilations, hashlib.sha256(b"".join(b.cubin for b in binaries)).hexdigest())
"""


def race(sources, cache, count):
    """What ``count`` processes have compiled that go to the cache at once: how many kernels, and a digest of all."""
    processes = [start(sources, cache) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [finish(process) for process in processes]


def start(sources, cache):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(sources.root), str(cache.directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    compilations, digest = output.split()
    return int(compilations), digest


def test_eight_processes_race_on_one_empty_folder(nvrtc, sources, cache):
    results = race(sources, cache, 8)
    assert len({digest for _, digest in results}) == 1
    assert len(entries(cache)) == 2  # and nothing left aside

    # A process that comes later compiles nothing.
    assert race(sources, cache, 1) == [(0, results[0][1])]


def test_eight_processes_meet_damaged_entries_at_once(nvrtc, sources, cache):
    """One entry is empty and one half as long: both are built again, to the same code."""
    ((compilations, digest),) = race(sources, cache, 1)
    assert compilations == 2
    whole = [path.read_bytes() for path in entries(cache)]
    for path, size in zip(entries(cache), (0, len(whole[1]) // 2), strict=True):
        path.write_bytes(path.read_bytes()[:size])
    results = race(sources, cache, 8)
    assert {result[1] for result in results} == {digest}
    assert sum(result[0] for result in results) >= 2
    assert [path.read_bytes() for path in entries(cache)] == whole
    assert race(sources, cache, 1) == [(0, digest)]


def test_a_compile_error_can_be_pickled():
    error = CompileError("decode", "decode<...>", "sm_90", "line 3: no", "decode.cu")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert (twin.kernel, twin.log) == ("decode", "line 3: no")

import shutil
import subprocess

import numpy as np
import pytest

from pagedattn.jit.params import boolean, f32, i32, i64, params, ptr, tensor_map, u32
from tests.support.tiny_kernel import PARAMS, ROWS

INNER = params("Inner", base=ptr, count=i32)
OUTER = params("Outer", flag=boolean, inner=INNER, scale=f32, size=i64, bits=u32)
STRUCTS = """
struct Inner { const void* base; int count; };
struct Outer { bool flag; Inner inner; float scale; long long size; unsigned bits; };
"""


def values(**changes):
    rows = ROWS.pack(data=16, stride=3, count=5)
    return {"out": 8, "rows": rows, "n": 7, "factor": 0.5, **changes}


def read(packed):
    return np.frombuffer(packed, PARAMS.numpy)[0]


def test_c_layout():
    assert (INNER.size, INNER.alignment, INNER.offsets) == (16, 8, {"base": 0, "count": 8})
    assert OUTER.offsets == {"flag": 0, "inner": 8, "scale": 24, "size": 32, "bits": 40}
    assert (OUTER.size, OUTER.numpy.itemsize) == (48, 48)
    assert params("Map", count=i32, map=tensor_map).offsets == {"count": 0, "map": 64}


def test_layout_agrees_with_numpy():
    inner = np.dtype([("base", np.uint64), ("count", np.int32)], align=True)
    outer = np.dtype([("flag", "?"), ("inner", inner), ("scale", "f4"), ("size", "i8"), ("bits", "u4")], align=True)
    assert OUTER.numpy.itemsize == outer.itemsize
    assert OUTER.offsets == {name: outer.fields[name][1] for name in outer.names}


def test_pack_reads_back():
    packed = read(PARAMS.pack(**values()))
    assert packed["out"] == 8
    assert packed["rows"]["data"] == 16
    assert packed["rows"]["stride"] == 3
    assert packed["rows"]["count"] == 5
    assert packed["n"] == 7
    assert packed["factor"] == 0.5


def test_padding_is_zero():
    assert OUTER.pack(flag=True, inner=INNER.pack(base=0, count=0), scale=0, size=0, bits=0) == b"\1" + bytes(47)


@pytest.mark.parametrize(
    "one", [1, True, np.int8(1), np.int32(1), np.int64(1), np.uint64(1), np.bool_(True), np.array(1), np.array(True)]
)
def test_every_spelling_of_an_integer_gives_the_same_bits(one):
    assert PARAMS.pack(**values(n=one)) == PARAMS.pack(**values(n=1))
    assert PARAMS.pack(**values(out=one)) == PARAMS.pack(**values(out=1))


@pytest.mark.parametrize(
    "one", [1, True, 1.0, np.float16(1), np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0)]
)
def test_every_spelling_of_a_float_gives_the_same_bits(one):
    assert PARAMS.pack(**values(factor=one)) == PARAMS.pack(**values(factor=1.0))


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), np.array(True)])
def test_every_spelling_of_a_bool(flag):
    assert params("Flag", flag=boolean).pack(flag=flag) == b"\1"


def test_infinities_and_nan_pass():
    assert read(PARAMS.pack(**values(factor=-np.inf)))["factor"] == -np.inf
    assert np.isnan(read(PARAMS.pack(**values(factor=float("nan"))))["factor"])


def test_none_is_the_null_pointer_only_for_pointers():
    assert PARAMS.pack(**values(out=None)) == PARAMS.pack(**values(out=0))
    assert read(PARAMS.pack(**values(out=None, n=np.bool_(True))))["out"] == 0
    for name in ("n", "factor", "rows"):
        with pytest.raises(TypeError, match=rf"TinyParams\.{name}: expected .*, got None"):
            PARAMS.pack(**values(**{name: None}))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"n": 2**31}, OverflowError),
        ({"n": -(2**31) - 1}, OverflowError),
        ({"n": np.int64(2**40)}, OverflowError),
        ({"n": 1.0}, TypeError),
        ({"n": np.float32(1)}, TypeError),
        ({"n": "1"}, TypeError),
        ({"n": np.array([1, 2])}, TypeError),
        ({"out": -1}, OverflowError),
        ({"out": np.zeros(3)}, TypeError),
        ({"factor": 1e39}, OverflowError),
        ({"factor": "1"}, TypeError),
        ({"rows": b"short"}, TypeError),
        ({"rows": {"data": 1}}, TypeError),
    ],
)
def test_a_value_that_does_not_fit_names_its_field(change, error):
    (name,) = change
    with pytest.raises(error, match=rf"TinyParams\.{name}: expected "):
        PARAMS.pack(**values(**change))


def test_names_are_checked():
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        PARAMS.pack(**values(), typo=1)
    incomplete = values()
    del incomplete["n"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'n'"):
        PARAMS.pack(**incomplete)
    with pytest.raises(TypeError):
        PARAMS.pack(1, 2, 3, 4)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ("float scale; long long size;", "long long size; float scale;", "Outer.scale: float of 4 bytes at offset 24"),
        ("float scale", "int scale", "Outer.scale: float of 4 bytes at offset 24"),
        ("int count", "float count", "Inner.count: int32_t of 4 bytes at offset 8"),
        ("int count", "int more, count", "Inner.count: int32_t of 4 bytes at offset 8"),
        ("unsigned bits;", "unsigned bits; int more[2];", "Outer: 48 bytes"),
        ("bool flag", "int flag", "Outer.flag: bool of 1 bytes at offset 0"),
    ],
)
def test_static_asserts_in_a_host_compiler(tmp_path, old, new, message):
    source = tmp_path / "layout.cpp"
    source.write_text(STRUCTS.replace(old, new, 1) + INNER.static_asserts() + OUTER.static_asserts())
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if message is None:
        assert run.returncode == 0, run.stderr
    else:
        assert run.returncode != 0
        assert message in run.stderr

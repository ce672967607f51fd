"""A throw-away kernel with sources of its own: what the tests of ``pagedattn.jit`` compile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedattn.dtypes import DType
from pagedattn.jit.kernel import Kernel
from pagedattn.jit.params import f32, i32, i64, params, ptr
from pagedattn.jit.sources import Sources
from pagedattn.jit.spec import Spec

KERNEL_TEXT = """\
#include <cuda_fp16.h>
#include <pagedattn/tiny.cuh>

struct Rows { const float* data; long long stride; int count; };
struct TinySpec { DType io; int width; bool negate; };
struct TinyParams { float* out; Rows rows; int n; float factor; };

template <TinySpec S>
__global__ void __launch_bounds__(128) tiny(const __grid_constant__ TinyParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  extern __shared__ float s_row[];
  if (i < p.n) {
    s_row[threadIdx.x] = p.rows.data[i * p.rows.stride] * p.factor;
    p.out[i] = signed_value<S.negate>(s_row[threadIdx.x]) + S.width + (S.io == DType::bf16 ? 0.5f : 0.f);
  }
}
"""

HEADERS = {
    "tiny.cuh": (
        "#pragma once\n#include <pagedattn/deep/sign.cuh>\nenum class DType { f16, bf16, f32, i8, f8e4m3, i4 };\n"
    ),
    "deep/sign.cuh": (
        "#pragma once\n"
        "template <bool N> __device__ float signed_value(float x) { if constexpr (N) return -x; else return x; }\n"
    ),
    "unused.cuh": "#pragma once\n",
}


@dataclass(frozen=True)
class TinySpec(Spec):
    io: DType
    width: int
    negate: bool


ROWS = params("Rows", data=ptr, stride=i64, count=i32)
PARAMS = params("TinyParams", out=ptr, rows=ROWS, n=i32, factor=f32)


def threads(spec: TinySpec) -> int:
    return 128


def shared_bytes(spec: TinySpec) -> int:
    return 4 * spec.width


KERNEL = Kernel("tiny", TinySpec, PARAMS, threads, shared_bytes)


def write_sources(root: Path, text: str = KERNEL_TEXT) -> Sources:
    """Write the kernel and its headers below ``root``."""
    files = {root / "kernels" / "tiny.cu": text, **{root / "include" / "pagedattn" / n: t for n, t in HEADERS.items()}}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Sources(root)

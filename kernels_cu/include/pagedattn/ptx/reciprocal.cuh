// 1 / x as the special function unit has it: off by an ulp or so, and subnormal numbers are zeros.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

__device__ __forceinline__ float reciprocal_approximate(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

}  // namespace ptx

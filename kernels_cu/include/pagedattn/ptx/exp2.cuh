// exp2 as the special function unit has it: subnormal results are zeros, the error is about 2 ulp.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

__device__ __forceinline__ float exp2_approximate(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

}  // namespace ptx

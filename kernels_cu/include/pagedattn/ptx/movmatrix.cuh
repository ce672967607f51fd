// movmatrix: an 8x8 matrix of 16-bit elements, spread over a warp, to its transpose.
//
// With g = lane / 4 and t = lane % 4 a lane passes elements (g, 2t) and (g, 2t + 1), and gets (2t, g) and (2t + 1, g).
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
#if defined(__CUDA_ARCH__)
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
#else
  const int g = threadIdx.x % kWarpSize / 4;
  const int t = threadIdx.x % 4;
  const uint32_t first = __shfl_sync(kFullWarp, pair, 8 * t + g / 2);
  const uint32_t second = __shfl_sync(kFullWarp, pair, 8 * t + 4 + g / 2);
  return (first >> (16 * (g % 2)) & 0xffffu) | (second >> (16 * (g % 2)) & 0xffffu) << 16;
#endif
}

}  // namespace ptx

// Constants and reductions.
#pragma once

#include <pagedattn/types.cuh>

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return -__int_as_float(0x7f800000); }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }

// Sum and maximum over aligned groups of kLanes lanes; every lane gets the result.
template <int kLanes> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kFullWarp, x, distance);
  return x;
}

template <int kLanes> __device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, distance));
  return x;
}

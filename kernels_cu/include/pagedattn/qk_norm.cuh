// QK-norm: x * rsqrt(mean(x^2) + epsilon) * weight over the channels of one head, in float32.
#pragma once

#include <pagedattn/math.cuh>

// A row is held by an aligned group of kLanes lanes, kCount elements each; absent channels hold 0.
template <int kLanes, int kCount>
__device__ __forceinline__ float inverse_root_mean_square(const float (&x)[kCount], int channels, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i] * x[i];
  return 1.0f / sqrtf(group_sum<kLanes>(sum) / static_cast<float>(channels) + epsilon);
}

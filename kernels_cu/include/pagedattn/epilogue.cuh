// Writing finished rows.
#pragma once

#include <pagedattn/ptx/convert.cuh>

struct Output {
  void* output;           // [token_count, num_heads * v_head_size] in the io type
  float* lse;             // [token_count, num_heads], or null
  const void* head_sink;  // [num_heads] in the io type, or null
  int num_heads;
};

// Start of the output row of a token and head.
template <class T>
__device__ __forceinline__ T* output_row(const Output& out, int token, int head, int v_head_size) {
  return static_cast<T*>(out.output) + (static_cast<int64_t>(token) * out.num_heads + head) * v_head_size;
}

__device__ __forceinline__ void store_lse(const Output& out, int token, int head, float lse) {
  if (out.lse != nullptr) out.lse[static_cast<int64_t>(token) * out.num_heads + head] = lse;
}

// Eight neighbouring channels.
template <class T> __device__ __forceinline__ void store_8(T* g_target, const float (&x)[8]) {
  Vector16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.word[i] = ptx::pack_2<T>(x[2 * i], x[2 * i + 1]);
  store_8(g_target, v);
}

// Two neighbouring channels of a row of `channels`, the first one even; one 4-byte store where the row allows. A row of odd
// width has no second one at its end.
template <class T> __device__ __forceinline__ void store_2(T* g_row, int channel, int channels, float first, float second) {
  const uint32_t both = ptx::pack_2<T>(first, second);
  T* g_target = g_row + channel;
  if (channel + 1 < channels && is_aligned(g_target, 4)) {
    *reinterpret_cast<uint32_t*>(g_target) = both;
  } else {
    g_target[0] = element_from_bits<T>(both);
    if (channel + 1 < channels) g_target[1] = element_from_bits<T>(both >> 16);
  }
}

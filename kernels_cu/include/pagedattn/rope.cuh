// Rotary embedding of one channel, from a row that holds the channels of a head in float32.
#pragma once

#include <pagedattn/math.cuh>

struct Rotary {
  const void* cos_cache;  // [max_seq_len, dim / 2], or null: no rotation
  const void* sin_cache;
  int max_seq_len;
  int dim;          // channels that rotate; even
  int offset;       // the first of them
  int interleaved;  // pairs (2i, 2i + 1) instead of (i, i + dim / 2)
};

// Row of the angle tables. A position outside them is clamped: its result is unspecified, the read is not.
__device__ __forceinline__ int64_t rotary_row(const Rotary& rotary, int64_t position) {
  const int64_t last = rotary.max_seq_len - 1;
  return (position < 0 ? 0 : position > last ? last : position) * (rotary.dim / 2);
}

// Value of `channel` after rotation. `table_row` is what rotary_row returned.
template <class T>
__device__ __forceinline__ float rotated(const Rotary& rotary, int64_t table_row, const float* row, int channel) {
  const int i = channel - rotary.offset;
  if (i < 0 || i >= rotary.dim) return row[channel];
  const int half = rotary.dim / 2;
  const bool is_second = rotary.interleaved ? i % 2 == 1 : i >= half;
  const int pair = rotary.interleaved ? i / 2 : is_second ? i - half : i;
  const int distance = rotary.interleaved ? 1 : half;
  const float cosine = to_float(static_cast<const T*>(rotary.cos_cache)[table_row + pair]);
  const float sine = to_float(static_cast<const T*>(rotary.sin_cache)[table_row + pair]);
  const float own = row[channel];
  const float other = row[is_second ? channel - distance : channel + distance];
  // Not contracted to a fused multiply-add: the bits are those of the plain formula, and a cache code never depends on
  // which processor stored it.
  const float straight = __fmul_rn(own, cosine);
  const float crossed = __fmul_rn(other, sine);
  return is_second ? __fadd_rn(straight, crossed) : __fsub_rn(straight, crossed);
}

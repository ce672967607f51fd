// Query rows in shared memory, ready for the tensor cores.
#pragma once

#include <pagedattn/kv_tile.cuh>
#include <pagedattn/math.cuh>
#include <pagedattn/ptx/convert.cuh>

// Shape of a tile of query rows: as wide as the padded key rows they meet.
template <DType IoType, DType Cache, int kHeadSize> struct QueryShape {
  static constexpr int kPadded = TileShape<Cache, kHeadSize>::kPadded;
  static constexpr int kStride = tile_row_stride(IoType, kPadded);
};

// Stores kRows rows and zeros beyond the head; `row_of(r)` is the address of row r, or null for a row of zeros.
//
// Returns what the dot products must be multiplied by to count the key scale. A scale per tensor is that factor. Scales
// per channel are folded into q, relative to the largest of them so that q stays in the range of its type.
// All threads of the CTA call it; the rows are there after a barrier. kAsync: rows that are stored as they are come by cp.async, and
// a wait for it must precede the barrier.
template <DType IoType, DType Cache, int kHeadSize, int kRows, int kThreads, bool kAsync = false, class RowOf>
__device__ __forceinline__ float load_query_tile(unsigned char* s_query, const KvCache& keys, int kv_head, const RowOf& row_of) {
  using Io = element_t<IoType>;
  using Shape = QueryShape<IoType, Cache, kHeadSize>;
  constexpr int kVectors = Shape::kPadded / 8;
  float factor = 1.0f;
  bool per_channel = false;
  if constexpr (is_quantized(Cache)) {
    per_channel = keys.scale_channel_stride != 0;
    if (per_channel) {
      factor = 0.0f;
      for (int c = threadIdx.x % kWarpSize; c < kHeadSize; c += kWarpSize) factor = fmaxf(factor, scale_of<Cache>(keys, kv_head, c));
      factor = group_max<kWarpSize>(factor);
    } else {
      factor = scale_of<Cache>(keys, kv_head, 0);
    }
  }
  for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int channel = i % kVectors * 8;
    const Io* g_row = static_cast<const Io*>(row_of(row));
    if (kAsync && !per_channel && g_row != nullptr && is_aligned(g_row, 16)) {
      const bool exists = channel < kHeadSize;
      ptx::cp_async<16>(s_query + row * Shape::kStride + 2 * channel, exists ? g_row + channel : g_row, exists ? 16 : 0);
      continue;
    }
    Vector16 v{};
    if (g_row != nullptr && channel < kHeadSize) v = load_8(g_row + channel);
    if (per_channel && channel < kHeadSize) {
      const float inverse = 1.0f / factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v.word[j] = ptx::pack_2<Io>(low_of<Io>(v.word[j]) * (scale_of<Cache>(keys, kv_head, channel + 2 * j) * inverse),
                                    high_of<Io>(v.word[j]) * (scale_of<Cache>(keys, kv_head, channel + 2 * j + 1) * inverse));
      }
    }
    *reinterpret_cast<Vector16*>(s_query + row * Shape::kStride + 2 * channel) = v;
  }
  return factor;
}

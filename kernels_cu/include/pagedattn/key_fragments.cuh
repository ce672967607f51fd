// Operands of attention for few query rows: keys and values are the M side of the tensor core, the query rows its N side.
//
//   scores^T [16 keys, 8 rows]      = K [16 keys, 16 channels] x q^T [16 channels, 8 rows]
//   output^T [16 channels, 8 rows] += V^T [16 channels, 16 keys] x p^T [16 keys, 8 rows]
//
// A group of up to eight query heads fills the tile, and each key and value is loaded, and widened, once for all rows.
// Tiles hold rows as they are stored. One ldmatrix reads a column group: 16 keys by 32 bytes, which is 16, 32 or 64
// channels, or steps of 16. It moves pairs of bytes, so a lane gets neighbouring channels of a narrow type; sums over channels
// may run in any order, and the rows of output^T may be any channels, so nothing is shuffled:
//
//   with g = lane / 4, t = lane % 4       16 bits                   8 bits             4 bits
//   K, step s: channels of the lane       16 s + 2t, +1, +8, +9     16 s + 4t .. + 3   32 (s / 2) + 8t + 2 (s % 2) + {0, 4, 1, 5}
//   V, step s: channels of rows g, g + 8  16 s + g, + 8             16 s + 2g, + 1     32 (s / 2) + 4g + 2 (s % 2), + 1
//
// Operands for quantized caches are float16 (widen.cuh).
#pragma once

#include <pagedattn/kv_tile.cuh>
#include <pagedattn/ptx/convert.cuh>
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mma.cuh>
#include <pagedattn/ptx/movmatrix.cuh>
#include <pagedattn/widen.cuh>

// Rows of a tile padded to whole column groups; copy_rows fills them.
template <DType Cache, int kChannels> struct ColumnTile {
  static constexpr int kRowBytes = row_bytes_of(Cache, kChannels);
  static constexpr int kGroups = ceil_div(kRowBytes, 32);
  static constexpr int kVectors = 2 * kGroups;
  static constexpr int kStride = 16 * (kVectors + 1);  // odd: eight rows start in eight different groups of four banks
  static constexpr int kStepsOfGroup = 16 / bits_of(Cache);
  static constexpr int kSteps = kGroups * kStepsOfGroup;
  static constexpr int kPadded = 16 * kSteps;  // channels
};

template <DType IoType, DType Cache, int kHeadSize> struct KeyFragments {
  static constexpr DType kCache = Cache;
  using Io = element_t<IoType>;
  static constexpr bool kCodes = is_quantized(Cache);
  using Math = element_t<kCodes ? DType::f16 : IoType>;  // of operands
  using Tile = ColumnTile<Cache, kHeadSize>;
  static constexpr int kSteps = Tile::kStepsOfGroup;  // of a column group

  // A operands of q . k: keys [key, key + 16), the steps of column group `group`.
  static __device__ __forceinline__ void keys(uint32_t (&a)[kSteps][4], const unsigned char* s_tile, int key, int group) {
    const int lane = threadIdx.x % kWarpSize;
    uint32_t r[4];
    ptx::ldmatrix_x4(r, s_tile + (key + lane % 16) * Tile::kStride + 32 * group + 16 * (lane / 16));
    keys(a, r);
  }
  // The same from words of key g, key g + 8, key g, key g + 8; a step's channels are those of the first two or of all of them.
  static __device__ __forceinline__ void keys(uint32_t (&a)[kSteps][4], const uint32_t (&r)[4]) {
    if constexpr (!kCodes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = r[i];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t low[kSteps], high[kSteps];
        widen<Cache, false>(r[2 * half], low);
        widen<Cache, false>(r[2 * half + 1], high);
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const int step = half * kSteps / 2 + i;
          a[step][0] = low[2 * i];
          a[step][1] = high[2 * i];
          a[step][2] = low[2 * i + 1];
          a[step][3] = high[2 * i + 1];
        }
      }
    }
  }

  // A operands of p . v: keys [key, key + 16), the steps of column group `group`.
  static __device__ __forceinline__ void values(uint32_t (&a)[kSteps][4], const unsigned char* s_tile, int key, int group) {
    const int lane = threadIdx.x % kWarpSize;
    uint32_t r[4];
    ptx::ldmatrix_x4_transposed(r, s_tile + (key + lane % 8 + 8 * (lane / 16)) * Tile::kStride + 32 * group + 16 * (lane / 8 % 2));
    values(a, r);
  }
  // The same from what ldmatrix gives of keys 2t, bytes 0..15; keys 2t, bytes 16..31; keys 2t + 8, 0..15; keys 2t + 8, 16..31.
  static __device__ __forceinline__ void values(uint32_t (&a)[kSteps][4], const uint32_t (&r)[4]) {
    if constexpr (!kCodes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = r[i];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t low[kSteps], high[kSteps];
        widen<Cache, true>(r[half], low);
        widen<Cache, true>(r[half + 2], high);
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const int step = half * kSteps / 2 + i;
          a[step][0] = low[2 * i];
          a[step][1] = low[2 * i + 1];
          a[step][2] = high[2 * i];
          a[step][3] = high[2 * i + 1];
        }
      }
    }
  }

  // Stores channels [8 vector, 8 vector + 8) of query row `row` as B operands of q . k: [row tile][step][lane] of four elements.
  static __device__ __forceinline__ void store_query(unsigned char* s_query, int row, int vector, const float (&x)[8]) {
    const auto place = [&](int step, int t) {
      return reinterpret_cast<uint32_t*>(s_query + 8 * ((row / 8 * Tile::kSteps + step) * kWarpSize + 4 * (row % 8) + t));
    };
    if constexpr (Cache == DType::i4) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t* s_lane = place(2 * (vector / 4) + s, vector % 4);
        s_lane[0] = ptx::pack_2<Math>(x[2 * s], x[2 * s + 4]);
        s_lane[1] = ptx::pack_2<Math>(x[2 * s + 1], x[2 * s + 5]);
      }
    } else if constexpr (kCodes) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t* s_lane = place(vector / 2, 2 * (vector % 2) + j);
        s_lane[0] = ptx::pack_2<Math>(x[4 * j], x[4 * j + 1]);
        s_lane[1] = ptx::pack_2<Math>(x[4 * j + 2], x[4 * j + 3]);
      }
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t) place(vector / 2, t)[vector % 2] = ptx::pack_2<Math>(x[2 * t], x[2 * t + 1]);
    }
  }

  // Channel of this lane's rows g (`half` 0) and g + 8 (`half` 1) of output^T.
  static __device__ __forceinline__ int value_channel(int step, int half) {
    const int g = threadIdx.x % kWarpSize / 4;
    if constexpr (Cache == DType::i4) return 32 * (step / 2) + 4 * g + 2 * (step % 2) + half;
    if constexpr (kCodes) return 16 * step + 2 * g + half;
    return 16 * step + g + 8 * half;
  }
};

// Query rows on their way from memory to `s_query` (KeyFragments::store_query). A CTA waits for these loads, so all of them are in flight
// at once, and ahead of those of the first keys.
template <class F, int kRows, int kHeadSize, int kThreads> struct QueryRows {
  using Io = typename F::Io;
  static constexpr int kVectors = F::Tile::kPadded / 8;
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : kVectors > 2 ? 4 : 2;  // side by side on a row
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kRounds = ceil_div(kRows, kRowsAtOnce);
  static_assert(kVectors <= 32, "a lane holds one vector of a row");
  Vector16 words[kRounds] = {};

  static __device__ __forceinline__ int channel() { return 8 * (threadIdx.x % kLanes); }
  static __device__ __forceinline__ int row(int round) { return round * kRowsAtOnce + static_cast<int>(threadIdx.x) / kLanes; }

  // Starts the loads. `row_of(r)` is the address of row r, or null for zeros.
  template <class RowOf> __device__ __forceinline__ void load(const RowOf& row_of) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const Io* g_row = row(r) < kRows ? static_cast<const Io*>(row_of(row(r))) : nullptr;
      if (g_row != nullptr && channel() < kHeadSize) words[r] = load_8(g_row + channel());
    }
  }
  __device__ __forceinline__ void store(unsigned char* s_query, float* s_factor, const KvCache& keys, int kv_head) const;
};

// Writes the rows. For a quantized cache (widen.cuh) `s_factor` gets the powers of two and, kRows further on, the scale that is left to
// multiply by. All threads call it; everything is there after a barrier.
template <class F, int kRows, int kHeadSize, int kThreads>
__device__ __forceinline__ void QueryRows<F, kRows, kHeadSize, kThreads>::store(unsigned char* s_query, float* s_factor,
                                                                              const KvCache& keys, int kv_head) const {
  const int vector = threadIdx.x % kLanes;
  const int channel = QueryRows::channel();
  const bool exists = channel < kHeadSize;
  float scale[8] = {};  // of the channels, relative to the largest of all
  float top_scale = 1.0f;
  const bool per_channel = F::kCodes && keys.scale_channel_stride != 0;
  if (per_channel) {
    top_scale = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      scale[j] = exists ? scale_of<F::kCache>(keys, kv_head, channel + j) : 0.0f;
      top_scale = fmaxf(top_scale, fabsf(scale[j]));
    }
    top_scale = group_max<kLanes>(top_scale);
    if (top_scale == 0.0f) top_scale = 1.0f;
    const float inverse_scale = 1.0f / top_scale;
#pragma unroll
    for (int j = 0; j < 8; ++j) scale[j] *= inverse_scale;
  } else if constexpr (F::kCodes) {
    top_scale = scale_of<F::kCache>(keys, kv_head, 0);
  }

#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int row = QueryRows::row(r);
    float x[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[2 * j] = low_of<Io>(words[r].word[j]);
      x[2 * j + 1] = high_of<Io>(words[r].word[j]);
    }
    if constexpr (F::kCodes) {
      float top = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (per_channel) x[j] *= scale[j];
        top = finite_top(top, x[j]);
      }
      const int exponent = exponent_of_row(group_max<kLanes>(top));
      const float inverse = power_of_two(-exponent);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= inverse;
      if (vector == 0 && row < kRows) {
        s_factor[row] = power_of_two(exponent);
        s_factor[kRows + row] = top_scale;
      }
    }
    if (row < kRows && vector < kVectors) F::store_query(s_query, row, vector, x);
  }
}

// Values that are not finite, in keys that only some rows of a tile admit.
//
// A row that does not admit a key has weight 0 for it, but a tensor core multiplies all the same, and 0 x NaN is NaN. Keys that
// no row admits are zeros in shared memory; what is left are the keys at the edge of a mask. There, and only if a value is
// infinite or NaN, the rows that do admit the key take it from here, one product at a time, and then its row is cleared.
#pragma once

#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/tile_math.cuh>

// The threads that share a tile of values, and meet: all of the CTA, or the first kThreads at a named barrier.
struct WholeCta {
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  static __device__ __forceinline__ bool any(bool own) { return __syncthreads_or(own); }
};
template <int kBarrier, int kThreads> struct Team {
  static __device__ __forceinline__ void sync() { ptx::named_barrier_sync(kBarrier, kThreads); }
  static __device__ __forceinline__ bool any(bool own) { return ptx::named_barrier_any(kBarrier, kThreads, own); }
};

// Whether a 32-bit word of stored values holds one that is not finite.
template <DType Cache> __device__ __forceinline__ bool is_strange(uint32_t word) {
  if constexpr (Cache == DType::f16 || Cache == DType::bf16) {
    constexpr uint32_t kExponent = Cache == DType::f16 ? 0x7c00u : 0x7f80u;
    return (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
  } else if constexpr (Cache == DType::f8e4m3) {
    return ((((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u)) != 0;  // all seven bits: NaN
  } else {
    return false;
  }
}

// Whether a row of the tile does; all lanes of a warp get the answer.
template <DType Cache, class Shape> __device__ __forceinline__ bool is_strange_row(const unsigned char* s_row) {
  bool found = false;
  for (int word = threadIdx.x % kWarpSize; word < 4 * Shape::kVectors; word += kWarpSize) {
    found |= is_strange<Cache>(reinterpret_cast<const uint32_t*>(s_row)[word]);
  }
  return __ballot_sync(kFullWarp, found) != 0;
}

// Adds own[m][half] times a row of values, without their scale, to those rows of acc that `admitted` (bit 2 m + half) names.
template <class F, DType Cache, int kMTiles, int kTiles>
__device__ __forceinline__ void add_row(float (&acc)[kMTiles][kTiles][4], const unsigned char* s_row, int group, int groups,
                                        const float (&own)[kMTiles][2], uint32_t admitted) {
  using Io = typename F::Io;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kTiles / F::kValueTiles; ++i) {
    if (group + i >= groups) break;
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // codes: column; else: n-tile. See Fragments::value_channel.
      uint32_t word[2];
      if constexpr (F::kCodes) {
        convert_codes_4<Io, Cache>(load_codes_4<Cache>(s_row, 32 * (group + i) + 4 * (2 * t + part)), word[0], word[1]);
      } else {
        word[0] = *reinterpret_cast<const uint32_t*>(s_row + 2 * (16 * (group + i) + 8 * part + 2 * t));
      }
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!(admitted >> (2 * m + half) & 1u)) continue;
          if constexpr (F::kCodes) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              acc[m][4 * i + n][2 * half + part] += own[m][half] * (n % 2 == 0 ? low_of<Io>(word[n / 2]) : high_of<Io>(word[n / 2]));
            }
          } else {
            acc[m][2 * i + part][2 * half] += own[m][half] * low_of<Io>(word[0]);
            acc[m][2 * i + part][2 * half + 1] += own[m][half] * high_of<Io>(word[0]);
          }
        }
      }
    }
  }
}

// Takes strange keys out of a value tile of kKeys keys, for the rows that admit them; all threads of `Meeting`, kWarps warps, call
// it, between the barrier that makes the tile visible and p . v.
//   `weight(m, half, key)`  weight of a key of the tile for a row of the lane; every lane of the warp asks
//   `admits(m, half, key)`  whether that row admits it
// acc holds `groups` groups of channels from `group` on.
template <class F, DType Cache, class Shape, int kKeys, int kWarps, class Meeting = WholeCta, int kMTiles, int kTiles, class Weight,
          class Admits>
__device__ __forceinline__ void take_strange_values(float (&acc)[kMTiles][kTiles][4], unsigned char* s_values, int group, int groups,
                                                    const Weight& weight, const Admits& admits) {
  if constexpr (Cache == DType::i8 || Cache == DType::i4) return;  // every code is a number
  const int warp = threadIdx.x / kWarpSize;
  bool found = false;
  for (int key = warp; key < kKeys; key += kWarps) found |= is_strange_row<Cache, Shape>(s_values + key * Shape::kStride);
  if (!Meeting::any(found)) return;

  for (int key = 0; key < kKeys; ++key) {
    const unsigned char* s_row = s_values + key * Shape::kStride;
    if (!is_strange_row<Cache, Shape>(s_row)) continue;
    float own[kMTiles][2];
    uint32_t admitted = 0;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[m][half] = weight(m, half, key);
        admitted |= admits(m, half, key) ? 1u << (2 * m + half) : 0u;
      }
    }
    add_row<F, Cache>(acc, s_row, group, groups, own, admitted);
  }
  Meeting::sync();  // every warp has taken what it needs from the strange rows
  for (int key = warp; key < kKeys; key += kWarps) {
    unsigned char* s_row = s_values + key * Shape::kStride;
    if (!is_strange_row<Cache, Shape>(s_row)) continue;
    __syncwarp();  // all lanes have read the row
    for (int byte = 16 * (threadIdx.x % kWarpSize); byte < 16 * Shape::kVectors; byte += 16 * kWarpSize) {
      *reinterpret_cast<Vector16*>(s_row + byte) = Vector16{};
    }
  }
  Meeting::sync();  // the cleared rows are visible
}

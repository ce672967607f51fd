// Values that are not finite, in keys that only some rows of a tile admit.
//
// A row that does not admit a key has weight 0 for it, but a tensor core multiplies all the same, and 0 x NaN is NaN. Keys that
// no row admits are zeros in shared memory; what is left are the keys at the edge of a mask. There, and only if a value is
// infinite or NaN, the rows that do admit the key take it from here, one product at a time, and then its row is cleared.
#pragma once

#include <pagedattn/tile_math.cuh>

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

// A stored value, without its scale.
template <class F, DType Cache> __device__ __forceinline__ float value_at(const unsigned char* s_row, int channel) {
  if constexpr (F::kCodes) {
    uint32_t low, high;
    convert_codes_4<typename F::Io, Cache>(load_codes_4<Cache>(s_row, channel / 4 * 4), low, high);
    const uint32_t pair = channel % 4 < 2 ? low : high;
    return channel % 2 == 0 ? low_of<typename F::Io>(pair) : high_of<typename F::Io>(pair);
  } else {
    return to_float(reinterpret_cast<const typename F::Io*>(s_row)[channel]);
  }
}

// Takes strange keys out of a value tile of kKeys keys, for the rows that admit them; all threads of a CTA of kWarps warps call
// it, between the barrier that makes the tile visible and p . v.
//   `weight(m, half, key)`  weight of a key of the tile for a row of the lane; every lane of the warp asks
//   `admits(m, half, key)`  whether that row admits it
// acc holds `groups` groups of channels from `group` on.
template <class F, DType Cache, class Shape, int kKeys, int kWarps, int kMTiles, int kTiles, class Weight, class Admits>
__device__ __forceinline__ void take_strange_values(float (&acc)[kMTiles][kTiles][4], unsigned char* s_values, int group, int groups,
                                                    const Weight& weight, const Admits& admits) {
  if constexpr (Cache == DType::i8 || Cache == DType::i4) return;  // every code is a number
  const int warp = threadIdx.x / kWarpSize;
  bool found = false;
  for (int key = warp; key < kKeys; key += kWarps) found |= is_strange_row<Cache, Shape>(s_values + key * Shape::kStride);
  if (!__syncthreads_or(found)) return;

  for (int key = 0; key < kKeys; ++key) {
    const unsigned char* s_row = s_values + key * Shape::kStride;
    if (!is_strange_row<Cache, Shape>(s_row)) continue;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float own = weight(m, half, key);
        if (!admits(m, half, key)) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (group + n / F::kValueTiles >= groups) break;
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const int channel = 8 * F::kValueTiles * group + F::value_channel(n, column);
            acc[m][n][2 * half + column] += own * value_at<F, Cache>(s_row, channel);
          }
        }
      }
    }
  }
  __syncthreads();  // every warp has taken what it needs from the strange rows
  for (int key = warp; key < kKeys; key += kWarps) {
    unsigned char* s_row = s_values + key * Shape::kStride;
    if (!is_strange_row<Cache, Shape>(s_row)) continue;
    for (int byte = 16 * (threadIdx.x % kWarpSize); byte < 16 * Shape::kVectors; byte += 16 * kWarpSize) {
      *reinterpret_cast<Vector16*>(s_row + byte) = Vector16{};
    }
  }
  __syncthreads();  // the cleared rows are visible
}

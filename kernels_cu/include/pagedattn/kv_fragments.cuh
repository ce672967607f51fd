// Tensor-core operands out of tiles in shared memory.
//
// A 16-bit tile is read with ldmatrix. A tile of codes has no such instruction; but the sum over channels in q . k may run
// in any order, and so may the columns of p . v, so a lane takes channels that lie side by side:
//
//   with g = lane / 4, t = lane % 4       16-bit tile                  tile of codes
//   q . k, step s of 16 channels          16 s + 2t, +1 and +8, +9     16 s + 4t .. 4t + 3
//   p . v, column c of n-tile j           8 j + c                      32 (j / 4) + 4 c + j % 4
//
// Four codes are one shared-memory access (two bytes for int4), and an accumulator row of four n-tiles is eight
// neighbouring channels of a lane. Codes are converted without their scale, exactly, to the io type.
#pragma once

#include <pagedattn/kv_tile.cuh>
#include <pagedattn/ptx/convert.cuh>
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mma.cuh>

// Four codes, one a byte as read by load_codes_4, to two pairs of the io type.
template <class Io, DType Cache> __device__ __forceinline__ void convert_codes_4(uint32_t codes, uint32_t& low, uint32_t& high) {
  constexpr bool kHalf = is_same<Io, __half>;
  if constexpr (Cache == DType::f8e4m3) {
    low = ptx::f8e4m3_to_half_2(codes);
    high = ptx::f8e4m3_to_half_2(codes >> 16);
    if constexpr (!kHalf) {  // three mantissa bits: the upper half of the float is exact
      low = ptx::byte_permute(__float_as_uint(low_of<__half>(low)), __float_as_uint(high_of<__half>(low)), 0x7632);
      high = ptx::byte_permute(__float_as_uint(low_of<__half>(high)), __float_as_uint(high_of<__half>(high)), 0x7632);
    }
  } else if constexpr (kHalf) {
    // 0x64nn is 1024 + nn. Codes come as 0..15 with zero point 8, or, with the sign bit flipped, 0..255 with zero point 128.
    constexpr uint32_t kZero = Cache == DType::i4 ? 0x64086408u : 0x64806480u;
    const uint32_t biased = Cache == DType::i4 ? codes : codes ^ 0x80808080u;
    low = ptx::subtract_2<Io>(ptx::byte_permute(biased, 0x64646464u, 0x4140), kZero);
    high = ptx::subtract_2<Io>(ptx::byte_permute(biased, 0x64646464u, 0x4342), kZero);
  } else if constexpr (Cache == DType::i4) {  // 0x43nn is 128 + nn for nn < 128
    low = ptx::subtract_2<Io>(ptx::byte_permute(codes, 0x43434343u, 0x4140), 0x43084308u);
    high = ptx::subtract_2<Io>(ptx::byte_permute(codes, 0x43434343u, 0x4342), 0x43084308u);
  } else {  // an int8 is its low seven bits minus 128 times its sign: (128 + low) - (128 or 256), and 0x4380 is 256
    const uint32_t first = ptx::byte_permute(codes, 0x43434343u, 0x4140);
    const uint32_t second = ptx::byte_permute(codes, 0x43434343u, 0x4342);
    low = ptx::subtract_2<Io>(first & 0xff7fff7fu, first & 0xff80ff80u);
    high = ptx::subtract_2<Io>(second & 0xff7fff7fu, second & 0xff80ff80u);
  }
}

// Codes of four channels, the first a multiple of four, as four bytes.
template <DType Cache> __device__ __forceinline__ uint32_t load_codes_4(const unsigned char* s_row, int channel) {
  if constexpr (Cache == DType::i4) {
    uint32_t codes = *reinterpret_cast<const uint16_t*>(s_row + channel / 2);
    codes = (codes | codes << 8) & 0x00ff00ffu;
    return (codes | codes << 4) & 0x0f0f0f0fu;
  } else {
    return *reinterpret_cast<const uint32_t*>(s_row + channel);
  }
}

// What the kernels that attend share: fragments of one io type, one cache type.
// p . v is of ValueType: codes take fewer instructions to float16 than to bfloat16, and weights of at most 2^8 fit it.
template <DType IoType, DType Cache, DType ValueType = IoType> struct Fragments {
  using Io = element_t<IoType>;
  using Value = element_t<ValueType>;
  static constexpr bool kCodes = is_quantized(Cache);
  // N-tiles of 8 columns that one values() call yields.
  static constexpr int kValueTiles = kCodes ? 4 : 2;

  // Where the lane's part of a tile's fragments starts. What a loop over fragments adds to it is the same in all lanes, so that it can
  // be part of the instruction.
  static __device__ __forceinline__ const unsigned char* query_lane(const unsigned char* s_tile, int stride) {
    const int lane = threadIdx.x % kWarpSize;
    return s_tile + (kCodes ? lane / 4 * stride + 8 * (lane % 4) : lane % 16 * stride + 16 * (lane / 16));
  }
  static __device__ __forceinline__ const unsigned char* keys_lane(const unsigned char* s_tile, int stride) {
    const int lane = threadIdx.x % kWarpSize;
    return s_tile + (kCodes ? lane / 4 * stride + row_bytes_of(Cache, 4 * (lane % 4))
                            : (lane % 8 + 8 * (lane / 16)) * stride + 16 * (lane / 8 % 2));
  }
  static __device__ __forceinline__ const unsigned char* values_lane(const unsigned char* s_tile, int stride) {
    const int lane = threadIdx.x % kWarpSize;
    return s_tile + (kCodes ? 2 * (lane % 4) * stride + row_bytes_of(Cache, 4 * (lane / 4)) : lane % 16 * stride + 16 * (lane / 16));
  }

  // A operand: 16 rows of queries from `row`, channels [16 step, 16 step + 16). Query tiles hold the io type.
  static __device__ __forceinline__ void query(uint32_t (&a)[4], const unsigned char* s_lane, int stride, int row, int step) {
    const unsigned char* s_first = s_lane + row * stride + 32 * step;
    if constexpr (!kCodes) {
      ptx::ldmatrix_x4(a, s_first);
    } else {
      // One word at a time: pairs would be loaded in one, and then moved for each product, whose operand has them in another order.
      const volatile uint32_t* s_upper = reinterpret_cast<const volatile uint32_t*>(s_first);
      const volatile uint32_t* s_lower = reinterpret_cast<const volatile uint32_t*>(s_first + 8 * stride);
      a[0] = s_upper[0];
      a[1] = s_lower[0];
      a[2] = s_upper[1];
      a[3] = s_lower[1];
    }
  }

  // A operand: 16 rows of probabilities from `row`, keys [16 step, 16 step + 16), in memory order of the io type.
  static __device__ __forceinline__ void probabilities(uint32_t (&a)[4], const unsigned char* s_tile, int stride, int row, int step) {
    const int lane = threadIdx.x % kWarpSize;
    ptx::ldmatrix_x4(a, s_tile + (row + lane % 16) * stride + 32 * step + 16 * (lane / 16));
  }

  // B operands of q . k: keys [key, key + 16) as two n-tiles, channels [16 step, 16 step + 16).
  static __device__ __forceinline__ void keys(uint32_t (&b)[2][2], const unsigned char* s_lane, int stride, int key, int step) {
    if constexpr (!kCodes) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, s_lane + key * stride + 32 * step);
      b[0][0] = r[0];
      b[0][1] = r[1];
      b[1][0] = r[2];
      b[1][1] = r[3];
    } else {
      const unsigned char* s_row = s_lane + key * stride;
      convert_codes_4<Io, Cache>(load_codes_4<Cache>(s_row, 16 * step), b[0][0], b[0][1]);
      convert_codes_4<Io, Cache>(load_codes_4<Cache>(s_row + 8 * stride, 16 * step), b[1][0], b[1][1]);
    }
  }

  // B operands of p . v: keys [key, key + 16), n-tiles [kValueTiles group, + kValueTiles).
  static __device__ __forceinline__ void values(uint32_t (&b)[kValueTiles][2], const unsigned char* s_lane, int stride, int key,
                                                int group) {
    if constexpr (!kCodes) {
      uint32_t r[4];
      ptx::ldmatrix_x4_transposed(r, s_lane + key * stride + 32 * group);
      b[0][0] = r[0];
      b[0][1] = r[1];
      b[1][0] = r[2];
      b[1][1] = r[3];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* s_row = s_lane + (key + 8 * half) * stride;
        const uint32_t even = load_codes_4<Cache>(s_row, 32 * group);
        const uint32_t odd = load_codes_4<Cache>(s_row + stride, 32 * group);
        // Bytes of channel i of both keys side by side: (even 0, odd 0, even 1, odd 1) and (even 2, odd 2, even 3, odd 3).
        convert_codes_4<Value, Cache>(ptx::byte_permute(even, odd, 0x5140), b[0][half], b[1][half]);
        convert_codes_4<Value, Cache>(ptx::byte_permute(even, odd, 0x7362), b[2][half], b[3][half]);
      }
    }
  }

  // Channel of accumulator element `column` (0 or 1) of n-tile `tile` in this lane.
  static __device__ __forceinline__ int value_channel(int tile, int column) {
    const int t = threadIdx.x % 4;
    return kCodes ? 32 * (tile / 4) + 4 * (2 * t + column) + tile % 4 : 8 * tile + 2 * t + column;
  }

  // Calls `use(channel, first, second)` for each pair of neighbouring channels that this lane has of one accumulator row;
  // `half` is 0 for row g, 1 for row g + 8. The first n-tile holds the channels from `base`.
  template <int kTiles, class Use>
  static __device__ __forceinline__ void for_channel_pairs(const float (&acc)[kTiles][4], int half, int base, const Use& use) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if constexpr (kCodes) {
          use(base + value_channel(n, column), acc[n][2 * half + column], acc[n + 1][2 * half + column]);
        } else {
          use(base + value_channel(n + column, 0), acc[n + column][2 * half], acc[n + column][2 * half + 1]);
        }
      }
    }
  }
};

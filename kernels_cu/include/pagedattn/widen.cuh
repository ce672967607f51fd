// Operands for products with a quantized cache. Codes become float16 without their scale, exactly. Query rows become float16 too:
// times the key scale of each channel relative to the largest of them, divided by a power of two that brings the row's largest
// channel near 2^13. So every finite row fits, and what is lost lies 2^37 below its largest channel.
#pragma once

#include <pagedattn/math.cuh>
#include <pagedattn/ptx/convert.cuh>

// The 32-bit word of a lane to registers of operands, as many as it holds pairs. `kTransposed` words hold the same channels of two
// keys, else neighbouring pairs of channels. A 16-bit word stays what it is.
template <DType Cache, bool kTransposed> __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[16 / bits_of(Cache)]) {
  if constexpr (Cache == DType::f8e4m3) {
    const uint32_t codes = kTransposed ? ptx::byte_permute(word, word, 0x3120) : word;
    ptx::f8e4m3_to_half_4(codes, pairs[0], pairs[1]);
  } else if constexpr (Cache == DType::i8) {  // with the sign bit flipped 0..255; 0x64nn is 1024 + nn
    const uint32_t biased = word ^ 0x80808080u;
    pairs[0] = ptx::subtract_2<__half>(ptx::byte_permute(biased, 0x64646464u, kTransposed ? 0x4240 : 0x4140), 0x64806480u);
    pairs[1] = ptx::subtract_2<__half>(ptx::byte_permute(biased, 0x64646464u, kTransposed ? 0x4341 : 0x4342), 0x64806480u);
  } else if constexpr (Cache == DType::i4) {  // nibbles i and i + 4; the upper one of a byte counts sixteenfold
    constexpr uint32_t kSixteenth = 0x2c002c00u, kMinus72 = 0xd480d480u;
    const uint32_t upper = word >> 8;
    pairs[0] = ptx::subtract_2<__half>(ptx::mask_or<0x000f000fu, 0x64006400u>(word), 0x64086408u);
    pairs[1] = ptx::multiply_add_half_2(ptx::mask_or<0x00f000f0u, 0x64006400u>(word), kSixteenth, kMinus72);
    pairs[2] = ptx::subtract_2<__half>(ptx::mask_or<0x000f000fu, 0x64006400u>(upper), 0x64086408u);
    pairs[3] = ptx::multiply_add_half_2(ptx::mask_or<0x00f000f0u, 0x64006400u>(upper), kSixteenth, kMinus72);
  } else {
    pairs[0] = word;
  }
}

// The larger one of `top` and |x|, if x is finite.
__device__ __forceinline__ float finite_top(float top, float x) {
  if (fabsf(x) < -negative_infinity()) top = fmaxf(top, fabsf(x));
  return top;
}

// 2^k, for k in [-126, 127].
__device__ __forceinline__ float power_of_two(int k) { return __uint_as_float(static_cast<uint32_t>(127 + k) << 23); }

// k of the power of two that a query row is divided by, whose largest finite channel is `top`: top / 2^k is in [2^13, 2^14), where
// 2^k and 2^-k allow it.
__device__ __forceinline__ int exponent_of_row(float top) {
  return max_of(-100, min_of(100, static_cast<int>(__float_as_uint(top) >> 23) - 127 - 13));
}

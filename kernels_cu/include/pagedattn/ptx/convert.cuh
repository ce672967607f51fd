// Conversions that have an instruction of their own: float pairs to 16-bit pairs, and cache codes to 16-bit pairs.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

// Two floats, each rounded to nearest even; `low` is first in memory.
template <class T> __device__ __forceinline__ uint32_t pack_2(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t packed;
  if constexpr (is_same<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#else
  return bits_of_element(from_float<T>(low)) | static_cast<uint32_t>(bits_of_element(from_float<T>(high))) << 16;
#endif
}

// Selects four of the eight bytes of (high, low) by the nibbles of `selector`.
__device__ __forceinline__ uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector);
#else
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7))) & 0xffu) << (8 * i);
  return result;
#endif
}

// x - y on two 16-bit lanes. Exact wherever this library uses it, so no rounding mode enters.
template <class T> __device__ __forceinline__ uint32_t subtract_2(uint32_t x, uint32_t y) {
#if defined(__CUDA_ARCH__)
  uint32_t difference;
  if constexpr (is_same<T, __half>) {
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
  } else {  // before sm_90 bfloat16 has a fused multiply-add only: -1 * y + x
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(y), "r"(0xbf80bf80u), "r"(x));
  }
  return difference;
#else
  return pack_2<T>(low_of<T>(x) - low_of<T>(y), high_of<T>(x) - high_of<T>(y));
#endif
}

// x * y + z on two float16 lanes; exact wherever this library uses it.
__device__ __forceinline__ uint32_t multiply_add_half_2(uint32_t x, uint32_t y, uint32_t z) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
#else
  return pack_2<__half>(low_of<__half>(x) * low_of<__half>(y) + low_of<__half>(z),
                        high_of<__half>(x) * high_of<__half>(y) + high_of<__half>(z));
#endif
}

// (x & mask) | bits in one instruction, which the compiler does not find for two constants.
template <uint32_t kMask, uint32_t kBits> __device__ __forceinline__ uint32_t mask_or(uint32_t x) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "n"(kMask), "n"(kBits));
  return result;
#else
  return (x & kMask) | kBits;
#endif
}

// Four numbers to float8 e4m3fn codes, to the nearest, ties to even; saturating at +-448, infinities as well, and of a NaN a NaN.
__device__ __forceinline__ uint32_t f8e4m3_4(const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t codes;
  asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, %2, %1; cvt.rn.satfinite.e4m3x2.f32 b, %4, %3; mov.b32 %0, {a, b}; }"
      : "=r"(codes) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return codes;
#else
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float magnitude = fminf(fabsf(x[i]), 448.0f);  // not of a NaN
    const uint32_t bits = __float_as_uint(magnitude);
    // Below 2^-6 codes are multiples of 2^-9; a full count carries into the first exponent. Else 20 of 23 mantissa bits go.
    uint32_t code = magnitude < 0x1p-6f ? static_cast<uint32_t>(rintf(magnitude * 512.0f))
                                        : ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
    if (x[i] != x[i]) code = 0x7f;
    codes |= (code | (__float_as_uint(x[i]) >> 24 & 0x80u)) << (8 * i);
  }
  return codes;
#endif
}

// Two float8 e4m3fn codes in the low 16 bits to two float16; exact, and NaN stays NaN.
__device__ __forceinline__ uint32_t f8e4m3_to_half_2(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{ .reg .b16 c; cvt.u16.u32 c, %1; cvt.rn.f16x2.e4m3x2 %0, c; }" : "=r"(halves) : "r"(codes));
  return halves;
#else
  // e4m3 has bias 7 and float16 bias 15: with the fields moved into place the value is 2^8 too small, subnormals included.
  const uint32_t spread = (codes & 0xffu) | (codes & 0xff00u) << 8;
  const uint32_t magnitude = (spread & 0x007f007fu) << 7;
  const uint32_t sign = (spread & 0x00800080u) << 8;
#if defined(__CUDA_ARCH__)
  uint32_t scaled;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(magnitude), "r"(0x5c005c00u));  // 256, 256
#else
  const uint32_t scaled = pack_2<__half>(256.0f * low_of<__half>(magnitude), 256.0f * high_of<__half>(magnitude));
#endif
  const uint32_t nan = (((spread & 0x007f007fu) + 0x00010001u) & 0x00800080u) * 255u;  // 0x7f80 where the code is NaN
  return scaled | nan | sign;
#endif
}

// The four float8 e4m3fn codes of a word to two pairs of float16.
__device__ __forceinline__ void f8e4m3_to_half_4(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(codes));
#else
  low = f8e4m3_to_half_2(codes);
  high = f8e4m3_to_half_2(codes >> 16);
#endif
}

}  // namespace ptx

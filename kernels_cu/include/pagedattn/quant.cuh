// Values to stored codes: one division by the scale, one rounding to nearest even.
//
// int8 and int4 take NaN to code 0, since an integer has none; float8 keeps it. Infinities saturate.
#pragma once

#include <pagedattn/math.cuh>
#include <pagedattn/ptx/convert.cuh>
#include <pagedattn/ptx/reciprocal.cuh>

// Not inlined: instructions that are seldom needed only hold up those that follow.
__device__ __noinline__ float divide(float x, float y) { return x / y; }

// Scales of eight neighbouring channels, and what makes dividing by them quick.
struct Divisors {
  float scale[8];
  float inverse[8];
  bool usual;  // far from where something in between could overflow or lose bits

  // `scale` is set.
  __device__ __forceinline__ void prepare() {
    float low = fabsf(scale[0]);
    float high = low;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float rough = ptx::reciprocal_approximate(scale[i]);
      inverse[i] = fmaf(fmaf(-scale[i], rough, 1.0f), rough, rough);
      low = fminf(low, fabsf(scale[i]));
      high = fmaxf(high, fabsf(scale[i]));
    }
    usual = low > 0x1p-60f && high < 0x1p60f;  // of a NaN that both pass over, the inverse is one, too
  }

  // x / scale[i], by the very steps that the compiler has for a division between numbers of usual size, so rounded as that is. Where the
  // quotient is of none, it saturates or is a zero of either sign.
  __device__ __forceinline__ float quotient(float x, int i) const {
    if (!usual) return divide(x, scale[i]);
    const float first = x * inverse[i];
    const float rounded = fmaf(fmaf(-first, scale[i], x), inverse[i], first);
    return fabsf(first) > 0x1p-60f && fabsf(first) < 0x1p60f ? rounded : first;
  }
};

__device__ __forceinline__ int encode_integer(float code, float low, float high) {
  return is_nan(code) ? 0 : static_cast<int>(rintf(fminf(fmaxf(code, low), high)));
}

// float8 e4m3fn bits of four quotients, saturating at +-448; of a NaN with the sign of x.
__device__ __forceinline__ uint32_t encode_f8e4m3_4(const float (&x)[4], const float (&quotient)[4]) {
  uint32_t signs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) signs[i] = __float_as_uint(is_nan(x[i]) ? x[i] : quotient[i]);
  const uint32_t all = ptx::byte_permute(ptx::byte_permute(signs[0], signs[1], 0x73), ptx::byte_permute(signs[2], signs[3], 0x73), 0x5410);
  return ptx::f8e4m3_4(quotient) | (all & 0x80808080u);
}

// Codes of eight channels that start on a multiple of eight, in the order of memory.
template <DType T> struct Codes8 {
  static_assert(is_quantized(T), "a 16-bit cache has no codes");
  static constexpr int kBytes = T == DType::i4 ? 4 : 8;
  uint32_t word[2] = {0, 0};

  __device__ __forceinline__ void encode(const float (&x)[8], const Divisors& divisors) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own[4], quotient[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] = x[4 * half + i];
        quotient[i] = divisors.quotient(own[i], 4 * half + i);
        if constexpr (T == DType::i4) {
          word[0] |= static_cast<uint32_t>(encode_integer(quotient[i], -8.0f, 7.0f) + 8) << (4 * (4 * half + i));
        } else if constexpr (T == DType::i8) {
          word[half] |= (static_cast<uint32_t>(encode_integer(quotient[i], -128.0f, 127.0f)) & 0xffu) << (8 * i);
        }
      }
      if constexpr (T == DType::f8e4m3) word[half] = encode_f8e4m3_4(own, quotient);
    }
  }

  // Stores them in a cache row, which starts at `g_row`, from `channel` on.
  __device__ __forceinline__ void store(element_t<T>* g_row, int channel) const {
    unsigned char* g_codes = reinterpret_cast<unsigned char*>(g_row) + row_bytes_of(T, channel);
    if (is_aligned(g_codes, 4)) {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) reinterpret_cast<uint32_t*>(g_codes)[i] = word[i];
    } else {
#pragma unroll
      for (int i = 0; i < kBytes; ++i) g_codes[i] = static_cast<unsigned char>(word[i / 4] >> (8 * (i % 4)));
    }
  }
};

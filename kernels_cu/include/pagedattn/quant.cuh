// Values to stored codes: one true division by the scale, one rounding to nearest even.
//
// int8 and int4 take NaN to code 0, since an integer has none; float8 keeps it. Infinities saturate.
#pragma once

#include <pagedattn/math.cuh>

__device__ __forceinline__ int encode_integer(float x, float scale, float low, float high) {
  const float code = x / scale;
  return is_nan(code) ? 0 : static_cast<int>(rintf(fminf(fmaxf(code, low), high)));
}

// float8 e4m3fn bits, saturating at +-448. Integer arithmetic, so every architecture and the CPU give the same byte.
__device__ __forceinline__ uint8_t encode_f8e4m3(float x, float scale) {
  const float quotient = x / scale;
  const uint32_t sign = (__float_as_uint(is_nan(x) ? x : quotient) >> 24) & 0x80u;
  if (is_nan(quotient)) return static_cast<uint8_t>(sign | 0x7fu);
  const float magnitude = fminf(fabsf(quotient), 448.0f);
  if (magnitude < 0.015625f) {  // below 2^-6 codes are multiples of 2^-9; a full count carries into the first exponent
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(magnitude * 512.0f)));
  }
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);  // 20 of 23 mantissa bits go; ties to even
  return static_cast<uint8_t>(sign | ((rounded >> 20) - ((127u - 7u) << 3)));
}

// Encodes eight channels that start on a multiple of eight; stores them at `g_row`, the start of the cache row.
// `scale(i)` is the scale of channel `channel + i`.
template <DType T, class Scale>
__device__ __forceinline__ void store_codes_8(element_t<T>* g_row, int channel, const float (&x)[8], const Scale& scale) {
  static_assert(is_quantized(T), "a 16-bit cache has no codes");
  uint32_t word[2] = {0, 0};
  constexpr int kBytes = T == DType::i4 ? 4 : 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (T == DType::i4) {
      word[0] |= static_cast<uint32_t>(encode_integer(x[i], scale(i), -8.0f, 7.0f) + 8) << (4 * i);
    } else if constexpr (T == DType::i8) {
      word[i / 4] |= (static_cast<uint32_t>(encode_integer(x[i], scale(i), -128.0f, 127.0f)) & 0xffu) << (8 * (i % 4));
    } else {
      word[i / 4] |= static_cast<uint32_t>(encode_f8e4m3(x[i], scale(i))) << (8 * (i % 4));
    }
  }
  unsigned char* g_codes = reinterpret_cast<unsigned char*>(g_row) + row_bytes_of(T, channel);
  if (is_aligned(g_codes, 4)) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) reinterpret_cast<uint32_t*>(g_codes)[i] = word[i];
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) g_codes[i] = static_cast<unsigned char>(word[i / 4] >> (8 * (i % 4)));
  }
}

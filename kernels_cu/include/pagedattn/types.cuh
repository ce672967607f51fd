// Element types, the few traits that kernels need, and raw 16-byte access.
//
// Kernels are compiled by NVRTC, which has no standard library. The same text also compiles as plain C++: whatever only
// a GPU has lives in ptx/, each instruction beside a portable meaning. A host compiler that runs kernels supplies
// threadIdx, blockIdx, the barriers and shuffles of a warp, and pagedattn_dynamic_shared_memory().
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
extern unsigned char* pagedattn_dynamic_shared_memory();
#endif

enum class DType { f16, bf16, f32, i8, f8e4m3, i4 };

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;

// NVRTC has no __is_same.
template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

template <DType T> struct Element;
template <> struct Element<DType::f16> { using type = __half; };
template <> struct Element<DType::bf16> { using type = __nv_bfloat16; };
template <> struct Element<DType::f32> { using type = float; };
template <> struct Element<DType::i8> { using type = int8_t; };
template <> struct Element<DType::f8e4m3> { using type = uint8_t; };
template <> struct Element<DType::i4> { using type = uint8_t; };  // two codes, element 2i in the low nibble

// The C type of a storage element: the unit of every stride.
template <DType T> using element_t = typename Element<T>::type;

__host__ __device__ constexpr bool is_quantized(DType type) {
  return type == DType::i8 || type == DType::f8e4m3 || type == DType::i4;
}

__host__ __device__ constexpr int bits_of(DType type) {
  return type == DType::f32 ? 32 : type == DType::i4 ? 4 : is_quantized(type) ? 8 : 16;
}

// Bytes of `channels` logical elements in a row.
__host__ __device__ constexpr int row_bytes_of(DType type, int channels) { return (channels * bits_of(type) + 7) / 8; }

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// One rounding, to nearest even.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

__device__ __forceinline__ uint16_t bits_of_element(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint16_t bits_of_element(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

template <class T> __device__ __forceinline__ T element_from_bits(uint32_t bits);
template <> __device__ __forceinline__ __half element_from_bits<__half>(uint32_t bits) {
  return __ushort_as_half(static_cast<uint16_t>(bits));
}
template <> __device__ __forceinline__ __nv_bfloat16 element_from_bits<__nv_bfloat16>(uint32_t bits) {
  return __ushort_as_bfloat16(static_cast<uint16_t>(bits));
}

// The CTA's dynamic shared memory; every kernel carves its regions from this one array.
template <class T> __device__ __forceinline__ T* shared_memory() {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  extern __shared__ __align__(128) unsigned char s_dynamic[];
  return reinterpret_cast<T*>(s_dynamic);
#else
  return reinterpret_cast<T*>(pagedattn_dynamic_shared_memory());
#endif
}

struct alignas(16) Vector16 { uint32_t word[4]; };

__device__ __forceinline__ bool is_aligned(const void* address, int bytes) {
  return (reinterpret_cast<uint64_t>(address) & static_cast<uint64_t>(bytes - 1)) == 0;
}

// Eight 16-bit elements. A caller may own memory that is only element aligned, so the wide access is tested for.
template <class T> __device__ __forceinline__ Vector16 load_8(const T* g_source) {
  static_assert(sizeof(T) == 2, "eight elements fill 16 bytes");
  Vector16 v;
  if (is_aligned(g_source, 16)) {
    v = *reinterpret_cast<const Vector16*>(g_source);
  } else {
    const uint16_t* g_bits = reinterpret_cast<const uint16_t*>(g_source);
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = g_bits[2 * i] | static_cast<uint32_t>(g_bits[2 * i + 1]) << 16;
  }
  return v;
}

template <class T> __device__ __forceinline__ void store_8(T* g_target, const Vector16& v) {
  static_assert(sizeof(T) == 2, "eight elements fill 16 bytes");
  if (is_aligned(g_target, 16)) {
    *reinterpret_cast<Vector16*>(g_target) = v;
  } else {
    uint16_t* g_bits = reinterpret_cast<uint16_t*>(g_target);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      g_bits[2 * i] = static_cast<uint16_t>(v.word[i]);
      g_bits[2 * i + 1] = static_cast<uint16_t>(v.word[i] >> 16);
    }
  }
}

// The two 16-bit elements of a word, in memory order.
template <class T> __device__ __forceinline__ float low_of(uint32_t word) { return to_float(element_from_bits<T>(word)); }
template <class T> __device__ __forceinline__ float high_of(uint32_t word) {
  return to_float(element_from_bits<T>(word >> 16));
}

// Device functions of one thread: memory hints, bits, conversions, fast math. Only what the C library does not declare.
//
// Approximate functions give the C library's result, which is at least as near. Conversions saturate and turn NaN into 0
// as the device's do, where C++ leaves them undefined.
#pragma once

#include <emulator/runtime.h>

#include <cmath>
#include <limits>

#define EMULATOR_INLINE inline __attribute__((always_inline))

// ---- memory

template <class T> EMULATOR_INLINE T __ldg(const T* address) { return *address; }
template <class T> EMULATOR_INLINE T __ldca(const T* address) { return *address; }
template <class T> EMULATOR_INLINE T __ldcg(const T* address) { return *address; }
template <class T> EMULATOR_INLINE T __ldcs(const T* address) { return *address; }
template <class T> EMULATOR_INLINE T __ldlu(const T* address) { return *address; }
template <class T> EMULATOR_INLINE T __ldcv(const T* address) { return *address; }
template <class T> EMULATOR_INLINE void __stwb(T* address, T value) { *address = value; }
template <class T> EMULATOR_INLINE void __stcg(T* address, T value) { *address = value; }
template <class T> EMULATOR_INLINE void __stcs(T* address, T value) { *address = value; }
template <class T> EMULATOR_INLINE void __stwt(T* address, T value) { *address = value; }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- control

[[noreturn]] inline void __trap() { __builtin_trap(); }
inline void __brkpt() {}
inline void __nanosleep(unsigned, const emulator::Place& place = emulator::Place::current()) { emulator::yield(place); }
inline void __builtin_assume(bool) {}
inline void __assume(bool) {}
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }

// ---- bits

EMULATOR_INLINE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
EMULATOR_INLINE unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
EMULATOR_INLINE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
EMULATOR_INLINE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
EMULATOR_INLINE long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
EMULATOR_INLINE double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

EMULATOR_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATOR_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATOR_INLINE int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
EMULATOR_INLINE int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
EMULATOR_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMULATOR_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, replicated
    result |= byte << (8 * i);
  }
  return result;
}
EMULATOR_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}
EMULATOR_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
EMULATOR_INLINE int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
EMULATOR_INLINE unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
EMULATOR_INLINE unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int8_t>(x >> (8 * i)) * static_cast<int8_t>(y >> (8 * i));
  }
  return sum;
}

// ---- float

namespace emulator {

// The device's conversion of a value already rounded: saturated, and NaN is 0.
template <class Int, class Float>
EMULATOR_INLINE Int to_integer(Float rounded) {
  const Float limit = std::ldexp(Float{1}, std::numeric_limits<Int>::digits);  // one past the largest, exactly
  if (rounded != rounded) return 0;
  if (rounded >= limit) return std::numeric_limits<Int>::max();
  if (rounded <= static_cast<Float>(std::numeric_limits<Int>::min())) return std::numeric_limits<Int>::min();
  return static_cast<Int>(rounded);
}

}  // namespace emulator

EMULATOR_INLINE int __float2int_rn(float x) { return emulator::to_integer<int>(nearbyintf(x)); }
EMULATOR_INLINE int __float2int_rz(float x) { return emulator::to_integer<int>(truncf(x)); }
EMULATOR_INLINE int __float2int_rd(float x) { return emulator::to_integer<int>(floorf(x)); }
EMULATOR_INLINE int __float2int_ru(float x) { return emulator::to_integer<int>(ceilf(x)); }
EMULATOR_INLINE unsigned __float2uint_rn(float x) { return emulator::to_integer<unsigned>(nearbyintf(x)); }
EMULATOR_INLINE unsigned __float2uint_rz(float x) { return emulator::to_integer<unsigned>(truncf(x)); }
EMULATOR_INLINE long long __float2ll_rn(float x) { return emulator::to_integer<long long>(nearbyintf(x)); }
EMULATOR_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }
EMULATOR_INLINE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
EMULATOR_INLINE float __ll2float_rn(long long x) { return static_cast<float>(x); }
EMULATOR_INLINE float __double2float_rn(double x) { return static_cast<float>(x); }
EMULATOR_INLINE int __double2int_rn(double x) { return emulator::to_integer<int>(nearbyint(x)); }

// The _rn forms are never contracted into a fused multiply-add.
__attribute__((optimize("fp-contract=off"))) inline float __fmul_rn(float x, float y) { return x * y; }
__attribute__((optimize("fp-contract=off"))) inline float __fadd_rn(float x, float y) { return x + y; }
__attribute__((optimize("fp-contract=off"))) inline float __fsub_rn(float x, float y) { return x - y; }
EMULATOR_INLINE float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
EMULATOR_INLINE float __fdiv_rn(float x, float y) { return x / y; }
EMULATOR_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMULATOR_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMULATOR_INLINE float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }

EMULATOR_INLINE float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
EMULATOR_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMULATOR_INLINE float __fdividef(float x, float y) { return x / y; }
EMULATOR_INLINE float __expf(float x) { return expf(x); }
EMULATOR_INLINE float __exp2f(float x) { return exp2f(x); }
EMULATOR_INLINE float __exp10f(float x) { return static_cast<float>(pow(10.0, static_cast<double>(x))); }
EMULATOR_INLINE float __logf(float x) { return logf(x); }
EMULATOR_INLINE float __log2f(float x) { return log2f(x); }
EMULATOR_INLINE float __log10f(float x) { return log10f(x); }
EMULATOR_INLINE float __powf(float x, float y) { return powf(x, y); }
EMULATOR_INLINE float __tanhf(float x) { return tanhf(x); }
EMULATOR_INLINE float __sinf(float x) { return sinf(x); }
EMULATOR_INLINE float __cosf(float x) { return cosf(x); }
EMULATOR_INLINE void __sincosf(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
EMULATOR_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// ---- min and max of the global namespace

template <class T> concept EmulatorInteger = std::is_integral_v<T>;
template <EmulatorInteger A, EmulatorInteger B>
EMULATOR_INLINE std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <EmulatorInteger A, EmulatorInteger B>
EMULATOR_INLINE std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
EMULATOR_INLINE float min(float a, float b) { return fminf(a, b); }
EMULATOR_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMULATOR_INLINE double min(double a, double b) { return fmin(a, b); }
EMULATOR_INLINE double max(double a, double b) { return fmax(a, b); }

// ---- addresses; a shared address is a number that only the runtime's functions read back

EMULATOR_INLINE size_t __cvta_generic_to_shared(const void* address) {
  return static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(emulator::current->shared));
}
EMULATOR_INLINE void* __cvta_shared_to_generic(size_t address) {
  return static_cast<char*>(emulator::current->shared) + address;
}
EMULATOR_INLINE size_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<size_t>(address); }

// Atomics. CTAs run on several threads of the host, so these are real ones; each returns the old value.
#pragma once

#include <emulator/runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace emulator {

template <class T>
concept Word = sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8;

template <size_t kBytes> struct Bits;
template <> struct Bits<2> { using type = uint16_t; };
template <> struct Bits<4> { using type = uint32_t; };
template <> struct Bits<8> { using type = uint64_t; };

// *address = change(*address), in one step.
template <Word T, class Change>
inline T atomic_update(T* address, Change change) {
  using B = typename Bits<sizeof(T)>::type;
  B* bits = reinterpret_cast<B*>(address);
  B old = __atomic_load_n(bits, __ATOMIC_SEQ_CST);
  while (true) {
    const T before = __builtin_bit_cast(T, old);
    const B after = __builtin_bit_cast(B, static_cast<T>(change(before)));
    if (__atomic_compare_exchange_n(bits, &old, after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return before;
  }
}

template <class T>
concept AtomicInteger = std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);
template <class T>
concept AtomicNumber = AtomicInteger<T> || std::is_same_v<T, float> || std::is_same_v<T, double>;

}  // namespace emulator

template <emulator::AtomicNumber T>
inline T atomicAdd(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) + static_cast<std::make_unsigned_t<T>>(value));
    } else {
      return old + value;
    }
  });
}
inline __half atomicAdd(__half* address, __half value) {
  const __half_raw old = emulator::atomic_update(reinterpret_cast<__half_raw*>(address), [&](__half_raw raw) {
    return static_cast<__half_raw>(__float2half_rn(__half2float(__half(raw)) + __half2float(value)));
  });
  return old;
}
inline __nv_bfloat16 atomicAdd(__nv_bfloat16* address, __nv_bfloat16 value) {
  const __nv_bfloat16_raw old =
      emulator::atomic_update(reinterpret_cast<__nv_bfloat16_raw*>(address), [&](__nv_bfloat16_raw raw) {
        return static_cast<__nv_bfloat16_raw>(
            __float2bfloat16_rn(__bfloat162float(__nv_bfloat16(raw)) + __bfloat162float(value)));
      });
  return old;
}
template <emulator::AtomicInteger T>
inline T atomicSub(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) - static_cast<std::make_unsigned_t<T>>(value));
  });
}
template <emulator::AtomicInteger T>
inline T atomicMin(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return old < value ? old : value; });
}
template <emulator::AtomicInteger T>
inline T atomicMax(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return old > value ? old : value; });
}
template <emulator::AtomicInteger T>
inline T atomicAnd(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return static_cast<T>(old & value); });
}
template <emulator::AtomicInteger T>
inline T atomicOr(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return static_cast<T>(old | value); });
}
template <emulator::AtomicInteger T>
inline T atomicXor(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return static_cast<T>(old ^ value); });
}
template <emulator::AtomicNumber T>
inline T atomicExch(T* address, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T) { return value; });
}
template <class T>
  requires std::is_integral_v<T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return emulator::atomic_update(address, [&](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return emulator::atomic_update(address, [&](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return emulator::atomic_update(address, [&](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

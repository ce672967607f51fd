// Hides from the compiler how a pointer came about: what is added to it then stays part of the instruction that uses it, where the
// compiler would regroup the sum and add up each address anew.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

template <class T> __device__ __forceinline__ T* opaque(T* pointer) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(pointer));
#endif
  return pointer;
}

// Hides where a value comes from, here and now: it is not computed anew wherever it is used, nor is what follows from it kept in
// registers from before a loop.
__device__ __forceinline__ int opaque(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

}  // namespace ptx

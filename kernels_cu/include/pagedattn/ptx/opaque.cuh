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

}  // namespace ptx

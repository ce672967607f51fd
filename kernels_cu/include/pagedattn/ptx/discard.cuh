// What has been read for the last time: L2 may forget it instead of writing it to memory.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

constexpr int kDiscardBytes = 128;

// The bytes from an address that is a multiple of kDiscardBytes, so many, become anything.
__device__ __forceinline__ void discard(void* g_line) {
#if defined(__CUDA_ARCH__)
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(g_line) : "memory");
#else
  for (int i = 0; i < kDiscardBytes; ++i) static_cast<unsigned char*>(g_line)[i] = 0xff;  // as float32 NaN
#endif
}

}  // namespace ptx

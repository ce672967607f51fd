// cp.async: global to shared memory without passing through registers. On a host the bytes arrive at the
// wait, and the target holds poison until then.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

// Copies `valid_bytes` (0..kBytes) and fills the rest with zeros; with 0 the source is not read.
template <int kBytes> __device__ __forceinline__ void cp_async(void* s_target, const void* g_source, int valid_bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes cp.async has");
#if defined(__CUDA_ARCH__)
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(s_target));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(g_source), "r"(valid_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(g_source), "n"(kBytes), "r"(valid_bytes)
                 : "memory");
  }
#else
  emulator::cp_async(s_target, g_source, kBytes, static_cast<uint32_t>(valid_bytes));
#endif
}

// Copies all of kBytes.
template <int kBytes> __device__ __forceinline__ void cp_async(void* s_target, const void* g_source) {
  static_assert(kBytes == 16, "the width of the fast path");
#if defined(__CUDA_ARCH__)
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(s_target));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(g_source) : "memory");
#else
  emulator::cp_async(s_target, g_source, kBytes, kBytes);
#endif
}

// Ends the group of copies that this thread has started.
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::cp_async_commit();
#endif
}

// Waits until at most kPending of this thread's latest groups are unfinished. Other threads see the bytes after a barrier.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
  emulator::cp_async_wait(kPending);
#endif
}

}  // namespace ptx

// Programmatic dependent launch: a kernel that is launched as one that waits itself may start while the kernel ahead of it in
// the stream still runs. On a host, and before sm_90, kernels run one after the other.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

// Returns when the kernel ahead has ended and its writes are visible. Every thread that reads them, or that writes what it
// reads, calls this first; and some CTA of every launch does, for the kernel's end stands for the end of the one ahead.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as every CTA of this one has said so or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ptx

// setmaxnreg: registers that the warps of a warpgroup give back, or take from what others gave back.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

// Registers of each thread when a CTA starts that has a multiprocessor for itself. Its warpgroups share out no more than that: who
// asks for more waits forever.
__host__ __device__ constexpr int start_registers(int threads) { return 65536 / threads / 8 * 8; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kRegisters> __device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#elif !defined(__CUDA_ARCH__)

template <int kRegisters> __device__ __forceinline__ void decrease_registers() {}
template <int kRegisters> __device__ __forceinline__ void increase_registers() {}

#endif

}  // namespace ptx

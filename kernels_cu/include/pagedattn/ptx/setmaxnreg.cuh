// setmaxnreg: registers that the warps of a warpgroup give back, or take from what others gave back.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kRegisters> __device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif

}  // namespace ptx

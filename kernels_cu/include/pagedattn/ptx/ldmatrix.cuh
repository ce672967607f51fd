// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory into fragments.
//
// Lane l passes the address of row l % 8 of matrix l / 8, 16 bytes each. With g = lane / 4 and t = lane % 4, register i of
// a lane then holds, of matrix i,
//   plain       elements (g, 2t) and (g, 2t + 1)
//   transposed  elements (2t, g) and (2t + 1, g)
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* s_row) {
#if defined(__CUDA_ARCH__)
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#else
  emulator::ldmatrix<4, false>(r, s_row);
#endif
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* s_row) {
#if defined(__CUDA_ARCH__)
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#else
  emulator::ldmatrix<4, true>(r, s_row);
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The way back, stmatrix: a lane has elements (g, 2t) and (g, 2t + 1) of matrix i in register i, and passes the address of row l % 8
// of matrix l / 8, or, transposed, of column l % 8, whose elements come to lie side by side.
__device__ __forceinline__ void stmatrix_x4(void* s_row, const uint32_t (&r)[4]) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_transposed(void* s_column, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_column));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

#endif

}  // namespace ptx

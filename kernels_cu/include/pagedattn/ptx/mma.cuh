// mma.sync m16n8k16: D[16, 8] += A[16, 16] * B[16, 8], 16-bit inputs, float32 sums.
//
// With g = lane / 4 and t = lane % 4 a lane holds (two elements a register)
//   a[0] (g, 2t..)      a[1] (g + 8, 2t..)      a[2] (g, 2t + 8..)      a[3] (g + 8, 2t + 8..)
//   b0   (2t.., g)      b1   (2t + 8.., g)
//   c[0] (g, 2t)        c[1] (g, 2t + 1)        c[2] (g + 8, 2t)        c[3] (g + 8, 2t + 1)
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(sizeof(T) == 2, "16-bit inputs");
#if defined(__CUDA_ARCH__)
  if constexpr (is_same<T, __half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  const uint32_t b[2] = {b0, b1};
  emulator::mma_m16n8<is_same<T, __half> ? emulator::Element::kF16 : emulator::Element::kBF16, 16>(c, a, b, c);
#endif
}

}  // namespace ptx

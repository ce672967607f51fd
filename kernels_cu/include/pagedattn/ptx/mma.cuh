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
  if constexpr (__is_same(T, __half)) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  const int g = (threadIdx.x % kWarpSize) / 4;
  const int t = threadIdx.x % 4;
  for (int q = 0; q < 4; ++q) {  // lanes 4r + q hold inner indices 2q, 2q + 1, 2q + 8, 2q + 9 of row or column r
    uint32_t row[4], column[2][2];
    for (int i = 0; i < 4; ++i) row[i] = __shfl_sync(kFullWarp, a[i], 4 * g + q);
    for (int j = 0; j < 2; ++j) {
      column[j][0] = __shfl_sync(kFullWarp, b0, 4 * (2 * t + j) + q);
      column[j][1] = __shfl_sync(kFullWarp, b1, 4 * (2 * t + j) + q);
    }
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          const uint32_t x = row[2 * half + i], y = column[j][half];
          c[2 * i + j] += low_of<T>(x) * low_of<T>(y) + high_of<T>(x) * high_of<T>(y);
        }
      }
    }
  }
#endif
}

}  // namespace ptx

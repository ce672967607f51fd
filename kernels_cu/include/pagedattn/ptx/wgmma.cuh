// wgmma: D[64, N] += A[64, 16] * B[16, N] by a warpgroup, 16-bit inputs, float32 sums, asynchronous.
//
// D: warp w of the warpgroup has rows 16 w .. 16 w + 15; in it, with g = lane / 4 and t = lane % 4, element 4 n + i of a lane is
// row g + 8 (i / 2), column 8 n + 2 t + i % 2. A in registers is laid out as the A operand of mma.m16n8k16 in mma.cuh.
//
// Operands in shared memory are described by 64 bits: start, two strides, and a swizzle that permutes the 16-byte units of
// a row of 128 (or 64) bytes, unit u of row r lying at u ^ (r % 8) (or u ^ (r / 2 % 4)). Eight such rows are an atom.
//   K-major   the 16 channels of k are 32 bytes of a row, the rows are m or n; `stride` bytes from 8 rows to the next 8
//   MN-major  a row holds 64 (or 32) values of n, the rows are k; `stride` bytes from 8 rows to the next 8, `leading` bytes
//             from one row's worth of n to the next
// Atoms start on a multiple of their size; a start inside of the first row moves along k.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

// Row of `row_bytes` = 128 or 64 bytes.
template <int kRowBytes> __device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared_address, int leading, int stride) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a swizzle that spreads 8 rows over all banks");
  return static_cast<uint64_t>(shared_address >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(kRowBytes == 128 ? 1 : 2) << 62;
}

// The descriptor of what lies `bytes` further on.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Registers written before this are seen by the products issued after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends the group of products that this warpgroup has issued.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point: it does not know that products are asynchronous.
template <int kCount> __device__ __forceinline__ void hold(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Operand lists of an accumulator, as constraints and as text.
#define PAGEDATTN_F8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define PAGEDATTN_F16(c, i) PAGEDATTN_F8(c, i), PAGEDATTN_F8(c, i + 8)
#define PAGEDATTN_F32(c, i) PAGEDATTN_F16(c, i), PAGEDATTN_F16(c, i + 16)
#define PAGEDATTN_C8(c) PAGEDATTN_F8(c, 0)
#define PAGEDATTN_C16(c) PAGEDATTN_F16(c, 0)
#define PAGEDATTN_C32(c) PAGEDATTN_F32(c, 0)
#define PAGEDATTN_C48(c) PAGEDATTN_C32(c), PAGEDATTN_F16(c, 32)
#define PAGEDATTN_C64(c) PAGEDATTN_C32(c), PAGEDATTN_F32(c, 32)
#define PAGEDATTN_C96(c) PAGEDATTN_C64(c), PAGEDATTN_F32(c, 64)
#define PAGEDATTN_C128(c) PAGEDATTN_C96(c), PAGEDATTN_F32(c, 96)
#define PAGEDATTN_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PAGEDATTN_D16 \
  PAGEDATTN_D8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PAGEDATTN_D32 \
  PAGEDATTN_D16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PAGEDATTN_D48 \
  PAGEDATTN_D32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PAGEDATTN_D64 \
  PAGEDATTN_D48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PAGEDATTN_D96 \
  PAGEDATTN_D64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PAGEDATTN_D128 \
  PAGEDATTN_D96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Both operands in shared memory, each K-major or MN-major.
#define PAGEDATTN_WGMMA_SS(N, TYPE, COUNT, A, B, P, TA, T)                                                          \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" P ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE  \
               " {" PAGEDATTN_D##COUNT "}, %" A ", %" B ", p, 1, 1, %" TA ", %" T "; }"                               \
               : PAGEDATTN_C##COUNT(c)                                                                                \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposed))
#define PAGEDATTN_WGMMA_RS(N, TYPE, COUNT, A0, A1, A2, A3, B, P, T)                                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" P ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE  \
               " {" PAGEDATTN_D##COUNT "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, %" T "; }"          \
               : PAGEDATTN_C##COUNT(c)                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed))

// Issues c = (accumulate ? c : 0) + a * b with both operands in shared memory: K-major or, transposed, MN-major.
template <class T, bool kTransposed, bool kTransposedA = false, int kCount>
__device__ __forceinline__ void wgmma(float (&c)[kCount], uint64_t a, uint64_t b, int accumulate) {
  constexpr int kN = 2 * kCount;
  constexpr bool kHalf = is_same<T, __half>;
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256, "the widths written out here");
  if constexpr (kN == 16 && kHalf) {
    PAGEDATTN_WGMMA_SS("16", "f16", 8, "8", "9", "10", "11", "12");
  } else if constexpr (kN == 16) {
    PAGEDATTN_WGMMA_SS("16", "bf16", 8, "8", "9", "10", "11", "12");
  } else if constexpr (kN == 32 && kHalf) {
    PAGEDATTN_WGMMA_SS("32", "f16", 16, "16", "17", "18", "19", "20");
  } else if constexpr (kN == 32) {
    PAGEDATTN_WGMMA_SS("32", "bf16", 16, "16", "17", "18", "19", "20");
  } else if constexpr (kN == 64 && kHalf) {
    PAGEDATTN_WGMMA_SS("64", "f16", 32, "32", "33", "34", "35", "36");
  } else if constexpr (kN == 64) {
    PAGEDATTN_WGMMA_SS("64", "bf16", 32, "32", "33", "34", "35", "36");
  } else if constexpr (kN == 96 && kHalf) {
    PAGEDATTN_WGMMA_SS("96", "f16", 48, "48", "49", "50", "51", "52");
  } else if constexpr (kN == 96) {
    PAGEDATTN_WGMMA_SS("96", "bf16", 48, "48", "49", "50", "51", "52");
  } else if constexpr (kN == 128 && kHalf) {
    PAGEDATTN_WGMMA_SS("128", "f16", 64, "64", "65", "66", "67", "68");
  } else if constexpr (kN == 128) {
    PAGEDATTN_WGMMA_SS("128", "bf16", 64, "64", "65", "66", "67", "68");
  } else if constexpr (kN == 192 && kHalf) {
    PAGEDATTN_WGMMA_SS("192", "f16", 96, "96", "97", "98", "99", "100");
  } else if constexpr (kN == 192) {
    PAGEDATTN_WGMMA_SS("192", "bf16", 96, "96", "97", "98", "99", "100");
  } else if constexpr (kN == 256 && kHalf) {
    PAGEDATTN_WGMMA_SS("256", "f16", 128, "128", "129", "130", "131", "132");
  } else if constexpr (kN == 256) {
    PAGEDATTN_WGMMA_SS("256", "bf16", 128, "128", "129", "130", "131", "132");
  }
}

// The same with A in registers.
template <class T, bool kTransposed, int kCount>
__device__ __forceinline__ void wgmma(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  constexpr int kN = 2 * kCount;
  constexpr bool kHalf = is_same<T, __half>;
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256, "the widths written out here");
  if constexpr (kN == 16 && kHalf) {
    PAGEDATTN_WGMMA_RS("16", "f16", 8, "8", "9", "10", "11", "12", "13", "14");
  } else if constexpr (kN == 16) {
    PAGEDATTN_WGMMA_RS("16", "bf16", 8, "8", "9", "10", "11", "12", "13", "14");
  } else if constexpr (kN == 32 && kHalf) {
    PAGEDATTN_WGMMA_RS("32", "f16", 16, "16", "17", "18", "19", "20", "21", "22");
  } else if constexpr (kN == 32) {
    PAGEDATTN_WGMMA_RS("32", "bf16", 16, "16", "17", "18", "19", "20", "21", "22");
  } else if constexpr (kN == 64 && kHalf) {
    PAGEDATTN_WGMMA_RS("64", "f16", 32, "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (kN == 64) {
    PAGEDATTN_WGMMA_RS("64", "bf16", 32, "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (kN == 96 && kHalf) {
    PAGEDATTN_WGMMA_RS("96", "f16", 48, "48", "49", "50", "51", "52", "53", "54");
  } else if constexpr (kN == 96) {
    PAGEDATTN_WGMMA_RS("96", "bf16", 48, "48", "49", "50", "51", "52", "53", "54");
  } else if constexpr (kN == 128 && kHalf) {
    PAGEDATTN_WGMMA_RS("128", "f16", 64, "64", "65", "66", "67", "68", "69", "70");
  } else if constexpr (kN == 128) {
    PAGEDATTN_WGMMA_RS("128", "bf16", 64, "64", "65", "66", "67", "68", "69", "70");
  } else if constexpr (kN == 192 && kHalf) {
    PAGEDATTN_WGMMA_RS("192", "f16", 96, "96", "97", "98", "99", "100", "101", "102");
  } else if constexpr (kN == 192) {
    PAGEDATTN_WGMMA_RS("192", "bf16", 96, "96", "97", "98", "99", "100", "101", "102");
  } else if constexpr (kN == 256 && kHalf) {
    PAGEDATTN_WGMMA_RS("256", "f16", 128, "128", "129", "130", "131", "132", "133", "134");
  } else if constexpr (kN == 256) {
    PAGEDATTN_WGMMA_RS("256", "bf16", 128, "128", "129", "130", "131", "132", "133", "134");
  }
}

// Four products, one after the other along k, in one statement: a compiler takes its time for each list of operands.
#define PAGEDATTN_WGMMA_STEP(N, TYPE, COUNT, A, B, P, T) \
  "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" PAGEDATTN_D##COUNT "}, " A ", %" B ", " P ", 1, 1, " T ";\n"
#define PAGEDATTN_WGMMA_4_SS(TYPE)                                                                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %40, 0;\n"                                                           \
               PAGEDATTN_WGMMA_STEP("64", TYPE, 32, "%32", "33", "p", "0, 0")                                        \
               PAGEDATTN_WGMMA_STEP("64", TYPE, 32, "%34", "35", "1", "0, 0")                                        \
               PAGEDATTN_WGMMA_STEP("64", TYPE, 32, "%36", "37", "1", "0, 0")                                        \
               PAGEDATTN_WGMMA_STEP("64", TYPE, 32, "%38", "39", "1", "0, 0") "}"                                    \
               : PAGEDATTN_C32(c)                                                                                    \
               : "l"(a), "l"(b), "l"(descriptor_at(a, 32)), "l"(descriptor_at(b, 32)), "l"(descriptor_at(a, 64)),    \
                 "l"(descriptor_at(b, 64)), "l"(descriptor_at(a, 96)), "l"(descriptor_at(b, 96)), "r"(accumulate))
#define PAGEDATTN_WGMMA_4_RS(TYPE)                                                                                  \
  asm volatile("{\n"                                                                                                \
               PAGEDATTN_WGMMA_STEP("256", TYPE, 128, "{%128, %129, %130, %131}", "144", "1", "1")                   \
               PAGEDATTN_WGMMA_STEP("256", TYPE, 128, "{%132, %133, %134, %135}", "145", "1", "1")                   \
               PAGEDATTN_WGMMA_STEP("256", TYPE, 128, "{%136, %137, %138, %139}", "146", "1", "1")                   \
               PAGEDATTN_WGMMA_STEP("256", TYPE, 128, "{%140, %141, %142, %143}", "147", "1", "1") "}"               \
               : PAGEDATTN_C128(c)                                                                                   \
               : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),   \
                 "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]),   \
                 "r"(a[3][2]), "r"(a[3][3]), "l"(b), "l"(descriptor_at(b, step)), "l"(descriptor_at(b, 2 * step)),   \
                 "l"(descriptor_at(b, 3 * step)))

// 64 x 64 sums over the 64 channels of rows of 128 bytes, both operands K-major in shared memory.
template <class T> __device__ __forceinline__ void wgmma_4(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (is_same<T, __half>) {
    PAGEDATTN_WGMMA_4_SS("f16");
  } else {
    PAGEDATTN_WGMMA_4_SS("bf16");
  }
}

// 64 x 256 sums, added to c: A in registers, B MN-major, `step` bytes from 16 of k to the next 16.
template <class T> __device__ __forceinline__ void wgmma_4(float (&c)[128], const uint32_t (&a)[4][4], uint64_t b, int step) {
  if constexpr (is_same<T, __half>) {
    PAGEDATTN_WGMMA_4_RS("f16");
  } else {
    PAGEDATTN_WGMMA_4_RS("bf16");
  }
}

#undef PAGEDATTN_F8
#undef PAGEDATTN_F16
#undef PAGEDATTN_F32
#undef PAGEDATTN_C8
#undef PAGEDATTN_C16
#undef PAGEDATTN_C32
#undef PAGEDATTN_C48
#undef PAGEDATTN_C64
#undef PAGEDATTN_C96
#undef PAGEDATTN_C128
#undef PAGEDATTN_D8
#undef PAGEDATTN_D16
#undef PAGEDATTN_D32
#undef PAGEDATTN_D48
#undef PAGEDATTN_D64
#undef PAGEDATTN_D96
#undef PAGEDATTN_D128
#undef PAGEDATTN_WGMMA_SS
#undef PAGEDATTN_WGMMA_RS
#undef PAGEDATTN_WGMMA_STEP
#undef PAGEDATTN_WGMMA_4_SS
#undef PAGEDATTN_WGMMA_4_RS

#endif

}  // namespace ptx

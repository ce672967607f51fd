// One warp: C += A B with A [16, k] and B^T [8, k], both row-major in shared memory, read by ldmatrix.
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mma.cuh>

struct TensorCoreSpec { int element; int k; };  // element: emulator::Element

struct TensorCoreParams {
  const void* a;  // [16, k]
  const void* b;  // [8, k]
  void* c;        // [16, 8], float or int
};

template <TensorCoreSpec S>
__global__ void __launch_bounds__(32) tensor_core(const __grid_constant__ TensorCoreParams p) {
  constexpr emulator::Element kElement = static_cast<emulator::Element>(S.element);
  constexpr bool kWide = kElement == emulator::Element::kF16 || kElement == emulator::Element::kBF16;
  constexpr int kWords = S.k * (kWide ? 2 : 1) / 4;  // of a row: 4 or 8
  using Sum = typename std::conditional_t<kElement == emulator::Element::kS8, int, float>;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  __shared__ alignas(16) uint32_t s_a[16][kWords], s_b[8][kWords];
  for (int i = lane; i < 16 * kWords; i += 32) s_a[i / kWords][i % kWords] = static_cast<const uint32_t*>(p.a)[i];
  for (int i = lane; i < 8 * kWords; i += 32) s_b[i / kWords][i % kWords] = static_cast<const uint32_t*>(p.b)[i];
  __syncwarp();
  uint32_t a[4] = {}, b[2] = {};
  if constexpr (kWords == 8) {
    ptx::ldmatrix_x4(a, &s_a[lane % 16][lane / 16 * 4]);
    emulator::ldmatrix<2, false>(b, &s_b[lane % 8][lane / 8 % 2 * 4]);
  } else {
    emulator::ldmatrix<2, false>(a, &s_a[lane % 16][0]);
    emulator::ldmatrix<1, false>(b, &s_b[lane % 8][0]);
  }
  Sum* target = static_cast<Sum*>(p.c);
  Sum c[4];
  for (int i = 0; i < 4; ++i) c[i] = target[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  if constexpr (kElement == emulator::Element::kF16 && S.k == 16) {
    ptx::mma_m16n8k16<__half>(c, a, b[0], b[1]);
  } else if constexpr (kElement == emulator::Element::kBF16 && S.k == 16) {
    ptx::mma_m16n8k16<__nv_bfloat16>(c, a, b[0], b[1]);
  } else {
    emulator::mma_m16n8<kElement, S.k>(c, a, b, c);
  }
  for (int i = 0; i < 4; ++i) target[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

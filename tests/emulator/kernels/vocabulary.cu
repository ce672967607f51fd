// A use of each word of the CUDA vocabulary whose right answer the test computes with NumPy.
#include <cuda_fp16.h>

struct VocabularySpec { int what; };
struct VocabularyParams { const float* source; float* target; int count; };

template <VocabularySpec S>
__global__ void __launch_bounds__(128) vocabulary(const __grid_constant__ VocabularyParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ float s_tile[128];
  if constexpr (S.what == 0) {
    s_tile[threadIdx.x] = p.source[i];
    __syncthreads();
    p.target[i] = s_tile[127 - threadIdx.x];
  } else {
    float x = p.source[i];
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    p.target[i] = x;
  }
}

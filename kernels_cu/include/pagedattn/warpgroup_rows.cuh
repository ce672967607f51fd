// What a warpgroup does with the 64 rows of its products between them: scores to weights, weights to operands; and the buffers that
// both products read from.
//
// The layout of an accumulator is wgmma's (ptx/wgmma.cuh): a lane has two rows of its warp's sixteen, lane / 4 and that + 8, and
// four lanes share a row.
#pragma once

#include <pagedattn/math.cuh>
#include <pagedattn/ptx/convert.cuh>
#include <pagedattn/ptx/exp2.cuh>
#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/softmax.cuh>

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;

// The CTA's dynamic shared memory from a multiple of 1024 bytes on, where the pattern of a swizzle starts.
__device__ __forceinline__ unsigned char* swizzled_shared_memory() {
  unsigned char* s_base = shared_memory<unsigned char>();
  return s_base += -ptx::shared_address(s_base) & 1023u;
}

// A stage of a ring of buffers, and the parity of its barriers in this round.
template <int kStages> struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Two rows of a lane.
struct RowPair {
  float reference[2] = {negative_infinity(), negative_infinity()};  // near the maximum of the scores, as they come
  float sum[2] = {0.0f, 0.0f};                                      // of this lane's weights
};

// Row of the warpgroup's 64 that `half` of a lane is.
__device__ __forceinline__ int row_of_lane(int half) {
  return threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4 + 8 * half;
}

// Factor for what was accumulated against the reference `before` when it moves to `after`.
__device__ __forceinline__ float factor_of_move(float before, float after, float factor) {
  return after == negative_infinity() ? 1.0f : ptx::exp2_approximate((before - after) * factor);
}

// Scores to weights. `factor` takes a score of a row to base 2. Returns whether what was accumulated before must be scaled.
template <int kCount>
__device__ __forceinline__ bool weigh(float (&scores)[kCount], RowPair& rows, const float (&factor)[2], float (&rescale)[2]) {
  float top[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half][0] = fmaxf(scores[2 * half], scores[2 * half + 1]);
    top[half][1] = fmaxf(scores[2 * half + 4], scores[2 * half + 5]);
#pragma unroll
    for (int i = 8; i < kCount; i += 8) {
      top[half][0] = fmaxf(top[half][0], fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
      top[half][1] = fmaxf(top[half][1], fmaxf(scores[i + 2 * half + 4], scores[i + 2 * half + 5]));
    }
    top[half][0] = group_max<4>(fmaxf(top[half][0], top[half][1]));
  }
  const bool far = (top[0][0] - rows.reference[0]) * factor[0] > kSlack || (top[1][0] - rows.reference[1]) * factor[1] > kSlack;
  const bool moved = __any_sync(kFullWarp, far);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = fmaxf(rows.reference[half], top[half][0]);
      rescale[half] = factor_of_move(rows.reference[half], reference, factor[half]);
      rows.reference[half] = reference;
      rows.sum[half] *= rescale[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float shift = rows.reference[half] == negative_infinity() ? 0.0f : -rows.reference[half] * factor[half];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      scores[i] = ptx::exp2_approximate(fmaf(scores[i], factor[half], shift));
      scores[i + 1] = ptx::exp2_approximate(fmaf(scores[i + 1], factor[half], shift));
      sum[0] += scores[i];
      sum[1] += scores[i + 1];
    }
    rows.sum[half] += sum[0] + sum[1];
  }
  return moved;
}

// Scales the rows of an accumulator.
template <int kCount> __device__ __forceinline__ void scale_rows(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor[i / 2 % 2];
}

// Weights of a tile as A operands of p . v, rounded to their type.
template <class Math, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[kCount / 8][4], const float (&weights)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) p[i / 4][i % 4] = ptx::pack_2<Math>(weights[2 * i], weights[2 * i + 1]);
}

// Exchanges within four lanes: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void transpose_4(uint32_t (&word)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = t & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t sent = upper ? word[i] : word[i + distance];
      const uint32_t received = __shfl_xor_sync(kFullWarp, sent, distance);
      if (upper) {
        word[i] = received;
      } else {
        word[i + distance] = received;
      }
    }
  }
}

// The two products of attention on tensor cores, and softmax between them, for one warp.
//
// A warp holds kMTiles tiles of 16 query rows. With g = lane / 4 and t = lane % 4 a lane has rows g and g + 8 of each, and of
// a 16-key block two n-tiles: element i of n-tile n is row g + 8 (i / 2), key 8 n + 2 t + i % 2.
#pragma once

#include <pagedattn/kv_fragments.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/softmax.cuh>

__device__ __forceinline__ int row_in_tile(int element) { return threadIdx.x % kWarpSize / 4 + 8 * (element / 2); }
__device__ __forceinline__ int key_in_tile(int n_tile, int element) { return 8 * n_tile + 2 * (threadIdx.x % 4) + element % 2; }

// scores = q . k of 8 kNTiles keys from `key`. `query_of(m, step, a)` yields the A operand, `s_lane` is F::keys_lane of the tile,
// and `between(step)` is called among the products of each step.
template <class F, int kSteps, int kUnrolled = kSteps <= 8 ? kSteps : 4, int kMTiles, int kNTiles, class QueryOf, class Between>
__device__ __forceinline__ void multiply_keys(float (&scores)[kMTiles][kNTiles][4], const QueryOf& query_of,
                                              const unsigned char* s_lane, int stride, int key, const Between& between) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
    }
  }
  // A query kept in registers needs constant indices; a wide one comes from shared memory, and would only pile up loads.
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) query_of(m, step, a[m]);
#pragma unroll
    for (int block = 0; block < kNTiles / 2; ++block) {
      uint32_t b[2][2];
      F::keys(b, s_lane, stride, key + 16 * block, step);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<typename F::Io>(scores[m][2 * block], a[m], b[0][0], b[0][1]);
        ptx::mma_m16n8k16<typename F::Io>(scores[m][2 * block + 1], a[m], b[1][0], b[1][1]);
      }
    }
    between(step);
  }
}

// acc += p . v over the keys of one 16-key block, for one group of value channels; tile `at` of acc is its first. `s_lane` is
// F::values_lane of the tile.
template <class F, int kMTiles, int kTiles>
__device__ __forceinline__ void multiply_value_group(float (&acc)[kMTiles][kTiles][4], const uint32_t (&p)[kMTiles][4],
                                                     const unsigned char* s_lane, int stride, int key, int group, int at) {
  uint32_t b[F::kValueTiles][2];
  F::values(b, s_lane, stride, key, group);
#pragma unroll
  for (int n = 0; n < F::kValueTiles; ++n) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<typename F::Value>(acc[m][at + n], p[m], b[n][0], b[n][1]);
    }
  }
}

// The same for all groups that acc has: from `group` on, as far as the tile has any, below `groups`.
template <class F, int kMTiles, int kTiles>
__device__ __forceinline__ void multiply_values(float (&acc)[kMTiles][kTiles][4], const uint32_t (&p)[kMTiles][4],
                                                const unsigned char* s_lane, int stride, int key, int group, int groups) {
#pragma unroll
  for (int i = 0; i < kTiles / F::kValueTiles; ++i) {
    if (group + i >= groups) break;
    multiply_value_group<F>(acc, p, s_lane, stride, key, group + i, F::kValueTiles * i);
  }
}

// Probabilities of one 16-key block as the A operand of p . v, rounded to its type.
template <class Value>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[4], const float (&left)[4], const float (&right)[4]) {
  p[0] = ptx::pack_2<Value>(left[0], left[1]);
  p[1] = ptx::pack_2<Value>(left[2], left[3]);
  p[2] = ptx::pack_2<Value>(right[0], right[1]);
  p[3] = ptx::pack_2<Value>(right[2], right[3]);
}

// Maximum of a row's scores in this lane. `half` is 0 for row g, 1 for row g + 8.
template <int kNTiles> __device__ __forceinline__ float lane_maximum(const float (&scores)[kNTiles][4], int half) {
  float top = negative_infinity();
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
  return top;
}

// The same over the four lanes that share the row.
template <int kNTiles> __device__ __forceinline__ float row_maximum(const float (&scores)[kNTiles][4], int half) {
  return group_max<4>(lane_maximum(scores, half));
}

// Turns a row's base-2 scores into weights; row_sum grows by this lane's part of them.
template <int kNTiles> __device__ __forceinline__ void weigh_row(float (&scores)[kNTiles][4], SoftmaxState& state, int half) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      scores[n][i] = state.weight(scores[n][i]);
      state.row_sum += scores[n][i];
    }
  }
}

// Score of one key for a row of the lane, from the lane of the four that has it.
template <int kNTiles> __device__ __forceinline__ float score_of_key(const float (&scores)[kNTiles][4], int half, int key) {
  float own = negative_infinity();
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      if (key_in_tile(n, i) == key) own = scores[n][i];
    }
  }
  return group_max<4>(own);
}

template <int kTiles> __device__ __forceinline__ void scale_row(float (&acc)[kTiles][4], float factor, int half) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    acc[n][2 * half] *= factor;
    acc[n][2 * half + 1] *= factor;
  }
}

// Dot products to base-2 scores: scale, then the rare rules. `factor` is the scale of q . k with the key scale in it; keys count
// from `key`. `keys_of(half)` is what the row of elements 2 half and 2 half + 1 admits, and `bias_row(half)` its bias row where
// there is a bias: asked only where they count, since most tiles need neither and they would fill registers.
template <class Io, int kNTiles, class KeysOf, class BiasRow>
__device__ __forceinline__ void scale_scores(float (&scores)[kNTiles][4], const ScoreRules& rules, float factor, const KeysOf& keys_of,
                                             const BiasRow& bias_row, int key) {
  if (has_score_rules(rules)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool biased = rules.attention_bias != nullptr;
      const Io* g_bias = biased ? bias_row(half) : nullptr;
      const KeyRange own = biased ? keys_of(half) : KeyRange{0, 0x7fffffff};  // the bias of other keys may not exist
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int at = key + key_in_tile(n, i);
          if (own.contains(at)) scores[n][i] = kLog2E * capped_and_biased(rules, scores[n][i] * factor, g_bias, at);
        }
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= factor * kLog2E;
    }
  }
}

// Hides what a row does not admit. Bit b of `mapped` says whether the b-th block of 16 keys exists.
template <int kNTiles, class KeysOf>
__device__ __forceinline__ void mask_scores(float (&scores)[kNTiles][4], const KeysOf& keys_of, int key, uint32_t mapped) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const KeyRange own = keys_of(half);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const bool exists = mapped >> (n / 2) & 1u;
        if (!exists || !own.contains(key + key_in_tile(n, i))) scores[n][i] = negative_infinity();
      }
    }
  }
}

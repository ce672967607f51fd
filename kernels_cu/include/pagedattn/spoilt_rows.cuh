// Rows that a hidden value has spoilt, attended again.
//
// A row that does not admit a key has weight 0 for it, but the tensor cores multiply all the same, and 0 x NaN is NaN. Keys that
// no row of a tile admits are zeros in shared memory; what is left are keys that some rows admit and others do not. If the value
// of such a key is infinite or NaN, the rows that hide it show it in the end: a sum of values is NaN though the weights have a
// sum that is a number. So nothing is asked in the loop over tiles. Where the rows of a tile differ in what they admit, they are
// looked at once, and those that are spoilt are computed again from global memory by one warp each, key after key: slow, and
// right whatever the caches hold.
//
// A row whose own key is NaN has weights that are NaN, and is no case for this.
#pragma once

#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/softmax.cuh>

// Whether row `half` of a lane, in wgmma's layout of an accumulator, has a sum that is NaN, and a sum of weights that is not.
template <int kCount> __device__ __forceinline__ bool is_spoilt(const float (&acc)[kCount], int half, float weights) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float first = acc[i + 2 * half];
    const float second = acc[i + 2 * half + 1];
    found |= first != first || second != second;
  }
  return found && weights == weights;
}

// One row, as a warp attends it: lane l has channel pairs l, l + 32, ...
template <DType kType, int kHeadSize, int kValueSize> struct PlainRow {
  using Io = element_t<kType>;
  static constexpr int kQueryPairs = ceil_div(kHeadSize / 2, kWarpSize);
  static constexpr int kValuePairs = ceil_div(kValueSize / 2, kWarpSize);
  static constexpr int kKeys = 4;  // at a time, for the sake of their latency
  static_assert(kHeadSize % 2 == 0 && kValueSize % 2 == 0, "rows are read in pairs of channels");

  SoftmaxState state;
  float acc[kValuePairs][2];

  // Channels 2 pair and 2 pair + 1 of a row, 0 beyond its end or where there is no row.
  __device__ __forceinline__ static uint32_t word_of(const void* g_row, int i, int channels) {
    const int pair = static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize;
    return g_row != nullptr && 2 * pair < channels ? static_cast<const uint32_t*>(g_row)[pair] : 0u;
  }

  // Attends the mapped ones among `keys`. Rows of query, keys and values start on multiples of 4 bytes; `g_bias` is the row's, or null.
  __device__ __forceinline__ void attend(const void* g_query, const KvHead<kType>& key_head, const KvHead<kType>& value_head,
                                         const BlockTable& blocks, int sequence, const KeyRange& keys, const ScoreRules& rules,
                                         const Io* g_bias) {
    uint32_t query[kQueryPairs];
#pragma unroll
    for (int i = 0; i < kQueryPairs; ++i) query[i] = word_of(g_query, i, kHeadSize);
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) acc[i][0] = acc[i][1] = 0.0f;
    for (int first = keys.begin; first < keys.end; first += kKeys) {
      int block[kKeys];
      float score[kKeys];
#pragma unroll
      for (int n = 0; n < kKeys; ++n) {
        block[n] = first + n < keys.end ? block_of_position(blocks, sequence, first + n) : kUnmapped;
      }
#pragma unroll
      for (int n = 0; n < kKeys; ++n) {
        const void* g_key = block[n] == kUnmapped ? nullptr : key_head.row(block[n], offset_in_block(blocks, first + n));
        score[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < kQueryPairs; ++i) {
          const uint32_t word = word_of(g_key, i, kHeadSize);
          score[n] += low_of<Io>(query[i]) * low_of<Io>(word) + high_of<Io>(query[i]) * high_of<Io>(word);
        }
      }
      float top = negative_infinity();
#pragma unroll
      for (int n = 0; n < kKeys; ++n) {
        score[n] = group_sum<kWarpSize>(score[n]);
        if (block[n] != kUnmapped) {
          score[n] = kLog2E * capped_and_biased(rules, score[n] * rules.scale, g_bias, first + n);
          top = fmaxf(top, score[n]);
        }
      }
      const float factor = state.update_max(top);
#pragma unroll
      for (int i = 0; i < kValuePairs; ++i) {
        acc[i][0] *= factor;
        acc[i][1] *= factor;
      }
#pragma unroll
      for (int n = 0; n < kKeys; ++n) {
        if (block[n] == kUnmapped) continue;
        const float weight = state.weight(score[n]);
        const void* g_value = value_head.row(block[n], offset_in_block(blocks, first + n));
        state.row_sum += weight;
#pragma unroll
        for (int i = 0; i < kValuePairs; ++i) {
          const uint32_t word = word_of(g_value, i, kValueSize);
          acc[i][0] += weight * low_of<Io>(word);
          acc[i][1] += weight * high_of<Io>(word);
        }
      }
    }
  }

  // Calls store(channel, first, second) for every pair of channels, times `factor`.
  template <class Store> __device__ __forceinline__ void for_values(float factor, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) {
      const int pair = static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize;
      if (2 * pair < kValueSize) store(2 * pair, acc[i][0] * factor, acc[i][1] * factor);
    }
  }
};

// Who sees whom, and what happens to a score before softmax.
//
// The keys that a token admits are one range [begin, end): causality, the sequence's length and the bias's width bound it
// above, the window below. What is left to a table is only which blocks inside it are mapped.
#pragma once

#include <pagedattn/math.cuh>

struct ScoreRules {
  const void* attention_bias;   // [batch_size or 1, num_heads or 1, bias_rows, bias_columns] in the io type, or null
  int64_t bias_batch_stride;    // elements; 0 where the axis has length 1
  int64_t bias_head_stride;
  int64_t bias_row_stride;
  int bias_rows;
  int bias_columns;
  int local_window_size;        // a token sees this many positions, its own included; <= 0: all
  int is_causal;
  float scale;                  // of q . k
  float softcap;                // 0: off
};

struct KeyRange {
  int begin;
  int end;  // <= begin: empty

  __device__ bool contains(int key) const { return key >= begin && key < end; }
};

// Keys that a token at `position`, the `row`-th new one of its sequence, admits among `kv_len` keys. A bias that is too
// small for the call leaves out the tokens and keys it has no value for.
__device__ __forceinline__ KeyRange admitted_keys(const ScoreRules& rules, int64_t position, int row, int kv_len) {
  int64_t end = kv_len;
  if (rules.attention_bias != nullptr) end = row < rules.bias_rows ? min_of(kv_len, rules.bias_columns) : 0;
  int64_t begin = 0;
  if (rules.is_causal && position + 1 < end) end = position + 1;
  if (rules.local_window_size > 0 && position + 1 - rules.local_window_size > 0) {
    begin = position + 1 - rules.local_window_size;
  }
  if (end < 0) end = 0;
  if (begin > end) begin = end;
  return {static_cast<int>(begin), static_cast<int>(end)};
}

// Start of a token's bias row for one head, or null. `row` is the token's index in its sequence, below bias_rows.
template <class T>
__device__ __forceinline__ const T* bias_row_of(const ScoreRules& rules, int sequence, int head, int row) {
  if (rules.attention_bias == nullptr) return nullptr;
  return static_cast<const T*>(rules.attention_bias) + sequence * rules.bias_batch_stride + head * rules.bias_head_stride +
         row * rules.bias_row_stride;
}

__device__ __forceinline__ bool has_score_rules(const ScoreRules& rules) {
  return rules.softcap > 0.0f || rules.attention_bias != nullptr;
}

// A dot product q . k times `scale` to the score that enters softmax, in natural-log units: cap first, then bias, so that
// a bias of -infinity masks. `g_bias` is the row from bias_row_of; the key is one that the token admits.
template <class T>
__device__ __forceinline__ float capped_and_biased(const ScoreRules& rules, float score, const T* g_bias, int key) {
  if (rules.softcap > 0.0f) score = rules.softcap * tanhf(score / rules.softcap);
  if (g_bias != nullptr) score += to_float(g_bias[key]);
  return score;
}

// Splitting the keys of a token among CTAs, and what they leave for each other.
//
// Splits have a fixed size and are merged in order, so a token's result depends on its own keys alone, never on the
// tokens it shares a launch with.
#pragma once

#include <pagedattn/mask.cuh>

// Tiles start on multiples of this, so a tile lies inside one block of any size that the contract allows.
constexpr int kKeyAlignment = 16;

// Splits of a token that the CTA which finishes last may merge. Up to so many are added one by one wherever they are merged, so
// that the bits do not depend on who does it.
constexpr int kMergedSplits = 8;

struct Partials {
  float* acc;   // [token_count, split_count, num_heads, partial_width(v_head_size)], normalized
  float* lse;   // [token_count, split_count, num_heads], base 2
  int split_size;   // keys; a multiple of kKeyAlignment
  int split_count;  // splits that the launch has room for
  int tile_rows;    // rows that share a plan (row_tiles.cuh); 0: each token has its own
  int group_size;   // query heads of a kv head
};

// Channels are stored in pairs, so a row of odd width has one to spare.
__host__ __device__ constexpr int partial_width(int v_head_size) { return round_up(v_head_size, 2); }

struct SplitPlan {
  int first;  // key where split 0 starts
  int count;  // splits that hold a key; what has one split or none is finished without a merge
};

__device__ __forceinline__ SplitPlan plan_splits(const Partials& partials, const KeyRange& keys) {
  const int first = keys.begin / kKeyAlignment * kKeyAlignment;
  if (keys.end <= keys.begin) return {first, 0};
  return {first, min_of((keys.end - first - 1) / partials.split_size + 1, partials.split_count)};
}

// Keys of one split; `split` is below the plan's count.
__device__ __forceinline__ KeyRange keys_of_split(const Partials& partials, const SplitPlan& plan, const KeyRange& keys, int split) {
  const int begin = plan.first + split * partials.split_size;
  const int rest = keys.end - begin;
  return {max_of(begin, keys.begin), rest < partials.split_size ? keys.end : begin + partials.split_size};
}

__device__ __forceinline__ int64_t partial_row(const Partials& partials, int token, int split, int num_heads, int head) {
  return (static_cast<int64_t>(token) * partials.split_count + split) * num_heads + head;
}

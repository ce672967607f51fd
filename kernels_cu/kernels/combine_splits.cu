// combine_splits.cu: merges the splits of each token and head, adds the sink once, and writes the result.
//
//   grid    x: token_count x ceil(num_heads / kWarps)    CTA  kWarps warps, one head each
//   reads   acc and lse of the splits that hold a key
//   writes  output, lse; nothing for a token with one split or none, which its producer has finished
// Invariants
//   Which splits exist is computed from the lengths, exactly as the producer did, so an unused part of the workspace is
//   never read. Splits are added in order: the result does not depend on which of them finished first.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>

struct CombineSpec {
  DType io;
  int v_head_size;
};

struct CombineParams {
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;
  Partials partials;
};

constexpr int kWarps = 4;

// The keys that the producer of this token's and head's splits planned for. All lanes of a warp call it together.
__device__ __forceinline__ KeyRange keys_of_plan(const CombineParams& p, const Sequence& sequence, int token, int head) {
  int first = token - sequence.begin;
  int last = first;
  if (p.partials.tile_rows > 0) {
    const int group_size = p.partials.group_size;
    const int64_t row = static_cast<int64_t>(first) * group_size + head % group_size;
    const int64_t tile_begin = row / p.partials.tile_rows * p.partials.tile_rows;
    first = static_cast<int>(tile_begin / group_size);
    last = min_of(sequence.q_len - 1, static_cast<int>((tile_begin + p.partials.tile_rows - 1) / group_size));
  }
  return keys_of_tokens(p.sequences, p.rules, sequence, first, last).some;
}

template <CombineSpec S>
__global__ void __launch_bounds__(kWarps * kWarpSize) combine_splits(const __grid_constant__ CombineParams p) {
  using Io = element_t<S.io>;
  constexpr int kPairs = ceil_div(ceil_div(S.v_head_size, 2), kWarpSize);  // of channels in a lane
  const int head_tiles = ceil_div(p.out.num_heads, kWarps);
  const int token = static_cast<int>(blockIdx.x / head_tiles);
  const int head = static_cast<int>(blockIdx.x % head_tiles) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  if (!sequence.is_active() || head >= p.out.num_heads) return;
  const int splits = plan_splits(p.partials, keys_of_plan(p, sequence, token, head)).count;
  if (splits <= 1) return;

  const auto lse_of_split = [&](int split) {
    return split < splits ? p.partials.lse[partial_row(p.partials, token, split, p.out.num_heads, head)] : negative_infinity();
  };
  SoftmaxState merged;
  for (int first = 0; first < splits; first += kWarpSize) merged.row_max = fmaxf(merged.row_max, lse_of_split(first + lane));
  merged.row_max = group_max<kWarpSize>(merged.row_max);

  float2 acc[kPairs] = {};
  for (int first = 0; first < splits; first += kWarpSize) {
    const float own_weight = merged.weight(lse_of_split(first + lane));
    const int count = min_of(kWarpSize, splits - first);
#pragma unroll 8  // loads of several splits at a time: they are what this kernel waits for
    for (int i = 0; i < count; ++i) {
      const float weight = __shfl_sync(kFullWarp, own_weight, i);
      merged.row_sum += weight;
      const float2* g_acc =
          reinterpret_cast<const float2*>(p.partials.acc + partial_row(p.partials, token, first + i, p.out.num_heads, head) * partial_width(S.v_head_size));
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int pair = lane + j * kWarpSize;
        if (2 * pair >= S.v_head_size) continue;
        const float2 part = g_acc[pair];
        acc[j].x += weight * part.x;
        acc[j].y += weight * part.y;
      }
    }
  }

  const SoftmaxResult result = finalize(merged, sink_of<Io>(p.out.head_sink, head));
  Io* g_row = output_row<Io>(p.out, token, head, S.v_head_size);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = lane + j * kWarpSize;
    if (2 * pair >= S.v_head_size) continue;
    store_2(g_row, 2 * pair, S.v_head_size, acc[j].x * result.factor, acc[j].y * result.factor);
  }
  if (lane == 0) store_lse(p.out, token, head, result.lse);
}

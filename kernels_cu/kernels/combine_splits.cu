// combine_splits.cu: merges the splits of each token and head, adds the sink once, and writes the result.
//
//   grid    x: token_count x num_heads    CTA  kWarps warps, each with a run of neighbouring splits
//   reads   acc and lse of the splits that hold a key
//   writes  output, lse; nothing for a token with one split or none, which its producer has finished
//   smem    | acc of each warp | row_sum of each warp |
// Invariants
//   Which splits exist is computed from the lengths, exactly as the producer did, so an unused part of the workspace is
//   never read. Splits are added in an order that their count alone decides: the result does not depend on which of them
//   finished first.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
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
  constexpr int kWidth = partial_width(S.v_head_size);
  constexpr int kPairs = ceil_div(kWidth / 2, kWarpSize);  // of channels in a lane
  float2* s_acc = shared_memory<float2>();  // [kWarps, kWidth / 2]
  float* s_row_sum = reinterpret_cast<float*>(s_acc + kWarps * kWidth / 2);
  const int token = static_cast<int>(blockIdx.x / p.out.num_heads);
  const int head = static_cast<int>(blockIdx.x % p.out.num_heads);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  const int splits = sequence.is_active() ? plan_splits(p.partials, keys_of_plan(p, sequence, token, head)).count : 0;
  ptx::wait_for_previous_kernel();  // which makes the parts
  if (splits <= 1) return;

  const auto lse_of_split = [&](int split, int end) {
    return split < end ? p.partials.lse[partial_row(p.partials, token, split, p.out.num_heads, head)] : negative_infinity();
  };
  SoftmaxState merged;
  for (int first = 0; first < splits; first += kWarpSize) merged.row_max = fmaxf(merged.row_max, lse_of_split(first + lane, splits));
  merged.row_max = group_max<kWarpSize>(merged.row_max);

  const int run = splits <= kMergedSplits ? splits : ceil_div(splits, kWarps);
  const int end = min_of(splits, (warp + 1) * run);
  float2 acc[kPairs] = {};
  for (int first = warp * run; first < end; first += kWarpSize) {
    const float own_weight = merged.weight(lse_of_split(first + lane, end));
    const int count = min_of(kWarpSize, end - first);
#pragma unroll 8  // loads of several splits at a time: they are what this kernel waits for
    for (int i = 0; i < count; ++i) {
      const float weight = __shfl_sync(kFullWarp, own_weight, i);
      merged.row_sum += weight;
      const float2* g_acc = reinterpret_cast<const float2*>(
          p.partials.acc + partial_row(p.partials, token, first + i, p.out.num_heads, head) * kWidth);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int pair = lane + j * kWarpSize;
        if (2 * pair >= kWidth) continue;
        const float2 part = g_acc[pair];
        acc[j].x += weight * part.x;
        acc[j].y += weight * part.y;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = lane + j * kWarpSize;
    if (2 * pair < kWidth) s_acc[warp * (kWidth / 2) + pair] = acc[j];
  }
  if (lane == 0) s_row_sum[warp] = merged.row_sum;
  __syncthreads();  // acc and row_sum of all warps are visible to all threads

  merged.row_sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) merged.row_sum += s_row_sum[w];
  const SoftmaxResult result = finalize(merged, sink_of<Io>(p.out.head_sink, head));
  Io* g_row = output_row<Io>(p.out, token, head, S.v_head_size);
  for (int pair = threadIdx.x; 2 * pair < kWidth; pair += kWarps * kWarpSize) {
    float2 sum{0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum.x += s_acc[w * (kWidth / 2) + pair].x;
      sum.y += s_acc[w * (kWidth / 2) + pair].y;
    }
    store_2(g_row, 2 * pair, S.v_head_size, sum.x * result.factor, sum.y * result.factor);
  }
  if (threadIdx.x == 0) store_lse(p.out, token, head, result.lse);
}

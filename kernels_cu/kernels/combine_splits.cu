// combine_splits.cu: merges the splits of each token and head, adds the sink once, and writes the result.
//
//   grid    x: token_count x chunks of heads x chunks of channels (several where a row has more than kFewRuns runs)
//   CTA     S.warps warps, each with a head, or together with one and a run of neighbouring splits each
//   reads   acc and lse of the splits that hold a key; whole lines of acc are lost then
//   writes  output, lse; nothing for a token with one split or none, which its producer has finished
//   smem    | acc of each warp | row_sum of each warp, before it row_max |
// Invariants
//   Which splits exist is computed from the lengths, exactly as the producer did, so an unused part of the workspace is
//   never read. Splits are added in an order that their count alone decides: the result does not depend on which of them
//   finished first.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/ptx/discard.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>

struct CombineSpec {
  DType io;
  int v_head_size;
  int warps;  // as many as a row may have runs; kFewRuns where a warp has a row of its own
};

struct CombineParams {
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;
  Partials partials;
  int heads_per_cta;  // S.warps, or 1 where CTAs are few
};

// Splits of a run. A run is summed up by itself, and the runs are then added up: one warp does that or several, with the same bits,
// because how many runs there are depends on nothing but the count.
constexpr int kFewRuns = 4;
constexpr int kManyRuns = 16;
__device__ __forceinline__ int run_of(int splits) {
  if (splits <= kMergedSplits) return splits;
  int runs = kFewRuns;
  while (runs < kManyRuns && splits > runs * kMergedSplits) runs *= 2;
  return ceil_div(splits, runs);
}

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
__global__ void __launch_bounds__(S.warps * kWarpSize) combine_splits(const __grid_constant__ CombineParams p) {
  using Io = element_t<S.io>;
  constexpr int kWidth = partial_width(S.v_head_size);
  constexpr int kCtaPairs = S.warps > kFewRuns ? min_of(kWarpSize, kWidth / 2) : kWidth / 2;  // of channels
  constexpr int kPairs = ceil_div(kCtaPairs, kWarpSize);                                      // in a lane
  // Splits whose parts are loaded together: they are what this kernel waits for.
  constexpr int kAtOnce = kPairs > 4 ? 4 : S.warps < kManyRuns ? 8 : 16;
  float2* s_acc = shared_memory<float2>();  // [S.warps, kCtaPairs]
  float* s_row_sum = reinterpret_cast<float*>(s_acc + S.warps * kCtaPairs);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const bool alone = S.warps == kFewRuns && p.heads_per_cta > 1;  // this warp, with its head
  constexpr int kChunks = ceil_div(kWidth / 2, kCtaPairs);  // of channels
  const int first_pair = blockIdx.x % kChunks * kCtaPairs;
  const int chunks = ceil_div(p.out.num_heads, p.heads_per_cta);
  const int token = static_cast<int>(blockIdx.x / kChunks / chunks);
  const int head = static_cast<int>(blockIdx.x / kChunks % chunks) * p.heads_per_cta + (alone ? warp : 0);

  ptx::let_next_kernel_start();
  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  const bool exists = head < p.out.num_heads && sequence.is_active();
  const int splits = exists ? plan_splits(p.partials, keys_of_plan(p, sequence, token, head)).count : 0;
  // CTAs with nothing to merge make room for the others while the kernel ahead still runs. All but one, because the end of this kernel
  // stands for the end of the one ahead.
  if (splits <= 1 && blockIdx.x != 0) return;
  ptx::wait_for_previous_kernel();  // which makes the parts
  if (splits <= 1) return;

  const int64_t first_row = partial_row(p.partials, token, 0, p.out.num_heads, head);
  const int64_t stride = p.out.num_heads;  // rows to the next one
  const auto lse_of_split = [&](int split, int end) {
    return split < end ? p.partials.lse[first_row + split * stride] : negative_infinity();
  };
  const int run = run_of(splits);
  const int own_begin = alone ? 0 : warp * run;
  float2 parts[kAtOnce][kPairs];
  const auto load_parts = [&](int first, int end) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float2* g_acc = reinterpret_cast<const float2*>(p.partials.acc + (first_row + (first + i) * stride) * kWidth);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int pair = first_pair + lane + j * kWarpSize;
        parts[i][j] = first + i < end && 2 * pair < kWidth ? g_acc[pair] : float2{};
      }
    }
  };
  load_parts(own_begin, min_of(splits, own_begin + run));  // on their way while the weights are found

  SoftmaxState merged;
  const int own_end = alone ? splits : min_of(splits, own_begin + run);
  for (int first = own_begin; first < own_end; first += kWarpSize) merged.row_max = fmaxf(merged.row_max, lse_of_split(first + lane, own_end));
  merged.row_max = group_max<kWarpSize>(merged.row_max);
  if (!alone) {
    if (lane == 0) s_row_sum[warp] = merged.row_max;
    __syncthreads();  // row_max of all warps is visible to all threads
#pragma unroll
    for (int w = 0; w < S.warps; ++w) merged.row_max = fmaxf(merged.row_max, s_row_sum[w]);
    __syncthreads();  // and read
  }

  // Nobody reads the parts again: they need not be written to memory while the next kernel reads.
  const auto forget_parts = [&](int end) {
    constexpr int kLineFloats = ptx::kDiscardBytes / 4;
    if constexpr (kWidth % kLineFloats == 0) {
      const int lines = min_of(2 * kCtaPairs, kWidth - 2 * first_pair) / kLineFloats;  // of a part
      __syncwarp();                                                                    // all lanes have read them
      for (int line = lane; line < (end - own_begin) * lines; line += kWarpSize) {
        ptx::discard(p.partials.acc + (first_row + (own_begin + line / lines) * stride) * kWidth + 2 * first_pair + line % lines * kLineFloats);
      }
    }
  };
  const auto add_run = [&](int begin, float2 (&acc)[kPairs]) {
    float row_sum = 0.0f;
    float own_weight = 0.0f;
    const int end = min_of(splits, begin + run);
    for (int first = begin; first < end; first += kAtOnce) {
      const int first_lane = (first - begin) % kWarpSize;
      if (first != own_begin) load_parts(first, end);
      if (first_lane == 0) own_weight = merged.weight(lse_of_split(first + lane, end));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // those beyond the end weigh nothing
        const float weight = __shfl_sync(kFullWarp, own_weight, first_lane + i);
        row_sum += weight;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          acc[j].x += weight * parts[i][j].x;
          acc[j].y += weight * parts[i][j].y;
        }
      }
    }
    return row_sum;
  };

  const float sink = sink_of<Io>(p.out.head_sink, head);
  Io* g_row = output_row<Io>(p.out, token, head, S.v_head_size);
  if (alone) {
    float2 total[kPairs] = {};
    for (int begin = 0; begin < splits; begin += run) {
      float2 acc[kPairs] = {};
      merged.row_sum += add_run(begin, acc);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        total[j].x += acc[j].x;
        total[j].y += acc[j].y;
      }
    }
    const SoftmaxResult result = finalize(merged, sink);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = lane + j * kWarpSize;
      if (2 * pair < kWidth) store_2(g_row, 2 * pair, S.v_head_size, total[j].x * result.factor, total[j].y * result.factor);
    }
    if (lane == 0) store_lse(p.out, token, head, result.lse);
    forget_parts(splits);
    return;
  }

  float2 acc[kPairs] = {};
  const float row_sum = add_run(own_begin, acc);
  forget_parts(own_end);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = lane + j * kWarpSize;
    if (pair < kCtaPairs) s_acc[warp * kCtaPairs + pair] = acc[j];
  }
  if (lane == 0) s_row_sum[warp] = row_sum;
  __syncthreads();  // acc and row_sum of all warps are visible to all threads

#pragma unroll
  for (int w = 0; w < S.warps; ++w) merged.row_sum += s_row_sum[w];
  const SoftmaxResult result = finalize(merged, sink);
  for (int pair = threadIdx.x; pair < kCtaPairs && 2 * (first_pair + pair) < kWidth; pair += S.warps * kWarpSize) {
    float2 sum{0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < S.warps; ++w) {
      sum.x += s_acc[w * kCtaPairs + pair].x;
      sum.y += s_acc[w * kCtaPairs + pair].y;
    }
    store_2(g_row, 2 * (first_pair + pair), S.v_head_size, sum.x * result.factor, sum.y * result.factor);
  }
  if (threadIdx.x == 0 && first_pair == 0) store_lse(p.out, token, head, result.lse);
}

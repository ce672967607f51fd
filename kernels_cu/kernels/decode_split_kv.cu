// decode_split_kv.cu: attention of one token over one split of its keys. Bound by memory: each key and value row of the
// split is read once, in place, and serves all query heads of its group.
//
//   grid    x: token_count x split_count    y: kv head    z: tile of kRows query heads of the group
//   CTA     S.warps warps; tiles of 16 keys go round the warps, each with a pipeline of its own, and meet once at the end
//   reads   query once; key and value rows that the token admits once
//   writes  output and lse where the token has one split or none; else acc and lse of this split (combine_splits.cu)
//   smem    | queries | per warp: S.stages x (16 key rows, 16 value rows) |, later | acc of each warp | their states |
// Invariants
//   A tile starts on a multiple of 16 and so lies in one block. An unmapped block is neither read nor attended.
//   Rows outside the token's range are zeros in shared memory: nothing that is masked can reach the sums.
//   Lengths that enter the mask are read here; host bounds only size the grid. Empty splits leave at once.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/query_tile.cuh>
#include <pagedattn/seqlens.cuh>
#include <pagedattn/split.cuh>
#include <pagedattn/tile_math.cuh>

struct DecodeSpec {
  DType io;
  DType cache;
  int head_size;
  int row_tiles;  // tiles of 16 query heads that share what is read
  int warps;
  int stages;
};

struct DecodeParams {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;
  ScoreRules rules;
  Output out;
  Partials partials;
  int group_size;  // query heads of a kv head
};

constexpr int kTileKeys = 16;

template <DecodeSpec S> struct Decode {
  using Io = element_t<S.io>;
  using F = Fragments<S.io, S.cache>;
  using Tile = TileShape<S.cache, S.head_size>;
  using Query = QueryShape<S.io, S.cache, S.head_size>;
  static constexpr int kThreads = S.warps * kWarpSize;
  static constexpr int kRows = 16 * S.row_tiles;
  static constexpr int kSteps = Tile::kPadded / 16;
  static constexpr int kValueTiles = Tile::kPadded / 8;
  static constexpr int kTileBytes = kTileKeys * Tile::kStride;
  static constexpr int kQueryBytes = kRows * Query::kStride;
  static constexpr bool kQueryInRegisters = S.row_tiles * S.head_size <= 128;
  static constexpr int kAccStride = Tile::kPadded + 8;  // floats; rows of a store start 8 banks apart
};

// One warp's tiles: which block each lies in, and the pipeline that fetches them.
template <DecodeSpec S> struct TilePipeline {
  using D = Decode<S>;
  const BlockTable& blocks;
  KvHead<S.cache> keys;
  KvHead<S.cache> values;
  KeyRange range;        // of the split
  unsigned char* s_stages;
  int sequence;
  int tile_count;        // of this warp
  int batch_blocks = kUnmapped;  // lane l: block of tile 32 n + l of this warp
  uint32_t mapped = 0;   // bit i: whether the tile issued i tiles ago has a block

  // First key of this warp's i-th tile.
  __device__ __forceinline__ int key_of(int i) const {
    return range.begin / kTileKeys * kTileKeys + kTileKeys * (static_cast<int>(threadIdx.x) / kWarpSize + i * S.warps);
  }
  __device__ __forceinline__ unsigned char* stage(int i) const { return s_stages + i % S.stages * 2 * D::kTileBytes; }

  // Starts the copy of tile i, or of nothing when there is none, so that groups can be counted.
  __device__ __forceinline__ void issue(int i) {
    const int lane = threadIdx.x % kWarpSize;
    if (i % kWarpSize == 0) {
      batch_blocks = i + lane < tile_count ? block_of_position(blocks, sequence, key_of(i + lane)) : kUnmapped;
    }
    const int block = __shfl_sync(kFullWarp, batch_blocks, i % kWarpSize);
    mapped = mapped << 1 | (block != kUnmapped ? 1u : 0u);
    if (block != kUnmapped) {
      const int key = key_of(i);
      const int offset = offset_in_block(blocks, key);
      copy(stage(i), keys, key, block, offset);
      copy(stage(i) + D::kTileBytes, values, key, block, offset);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ bool is_mapped() const { return mapped >> (S.stages - 1) & 1u; }

 private:
  __device__ __forceinline__ void copy(unsigned char* s_tile, const KvHead<S.cache>& head, int key, int block, int offset) const {
    copy_rows<typename D::Tile, kTileKeys>(s_tile, key, range.begin, range.end, head.row(block, offset), head.token_bytes(),
                                           head.alignment, head.base);
  }
};

// Output of a row whose token attends nothing.
template <DecodeSpec S> __device__ __forceinline__ void write_empty_rows(const DecodeParams& p, int token, int first_head, int rows) {
  using D = Decode<S>;
  for (int i = threadIdx.x; i < rows * S.head_size / 2; i += D::kThreads) {
    const int row = i / (S.head_size / 2);
    const int channel = i % (S.head_size / 2) * 2;
    store_2(output_row<typename D::Io>(p.out, token, first_head + row, S.head_size), channel, S.head_size, 0.0f, 0.0f);
    if (channel == 0) store_lse(p.out, token, first_head + row, negative_infinity());
  }
}

// Merges the warps' rows through shared memory and writes them, as the result or as this split's part of it.
template <DecodeSpec S>
__device__ __forceinline__ void merge_and_write(const DecodeParams& p, float (&acc)[S.row_tiles][Decode<S>::kValueTiles][4],
                                                SoftmaxState (&state)[S.row_tiles][2], int token, int split, bool is_final,
                                                int first_head, int rows) {
  using D = Decode<S>;
  const int warp = threadIdx.x / kWarpSize;
  float* s_acc = shared_memory<float>();
  SoftmaxState* s_state = reinterpret_cast<SoftmaxState*>(s_acc + S.warps * D::kRows * D::kAccStride);

  __syncthreads();  // every warp has left its pipeline: the stages become room for acc
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + row_in_tile(2 * half);
      state[m][half].row_sum = group_sum<4>(state[m][half].row_sum);
      if (row >= rows) continue;
      if (threadIdx.x % 4 == 0) s_state[warp * D::kRows + row] = state[m][half];
      float* s_row = s_acc + (warp * D::kRows + row) * D::kAccStride;
      D::F::for_channel_pairs(acc[m], half, 0, [&](int channel, float first, float second) {
        *reinterpret_cast<float2*>(s_row + channel) = {first, second};
      });
    }
  }
  __syncthreads();  // acc and state of all warps are visible to all threads

  const int kv_head = blockIdx.y;
  for (int i = threadIdx.x; i < rows * S.head_size / 2; i += D::kThreads) {
    const int row = i / (S.head_size / 2);
    const int channel = i % (S.head_size / 2) * 2;
    const int head = first_head + row;
    SoftmaxState merged;
#pragma unroll
    for (int w = 0; w < S.warps; ++w) merged.row_max = fmaxf(merged.row_max, s_state[w * D::kRows + row].row_max);
    float first = 0.0f;
    float second = 0.0f;
#pragma unroll
    for (int w = 0; w < S.warps; ++w) {
      const SoftmaxState& part = s_state[w * D::kRows + row];
      const float* s_row = s_acc + (w * D::kRows + row) * D::kAccStride + channel;
      const float weight = merged.weight(part.row_max);
      merged.row_sum += weight * part.row_sum;
      first += weight * s_row[0];
      second += weight * s_row[1];
    }
    const SoftmaxResult result = finalize(merged, is_final ? sink_of<typename D::Io>(p.out.head_sink, head) : negative_infinity());
    first *= result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel);
    second *= result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel + 1);
    if (is_final) {
      store_2(output_row<typename D::Io>(p.out, token, head, S.head_size), channel, S.head_size, first, second);
      if (channel == 0) store_lse(p.out, token, head, result.lse);
    } else {
      const int64_t at = partial_row(p.partials, token, split, p.out.num_heads, head);
      p.partials.acc[at * S.head_size + channel] = first;
      p.partials.acc[at * S.head_size + channel + 1] = second;
      if (channel == 0) p.partials.lse[at] = lse_of(merged);
    }
  }
}

template <DecodeSpec S>
__global__ void __launch_bounds__(S.warps * kWarpSize, 2) decode_split_kv(const __grid_constant__ DecodeParams p) {
  static_assert(S.head_size % 8 == 0, "head_size must be a multiple of 8: rows are copied 16 bytes at a time");
  static_assert(S.head_size <= 256, "acc of 16 rows must fit the registers of a warp");
  static_assert(S.row_tiles * Decode<S>::Tile::kPadded <= 256, "acc of all row tiles must fit the registers of a warp");
  static_assert(S.stages >= 2 && S.stages <= 32, "one tile is computed on while others arrive; `mapped` has a bit for each");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache holds the io type");
  using D = Decode<S>;
  using Io = typename D::Io;

  const int token = static_cast<int>(blockIdx.x / p.partials.split_count);
  const int split = static_cast<int>(blockIdx.x % p.partials.split_count);
  const int kv_head = blockIdx.y;
  const int first_row = blockIdx.z * D::kRows;  // in the group
  const int first_head = kv_head * p.group_size + first_row;
  const int rows = min_of(D::kRows, p.group_size - first_row);

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  KeyRange admitted{0, 0};
  const int row_in_sequence = token - sequence.begin;
  if (sequence.is_active()) {
    admitted = admitted_keys(p.rules, position_of_token(p.sequences, sequence, token), row_in_sequence, sequence.kv_len);
  }
  const SplitPlan plan = plan_splits(p.partials, admitted);
  if (split >= plan.count) {
    if (split == 0) write_empty_rows<S>(p, token, first_head, rows);
    return;
  }
  const KeyRange range = keys_of_split(p.partials, plan, admitted, split);

  const int warp = threadIdx.x / kWarpSize;
  unsigned char* s_query = shared_memory<unsigned char>();
  const int tiles = ceil_div(range.end - range.begin / kTileKeys * kTileKeys, kTileKeys);
  TilePipeline<S> pipeline{p.blocks, KvHead<S.cache>(p.key_cache, kv_head), KvHead<S.cache>(p.value_cache, kv_head), range,
                           s_query + D::kQueryBytes + warp * S.stages * 2 * D::kTileBytes, sequence.index,
                           tiles > warp ? ceil_div(tiles - warp, S.warps) : 0};
#pragma unroll
  for (int i = 0; i < S.stages - 1; ++i) pipeline.issue(i);

  const Io* g_query = static_cast<const Io*>(p.query) + token * p.query_stride + static_cast<int64_t>(first_head) * S.head_size;
  const float key_scale = load_query_tile<S.io, S.cache, S.head_size, D::kRows, D::kThreads>(
      s_query, p.key_cache, kv_head, [&](int row) { return row < rows ? g_query + row * S.head_size : nullptr; });
  const float factor = p.rules.scale * key_scale;
  __syncthreads();  // the query rows are visible to all warps

  uint32_t r_query[D::kQueryInRegisters ? S.row_tiles : 1][D::kQueryInRegisters ? D::kSteps : 1][4];
  if constexpr (D::kQueryInRegisters) {
#pragma unroll
    for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
      for (int step = 0; step < D::kSteps; ++step) D::F::query(r_query[m][step], s_query, D::Query::kStride, 16 * m, step);
    }
  }
  const auto query_of = [&](int m, int step, uint32_t (&a)[4]) {
    if constexpr (D::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = r_query[m][step][i];
    } else {
      D::F::query(a, s_query, D::Query::kStride, 16 * m, step);
    }
  };

  float acc[S.row_tiles][D::kValueTiles][4] = {};
  SoftmaxState state[S.row_tiles][2];

#pragma unroll 1  // several copies of the body would not fit the instruction cache
  for (int i = 0; i < pipeline.tile_count; ++i) {
    ptx::cp_async_wait<S.stages - 2>();
    __syncwarp();  // tile i is visible to all lanes, and all of them are done with tile i - 1, whose stage is filled next
    pipeline.issue(i + S.stages - 1);
    if (!pipeline.is_mapped()) continue;

    const unsigned char* s_keys = pipeline.stage(i);
    const int key = pipeline.key_of(i);
    float scores[S.row_tiles][2][4];
    multiply_keys<typename D::F, D::kSteps>(scores, query_of, s_keys, D::Tile::kStride, 0);
    uint32_t probabilities[S.row_tiles][4];
#pragma unroll
    for (int m = 0; m < S.row_tiles; ++m) {
      const auto bias_row = [&](int half) {
        const int row = min_of(16 * m + row_in_tile(2 * half), rows - 1);  // one beyond the group is computed, not stored
        return bias_row_of<Io>(p.rules, sequence.index, first_head + row, row_in_sequence);
      };
      apply_rules<Io>(scores[m], p.rules, factor, [&](int) { return range; }, bias_row, key,
                      key < range.begin || range.end - key < kTileKeys, 1u);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale_row(acc[m], state[m][half].update_max(row_maximum(scores[m], half)), half);
        weigh_row(scores[m], state[m][half], half);
      }
      pack_probabilities<Io>(probabilities[m], scores[m][0], scores[m][1]);
    }
    multiply_values<typename D::F>(acc, probabilities, s_keys + D::kTileBytes, D::Tile::kStride, 0, 0, D::kValueTiles / D::F::kValueTiles);
  }

  merge_and_write<S>(p, acc, state, token, split, plan.count == 1, first_head, rows);
}

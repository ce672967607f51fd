// flash_prefill_sm80.cu: attention of prompts, chunks and mixed batches with mma.sync, for every GPU from sm_80 on and every
// head size to 256, cache type and rule but output_qk.
//
//   grid    x: row tiles (row_tiles.cuh), the longest first    y: kv head
//   CTA     S.warps warps, each with S.row_tiles tiles of 16 rows (token, head of the group) of its own
//   reads   query once; keys and values that some token of the tile admits, once per tile, in place
//   writes  output and lse, rows of padding tokens included
//   smem    | queries | S.stages x (keys, values) |
//
// A warp keeps scores, probabilities and acc of its rows in registers; warps meet only where a tile arrives:
//
//   tile i      [wait, barrier] q.k  softmax  p.v
//   copies      [start tile i + stages - 1 ......]
// Invariants
//   Keys that no token of the tile admits, and unmapped blocks, are zeros in shared memory and are not read.
//   Only tiles at the edge of some token's range, or with an unmapped block, are masked.
#include <pagedattn/cta_tiles.cuh>
#include <pagedattn/epilogue.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/query_tile.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/tile_math.cuh>

struct FlashSpec {
  DType io;
  DType cache;
  int head_size;
  int row_tiles;  // tiles of 16 rows in a warp
  int warps;
  int tile_keys;
  int stages;
};

struct FlashParams {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;
  ScoreRules rules;
  Output out;
  int group_size;        // query heads of a kv head
};

template <FlashSpec S> struct Flash {
  using Io = element_t<S.io>;
  using F = Fragments<S.io, S.cache>;
  using Tiles = CtaTiles<S.cache, S.head_size, S.head_size, S.tile_keys, S.stages, S.warps>;
  using Query = QueryShape<S.io, S.cache, S.head_size>;
  static constexpr int kThreads = S.warps * kWarpSize;
  static constexpr int kRowsOfWarp = 16 * S.row_tiles;
  static constexpr int kRows = S.warps * kRowsOfWarp;
  static constexpr int kSteps = Query::kPadded / 16;
  static constexpr int kNTiles = S.tile_keys / 8;
  static constexpr int kValueTiles = Query::kPadded / 8;
  static constexpr int kGroups = kValueTiles / F::kValueTiles;
  static constexpr int kQueryBytes = kRows * Query::kStride;

  // Rows of the CTA's tile: the first of the warp's m-th 16, and the lane's two of them, g for half 0 and g + 8 for half 1.
  static __device__ __forceinline__ int first_row(int m) {
    return static_cast<int>(threadIdx.x) / kWarpSize * kRowsOfWarp + 16 * m;
  }
  static __device__ __forceinline__ int row(int m, int half) { return first_row(m) + row_in_tile(2 * half); }
};

// Online softmax over one tile: scores become weights, acc is scaled to the new maxima.
template <FlashSpec S>
__device__ __forceinline__ void update_rows(float (&scores)[S.row_tiles][Flash<S>::kNTiles][4], SoftmaxState (&state)[S.row_tiles][2],
                                            float (&acc)[S.row_tiles][Flash<S>::kValueTiles][4]) {
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale_row(acc[m], state[m][half].update_max(row_maximum(scores[m], half)), half);
      weigh_row(scores[m], state[m][half], half);
    }
  }
}

template <FlashSpec S>
__global__ void __launch_bounds__(S.warps * kWarpSize, 1) flash_prefill_sm80(const __grid_constant__ FlashParams p) {
  static_assert(S.head_size % 8 == 0, "rows are copied 16 bytes at a time");
  static_assert(S.row_tiles * Flash<S>::Query::kPadded <= 256, "acc of a warp must fit its registers");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache holds the io type");
  using D = Flash<S>;
  using Io = typename D::Io;
  const int kv_head = blockIdx.y;
  const int first_head = kv_head * p.group_size;
  // The last tiles of a sequence see the most keys: starting with them leaves the short ones to fill the gaps.
  const RowTile tile = find_row_tile(p.sequences, static_cast<int>(gridDim.x - 1 - blockIdx.x), D::kRows, p.group_size,
                                     capacity_of(p.blocks));
  if (tile.rows == 0) return;
  const TileKeys keys = keys_of_tokens(p.sequences, p.rules, tile.sequence, tile.first_token, tile.last_token());
  if (keys.some.end <= keys.some.begin) {
    write_empty_tile<Io, D::kThreads>(p.out, tile, first_head, S.head_size);
    return;
  }

  unsigned char* s_query = shared_memory<unsigned char>();
  typename D::Tiles tiles(p.blocks, p.key_cache, p.value_cache, kv_head, keys.some, tile.sequence.index,
                          s_query + D::kQueryBytes, true);
  const float key_scale = load_query_tile<S.io, S.cache, S.head_size, D::kRows, D::kThreads>(
      s_query, p.key_cache, kv_head, [&](int row) -> const Io* {
        if (row >= tile.rows) return nullptr;
        return static_cast<const Io*>(p.query) + tile.token(row) * p.query_stride +
               static_cast<int64_t>(first_head + tile.head_in_group(row)) * S.head_size;
      });
  const float factor = p.rules.scale * key_scale;
  const auto query_of = [&](int m, int step, uint32_t (&a)[4]) {
    D::F::query(a, s_query, D::Query::kStride, D::first_row(m), step);
  };

  const auto keys_of = [&](int m, int half) {
    return keys_of_row(tile, D::row(m, half), p.sequences, p.rules, keys.some);
  };

  float acc[S.row_tiles][D::kValueTiles][4] = {};
  SoftmaxState state[S.row_tiles][2];
  for (int i = 0; i < tiles.count; ++i) {
    tiles.advance(i);
    const bool masked = !tiles.is_open(i, keys.every);
    const uint32_t mapped = tiles.mapped_blocks();
    float scores[S.row_tiles][D::kNTiles][4];
    multiply_keys<typename D::F, D::kSteps>(scores, query_of, tiles.key_tile(i), D::Tiles::KeyShape::kStride, 0);
#pragma unroll
    for (int m = 0; m < S.row_tiles; ++m) {
      apply_rules<Io>(scores[m], p.rules, factor, [&](int half) { return keys_of(m, half); },
                      [&](int half) { return bias_row_of_tile<Io>(tile, D::row(m, half), p.rules, first_head); },
                      tiles.key_of(i), masked, mapped);
    }
    update_rows<S>(scores, state, acc);
    if (masked && keys.differ()) {
      take_strange_values<typename D::F, S.cache, typename D::Tiles::ValueShape, S.tile_keys, S.warps>(
          acc, tiles.value_tile(i), 0, D::kGroups,
          [&](int m, int half, int key) { return weight_of_key(scores[m], half, key); },
          [&](int m, int half, int key) {
            return keys_of(m, half).contains(tiles.key_of(i) + key) && (mapped >> (key / 16) & 1u);
          });
    }
#pragma unroll
    for (int block = 0; block < S.tile_keys / 16; ++block) {
      uint32_t probabilities[S.row_tiles][4];
#pragma unroll
      for (int m = 0; m < S.row_tiles; ++m) {
        pack_probabilities<Io>(probabilities[m], scores[m][2 * block], scores[m][2 * block + 1]);
      }
      multiply_values<typename D::F>(acc, probabilities, tiles.value_tile(i), D::Tiles::ValueShape::kStride, 16 * block, 0, D::kGroups);
    }
  }

#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[m][half].row_sum = group_sum<4>(state[m][half].row_sum);
      const int row = D::row(m, half);
      if (row >= tile.rows) continue;
      const int token = tile.token(row);
      const int head = first_head + tile.head_in_group(row);
      const SoftmaxResult result = finalize(state[m][half], sink_of<Io>(p.out.head_sink, head));
      Io* g_row = output_row<Io>(p.out, token, head, S.head_size);
      D::F::for_channel_pairs(acc[m], half, 0, [&](int channel, float first, float second) {
        if (channel >= S.head_size) return;
        store_2(g_row, channel, S.head_size, first * result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel),
                second * result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel + 1));
      });
      if (threadIdx.x % 4 == 0) store_lse(p.out, token, head, result.lse);
    }
  }
}

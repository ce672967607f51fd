// latent_decode.cu: attention over a LATENT cache: one kv head whose rows are keys, and whose first v_head_size channels are
// values too. A key tile is read once into shared memory and serves both products and all query heads.
//
//   grid    x: row tiles x split_count (row_tiles.cuh)     CTA  row_tiles / warp_tiles x column_warps warps (wide_attention.cuh)
//   reads   query once a split; each latent row that the tile's tokens admit once
//   writes  output and lse where the tile has one split or none; else acc and lse of this split (combine_splits.cu)
//   smem    | queries | probabilities | row statistics | stages of latent rows |
// Invariants
//   Splits are planned for a row tile, from the keys that any of its tokens admits; combine_splits plans the same way.
//   Rows that no token of the tile admits are zeros in shared memory, and are never read.
#include <pagedattn/wide_attention.cuh>

struct LatentSpec {
  DType io;
  DType cache;
  int head_size;
  int v_head_size;
  int row_tiles;
  int warp_tiles;
  int column_warps;
  int tile_keys;
  int stages;

  __host__ __device__ constexpr WideShape wide() const {
    return {io, cache, head_size, v_head_size, true, row_tiles, warp_tiles, column_warps, tile_keys, stages};
  }
};

struct LatentParams {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;     // one head; its scale serves keys and values
  ScoreRules rules;
  Output out;
  Partials partials;     // of row tiles: tile_rows is the CTA's
};

template <LatentSpec S>
__global__ void __launch_bounds__(Wide<S.wide()>::kThreads, 1) latent_decode(const __grid_constant__ LatentParams p) {
  constexpr WideShape W = S.wide();
  using D = Wide<W>;
  using Io = typename D::Io;
  const int split = static_cast<int>(blockIdx.x % p.partials.split_count);
  const RowTile tile = find_row_tile(p.sequences, static_cast<int>(blockIdx.x / p.partials.split_count), D::kRows,
                                     p.out.num_heads, capacity_of(p.blocks));
  if (tile.rows == 0) return;
  const TileKeys keys = keys_of_tokens(p.sequences, p.rules, tile.sequence, tile.first_token, tile.last_token());
  const SplitPlan plan = plan_splits(p.partials, keys.some);
  if (split >= plan.count) {
    if (split == 0) write_empty_tile<Io, D::kThreads>(p.out, tile, 0, W.v_head_size);
    return;
  }
  const KeyRange range = keys_of_split(p.partials, plan, keys.some, split);

  typename D::Tiles tiles(p.blocks, p.key_cache, p.key_cache, 0, range, tile.sequence.index, D::s_stages(), true);
  const float key_scale = load_query_tile<W.io, W.cache, W.head_size, D::kRows, D::kThreads>(
      D::s_query(), p.key_cache, 0, [&](int row) -> const Io* {
        if (row >= tile.rows) return nullptr;
        return static_cast<const Io*>(p.query) + tile.token(row) * p.query_stride + tile.head_in_group(row) * W.head_size;
      });
  WideRows<W> rows;
  begin_rows(rows, tile, p.sequences, p.rules, range);

  for (int i = 0; i < tiles.count; ++i) {
    tiles.advance(i);
    WideScores<W> scores;
    if (D::has_scores()) wide_scores(scores, rows, tiles, i, p.rules, p.rules.scale * key_scale, keys.every, tile, 0);
    wide_softmax(scores, rows, tiles, i);
    wide_values(rows, tiles, i, keys.differ() && !tiles.is_open(i, keys.every));
  }
  sum_rows(rows);

#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    const int row = D::row(own);
    if (row >= tile.rows) continue;
    const int token = tile.token(row);
    const int head = tile.head_in_group(row);
    const bool writes_lse = D::column() == 0 && threadIdx.x % 4 == 0;
    if (plan.count == 1) {
      const SoftmaxResult result = finalize(rows.state[own], sink_of<Io>(p.out.head_sink, head));
      Io* g_row = output_row<Io>(p.out, token, head, W.v_head_size);
      for_values_of_row(rows, own, result.factor, p.key_cache, 0,
                        [&](int channel, float first, float second) { store_2(g_row, channel, W.v_head_size, first, second); });
      if (writes_lse) store_lse(p.out, token, head, result.lse);
    } else {
      const int64_t at = partial_row(p.partials, token, split, p.out.num_heads, head);
      const SoftmaxResult result = finalize(rows.state[own], negative_infinity());
      float* g_row = p.partials.acc + at * partial_width(W.v_head_size);
      for_values_of_row(rows, own, result.factor, p.key_cache, 0, [&](int channel, float first, float second) {
        *reinterpret_cast<float2*>(g_row + channel) = {first, second};
      });
      if (writes_lse) p.partials.lse[at] = lse_of(rows.state[own]);
    }
  }
}

// dense_attention.cu: the kernel that serves every call: any head size up to 1024, LATENT or not, every cache type and rule,
// and output_qk. Blocks are read in place; nothing grows with heads x context but output_qk itself.
//
//   grid    x: row tiles (row_tiles.cuh)    y: kv head     CTA  row_tiles x column_warps warps (wide_attention.cuh)
//   reads   query; the keys and values that the tile's tokens admit, the keys once more for output_qk
//   writes  output, lse, and all of output_qk's rows for the tile's tokens
//   smem    | queries | probabilities | row statistics | stages of keys and values |
// Invariants
//   Every row of every token is written, the padding tokens' too.
//   output_qk is computed in a second pass, from the same scores: probabilities need the final sums.
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/wide_attention.cuh>

struct DenseSpec {
  DType io;
  DType cache;
  int head_size;
  int v_head_size;
  bool latent;
  int row_tiles;
  int column_warps;
  int tile_keys;
  int stages;
  bool has_qk;
  DType qk;  // type of output_qk

  __host__ __device__ constexpr WideShape wide() const {
    return {io, cache, head_size, v_head_size, latent, row_tiles, 1, column_warps, tile_keys, stages, 1};
  }
};

struct DenseParams {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;   // not read when LATENT
  ScoreRules rules;
  Output out;
  void* output_qk;       // [num_heads, token_count, max_context_len]
  int max_context_len;
  int qk_output;         // 1: scores after cap and bias; 2: probabilities
  int group_size;        // query heads of a kv head
};

template <DenseSpec S> __device__ __forceinline__ element_t<S.qk>* output_qk_row(const DenseParams& p, int token, int head) {
  return static_cast<element_t<S.qk>*>(p.output_qk) +
         (static_cast<int64_t>(head) * p.sequences.token_count + token) * p.max_context_len;
}

// Zeros in the columns of output_qk that the tile's keys do not cover.
template <DenseSpec S>
__device__ __forceinline__ void clear_output_qk(const DenseParams& p, const RowTile& tile, int first_head, int begin, int end) {
  for (int row = threadIdx.x / kWarpSize; row < tile.rows; row += Wide<S.wide()>::kWarps) {
    element_t<S.qk>* g_row = output_qk_row<S>(p, tile.token(row), first_head + tile.head_in_group(row));
    for (int column = threadIdx.x % kWarpSize; column < p.max_context_len; column += kWarpSize) {
      if (column < begin || column >= end) g_row[column] = from_float<element_t<S.qk>>(0.0f);
    }
  }
}

// One tile of output_qk from its base-2 scores; a key that a row does not admit shows 0.
template <DenseSpec S>
__device__ __forceinline__ void write_output_qk(const DenseParams& p, const float (&scores)[Wide<S.wide()>::kNTiles][4],
                                                const WideRows<S.wide()>& rows, const SoftmaxResult (&results)[2], const RowTile& tile,
                                                int first_head, int key, uint32_t mapped) {
  using D = Wide<S.wide()>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = D::row(half);
    if (row >= tile.rows) continue;
    element_t<S.qk>* g_row = output_qk_row<S>(p, tile.token(row), first_head + tile.head_in_group(row));
#pragma unroll
    for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const int column = key + key_in_tile(n, i);
        if (column >= p.max_context_len) continue;
        const bool admitted = rows.keys[half].contains(column) && (mapped >> (n / 2) & 1u);
        const float shown = p.qk_output == 1 ? kLn2 * scores[n][i] : results[half].factor * rows.state[half].weight(scores[n][i]);
        g_row[column] = from_float<element_t<S.qk>>(admitted ? shown : 0.0f);
      }
    }
  }
}

template <DenseSpec S>
__global__ void __launch_bounds__(Wide<S.wide()>::kThreads, 1) dense_attention(const __grid_constant__ DenseParams p) {
  constexpr WideShape W = S.wide();
  using D = Wide<W>;
  using Io = typename D::Io;
  const int kv_head = blockIdx.y;
  const int first_head = kv_head * p.group_size;
  const RowTile tile =
      find_row_tile(p.sequences, static_cast<int>(blockIdx.x), D::kRows, p.group_size, capacity_of(p.blocks));
  ptx::wait_for_previous_kernel();  // which writes the cache, and maybe the query
  if (tile.rows == 0) return;
  const TileKeys keys = keys_of_tokens(p.sequences, p.rules, tile.sequence, tile.first_token, tile.last_token());
  if (keys.some.end <= keys.some.begin) {
    write_empty_tile<Io, D::kThreads>(p.out, tile, first_head, W.v_head_size);
    if constexpr (S.has_qk) clear_output_qk<S>(p, tile, first_head, 0, 0);
    return;
  }
  const KvCache& value_cache = W.latent ? p.key_cache : p.value_cache;

  typename D::Tiles tiles(p.blocks, p.key_cache, value_cache, kv_head, keys.some, tile.sequence.index, D::s_stages(), true);
  const float key_scale = load_query_tile<W.io, W.cache, W.head_size, D::kRows, D::kThreads>(
      D::s_query(), p.key_cache, kv_head, [&](int row) -> const Io* {
        if (row >= tile.rows) return nullptr;
        return static_cast<const Io*>(p.query) + tile.token(row) * p.query_stride +
               static_cast<int64_t>(first_head + tile.head_in_group(row)) * W.head_size;
      });
  const float factor = p.rules.scale * key_scale;
  WideRows<W> rows;
  WideSums<W> sums;
  begin_rows(rows, tile, p.sequences, p.rules, keys.some);

  for (int i = 0; i < tiles.count; ++i) {
    tiles.advance(i);
    WideScores<W> scores;
    if (D::has_scores()) wide_scores(scores, rows, tiles, i, p.rules, factor, keys.every, tile, first_head);
    unsigned char* s_probabilities = D::s_probabilities(i % W.stages);
    wide_softmax(scores, rows, sums, s_probabilities);
    wide_values<WholeCta>(sums, tiles, i, s_probabilities, keys.differ() && !tiles.is_open(i, keys.every),
                          [&](int own) { return rows.keys[own]; });
  }
  sum_rows(rows);

  SoftmaxResult results[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = D::row(half);
    if (row >= tile.rows) continue;
    const int token = tile.token(row);
    const int head = first_head + tile.head_in_group(row);
    results[half] = finalize(rows.state[half], sink_of<Io>(p.out.head_sink, head));
    Io* g_row = output_row<Io>(p.out, token, head, W.v_head_size);
    for_values_of_row(sums, half, results[half].factor, value_cache, kv_head,
                      [&](int channel, float first, float second) { store_2(g_row, channel, W.v_head_size, first, second); });
    if (D::column() == 0 && threadIdx.x % 4 == 0) store_lse(p.out, token, head, results[half].lse);
  }

  if constexpr (S.has_qk) {
    typename D::Tiles again(p.blocks, p.key_cache, value_cache, kv_head, keys.some, tile.sequence.index, D::s_stages(), false);
    for (int i = 0; i < again.count; ++i) {
      again.advance(i);
      if (!D::has_scores()) continue;
      WideScores<W> scores;
      wide_scores(scores, rows, again, i, p.rules, factor, keys.every, tile, first_head);
      write_output_qk<S>(p, scores[0], rows, results, tile, first_head, again.key_of(i) + D::first_key(),
                         again.mapped_blocks() >> (D::first_key() / 16));
    }
    clear_output_qk<S>(p, tile, first_head, again.first, again.first + again.count * W.tile_keys);
  }
}

// latent_decode.cu: attention over a LATENT cache: one kv head whose rows are keys, and whose first v_head_size channels are
// values too. A key tile is read once into shared memory and serves both products and all query heads.
//
//   grid    x: row tiles x split_count (row_tiles.cuh)     CTA  row_tiles / warp_tiles x column_warps warps (wide_attention.cuh)
//                                                               and score_warps warps
//   reads   query once a split; each latent row that the tile's tokens admit once
//   writes  output and lse where the tile has one split or none; else acc and lse of this split (combine_splits.cu)
//   smem    | queries | probabilities | row statistics | stages of latent rows | what the teams tell each other |
//
// With score_warps there are two teams: the score team computes probabilities of tile i + 1 while the value team sums the values
// of tile i, and then copies tile i + 2 there. Else all warps do everything, one after the other.
// Invariants
//   Splits are planned for a row tile, from the keys that any of its tokens admits; combine_splits plans the same way.
//   Rows that no token of the tile admits are zeros in shared memory, and are never read.
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/wide_attention.cuh>

struct LatentSpec {
  DType io;
  DType cache;
  int head_size;
  int v_head_size;
  int row_tiles;
  int warp_tiles;
  int column_warps;
  int score_warps;  // 0: there are no teams
  int tile_keys;
  int stages;

  __host__ __device__ constexpr int weighed() const { return score_warps == 0 ? 1 : stages; }
  // The grid of warps that sums values, and the one that has scores.
  __host__ __device__ constexpr WideShape wide() const {
    return {io, cache, head_size, v_head_size, true, row_tiles, warp_tiles, column_warps, tile_keys, stages, weighed()};
  }
  __host__ __device__ constexpr WideShape scores() const {
    return {io, cache, head_size, v_head_size, true, row_tiles, warp_tiles, score_warps * warp_tiles / row_tiles, tile_keys, stages, weighed()};
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

// What the teams tell each other of the tile in a stage.
template <LatentSpec S> struct TeamNews {
  uint64_t copied;                   // a barrier: the tile is there
  uint64_t weighed;                  // another one, an arrival of each thread of the score team: so is all that follows from its keys
  int moves;                         // whether references moved with it
  float shrink[16 * S.row_tiles];    // if so, the factors of what was summed before
  float row_max[16 * S.row_tiles];   // in the first one, at last: what the weights were made against
};

// What all threads know of the CTA's work. It lies in shared memory because the teams have no registers left for it.
struct TeamFacts {
  RowTile tile;
  TileKeys keys;
  KeyRange range;
  int splits;
};
static_assert(sizeof(TeamFacts) == 64, "latent_decode.py counts them");

template <LatentSpec S> struct Teams {
  using Values = Wide<S.wide()>;
  static constexpr int kValueThreads = Values::kThreads;
  static constexpr int kScoreThreads = S.score_warps * kWarpSize;
  static constexpr int kThreads = kValueThreads + kScoreThreads;
  // Named barriers of each team.
  static constexpr int kScores = 1;
  static constexpr int kSums = 2;
  using ValueTeam = Team<kSums, kValueThreads>;
  using ScoreTeam = Team<kScores, kScoreThreads>;

  // Whether this thread is of the score team.
  static __device__ __forceinline__ bool has_scores() { return S.score_warps > 0 && threadIdx.x >= kValueThreads; }
  static __device__ __forceinline__ TeamNews<S>& news(int i) {
    return reinterpret_cast<TeamNews<S>*>(Values::s_stages() + Values::Tiles::kBytes)[i % S.stages];
  }
  static __device__ __forceinline__ TeamFacts& facts() { return *reinterpret_cast<TeamFacts*>(&news(0) + S.stages); }
};

// The score team's part: leaves probabilities of each tile, and at last the sums of each range of keys and the references.
template <LatentSpec S>
__device__ __forceinline__ void weigh_keys(const LatentParams& p, float factor) {
  constexpr WideShape W = S.scores();
  using D = Wide<W>;
  using T = Teams<S>;
  static_assert(T::kValueThreads / kWarpSize % S.score_warps == 0, "the first warp of the team is the first of its grid");
  struct Tiles : TileBlocks<S.tile_keys, 0> {
    using TileBlocks<S.tile_keys, 0>::TileBlocks;
    __device__ __forceinline__ const unsigned char* key_tile(int i) const {
      return Wide<S.wide()>::s_stages() + i % S.stages * D::Tiles::kStageBytes;
    }
  };
  const TeamFacts& facts = T::facts();
  Tiles tiles(p.blocks, facts.range, facts.tile.sequence.index);
  WideRows<W> rows;
  begin_rows(rows, facts.tile, p.sequences, p.rules, facts.range);

  for (int i = 0; i < tiles.count; ++i) {
    TeamNews<S>& news = T::news(i);
    tiles.take();
    tiles.look_up(i + 1);
    ptx::mbarrier_wait(&news.copied, i / S.stages % 2);
    WideScores<W> scores;
    wide_scores(scores, rows, tiles, i, p.rules, factor, facts.keys.every, facts.tile, 0);

    float top[D::kLaneRows];
    bool moves = false;
#pragma unroll
    for (int own = 0; own < D::kLaneRows; ++own) {
      top[own] = row_maximum(scores[own / 2], own % 2);
      moves |= top[own] > rows.state[own].row_max + kSlack;
    }
    moves = T::ScoreTeam::any(moves);  // all keys are read: probabilities may take their place
    if (moves) {
#pragma unroll
      for (int own = 0; own < D::kLaneRows; ++own) {
        if (threadIdx.x % 4 == 0) D::s_stats()[D::column() * D::kRows + D::row(own)] = top[own];
      }
      T::ScoreTeam::sync();  // the maxima of every range of keys are visible
#pragma unroll
      for (int own = 0; own < D::kLaneRows; ++own) {
        const float most = maximum_of_row<W>(D::row(own));
        const float shrink = most > rows.state[own].row_max + kSlack ? rows.state[own].update_max(most) : 1.0f;
        if (D::column() == 0 && threadIdx.x % 4 == 0) news.shrink[D::row(own)] = shrink;
      }
    }
#pragma unroll
    for (int own = 0; own < D::kLaneRows; ++own) store_weights<W>(scores, rows, own, Wide<S.wide()>::s_probabilities(i % S.stages));
    if (threadIdx.x == T::kValueThreads) news.moves = moves;
    ptx::mbarrier_arrive(&news.weighed);
  }

  T::ScoreTeam::sync();  // nobody reads the maxima any more
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    const float sum = group_sum<4>(rows.state[own].row_sum);
    if (threadIdx.x % 4 != 0) continue;
    D::s_stats()[D::column() * D::kRows + D::row(own)] = sum;
    if (D::column() == 0) T::news(0).row_max[D::row(own)] = rows.state[own].row_max;
  }
  ptx::mbarrier_arrive(&T::news(tiles.count).weighed);  // as if there were one more tile
}

// The value team's part: copies the tiles, and sums their values with the probabilities that the score team leaves.
template <LatentSpec S>
__device__ __forceinline__ void sum_values(WideSums<S.wide()>& sums, typename Wide<S.wide()>::Tiles& tiles, const LatentParams& p) {
  using D = Wide<S.wide()>;
  using T = Teams<S>;
  const TeamFacts& facts = T::facts();
  // Rows that cp.async cannot copy are there when they are stored.
  const auto arrive = [&](int i) {
    if (tiles.keys.alignment == 1) {
      ptx::mbarrier_arrive(&T::news(i).copied);
    } else {
      ptx::mbarrier_arrive_after_copies(&T::news(i).copied);
    }
  };
#pragma unroll
  for (int i = 0; i < S.stages; ++i) {
    if (i == S.stages - 1) tiles.issue(i);
    arrive(i);
  }

  for (int i = 0; i < tiles.count; ++i) {
    TeamNews<S>& news = T::news(i);
    ptx::mbarrier_wait(&news.weighed, i / S.stages % 2);  // compute-sanitizer loses its way after named barriers at which some only arrive
    __syncwarp();  // named barriers, which are for whole warps, follow
    if (news.moves) {
      float shrink[D::kLaneRows];
#pragma unroll
      for (int own = 0; own < D::kLaneRows; ++own) shrink[own] = news.shrink[D::row(own)];
      sums.scale(shrink);
    }
    wide_values<typename T::ValueTeam>(sums, tiles, i, D::s_probabilities(i % S.stages),
                                       facts.keys.differ() && !tiles.is_open(i, facts.keys.every), [&](int own) {
                                         return keys_of_row(facts.tile, D::row(own), p.sequences, p.rules, facts.range);
                                       });
    T::ValueTeam::sync();  // nobody reads the tile any more
    tiles.issue(i + S.stages);
    arrive(i);
  }
  ptx::mbarrier_wait(&T::news(tiles.count).weighed, tiles.count / S.stages % 2);  // the sums of the weights and the references are there
  __syncwarp();
}

// Writes the lane's rows: the output, or, of one of several splits, its part.
template <WideShape W>
__device__ __forceinline__ void write_rows(const WideRows<W>& rows, const WideSums<W>& sums, const LatentParams& p, const RowTile& tile,
                                           int splits) {
  using D = Wide<W>;
  using Io = typename D::Io;
  const int split = static_cast<int>(blockIdx.x % p.partials.split_count);
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    const int row = D::row(own);
    if (row >= tile.rows) continue;
    const int token = tile.token(row);
    const int head = tile.head_in_group(row);
    const bool writes_lse = D::column() == 0 && threadIdx.x % 4 == 0;
    if (splits == 1) {
      const SoftmaxResult result = finalize(rows.state[own], sink_of<Io>(p.out.head_sink, head));
      Io* g_row = output_row<Io>(p.out, token, head, W.v_head_size);
      for_values_of_row(sums, own, result.factor, p.key_cache, 0,
                        [&](int channel, float first, float second) { store_2(g_row, channel, W.v_head_size, first, second); });
      if (writes_lse) store_lse(p.out, token, head, result.lse);
    } else {
      const int64_t at = partial_row(p.partials, token, split, p.out.num_heads, head);
      const SoftmaxResult result = finalize(rows.state[own], negative_infinity());
      float* g_row = p.partials.acc + at * partial_width(W.v_head_size);
      for_values_of_row(sums, own, result.factor, p.key_cache, 0, [&](int channel, float first, float second) {
        *reinterpret_cast<float2*>(g_row + channel) = {first, second};
      });
      if (writes_lse) p.partials.lse[at] = lse_of(rows.state[own]);
    }
  }
}

template <LatentSpec S>
__global__ void __launch_bounds__(Teams<S>::kThreads, 1) latent_decode(const __grid_constant__ LatentParams p) {
  constexpr WideShape W = S.wide();
  constexpr int kThreads = Teams<S>::kThreads;
  using D = Wide<W>;
  using Io = typename D::Io;
  const int split = static_cast<int>(blockIdx.x % p.partials.split_count);
  const RowTile tile = find_row_tile(p.sequences, static_cast<int>(blockIdx.x / p.partials.split_count), D::kRows,
                                     p.out.num_heads, capacity_of(p.blocks));
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();  // which writes the cache, and maybe the query
  if (tile.rows == 0) return;
  const TileKeys keys = keys_of_tokens(p.sequences, p.rules, tile.sequence, tile.first_token, tile.last_token());
  const SplitPlan plan = plan_splits(p.partials, keys.some);
  if (split >= plan.count) {
    if (split == 0) write_empty_tile<Io, kThreads>(p.out, tile, 0, W.v_head_size);
    return;
  }
  const KeyRange range = keys_of_split(p.partials, plan, keys.some, split);

  const KeyRange copied = Teams<S>::has_scores() ? KeyRange{0, 0} : range;
  typename D::Tiles tiles(p.blocks, p.key_cache, p.key_cache, 0, copied, tile.sequence.index, D::s_stages(), true);
  const float key_scale = load_query_tile<W.io, W.cache, W.head_size, D::kRows, kThreads>(
      D::s_query(), p.key_cache, 0, [&](int row) -> const Io* {
        if (row >= tile.rows) return nullptr;
        return static_cast<const Io*>(p.query) + tile.token(row) * p.query_stride + tile.head_in_group(row) * W.head_size;
      });
  const float factor = p.rules.scale * key_scale;
  WideRows<W> rows;
  WideSums<W> sums;
  if constexpr (S.score_warps == 0) {
    begin_rows(rows, tile, p.sequences, p.rules, range);
    for (int i = 0; i < tiles.count; ++i) {
      tiles.advance(i);
      WideScores<W> scores;
      if (D::has_scores()) wide_scores(scores, rows, tiles, i, p.rules, factor, keys.every, tile, 0);
      unsigned char* s_probabilities = D::s_probabilities(i % W.stages);
      wide_softmax(scores, rows, sums, s_probabilities);
      wide_values<WholeCta>(sums, tiles, i, s_probabilities, keys.differ() && !tiles.is_open(i, keys.every),
                            [&](int own) { return rows.keys[own]; });
    }
    sum_rows(rows);
    write_rows(rows, sums, p, tile, plan.count);
  } else {
    if (threadIdx.x < S.stages) {
      ptx::mbarrier_init(&Teams<S>::news(threadIdx.x).copied, Teams<S>::kValueThreads);
      ptx::mbarrier_init(&Teams<S>::news(threadIdx.x).weighed, Teams<S>::kScoreThreads);
    }
    if (threadIdx.x == 0) Teams<S>::facts() = {tile, keys, range, plan.count};
    __syncthreads();  // the queries are visible, the barriers and the facts
    if (Teams<S>::has_scores()) {
      weigh_keys<S>(p, factor);
      return;
    }
    sum_values<S>(sums, tiles, p);
#pragma unroll
    for (int own = 0; own < D::kLaneRows; ++own) {
      rows.state[own] = {Teams<S>::news(0).row_max[D::row(own)], total_of_row<S.scores()>(D::row(own))};
    }
    write_rows(rows, sums, p, Teams<S>::facts().tile, Teams<S>::facts().splits);
  }
}

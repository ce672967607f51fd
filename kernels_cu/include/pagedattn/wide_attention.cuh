// Attention of a row tile by a CTA whose warps share both products, for heads too wide for one warp's registers.
//
// Warps form a grid of row_tiles x column_warps. A warp owns 16 query rows and, of them,
//   scores   a range of the tile's keys (the first kScoreWarps columns of the grid; the others wait)
//   values   a range of the value channels
// Between the two, row maxima and probabilities pass through shared memory; every warp of a row keeps the same row_max.
//
//   | queries | probabilities | row maxima, later row sums | key and value stages |
#pragma once

#include <pagedattn/cta_tiles.cuh>
#include <pagedattn/epilogue.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/query_tile.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/tile_math.cuh>

struct WideShape {
  DType io;
  DType cache;
  int head_size;
  int v_head_size;
  bool latent;       // values are the first v_head_size channels of the keys
  int row_tiles;     // tiles of 16 rows in a CTA
  int column_warps;
  int tile_keys;
  int stages;
};

template <WideShape W> struct Wide {
  using Io = element_t<W.io>;
  using F = Fragments<W.io, W.cache>;
  using Tiles = CtaTiles<W.cache, W.head_size, W.latent ? 0 : W.v_head_size, W.tile_keys, W.stages, W.row_tiles * W.column_warps>;
  using Query = QueryShape<W.io, W.cache, W.head_size>;

  static constexpr int kWarps = W.row_tiles * W.column_warps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 16 * W.row_tiles;
  static constexpr int kSteps = Query::kPadded / 16;
  static constexpr int kScoreWarps = min_of(W.column_warps, W.tile_keys / 16);
  static constexpr int kKeysOfWarp = W.tile_keys / kScoreWarps;
  static constexpr int kNTiles = kKeysOfWarp / 8;
  static constexpr int kChannelsOfGroup = 8 * F::kValueTiles;
  static constexpr int kGroups = ceil_div(W.v_head_size, kChannelsOfGroup);
  static constexpr int kGroupsOfWarp = ceil_div(kGroups, W.column_warps);
  static constexpr int kTiles = kGroupsOfWarp * F::kValueTiles;
  static constexpr int kProbabilityStride = 16 * (W.tile_keys / 8 | 1);

  static constexpr int kQueryBytes = kRows * Query::kStride;
  static constexpr int kProbabilityBytes = kRows * kProbabilityStride;
  static constexpr int kStatBytes = kScoreWarps * kRows * static_cast<int>(sizeof(float));
  static constexpr int kStagesAt = kQueryBytes + kProbabilityBytes + kStatBytes;

  static_assert(W.head_size % 8 == 0, "rows are copied 16 bytes at a time");
  static_assert(!W.latent || W.v_head_size <= W.head_size, "LATENT values are channels of the key row");
  static_assert(kKeysOfWarp % 16 == 0, "a key fragment has 16 keys");
  static_assert(kTiles <= 32, "acc of a warp must fit its registers");
  static_assert(kStatBytes % 16 == 0, "stages start on 16 bytes");
  static_assert(is_quantized(W.cache) || W.cache == W.io, "an unquantized cache holds the io type");

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ __forceinline__ int row_tile() { return warp() % W.row_tiles; }
  static __device__ __forceinline__ int column() { return warp() / W.row_tiles; }
  static __device__ __forceinline__ bool has_scores() { return column() < kScoreWarps; }
  static __device__ __forceinline__ int first_key() { return column() * kKeysOfWarp; }
  static __device__ __forceinline__ int first_channel() { return column() * kGroupsOfWarp * kChannelsOfGroup; }
  // Row of the CTA's tile: `half` is 0 for row g, 1 for row g + 8 of the warp's 16.
  static __device__ __forceinline__ int row(int half) { return 16 * row_tile() + row_in_tile(2 * half); }

  static __device__ __forceinline__ unsigned char* s_query() { return shared_memory<unsigned char>(); }
  static __device__ __forceinline__ unsigned char* s_probabilities() { return s_query() + kQueryBytes; }
  static __device__ __forceinline__ float* s_stats() { return reinterpret_cast<float*>(s_query() + kQueryBytes + kProbabilityBytes); }
  static __device__ __forceinline__ unsigned char* s_stages() { return s_query() + kStagesAt; }
};

// What a lane holds of its two rows.
template <WideShape W> struct WideRows {
  KeyRange keys[2];       // that each admits
  SoftmaxState state[2];  // row_sum: this warp's part
  float acc[1][Wide<W>::kTiles][4] = {};
};

// Keys that the lane's rows admit, cut to `range`, the part of them that this CTA attends.
template <WideShape W>
__device__ __forceinline__ void begin_rows(WideRows<W>& rows, const RowTile& tile, const SequenceTable& table, const ScoreRules& rules,
                                           const KeyRange& range) {
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.keys[half] = keys_of_row(tile, Wide<W>::row(half), table, rules, range);
}

// Base-2 scores of this warp's rows and keys. Only for warps that have scores.
template <WideShape W>
__device__ __forceinline__ void wide_scores(float (&scores)[1][Wide<W>::kNTiles][4], const WideRows<W>& rows,
                                            const typename Wide<W>::Tiles& tiles, int i, const ScoreRules& rules, float factor,
                                            const KeyRange& every, const RowTile& tile, int first_head) {
  using D = Wide<W>;
  using Io = typename D::Io;
  const auto query_of = [&](int, int step, uint32_t (&a)[4]) {
    D::F::query(a, D::F::query_lane(D::s_query(), D::Query::kStride), D::Query::kStride, 16 * D::row_tile(), step);
  };
  const unsigned char* s_lane = D::F::keys_lane(tiles.key_tile(i), D::Tiles::KeyShape::kStride);
  multiply_keys<typename D::F, D::kSteps>(scores, query_of, s_lane, D::Tiles::KeyShape::kStride, D::first_key(), [](int) {});
  const auto keys_of = [&](int half) { return rows.keys[half]; };
  const int first_key = tiles.key_of(i) + D::first_key();
  scale_scores<Io>(scores[0], rules, factor, keys_of,
                   [&](int half) { return bias_row_of_tile<Io>(tile, D::row(half), rules, first_head); }, first_key);
  if (!tiles.is_open(i, every)) mask_scores(scores[0], keys_of, first_key, tiles.mapped_blocks() >> (D::first_key() / 16));
}

// Scores of all warps to probabilities in shared memory, and the new maxima to everyone's state.
template <WideShape W> __device__ __forceinline__ void wide_softmax(float (&scores)[1][Wide<W>::kNTiles][4], WideRows<W>& rows) {
  using D = Wide<W>;
  if (D::has_scores()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = row_maximum(scores[0], half);
      if (threadIdx.x % 4 == 0) D::s_stats()[D::column() * D::kRows + D::row(half)] = top;
    }
  }
  __syncthreads();  // the maxima of every range of keys are visible to all warps of the row
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = negative_infinity();
#pragma unroll
    for (int w = 0; w < D::kScoreWarps; ++w) top = fmaxf(top, D::s_stats()[w * D::kRows + D::row(half)]);
    scale_row(rows.acc[0], rows.state[half].update_max(top), half);
    if (!D::has_scores()) continue;
    weigh_row(scores[0], rows.state[half], half);
    unsigned char* s_row = D::s_probabilities() + D::row(half) * D::kProbabilityStride + 2 * D::first_key();
#pragma unroll
    for (int n = 0; n < D::kNTiles; ++n) {
      *reinterpret_cast<uint32_t*>(s_row + 2 * key_in_tile(n, 0)) =
          ptx::pack_2<typename D::Io>(scores[0][n][2 * half], scores[0][n][2 * half + 1]);
    }
  }
  __syncthreads();  // the probabilities are visible to the warps that sum values, and the maxima are free again
}

// acc += p . v for this warp's channels. `differ`: not all rows of the tile admit the same keys.
template <WideShape W>
__device__ __forceinline__ void wide_values(WideRows<W>& rows, const typename Wide<W>::Tiles& tiles, int i, bool differ) {
  using D = Wide<W>;
  constexpr int kStride = D::Tiles::ValueShape::kStride;
  unsigned char* s_values = tiles.value_tile(i);
  if (differ) {
    const uint32_t mapped = tiles.mapped_blocks();
    take_strange_values<typename D::F, W.cache, typename D::Tiles::ValueShape, W.tile_keys, D::kWarps>(
        rows.acc, s_values, D::column() * D::kGroupsOfWarp, D::kGroups,
        [&](int, int half, int key) {
          return to_float(reinterpret_cast<const typename D::Io*>(D::s_probabilities() + D::row(half) * D::kProbabilityStride)[key]);
        },
        [&](int, int half, int key) { return rows.keys[half].contains(tiles.key_of(i) + key) && (mapped >> (key / 16) & 1u); });
  }
#pragma unroll
  for (int block = 0; block < W.tile_keys / 16; ++block) {
    uint32_t p[1][4];
    D::F::probabilities(p[0], D::s_probabilities(), D::kProbabilityStride, 16 * D::row_tile(), block);
    multiply_values<typename D::F>(rows.acc, p, D::F::values_lane(s_values, kStride), kStride, 16 * block, D::column() * D::kGroupsOfWarp, D::kGroups);
  }
}

// Makes the sums of the warps of a row one sum, known to all of them.
template <WideShape W> __device__ __forceinline__ void sum_rows(WideRows<W>& rows) {
  using D = Wide<W>;
  __syncthreads();  // nobody reads the maxima any more
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = group_sum<4>(rows.state[half].row_sum);
    if (D::has_scores() && threadIdx.x % 4 == 0) D::s_stats()[D::column() * D::kRows + D::row(half)] = sum;
  }
  __syncthreads();  // the partial sums are visible
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.state[half].row_sum = 0.0f;
#pragma unroll
    for (int w = 0; w < D::kScoreWarps; ++w) rows.state[half].row_sum += D::s_stats()[w * D::kRows + D::row(half)];
  }
}

// Calls `use(channel, first, second)` for each pair of neighbouring channels of a row that this lane has; with `factor` and
// the value scale in them.
template <WideShape W, class Use>
__device__ __forceinline__ void for_values_of_row(const WideRows<W>& rows, int half, float factor, const KvCache& value_scales, int kv_head,
                                                  const Use& use) {
  using D = Wide<W>;
  D::F::for_channel_pairs(rows.acc[0], half, D::first_channel(), [&](int channel, float first, float second) {
    if (channel >= W.v_head_size) return;
    use(channel, first * factor * scale_of<W.cache>(value_scales, kv_head, channel),
        second * factor * scale_of<W.cache>(value_scales, kv_head, channel + 1));
  });
}

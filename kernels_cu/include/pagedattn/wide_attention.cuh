// Attention of a row tile by a CTA whose warps share both products, for heads too wide for one warp's registers.
//
// Warps form a grid of row_tiles / warp_tiles x column_warps. A warp owns 16 warp_tiles query rows and, of them,
//   scores   a range of the tile's keys (the first kScoreWarps columns of the grid; the others wait)
//   values   a range of the value channels
// Between the two, row maxima and probabilities pass through shared memory; every warp of a row keeps the same row_max.
//
// What bounds it is shared memory: a warp reads keys and values once for all of its rows, so two tiles of rows halve that. LATENT
// keys have channels that are no values; probabilities take their place.
//
//   | queries | probabilities | row maxima, later row sums | key and value stages |
#pragma once

#include <pagedattn/cta_tiles.cuh>
#include <pagedattn/epilogue.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/ptx/opaque.cuh>
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
  int warp_tiles;    // of them, in a warp
  int column_warps;
  int tile_keys;
  int stages;
  int weighed;       // tiles whose probabilities exist at a time
};

template <WideShape W> struct Wide {
  using Io = element_t<W.io>;
  using F = Fragments<W.io, W.cache>;
  using Tiles = CtaTiles<W.cache, W.head_size, W.latent ? 0 : W.v_head_size, W.tile_keys, W.stages,
                         W.row_tiles / W.warp_tiles * W.column_warps>;
  using Query = QueryShape<W.io, W.cache, W.head_size>;

  static constexpr int kRowWarps = W.row_tiles / W.warp_tiles;
  static constexpr int kWarps = kRowWarps * W.column_warps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 16 * W.row_tiles;
  static constexpr int kLaneRows = 2 * W.warp_tiles;
  static constexpr int kSteps = Query::kPadded / 16;
  // Unrolled, the operands of a step come well before their use; codes take too many instructions each.
  static constexpr int kUnrolledSteps = kSteps <= 8 || (kSteps <= 40 && !F::kCodes) ? kSteps : 4;
  static constexpr int kScoreWarps = min_of(W.column_warps, W.tile_keys / 16);
  static constexpr int kKeysOfWarp = W.tile_keys / kScoreWarps;
  static constexpr int kNTiles = kKeysOfWarp / 8;
  static constexpr int kChannelsOfGroup = 8 * F::kValueTiles;
  static constexpr int kGroups = ceil_div(W.v_head_size, kChannelsOfGroup);
  static constexpr int kGroupsOfWarp = ceil_div(kGroups, W.column_warps);
  static constexpr int kTiles = kGroupsOfWarp * F::kValueTiles;

  // Row r of the probabilities lies behind the value channels of key r, which nobody reads between the products.
  static constexpr int kValueEnd = round_up(W.v_head_size, 16);
  static constexpr bool kKeysHoldProbabilities =
      W.latent && !is_quantized(W.cache) && kRows <= W.tile_keys && kValueEnd + W.tile_keys <= W.head_size;
  static constexpr int kProbabilityStride = kKeysHoldProbabilities ? Tiles::KeyShape::kStride : 16 * (W.tile_keys / 8 | 1);

  static constexpr int kQueryBytes = kRows * Query::kStride;
  static constexpr int kProbabilityBytes = kKeysHoldProbabilities ? 0 : W.weighed * kRows * kProbabilityStride;
  // Value channels of a row of the value tile.
  struct ValueRows {
    static constexpr int kStride = Tiles::ValueShape::kStride;
    static constexpr int kVectors = TileShape<W.cache, W.v_head_size>::kVectors;
  };
  static constexpr int kStatBytes = kScoreWarps * kRows * static_cast<int>(sizeof(float));
  static constexpr int kStagesAt = kQueryBytes + kProbabilityBytes + kStatBytes;

  static_assert(W.head_size % 8 == 0, "rows are copied 16 bytes at a time");
  static_assert(!W.latent || W.v_head_size <= W.head_size, "LATENT values are channels of the key row");
  static_assert(kKeysOfWarp % 16 == 0, "a key fragment has 16 keys");
  static_assert(W.row_tiles % W.warp_tiles == 0, "every warp has as many rows");
  static_assert(kStatBytes % 16 == 0, "stages start on 16 bytes");
  static_assert(is_quantized(W.cache) || W.cache == W.io, "an unquantized cache holds the io type");

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ __forceinline__ int first_row() { return 16 * W.warp_tiles * (warp() % kRowWarps); }
  // The remainder changes nothing, but tells the compiler the range: no warp then asks whether its channels exist.
  static __device__ __forceinline__ int column() { return warp() / kRowWarps % W.column_warps; }
  static __device__ __forceinline__ bool has_scores() { return column() < kScoreWarps; }
  static __device__ __forceinline__ int first_key() { return column() * kKeysOfWarp; }
  static __device__ __forceinline__ int first_channel() { return column() * kGroupsOfWarp * kChannelsOfGroup; }
  // Row of the CTA's tile: a lane has row g and row g + 8 of each tile of its warp, in this order.
  static __device__ __forceinline__ int row(int own) { return first_row() + 16 * (own / 2) + row_in_tile(2 * (own % 2)); }

  static __device__ __forceinline__ unsigned char* s_query() { return shared_memory<unsigned char>(); }
  // Of a tile in stage `stage`.
  static __device__ __forceinline__ unsigned char* s_probabilities(int stage) {
    return kKeysHoldProbabilities ? s_stages() + stage * Tiles::kStageBytes + 2 * kValueEnd
                                  : s_query() + kQueryBytes + stage % W.weighed * kRows * kProbabilityStride;
  }
  static __device__ __forceinline__ float* s_stats() { return reinterpret_cast<float*>(s_query() + kQueryBytes + kProbabilityBytes); }
  static __device__ __forceinline__ unsigned char* s_stages() { return s_query() + kStagesAt; }
};

// What a lane holds of its rows.
template <WideShape W> struct WideRows {
  KeyRange keys[Wide<W>::kLaneRows];       // that each admits
  SoftmaxState state[Wide<W>::kLaneRows];  // row_sum: this warp's part
};

// Weighted sums of values: of the lane's rows, this warp's channels.
template <WideShape W> struct WideSums {
  static_assert(W.warp_tiles * Wide<W>::kTiles <= 32, "they must fit the registers");
  float acc[W.warp_tiles][Wide<W>::kTiles][4] = {};

  __device__ __forceinline__ void scale(const float (&factor)[Wide<W>::kLaneRows]) {
#pragma unroll
    for (int own = 0; own < Wide<W>::kLaneRows; ++own) scale_row(acc[own / 2], factor[own], own % 2);
  }
};

template <WideShape W> using WideScores = float[W.warp_tiles][Wide<W>::kNTiles][4];

// Keys that the lane's rows admit, cut to `range`, the part of them that this CTA attends.
template <WideShape W>
__device__ __forceinline__ void begin_rows(WideRows<W>& rows, const RowTile& tile, const SequenceTable& table, const ScoreRules& rules,
                                           const KeyRange& range) {
  using D = Wide<W>;
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) rows.keys[own] = keys_of_row(tile, D::row(own), table, rules, range);
}

// Base-2 scores of this warp's rows and keys. Only for warps that have scores. `tiles` is TileBlocks that knows where its tiles lie.
template <WideShape W, class Tiles>
__device__ __forceinline__ void wide_scores(WideScores<W>& scores, const WideRows<W>& rows, const Tiles& tiles, int i,
                                            const ScoreRules& rules, float factor, const KeyRange& every, const RowTile& tile,
                                            int first_head) {
  using D = Wide<W>;
  using Io = typename D::Io;
  constexpr int kStride = D::Tiles::KeyShape::kStride;
  // Opaque: else the compiler keeps the address of each step in a register of its own.
  const unsigned char* s_lane_query = D::F::query_lane(D::s_query() + ptx::opaque(D::first_row() * D::Query::kStride), D::Query::kStride);
  const auto query_of = [&](int m, int step, uint32_t (&a)[4]) { D::F::query(a, s_lane_query, D::Query::kStride, 16 * m, step); };
  const unsigned char* s_lane = D::F::keys_lane(tiles.key_tile(i) + D::first_key() * kStride, kStride);
  multiply_keys<typename D::F, D::kSteps, D::kUnrolledSteps>(scores, query_of, s_lane, kStride, 0, [](int) {});
  const int first_key = tiles.key_of(i) + D::first_key();
  const bool masked = !tiles.is_open(i, every);
#pragma unroll
  for (int m = 0; m < W.warp_tiles; ++m) {
    const auto keys_of = [&](int half) { return rows.keys[2 * m + half]; };
    scale_scores<Io>(scores[m], rules, factor, keys_of,
                     [&](int half) { return bias_row_of_tile<Io>(tile, D::row(2 * m + half), rules, first_head); }, first_key);
    if (masked) mask_scores(scores[m], keys_of, first_key, tiles.mapped_blocks() >> (D::first_key() / 16));
  }
}

// Of what every range of keys left of a row in the row statistics.
template <WideShape W> __device__ __forceinline__ float maximum_of_row(int row) {
  float top = negative_infinity();
#pragma unroll
  for (int w = 0; w < Wide<W>::kScoreWarps; ++w) top = fmaxf(top, Wide<W>::s_stats()[w * Wide<W>::kRows + row]);
  return top;
}
template <WideShape W> __device__ __forceinline__ float total_of_row(int row) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < Wide<W>::kScoreWarps; ++w) total += Wide<W>::s_stats()[w * Wide<W>::kRows + row];
  return total;
}

// Scores of one of the lane's rows to probabilities in shared memory.
template <WideShape W>
__device__ __forceinline__ void store_weights(WideScores<W>& scores, WideRows<W>& rows, int own, unsigned char* s_probabilities) {
  using D = Wide<W>;
  weigh_row(scores[own / 2], rows.state[own], own % 2);
  unsigned char* s_row = s_probabilities + D::row(own) * D::kProbabilityStride + 2 * D::first_key();
#pragma unroll
  for (int n = 0; n < D::kNTiles; ++n) {
    const float(&pair)[4] = scores[own / 2][n];
    *reinterpret_cast<uint32_t*>(s_row + 2 * key_in_tile(n, 0)) =
        ptx::pack_2<typename D::Io>(pair[own % 2 * 2], pair[own % 2 * 2 + 1]);
  }
}

// Scores of all warps to probabilities in shared memory, and the new maxima to everyone's state.
template <WideShape W>
__device__ __forceinline__ void wide_softmax(WideScores<W>& scores, WideRows<W>& rows, WideSums<W>& sums, unsigned char* s_probabilities) {
  using D = Wide<W>;
  if (D::has_scores()) {
#pragma unroll
    for (int own = 0; own < D::kLaneRows; ++own) {
      const float top = row_maximum(scores[own / 2], own % 2);
      if (threadIdx.x % 4 == 0) D::s_stats()[D::column() * D::kRows + D::row(own)] = top;
    }
  }
  __syncthreads();  // the maxima of every range of keys are visible to all warps of the row, and all keys are read
  float shrink[D::kLaneRows];
  bool shrinks = false;
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    shrink[own] = rows.state[own].update_max(maximum_of_row<W>(D::row(own)));
    shrinks |= shrink[own] != 1.0f;
    if (D::has_scores()) store_weights<W>(scores, rows, own, s_probabilities);
  }
  if (__ballot_sync(kFullWarp, shrinks) != 0) sums.scale(shrink);  // maxima seldom move after the first tiles
  __syncthreads();  // the probabilities are visible to the warps that sum values, and the maxima are free again
}

// acc += p . v for this warp's channels. `differ`: not all rows of the tile admit the same keys; `keys_of(own)`: which ones a row of
// the lane does. `Meeting` are the warps of the grid.
template <class Meeting, WideShape W, class KeysOf>
__device__ __forceinline__ void wide_values(WideSums<W>& sums, const typename Wide<W>::Tiles& tiles, int i,
                                            const unsigned char* s_probabilities, bool differ, const KeysOf& keys_of) {
  using D = Wide<W>;
  constexpr int kStride = D::Tiles::ValueShape::kStride;
  unsigned char* s_values = tiles.value_tile(i);
  if (differ) {
    const uint32_t mapped = tiles.mapped_blocks();
    take_strange_values<typename D::F, W.cache, typename D::ValueRows, W.tile_keys, D::kWarps, Meeting>(
        sums.acc, s_values, D::column() * D::kGroupsOfWarp, D::kGroups,
        [&](int m, int half, int key) {
          const unsigned char* s_row = s_probabilities + D::row(2 * m + half) * D::kProbabilityStride;
          return to_float(reinterpret_cast<const typename D::Io*>(s_row)[key]);
        },
        [&](int m, int half, int key) {
          return keys_of(2 * m + half).contains(tiles.key_of(i) + key) && (mapped >> (key / 16) & 1u);
        });
  }
#pragma unroll
  for (int block = 0; block < W.tile_keys / 16; ++block) {
    uint32_t p[W.warp_tiles][4];
#pragma unroll
    for (int m = 0; m < W.warp_tiles; ++m) {
      D::F::probabilities(p[m], s_probabilities, D::kProbabilityStride, D::first_row() + 16 * m, block);
    }
    multiply_values<typename D::F>(sums.acc, p, D::F::values_lane(s_values, kStride), kStride, 16 * block,
                                   D::column() * D::kGroupsOfWarp, D::kGroups);
  }
}

// Makes the sums of the warps of a row one sum, known to all of them.
template <WideShape W> __device__ __forceinline__ void sum_rows(WideRows<W>& rows) {
  using D = Wide<W>;
  __syncthreads();  // nobody reads the maxima any more
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    const float sum = group_sum<4>(rows.state[own].row_sum);
    if (D::has_scores() && threadIdx.x % 4 == 0) D::s_stats()[D::column() * D::kRows + D::row(own)] = sum;
  }
  __syncthreads();  // the partial sums are visible
#pragma unroll
  for (int own = 0; own < D::kLaneRows; ++own) {
    rows.state[own].row_sum = total_of_row<W>(D::row(own));
  }
}

// Calls `use(channel, first, second)` for each pair of neighbouring channels of a row that this lane has; with `factor` and
// the value scale in them.
template <WideShape W, class Use>
__device__ __forceinline__ void for_values_of_row(const WideSums<W>& sums, int own, float factor, const KvCache& value_scales, int kv_head,
                                                  const Use& use) {
  using D = Wide<W>;
  D::F::for_channel_pairs(sums.acc[own / 2], own % 2, D::first_channel(), [&](int channel, float first, float second) {
    if (channel >= W.v_head_size) return;
    use(channel, first * factor * scale_of<W.cache>(value_scales, kv_head, channel),
        second * factor * scale_of<W.cache>(value_scales, kv_head, channel + 1));
  });
}

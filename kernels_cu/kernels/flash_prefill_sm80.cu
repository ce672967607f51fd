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
#include <pagedattn/epilogue.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/ptx/opaque.cuh>
#include <pagedattn/query_tile.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/tile_math.cuh>
#include <pagedattn/turn_tiles.cuh>

struct FlashSpec {
  DType io;
  DType cache;
  int head_size;
  int row_tiles;  // tiles of 16 rows in a warp
  int warps;
  int tile_keys;
  int ctas;  // that share a multiprocessor
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

// What the CTA remembers of a row of its tile in shared memory: most tiles of keys ask for none of it.
struct RowFacts {
  KeyRange keys;  // that it admits
  int token;      // negative: the row does not exist
  int head;
};

template <FlashSpec S> struct Flash {
  using Io = element_t<S.io>;
  using F = Fragments<S.io, S.cache>;
  using Tiles = TurnTiles<S.cache, S.head_size, S.tile_keys, S.warps>;
  using Query = QueryShape<S.io, S.cache, S.head_size>;
  static constexpr int kThreads = S.warps * kWarpSize;
  static constexpr int kRowsOfWarp = 16 * S.row_tiles;
  static constexpr int kRows = S.warps * kRowsOfWarp;
  static constexpr int kSteps = Query::kPadded / 16;
  static constexpr int kNTiles = S.tile_keys / 8;
  static constexpr int kValueTiles = Query::kPadded / 8;
  static constexpr int kGroups = kValueTiles / F::kValueTiles;
  static constexpr int kBlocks = S.tile_keys / 16;
  static constexpr int kQueryBytes = kRows * Query::kStride;
  static constexpr int kFactBytes = (kRows + 1) * static_cast<int>(sizeof(RowFacts));

  // Rows of the CTA's tile: the first of the warp's m-th 16, and the lane's two of them, g for half 0 and g + 8 for half 1.
  static __device__ __forceinline__ int first_row(int m) {
    return static_cast<int>(threadIdx.x) / kWarpSize * kRowsOfWarp + 16 * m;
  }
  static __device__ __forceinline__ int row(int m, int half) { return first_row(m) + row_in_tile(2 * half); }
};

// A reference that is at most this far (in powers of two) below the maximum is kept: weights stay below 2^8, and acc is not scaled.
constexpr float kSlack = 8.0f;

// Moves the references of rows whose scores have outgrown them, and scales what was summed up before. `unit` takes scores to base 2.
template <FlashSpec S>
__device__ __forceinline__ void move_references(const float (&scores)[S.row_tiles][Flash<S>::kNTiles][4], float unit,
                                                SoftmaxState (&state)[S.row_tiles][2], float (&acc)[S.row_tiles][Flash<S>::kValueTiles][4]) {
  float top[S.row_tiles][2];
  bool moved = false;
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[m][half] = unit * lane_maximum(scores[m], half);
      moved = moved || top[m][half] - state[m][half].row_max > kSlack;
    }
  }
  if (!__any_sync(kFullWarp, moved)) return;
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) scale_row(acc[m], state[m][half].update_max(group_max<4>(top[m][half])), half);
  }
}

// Turns part `part` of kGroups of the scores of a block of 16 keys into weights.
template <FlashSpec S>
__device__ __forceinline__ void weigh(float (&scores)[S.row_tiles][Flash<S>::kNTiles][4], SoftmaxState (&state)[S.row_tiles][2], float unit,
                                      int block, int part) {
  constexpr int kScores = 8 * S.row_tiles;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (i * Flash<S>::kGroups / kScores != part) continue;
    SoftmaxState& row = state[i / 8][i / 2 % 2];
    float& score = scores[i / 8][2 * block + i / 4 % 2][i % 4];
    score = ptx::exp2_approximate(fmaf(score, unit, -row.reference()));
    row.row_sum += score;
  }
}

// acc += p . v over a tile of scores, of which the first 16 keys are weights already. The weights of the others are made, and `between(
// turn)` is called, among the products.
template <FlashSpec S, class Between>
__device__ __forceinline__ void weigh_values(float (&acc)[S.row_tiles][Flash<S>::kValueTiles][4], float (&scores)[S.row_tiles][Flash<S>::kNTiles][4],
                                             SoftmaxState (&state)[S.row_tiles][2], float unit, const unsigned char* s_lane,
                                             const Between& between) {
  using D = Flash<S>;
#pragma unroll
  for (int block = 0; block < D::kBlocks; ++block) {
    uint32_t p[S.row_tiles][4];
#pragma unroll
    for (int m = 0; m < S.row_tiles; ++m) pack_probabilities<typename D::Io>(p[m], scores[m][2 * block], scores[m][2 * block + 1]);
#pragma unroll
    for (int group = 0; group < D::kGroups; ++group) {
      multiply_value_group<typename D::F>(acc, p, s_lane, D::Tiles::Shape::kStride, 16 * block, group, D::F::kValueTiles * group);
      if (block + 1 < D::kBlocks) weigh<S>(scores, state, unit, block + 1, group);
      between(block * D::kGroups + group);
    }
  }
}

// Calls copy(part) for those of kParts copies that are due at `step` of kSteps: in the first half, since the next turn waits for them.
template <int kParts, int kSteps, class Copy> __device__ __forceinline__ void copy_at(int step, const Copy& copy) {
  constexpr int kAtOnce = ceil_div(2 * kParts, kSteps);
#pragma unroll
  for (int part = step * kAtOnce; part < (step + 1) * kAtOnce; ++part) {
    if (part < kParts) copy(part);
  }
}

template <FlashSpec S>
__global__ void __launch_bounds__(S.warps * kWarpSize, S.ctas) flash_prefill_sm80(const __grid_constant__ FlashParams p) {
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
  RowFacts* s_facts = reinterpret_cast<RowFacts*>(s_query + D::kQueryBytes);
  for (int row = threadIdx.x; row < D::kRows; row += D::kThreads) {
    s_facts[row] = {keys_of_row(tile, row, p.sequences, p.rules, keys.some), row < tile.rows ? tile.token(row) : -1,
                    first_head + tile.head_in_group(row)};
  }
  if (threadIdx.x == 0) s_facts[D::kRows] = {keys.every, tile.sequence.begin, 0};  // what the CTA seldom asks for
  __syncthreads();  // the facts are there for all warps
  const float key_scale = load_query_tile<S.io, S.cache, S.head_size, D::kRows, D::kThreads, true>(
      s_query, p.key_cache, kv_head, [&](int row) -> const Io* {
        const int token = s_facts[row].token;
        if (token < 0) return nullptr;
        return static_cast<const Io*>(p.query) + token * p.query_stride + static_cast<int64_t>(s_facts[row].head) * S.head_size;
      });
  typename D::Tiles tiles(p.blocks, p.key_cache, p.value_cache, kv_head, keys.some, tile.sequence.index,
                          s_query + D::kQueryBytes + D::kFactBytes);
  const float factor = p.rules.scale * key_scale;
  const unsigned char* s_query_lane = ptx::opaque(D::F::query_lane(s_query + D::first_row(0) * D::Query::kStride, D::Query::kStride));
  const unsigned char* s_keys_lane = ptx::opaque(D::F::keys_lane(tiles.s_keys, D::Tiles::Shape::kStride));
  const unsigned char* s_values_lane = ptx::opaque(D::F::values_lane(tiles.s_values, D::Tiles::Shape::kStride));
  const auto query_of = [&](int m, int step, uint32_t (&a)[4]) { D::F::query(a, s_query_lane, D::Query::kStride, 16 * m, step); };
  const auto facts_of = [&](int m, int half) -> const RowFacts& { return s_facts[D::row(m, half)]; };
  const auto keys_of = [&](int m, int half) { return facts_of(m, half).keys; };
  const auto bias_row = [&](int m, int half) -> const Io* {
    const RowFacts& row = facts_of(m, half);
    return bias_row_of<Io>(p.rules, tiles.sequence, row.head, row.token - s_facts[D::kRows].token);
  };
  // Softmax takes scores to base 2 itself, unless a rule stands before it or the order of scores is not that of the products.
  const bool plain = !has_score_rules(p.rules) && factor > 0.0f;
  const float unit = plain ? factor * kLog2E : 1.0f;

  float acc[S.row_tiles][D::kValueTiles][4] = {};
  SoftmaxState state[S.row_tiles][2];
  while (tiles.has_more()) {
    tiles.take_keys();
    float scores[S.row_tiles][D::kNTiles][4];
    multiply_keys<typename D::F, D::kSteps>(scores, query_of, s_keys_lane, D::Tiles::Shape::kStride, 0, [&](int step) {
      copy_at<D::Tiles::kParts, D::kSteps>(step, [&](int part) { tiles.copy_values(part); });
    });
    if (!plain) {
#pragma unroll
      for (int m = 0; m < S.row_tiles; ++m) {
        scale_scores<Io>(scores[m], p.rules, factor, [&](int half) { return keys_of(m, half); }, [&](int half) { return bias_row(m, half); },
                         tiles.key);
      }
    }
    const KeyRange every = s_facts[D::kRows].keys;
    const bool masked = !tiles.is_open(every);
    if (masked) {
#pragma unroll
      for (int m = 0; m < S.row_tiles; ++m) mask_scores(scores[m], [&](int half) { return keys_of(m, half); }, tiles.key, tiles.mapped);
    }
    tiles.plan_keys();
    move_references<S>(scores, unit, state, acc);
#pragma unroll
    for (int part = 0; part < D::kGroups; ++part) weigh<S>(scores, state, unit, 0, part);
    tiles.take_values();
    if (masked && (every.begin != keys.some.begin || every.end != keys.some.end)) {
      take_strange_values<typename D::F, S.cache, typename D::Tiles::Shape, S.tile_keys, S.warps>(
          acc, tiles.s_values, 0, D::kGroups,
          [&](int m, int half, int key) {
            const float score = score_of_key(scores[m], half, key);
            return key < 16 ? score : ptx::exp2_approximate(fmaf(score, unit, -state[m][half].reference()));
          },
          [&](int m, int half, int key) { return keys_of(m, half).contains(tiles.key + key) && (tiles.mapped >> (key / 16) & 1u); });
    }
    weigh_values<S>(acc, scores, state, unit, s_values_lane, [&](int step) {
      copy_at<D::Tiles::kParts, D::kBlocks * D::kGroups>(step, [&](int part) { tiles.copy_keys(part); });
      if (step == (D::kBlocks - 1) * D::kGroups) tiles.plan_values();
    });
  }

  // Rows leave through the place of the queries of their warp, so that lanes side by side store what lies side by side.
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[m][half].row_sum = group_sum<4>(state[m][half].row_sum);
      const RowFacts& row = facts_of(m, half);
      const SoftmaxResult result = finalize(state[m][half], sink_of<Io>(p.out.head_sink, row.head));
      unsigned char* s_row = s_query + D::row(m, half) * D::Query::kStride;
      D::F::for_channel_pairs(acc[m], half, 0, [&](int channel, float first, float second) {
        if (channel >= S.head_size) return;
        *reinterpret_cast<uint32_t*>(s_row + 2 * channel) =
            ptx::pack_2<Io>(first * result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel),
                            second * result.factor * scale_of<S.cache>(p.value_cache, kv_head, channel + 1));
      });
      if (row.token >= 0 && threadIdx.x % 4 == 0) store_lse(p.out, row.token, row.head, result.lse);
    }
  }
  __syncwarp();  // the warp's rows are whole
  constexpr int kVectors = S.head_size / 8;
#pragma unroll 4
  for (int i = threadIdx.x % kWarpSize; i < D::kRowsOfWarp * kVectors; i += kWarpSize) {
    const int row = D::first_row(0) + i / kVectors;
    const int channel = i % kVectors * 8;
    if (s_facts[row].token < 0) continue;
    store_8(output_row<Io>(p.out, s_facts[row].token, s_facts[row].head, S.head_size) + channel,
            *reinterpret_cast<const Vector16*>(s_query + row * D::Query::kStride + 2 * channel));
  }
}

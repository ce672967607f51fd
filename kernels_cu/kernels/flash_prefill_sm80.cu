// flash_prefill_sm80.cu: attention of prompts, chunks and mixed batches with mma.sync, for every GPU from sm_80 on and every
// head size to 256, cache type and rule but output_qk.
//
//   grid    x: row tiles (row_tiles.cuh), the longest first    y: kv head
//   CTA     S.warps warps, each with S.row_tiles tiles of 16 rows (token, head of the group) of its own
//   reads   query once; keys and values that some token of the tile admits, once per tile, in place
//   writes  output and lse, rows of padding tokens included
//   smem    | queries, later output | facts of the rows | keys | values |
//
// A warp keeps scores, weights and acc of its rows in registers; warps meet only where a tile arrives (turn_tiles.cuh):
//
//   products   | q.k  ............ |          | p.v ............ |
//   among them | copies of values  | maxima   | weights, copies of keys
//                                  | plan of the next copies, weights of the first 16 keys
// Invariants
//   Keys that no token of the tile admits, and unmapped blocks, are zeros in shared memory and are not read.
//   Only tiles at the edge of some token's range, or with an unmapped block, are masked.
//   row_max of a row is at most kSlack below its maximum, and at least where it was when acc was scaled last.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
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

// What the CTA remembers of a row of its tile, in shared memory: most tiles of keys ask for none of it.
struct RowFacts {
  KeyRange keys;  // that it admits
  int token;      // negative: the row does not exist
  int head;
};

template <FlashSpec S> struct Flash {
  using Io = element_t<S.io>;
  using F = Fragments<S.io, S.cache, is_quantized(S.cache) ? DType::f16 : S.io>;
  using Tiles = TurnTiles<S.cache, S.head_size, S.tile_keys, S.warps>;
  using Query = QueryShape<S.io, S.cache, S.head_size>;
  static constexpr int kThreads = S.warps * kWarpSize;
  static constexpr int kRowsOfWarp = 16 * S.row_tiles;
  static constexpr int kRows = S.warps * kRowsOfWarp;
  static constexpr int kSteps = Query::kPadded / 16;
  static constexpr int kBlocks = S.tile_keys / 16;
  static constexpr int kNTiles = S.tile_keys / 8;
  static constexpr int kValueTiles = Query::kPadded / 8;
  static constexpr int kGroups = kValueTiles / F::kValueTiles;
  static constexpr int kStride = Tiles::Shape::kStride;
  static constexpr int kQueryBytes = kRows * Query::kStride;
  static constexpr int kFactBytes = (kRows + 1) * static_cast<int>(sizeof(RowFacts));

  using Scores = float[S.row_tiles][kNTiles][4];
  using Acc = float[S.row_tiles][kValueTiles][4];
  using States = SoftmaxState[S.row_tiles][2];

  // Rows of the CTA's tile: the first of the warp's, and the lane's two of the m-th 16, g for half 0 and g + 8 for half 1.
  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kWarpSize * kRowsOfWarp; }
  static __device__ __forceinline__ int row(int m, int half) { return first_row() + 16 * m + row_in_tile(2 * half); }
  // ldmatrix takes any pointer; ordinary loads must see that theirs is one to shared memory.
  static __device__ __forceinline__ const unsigned char* fixed(const unsigned char* s_lane) {
    return F::kCodes ? s_lane : ptx::opaque(s_lane);
  }
};

// Moves the references of rows whose scores have outgrown them, and scales what was summed up before. `unit` takes scores to base 2.
template <FlashSpec S>
__device__ __forceinline__ void move_references(const typename Flash<S>::Scores& scores, float unit, typename Flash<S>::States& state,
                                                typename Flash<S>::Acc& acc) {
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
__device__ __forceinline__ void weigh(typename Flash<S>::Scores& scores, typename Flash<S>::States& state, float unit, int block, int part) {
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

// acc += p . v over a tile of scores, of which the first 16 keys are weights already. Among the products the other weights are made,
// and `between(step)` is called.
template <FlashSpec S, class Between>
__device__ __forceinline__ void weigh_values(typename Flash<S>::Acc& acc, typename Flash<S>::Scores& scores, typename Flash<S>::States& state,
                                             float unit, const unsigned char* s_lane, const Between& between) {
  using D = Flash<S>;
#pragma unroll
  for (int block = 0; block < D::kBlocks; ++block) {
    uint32_t p[S.row_tiles][4];
#pragma unroll
    for (int m = 0; m < S.row_tiles; ++m) pack_probabilities<typename D::F::Value>(p[m], scores[m][2 * block], scores[m][2 * block + 1]);
#pragma unroll
    for (int group = 0; group < D::kGroups; ++group) {
      multiply_value_group<typename D::F>(acc, p, s_lane, D::kStride, 16 * block, group, D::F::kValueTiles * group);
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

// Rows leave through the place of the queries of their warp, so that lanes side by side store what lies side by side.
template <FlashSpec S>
__device__ __forceinline__ void write_rows(const FlashParams& p, const typename Flash<S>::Acc& acc, typename Flash<S>::States& state,
                                           unsigned char* s_rows, const RowFacts* s_facts, int kv_head) {
  using D = Flash<S>;
  using Io = typename D::Io;
#pragma unroll
  for (int m = 0; m < S.row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowFacts& row = s_facts[D::row(m, half)];
      state[m][half].row_sum = group_sum<4>(state[m][half].row_sum);
      const SoftmaxResult result = finalize(state[m][half], sink_of<Io>(p.out.head_sink, row.head));
      unsigned char* s_row = s_rows + D::row(m, half) * D::Query::kStride;
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
    const int row = D::first_row() + i / kVectors;
    const int channel = i % kVectors * 8;
    if (s_facts[row].token < 0) continue;
    store_8(output_row<Io>(p.out, s_facts[row].token, s_facts[row].head, S.head_size) + channel,
            *reinterpret_cast<const Vector16*>(s_rows + row * D::Query::kStride + 2 * channel));
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
  ptx::wait_for_previous_kernel();  // which writes the cache, and maybe the query
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
  const RowFacts& whole = s_facts[D::kRows];  // the keys that every row admits, and the first token of the sequence
  if (threadIdx.x == 0) s_facts[D::kRows] = {keys.every, tile.sequence.begin, 0};
  __syncthreads();  // the facts are there for all warps
  const float key_scale = load_query_tile<S.io, S.cache, S.head_size, D::kRows, D::kThreads, true>(
      s_query, p.key_cache, kv_head, [&](int row) -> const Io* {
        if (s_facts[row].token < 0) return nullptr;
        return static_cast<const Io*>(p.query) + s_facts[row].token * p.query_stride + static_cast<int64_t>(s_facts[row].head) * S.head_size;
      });
  typename D::Tiles tiles(p.blocks, p.key_cache, p.value_cache, kv_head, keys.some, tile.sequence.index,
                          s_query + D::kQueryBytes + D::kFactBytes);
  const unsigned char* s_query_lane = D::fixed(D::F::query_lane(s_query + D::first_row() * D::Query::kStride, D::Query::kStride));
  const unsigned char* s_keys_lane = D::fixed(D::F::keys_lane(tiles.s_keys, D::kStride));
  const unsigned char* s_values_lane = D::fixed(D::F::values_lane(tiles.s_values, D::kStride));
  const auto query_of = [&](int m, int step, uint32_t (&a)[4]) { D::F::query(a, s_query_lane, D::Query::kStride, 16 * m, step); };
  const auto keys_of = [&](int m, int half) { return s_facts[D::row(m, half)].keys; };
  const auto bias_row = [&](int m, int half) -> const Io* {
    const RowFacts& row = s_facts[D::row(m, half)];
    return bias_row_of<Io>(p.rules, tiles.sequence, row.head, row.token - whole.token);
  };
  // Softmax takes scores to base 2 itself, unless a rule stands before it or the order of scores is not that of the products.
  const float factor = p.rules.scale * key_scale;
  const bool plain = !has_score_rules(p.rules) && factor > 0.0f;
  const float unit = plain ? factor * kLog2E : 1.0f;

  typename D::Acc acc = {};
  typename D::States state;
  while (tiles.has_more()) {
    tiles.take_keys();
    typename D::Scores scores;
    multiply_keys<typename D::F, D::kSteps>(scores, query_of, s_keys_lane, D::kStride, 0, [&](int step) {
      copy_at<D::Tiles::kParts, D::kSteps>(step, [&](int part) { tiles.copy_values(part); });
    });
    if (!plain) {
#pragma unroll
      for (int m = 0; m < S.row_tiles; ++m) {
        scale_scores<Io>(scores[m], p.rules, factor, [&](int half) { return keys_of(m, half); }, [&](int half) { return bias_row(m, half); },
                         tiles.key);
      }
    }
    const KeyRange every = whole.keys;
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
  write_rows<S>(p, acc, state, s_query, s_facts, kv_head);
}

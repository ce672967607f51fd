// flash_prefill_sm90.cu: attention of whole prompts, chunks and mixed batches on Hopper's tensor cores. Bound by arithmetic.
//
//   grid    x: CTAs that stay; each takes every gridDim.x-th piece of work, alternately from the left and from the right
//   work    (kv head, tile of tokens with all query heads of the group), a sequence's last tokens, which see most keys, first
//   CTA     a warp that loads queries, one keys, one values, one that leaves; S.warpgroups warpgroups compute on 64 rows each
//   reads   query once; the key and value tiles that some token of the work admits, once per work, in place
//   writes  output and lse, rows of padding tokens included
//   smem    | queries: 64 rows per warpgroup | S.stages key tiles | S.stages value tiles | barriers, Work |
//
// The warp that loads queries finds the work, one piece ahead, and tells all others of it in shared memory. Those that load
// keys and values run ahead by as many tiles as there are stages, into the next work too.
//
//   computes    q.K0  softmax0  q.K1 with p.V0  softmax1  q.K2 with p.V1 ...  p.Vn  write
//
// A warpgroup's softmax runs under its own p.V and under the products of the other warpgroups, which take turns issuing.
//
// A tile in shared memory has rows of kRowBytes that wgmma's swizzle permutes, eight of them an atom:
//   tile [tile_kv / 8][kChannelGroups] atoms, so that the rows of one block of the cache are one contiguous box of the copy
//   queries [warpgroups][kChannelGroups][64 / 8] atoms
// Invariants
//   What no token of the work admits is not read where it fills blocks, and is zeros in the value tile where it does not:
//   nothing that is masked can reach the sums as 0 x NaN. Blocks that are not mapped arrive as zeros and are masked.
//   Lengths that enter the mask are read here; host bounds only size the grid.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/ptx/exp2.cuh>
#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/ptx/setmaxnreg.cuh>
#include <pagedattn/ptx/tma.cuh>
#include <pagedattn/ptx/wgmma.cuh>
#include <pagedattn/seqlens.cuh>
#include <pagedattn/softmax.cuh>

struct FlashPrefillSm90Spec {
  DType io;        // of query, output and cache
  int head_size;
  int tile_kv;     // keys of a tile, 64 or 128
  int stages;
  int warpgroups;  // that compute, 2 or 3
  bool has_rules;  // softcap, attention_bias or a scale that is not positive
};

struct FlashPrefillSm90Params {
  TensorMap query_map;  // [kChannelGroups, token_count, num_heads, kGroupChannels]; box [1, tokens of a warpgroup, group_size, all]
  TensorMap key_map;    // [num_blocks, block_size / 8, channel groups, 8, kGroupChannels]; box [1, all or a tile's, kChannelGroups, all, all]
  TensorMap value_map;
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;
  int group_size;        // query heads of a kv head, at most 64
  int kv_num_heads;
  int key_head_step;     // channel groups from head to head
  int value_head_step;
};

constexpr int kWarpgroup = 128;
constexpr int kSmallestBlock = 16;

// A reference that is at most this far (in powers of two) below the maximum is kept: weights stay below 2^8, and acc is not rescaled.
constexpr float kSlack = 8.0f;

// One piece of work. One thread writes it, and every thread of the others reads it and says so itself.
struct Work {
  int sequence;
  int first_token;  // in the batch
  int first_row;    // in the sequence
  int tokens;       // that exist, at most the tile's; 0: there is no more work
  int past;
  int kv_len;       // 0: the tokens attend nothing
  int kv_head;
  int first_key;    // of tile 0
  int tile_count;
  KeyRange keys;    // that some token admits
};

template <FlashPrefillSm90Spec S> struct Flash {
  using Io = element_t<S.io>;
  static constexpr int kGroupChannels = S.head_size % 64 == 0 ? 64 : 32;
  static constexpr int kChannelGroups = S.head_size / kGroupChannels;
  static constexpr int kRowBytes = 2 * kGroupChannels;
  static constexpr int kAtomBytes = 8 * kRowBytes;
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kQueryGroupBytes = kRows * kRowBytes;
  static constexpr int kQueryBytes = kChannelGroups * kQueryGroupBytes;  // of a warpgroup
  static constexpr int kEightKeysBytes = kChannelGroups * kAtomBytes;
  static constexpr int kTileBytes = S.tile_kv / 8 * kEightKeysBytes;
  static constexpr int kConsumerThreads = S.warpgroups * kWarpgroup;
  static constexpr int kThreads = kWarpgroup + kConsumerThreads;
  // A CTA starts with the same multiple of 8 for each thread, and shares out no more than that.
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kLoadRegisters = S.warpgroups == 2 ? 40 : 32;
  static constexpr int kComputeRegisters = S.warpgroups == 2 ? 232 : 160;
  static_assert(kLoadRegisters + S.warpgroups * kComputeRegisters <= (1 + S.warpgroups) * kStartRegisters, "more would wait forever");
};

template <FlashPrefillSm90Spec S> struct Shared {
  using F = Flash<S>;
  unsigned char* query;
  unsigned char* keys;
  unsigned char* values;
  uint64_t* query_full;
  uint64_t* query_empty;
  uint64_t* work_full;    // [2]
  uint64_t* work_empty;
  uint64_t* keys_full;    // [stages], as those below
  uint64_t* keys_empty;
  uint64_t* values_full;
  uint64_t* values_empty;
  uint32_t* unmapped;     // [stages] bit i: block i of the key tile has nothing to see
  Work* work;             // [2] of this round and of the next

  __device__ __forceinline__ Shared() {
    unsigned char* s_base = shared_memory<unsigned char>();
    s_base += -ptx::shared_address(s_base) & 1023u;
    query = s_base;
    keys = query + S.warpgroups * F::kQueryBytes;
    values = keys + S.stages * F::kTileBytes;
    query_full = reinterpret_cast<uint64_t*>(values + S.stages * F::kTileBytes);
    query_empty = query_full + 1;
    work_full = query_full + 2;
    work_empty = work_full + 2;
    keys_full = work_empty + 2;
    keys_empty = keys_full + S.stages;
    values_full = keys_empty + S.stages;
    values_empty = values_full + S.stages;
    unmapped = reinterpret_cast<uint32_t*>(values_empty + S.stages);
    work = reinterpret_cast<Work*>(unmapped + S.stages);
  }
};

// A stage of a ring of buffers, and the parity of its barriers in this round.
template <int kStages> struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ int warp_min(int x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) x = min_of(x, __shfl_xor_sync(kFullWarp, x, distance));
  return x;
}
__device__ __forceinline__ int warp_max(int x) { return -warp_min(-x); }

// Walks over the work of all CTAs in order, 32 sequences at a time. Tokens that belong to no sequence are those of one more
// sequence without keys.
struct WorkList {
  const SequenceTable& table;
  const BlockTable& blocks;
  int tile_tokens;
  int kv_num_heads;
  int chunk = 0;         // lane l has to do with sequence 32 chunk + l
  int tiles_before = 0;  // of earlier chunks
  int tiles_until = 0;   // of this chunk, up to and with this lane's sequence

  __device__ __forceinline__ int first_token_of(int index) const {
    return max_of(0, min_of(table.token_count, table.cumulative_sequence_length[index]));
  }
  __device__ __forceinline__ int rows_of(int index) const {
    const int end = index == table.batch_size ? table.token_count : min_of(table.token_count, table.cumulative_sequence_length[index + 1]);
    return max_of(0, end - first_token_of(index));
  }

  __device__ __forceinline__ void read_chunk() {
    const int index = kWarpSize * chunk + threadIdx.x % kWarpSize;
    tiles_until = index <= table.batch_size ? ceil_div(rows_of(index), tile_tokens) : 0;
#pragma unroll 1  // each step written out would keep a predicate
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int left = __shfl_up_sync(kFullWarp, tiles_until, distance);
      if (threadIdx.x % kWarpSize >= distance) tiles_until += left;
    }
  }

  // Work number `index`, never less than in the call before; false when there is none. Fills all but the keys.
  __device__ __forceinline__ bool find(int index, Work& work) {
    const int tile = index / kv_num_heads;
    work.kv_head = index - tile * kv_num_heads;
    for (;;) {
      const int in_chunk = __shfl_sync(kFullWarp, tiles_until, kWarpSize - 1);
      if (tile - tiles_before < in_chunk) break;
      if (kWarpSize * (chunk + 1) > table.batch_size) return false;
      tiles_before += in_chunk;
      ++chunk;
      read_chunk();
    }
    const int lane = __ffs(__ballot_sync(kFullWarp, tile - tiles_before < tiles_until)) - 1;
    const int from_end = __shfl_sync(kFullWarp, tiles_until, lane) - 1 - (tile - tiles_before);
    const int own = kWarpSize * chunk + lane;
    const int rows = rows_of(own);
    work.sequence = min_of(own, table.batch_size - 1);
    work.first_row = from_end * tile_tokens;
    work.first_token = first_token_of(own) + work.first_row;
    work.tokens = min_of(tile_tokens, rows - work.first_row);
    work.past = own < table.batch_size ? table.past_seqlens[own] : -1;
    // The capacity is at most 2^31 - 1, so a sum that does not fit exceeds it.
    const int capacity = static_cast<int>(capacity_of(blocks));
    work.kv_len = work.past < 0 ? 0 : work.past > capacity - min_of(rows, capacity) ? capacity : work.past + rows;
    return true;
  }
};

// Keys that token `i` of the work admits.
__device__ __forceinline__ KeyRange keys_of_token(const SequenceTable& table, const ScoreRules& rules, const Work& work, int i) {
  const int row = work.first_row + i;
  const int64_t position = table.query_positions != nullptr ? table.query_positions[work.first_token + i]
                                                            : static_cast<int64_t>(work.past) + row;
  return admitted_keys(rules, position, row, work.kv_len);
}

// Work number `index` as a whole warp finds it; without tokens when there is none.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ Work find_work(const FlashPrefillSm90Params& p, WorkList& list, int index) {
  Work work;
  if (!list.find(index, work)) work.tokens = 0;
  int begin = 0x7fffffff;
  int end = 0;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < work.tokens; i += kWarpSize) {
    const KeyRange own = keys_of_token(p.sequences, p.rules, work, i);
    if (own.begin < own.end) {
      begin = min_of(begin, own.begin);
      end = max_of(end, own.end);
    }
  }
  work.keys = {warp_min(begin), warp_max(end)};
  work.first_key = 0;
  work.tile_count = 0;
  if (work.keys.begin < work.keys.end) {
    const int first = work.keys.begin / S.tile_kv;
    work.first_key = first * S.tile_kv;
    work.tile_count = (work.keys.end - 1) / S.tile_kv - first + 1;
  }
  return work;
}

// The warp that finds work and loads queries.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ void load_queries(const FlashPrefillSm90Params& p, const Shared<S>& shared) {
  using F = Flash<S>;
  const int tokens = F::kRows / p.group_size;  // of a warpgroup
  WorkList list{p.sequences, p.blocks, S.warpgroups * tokens, p.kv_num_heads};
  list.read_chunk();
  Ring<2> works;
  Ring<1> queries;
#pragma unroll 1
  for (int round = 0;; ++round) {
    const int turn = static_cast<int>(round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Work work = find_work<S>(p, list, round * static_cast<int>(gridDim.x) + turn);
    ptx::mbarrier_wait(shared.work_empty + works.stage, works.parity ^ 1);
    if (ptx::elect()) {
      shared.work[works.stage] = work;
      ptx::mbarrier_arrive(shared.work_full + works.stage);
    }
    __syncwarp();
    if (work.tokens == 0) break;
    works.advance();
    if (work.tile_count == 0) continue;
    ptx::mbarrier_wait(shared.query_empty, queries.parity ^ 1);
    if (ptx::elect()) {
      ptx::mbarrier_arrive_expect(shared.query_full, S.warpgroups * F::kChannelGroups * F::kRowBytes * tokens * p.group_size);
#pragma unroll 1
      for (int part = 0; part < S.warpgroups * F::kChannelGroups; ++part) {
        ptx::tma_load(shared.query + part * F::kQueryGroupBytes, p.query_map, shared.query_full, 0, work.kv_head * p.group_size,
                      work.first_token + part / F::kChannelGroups * tokens, part % F::kChannelGroups);
      }
    }
    __syncwarp();
    queries.advance();
  }
}

// A warp that loads the tiles of keys, or of values.
template <FlashPrefillSm90Spec S, bool kValues>
__device__ __forceinline__ void load_tiles(const FlashPrefillSm90Params& p, const Shared<S>& shared) {
  using F = Flash<S>;
  const int lane = threadIdx.x % kWarpSize;
  const int block_keys = min_of(p.blocks.block_size, S.tile_kv);  // of a block that lie in one tile
  const int parts = S.tile_kv / block_keys;
  const TensorMap& map = kValues ? p.value_map : p.key_map;
  const int head_step = kValues ? p.value_head_step : p.key_head_step;
  unsigned char* s_tiles = kValues ? shared.values : shared.keys;
  uint64_t* s_full_of = kValues ? shared.values_full : shared.keys_full;
  uint64_t* s_empty_of = kValues ? shared.values_empty : shared.keys_empty;
  Ring<2> works;
  Ring<S.stages> ring;

#pragma unroll 1
  for (;; works.advance()) {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
    const Work work = shared.work[works.stage];
    ptx::mbarrier_arrive(shared.work_empty + works.stage);
    if (work.tokens == 0) break;

    // Lane l: the block that holds part l of tile i, as the table has it, or kUnmapped where there is nothing to read.
    const auto entry_of = [&](int i) {
      const int key = work.first_key + i * S.tile_kv + lane * block_keys;
      const bool wanted = lane < parts && i >= 0 && key < work.keys.end && key + block_keys > work.keys.begin;
      return wanted ? entry_of_position(p.blocks, work.sequence, key) : kUnmapped;
    };

    int i = work.tile_count - 1;  // the last tile, which holds the last keys, is the first to be computed
    int entry = entry_of(i);
#pragma unroll 1
    for (; i >= 0; --i) {
      const int block = block_of_entry(p.blocks, entry);
      entry = entry_of(i - 1);  // on its way while this tile is waited for
      int from[S.tile_kv / kSmallestBlock];
#pragma unroll
      for (int part = 0; part < S.tile_kv / kSmallestBlock; ++part) from[part] = __shfl_sync(kFullWarp, block, part);
      const uint32_t unmapped = __ballot_sync(kFullWarp, block == kUnmapped) & ((2u << (parts - 1)) - 1u);
      uint64_t* s_full = s_full_of + ring.stage;
      ptx::mbarrier_wait(s_empty_of + ring.stage, ring.parity ^ 1);
      if (ptx::elect()) {
        if constexpr (!kValues) shared.unmapped[ring.stage] = unmapped;
        ptx::mbarrier_arrive_expect(s_full, F::kTileBytes);
        const int eight = offset_in_block(p.blocks, work.first_key + i * S.tile_kv) / 8;  // 0 unless the tile lies in one block
#pragma unroll
        for (int part = 0; part < S.tile_kv / kSmallestBlock; ++part) {
          if (part >= parts) break;
          ptx::tma_load(s_tiles + ring.stage * F::kTileBytes + part * (block_keys / 8) * F::kEightKeysBytes, map, s_full, 0, 0,
                        work.kv_head * head_step, eight, from[part]);
        }
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// Two rows of a lane, g and g + 8 of its warp's sixteen.
struct RowPair {
  float reference[2] = {negative_infinity(), negative_infinity()};  // near the maximum of the scores, as they come
  float sum[2] = {0.0f, 0.0f};                                      // of this lane's weights
};

// Scores to weights. `factor` takes a score to base 2. Returns whether what was accumulated before must be scaled.
template <int kCount>
__device__ __forceinline__ bool weigh(float (&scores)[kCount], RowPair& rows, float factor, float (&rescale)[2]) {
  float top[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half][0] = fmaxf(scores[2 * half], scores[2 * half + 1]);
    top[half][1] = fmaxf(scores[2 * half + 4], scores[2 * half + 5]);
#pragma unroll
    for (int i = 8; i < kCount; i += 8) {
      top[half][0] = fmaxf(top[half][0], fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
      top[half][1] = fmaxf(top[half][1], fmaxf(scores[i + 2 * half + 4], scores[i + 2 * half + 5]));
    }
    top[half][0] = group_max<4>(fmaxf(top[half][0], top[half][1]));
  }
  const bool far = (top[0][0] - rows.reference[0]) * factor > kSlack || (top[1][0] - rows.reference[1]) * factor > kSlack;
  const bool moved = __any_sync(kFullWarp, far);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = fmaxf(rows.reference[half], top[half][0]);
      rescale[half] = reference == negative_infinity() ? 1.0f : ptx::exp2_approximate((rows.reference[half] - reference) * factor);
      rows.reference[half] = reference;
      rows.sum[half] *= rescale[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float shift = rows.reference[half] == negative_infinity() ? 0.0f : -rows.reference[half] * factor;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      scores[i] = ptx::exp2_approximate(fmaf(scores[i], factor, shift));
      scores[i + 1] = ptx::exp2_approximate(fmaf(scores[i + 1], factor, shift));
      sum[0] += scores[i];
      sum[1] += scores[i + 1];
    }
    rows.sum[half] += sum[0] + sum[1];
  }
  return moved;
}

// Weights of a tile as A operands of p . v, rounded to the io type.
template <class Io, int kCount> __device__ __forceinline__ void pack_weights(uint32_t (&p)[kCount / 8][4], const float (&weights)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) p[i / 4][i % 4] = ptx::pack_2<Io>(weights[2 * i], weights[2 * i + 1]);
}

// Exchanges within four lanes: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void transpose_4(uint32_t (&word)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = t & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t sent = upper ? word[i] : word[i + distance];
      const uint32_t received = __shfl_xor_sync(kFullWarp, sent, distance);
      if (upper) {
        word[i] = received;
      } else {
        word[i + distance] = received;
      }
    }
  }
}

// One warpgroup's part of the CTA's work.
template <FlashPrefillSm90Spec S> struct Consumer {
  using F = Flash<S>;
  using Io = typename F::Io;
  static constexpr int kScores = S.tile_kv / 2;
  static constexpr int kOutputs = S.head_size / 2;

  const FlashPrefillSm90Params& p;
  const Shared<S>& shared;
  int warpgroup;
  uint64_t query;  // descriptors of the first stage
  uint64_t keys;
  uint64_t values;
  Ring<1> query_ring{};
  Ring<S.stages> key_ring{};
  Ring<S.stages> value_ring{};
  Work work{};
  KeyRange admitted[2];
  int token[2];  // of the lane's rows, in the work; -1: the row does not exist
  int head[2];

  __device__ __forceinline__ Consumer(const FlashPrefillSm90Params& params, const Shared<S>& s)
      : p(params), shared(s), warpgroup(static_cast<int>(threadIdx.x) / kWarpgroup - 1) {
    query = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.query) + warpgroup * F::kQueryBytes, 16, F::kAtomBytes);
    keys = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.keys), 16, F::kEightKeysBytes);
    values = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.values), F::kAtomBytes, F::kEightKeysBytes);
  }

  __device__ __forceinline__ void set_rows() {
    const int tokens = F::kRows / p.group_size;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4 + 8 * half;
      const int own = row / p.group_size;
      head[half] = work.kv_head * p.group_size + row % p.group_size;
      token[half] = own < tokens && warpgroup * tokens + own < work.tokens ? warpgroup * tokens + own : -1;
      admitted[half] = token[half] >= 0 ? keys_of_token(p.sequences, p.rules, work, token[half]) : KeyRange{0, 0};
    }
  }

  // Warpgroups issue their products in turn, so that one computes weights while another one multiplies.
  __device__ __forceinline__ void wait_turn() const { ptx::named_barrier_sync(1 + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(1 + (warpgroup + 1) % S.warpgroups, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(s_empty);
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[kScores]) {
    const uint64_t tile = ptx::descriptor_at(keys, key_ring.stage * F::kTileBytes);
#pragma unroll
    for (int step = 0; step < S.head_size / 16; ++step) {
      const int group = step / (F::kGroupChannels / 16);
      const int byte = step % (F::kGroupChannels / 16) * 32;
      ptx::wgmma<Io, false>(scores, ptx::descriptor_at(query, group * F::kQueryGroupBytes + byte),
                            ptx::descriptor_at(tile, group * F::kAtomBytes + byte), step != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(float (&acc)[kOutputs], const uint32_t (&weights)[kScores / 8][4], bool accumulate) {
    const uint64_t tile = ptx::descriptor_at(values, value_ring.stage * F::kTileBytes);
#pragma unroll
    for (int step = 0; step < S.tile_kv / 16; ++step) {
      ptx::wgmma<Io, true>(acc, weights[step], ptx::descriptor_at(tile, step * 2 * F::kEightKeysBytes), step != 0 || accumulate);
    }
    ptx::wgmma_commit();
  }

  // Waits for the value tile, and clears rows that no token admits but that came with a block.
  __device__ __forceinline__ void wait_values(int first_key) {
    ptx::mbarrier_wait(shared.values_full + value_ring.stage, value_ring.parity);
    const int begin = work.keys.begin - first_key;
    const int end = work.keys.end - first_key;
    if (begin > 0 || end < S.tile_kv) {
      unsigned char* s_tile = shared.values + value_ring.stage * F::kTileBytes;
      for (int i = threadIdx.x % kWarpgroup; i < F::kTileBytes / 16; i += kWarpgroup) {
        const int key = i * 16 / F::kEightKeysBytes * 8 + i * 16 / F::kRowBytes % 8;
        if (key < begin || key >= end) *reinterpret_cast<Vector16*>(s_tile + 16 * i) = Vector16{};
      }
      ptx::fence_async_proxy();
      ptx::named_barrier_sync(1 + S.warpgroups + warpgroup, kWarpgroup);  // the zeros are there for the whole warpgroup
    }
  }

  // `unmapped` is lane 0's, and 0 in the others.
  __device__ __forceinline__ void mask(float (&scores)[kScores], int first_key, uint32_t unmapped) const {
    bool whole = unmapped == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      whole = whole && (token[half] < 0 || (admitted[half].begin <= first_key && first_key + S.tile_kv <= admitted[half].end));
    }
    if (__all_sync(kFullWarp, whole)) return;
    unmapped = __shfl_sync(kFullWarp, unmapped, 0);
    const int shift = 31 - __clz(min_of(p.blocks.block_size, S.tile_kv));
    const int first = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = first + i / 4 * 8 + i % 2;
      if (!admitted[i / 2 % 2].contains(first_key + key) || (unmapped >> (key >> shift) & 1u) != 0) scores[i] = negative_infinity();
    }
  }

  // Scores in base 2 where a rule comes between the product and softmax.
  __device__ __forceinline__ void apply_rules(float (&scores)[kScores], int first_key) const {
    const int first = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Io* g_bias = token[half] < 0 ? nullptr : bias_row_of<Io>(p.rules, work.sequence, head[half], work.first_row + token[half]);
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          const int key = first + i / 4 * 8 + j % 2;
          if (!admitted[half].contains(key)) continue;  // its bias may not exist
          scores[j] = kLog2E * capped_and_biased(p.rules, scores[j] * p.rules.scale, g_bias, key);
        }
      }
    }
  }

  // Waits for the key tile, and returns in lane 0, which will release it, the blocks that it has nothing of.
  __device__ __forceinline__ uint32_t wait_keys() const {
    ptx::mbarrier_wait(shared.keys_full + key_ring.stage, key_ring.parity);
    return threadIdx.x % kWarpSize == 0 ? shared.unmapped[key_ring.stage] : 0;
  }

  // After the products of a tile are complete: frees its stage, masks.
  __device__ __forceinline__ void finish_scores(float (&scores)[kScores], int i, uint32_t unmapped) {
    const int first_key = work.first_key + i * S.tile_kv;
    release(shared.keys_empty + key_ring.stage);
    key_ring.advance();
    if constexpr (S.has_rules) apply_rules(scores, first_key);
    mask(scores, first_key, unmapped);
  }

  __device__ __forceinline__ void attend(float (&acc)[kOutputs], RowPair& rows) {
    const float factor = S.has_rules ? 1.0f : kLog2E * p.rules.scale;
    float scores[kScores];
    uint32_t weights[kScores / 8][4];
    float rescale[2];

    int i = work.tile_count - 1;
    ptx::mbarrier_wait(shared.query_full, query_ring.parity);
    query_ring.advance();
    uint32_t unmapped = wait_keys();
    ptx::wgmma_fence();
    multiply_keys(scores);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    if (i == 0) release(shared.query_empty);
    finish_scores(scores, i, unmapped);
    weigh(scores, rows, factor, rescale);
    pack_weights<Io>(weights, scores);

    bool accumulate = false;
    for (; i > 0; --i) {
      unmapped = wait_keys();
      wait_values(work.first_key + i * S.tile_kv);
      wait_turn();
      ptx::hold(acc);
      ptx::wgmma_fence();
      multiply_keys(scores);
      multiply_values(acc, weights, accumulate);
      pass_turn();
      accumulate = true;

      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      if (i == 1) release(shared.query_empty);
      finish_scores(scores, i - 1, unmapped);
      const bool moved = weigh(scores, rows, factor, rescale);

      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release(shared.values_empty + value_ring.stage);
      value_ring.advance();
      pack_weights<Io>(weights, scores);
      if (moved) {
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) acc[j] *= rescale[j / 2 % 2];
      }
    }

    wait_values(work.first_key);
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply_values(acc, weights, accumulate);
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    release(shared.values_empty + value_ring.stage);
    value_ring.advance();
  }

  __device__ __forceinline__ void write(float (&acc)[kOutputs], const RowPair& rows) const {
    const float factor = S.has_rules ? 1.0f : kLog2E * p.rules.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxState state;
      if (rows.reference[half] != negative_infinity()) state.row_max = rows.reference[half] * factor;
      state.row_sum = group_sum<4>(rows.sum[half]);
      const bool exists = token[half] >= 0;
      const SoftmaxResult result = finalize(state, exists ? sink_of<Io>(p.out.head_sink, head[half]) : negative_infinity());
      Io* g_row = output_row<Io>(p.out, work.first_token + token[half], head[half], S.head_size);
      if (exists && threadIdx.x % 4 == 0) store_lse(p.out, work.first_token + token[half], head[half], result.lse);
#pragma unroll
      for (int n = 0; n < kOutputs / 4; n += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] = ptx::pack_2<Io>(acc[4 * (n + i) + 2 * half] * result.factor, acc[4 * (n + i) + 2 * half + 1] * result.factor);
        }
        transpose_4(word);  // eight neighbouring channels of n-tile n + t
        if (exists) store_8(g_row + 8 * (n + threadIdx.x % 4), Vector16{{word[0], word[1], word[2], word[3]}});
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == S.warpgroups - 1) pass_turn();  // the first turn is the first warpgroup's
    for (Ring<2> works;; works.advance()) {
      ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
      work = shared.work[works.stage];
      ptx::mbarrier_arrive(shared.work_empty + works.stage);
      if (work.tokens == 0) break;
      set_rows();
      float acc[kOutputs];
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) acc[j] = 0.0f;
      RowPair rows;
      if (work.tile_count > 0) attend(acc, rows);
      write(acc, rows);
    }
    if (warpgroup == 0) wait_turn();  // no barrier is left half full
  }
};

template <FlashPrefillSm90Spec S>
__global__ void __launch_bounds__(Flash<S>::kThreads, 1) flash_prefill_sm90(const __grid_constant__ FlashPrefillSm90Params p) {
  static_assert(S.head_size % 32 == 0 && S.head_size <= 256, "acc of 64 rows must fit the registers of a warpgroup");
  static_assert(S.tile_kv == 64 || S.tile_kv == 128, "a tile is made of whole blocks or lies in one; blocks are powers of two");
  static_assert(S.io == DType::f16 || S.io == DType::bf16, "wgmma with 16-bit operands");
  using F = Flash<S>;
  const Shared<S> shared;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.query_map);
    ptx::prefetch_tensor_map(p.key_map);
    ptx::prefetch_tensor_map(p.value_map);
    ptx::mbarrier_init(shared.query_full, 1);
    ptx::mbarrier_init(shared.query_empty, F::kConsumerThreads / kWarpSize);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.work_full + i, 1);
      ptx::mbarrier_init(shared.work_empty + i, F::kConsumerThreads + 2 * kWarpSize);
    }
    for (int i = 0; i < S.stages; ++i) {
      ptx::mbarrier_init(shared.keys_full + i, 1);
      ptx::mbarrier_init(shared.keys_empty + i, F::kConsumerThreads / kWarpSize);
      ptx::mbarrier_init(shared.values_full + i, 1);
      ptx::mbarrier_init(shared.values_empty + i, F::kConsumerThreads / kWarpSize);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialized for all threads

  if (threadIdx.x < kWarpgroup) {
    ptx::decrease_registers<F::kLoadRegisters>();
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);  // the same in all lanes, visibly
    if (warp == 0) {
      load_queries<S>(p, shared);
    } else if (warp == 1) {
      load_tiles<S, false>(p, shared);
    } else if (warp == 2) {
      load_tiles<S, true>(p, shared);
    }
  } else {
    ptx::increase_registers<F::kComputeRegisters>();
    Consumer<S>(p, shared).run();
  }
}

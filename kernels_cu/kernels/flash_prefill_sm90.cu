// flash_prefill_sm90.cu: attention of whole prompts, chunks and mixed batches on Hopper's tensor cores. Bound by arithmetic.
//
//   grid    x: CTAs that stay; each takes every gridDim.x-th piece of work, alternately from the left and from the right, of
//           sequences with one tile of tokens and of longer ones, mixed
//   work    (kv head, tile of tokens with all query heads of the group), a sequence's last tokens, which see most keys, first
//   CTA     a warp that loads queries, one keys, one values, and one that clears what nobody may see of the values; with a quantized
//           cache that one leaves, and a warpgroup widens its codes; S.warpgroups warpgroups compute on 64 rows each
//   reads   query once; the key and value tiles that some token of the work admits, once per work, in place
//   writes  output and lse, rows of padding tokens included
//   smem    | queries: 64 rows per warpgroup | output, unless in their place | S.stages key tiles | as many value tiles | rings of codes | barriers, Work |
//
// The warp that loads queries finds the work, one piece ahead, and tells all others of it in shared memory. Those that load
// keys and values run ahead by as many tiles as there are stages, into the next work too.
//
//   computes    q.K0  softmax0  q.K1 with p.V0  softmax1  q.K2 with p.V1 ...  p.Vn with the next work's rows  write
//
// A warpgroup's softmax runs under its own p.V and under the products of the other warpgroups, which take turns issuing.
//
// Codes arrive in rings of their own, in dense rows, and become float16 without their scale, exactly. The query is made float16
// in place (Consumer::scale_query), the scale of the values is left to the sums.
//
// A tile in shared memory has rows of kRowBytes that wgmma's swizzle permutes, eight of them an atom:
//   tile [tile_kv / 8][kChannelGroups] atoms, so that the rows of one block of the cache are one contiguous box of the copy
//   queries [warpgroups][kChannelGroups][64 / 8] atoms
// Invariants
//   What no token of the work admits is not read where it fills blocks, and is zeros in the value tile where it does not: it cannot
//   reach the sums as 0 x NaN. What only some tokens admit can, and then shows in the end (spoilt_rows.cuh). Blocks that are not
//   mapped arrive as zeros, which are a finite number in every type, and are masked.
//   Lengths that enter the mask are read here; host bounds only size the grid.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/ptx/setmaxnreg.cuh>
#include <pagedattn/ptx/tma.cuh>
#include <pagedattn/ptx/wgmma.cuh>
#include <pagedattn/seqlens.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/spoilt_rows.cuh>
#include <pagedattn/warpgroup_rows.cuh>
#include <pagedattn/widen.cuh>

struct FlashPrefillSm90Spec {
  DType io;        // of query and output
  DType cache;     // the same, or codes
  int head_size;
  int tile_kv;     // keys of a tile, 64 or 128
  int stages;
  int warpgroups;  // that compute, 2 or 3
  bool has_rules;  // softcap, attention_bias or a scale that is not positive
};

struct FlashPrefillSm90Params {
  TensorMap query_map;  // [kChannelGroups, token_count, num_heads, kGroupChannels]; box [1, tokens of a warpgroup, group_size, all]
  // [num_blocks, block_size / 8, channel groups, 8, kGroupChannels]; box [1, all or a tile's, kChannelGroups, all, all]; with codes
  // rows of all channels: [num_blocks, block_size / 8, kv_num_heads, 8, row bytes]
  TensorMap key_map;
  TensorMap value_map;
  TensorMap output_map;  // as query_map; not used where rows do not start on multiples of 16 bytes
  KvCache key_cache;    // for the scale, and for rows that are attended again
  KvCache value_cache;
  const void* query;    // [token_count, num_heads, head_size], rows query_stride apart: for rows that are attended again
  int64_t query_stride; // elements
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;
  int group_size;        // query heads of a kv head, at most 64
  int warpgroup_tokens;  // 64 / group_size
  int kv_num_heads;
  int key_head_step;     // channel groups, or rows of codes, from head to head
  int value_head_step;
};

constexpr int kSmallestBlock = 16;

// One piece of work. One thread writes it, and every thread of the others reads it and says so itself, 16 bytes at a time.
struct alignas(16) Work {
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

// Sizes and layouts that follow from a Spec.
template <FlashPrefillSm90Spec S> struct Flash {
  using Io = element_t<S.io>;
  static constexpr bool kCodes = is_quantized(S.cache);
  using Math = element_t<kCodes ? DType::f16 : S.io>;  // of operands
  static constexpr bool kSpoils = can_spoil(S.cache);
  static constexpr int kGroupChannels = S.head_size % 64 == 0 ? 64 : 32;
  static constexpr int kChannelGroups = S.head_size / kGroupChannels;
  static constexpr int kRowBytes = 2 * kGroupChannels;
  static constexpr int kAtomBytes = 8 * kRowBytes;
  static constexpr int kQueryGroupBytes = kWarpgroupRows * kRowBytes;
  static constexpr int kQueryBytes = kChannelGroups * kQueryGroupBytes;  // of a warpgroup
  static constexpr int kEightKeysBytes = kChannelGroups * kAtomBytes;
  static constexpr int kTileBytes = S.tile_kv / 8 * kEightKeysBytes;
  static constexpr int kCodeBytes = S.tile_kv * row_bytes_of(S.cache, S.head_size);  // of a tile
  static constexpr int kCodeStages = kCodes ? S.stages : 0;
  static constexpr int kLoadedBytes = kCodes ? kCodeBytes : kTileBytes;
  static constexpr int kUnits = S.head_size / 8;  // 16-byte units of a row of operands
  // Products read the query from registers where these suffice: a third warpgroup, computing or widening, leaves fewer.
  static constexpr bool kHoldsQuery = S.warpgroups == 2 && S.head_size <= (kCodes ? 128 : 192);
  // Channel groups of output that are on their way to memory at a time: in the place of a query that is in registers, or in one of their own.
  static constexpr int kStagedGroups = kHoldsQuery ? kChannelGroups : kChannelGroups % 2 == 0 ? 2 : 1;
  static constexpr int kStagedBytes = kStagedGroups * kQueryGroupBytes;  // of a warpgroup
  static constexpr int kFirstConsumer = kCodes ? 2 : 1;  // warpgroup
  static constexpr int kConsumerThreads = S.warpgroups * kWarpgroup;
  static constexpr int kThreads = kFirstConsumer * kWarpgroup + kConsumerThreads;
  static constexpr int kLoadRegisters = kCodes ? 24 : S.warpgroups == 3 ? 32 : 40;  // 24 spill, where work is found ahead of time
  static constexpr int kWidenRegisters = kCodes ? 40 : 0;
  static constexpr int kComputeRegisters = S.warpgroups == 3 ? 160 : kCodes ? 224 : 232;
  static_assert(kLoadRegisters + kWidenRegisters + S.warpgroups * kComputeRegisters <=
                    kThreads / kWarpgroup * ptx::start_registers(kThreads),
                "more would wait forever");

  // Of the tile with a work's last keys, which is the first to be computed, only so many are multiplied where that is enough. Not of a
  // work's only tile, because the products that end a work take whole tiles.
  static constexpr int kFewKeys = S.warpgroups == 3 ? 64 : 32;
  static constexpr bool kTakesFew = S.tile_kv == 128;
  static __device__ __forceinline__ bool has_few(const Work& work) {
    const int last = work.tile_count - 1;
    return kTakesFew && last > 0 && work.keys.end - work.first_key - last * S.tile_kv <= kFewKeys;
  }
  // Where the atoms of a key are in its tile.
  static __device__ __forceinline__ int row_offset(int key) { return key / 8 * kEightKeysBytes; }
  // Where the swizzle puts 16-byte unit `unit` of the channels of a row, from the start of channel group 0 of the row's atom.
  static __device__ __forceinline__ int unit_offset(int row, int unit, int group_bytes) {
    constexpr int kUnitsOfGroup = kGroupChannels / 8;
    const int permuted = unit % kUnitsOfGroup ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4);
    return unit / kUnitsOfGroup * group_bytes + row % 8 * kRowBytes + 16 * permuted;
  }
};

// A ring of tiles in shared memory. A tile is full when the bytes of the copy engine have come (one arrival), when each warp that
// widens has written its part, or when the warp that clears has been there (one arrival); it is empty when each warp that reads it, of
// those that widen or of all that compute, has done so.
struct Tiles {
  unsigned char* data;
  uint64_t* full;
  uint64_t* empty;
};

template <FlashPrefillSm90Spec S> struct Shared {
  using F = Flash<S>;
  unsigned char* query;
  unsigned char* output;      // rows as those of the query
  Tiles keys;                 // [stages], as the products read them
  Tiles values;
  Tiles loaded_keys;          // [stages], as the copy engine brings them: the same, or codes
  Tiles loaded_values;        // without codes the same tiles, before what nobody may see is cleared
  uint32_t* unmapped;         // [stages] bit i: block i of the key tile is not mapped though some token admits it
  uint32_t* loaded_unmapped;  // [stages]
  uint64_t* query_full;       // one arrival and the bytes
  uint64_t* query_empty;      // an arrival of each warp that computes
  uint64_t* work_full;        // [2], one arrival
  uint64_t* work_empty;       // [2], an arrival of each thread that reads work
  Work* work;                 // [2] of this round and of the next

  __device__ __forceinline__ Shared() {
    unsigned char* s_next = swizzled_shared_memory();
    const auto take = [&](int bytes) { return (s_next += bytes) - bytes; };
    const auto take_barriers = [&](int count) { return reinterpret_cast<uint64_t*>(take(count * static_cast<int>(sizeof(uint64_t)))); };
    const auto take_words = [&](int count) { return reinterpret_cast<uint32_t*>(take(count * static_cast<int>(sizeof(uint32_t)))); };
    query = take(S.warpgroups * F::kQueryBytes);
    output = F::kHoldsQuery ? query : take(S.warpgroups * F::kStagedBytes);
    keys.data = take(S.stages * F::kTileBytes);
    values.data = take(S.stages * F::kTileBytes);
    loaded_keys.data = take(F::kCodeStages * F::kCodeBytes);
    loaded_values.data = take(F::kCodeStages * F::kCodeBytes);
    work = reinterpret_cast<Work*>(take(2 * sizeof(Work)));
    query_full = take_barriers(1);
    query_empty = take_barriers(1);
    work_full = take_barriers(2);
    work_empty = take_barriers(2);
    keys.full = take_barriers(S.stages);
    keys.empty = take_barriers(S.stages);
    values.full = take_barriers(S.stages);
    values.empty = take_barriers(S.stages);
    loaded_keys.full = take_barriers(F::kCodeStages);
    loaded_keys.empty = take_barriers(F::kCodeStages);
    loaded_values.full = take_barriers(S.stages);
    loaded_values.empty = take_barriers(F::kCodeStages);
    unmapped = take_words(S.stages);
    loaded_unmapped = take_words(F::kCodeStages);
    if constexpr (!F::kCodes) {
      loaded_keys = keys;
      loaded_values.data = values.data;
      loaded_values.empty = values.empty;
      loaded_unmapped = unmapped;
    }
  }
};

__device__ __forceinline__ int warp_min(int x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) x = min_of(x, __shfl_xor_sync(kFullWarp, x, distance));
  return x;
}
__device__ __forceinline__ int warp_max(int x) { return -warp_min(-x); }

// The work of this CTA, one piece after the other. There are two lists: the work of sequences with one tile of tokens, whose keys are
// read once, from memory, and that of longer ones, which find theirs in L2. A CTA takes every gridDim.x-th piece of either,
// alternately from the left and from the right, and mixes the two evenly. Each CTA begins elsewhere in the mixture, so that memory
// and tensor cores are busy at once. Tokens that belong to no sequence are those of one more sequence without keys.
struct WorkList {
  // A walk over one of the lists, 32 sequences at a time.
  struct Walk {
    int chunk = -1;        // lane l has to do with sequence 32 chunk + l
    int tiles_before = 0;  // of earlier chunks
    int tiles_until = 0;   // of this chunk, up to and with this lane's sequence
    int round = 0;
  };

  const SequenceTable& table;
  const BlockTable& blocks;
  int tile_tokens;
  int kv_num_heads;
  int rounds;         // of both lists
  int single_rounds;  // of sequences with one tile
  int left;           // rounds
  int phase;          // goes up by single_rounds, and round and round below `rounds`: in a round of a single tile when it wraps
  bool single = false;
  Walk walk;   // of the list that `single` tells
  Walk other;  // of the other one

  __device__ __forceinline__ WorkList(const SequenceTable& sequences, const BlockTable& block_table, int tokens, int kv_heads)
      : table(sequences), blocks(block_table), tile_tokens(tokens), kv_num_heads(kv_heads) {
    int tiles = 0;
    int singles = 0;
#pragma unroll 2
    for (int i = threadIdx.x % kWarpSize; i <= table.batch_size; i += kWarpSize) {
      const int own = tiles_of(i);
      tiles += own;
      singles += own == 1;
    }
    const int ctas = static_cast<int>(gridDim.x);
    const auto rounds_of = [&](int x) { return ceil_div(__reduce_add_sync(kFullWarp, x) * kv_num_heads, ctas); };
    single_rounds = rounds_of(singles);
    rounds = left = single_rounds + rounds_of(tiles - singles);
    const int cta = static_cast<int>(blockIdx.x);
    phase = rounds / ctas * cta + rounds % ctas * cta / ctas;
  }

  __device__ __forceinline__ int rows_of(int index) const {
    const int end = index == table.batch_size ? table.token_count : first_token_of(table, index + 1);
    return max_of(0, end - first_token_of(table, index));
  }
  __device__ __forceinline__ int tiles_of(int index) const { return ceil_div(rows_of(index), tile_tokens); }

  __device__ __forceinline__ void read_chunk() {
    const int index = kWarpSize * walk.chunk + threadIdx.x % kWarpSize;
    const int tiles = index <= table.batch_size ? tiles_of(index) : 0;
    walk.tiles_until = single == (tiles == 1) ? tiles : 0;
#pragma unroll 1  // each step written out would keep a predicate
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int left = __shfl_up_sync(kFullWarp, walk.tiles_until, distance);
      if (threadIdx.x % kWarpSize >= distance) walk.tiles_until += left;
    }
  }

  // The next piece of work, by a whole warp; false when there is none. Fills all but the keys.
  __device__ __forceinline__ bool next(Work& work) {
    while (left > 0) {
      --left;
      phase += single_rounds;
      const bool wraps = phase >= rounds;
      if (wraps) phase -= rounds;
      if (wraps != single) {
        single = wraps;
        const Walk before = walk;
        walk = other;
        other = before;
      }
      const int round = walk.round++;
      if (find(static_cast<int>(round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x)), work)) return true;
    }
    return false;
  }

  // Work number `index` of the list, never less than in the call before; false when there is none.
  __device__ __forceinline__ bool find(int index, Work& work) {
    const int tile = index / kv_num_heads;
    work.kv_head = index - tile * kv_num_heads;
    for (;;) {
      const int in_chunk = __shfl_sync(kFullWarp, walk.tiles_until, kWarpSize - 1);
      if (tile - walk.tiles_before < in_chunk) break;
      if (kWarpSize * (walk.chunk + 1) > table.batch_size) return false;
      walk.tiles_before += in_chunk;
      ++walk.chunk;
      read_chunk();
    }
    const int lane = __ffs(__ballot_sync(kFullWarp, tile - walk.tiles_before < walk.tiles_until)) - 1;
    const int from_end = __shfl_sync(kFullWarp, walk.tiles_until, lane) - 1 - (tile - walk.tiles_before);
    const int own = kWarpSize * walk.chunk + lane;
    const int rows = rows_of(own);
    work.sequence = min_of(own, table.batch_size - 1);
    work.first_row = from_end * tile_tokens;
    work.first_token = first_token_of(table, own) + work.first_row;
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

// The same where no rule but causality and a window can be in the way, without 64-bit arithmetic: position + 1 is below 2^32.
__device__ __forceinline__ KeyRange plain_keys_of_token(const ScoreRules& rules, const Work& work, int i) {
  const uint32_t next = static_cast<uint32_t>(work.past) + static_cast<uint32_t>(work.first_row + i) + 1;
  const uint32_t kv_len = work.kv_len;
  const uint32_t window = rules.local_window_size;
  const uint32_t end = rules.is_causal && next < kv_len ? next : kv_len;
  const uint32_t begin = rules.local_window_size > 0 && next > window ? next - window : 0;
  return {static_cast<int>(begin < end ? begin : end), static_cast<int>(end)};
}

// Finds the keys of a piece of work, as a whole warp.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ void find_keys(const FlashPrefillSm90Params& p, Work& work) {
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
    work.first_key = work.keys.begin & -min_of(p.blocks.block_size, S.tile_kv);
    work.tile_count = ceil_div(work.keys.end - work.first_key, S.tile_kv);
  }
}

// The warp that finds work and loads queries.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ void load_queries(const FlashPrefillSm90Params& p, const Shared<S>& shared) {
  using F = Flash<S>;
  const int tokens = p.warpgroup_tokens;
  WorkList list(p.sequences, p.blocks, S.warpgroups * tokens, p.kv_num_heads);
  Ring<2> works;
  Ring<1> queries;
#pragma unroll 1
  for (;;) {
    Work work;
    if (!list.next(work)) work.tokens = 0;
    find_keys<S>(p, work);
    ptx::mbarrier_wait(shared.work_empty + works.stage, works.parity ^ 1);
    if (ptx::elect()) {
      shared.work[works.stage] = work;
      ptx::mbarrier_arrive(shared.work_full + works.stage);
    }
    __syncwarp();
    if (work.tokens == 0) break;
    works.advance();
    ptx::mbarrier_wait(shared.query_empty, queries.parity ^ 1);
    const int parts = work.tile_count == 0 ? 0 : S.warpgroups * F::kChannelGroups;  // none, but in turn: the place may be output's
    if (ptx::elect()) {
      ptx::mbarrier_arrive_expect(shared.query_full, parts * F::kRowBytes * tokens * p.group_size);
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        ptx::tma_load(shared.query + part * F::kQueryGroupBytes, p.query_map, shared.query_full, 0, work.kv_head * p.group_size,
                      work.first_token + part / F::kChannelGroups * tokens, part % F::kChannelGroups);
      }
    }
    __syncwarp();
    queries.advance();
  }
}

// A warp that loads the tiles of keys, or of values: one copy of the code for both.
template <FlashPrefillSm90Spec S>
__device__ __forceinline__ void load_tiles(const FlashPrefillSm90Params& p, const Shared<S>& shared, bool is_values) {
  using F = Flash<S>;
  const int lane = threadIdx.x % kWarpSize;
  const int block_keys = min_of(p.blocks.block_size, S.tile_kv);  // of a block that lie in one tile
  const int parts = S.tile_kv / block_keys;
  const TensorMap& map = is_values ? p.value_map : p.key_map;
  const int head_step = is_values ? p.value_head_step : p.key_head_step;
  const Tiles tiles = is_values ? shared.loaded_values : shared.loaded_keys;
  Ring<2> works;
  Ring<S.stages> ring;

#pragma unroll 1
  for (;; works.advance()) {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
    const Work work = shared.work[works.stage];
    ptx::mbarrier_arrive(shared.work_empty + works.stage);
    if (work.tokens == 0) break;

    // Lane l: the block that holds part l of tile i, as the table has it, or kUnmapped where there is nothing to read.
    const auto key_of = [&](int i) { return work.first_key + i * S.tile_kv + lane * block_keys; };
    const auto is_wanted = [&](int key) { return lane < parts && key < work.keys.end && key + block_keys > work.keys.begin; };
    const auto entry_of = [&](int i) {
      return i >= 0 && is_wanted(key_of(i)) ? entry_of_position(p.blocks, work.sequence, key_of(i)) : kUnmapped;
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
      const uint32_t unmapped = __ballot_sync(kFullWarp, block == kUnmapped && is_wanted(key_of(i)));
      uint64_t* s_full = tiles.full + ring.stage;
      ptx::mbarrier_wait(tiles.empty + ring.stage, ring.parity ^ 1);
      if (ptx::elect()) {
        if (!is_values) shared.loaded_unmapped[ring.stage] = unmapped;
        ptx::mbarrier_arrive_expect(s_full, F::kLoadedBytes);
        const int eight = offset_in_block(p.blocks, work.first_key + i * S.tile_kv) / 8;  // 0 unless the tile lies in one block
#pragma unroll
        for (int part = 0; part < S.tile_kv / kSmallestBlock; ++part) {
          if (part >= parts) break;
          ptx::tma_load(tiles.data + ring.stage * F::kLoadedBytes + part * (block_keys / 8) * (F::kLoadedBytes / (S.tile_kv / 8)), map,
                        s_full, 0, 0, work.kv_head * head_step, eight, from[part]);
        }
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// The warp that clears rows of value tiles that no token admits but that came with a block. Other blocks came as zeros. It works
// ahead of the products, which waited for it when those that compute did it themselves. With codes, those that widen do it.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ void clear_values(const FlashPrefillSm90Params& p, const Shared<S>& shared) {
  using F = Flash<S>;
  const int lane = threadIdx.x % kWarpSize;
  const int block_keys = min_of(p.blocks.block_size, S.tile_kv);
  Ring<2> works;
  Ring<S.stages> ring;
#pragma unroll 1
  for (;; works.advance()) {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
    const Work work = shared.work[works.stage];
    ptx::mbarrier_arrive(shared.work_empty + works.stage);
    if (work.tokens == 0) break;
#pragma unroll 1
    for (int i = work.tile_count - 1; i >= 0; --i) {
      ptx::mbarrier_wait(shared.loaded_values.full + ring.stage, ring.parity);
      const int first_key = work.first_key + i * S.tile_kv;
      const int begin = max_of(work.keys.begin - first_key, 0);
      const int end = min_of(work.keys.end - first_key, S.tile_kv);
      const int before = begin & (block_keys - 1);
      const int after = -end & (block_keys - 1);
      unsigned char* s_tile = shared.values.data + ring.stage * F::kTileBytes;
#pragma unroll 4
      for (int unit = lane; unit < (before + after) * F::kUnits; unit += kWarpSize) {
        const int row = unit / F::kUnits;
        const int key = row < before ? begin - before + row : end + row - before;
        *reinterpret_cast<Vector16*>(s_tile + F::row_offset(key) + F::unit_offset(key, unit % F::kUnits, F::kAtomBytes)) = Vector16{};
      }
      if (before + after > 0) ptx::fence_async_proxy();
      __syncwarp();  // the whole warp's stores come before the arrival
      if (lane == 0) ptx::mbarrier_arrive(shared.values.full + ring.stage);
      ring.advance();
    }
  }
}

// Eight codes, a float8 or int8 each or a nibble.
template <DType Cache> struct alignas(bits_of(Cache)) Codes8 { uint32_t word[bits_of(Cache) / 4]; };

// To float16, in their order.
template <DType Cache> __device__ __forceinline__ Vector16 widen_8(const Codes8<Cache>& codes) {
  Vector16 wide;
  if constexpr (Cache == DType::i4) {
    uint32_t pairs[4];  // codes i and i + 4
    widen<Cache, false>(codes.word[0], pairs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      wide.word[i] = ptx::byte_permute(pairs[2 * i], pairs[2 * i + 1], 0x5410);
      wide.word[i + 2] = ptx::byte_permute(pairs[2 * i], pairs[2 * i + 1], 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[2];
      widen<Cache, false>(codes.word[i], pairs);
      wide.word[2 * i] = pairs[0];
      wide.word[2 * i + 1] = pairs[1];
    }
  }
  return wide;
}

// The warpgroup that widens tiles between the copy engine and the products, in 16-byte units of eight channels. Neighbouring lanes
// take neighbouring units, so that neither side has bank conflicts: what a warp reads is dense, and eight lanes write a row of the
// swizzle, whose units are in eight groups of banks.
template <FlashPrefillSm90Spec S> __device__ __forceinline__ void widen_tiles(const Shared<S>& shared) {
  using F = Flash<S>;
  constexpr int kRounds = S.tile_kv * F::kUnits / kWarpgroup;
  constexpr int kAhead = min_of(4, kRounds);  // rounds that are read before one is written, or each would wait for shared memory
  constexpr int kPeriod = F::kUnits % 3 == 0 ? 3 : 1;  // rounds after which a thread has the same unit of a row again ...
  constexpr int kPeriodKeys = kPeriod * kWarpgroup / F::kUnits;  // ... which is in the same place of its atom
  static_assert(kPeriodKeys % 8 == 0, "whole atoms");
  const int thread = threadIdx.x % kWarpgroup;
  int target[kPeriod];
#pragma unroll
  for (int i = 0; i < kPeriod; ++i) {
    const int unit = i * kWarpgroup + thread;
    target[i] = F::row_offset(unit / F::kUnits) + F::unit_offset(unit / F::kUnits, unit % F::kUnits, F::kAtomBytes);
  }
  Ring<2> works;
  Ring<S.stages> ring;
  // Rows outside of [begin, end) become zeros.
  const auto widen_tile = [&](const Tiles& codes, const Tiles& tiles, bool is_keys, int begin, int end) {
    ptx::mbarrier_wait(codes.full + ring.stage, ring.parity);
    ptx::mbarrier_wait(tiles.empty + ring.stage, ring.parity ^ 1);
    if (is_keys && thread == 0) shared.unmapped[ring.stage] = shared.loaded_unmapped[ring.stage];
    const Codes8<S.cache>* s_codes = reinterpret_cast<const Codes8<S.cache>*>(codes.data + ring.stage * F::kCodeBytes) + thread;
    unsigned char* s_tile = tiles.data + ring.stage * F::kTileBytes;
    Codes8<S.cache> units[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) units[i] = s_codes[i * kWarpgroup];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const Vector16 wide = widen_8<S.cache>(units[i % kAhead]);
      if (i + kAhead < kRounds) units[i % kAhead] = s_codes[(i + kAhead) * kWarpgroup];
      *reinterpret_cast<Vector16*>(s_tile + target[i % kPeriod] + F::row_offset(i / kPeriod * kPeriodKeys)) = wide;
    }
    if (begin > 0 || end < S.tile_kv) {
#pragma unroll 1
      for (int unit = thread; unit < S.tile_kv * F::kUnits; unit += kWarpgroup) {  // each thread's own
        const int key = unit / F::kUnits;
        if (key >= begin && key < end) continue;
        *reinterpret_cast<Vector16*>(s_tile + F::row_offset(key) + F::unit_offset(key, unit % F::kUnits, F::kAtomBytes)) = Vector16{};
      }
    }
    ptx::fence_async_proxy();
    __syncwarp();  // the whole warp's reads and stores come before the arrivals
    if (threadIdx.x % kWarpSize == 0) {
      ptx::mbarrier_arrive(codes.empty + ring.stage);
      ptx::mbarrier_arrive(tiles.full + ring.stage);
    }
  };
#pragma unroll 1
  for (;; works.advance()) {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
    const int tokens = shared.work[works.stage].tokens;
    int count = shared.work[works.stage].tile_count;
    const int last_key = shared.work[works.stage].first_key + (count - 1) * S.tile_kv;  // the first of the last tile
    int begin = shared.work[works.stage].keys.begin - last_key;
    int end = shared.work[works.stage].keys.end - last_key;
    ptx::mbarrier_arrive(shared.work_empty + works.stage);
    if (tokens == 0) break;
#pragma unroll 1
    for (; count > 0; --count) {
      widen_tile(shared.loaded_keys, shared.keys, true, 0, S.tile_kv);
      widen_tile(shared.loaded_values, shared.values, false, begin, end);
      ring.advance();
      begin += S.tile_kv;
      end += S.tile_kv;
    }
  }
}

// Where one of a warpgroup's 64 rows is, in every work: 64 x token + head in the group. kNoRow if it is none's.
constexpr uint32_t kNoRow = ~0u;
__device__ __forceinline__ uint32_t place_of_row(const FlashPrefillSm90Params& p, int warpgroup, int row) {
  const int own = row / p.group_size;
  if (own >= p.warpgroup_tokens) return kNoRow;
  return static_cast<uint32_t>(kWarpgroupRows * (warpgroup * p.warpgroup_tokens + own) + row - own * p.group_size);
}
__device__ __forceinline__ bool is_in(int tokens, uint32_t place) { return place < static_cast<uint32_t>(kWarpgroupRows * tokens); }

// Calls row(row of the warpgroup, token of the work, head) for each of the calling warp's rows that exist.
template <class Row>
__device__ __forceinline__ void for_rows_of_warp(const FlashPrefillSm90Params& p, int tokens, int kv_head, int warpgroup, const Row& row) {
  const int first_row = static_cast<int>(threadIdx.x) % kWarpgroup / kWarpSize * 16;
#pragma unroll 1
  for (int i = first_row; i < first_row + 16; ++i) {
    const uint32_t place = place_of_row(p, warpgroup, i);
    if (!is_in(tokens, place)) break;
    row(i, static_cast<int>(place / kWarpgroupRows), kv_head * p.group_size + static_cast<int>(place % kWarpgroupRows));
  }
}

// Attends those of the calling warp's rows again that hidden values have spoilt, and writes what they should have been. Bit r of
// `rounds` tells of rounds r, r + 32, ... of the CTA's work that some row may be. Each warp calls it when it is done with all of its
// work, for the rows that it has written itself, so nobody waits for anybody. Not inlined, and not called earlier, because its
// registers would be missing in the loop over tiles.
template <FlashPrefillSm90Spec S> __device__ __noinline__ void repair(const FlashPrefillSm90Params& p, uint32_t rounds) {
  using F = Flash<S>;
  using Io = typename F::Io;
  using Row = PlainRow<S.io, S.cache, S.head_size, S.head_size>;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - F::kFirstConsumer;
  WorkList list(p.sequences, p.blocks, S.warpgroups * p.warpgroup_tokens, p.kv_num_heads);
  __syncwarp();  // the rows that other lanes have written are visible
#pragma unroll 1
  for (uint32_t round = 1;; round = round << 1 | round >> 31) {
    Work work;
    if (!list.next(work)) break;
    if ((rounds & round) == 0) continue;
    find_keys<S>(p, work);
    const KvHead<S.cache> value_head(p.value_cache, work.kv_head);
    const Values<S.cache, S.head_size> values{value_head, p.blocks, work.sequence};
    for_rows_of_warp(p, work.tokens, work.kv_head, warpgroup, [&](int, int token_of_work, int head) {
      const int token = work.first_token + token_of_work;
      Io* g_row = output_row<Io>(p.out, token, head, S.head_size);
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < Row::kValuePairs; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int channel = 2 * Row::pair(i) + j;
          if (channel < S.head_size && is_nan(to_float(g_row[channel]))) nan |= 1u << (2 * i + j);
        }
      }
      if (!__any_sync(kFullWarp, nan != 0)) return;
      const KeyRange own = keys_of_token(p.sequences, p.rules, work, token_of_work);
      if (!values.is_spoilt_by_others(nan, own, work.keys)) return;
      Row plain;
      plain.attend(static_cast<const Io*>(p.query) + token * p.query_stride + head * S.head_size, p.key_cache, p.value_cache, work.kv_head,
                   p.blocks, work.sequence, own, p.rules, bias_row_of<Io>(p.rules, work.sequence, head, work.first_row + token_of_work));
      const float factor = finalize(plain.state, sink_of<Io>(p.out.head_sink, head)).factor;
      plain.for_values(factor, [&](int channel, float a, float b) { store_2(g_row, channel, S.head_size, a, b); });
    });
  }
}

// One warpgroup's part of the CTA's work.
template <FlashPrefillSm90Spec S> struct Consumer {
  using F = Flash<S>;
  using Io = typename F::Io;
  using Math = typename F::Math;
  static constexpr int kScores = S.tile_kv / 2;
  static constexpr int kOutputs = S.head_size / 2;
  static constexpr int kTurn = 1;   // named barriers, one for each warpgroup: of its turn ...
  static constexpr int kOwn = kTurn + S.warpgroups;  // ... and of its own threads

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
  Ring<2> works{};
  KeyRange admitted[2];
  KeyRange everyones;  // keys that all rows of the warp admit
  uint32_t place[2];   // of the lane's rows, the same in every work
  float scale[2];      // of q . k; to base 2 unless rules come between
  uint32_t held_query[F::kHoldsQuery ? S.head_size / 16 : 1][4];

  __device__ __forceinline__ Consumer(const FlashPrefillSm90Params& params, const Shared<S>& s) : p(params), shared(s) {
    warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0) - F::kFirstConsumer;  // the same, visibly
#pragma unroll
    for (int half = 0; half < 2; ++half) place[half] = place_of_row(p, warpgroup, row_of_lane(half));
    query = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.query) + warpgroup * F::kQueryBytes, 16, F::kAtomBytes);
    keys = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.keys.data), 16, F::kEightKeysBytes);
    values = ptx::matrix_descriptor<F::kRowBytes>(ptx::shared_address(s.values.data), F::kAtomBytes, F::kEightKeysBytes);
  }

  __device__ __forceinline__ void wait_query() {
    ptx::mbarrier_wait(shared.query_full, query_ring.parity);
    query_ring.advance();
    if (__all_sync(kFullWarp, work.tile_count == 0)) return;
    if constexpr (F::kCodes) scale_query();
    if constexpr (F::kHoldsQuery) {
      const FragmentRow row(shared.query + warpgroup * F::kQueryBytes);
#pragma unroll
      for (int step = 0; step < S.head_size / 16; ++step) ptx::ldmatrix_x4(held_query[step], row.step(step));
      __syncwarp();  // output may take the query's place
    }
  }

  // What a lane has the address of when its warp reads or writes sixteen channels of its rows as four 8x8 matrices.
  struct FragmentRow {
    unsigned char* s_row;
    int first;  // where its units start
    __device__ __forceinline__ explicit FragmentRow(unsigned char* s_rows) {
      const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % 16;
      s_row = s_rows + row / 8 * F::kAtomBytes;
      first = F::unit_offset(row, threadIdx.x % kWarpSize / 16, 0);
    }
    __device__ __forceinline__ unsigned char* step(int i) const {  // two units further on, as the swizzle has it
      constexpr int kStepsOfGroup = F::kGroupChannels / 16;
      return s_row + i / kStepsOfGroup * F::kQueryGroupBytes + (first ^ 32 * (i % kStepsOfGroup));
    }
  };

  // Gives the query's place back, when it has been read and, where output passes through it, that has been read too.
  __device__ __forceinline__ void release_query() const {
    if (F::kHoldsQuery && is_first_warp()) ptx::bulk_wait_read();
    __syncwarp();
    release(shared.query_empty);
  }

  __device__ __forceinline__ bool is_first_warp() const {  // of the warpgroup; the same in all lanes, visibly
    return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) % kWarpgroup / kWarpSize, 0) == 0;
  }
  __device__ __forceinline__ int token_of(int half) const { return static_cast<int>(place[half] / kWarpgroupRows); }
  __device__ __forceinline__ bool exists(int half) const { return is_in(work.tokens, place[half]); }
  __device__ __forceinline__ bool is_idle() const { return warpgroup * p.warpgroup_tokens >= work.tokens; }  // without rows
  __device__ __forceinline__ int head_of(int half) const {
    return work.kv_head * p.group_size + static_cast<int>(place[half] % kWarpgroupRows);
  }

  __device__ __forceinline__ void set_rows() {
    const auto find = [&](auto&& keys_of) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        admitted[half] = keys_of(exists(half) ? token_of(half) : 0);  // token 0 always exists
        if (!exists(half)) admitted[half] = {0, 0x7fffffff};  // nothing to mask
      }
    };
    if (!S.has_rules && p.sequences.query_positions == nullptr) [[likely]] {
      find([&](int token) { return plain_keys_of_token(p.rules, work, token); });
    } else {
      find([&](int token) { return keys_of_token(p.sequences, p.rules, work, token); });
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) scale[half] = S.has_rules ? p.rules.scale : kLog2E * p.rules.scale;
    everyones = {__reduce_max_sync(kFullWarp, max_of(admitted[0].begin, admitted[1].begin)),
                 __reduce_min_sync(kFullWarp, min_of(admitted[0].end, admitted[1].end))};
  }

  __device__ __forceinline__ void sync_warpgroup() const { ptx::named_barrier_sync(kOwn + warpgroup, kWarpgroup); }

  // For codes: the query rows become float16 (widen.cuh), in place; a warp does its own sixteen.
  __device__ __forceinline__ void scale_query() {
    constexpr int kLanes = F::kUnits > 16 ? 32 : F::kUnits > 8 ? 16 : 8;  // side by side on a row
    constexpr int kRowsAtOnce = kWarpSize / kLanes;
    const int lane = threadIdx.x % kWarpSize;
    const int first_row = threadIdx.x % kWarpgroup / kWarpSize * 16;
    const int unit = lane % kLanes;
    const bool exists = unit < F::kUnits;
    float channel_scale[8];
    float top_scale = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      channel_scale[j] = exists ? scale_of<S.cache>(p.key_cache, work.kv_head, 8 * unit + j) : 0.0f;
      top_scale = fmaxf(top_scale, fabsf(channel_scale[j]));
    }
    top_scale = group_max<kLanes>(top_scale);
    if (top_scale == 0.0f) top_scale = 1.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) channel_scale[j] = channel_scale[j] / top_scale;

#pragma unroll 2
    for (int r = 0; r < 16; r += kRowsAtOnce) {
      const int row = first_row + r + lane / kLanes;
      Vector16* s_unit = reinterpret_cast<Vector16*>(shared.query + warpgroup * F::kQueryBytes + row / 8 * F::kAtomBytes +
                                                     F::unit_offset(row, unit, F::kQueryGroupBytes));
      float x[8] = {};
      float top = 0.0f;
      if (exists) {
        const Vector16 word = *s_unit;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x[j] = channel_scale[j] * (j % 2 == 0 ? low_of<Io>(word.word[j / 2]) : high_of<Io>(word.word[j / 2]));
          top = finite_top(top, x[j]);
        }
      }
      const int exponent = exponent_of_row(group_max<kLanes>(top));
      const float inverse = power_of_two(-exponent);
      if (exists) {
        Vector16 word;
#pragma unroll
        for (int j = 0; j < 4; ++j) word.word[j] = ptx::pack_2<Math>(x[2 * j] * inverse, x[2 * j + 1] * inverse);
        *s_unit = word;
      }
      const float own = top_scale * power_of_two(exponent);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int ahead = lane / 4 + 8 * half - r;  // of this lane's row
        const float found = __shfl_sync(kFullWarp, own, ahead * kLanes & (kWarpSize - 1));
        if (ahead >= 0 && ahead < kRowsAtOnce) scale[half] *= found;
      }
    }
    ptx::fence_async_proxy();
    sync_warpgroup();  // all rows are there for the whole warpgroup's products
  }

  // Warpgroups issue their products in turn, so that one computes weights while another one multiplies. A turn is a barrier of the
  // threads that wait for it and of those that pass it on, so each warpgroup must have as many turns as any other.
  __device__ __forceinline__ void wait_turn() const { ptx::named_barrier_sync(kTurn + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(kTurn + (warpgroup + 1) % S.warpgroups, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void release(uint64_t* s_empty) const {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(s_empty);
  }

  // The first keys of a tile, as many as there are scores.
  template <int kCount> __device__ __forceinline__ void multiply_keys(float (&scores)[kCount]) {
    const uint64_t tile = ptx::descriptor_at(keys, key_ring.stage * F::kTileBytes);
#pragma unroll
    for (int step = 0; step < S.head_size / 16; ++step) {
      const int group = step / (F::kGroupChannels / 16);
      const int byte = step % (F::kGroupChannels / 16) * 32;
      const uint64_t channels = ptx::descriptor_at(tile, group * F::kAtomBytes + byte);
      if constexpr (F::kHoldsQuery) {
        ptx::wgmma<Math, false>(scores, held_query[step], channels, step != 0);
      } else {
        ptx::wgmma<Math, false>(scores, ptx::descriptor_at(query, group * F::kQueryGroupBytes + byte), channels, step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // The first keys of a tile, as many as there are weights of a row.
  template <int kKeys = S.tile_kv>
  __device__ __forceinline__ void multiply_values(float (&acc)[kOutputs], const uint32_t (&weights)[kScores / 8][4], bool accumulate) {
    const uint64_t tile = ptx::descriptor_at(values, value_ring.stage * F::kTileBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::wgmma<Math, true>(acc, weights[step], ptx::descriptor_at(tile, step * 2 * F::kEightKeysBytes), step != 0 || accumulate);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_values() const { ptx::mbarrier_wait(shared.values.full + value_ring.stage, value_ring.parity); }

  static __device__ __forceinline__ uint32_t low_bits(int count) { return count < 32 ? (1u << max_of(count, 0)) - 1u : ~0u; }
  // Of a lane's keys 0, 1, 8, 9, 16, 17, ..., how many are below `key`, if that is not negative.
  static __device__ __forceinline__ int own_keys_below(int key) { return (key >> 3) * 2 + min_of(key & 7, 2); }

  // What a lane's rows may see of a tile: bit m is key 8 (m / 2) + 2 (lane % 4) + m % 2, so a block of 16 is four bits.
  struct Sight {
    uint32_t row[2] = {~0u, ~0u};
    uint32_t all = ~0u;  // what all rows of the warp see: the same in all lanes
    bool is_asked = false;  // key by key instead, which is quicker for 32 keys whose blocks are all mapped
  };

  // Of the first kKeys keys of tile i, whose products are on their way. Only lane 0, which will release the tile, reads which of its
  // blocks are not mapped.
  template <int kKeys> __device__ __forceinline__ Sight sight_of(int i) const {
    Sight sight;
    const int first_key = work.first_key + i * S.tile_kv;
    uint32_t unmapped = threadIdx.x % kWarpSize == 0 ? shared.unmapped[key_ring.stage] : 0;
    unmapped = __shfl_sync(kFullWarp, unmapped, 0);
    if (unmapped == 0 && everyones.begin <= first_key && everyones.end - first_key >= kKeys) return sight;
    if (kKeys == 32 && unmapped == 0) {
      sight.is_asked = true;
      return sight;
    }
    uint32_t mapped = ~0u;
    const int block_bits = min_of(p.blocks.block_size, S.tile_kv) / 4;
#pragma unroll 1
    for (; unmapped != 0; unmapped &= unmapped - 1) {
      mapped &= ~(low_bits(block_bits) << (__ffs(static_cast<int>(unmapped)) - 1) * block_bits);
    }
    const int first = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sight.row[half] = mapped & low_bits(own_keys_below(admitted[half].end - first)) &
                        ~low_bits(own_keys_below(admitted[half].begin - first));
    }
    sight.all = kKeys > 32 ? __reduce_and_sync(kFullWarp, sight.row[0] & sight.row[1]) : 0;  // 32 are looked at as one
    return sight;
  }

  // Looks at 32 keys only if there is one that not everybody sees.
  template <int kCount> __device__ __forceinline__ void mask(float (&scores)[kCount], const Sight& sight, int first_key) const {
    if (kCount == 16 && sight.is_asked) {
      const int first = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const KeyRange& own = admitted[i / 2 % 2];
        const int key = i / 4 * 8 + i % 2;  // from `first` on
        if (key < own.begin - first || key >= own.end - first) scores[i] = negative_infinity();
      }
      return;
    }
    if (sight.all == ~0u) return;
#pragma unroll
    for (int part = 0; part < kCount; part += 16) {
      if ((sight.all >> part / 2 & 0xffu) == 0xffu) continue;
#pragma unroll
      for (int i = part; i < part + 16; ++i) {
        if ((sight.row[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
  }

  // Scores in base 2 where a rule comes between the product and softmax.
  template <int kCount> __device__ __forceinline__ void apply_rules(float (&scores)[kCount], int first_key) const {
    const int first = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Io* g_bias = exists(half) ? bias_row_of<Io>(p.rules, work.sequence, head_of(half), work.first_row + token_of(half)) : nullptr;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          const int key = first + i / 4 * 8 + j % 2;
          if (!admitted[half].contains(key)) continue;  // its bias may not exist
          scores[j] = kLog2E * capped_and_biased(p.rules, scores[j] * scale[half], g_bias, key);
        }
      }
    }
  }

  __device__ __forceinline__ void wait_keys() const { ptx::mbarrier_wait(shared.keys.full + key_ring.stage, key_ring.parity); }

  // After the products of tile i are complete: frees its stage, masks.
  template <int kCount> __device__ __forceinline__ void finish_scores(float (&scores)[kCount], int i, const Sight& sight) {
    release(shared.keys.empty + key_ring.stage);
    key_ring.advance();
    if constexpr (S.has_rules) apply_rules(scores, work.first_key + i * S.tile_kv);
    mask(scores, sight, work.first_key + i * S.tile_kv);
  }

  // Takes what finish_scores leaves of a row to base 2. A row that does not exist is multiplied with what happens to lie behind the
  // queries: 0, lest it move the references of its warp.
  __device__ __forceinline__ float factor_of(int half) const { return !exists(half) ? 0.0f : S.has_rules ? 1.0f : scale[half]; }

  __device__ __forceinline__ void release_values() {
    release(shared.values.empty + value_ring.stage);
    value_ring.advance();
  }

  // Issues the products of a tile's keys, as many as there are scores.
  template <int kCount> __device__ __forceinline__ void begin(float (&scores)[kCount]) {
    wait_keys();
    ptx::wgmma_fence();
    multiply_keys(scores);
  }

  // Issues the products of a tile's keys and of the values of tile i before it, of which the first kKeys have weights.
  template <int kKeys>
  __device__ __forceinline__ void advance(float (&scores)[kScores], float (&acc)[kOutputs], const uint32_t (&weights)[kScores / 8][4], int i) {
    wait_keys();
    wait_values();
    wait_turn();
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply_keys(scores);
    multiply_values<kKeys>(acc, weights, i != work.tile_count - 1);
    pass_turn();
  }

  // What writing needs of a work, when the next one has taken its place.
  struct Finished {
    int first_token;
    int tokens;
    int kv_head;
    float sum[2];     // of weights
    float factor[2];  // for the sums of values
  };

  // Writes lse.
  __device__ __forceinline__ Finished finish(const RowPair& rows) const {
    Finished finished{work.first_token, work.tokens, work.kv_head};
#pragma unroll
    for (int half = 0; half < 2; ++half) finished.sum[half] = group_sum<4>(rows.sum[half]);
    if (p.out.head_sink == nullptr && p.out.lse == nullptr) [[likely]] {  // what `finalize` comes to
#pragma unroll
      for (int half = 0; half < 2; ++half) finished.factor[half] = finished.sum[half] == 0.0f ? 0.0f : 1.0f / finished.sum[half];
      return finished;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxState state;
      if (rows.reference[half] != negative_infinity()) state.row_max = rows.reference[half] * factor_of(half);
      state.row_sum = finished.sum[half];
      const float sink = exists(half) ? sink_of<Io>(p.out.head_sink, head_of(half)) : negative_infinity();
      const SoftmaxResult result = finalize(state, sink);
      finished.factor[half] = result.factor;
      if (exists(half) && threadIdx.x % 4 == 0) store_lse(p.out, work.first_token + token_of(half), head_of(half), result.lse);
    }
    return finished;
  }

  // Weights of tile i, the first to be computed, which has few keys.
  __device__ __forceinline__ void weigh_few(uint32_t (&weights)[kScores / 8][4], RowPair& rows, const float (&factor)[2], int i) {
    float scores[F::kFewKeys / 2];
    float rescale[2];
    begin(scores);
    const Sight sight = sight_of<F::kFewKeys>(i);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    finish_scores(scores, i, sight);
    weigh(scores, rows, factor, rescale);
#pragma unroll
    for (int j = 0; j < F::kFewKeys / 4; ++j) weights[j / 4][j % 4] = ptx::pack_2<Math>(scores[2 * j], scores[2 * j + 1]);
  }

  // Also fetches the next work, while the last products run.
  __device__ __forceinline__ void attend(float (&acc)[kOutputs], Finished& finished) {
    RowPair rows;
    const float factor[2] = {factor_of(0), factor_of(1)};
    float scores[kScores];
    uint32_t weights[kScores / 8][4];
    float rescale[2];
    Sight sight;

    // The first whole tile. Products would be waited for one by one if they were still on their way where the branches meet.
    int i = work.tile_count - 1;
    const bool has_few = F::has_few(work);
    if (has_few) {
      weigh_few(weights, rows, factor, i);
      advance<F::kFewKeys>(scores, acc, weights, i);
      sight = sight_of<S.tile_kv>(--i);
      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release_values();
    } else {
      begin(scores);
      sight = sight_of<S.tile_kv>(i);
      ptx::wgmma_wait<0>();
    }
    ptx::hold(scores);
    if (F::kHoldsQuery || i == 0) release_query();
    finish_scores(scores, i, sight);
    bool moved = weigh(scores, rows, factor, rescale);
    pack_weights<Math>(weights, scores);
    if (has_few && moved) scale_rows(acc, rescale);

    for (; i > 0; --i) {
      advance<S.tile_kv>(scores, acc, weights, i);
      sight = sight_of<S.tile_kv>(i - 1);
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      if (!F::kHoldsQuery && i == 1) release_query();
      finish_scores(scores, i - 1, sight);
      moved = weigh(scores, rows, factor, rescale);

      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release_values();
      pack_weights<Math>(weights, scores);
      if (moved) scale_rows(acc, rescale);
    }

    wait_values();
    ptx::hold(acc);
    ptx::wgmma_fence();
    multiply_values(acc, weights, work.tile_count > 1);
    finished = finish(rows);
    fetch();
    ptx::wgmma_wait<0>();
    ptx::hold(acc);
    release_values();
  }

  // What a warpgroup without rows, or with rows without keys, does instead: lets the query, the tiles, and its turns, pass.
  __device__ __forceinline__ void let_pass() {
    release_query();
    for (int i = work.tile_count; i > 0; --i) {
      ptx::mbarrier_wait(shared.keys.full + key_ring.stage, key_ring.parity);
      release(shared.keys.empty + key_ring.stage);
      key_ring.advance();
      wait_values();
      release_values();
      if (i > 1) {
        wait_turn();
        pass_turn();
      }
    }
  }

  // Returns whether a hidden value may have spoilt one of the warp's rows.
  __device__ __forceinline__ bool write(float (&acc)[kOutputs], const Finished& finished) const {
    if constexpr (F::kCodes) {
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
        acc[j] *= scale_of<S.cache>(p.value_cache, finished.kv_head, j / 4 * 8 + 2 * (threadIdx.x % 4) + j % 2);
      }
    }
    const bool exist[2] = {is_in(finished.tokens, place[0]), is_in(finished.tokens, place[1])};
    bool spoilt = false;
    if constexpr (F::kSpoils) {
      const bool is_first = is_spoilt(acc, 0, finished.sum[0]);
      const bool is_second = is_spoilt(acc, 1, finished.sum[1]);
      spoilt = __any_sync(kFullWarp, (is_first & exist[0]) | (is_second & exist[1]));
    }
    write_rows(acc, finished);
    return spoilt;
  }

  // Rows go through shared memory, from where the copy engine takes them if they all exist: stores of a few bytes of many rows each keep
  // their warps waiting. Where the query's place is used, the next query is in registers by then.
  __device__ __forceinline__ void write_rows(const float (&acc)[kOutputs], const Finished& finished) const {
    unsigned char* s_rows = shared.output + warpgroup * F::kStagedBytes;
    const FragmentRow row(s_rows);
    const int first_token = warpgroup * p.warpgroup_tokens;  // of the work
    const bool all_exist = first_token + p.warpgroup_tokens <= finished.tokens;
    const bool by_boxes = __all_sync(kFullWarp, all_exist && is_aligned(p.out.output, sizeof(Vector16)));  // the same, visibly
#pragma unroll
    for (int first_group = 0; first_group < F::kChannelGroups; first_group += F::kStagedGroups) {
      if (!F::kHoldsQuery) {
        if (is_first_warp()) ptx::bulk_wait_read();
        sync_warpgroup();  // the place is free
      }
#pragma unroll
      for (int step = 0; step < F::kStagedGroups * F::kGroupChannels / 16; ++step) {
        uint32_t words[4];  // of two n-tiles, both half rows of each
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = first_group * F::kGroupChannels / 2 + 8 * step + 2 * i;
          words[i] = ptx::pack_2<Io>(acc[first] * finished.factor[i % 2], acc[first + 1] * finished.factor[i % 2]);
        }
        ptx::stmatrix_x4(row.step(step), words);
      }
      ptx::fence_async_proxy();
      if (by_boxes) {
        sync_warpgroup();  // all rows are there
        if (is_first_warp() && ptx::elect()) {
#pragma unroll
          for (int group = 0; group < F::kStagedGroups; ++group) {
            ptx::tma_store(p.output_map, s_rows + group * F::kQueryGroupBytes, 0, finished.kv_head * p.group_size,
                           finished.first_token + first_token, first_group + group);
          }
          ptx::bulk_commit();
        }
        __syncwarp();
        continue;
      }
      __syncwarp();
      for_rows_of_warp(p, finished.tokens, finished.kv_head, warpgroup, [&](int i, int token_of_work, int head) {
        Io* g_row = output_row<Io>(p.out, finished.first_token + token_of_work, head, S.head_size) + first_group * F::kGroupChannels;
        const unsigned char* s_row = s_rows + i / 8 * F::kAtomBytes;
#pragma unroll 1
        for (int unit = threadIdx.x % kWarpSize; unit < F::kStagedGroups * F::kGroupChannels / 8; unit += kWarpSize) {
          store_8(g_row + 8 * unit, *reinterpret_cast<const Vector16*>(s_row + F::unit_offset(i, unit, F::kQueryGroupBytes)));
        }
      });
      __syncwarp();  // the place is free
    }
  }

  // What rows that attend nothing get.
  __device__ __forceinline__ void write_nothing() const {
    for_rows_of_warp(p, work.tokens, work.kv_head, warpgroup, [&](int, int token_of_work, int head) {
      const int token = work.first_token + token_of_work;
      Io* g_row = output_row<Io>(p.out, token, head, S.head_size);
#pragma unroll 1
      for (int channel = threadIdx.x % kWarpSize; channel < S.head_size; channel += kWarpSize) g_row[channel] = from_float<Io>(0.0f);
      if (threadIdx.x % kWarpSize == 0) store_lse(p.out, token, head, negative_infinity());
    });
  }

  // The next work; its tokens are 0 if there is none.
  __device__ __forceinline__ void fetch() {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
    work = shared.work[works.stage];
    ptx::mbarrier_arrive(shared.work_empty + works.stage);
    works.advance();
    if (__all_sync(kFullWarp, work.tokens == 0)) {  // by the whole warp, visibly
      sync_warpgroup();  // no next query comes to tell that output in its place has been read
      return;
    }
    set_rows();
    wait_query();
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == S.warpgroups - 1) pass_turn();  // the first turn is the first warpgroup's
    uint32_t spoilt_rounds = 0;
    uint32_t round = 1u << 31;  // a bit: of the round before the first one, whose work has no rows
#pragma unroll 1
    do {
      if (work.tile_count > 0 && !is_idle()) {
        float acc[kOutputs];
        Finished finished;
        attend(acc, finished);
        if (write(acc, finished)) spoilt_rounds |= round;
      } else {
        if (work.tokens > 0) let_pass();
        write_nothing();
        fetch();
      }
      round = round << 1 | round >> 31;
    } while (work.tokens != 0);
    if (warpgroup == 0) wait_turn();  // no barrier is left half full
    if (is_first_warp()) ptx::bulk_wait();  // shared memory has been read, and the rows are visible
    if (F::kSpoils) sync_warpgroup();
    if constexpr (F::kSpoils) {
      if (spoilt_rounds != 0) repair<S>(p, spoilt_rounds);
    }
  }
};

template <FlashPrefillSm90Spec S>
__global__ void __launch_bounds__(Flash<S>::kThreads, 1) flash_prefill_sm90(const __grid_constant__ FlashPrefillSm90Params p) {
  static_assert(S.head_size % 32 == 0 && S.head_size <= 256, "acc of 64 rows must fit the registers of a warpgroup");
  static_assert(S.tile_kv == 64 || S.tile_kv == 128, "a tile is made of whole blocks or lies in one; blocks are powers of two");
  static_assert(S.io == DType::f16 || S.io == DType::bf16, "wgmma with 16-bit operands");
  static_assert(S.cache == S.io || is_quantized(S.cache), "what the cache holds is read as it is, or widened");
  using F = Flash<S>;
  const Shared<S> shared;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.query_map);
    ptx::prefetch_tensor_map(p.key_map);
    ptx::prefetch_tensor_map(p.value_map);
    ptx::prefetch_tensor_map(p.output_map);
    ptx::mbarrier_init(shared.query_full, 1);
    ptx::mbarrier_init(shared.query_empty, F::kConsumerThreads / kWarpSize);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.work_full + i, 1);
      ptx::mbarrier_init(shared.work_empty + i, F::kThreads - (F::kCodes ? 2 : 1) * kWarpSize);  // but the writer, and who leaves
    }
    const auto init = [](const Tiles& tiles, int stages, int writers, int readers) {
      for (int i = 0; i < stages; ++i) {
        ptx::mbarrier_init(tiles.full + i, writers);
        ptx::mbarrier_init(tiles.empty + i, readers);
      }
    };
    constexpr int kWideningWarps = kWarpgroup / kWarpSize;
    init(shared.keys, S.stages, F::kCodes ? kWideningWarps : 1, F::kConsumerThreads / kWarpSize);
    init(shared.values, S.stages, F::kCodes ? kWideningWarps : 1, F::kConsumerThreads / kWarpSize);
    if constexpr (F::kCodes) {
      init(shared.loaded_keys, F::kCodeStages, 1, kWideningWarps);
      init(shared.loaded_values, F::kCodeStages, 1, kWideningWarps);
    } else {
      for (int i = 0; i < S.stages; ++i) ptx::mbarrier_init(shared.loaded_values.full + i, 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialized for all threads

  if (threadIdx.x < kWarpgroup) {
    ptx::decrease_registers<F::kLoadRegisters>();
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);  // the same in all lanes, visibly
    if (warp == 0) {
      load_queries<S>(p, shared);
    } else if (warp <= 2) {
      load_tiles<S>(p, shared, warp == 2);
    } else if (!F::kCodes) {
      clear_values<S>(p, shared);
    }
  } else if (F::kCodes && threadIdx.x < 2 * kWarpgroup) {
    if constexpr (F::kCodes) {
      ptx::decrease_registers<F::kWidenRegisters>();
      widen_tiles<S>(shared);
    }
  } else {
    ptx::increase_registers<F::kComputeRegisters>();
    Consumer<S>(p, shared).run();
  }
}

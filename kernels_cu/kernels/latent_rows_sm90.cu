// latent_rows_sm90.cu: attention over a LATENT cache for few query rows on Hopper. Keys and channels are the M side of the tensor
// cores, where 64 of them are a product, and the query rows are N, where 16 are enough:
//
//   scores^T [64 keys, N rows]      = K   [64 keys, 576]      x q^T [576, N rows]
//   output^T [512 channels, N rows] += V^T [512, 64 keys]      x p^T [64 keys, N rows]
//
//   grid    x: split x row tile, the tiles of a split side by side; or a cluster a row tile, whose CTAs have a split each
//   CTA     two warpgroups that compute, the workers; with 64 rows one more, the scorer; and one of which a warp loads and the others leave
//   reads   query once a split; each latent row that some token of the tile admits once a row tile
//   writes  output and lse where a cluster has the splits, or there is one or none; else acc and lse of this split (combine_splits.cu)
//   smem    | queries | weights | ring of tiles | row statistics, Work, barriers |; at the end the sums of values lie over the first
//           three
//
// Workers take tiles of 64 keys in turn, each with a softmax and a reference of its own, and are merged in the end: nothing is
// exchanged in the loop. With 64 rows the sums do not fit the registers of one: two share the channels, and one more warpgroup, the
// scorer, makes the weights of all tiles:
//
//   16, 32 rows   worker w   K[i] q |                   softmax | V[i] p[i] | K[i + 2] q ...         all value channels
//   64 rows       scorer     K[i] q | softmax | K[i + 1] q | softmax ...
//                 worker w                    | V[i] p[i]  | V[i + 1] p[i + 1] ...                    half w of them
//
// Where the cache has the io type, a tile comes in thirds of three channel groups, each [64 keys / 8][3 groups] atoms of 8 rows of 64
// channels, which the copy engine swizzles, and the tensor cores read K and V^T from there.
//
// Codes come in parts of 16 tokens, which lie side by side in a block, by plain copies, and become float16 without their scale, exactly, in
// registers, as the A operand of each product:
//   K     a lane takes 16 neighbouring channels of a key in one access; the query has its channels in the order that follows
//   V^T   ldmatrix moves pairs of bytes, so rows g and g + 8 of a product are neighbouring channels
// Eight keys that a warp reads at a time, an octet, must start in eight different sixteenths of 128 bytes. Rows of 576 bytes do not, so
// parts are 16 bytes apart, and an octet has two keys of each: the order of keys in the products is not that of the tile (`key_at`).
// Invariants
//   Splits are planned for a row tile, from the keys that any of its tokens admits; combine_splits plans the same way.
//   What no token of the tile admits is zeros in shared memory, and not read where it fills blocks (of codes, nowhere): it cannot reach
//   the sums as 0 x NaN. What only some tokens admit can, and then shows in the end (spoilt_rows.cuh). Blocks that are not mapped
//   arrive as zeros and are masked.
//   Lengths that enter the mask are read here; host bounds only size the grid and the splits.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/ptx/cluster.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/ptx/setmaxnreg.cuh>
#include <pagedattn/ptx/tma.cuh>
#include <pagedattn/ptx/wgmma.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>
#include <pagedattn/spoilt_rows.cuh>
#include <pagedattn/warpgroup_rows.cuh>
#include <pagedattn/widen.cuh>

struct LatentRowsSm90Spec {
  DType io;        // of query and output
  DType cache;     // io, or codes of 8 bits
  int rows;        // query rows of a tile, tokens times heads: 16, 32 or 64
  int slots;       // of the ring
  int ctas;        // of a cluster, which has the splits of a row tile and merges them; 1: there is one split, or combine_splits merges
  bool has_rules;  // softcap, attention_bias or a scale that is not positive
};

struct LatentRowsSm90Params {
  TensorMap cache_map;   // [num_blocks, block_size / 8, channel groups, 8, kGroupChannels]; box [1, all or a tile's, kSlotGroups, all, all]
  KvCache key_cache;     // the same array; codes are read through this
  const void* query;     // [token_count, num_heads, kHeadSize], rows query_stride apart, on multiples of 16 bytes
  int64_t query_stride;  // elements
  int tile_count;        // row tiles of a split
  int tiles_of_token;    // of its heads, where no tile spans tokens; 0: tiles are numbered as row_tiles.cuh does
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;
  Partials partials;
};

constexpr int kHeadSize = 576;
constexpr int kValueSize = 512;
constexpr int kTileKeys = 64;
constexpr int kPartKeys = 16;  // of the smallest block
constexpr int kParts = kTileKeys / kPartKeys;
constexpr int kPadBytes = 16;  // between parts of codes
constexpr int kGroupChannels = 64;
constexpr int kSlotGroups = 3;
constexpr int kValueGroups = kValueSize / kGroupChannels;  // and products of 64 channels
constexpr int kSteps = 4;                                  // of 16 channels of a group, or of 16 keys of a tile
constexpr int kWorkerWarps = kWarpgroup / kWarpSize;
constexpr int kWorkers = 2;
constexpr int kTeamBuffers = 3;  // tiles whose weights a team has at a time
constexpr int kScorerRegisters = 112;
constexpr int kQueryRowBytes = 2 * kGroupChannels;
constexpr int kWeightRowBytes = 2 * kTileKeys;
constexpr int kUnmappedTiles = 8;              // tiles that are being loaded or computed at a time, at most
constexpr int kOutputVectors = kValueSize / 8;  // of a row that is written
constexpr int kOutputStride = kValueSize + 4;   // floats, so that four rows start in different banks

// Where a row has the sum of a channel: fours of channels in turn in two halves, which start in different banks. So threads that read
// eight channels each read neighbouring fours.
__device__ __forceinline__ constexpr int place_of(int channel) {
  return channel / 8 * 4 + channel % 4 + channel / 4 % 2 * (kValueSize / 2 + 4);
}

// Named barriers: of all that compute, of all workers, of each softmax.
enum Barrier { kNone, kAllWorkers, kOwn };

// One piece of work.
struct Work {
  RowTile tile;    // rows = 0: there is none
  KeyRange keys;   // of the split, that some token admits
  TileKeys all;    // of the row tile, in all splits
  int first_tile;  // in units of kTileKeys
  int tile_count;
  int split;
  int split_count;  // of the row tile; 0: its tokens attend nothing

  // A tile without keys is work, too: its first split writes the rows as empty.
  __device__ __forceinline__ bool exists() const { return tile.rows > 0 && split < max_of(1, split_count); }
};

// Sizes that follow from a Spec.
template <LatentRowsSm90Spec S> struct Shape {
  using Io = element_t<S.io>;
  static constexpr bool kCodes = is_quantized(S.cache);
  static constexpr bool kSpoils = can_spoil(S.cache);
  using Math = element_t<kCodes ? DType::f16 : S.io>;    // of operands
  static constexpr int kRows = S.rows;
  static constexpr int kWorkerThreads = kWorkers * kWarpgroup;
  static constexpr bool kHasScorer = S.rows > 32;  // and workers that share tiles, because one has no registers for all channels
  static constexpr int kScorerThreads = kHasScorer ? kWarpgroup : 0;
  static constexpr int kThreads = kWorkerThreads + kScorerThreads + kWarpgroup;
  static constexpr int kSoftmaxes = kHasScorer ? 1 : kWorkers;
  static constexpr int kKeyBatch = kHasScorer ? 4 : 2;  // steps whose operands are made together
  static constexpr int kValueBatch = 2;
  static constexpr int kLoadRegisters = kHasScorer ? 32 : 40;
  static constexpr int kWorkerRegisters = kHasScorer ? 184 : 232;
  static constexpr int kRowBytes = row_bytes_of(S.cache, kHeadSize);
  static constexpr int kGroupBytes = row_bytes_of(S.cache, kGroupChannels);
  static constexpr int kAtomBytes = 8 * kGroupBytes;
  static constexpr int kEightKeysBytes = kSlotGroups * kAtomBytes;
  static constexpr int kPartBytes = kPartKeys * kRowBytes + kPadBytes;
  static constexpr int kSlotsOfTile = kCodes ? 1 : kHeadSize / kGroupChannels / kSlotGroups;
  static constexpr int kSlotBytes = kCodes ? kParts * kPartBytes : kTileKeys / 8 * kEightKeysBytes;
  static constexpr int kFetchedTiles = S.slots / kSlotsOfTile;  // that are brought to L2 before the kernel ahead has ended
  static constexpr int kQueryGroupBytes = kRows * kQueryRowBytes;
  static constexpr int kQueryBytes = kHeadSize / kGroupChannels * kQueryGroupBytes;
  static constexpr int kWeightBytes = kRows * kWeightRowBytes;
  static constexpr int kRowTiles = kRows / 8;       // of eight rows, side by side in an accumulator
  static constexpr int kScores = kRows / 2;         // of a thread: in each row tile two rows and two keys (or channels)
  static constexpr int kLaneRows = 2 * kRowTiles;
  static constexpr int kTeam = kHasScorer ? kWorkers : 1;  // workers that share tiles
  static constexpr int kTeams = kWorkers / kTeam;
  static constexpr int kWeightBuffers = kTeam > 1 ? kTeamBuffers : 2 * kWorkers;
  static constexpr int kOwnGroups = kValueGroups / kTeam;  // of value channels of a worker
  static_assert(kLoadRegisters + kWorkers * kWorkerRegisters + kHasScorer * kScorerRegisters <=
                    kThreads / kWarpgroup * ptx::start_registers(kThreads),
                "more would wait forever");
  static_assert(kQueryBytes + kWeightBuffers * kWeightBytes + S.slots * kSlotBytes >= kTeams * kRows * kOutputStride * 4,
                "the output takes their place");
  static_assert(S.slots / kSlotsOfTile + 2 <= kUnmappedTiles, "a tile's bits are read before they are written again");
};

// A score times `factor` plus `shift` is the exponent of its weight.
struct RowScale {
  float factor;  // takes q . k to a score in base 2
  float shift;   // the reference, negative, in base 2; kNoShift where there is none
};
constexpr float kNoShift = 1e38f;  // any score goes too far, and none that is masked

// What a split comes to know of a row.
struct alignas(8) RowResult {
  float factor;  // what sums of values are multiplied by
  float lse;     // base 2
};

// What threads tell each other about rows.
template <int kRows, int kSoftmaxes> struct alignas(16) RowStatistics {
  float factor[kRows];                               // takes q . k to a score: in base 2, unless rules come between
  KeyRange admitted[kRows];                          // cut to the split
  RowScale scale[kSoftmaxes][kWorkerWarps][kRows];   // with this reference:
  float reference[kSoftmaxes][kWorkerWarps][kRows];  // near the maximum of q . k as it comes; the same in all warps of a softmax
  float of_warp[kSoftmaxes][kWorkerWarps][kRows];    // maxima of q . k when a reference moves; sums of weights in the end
  RowResult result[kRows];
  float told[kRows];                                 // of a scorer: the references that the workers have been told of
  float rescale[kTeamBuffers][kRows];                // what was summed up before a tile's weights is multiplied by this, where
  bool has_moved[kTeamBuffers];                      // references have moved
  uint32_t spoilt[ceil_div(kRows, 32)];              // a bit a row
};

template <LatentRowsSm90Spec S> struct Shared {
  using F = Shape<S>;
  unsigned char* query;
  unsigned char* weights;  // [worker][2], or [kTeamBuffers]: those of the tiles before may still be multiplied
  unsigned char* ring;
  RowStatistics<F::kRows, F::kSoftmaxes>* rows;
  Work* work;
  uint64_t* full;      // [slots], bytes, and an arrival of who loads, for codes of each lane: the slot is filled
  uint64_t* empty;     // [slots], an arrival of each warp (of codes: thread) that multiplies with the tile: the slot is used up
  uint64_t* ready;     // [kTeamBuffers], an arrival of each thread of the scorer: weights are there
  uint64_t* used;      // [kTeamBuffers], an arrival of each warp of the workers: they are used up
  uint64_t* attended;  // an arrival of each thread of the workers and the scorer: it reads ring and queries no more
  uint64_t* put;       // an arrival of each thread of the workers: what it has summed up is there; clusters have a barrier for it
  uint64_t* loaded;    // the same: its share of the queries is visible to the tensor cores, and all that it tells of the work to the threads
  uint32_t* unmapped;  // [kUnmappedTiles] bit i: part i of the tile has nothing to see

  __device__ __forceinline__ Shared() {
    query = swizzled_shared_memory();
    weights = query + F::kQueryBytes;
    ring = weights + F::kWeightBuffers * F::kWeightBytes;
    rows = reinterpret_cast<RowStatistics<F::kRows, F::kSoftmaxes>*>(ring + S.slots * F::kSlotBytes);
    work = reinterpret_cast<Work*>(rows + 1);
    full = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(work) + round_up(sizeof(Work), 16));
    empty = full + S.slots;
    ready = empty + S.slots;
    used = ready + kTeamBuffers;
    attended = used + kTeamBuffers;
    put = attended + 1;
    loaded = put + 1;
    unmapped = reinterpret_cast<uint32_t*>(loaded + 1);
  }

  // What a team has summed up of a row, when all are done.
  __device__ __forceinline__ float* output_row(int team, int row) const {
    return reinterpret_cast<float*>(query) + (team * F::kRows + row) * kOutputStride;
  }

  // The twin of an object in a CTA of the cluster, which may be this one.
  template <class T> __device__ __forceinline__ static const T* of_cta(const T* s_object, int cta) {
    if constexpr (S.ctas == 1) return s_object;
    return ptx::cluster_twin(s_object, cta);
  }

  // The highest of all references, when all are done.
  __device__ __forceinline__ float reference_of(int row) const {
    float top = rows->reference[0][0][row];
#pragma unroll
    for (int i = 1; i < F::kSoftmaxes; ++i) top = fmaxf(top, rows->reference[i][0][row]);
    return top;
  }
};

// Row tile number `number`. All lanes of a warp call it together.
template <int kRows> __device__ __forceinline__ RowTile tile_of_number(const LatentRowsSm90Params& p, int number) {
  const int heads = p.out.num_heads;
  if (p.tiles_of_token == 0) return find_row_tile(p.sequences, number, kRows, heads, capacity_of(p.blocks));
  const int token = number / p.tiles_of_token;
  const int first_head = number % p.tiles_of_token * kRows;
  RowTile tile{sequence_of_token(p.sequences, token, capacity_of(p.blocks)), 0, first_head, min_of(kRows, heads - first_head), heads};
  if (tile.sequence.is_active()) {
    tile.first_token = token - tile.sequence.begin;
  } else {
    tile.sequence.begin = token;  // its rows are written as empty, whoever owns it
  }
  return tile;
}

// All lanes of a warp call it together.
__device__ __forceinline__ TileKeys keys_of_tile(const LatentRowsSm90Params& p, const RowTile& tile) {
  const Sequence& sequence = tile.sequence;
  if (p.tiles_of_token == 0) return keys_of_tokens(p.sequences, p.rules, sequence, tile.first_token, tile.last_token());
  const int64_t position = position_of_token(p.sequences, sequence, sequence.begin + tile.first_token);
  const KeyRange keys = admitted_keys(p.rules, position, tile.first_token, sequence.kv_len);
  return {keys, keys};
}

// This CTA's work, as each warp finds it.
template <LatentRowsSm90Spec S> __device__ __forceinline__ Work find_work(const LatentRowsSm90Params& p) {
  const int number = static_cast<int>(blockIdx.x);
  // Without clusters the tiles of a split are side by side, because some of them share keys.
  Work work{.tile = tile_of_number<S.rows>(p, S.ctas > 1 ? number / S.ctas : number % p.tile_count),
            .split = S.ctas > 1 ? number % S.ctas : number / p.tile_count};
  if (work.tile.rows > 0 && work.tile.sequence.is_active()) {
    work.all = keys_of_tile(p, work.tile);
    const SplitPlan plan = plan_splits(p.partials, work.all.some);
    work.split_count = plan.count;
    if (work.split < plan.count) {
      work.keys = keys_of_split(p.partials, plan, work.all.some, work.split);
      work.first_tile = work.keys.begin / kTileKeys;
      work.tile_count = (work.keys.end - 1) / kTileKeys - work.first_tile + 1;
    }
  }
  return work;
}

// Clears the rows of a tile of codes that are not read, where those of a lane's part that are, are [begin, end). All lanes of
// a warp call it.
template <LatentRowsSm90Spec S> __device__ __forceinline__ void clear_rows(unsigned char* s_tile, int begin, int end) {
  using F = Shape<S>;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int part_begin = __shfl_sync(kFullWarp, begin, part);
    const int part_end = __shfl_sync(kFullWarp, end, part);
    if (part_end - part_begin == kPartKeys) continue;
#pragma unroll 3
    for (int byte = 16 * (threadIdx.x % kWarpSize); byte < kPartKeys * F::kRowBytes; byte += 16 * kWarpSize) {
      const int row = byte / F::kRowBytes;
      if (row < part_begin || row >= part_end) *reinterpret_cast<Vector16*>(s_tile + part * F::kPartBytes + byte) = Vector16{};
    }
  }
  ptx::fence_async_proxy();  // copies follow when the slot is filled again
}

// The warp that loads, slot after slot, as far ahead as the ring has room.
template <LatentRowsSm90Spec S>
__device__ __forceinline__ void load_tiles(const LatentRowsSm90Params& p, const Shared<S>& shared, const Work& work) {
  using F = Shape<S>;
  constexpr int kBatch = kWarpSize / kParts;  // tiles whose blocks are looked up together, one part a lane
  const int lane = threadIdx.x % kWarpSize;
  const KvHead<S.cache> cache(p.key_cache, 0);
  const int copy_keys = F::kCodes ? kPartKeys : min_of(p.blocks.block_size, kTileKeys);

  // What the table has for a part, counted from the first tile on, or kUnmapped where the copy that has it has nothing to read.
  const auto entry_of = [&](int part) {
    const int64_t key = (static_cast<int64_t>(work.first_tile) * kTileKeys + static_cast<int64_t>(part) * kPartKeys) & -copy_keys;
    const bool wanted = key < work.keys.end && key + copy_keys > work.keys.begin;
    return wanted ? entry_of_position(p.blocks, work.tile.sequence.index, static_cast<int>(key)) : kUnmapped;
  };

  const uint64_t policy = ptx::evict_first_policy();  // a row is read by few
  int entry = entry_of(lane);
  // The first tiles come to L2 while the kernel ahead still runs. What it writes of them is in L2, too.
  if (lane < kParts * F::kFetchedTiles && cache.token_bytes() == F::kRowBytes) {
    const int block = block_of_entry(p.blocks, entry);
    const int offset = offset_in_block(p.blocks, work.first_tile * kTileKeys + lane * kPartKeys);
    if (block != kUnmapped) ptx::bulk_prefetch(cache.row(block, offset), kPartKeys * F::kRowBytes, policy);
  }
  ptx::wait_for_previous_kernel();  // which writes the cache
  Ring<S.slots> ring;
  for (int first = 0; first < work.tile_count; first += kBatch) {
    const int block = block_of_entry(p.blocks, entry);
    entry = entry_of((first + kBatch) * kParts + lane);  // on its way while these tiles are waited for
    const uint32_t unmapped = __ballot_sync(kFullWarp, block == kUnmapped);
    for (int i = first; i < min_of(first + kBatch, work.tile_count); ++i) {
      const int first_part = (i - first) * kParts;
      const int tile_key = (work.first_tile + i) * kTileKeys;
      const uint32_t tile_unmapped = unmapped >> first_part & ((1u << kParts) - 1u);
      if constexpr (F::kCodes) {
        // This lane's part, and its rows [begin, end) that are read.
        const int key = tile_key + lane % kParts * kPartKeys;
        const int from = __shfl_sync(kFullWarp, block, first_part + lane % kParts);
        const int begin = min_of(max_of(work.keys.begin - key, 0), kPartKeys);
        const int end = from == kUnmapped ? begin : max_of(begin, min_of(work.keys.end - key, kPartKeys));
        unsigned char* s_tile = shared.ring + ring.stage * F::kSlotBytes;
        ptx::mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1);
        if (__any_sync(kFullWarp, end - begin < kPartKeys)) clear_rows<S>(s_tile, begin, end);
        if (lane == 0) shared.unmapped[i % kUnmappedTiles] = tile_unmapped;
        ptx::mbarrier_arrive_expect(shared.full + ring.stage, lane < kParts ? (end - begin) * F::kRowBytes : 0);
        if (lane < kParts) {
          const int run = cache.token_bytes() == F::kRowBytes ? end - begin : 1;  // rows that lie side by side
          for (int row = begin; row < end; row += run) {
            ptx::bulk_load(s_tile + lane * F::kPartBytes + row * F::kRowBytes, cache.row(from, offset_in_block(p.blocks, key) + row),
                           run * F::kRowBytes, shared.full + ring.stage, policy);
          }
        }
        ring.advance();
      } else {
        const int eight = offset_in_block(p.blocks, tile_key) / 8;  // 0 unless the tile lies in one block
#pragma unroll
        for (int third = 0; third < F::kSlotsOfTile; ++third) {
          ptx::mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1);
          const bool issues = ptx::elect();
          if (issues) {
            if (third == 0) shared.unmapped[i % kUnmappedTiles] = tile_unmapped;
            ptx::mbarrier_arrive_expect(shared.full + ring.stage, F::kSlotBytes);
          }
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if ((part * kPartKeys & (copy_keys - 1)) != 0) continue;  // it lies in the box of the part before
            const int from = __shfl_sync(kFullWarp, block, first_part + part);
            unsigned char* s_box = shared.ring + ring.stage * F::kSlotBytes + part * (F::kSlotBytes / kParts);
            if (issues) ptx::tma_load(s_box, p.cache_map, shared.full + ring.stage, policy, 0, 0, third * kSlotGroups, eight, from);
          }
          ring.advance();
        }
      }
    }
  }
}

// Query rows as B operands of q . k: [channel group][row] of 64 channels, swizzled; rows that do not exist are zeros. Also the factors
// of rows. All workers call it, a warp for every kWarps-th row. For codes the rows become float16 (widen.cuh).
template <LatentRowsSm90Spec S>
__device__ __forceinline__ void load_queries(const LatentRowsSm90Params& p, const Shared<S>& shared, const RowTile& tile) {
  using F = Shape<S>;
  using Io = typename F::Io;
  constexpr int kVectors = kHeadSize / 8;
  constexpr int kLaneVectors = ceil_div(kVectors, kWarpSize);
  constexpr int kWarps = F::kWorkerThreads / kWarpSize;
  constexpr int kWarpRows = ceil_div(F::kRows, kWarps);
  constexpr int kTogether = 2;  // while the next ones are on their way
  static_assert(kWarpRows % kTogether == 0, "those after the last ones do not exist");
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  Vector16 next[kTogether][kLaneVectors];
  const auto load = [&](int first) {
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = warp + (first + r) * kWarps;
      const bool exists = row < tile.rows;
      const Io* g_row = static_cast<const Io*>(p.query);
      if (exists) g_row += tile.token(row) * p.query_stride + tile.head_in_group(row) * kHeadSize;
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        const int vector = lane + i * kWarpSize;
        next[r][i] = exists && vector < kVectors ? reinterpret_cast<const Vector16*>(g_row)[vector] : Vector16{};
      }
    }
  };
  load(0);
  float scale[F::kCodes ? kLaneVectors : 1][8] = {};  // of the channels, relative to the largest of all
  float top_scale = 0.0f;
  if constexpr (F::kCodes) {
    const float* g_scale = p.key_cache.scale;
    if (p.key_cache.scale_channel_stride == 0) {
      const float only = *g_scale;
      top_scale = fabsf(only);
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) scale[i][j] = only;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        if (lane + i * kWarpSize >= kVectors) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          scale[i][j] = g_scale[8 * (lane + i * kWarpSize) + j];
          top_scale = fmaxf(top_scale, fabsf(scale[i][j]));
        }
      }
      top_scale = group_max<kWarpSize>(top_scale);
    }
    if (top_scale == 0.0f) top_scale = 1.0f;
    const float inverse_scale = 1.0f / top_scale;
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) scale[i][j] *= inverse_scale;
    }
  }

#pragma unroll 1  // instructions that a CTA meets for the first time come slowly
  for (int first = 0; first < kWarpRows; first += kTogether) {
    Vector16 words[kTogether][kLaneVectors];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) words[r][i] = next[r][i];
    }
    load(first + kTogether);
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = warp + (first + r) * kWarps;
      if (F::kRows % kWarps != 0 && row >= F::kRows) break;
      unsigned char* s_row = shared.query + row * kQueryRowBytes;
      float factor = S.has_rules ? p.rules.scale : kLog2E * p.rules.scale;
      if constexpr (F::kCodes) {
        float x[kLaneVectors][8];
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const uint32_t word = words[r][i].word[j / 2];
            x[i][j] = scale[i][j] * (j % 2 == 0 ? low_of<Io>(word) : high_of<Io>(word));
            top = finite_top(top, x[i][j]);
          }
        }
        const int exponent = exponent_of_row(group_max<kWarpSize>(top));
        const float inverse = power_of_two(-exponent);
        factor *= top_scale * power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
          const int vector = lane + i * kWarpSize;
          if (vector >= kVectors) continue;
          // Channels 16 t + 4 s + 2 h, + 1 of a group are k = 8 h + 2 t, + 1 of step s: what lane t of K has there.
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            const int unit = 4 * (vector % 2) + pair;
            *reinterpret_cast<uint32_t*>(s_row + vector / 8 * F::kQueryGroupBytes + (unit ^ row % 8) * 16 + vector % 8 / 2 * 4) =
                ptx::pack_2<__half>(x[i][2 * pair] * inverse, x[i][2 * pair + 1] * inverse);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
          const int vector = lane + i * kWarpSize;
          if (vector >= kVectors) continue;
          *reinterpret_cast<Vector16*>(s_row + vector / 8 * F::kQueryGroupBytes + (vector % 8 ^ row % 8) * 16) = words[r][i];
        }
      }
      if (lane == 0) shared.rows->factor[row] = factor;
    }
  }
}

// Attends the rows again that were found spoilt, and writes what they should have been; all workers call it, when all have
// written their rows. Not inlined, because its registers would be missing in the main loop.
template <LatentRowsSm90Spec S>
__device__ __noinline__ void repair(const LatentRowsSm90Params& p, Work work, const uint32_t* s_spoilt) {
  if constexpr (S.ctas > 1) {  // what was written is merged
    work.keys = work.all.some;
    work.split_count = 1;
  }
  for (int row = static_cast<int>(threadIdx.x) / kWarpSize; row < work.tile.rows; row += Shape<S>::kWorkerThreads / kWarpSize) {
    if ((s_spoilt[row / 32] >> row % 32 & 1u) == 0) continue;
    attend_row_again<S.io, S.cache, kHeadSize, kValueSize>(p, work, row);
  }
}

// A warpgroup that computes: a worker that is a team of its own, with every second tile and all channels; or the scorer, which makes
// the weights of all tiles, or a worker of the one team, which has a part of the channels.
//
// With g = lane / 4, t = lane % 4: element 4 j + 2 half + c of an accumulator is row 8 j + 2 t + c of the tile's, and of M of this warp
// number g + 8 half.
template <LatentRowsSm90Spec S> struct Worker {
  using F = Shape<S>;
  using Io = typename F::Io;
  using Math = typename F::Math;
  using Scores = float[F::kScores];
  using Slot = Ring<S.slots>;

  const LatentRowsSm90Params& p;
  const Shared<S>& shared;
  const int index;  // of the worker; 0 for the scorer
  const int softmax = F::kHasScorer ? 0 : index;
  const int team = index / F::kTeam;
  const int rank = index % F::kTeam;  // in the team
  const int first_group = rank * F::kOwnGroups;
  const int first_key;  // of tile 0
  const KeyRange keys;
  const KeyRange whole;  // that every token admits, of those
  float acc[F::kOwnGroups][F::kScores];
  float sum[F::kLaneRows];  // of this lane's weights

  __device__ __forceinline__ Worker(const LatentRowsSm90Params& params, const Shared<S>& s, const Work& work, int worker)
      : p(params), shared(s), index(worker), first_key(work.first_tile * kTileKeys), keys(work.keys),
        whole{max_of(work.keys.begin, work.all.every.begin), min_of(work.keys.end, work.all.every.end)} {
#pragma unroll
    for (int m = 0; m < F::kOwnGroups; ++m) {
#pragma unroll
      for (int i = 0; i < F::kScores; ++i) acc[m][i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) sum[r] = 0.0f;
  }

  // Who weighs calls it first.
  __device__ __forceinline__ void start_softmax() const {
    for (int row = lane(); row < F::kRows; row += kWarpSize) {
      refer(row, negative_infinity());
      if (F::kHasScorer && warp() == 0) shared.rows->told[row] = negative_infinity();
    }
    __syncwarp();
  }

  __device__ __forceinline__ static int warp() { return threadIdx.x % kWarpgroup / kWarpSize; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }
  // The row tile's row, and the key in a tile, of an element.
  __device__ __forceinline__ static int row_of(int lane_row) { return lane_row / 2 * 8 + 2 * (threadIdx.x % 4) + lane_row % 2; }
  __device__ __forceinline__ static int key_of(int half) { return key_at(16 * warp() + lane() / 4 + 8 * half); }
  // The key of a tile that is number `position` in the products.
  __device__ __forceinline__ static int key_at(int position) {
    if constexpr (!F::kCodes) return position;
    return position % 8 / 2 * kPartKeys + position / 8 * 2 + position % 2;
  }
  // Slot number `number` of the tile whose first one is `tile`.
  __device__ __forceinline__ static Slot slot_of(Slot tile, int number) {
#pragma unroll
    for (int i = 0; i < number; ++i) tile.advance();
    return tile;
  }
  __device__ __forceinline__ unsigned char* bytes_of(const Slot& slot) const { return shared.ring + slot.stage * F::kSlotBytes; }
  // What was in the slot before may be another worker's, and not have come yet. Of that `full` must not tell, and parity has two values:
  // first it has to be given back.
  __device__ __forceinline__ void wait_full(const Slot& slot) const {
    ptx::mbarrier_wait(shared.empty + slot.stage, slot.parity ^ 1);
    ptx::mbarrier_wait(shared.full + slot.stage, slot.parity);
  }
  // Gives a slot back: of codes each lane what it has read, of 16 bits a warp what products have read.
  __device__ __forceinline__ void release(const Slot& slot) const {
    if (F::kCodes || lane() == 0) ptx::mbarrier_arrive(shared.empty + slot.stage);
  }

  // Clears keys that no token of the tile admits but that came with a block. Codes came without.
  __device__ __forceinline__ void clear_outside(const Slot& tile, int tile_key) const {
    const int begin = keys.begin - tile_key;
    const int end = keys.end - tile_key;
    if (F::kCodes || (begin <= 0 && end >= kTileKeys)) return;
#pragma unroll
    for (int third = 0; third < F::kSlotsOfTile; ++third) {
      const Slot slot = slot_of(tile, third);
      wait_full(slot);
      for (int byte = 16 * (threadIdx.x % kWarpgroup); byte < F::kSlotBytes; byte += 16 * kWarpgroup) {
        const int key = byte / F::kEightKeysBytes * 8 + byte / F::kGroupBytes % 8;
        if (key < begin || key >= end) *reinterpret_cast<Vector16*>(bytes_of(slot) + byte) = Vector16{};
      }
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kOwn + softmax, kWarpgroup);  // the zeros are there for the whole warpgroup
  }

  // The row of key number i of an octet of codes.
  __device__ __forceinline__ const unsigned char* row_at(const Slot& tile, int octet, int i) const {
    return bytes_of(tile) + i / 2 * F::kPartBytes + (2 * octet + i % 2) * F::kRowBytes;
  }
  // Codes of a channel group as a lane reads them.
  struct Codes { Vector16 half[2]; };
  // K as A operands: a lane has 16 channels of the keys g and g + 8 of its warp's sixteen.
  __device__ __forceinline__ Codes load_keys(const Slot& tile, int group) const {
    Codes codes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* s_row = row_at(tile, 2 * warp() + half, lane() / 4);
      codes.half[half] = *reinterpret_cast<const Vector16*>(s_row + group * kGroupChannels + lane() % 4 * 16);
    }
    return codes;
  }
  __device__ __forceinline__ static void widen_keys(uint32_t (&a)[4], const Codes& codes, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[2];
      widen<S.cache, false>(codes.half[half].word[step], pairs);
      a[half] = pairs[0];
      a[half + 2] = pairs[1];
    }
  }
  // V^T of own channel group `m` likewise: a lane has channels 2 g and 2 g + 1 of its warp's sixteen, two keys of each octet.
  __device__ __forceinline__ Codes load_values(const Slot& tile, int m) const {
    Codes codes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* s_row = row_at(tile, 4 * half + lane() / 8, lane() % 8);
      ptx::ldmatrix_x4_transposed(codes.half[half].word, s_row + (first_group + m) * kGroupChannels + warp() * 16);
    }
    return codes;
  }
  __device__ __forceinline__ static void widen_values(uint32_t (&a)[4], const Codes& codes, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t channels[2];
      widen<S.cache, true>(codes.half[step / 2].word[2 * (step % 2) + half], channels);
      a[2 * half] = channels[0];
      a[2 * half + 1] = channels[1];
    }
  }

  // Products with the codes of kGroups channel groups as A. A warp that issues a product with A in registers waits until that has
  // begun, so a few steps are widened at a time, while the products of the ones before run.
  //   `load(group)`                Codes of a group
  //   `widen_step(a, codes, step)` the A operand of one step of them
  //   `multiply(group, step, a)`   issues the product
  template <int kGroups, int kBatch, class Load, class Widen, class Multiply>
  __device__ __forceinline__ static void multiply_widened(const Load& load, const Widen& widen_step, const Multiply& multiply) {
    uint32_t a[2][kBatch][4];
    Codes codes[2] = {load(0)};
#pragma unroll
    for (int first = 0; first < kGroups * kSteps; first += kBatch) {
      const int group = first / kSteps;
      if (first % kSteps == 0 && group + 1 < kGroups) codes[(group + 1) % 2] = load(group + 1);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) widen_step(a[first / kBatch % 2][i], codes[group % 2], first % kSteps + i);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) multiply(group, first % kSteps + i, a[first / kBatch % 2][i]);
      ptx::wgmma_commit();
      if (first + kBatch < kGroups * kSteps) ptx::wgmma_wait<1>();  // the registers of the products before these may be written again
    }
  }

  // scores = K q^T of a tile, each slot as it comes.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Slot& tile) const {
    const uint64_t query = ptx::matrix_descriptor<kQueryRowBytes>(ptx::shared_address(shared.query), 16, 8 * kQueryRowBytes);
    const auto query_of = [&](int group, int step) { return ptx::descriptor_at(query, group * F::kQueryGroupBytes + 32 * step); };
    if constexpr (F::kCodes) {
      wait_full(tile);
      const auto load = [&](int group) { return load_keys(tile, group); };
      const auto multiply = [&](int group, int step, const uint32_t (&a)[4]) {
        ptx::wgmma<Math, false>(scores, a, query_of(group, step), group + step != 0);
      };
      multiply_widened<kHeadSize / kGroupChannels, F::kKeyBatch>(load, widen_keys, multiply);
    } else {
#pragma unroll
      for (int third = 0; third < F::kSlotsOfTile; ++third) {
        const Slot slot = slot_of(tile, third);
        wait_full(slot);
        const uint64_t keys = ptx::matrix_descriptor<F::kGroupBytes>(ptx::shared_address(bytes_of(slot)), 16, F::kEightKeysBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSlotGroups; ++i) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            ptx::wgmma<Math, false>(scores, ptx::descriptor_at(keys, i * F::kAtomBytes + 32 * step),
                                    query_of(kSlotGroups * third + i, step), third + i + step != 0);
          }
        }
        ptx::wgmma_commit();
      }
    }
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
  }

  // acc += V^T p^T of a tile, and gives it back.
  __device__ __forceinline__ void multiply_values(const Slot& tile, const unsigned char* s_weights) {
    const uint64_t weights = ptx::matrix_descriptor<kWeightRowBytes>(ptx::shared_address(s_weights), 16, 8 * kWeightRowBytes);
#pragma unroll
    for (int m = 0; m < F::kOwnGroups; ++m) ptx::hold(acc[m]);
    if constexpr (F::kCodes) {
      const auto load = [&](int m) { return load_values(tile, m); };
      const auto multiply = [&](int m, int step, const uint32_t (&a)[4]) {
        ptx::wgmma<Math, false>(acc[m], a, ptx::descriptor_at(weights, 32 * step), 1);
      };
      multiply_widened<F::kOwnGroups, F::kValueBatch>(load, widen_values, multiply);
      release(tile);  // it is read, as all products are issued
      ptx::wgmma_wait<0>();
    } else {
      ptx::wgmma_fence();
#pragma unroll
      for (int third = 0; third < F::kSlotsOfTile; ++third) {
        const uint64_t values =
            ptx::matrix_descriptor<F::kGroupBytes>(ptx::shared_address(bytes_of(slot_of(tile, third))), 16, F::kEightKeysBytes);
#pragma unroll
        for (int m = kSlotGroups * third; m < min_of(kValueGroups, kSlotGroups * (third + 1)); ++m) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const int offset = m % kSlotGroups * F::kAtomBytes + step * 2 * F::kEightKeysBytes;
            ptx::wgmma<Math, false, true>(acc[m], ptx::descriptor_at(values, offset), ptx::descriptor_at(weights, 32 * step), 1);
          }
        }
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<2>();
      release(tile);
      ptx::wgmma_wait<1>();
      release(slot_of(tile, 1));
      ptx::wgmma_wait<0>();
      release(slot_of(tile, 2));
    }
#pragma unroll
    for (int m = 0; m < F::kOwnGroups; ++m) ptx::hold(acc[m]);
  }

  // Scores in base 2 where a rule comes between the product and softmax.
  __device__ __forceinline__ void apply_rules(Scores& scores, int tile_key) const {
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      const int row = row_of(r);
      const KeyRange admitted = shared.rows->admitted[row];
      const float factor = shared.rows->factor[row];
      const RowTile& tile = shared.work->tile;
      const Io* g_bias = row < tile.rows ? bias_row_of_tile<Io>(tile, row, p.rules, 0) : nullptr;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[r / 2 * 4 + 2 * half + r % 2];
        const int key = tile_key + key_of(half);
        if (!admitted.contains(key)) continue;  // its bias may not exist
        score = kLog2E * capped_and_biased(p.rules, score * factor, g_bias, key);
      }
    }
  }

  // `s_unmapped` is only read by the lane that gives the tile back, which is what the loading warp waits for.
  __device__ __forceinline__ void mask(Scores& scores, int tile_key, const uint32_t* s_unmapped) const {
    const uint32_t unmapped = __shfl_sync(kFullWarp, lane() == 0 ? *s_unmapped : 0, 0);
    if (unmapped == 0 && whole.begin <= tile_key && tile_key + kTileKeys <= whole.end) return;
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      const KeyRange admitted = shared.rows->admitted[row_of(r)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_of(half);
        float& score = scores[r / 2 * 4 + 2 * half + r % 2];
        if (!admitted.contains(tile_key + key) || (unmapped >> key / kPartKeys & 1u) != 0) score = negative_infinity();
      }
    }
  }

  __device__ __forceinline__ float reference_of(int lane_row) const { return shared.rows->reference[softmax][warp()][row_of(lane_row)]; }
  __device__ __forceinline__ float factor_of(int lane_row) const { return S.has_rules ? 1.0f : shared.rows->factor[row_of(lane_row)]; }
  // Sets a row's reference, for this warp.
  __device__ __forceinline__ void refer(int row, float reference) const {
    const float factor = S.has_rules ? 1.0f : shared.rows->factor[row];
    shared.rows->reference[softmax][warp()][row] = reference;
    shared.rows->scale[softmax][warp()][row] = {factor, reference == negative_infinity() ? kNoShift : -reference * factor};
  }

  // Scores to weights, as B operands of p . v. They are made with the references that there are, and again where some row of some warp
  // has gone too far beyond its own: a worker has one barrier a tile. Returns whether references have moved. When the
  // barrier is passed, all warps have finished the products with the weights before these, so the next ones may take their place.
  __device__ __forceinline__ bool weigh(const Scores& scores, unsigned char* s_weights) {
    bool moved = false;
    float own_sum[F::kLaneRows];
    for (;;) {
      float top = negative_infinity();  // of exponents
      uint32_t words[F::kRowTiles][2];
#pragma unroll
      for (int j = 0; j < F::kRowTiles; ++j) {
        const float4 scale = reinterpret_cast<const float4*>(shared.rows->scale[softmax][warp()])[4 * j + lane() % 4];  // of rows 2 t, + 1
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float exponent = i % 2 == 0 ? fmaf(scores[4 * j + i], scale.x, scale.y) : fmaf(scores[4 * j + i], scale.z, scale.w);
          top = fmaxf(top, exponent);
          weights[i] = ptx::exp2_approximate(exponent);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          own_sum[2 * j + c] = weights[c] + weights[2 + c];
          words[j][c] = ptx::pack_2<Math>(weights[2 * c], weights[2 * c + 1]);
        }
      }
      const int row = lane() % 8;
#pragma unroll
      for (int j = 0; j < F::kRowTiles; j += 2) {  // matrix i: keys 8 (i % 2) of this warp's, row tile j + i / 2
        unsigned char* s_row = s_weights + (8 * (j + lane() / 16) + row) * kWeightRowBytes + ((2 * warp() + lane() / 8 % 2) ^ row) * 16;
        ptx::stmatrix_x4_transposed(s_row, words[j][0], words[j][1], words[j + 1][0], words[j + 1][1]);
      }
      ptx::fence_async_proxy();
      if (!ptx::named_barrier_any(kOwn + softmax, kWarpgroup, top > kSlack)) break;  // else the weights are visible to the tensor cores
      move_references(scores);
      moved = true;
    }
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) sum[r] += own_sum[r];
    return moved;
  }

  // Takes the references of all rows to the maximum of these scores, in all warps of the worker alike, and what was summed up along.
  __device__ __forceinline__ void move_references(const Scores& scores) {
    auto& s_top = shared.rows->of_warp;
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      float top = fmaxf(scores[r / 2 * 4 + r % 2], scores[r / 2 * 4 + 2 + r % 2]);
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, distance));
      if (lane() < 4) s_top[softmax][warp()][row_of(r)] = top;
    }
    ptx::named_barrier_sync(kOwn + softmax, kWarpgroup);  // the maxima of all warps are there
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      float top = reference_of(r);
#pragma unroll
      for (int w = 0; w < kWorkerWarps; ++w) top = fmaxf(top, s_top[softmax][w][row_of(r)]);
      move_reference(r, top);
    }
    __syncwarp();  // the new ones are there
  }

  // All lanes of a warp call it together.
  __device__ __forceinline__ void move_reference(int lane_row, float to) {
    scale_row(lane_row, factor_of_move(reference_of(lane_row), to, factor_of(lane_row)));
    __syncwarp();  // all lanes have read the one before
    if (lane() < 4) refer(row_of(lane_row), to);
  }

  // Scales what was summed up of a row.
  __device__ __forceinline__ void scale_row(int lane_row, float factor) {
    sum[lane_row] *= factor;
#pragma unroll
    for (int m = 0; m < F::kOwnGroups; ++m) {
      acc[m][lane_row / 2 * 4 + lane_row % 2] *= factor;
      acc[m][lane_row / 2 * 4 + 2 + lane_row % 2] *= factor;
    }
  }

  // Masked scores of tile number `i`.
  __device__ __forceinline__ void score(Scores& scores, const Slot& tile, int i) const {
    const int tile_key = first_key + i * kTileKeys;
    clear_outside(tile, tile_key);
    multiply_keys(scores, tile);
    if constexpr (S.has_rules) apply_rules(scores, tile_key);
    mask(scores, tile_key, shared.unmapped + i % kUnmappedTiles);
  }

  // Every second tile.
  __device__ __forceinline__ void attend_alone(int tile_count) {
    Slot tile;
    if (index > 0) tile = slot_of(tile, F::kSlotsOfTile);
    int buffer = 2 * index;
    start_softmax();
    for (int i = index; i < tile_count; i += kWorkers) {
      unsigned char* s_weights = shared.weights + buffer * F::kWeightBytes;
      float scores[F::kScores];
      score(scores, tile, i);
      weigh(scores, s_weights);
      multiply_values(tile, s_weights);
      tile = slot_of(tile, kWorkers * F::kSlotsOfTile);
      buffer ^= 1;
    }
  }

  // The scorer: weights of every tile, for the workers. It hands them over when it has multiplied with the next tile's keys, so that the
  // workers multiply while it makes weights, and not in its way.
  __device__ __forceinline__ void weigh_tiles(int tile_count) {
    Slot tile;
    Ring<kTeamBuffers> buffer, before;
    start_softmax();
    for (int i = 0; i < tile_count; ++i) {
      float scores[F::kScores];
      score(scores, tile, i);
      if (i > 0) ptx::mbarrier_arrive(shared.ready + before.stage);
      ptx::mbarrier_wait(shared.used + buffer.stage, buffer.parity ^ 1);
      const bool moved = weigh(scores, shared.weights + buffer.stage * F::kWeightBytes);
      if (moved && warp() == 0) tell(shared.rows->rescale[buffer.stage]);
      if (threadIdx.x % kWarpgroup == 0) shared.rows->has_moved[buffer.stage] = moved;
      tile = slot_of(tile, F::kSlotsOfTile);
      before = buffer;
      buffer.advance();
    }
    if (tile_count > 0) ptx::mbarrier_arrive(shared.ready + before.stage);
  }
  // What sums are multiplied by where the references are from now on.
  __device__ __forceinline__ void tell(float* s_rescale) const {
    for (int row = lane(); row < F::kRows; row += kWarpSize) {
      const float reference = shared.rows->reference[softmax][0][row];
      s_rescale[row] = factor_of_move(shared.rows->told[row], reference, S.has_rules ? 1.0f : shared.rows->factor[row]);
      shared.rows->told[row] = reference;
    }
  }

  // A worker of the team: its channels of every tile.
  __device__ __forceinline__ void attend_in_team(int tile_count) {
    Slot tile;
    Ring<kTeamBuffers> buffer;
    for (int i = 0; i < tile_count; ++i) {
      ptx::mbarrier_wait(shared.ready + buffer.stage, buffer.parity);
      if (shared.rows->has_moved[buffer.stage]) {
#pragma unroll
        for (int r = 0; r < F::kLaneRows; ++r) scale_row(r, shared.rows->rescale[buffer.stage][row_of(r)]);
      }
      wait_full(tile);  // so that its bytes are visible here, too
      multiply_values(tile, shared.weights + buffer.stage * F::kWeightBytes);
      if (lane() == 0) ptx::mbarrier_arrive(shared.used + buffer.stage);
      tile = slot_of(tile, F::kSlotsOfTile);
      buffer.advance();
    }
  }

  __device__ __forceinline__ void attend(int tile_count) {
    if constexpr (F::kHasScorer) {
      attend_in_team(tile_count);
    } else {
      attend_alone(tile_count);
    }
  }

  // Puts the sums of weights in of_warp.
  __device__ __forceinline__ void put_sums() const {
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      float own = sum[r];
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) own += __shfl_xor_sync(kFullWarp, own, distance);
      if (lane() < 4) shared.rows->of_warp[softmax][warp()][row_of(r)] = own;
    }
  }

  // Puts what each team has where ring and queries were, [team][row][channel], and what is to be known of rows.
  __device__ __forceinline__ void finish() const {
    if constexpr (!F::kHasScorer) put_sums();
    // Not named barriers: compute-sanitizer takes what is done behind those for races.
    ptx::mbarrier_arrive(shared.attended);
    ptx::mbarrier_wait(shared.attended, 0);  // the sums of weights are there as well
    put();
    if (threadIdx.x < F::kRows) finish_row(threadIdx.x);
    if constexpr (S.ctas > 1) {
      ptx::cluster_arrive();  // for those that have keys: other CTAs, and the threads that load, have ended or will
      ptx::cluster_wait();
    } else {
      ptx::mbarrier_arrive(shared.put);
      ptx::mbarrier_wait(shared.put, 0);
    }
    __syncwarp();  // named barriers, which are for whole warps, may follow
  }

  __device__ __forceinline__ void finish_row(int row) const {
    SoftmaxState state;
    const float reference = shared.reference_of(row);
    const float factor = S.has_rules ? 1.0f : shared.rows->factor[row];
    if (reference != negative_infinity()) state.row_max = reference * factor;
#pragma unroll
    for (int i = 0; i < F::kSoftmaxes; ++i) {
      const float own_factor = factor_of_move(shared.rows->reference[i][0][row], reference, factor);
#pragma unroll
      for (int w = 0; w < kWorkerWarps; ++w) state.row_sum += own_factor * shared.rows->of_warp[i][w][row];
    }
    shared.rows->result[row] = {finalize(state, negative_infinity()).factor, lse_of(state)};
  }

  // Puts the sums in their place, relative to the reference of all teams.
  __device__ __forceinline__ void put() const {
    const int g = lane() / 4;
#pragma unroll
    for (int r = 0; r < F::kLaneRows; ++r) {
      const float factor = factor_of_move(reference_of(r), shared.reference_of(row_of(r)), factor_of(r));
      float* s_row = shared.output_row(team, row_of(r)) + place_of(first_group * kGroupChannels + 16 * warp());
#pragma unroll
      for (int m = 0; m < F::kOwnGroups; ++m) {
        const float first = acc[m][r / 2 * 4 + r % 2] * factor;
        const float second = acc[m][r / 2 * 4 + 2 + r % 2] * factor;
        if constexpr (F::kCodes) {
          *reinterpret_cast<float2*>(s_row + place_of(m * kGroupChannels + 2 * g)) = {first, second};
        } else {
          s_row[place_of(m * kGroupChannels + g)] = first;
          s_row[place_of(m * kGroupChannels + g + 8)] = second;
        }
      }
    }
  }
};

// Writes what `Worker::finish` has put in place; all workers call it. The CTAs of a cluster have a part of the rows each, and merge what
// all of them have with the bits of combine_splits: maximum, weights and sums in the order of the splits.
//   `scale` of this thread's channels
template <LatentRowsSm90Spec S>
__device__ __forceinline__ void write_rows(const LatentRowsSm90Params& p, const Shared<S>& shared, const float (&scale)[8]) {
  using F = Shape<S>;
  using Io = typename F::Io;
  constexpr int kStep = F::kWorkerThreads / kOutputVectors;
  constexpr int kTogether = max_of(1, min_of(2, F::kRows / S.ctas / kStep));  // rows that a thread reads before it writes them
  const Work& work = *shared.work;
  const RowTile& tile = work.tile;
  const int vector = threadIdx.x % kOutputVectors;
  const int ctas = S.ctas > 1 ? max_of(1, work.split_count) : 1;  // of the cluster, that have keys
  const int rank = S.ctas > 1 ? work.split : 0;
  const int64_t first_row = static_cast<int64_t>(tile.sequence.begin + tile.first_token) * p.out.num_heads + tile.first_head;

  // What there is of a row in this thread's channels.
  struct Parts {
    RowResult result[S.ctas];
    float4 sums[S.ctas][F::kTeams][2];
  };
  const auto read = [&](int row) {
    Parts parts;
#pragma unroll
    for (int i = 0; i < S.ctas; ++i) {
      const int cta = min_of(i, ctas - 1);
      parts.result[i] = *shared.of_cta(shared.rows->result + row, cta);
#pragma unroll
      for (int team = 0; team < F::kTeams; ++team) {
        const float* s_row = shared.of_cta(shared.output_row(team, row), cta);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          parts.sums[i][team][half] = *reinterpret_cast<const float4*>(s_row + place_of(8 * vector + 4 * half));
        }
      }
    }
    return parts;
  };
  struct Row {
    float x[8] = {};
    float lse;  // base 2
    bool strange = false;
  };
  const auto merge = [&](const Parts& parts) {
    Row row;
    SoftmaxState merged;
#pragma unroll
    for (int i = 0; i < S.ctas; ++i) merged.row_max = fmaxf(merged.row_max, parts.result[i].lse);
#pragma unroll
    for (int i = 0; i < S.ctas; ++i) {
      const auto [factor, lse] = parts.result[i];
      float x[8] = {};
#pragma unroll
      for (int team = 0; team < F::kTeams; ++team) {  // in an order that does not change
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4& sums = parts.sums[i][team][half];
          x[4 * half] += sums.x;
          x[4 * half + 1] += sums.y;
          x[4 * half + 2] += sums.z;
          x[4 * half + 3] += sums.w;
        }
      }
      const float weight = merged.weight(lse);
      if (i < ctas) merged.row_sum += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        row.strange |= is_nan(x[j]) && !is_nan(factor);
        x[j] *= factor * scale[j];
        if (i < ctas) row.x[j] = S.ctas > 1 ? row.x[j] + weight * x[j] : x[j];
      }
    }
    row.lse = parts.result[0].lse;
    if constexpr (S.ctas > 1) {
      row.lse = lse_of(merged);
      const float factor = finalize(merged, negative_infinity()).factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) row.x[j] *= factor;
    }
    return row;
  };
  const auto write = [&](const Row& merged, int row) {
    if (F::kSpoils && merged.strange) atomicOr(shared.rows->spoilt + row / 32, 1u << row % 32);
    if (S.ctas > 1 || work.split_count <= 1) {
      if (vector == 0 && p.out.lse != nullptr) p.out.lse[first_row + row] = kLn2 * merged.lse;
      store_8(static_cast<Io*>(p.out.output) + (first_row + row) * kValueSize + 8 * vector, merged.x);
    } else {
      const int64_t at = partial_row(p.partials, tile.token(row), work.split, p.out.num_heads, tile.head_in_group(row));
      if (vector == 0) p.partials.lse[at] = merged.lse;
      float4* g_row = reinterpret_cast<float4*>(p.partials.acc + at * partial_width(kValueSize) + 8 * vector);
      g_row[0] = {merged.x[0], merged.x[1], merged.x[2], merged.x[3]};
      g_row[1] = {merged.x[4], merged.x[5], merged.x[6], merged.x[7]};
    }
  };

#pragma unroll 1
  for (int first = rank + threadIdx.x / kOutputVectors * ctas; first < tile.rows; first += kTogether * kStep * ctas) {
    Parts parts[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {  // not what nobody uses: it might still be read when the other CTA has ended
      const int row = first + i * kStep * ctas;
      if (row < tile.rows) parts[i] = read(row);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = first + i * kStep * ctas;
      if (row < tile.rows) write(merge(parts[i]), row);
    }
  }
  if constexpr (S.ctas > 1) {  // nobody ends while others read
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  if constexpr (F::kSpoils) {
    if (!work.all.differ()) return;
    ptx::named_barrier_sync(kAllWorkers, F::kWorkerThreads);  // all have written their rows, and who is spoilt
    repair<S>(p, work, shared.rows->spoilt);
  }
}

template <LatentRowsSm90Spec S>
__global__ void __launch_bounds__(Shape<S>::kThreads, 1) __cluster_dims__(S.ctas) latent_rows_sm90(const __grid_constant__ LatentRowsSm90Params p) {
  using F = Shape<S>;
  static_assert(S.io == DType::f16 || S.io == DType::bf16, "wgmma with 16-bit operands");
  static_assert(S.cache == S.io || S.cache == DType::i8 || S.cache == DType::f8e4m3, "what the cache holds is read as it is, or widened");
  static_assert(S.rows == 16 || S.rows == 32 || (S.rows == 64 && F::kCodes), "sums that fit the registers");
  const Shared<S> shared;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.cache_map);
    for (int i = 0; i < S.slots; ++i) {
      ptx::mbarrier_init(shared.full + i, F::kCodes ? kWarpSize : 1);
      ptx::mbarrier_init(shared.empty + i, F::kTeam * (F::kCodes ? kWarpgroup : kWorkerWarps));
    }
    for (int i = 0; i < kTeamBuffers; ++i) {
      ptx::mbarrier_init(shared.ready + i, kWarpgroup);
      ptx::mbarrier_init(shared.used + i, F::kWorkerThreads / kWarpSize);
    }
    ptx::mbarrier_init(shared.attended, F::kWorkerThreads + F::kScorerThreads);
    ptx::mbarrier_init(shared.put, F::kWorkerThreads);
    ptx::mbarrier_init(shared.loaded, F::kWorkerThreads);
    ptx::mbarrier_init_fence();
    for (uint32_t& rows : shared.rows->spoilt) rows = 0;
  }
  __syncthreads();  // the barriers are initialized for all threads
  const Work work = find_work<S>(p);
  ptx::let_next_kernel_start();
  if (!work.exists()) {
    ptx::wait_for_previous_kernel();  // the end of this kernel stands for the end of the one ahead
    return;
  }
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);  // the same in all lanes, visibly
  constexpr int kWorkersEnd = F::kWorkerThreads / kWarpSize;
  constexpr int kScorerEnd = kWorkersEnd + F::kScorerThreads / kWarpSize;
  if (warp >= kScorerEnd) {
    ptx::decrease_registers<F::kLoadRegisters>();
    if (warp == kScorerEnd) load_tiles<S>(p, shared, work);
  } else if (warp >= kWorkersEnd) {
    if constexpr (F::kHasScorer) {
      ptx::decrease_registers<kScorerRegisters>();
      ptx::wait_for_previous_kernel();  // which may write a bias
      ptx::mbarrier_wait(shared.loaded, 0);  // not a named barrier, which has to be at one place of the code for all
      __syncwarp();  // named barriers, which are for whole warps, may follow
      Worker<S> scorer(p, shared, work, 0);
      scorer.weigh_tiles(work.tile_count);
      scorer.put_sums();
      ptx::mbarrier_arrive(shared.attended);
    }
  } else {
    ptx::increase_registers<F::kWorkerRegisters>();
    if (warp == 0) {
      const int lane = threadIdx.x;
      if (lane == 0) *shared.work = work;
      for (int row = lane; row < F::kRows; row += kWarpSize) {
        shared.rows->admitted[row] = keys_of_row(work.tile, row, p.sequences, p.rules, work.keys);
      }
    }
    ptx::wait_for_previous_kernel();  // which may write the query
    load_queries<S>(p, shared, work.tile);
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(shared.loaded);
    ptx::mbarrier_wait(shared.loaded, 0);
    __syncwarp();  // named barriers, which are for whole warps, may follow
    Worker<S> worker(p, shared, work, warp / kWorkerWarps);
    worker.attend(work.tile_count);
    float scale[8];  // of the channels that this thread writes, on its way while sums are put together
#pragma unroll
    for (int j = 0; j < 8; ++j) scale[j] = scale_of<S.cache>(p.key_cache, 0, threadIdx.x % kOutputVectors * 8 + j);
    worker.finish();
    write_rows<S>(p, shared, scale);
  }
}

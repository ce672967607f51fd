// latent_decode_sm90.cu: attention over a LATENT cache on Hopper's tensor cores. One row of 576 channels is the key of every
// head, and its first 512 channels are the value; a tile of 64 of them is brought once and serves both products.
//
//   grid    x: CTAs, or clusters of two, that stay, and take a piece of work whenever they have finished one
//   work    (row tile, split of its keys): whole splits first, then the last splits of sequences, the longer ones before the others
//   CTA     warp 0 finds work, warps 1 and 2 load tiles, warp 3 queries; two warpgroups compute, each for half of the channels
//   reads   query once a split; each latent row that some token of the tile admits once a row tile
//   writes  output and lse where the tile has one split or none; else acc and lse of this split (combine_splits.cu)
//   smem    | queries: 64 rows | tile of warpgroup 0 | tile of warpgroup 1 | barriers, Work | sequences |
//
// Warpgroup w computes the weights of every second tile, those that lie in its buffer, and the output channels of half w from all
// tiles, so each tile's weights go from one warpgroup to the other, thread to thread, through the rope channels of the tile,
// which nobody reads any more. One warpgroup leads by the time of its softmax, so that the tensor cores are never without work:
//
//   warpgroup 0   q.K0 | softmax0 |      | p0.V0 | p1.V1 | q.K2 ...           half 0 of V
//   warpgroup 1        | q.K1            | p0.V0 | softmax1 | p1.V1 | q.K3    half 1 of V
//
// The reference of a row's softmax travels with the weights. Who receives weights takes over their reference, which is never below
// its own, because the sender had taken over the receiver's before.
//
// A tile comes in three pieces, each with barriers of its own, so that a piece is loaded again as soon as it is used up: the rope
// channels, and the halves of V. A piece is [64 / 8][channel groups] atoms of 8 rows of 64 channels, which wgmma's swizzle permutes.
//
// Where a token's heads are pairs of row tiles, a cluster of two CTAs takes a pair: the same keys, so each tile is read once and
// comes to both. CTA 0 finds work for both, so they never disagree on it. CTA w of the cluster loads the tiles of warpgroup w into the
// same buffer of both CTAs, and a piece is given back to it from both; nothing else goes from one to the other.
// Invariants
//   Splits are planned for a row tile, from the keys that any of its tokens admits; combine_splits plans the same way.
//   What no token of the work admits is not read where it fills blocks, and is zeros in the tile where it does not: it cannot
//   reach the sums as 0 x NaN. What only some tokens admit can, and then shows in the end (spoilt_rows.cuh). Blocks that are not
//   mapped arrive as zeros and are masked.
//   Lengths that enter the mask are read here; host bounds only size the grid and the splits.
#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/ptx/cluster.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/ptx/setmaxnreg.cuh>
#include <pagedattn/ptx/tma.cuh>
#include <pagedattn/ptx/wgmma.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>
#include <pagedattn/spoilt_rows.cuh>
#include <pagedattn/warpgroup_rows.cuh>

struct LatentDecodeSm90Spec {
  DType io;         // of query, output and cache
  bool has_rules;   // softcap, attention_bias or a scale that is not positive
  int ctas;         // of a cluster, 1 or 2; two have a row tile each of the same token, so 128 divides num_heads
};

struct LatentDecodeSm90Params {
  TensorMap half_map;   // [num_blocks, block_size / 8, channel groups, 8, kGroupChannels]; box [1, all or a tile's, kHalfGroups, all, all]
  TensorMap rope_map;   // the same array; box [1, all or a tile's, 1, all, all]
  TensorMap query_map;  // [token_count, channel groups, num_heads, kGroupChannels]; box [1, query_groups, query_box, all]
  KvCache key_cache;    // the cache, for rows that are attended again
  const void* query;    // [token_count, num_heads, kHeadSize], rows query_stride apart, on multiples of 16 bytes
  int64_t query_stride; // elements
  int query_box;        // heads; divides num_heads and kWarpgroupRows
  int query_groups;     // all where query_box is kWarpgroupRows, else 1
  int query_is_new;     // the kernel ahead writes the query
  int reads_once;       // a tile is wanted by CTAs that run side by side, and then no more
  int* next_work;       // [1], 0 before the launch
  SequenceTable sequences;
  BlockTable blocks;
  ScoreRules rules;
  Output out;           // rows on multiples of 16 bytes
  Partials partials;    // of row tiles of kWarpgroupRows rows
};

constexpr int kHeadSize = 576;
constexpr int kValueSize = 512;
constexpr int kTileKeys = 64;
constexpr int kGroupChannels = 64;
constexpr int kRowBytes = 2 * kGroupChannels;
constexpr int kAtomBytes = 8 * kRowBytes;
constexpr int kGroups = kHeadSize / kGroupChannels;
constexpr int kHalfGroups = kValueSize / 2 / kGroupChannels;
constexpr int kRopeGroup = 2 * kHalfGroups;  // the group of the channels that are no value
constexpr int kQueryGroupBytes = kWarpgroupRows * kRowBytes;
constexpr int kQueryBytes = kGroups * kQueryGroupBytes;
constexpr int kRopeBytes = kTileKeys * kRowBytes;
constexpr int kHalfBytes = kHalfGroups * kRopeBytes;
constexpr int kTileBytes = kRopeBytes + 2 * kHalfBytes;
constexpr int kScores = kTileKeys / 2;       // of a thread
constexpr int kOutputs = kValueSize / 2 / 2;
constexpr int kConsumerThreads = 2 * kWarpgroup;
constexpr int kConsumerWarps = kWarpgroup / kWarpSize;  // of a warpgroup
constexpr int kThreads = kWarpgroup + kConsumerThreads;
constexpr int kListedSequences = kThreads;  // of which what the list of work needs is kept in shared memory
constexpr int kLastRanks = 31;              // classes of last splits by their length
constexpr int kRanks = 1 + kLastRanks;
constexpr int kRankBits = 5;
static_assert(kRanks <= 1 << kRankBits && kRanks <= kWarpSize, "a lane has a rank");
constexpr uint16_t kBothCtas = 3;           // of a cluster, by the bits of their ranks
constexpr int kLoadRegisters = 56;
constexpr int kComputeRegisters = 224;
static_assert(kLoadRegisters + 2 * kComputeRegisters <= 3 * (65536 / kThreads / 8 * 8), "more would wait forever");
static_assert(kScores / 2 * 4 * kWarpgroup == kRopeBytes, "the weights of a tile take the place of its rope channels");

// Pieces of a tile in the order in which they are loaded: the half that the tile's own warpgroup needs is the first to be free.
enum Piece { kRope, kOwnHalf, kOtherHalf, kPieces };
__device__ __forceinline__ constexpr int bytes_of(int piece) { return piece == kRope ? kRopeBytes : kHalfBytes; }

// Named barriers.
enum Barrier { kNone, kTile, kConsumers = kTile + 2 };  // kTile: one for each warpgroup

// One piece of work. One thread writes it, every thread of the others reads it.
struct Work {
  RowTile tile;    // rows = 0: there is no more work
  KeyRange keys;   // of the split, that some token admits
  int first_tile;  // in units of kTileKeys
  int tile_count;
  int split;
  int split_count;  // of the row tile; 0: its tokens attend nothing
  bool differs;     // some token hides a key that another one admits
};

// What the list of work has to know of a sequence.
struct SequenceWork {
  int begin;   // its first token
  int tokens;  // whose rows are to be written
  int past;
  int kv_len;  // 0: they attend nothing
  int ranked;  // splits of a row tile, at most so many, and in the last bits the rank of the last ones

  __device__ __forceinline__ int splits() const { return ranked >> kRankBits; }
  __device__ __forceinline__ int rank() const { return ranked & ((1 << kRankBits) - 1); }
  // Row tiles, or pairs of them.
  template <int kCtas> __device__ __forceinline__ int tiles(int num_heads) const {
    return ceil_div(tokens * num_heads, kCtas * kWarpgroupRows);
  }
};

struct Shared {
  unsigned char* query;
  unsigned char* tiles;   // [2]
  Work* work;             // [2] of this round and of the next
  uint64_t* full;         // [2][kPieces]
  uint64_t* empty;        // [2][kPieces]
  uint64_t* rope_ready;   // of a cluster, in the CTA that loads a buffer: the other CTA's rope channels are free
  uint64_t* work_full;    // [2]
  uint64_t* work_empty;   // [2]
  uint64_t* loads_issued; // of a work
  uint64_t* query_full;
  uint64_t* query_empty;
  uint64_t* weights;      // [2] of the tile of a warpgroup
  uint64_t* turn;         // of warpgroup 1 to multiply with keys
  uint64_t* sums;         // of a work, of both warpgroups
  uint32_t* unmapped;     // [2] bit i: block i of the tile has nothing to see
  uint32_t* moved;        // [2] whether some reference of a tile is a new one
  float* reference;       // [2][64] that the weights in a tile are relative to
  float* sum;             // [2 works][2][64] of each warpgroup's weights
  uint32_t* spoilt;       // [2 works][2][kConsumerWarps] bit i: row i of the warp's sixteen
  int* ranks;             // [kRanks] works of each
  SequenceWork* listed;   // [kListedSequences]

  __device__ __forceinline__ Shared() {
    unsigned char* s_base = shared_memory<unsigned char>();
    s_base += -ptx::shared_address(s_base) & 1023u;
    query = s_base;
    tiles = query + kQueryBytes;
    work = reinterpret_cast<Work*>(tiles + 2 * kTileBytes);
    full = reinterpret_cast<uint64_t*>(work + 2);
    empty = full + 2 * kPieces;
    rope_ready = empty + 2 * kPieces;
    work_full = rope_ready + 1;
    work_empty = work_full + 2;
    loads_issued = work_empty + 2;
    query_full = loads_issued + 1;
    query_empty = query_full + 1;
    weights = query_empty + 1;
    turn = weights + 2;
    sums = turn + 1;
    unmapped = reinterpret_cast<uint32_t*>(sums + 1);
    moved = unmapped + 2;
    reference = reinterpret_cast<float*>(moved + 2);
    sum = reference + 2 * kWarpgroupRows;
    spoilt = reinterpret_cast<uint32_t*>(sum + 4 * kWarpgroupRows);
    ranks = reinterpret_cast<int*>(spoilt + 4 * kConsumerWarps);
    listed = reinterpret_cast<SequenceWork*>(ranks + kRanks);
  }
};

// Where a piece of a tile starts. Half h holds channels of half h of the values.
__device__ __forceinline__ constexpr int half_offset(int half) { return kRopeBytes + half * kHalfBytes; }

// Work of a sequence; the padding tokens are those of one more sequence.
__device__ __forceinline__ SequenceWork work_of_sequence(const LatentDecodeSm90Params& p, int index) {
  const SequenceTable& table = p.sequences;
  if (index > table.batch_size) return {};
  Sequence s{};
  int end = table.token_count;
  if (index < table.batch_size) {
    s = read_sequence(table, index, capacity_of(p.blocks));
    end = first_token_of(table, index + 1);
  } else {
    s.begin = first_token_of(table, index);
  }
  int span = s.kv_len;
  const int window = p.rules.local_window_size;
  if (window > 0 && table.query_positions == nullptr) {
    // No token starts before the first one's window; and a row tile spans its tokens and a window.
    if (s.past >= window) span -= (s.past - window + 1) / kKeyAlignment * kKeyAlignment;
    const int64_t most = static_cast<int64_t>(window) + kWarpgroupRows / p.out.num_heads + kKeyAlignment + 1;
    if (p.rules.is_causal && most < span) span = static_cast<int>(most);
  }
  const int split_size = p.partials.split_size;
  int splits = 1;
  if (span > split_size) splits = min_of((span - 1) / split_size + 1, p.partials.split_count);
  const float shorter = static_cast<float>(max_of(0, split_size - (span - (splits - 1) * split_size)));  // the last one than others
  const int rank = static_cast<int>(__fdividef(kLastRanks * shorter, static_cast<float>(split_size)));   // need not be exact
  return {s.begin, max_of(0, end - s.begin), s.past, s.kv_len, splits << kRankBits | 1 + min_of(rank, kLastRanks - 1)};
}

// Lists the sequences, and counts the works of each rank. All threads call it; a barrier must follow.
template <int kCtas> __device__ __forceinline__ void list_sequences(const LatentDecodeSm90Params& p, const Shared& shared) {
  if (threadIdx.x < kRanks) shared.ranks[threadIdx.x] = 0;
  int i = threadIdx.x;
  do {
    const SequenceWork own = work_of_sequence(p, i);
    if (i < kThreads) __syncthreads();  // the zeros are there; not before lengths are on their way
    if (i < kListedSequences) shared.listed[i] = own;
    const int tiles = own.tiles<kCtas>(p.out.num_heads);
    if (own.splits() > 1) atomicAdd(shared.ranks, tiles * (own.splits() - 1));
    if (tiles > 0) atomicAdd(shared.ranks + own.rank(), tiles);
    i += kThreads;
  } while (i < round_up(p.sequences.batch_size + 1, kWarpSize));
}

// Walks over the work of all CTAs or clusters in order: rank by rank, 32 sequences at a time.
template <int kCtas> struct WorkList {
  const LatentDecodeSm90Params& p;
  const SequenceWork* s_listed;
  int ranks_until;  // lane r: works of ranks 0 .. r
  int rank = -1;    // 0: whole splits, else last splits, the longest ones first
  int chunk = 0;    // lane l has to do with sequence 32 chunk + l
  SequenceWork own{};  // of that one
  int works = 0;         // of this rank and this lane's sequence
  int in_chunk = 0;      // of this rank and chunk
  int works_before = 0;  // of earlier chunks and ranks

  __device__ __forceinline__ WorkList(const LatentDecodeSm90Params& params, const Shared& shared) : p(params), s_listed(shared.listed) {
    const int lane = threadIdx.x % kWarpSize;
    ranks_until = sum_until(lane < kRanks ? shared.ranks[lane] : 0);
  }

  // Sum of what the lanes up to and with this one have.
  __device__ __forceinline__ static int sum_until(int sum) {
#pragma unroll 1  // each step written out would keep a predicate
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int left = __shfl_up_sync(kFullWarp, sum, distance);
      if (threadIdx.x % kWarpSize >= distance) sum += left;
    }
    return sum;
  }

  __device__ __forceinline__ void read_chunk() {
    const int index = kWarpSize * chunk + threadIdx.x % kWarpSize;
    own = index < kListedSequences ? s_listed[index] : work_of_sequence(p, index);
    const int tiles = own.tiles<kCtas>(p.out.num_heads);
    works = rank == 0 ? tiles * (own.splits() - 1) : rank == own.rank() ? tiles : 0;
    in_chunk = __reduce_add_sync(kFullWarp, works);
  }

  // What a lane knows of its sequence.
  __device__ __forceinline__ SequenceWork of_lane(int lane) const {
    return {__shfl_sync(kFullWarp, own.begin, lane), __shfl_sync(kFullWarp, own.tokens, lane), __shfl_sync(kFullWarp, own.past, lane),
            __shfl_sync(kFullWarp, own.kv_len, lane), __shfl_sync(kFullWarp, own.ranked, lane)};
  }

  // Work number `index`, never less than in the call before; false when there is none.
  __device__ __forceinline__ bool find(int index, RowTile& tile, int& split) {
    const uint32_t ranks = __ballot_sync(kFullWarp, index < ranks_until);
    if (ranks == 0) return false;
    if (__ffs(ranks) - 1 != rank) {
      rank = __ffs(ranks) - 1;
      chunk = -1;
      in_chunk = 0;
      works_before = rank == 0 ? 0 : __shfl_sync(kFullWarp, ranks_until, rank - 1);
    }
    while (index - works_before >= in_chunk) {
      if (kWarpSize * (chunk + 1) > p.sequences.batch_size) return false;  // lengths that have changed since they were counted
      ++chunk;
      works_before += in_chunk;
      read_chunk();
    }
    const int works_until = sum_until(works);
    const int lane = __ffs(__ballot_sync(kFullWarp, index - works_before < works_until)) - 1;
    const uint32_t from_end = __shfl_sync(kFullWarp, works_until, lane) - 1 - (index - works_before);
    const SequenceWork s = of_lane(lane);
    const uint32_t tiles = s.tiles<kCtas>(p.out.num_heads);
    // The row tiles of a split are neighbours, so that they read it from L2; those that see most keys come first.
    const uint32_t whole = tiles == 1 ? from_end : from_end / tiles;  // no division where tokens come alone
    split = rank == 0 ? static_cast<int>(whole) : s.splits() - 1;
    tile.sequence = {kWarpSize * chunk + lane, s.begin, s.kv_len > 0 ? s.tokens : 0, s.past, s.kv_len};
    tile.group_size = p.out.num_heads;
    const int first_row = static_cast<int>(from_end - whole * tiles) * (kCtas * kWarpgroupRows);
    tile.first_token = first_row == 0 ? 0 : static_cast<uint32_t>(first_row) / static_cast<uint32_t>(tile.group_size);
    tile.first_head = first_row - tile.first_token * tile.group_size;
    tile.rows = first_row < 0 ? 0 : max_of(0, min_of(kWarpgroupRows, s.tokens * tile.group_size - first_row));
    return true;
  }
};

// Keys of the tokens of a row tile. All lanes of a warp call it together.
template <int kCtas> __device__ __forceinline__ TileKeys keys_of_tile(const LatentDecodeSm90Params& p, const RowTile& tile) {
  const Sequence& s = tile.sequence;
  const int first = tile.first_token;
  const int last = kCtas == 2 ? first : tile.last_token();
  if (first < last) return keys_of_tokens(p.sequences, p.rules, s, first, last);
  const KeyRange keys = admitted_keys(p.rules, position_of_token(p.sequences, s, s.begin + first), first, s.kv_len);
  return {keys, keys};
}

// Work number `index` as a whole warp finds it; of a pair of row tiles, the first. False where there is nothing to do.
template <int kCtas>
__device__ __forceinline__ bool find_work(const LatentDecodeSm90Params& p, WorkList<kCtas>& list, int index, Work& work) {
  if (!list.find(index, work.tile, work.split)) {
    work.tile.rows = 0;
    return true;
  }
  if (work.tile.rows == 0) return false;  // lengths that are no lengths
  work.keys = {0, 0};
  work.first_tile = 0;
  work.tile_count = 0;
  work.split_count = 0;
  work.differs = false;
  if (work.tile.sequence.is_active()) {
    const auto [some, every] = keys_of_tile<kCtas>(p, work.tile);
    const SplitPlan plan = plan_splits(p.partials, some);
    work.split_count = plan.count;
    if (work.split < plan.count) {
      work.keys = keys_of_split(p.partials, plan, some, work.split);
      work.first_tile = work.keys.begin / kTileKeys;
      work.tile_count = (work.keys.end - 1) / kTileKeys - work.first_tile + 1;
      work.differs = work.keys.begin < every.begin || work.keys.end > every.end;
    }
  }
  return work.split < max_of(1, work.split_count);
}

// Arrives at a barrier of CTA `rank`.
template <int kCtas> __device__ __forceinline__ void arrive(uint64_t* s_barrier, int rank) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_arrive(s_barrier);
  } else {
    ptx::mbarrier_arrive(s_barrier, rank);
  }
}

// How a thread gets to know its next work, which CTA 0 has found, and tells that it has read it for the last time.
template <int kCtas> __device__ __forceinline__ void wait_work(const Shared& shared, const Ring<2>& works) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_wait(shared.work_full + works.stage, works.parity);
  } else {
    ptx::mbarrier_wait_cluster(shared.work_full + works.stage, works.parity);
  }
}
template <int kCtas> __device__ __forceinline__ void release_work(const Shared& shared, const Ring<2>& works) {
  arrive<kCtas>(shared.work_empty + works.stage, 0);
}

// The warp that finds work, of CTA 0 of a cluster.
template <int kCtas> __device__ __forceinline__ void find_all_work(const LatentDecodeSm90Params& p, const Shared& shared) {
  WorkList<kCtas> list(p, shared);
  Ring<2> works;
  Ring<1> issued;
  int index = blockIdx.x / kCtas;
  for (bool first = true;; first = false) {
    if (!first) {  // who takes work early may keep it from a CTA that is ready for it
      ptx::mbarrier_wait(shared.loads_issued, issued.parity);
      issued.advance();
    }
    Work work;
    bool is_given = first;
    do {
      if (!is_given) {
        ptx::wait_for_previous_kernel();  // which sets next_work to 0
        if (threadIdx.x % kWarpSize == 0) index = static_cast<int>(gridDim.x / kCtas) + atomicAdd(p.next_work, 1);
        index = __shfl_sync(kFullWarp, index, 0);
      }
      is_given = false;
    } while (!find_work(p, list, index, work));
    if (kCtas == 2 && first) ptx::cluster_wait();  // the other CTA has barriers to send it to
    ptx::mbarrier_wait(shared.work_empty + works.stage, works.parity ^ 1);
    if (ptx::elect()) {
      shared.work[works.stage] = work;
      ptx::mbarrier_arrive(shared.work_full + works.stage);
      if constexpr (kCtas == 2) {
        work.tile.first_head += kWarpgroupRows;  // the next row tile: of the same token, as long, with the same keys
        ptx::send(shared.work + works.stage, work, shared.work_full + works.stage, 1);
      }
    }
    __syncwarp();
    if (work.tile.rows == 0) break;
    works.advance();
  }
}

// Starts the copy of a box to where it belongs in a piece, of every CTA that shares it.
template <int kCtas>
__device__ __forceinline__ void load_box(unsigned char* s_target, const TensorMap& map, uint64_t* s_full, uint64_t policy, int group,
                                         int eight, int block) {
  if constexpr (kCtas == 1) {
    ptx::tma_load(s_target, map, s_full, policy, 0, 0, group, eight, block);
  } else {
    ptx::tma_load_multicast(s_target, map, s_full, kBothCtas, policy, 0, 0, group, eight, block);
  }
}

// A warp that loads the tiles of warpgroup `own`. In a cluster it does so in CTA `own`, for both; in the other CTA it only tells
// the barriers what will come.
template <int kCtas> __device__ __forceinline__ void load_tiles(const LatentDecodeSm90Params& p, const Shared& shared, int own) {
  const int lane = threadIdx.x % kWarpSize;
  const int block_keys = min_of(p.blocks.block_size, kTileKeys);  // of a block that lie in one tile
  const int parts = kTileKeys >> (31 - __clz(block_keys));
  unsigned char* s_tile = shared.tiles + own * kTileBytes;
  uint64_t* s_full = shared.full + own * kPieces;
  uint64_t* s_empty = shared.empty + own * kPieces;
  const bool issuer = kCtas == 1 || ptx::cluster_rank() == own;
  const uint64_t policy = p.reads_once != 0 ? ptx::evict_first_policy() : ptx::evict_normal_policy();
  Ring<2> works;
  Ring<1> ring;

  for (;; works.advance()) {
    wait_work<kCtas>(shared, works);
    const Work& work = shared.work[works.stage];
    const bool ends = work.tile.rows == 0;
    const int sequence = work.tile.sequence.index;
    const KeyRange keys = work.keys;
    const int first_tile = work.first_tile;
    const int tile_count = work.tile_count;
    release_work<kCtas>(shared, works);
    if (ends) break;

    // Lane l: the block that holds part l of tile i, or kUnmapped where there is nothing to read.
    const auto entry_of = [&](int i) {
      const int key = (first_tile + i) * kTileKeys + lane * block_keys;
      const bool wanted = lane < parts && i < tile_count && key < keys.end && key + block_keys > keys.begin;
      return wanted ? entry_of_position(p.blocks, sequence, key) : kUnmapped;
    };

    int entry = entry_of(own);
    ptx::wait_for_previous_kernel();  // which writes the cache
    for (int i = own; i < tile_count; i += 2) {
      const int block = block_of_entry(p.blocks, entry);
      const uint32_t unmapped = __ballot_sync(kFullWarp, block == kUnmapped) & ((1u << parts) - 1u);
      const int eight = offset_in_block(p.blocks, (first_tile + i) * kTileKeys) / 8;  // 0 unless the tile lies in one block

      // When the weights of the tile before have been read here, all of that tile has come and is masked.
      ptx::mbarrier_wait(s_empty + kRope, ring.parity ^ 1);
      if (ptx::elect()) {
        shared.unmapped[own] = unmapped;
        for (int piece = 0; piece < kPieces; ++piece) ptx::mbarrier_arrive_expect(s_full + piece, bytes_of(piece));
        if (!issuer) ptx::mbarrier_arrive(shared.rope_ready, own);
      }
      __syncwarp();
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if (!issuer) break;
        const int half = piece == kOwnHalf ? own : 1 - own;
        const TensorMap& map = piece == kRope ? p.rope_map : p.half_map;
        const int group = piece == kRope ? kRopeGroup : half * kHalfGroups;
        const int bytes = bytes_of(piece);
        unsigned char* s_piece = s_tile + (piece == kRope ? 0 : half_offset(half));
        if (piece != kRope) {
          ptx::mbarrier_wait(s_empty + piece, ring.parity ^ 1);
        } else if (kCtas == 2) {
          ptx::mbarrier_wait(shared.rope_ready, ring.parity);
        }
        const bool issues = ptx::elect();
#pragma unroll 1  // instructions that a CTA meets for the first time come slowly
        for (int part = 0; part < parts; ++part) {
          const int from = __shfl_sync(kFullWarp, block, part);
          if (issues) load_box<kCtas>(s_piece + part * block_keys * (bytes / kTileKeys), map, s_full + piece, policy, group, eight, from);
        }
      }
      entry = entry_of(i + 2);  // on its way while this tile is used; not sooner, because the first tile is in a hurry
      ring.advance();
    }
    if (lane == 0 && (kCtas == 1 || ptx::cluster_rank() == 0)) ptx::mbarrier_arrive(shared.loads_issued);
    __syncwarp();
  }
}

// The warp that loads the query rows of a work, when the products with those of the work before are complete; rows that do not
// exist are zeros.
template <int kCtas>
__device__ __forceinline__ void load_queries(const LatentDecodeSm90Params& p, const Shared& shared) {
  int zeros_from = kWarpgroupRows;  // row from which on there are zeros
  Ring<2> works;

  if (p.query_is_new != 0) ptx::wait_for_previous_kernel();
  for (;; works.advance()) {
    wait_work<kCtas>(shared, works);
    const RowTile tile = shared.work[works.stage].tile;
    release_work<kCtas>(shared, works);
    if (tile.rows == 0) break;

    ptx::mbarrier_wait(shared.query_empty, works.stage ^ 1);  // its parity changes with each work
    if (tile.rows < zeros_from) {
      for (int group = 0; group < kGroups; ++group) {
        unsigned char* s_rows = shared.query + group * kQueryGroupBytes;
        for (int at = tile.rows * kRowBytes + 16 * (threadIdx.x % kWarpSize); at < zeros_from * kRowBytes; at += 16 * kWarpSize) {
          *reinterpret_cast<Vector16*>(s_rows + at) = Vector16{};
        }
      }
    }
    zeros_from = tile.rows;
    ptx::fence_async_proxy();
    __syncwarp();  // the zeros of all lanes are there
    if (!ptx::elect()) continue;
    ptx::mbarrier_arrive_expect(shared.query_full, tile.rows * kGroups * kRowBytes);
    int token = tile.sequence.begin + tile.first_token;
    int head = tile.first_head;
    for (int row = 0; row < tile.rows; row += p.query_box) {
      for (int group = 0; group < kGroups; group += p.query_groups) {
        ptx::tma_load(shared.query + group * kQueryGroupBytes + row * kRowBytes, p.query_map, shared.query_full, 0, head, group, token);
      }
      head += p.query_box;  // which divides the heads of a token
      if (head == tile.group_size) {
        head = 0;
        ++token;
      }
    }
  }
}

// Attends the rows again that were found spoilt, and writes what they should have been; all consumers call it, when all have
// written their rows and `s_spoilt`. Not inlined, because its registers would be missing in the main loop.
template <LatentDecodeSm90Spec S>
__device__ __noinline__ void repair(const LatentDecodeSm90Params& p, const Work& work, const uint32_t* s_spoilt) {
  for (int i = static_cast<int>(threadIdx.x) / kWarpSize - kConsumerWarps; i < kWarpgroupRows; i += 2 * kConsumerWarps) {
    if (((s_spoilt[i / 16] | s_spoilt[kConsumerWarps + i / 16]) >> (i % 16) & 1u) == 0) continue;
    attend_row_again<S.io, S.io, kHeadSize, kValueSize>(p, work, i);
  }
}

// A warpgroup that computes: number `own` owns the tiles own, own + 2, ... of a work, and half `own` of the output channels. What
// it does for each tile is compiled for the one and the other (kOwn), what it does once a work is not: instructions that a CTA
// meets for the first time come slowly.
template <LatentDecodeSm90Spec S> struct Consumer {
  using Io = element_t<S.io>;

  const LatentDecodeSm90Params& p;
  const Shared& shared;
  uint32_t own_parity = 0;  // of the barriers of the own buffer
  uint32_t other_parity = 0;
  const Work* work = nullptr;
  int first_key = 0;   // of tile 0 of the work
  int tile_count = 0;
  KeyRange admitted[2];

  __device__ __forceinline__ Consumer(const LatentDecodeSm90Params& params, const Shared& s) : p(params), shared(s) {}

  __device__ __forceinline__ static int own() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }
  __device__ __forceinline__ static int row(int half) { return row_of_lane(half); }
  __device__ __forceinline__ unsigned char* tile_of(int warpgroup) const { return shared.tiles + warpgroup * kTileBytes; }

  __device__ __forceinline__ void wait_piece(int warpgroup, Piece piece, uint32_t parity) const {
    ptx::mbarrier_wait(shared.full + warpgroup * kPieces + piece, parity);
  }
  __device__ __forceinline__ void release(int warpgroup, Piece piece) const {
    if (threadIdx.x % kWarpSize == 0) arrive<S.ctas>(shared.empty + warpgroup * kPieces + piece, warpgroup);  // which CTA loads it
  }
  // After the products of own tile i with the queries.
  __device__ __forceinline__ void release_queries(int i) const {
    if (i + 2 >= tile_count && threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(shared.query_empty);
  }

  // An operand that starts `offset` bytes into a warpgroup's tile: added to one descriptor, which takes fewer instructions than one
  // of each address.
  __device__ __forceinline__ uint64_t operand_of_tile(int warpgroup, int offset, int leading, int stride) const {
    const uint64_t tiles = ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(shared.tiles), leading, stride);
    return ptx::descriptor_at(tiles, warpgroup * kTileBytes + offset);
  }

  // Products of the queries with a channel group of the own tile.
  __device__ __forceinline__ void multiply_keys(float (&scores)[kScores], uint64_t keys, int group, bool accumulate) const {
    const uint64_t query = ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(shared.query), 16, kAtomBytes);
    ptx::wgmma_4<Io>(scores, ptx::descriptor_at(query, group * kQueryGroupBytes), keys, accumulate);
  }
  template <int kOwn>
  __device__ __forceinline__ void multiply_key_half(float (&scores)[kScores], int half) const {
    const uint64_t keys = operand_of_tile(kOwn, half_offset(half), 16, kHalfGroups * kAtomBytes);
#pragma unroll
    for (int group = 0; group < kHalfGroups; ++group) {
      multiply_keys(scores, ptx::descriptor_at(keys, group * kAtomBytes), half * kHalfGroups + group, true);
    }
    ptx::wgmma_commit();
  }

  // Issues the products with what comes first of tile i: rope channels and own half.
  template <int kOwn>
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores], int i) const {
    wait_piece(kOwn, kRope, own_parity);
    wait_piece(kOwn, kOwnHalf, own_parity);
    clear_outside<kOwn>(i);
    ptx::wgmma_fence();
    multiply_keys(scores, operand_of_tile(kOwn, 0, 16, kAtomBytes), kRopeGroup, false);
    multiply_key_half<kOwn>(scores, kOwn);
  }
  template <int kOwn>
  __device__ __forceinline__ void continue_scores(float (&scores)[kScores]) const {
    wait_piece(kOwn, kOtherHalf, own_parity);
    ptx::wgmma_fence();
    multiply_key_half<kOwn>(scores, 1 - kOwn);
  }

  // Clears rows of the own tile that no token of the work admits but that came with a block.
  template <int kOwn>
  __device__ __forceinline__ void clear_outside(int i) const {
    const int tile_key = first_key + i * kTileKeys;
    const int begin = work->keys.begin - tile_key;
    const int end = work->keys.end - tile_key;
    if (begin <= 0 && end >= kTileKeys) return;
    wait_piece(kOwn, kOtherHalf, own_parity);
    unsigned char* s_tile = tile_of(kOwn);
    // A warp has every fourth key, a lane 16 bytes of a channel group in each half.
    const int group = threadIdx.x % kWarpSize / 8;
    static_assert(8 * kHalfGroups == kWarpSize);
#pragma unroll 1
    for (int key = threadIdx.x % kWarpgroup / kWarpSize; key < kTileKeys; key += kConsumerWarps) {
      if (key >= begin && key < end) continue;
      unsigned char* s_row = s_tile + key % 8 * kRowBytes + threadIdx.x % 8 * 16;
      if (group == 0) *reinterpret_cast<Vector16*>(s_row + key / 8 * kAtomBytes) = Vector16{};
      unsigned char* s_half_row = s_row + (key / 8 * kHalfGroups + group) * kAtomBytes;
      *reinterpret_cast<Vector16*>(s_half_row + half_offset(0)) = Vector16{};
      *reinterpret_cast<Vector16*>(s_half_row + half_offset(1)) = Vector16{};
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kTile + kOwn, kWarpgroup);  // the zeros are there for the whole warpgroup
  }

  // A bit for each key of a tile before number `end`.
  __device__ __forceinline__ static uint64_t bits_below(int end) {
    static_assert(kTileKeys == 64);
    return end <= 0 ? 0 : end >= kTileKeys ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  }

  template <int kOwn>
  __device__ __forceinline__ void mask(float (&scores)[kScores], int tile_key) const {
    uint32_t unmapped = threadIdx.x % kWarpSize == 0 ? shared.unmapped[kOwn] : 0;
    bool whole = unmapped == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      whole = whole && (row(half) >= work->tile.rows || (admitted[half].begin <= tile_key && tile_key + kTileKeys <= admitted[half].end));
    }
    if (__all_sync(kFullWarp, whole)) return;
    unmapped = __shfl_sync(kFullWarp, unmapped, 0);
    const int block_keys = min_of(p.blocks.block_size, kTileKeys);
    uint64_t mapped = ~uint64_t{0};
#pragma unroll 1
    for (int key = 0; unmapped != 0; key += block_keys, unmapped >>= 1) {
      if (unmapped & 1u) mapped &= ~(bits_below(block_keys) << key);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t seen = mapped & bits_below(admitted[half].end - tile_key) & ~bits_below(admitted[half].begin - tile_key);
      const uint64_t own_seen = seen >> (2 * (threadIdx.x % 4));
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
        if ((own_seen >> (2 * i - 4 * half) & 1u) == 0) scores[i] = negative_infinity();
        if ((own_seen >> (2 * i - 4 * half + 1) & 1u) == 0) scores[i + 1] = negative_infinity();
      }
    }
  }

  // Scores in base 2 where a rule comes between the product and softmax.
  __device__ __forceinline__ void apply_rules(float (&scores)[kScores], int tile_key) const {
    const int first = tile_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Io* g_bias = row(half) >= work->tile.rows ? nullptr : bias_row_of_tile<Io>(work->tile, row(half), p.rules, 0);
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

  // After the products of own tile i are complete: its weights, here and for the other warpgroup. Returns whether acc must be scaled.
  template <int kOwn>
  __device__ __forceinline__ bool finish_scores(float (&scores)[kScores], uint32_t (&weights)[kTileKeys / 16][4], RowPair& rows,
                                                float (&rescale)[2], int i) {
    const int tile_key = first_key + i * kTileKeys;
    if constexpr (S.has_rules) apply_rules(scores, tile_key);
    mask<kOwn>(scores, tile_key);
    const float factor[2] = {score_factor(), score_factor()};
    const bool moved = weigh(scores, rows, factor, rescale);
    pack_weights<Io>(weights, scores);

    // No warp of the warpgroup still multiplies with the rope channels after this, and all of them know whether a reference has moved.
    const bool any_moved = ptx::named_barrier_any(kTile + kOwn, kWarpgroup, moved);
    if (threadIdx.x % kWarpgroup == 0) shared.moved[kOwn] = any_moved;
    Vector16* s_weights = reinterpret_cast<Vector16*>(tile_of(kOwn)) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      s_weights[step * kWarpgroup] = Vector16{{weights[step][0], weights[step][1], weights[step][2], weights[step][3]}};
    }
    if (threadIdx.x % 4 == 0) {
      shared.reference[kOwn * kWarpgroupRows + row(0)] = rows.reference[0];
      shared.reference[kOwn * kWarpgroupRows + row(1)] = rows.reference[1];
    }
    ptx::fence_async_proxy();  // the copy engine writes there next
    ptx::mbarrier_arrive(shared.weights + kOwn);
    own_parity ^= 1;
    return moved;
  }

  // Takes the weights of the other warpgroup's tile, and their references. Returns whether any row of the tile has a new one: the same
  // in all warps, because products, and waits for them, are for the whole warpgroup.
  template <int kOwn>
  __device__ __forceinline__ bool receive(uint32_t (&weights)[kTileKeys / 16][4], float (&reference)[2]) {
    ptx::mbarrier_wait(shared.weights + 1 - kOwn, other_parity);
    const Vector16* s_weights = reinterpret_cast<const Vector16*>(tile_of(1 - kOwn)) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      const Vector16 word = s_weights[step * kWarpgroup];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[step][i] = word.word[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = shared.reference[(1 - kOwn) * kWarpgroupRows + row(half)];
    const bool moved = __any_sync(kFullWarp, shared.moved[1 - kOwn] != 0);
    ptx::mbarrier_arrive(shared.empty + (1 - kOwn) * kPieces + kRope);  // every thread, because every one has read
    wait_piece(1 - kOwn, kOtherHalf, other_parity);  // long there, but its bytes have to be visible here too
    other_parity ^= 1;
    return moved;
  }

  // Takes over the reference of weights that were received. No product may be writing acc.
  __device__ __forceinline__ void adopt(const float (&reference)[2], float (&acc)[kOutputs], RowPair& rows) const {
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[half] = factor_of_move(rows.reference[half], reference[half], score_factor());
      rows.reference[half] = reference[half];
      rows.sum[half] *= rescale[half];
    }
    scale_rows(acc, rescale);
  }

  // Issues acc += weights * own half of the values of a warpgroup's tile.
  template <int kOwn>
  __device__ __forceinline__ void multiply_values(float (&acc)[kOutputs], const uint32_t (&weights)[kTileKeys / 16][4], int warpgroup) const {
    constexpr int kEightKeysBytes = kHalfGroups * kAtomBytes;
    const uint64_t values = operand_of_tile(warpgroup, half_offset(kOwn), kAtomBytes, kEightKeysBytes);
    ptx::hold(acc);
    ptx::wgmma_fence();
    ptx::wgmma_4<Io>(acc, weights, values, 2 * kEightKeysBytes);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ float score_factor() const { return S.has_rules ? 1.0f : kLog2E * p.rules.scale; }

  // Warpgroup 0: its softmax runs under the products of the other one with the keys of the next tile.
  __device__ __forceinline__ void lead(float (&acc)[kOutputs], RowPair& rows) {
    float scores[kScores];
    uint32_t weights[kTileKeys / 16][4];
    float rescale[2];
    float reference[2];
    for (int i = 0;; i += 2) {
      begin_scores<0>(scores, i);
      ptx::wgmma_wait<1>();
      ptx::hold(acc);
      if (i > 0) release(1, kOtherHalf);
      continue_scores<0>(scores);
      ptx::wgmma_wait<0>();
      if (i + 1 < tile_count && threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(shared.turn);
      ptx::hold(scores);
      release_queries(i);
      if (finish_scores<0>(scores, weights, rows, rescale, i)) scale_rows(acc, rescale);
      multiply_values<0>(acc, weights, 0);
      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release(0, kOwnHalf);
      if (i + 1 >= tile_count) break;

      if (receive<0>(weights, reference)) adopt(reference, acc, rows);
      multiply_values<0>(acc, weights, 1);
      if (i + 2 >= tile_count) {
        ptx::wgmma_wait<0>();
        ptx::hold(acc);
        release(1, kOtherHalf);
        break;
      }
    }
  }

  // Warpgroup 1: its softmax runs under its own products with the values of the tile before.
  __device__ __forceinline__ void follow(float (&acc)[kOutputs], RowPair& rows) {
    float scores[kScores];
    uint32_t weights[kTileKeys / 16][4];
    float rescale[2];
    float reference[2];
    for (int i = 1; i < tile_count; i += 2) {
      // Both products with keys at a time would end at a time, and nothing would run under warpgroup 0's softmax.
      ptx::mbarrier_wait(shared.turn, own_parity);
      begin_scores<1>(scores, i);
      continue_scores<1>(scores);
      // Written twice, because acc may only be touched while no product at all is on its way.
      if (receive<1>(weights, reference)) {
        ptx::wgmma_wait<0>();
        ptx::hold(scores);
        adopt(reference, acc, rows);
      }
      multiply_values<1>(acc, weights, 0);
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      release_queries(i);
      uint32_t own_weights[kTileKeys / 16][4];
      const bool moved = finish_scores<1>(scores, own_weights, rows, rescale, i);
      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release(0, kOtherHalf);
      if (moved) scale_rows(acc, rescale);
      multiply_values<1>(acc, own_weights, 1);
      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release(1, kOwnHalf);
    }
    if (tile_count % 2 != 0) {
      if (receive<1>(weights, reference)) adopt(reference, acc, rows);
      multiply_values<1>(acc, weights, 0);
      ptx::wgmma_wait<0>();
      ptx::hold(acc);
      release(0, kOtherHalf);
    }
  }

  __device__ __forceinline__ int stage() const { return static_cast<int>(work - shared.work); }
  __device__ __forceinline__ uint32_t* spoilt_rows() const { return shared.spoilt + stage() * 2 * kConsumerWarps; }

  // Whether rows may have taken in what they hide: of a pair of row tiles, all rows admit the same keys.
  __device__ __forceinline__ bool differs() const { return S.ctas == 1 && work->differs; }

  // What this warpgroup has of the rows: its half of the channels.
  __device__ __forceinline__ void write(float (&acc)[kOutputs], const RowPair& rows) const {
    float* s_sum = shared.sum + stage() * 2 * kWarpgroupRows;  // the other warpgroup may still read the last work's
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = group_sum<4>(rows.sum[half]);
      if (threadIdx.x % 4 == 0) s_sum[own() * kWarpgroupRows + row(half)] = sum[half];
    }
    if (differs()) {
      uint32_t spoilt = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t votes = __ballot_sync(kFullWarp, row(half) < work->tile.rows && is_spoilt(acc, half, sum[half]));
#pragma unroll
        for (int i = 0; i < 8; ++i) spoilt |= (votes >> (4 * i) & 15u) != 0 ? 1u << (i + 8 * half) : 0u;
      }
      if (threadIdx.x % kWarpSize == 0) spoilt_rows()[threadIdx.x / kWarpSize - kConsumerWarps] = spoilt;
    }
    ptx::mbarrier_arrive(shared.sums);
    ptx::mbarrier_wait(shared.sums, stage());  // both have written their sums, against the same references
    float lse[2];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxState state;
      if (rows.reference[half] != negative_infinity()) state.row_max = rows.reference[half] * score_factor();
      state.row_sum = s_sum[row(half)] + s_sum[kWarpgroupRows + row(half)];
      lse[half] = lse_of(state);
      factor[half] = lse[half] == negative_infinity() ? 0.0f : 1.0f / state.row_sum;
    }
    scale_rows(acc, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = row(half) < work->tile.rows;
      const bool writes_lse = exists && own() == 0 && threadIdx.x % 4 == 0;
      const bool is_pair = S.ctas == 2;  // of row tiles, which are of one token
      const int token = is_pair ? work->tile.sequence.begin + work->tile.first_token : work->tile.token(row(half));
      const int head = is_pair ? work->tile.first_head + row(half) : work->tile.head_in_group(row(half));
      if (work->split_count <= 1) {
        Io* g_row = output_row<Io>(p.out, token, head, kValueSize) + own() * (kValueSize / 2);
        if (writes_lse) store_lse(p.out, token, head, kLn2 * lse[half]);
#pragma unroll
        for (int n = 0; n < kOutputs / 4; n += 4) {
          uint32_t word[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) word[i] = ptx::pack_2<Io>(acc[4 * (n + i) + 2 * half], acc[4 * (n + i) + 2 * half + 1]);
          transpose_4(word);  // eight neighbouring channels of n-tile n + t
          if (exists) *reinterpret_cast<Vector16*>(g_row + 8 * (n + threadIdx.x % 4)) = Vector16{{word[0], word[1], word[2], word[3]}};
        }
      } else if (exists) {
        const int64_t at = partial_row(p.partials, token, work->split, p.out.num_heads, head);
        float* g_row = p.partials.acc + at * partial_width(kValueSize) + own() * (kValueSize / 2) + 2 * (threadIdx.x % 4);
        if (writes_lse) p.partials.lse[at] = lse[half];
#pragma unroll
        for (int n = 0; n < kOutputs / 4; ++n) {
          *reinterpret_cast<float2*>(g_row + 8 * n) = {acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]};
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (Ring<2> works;; works.advance()) {
      wait_work<S.ctas>(shared, works);
      work = shared.work + works.stage;
      if (work->tile.rows == 0) break;
      first_key = work->first_tile * kTileKeys;
      tile_count = work->tile_count;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Where no token hides what another one admits, all rows have the keys of the work.
        admitted[half] = row(half) >= work->tile.rows ? KeyRange{0, 0} : work->keys;
        if (differs()) admitted[half] = keys_of_row(work->tile, row(half), p.sequences, p.rules, work->keys);
      }
      float acc[kOutputs];
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) acc[j] = 0.0f;
      RowPair rows;
      ptx::mbarrier_wait(shared.query_full, works.stage);  // whose parity changes with each work
      if (tile_count <= own()) release_queries(own());
      if (tile_count > 0) {
        if (__shfl_sync(kFullWarp, own(), 0) == 0) {  // the same in all lanes, visibly
          lead(acc, rows);
        } else {
          follow(acc, rows);
        }
      }
      write(acc, rows);
      if (differs()) {
        ptx::named_barrier_sync(kConsumers, kConsumerThreads);  // both have written their rows
        repair<S>(p, *work, spoilt_rows());
        __syncwarp();  // or the compiler writes all that follows twice
      }
      release_work<S.ctas>(shared, works);
    }
  }
};

template <LatentDecodeSm90Spec S> __device__ __forceinline__ void attend(const LatentDecodeSm90Params& p) {
  static_assert(S.io == DType::f16 || S.io == DType::bf16, "wgmma with 16-bit operands");
  const Shared shared;
  if (threadIdx.x == kThreads - kWarpSize) {  // of a warp that seldom lists sequences
    ptx::prefetch_tensor_map(p.half_map);
    ptx::prefetch_tensor_map(p.rope_map);
    ptx::prefetch_tensor_map(p.query_map);
    for (int i = 0; i < 2 * kPieces; ++i) {
      ptx::mbarrier_init(shared.full + i, 1);
      ptx::mbarrier_init(shared.empty + i, i % kPieces == kRope ? kWarpgroup : S.ctas * kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.weights + i, kWarpgroup);
      ptx::mbarrier_init(shared.work_full + i, 1);
      ptx::mbarrier_init(shared.work_empty + i, S.ctas * (kConsumerThreads + 3 * kWarpSize));
    }
    ptx::mbarrier_init(shared.rope_ready, 1);
    ptx::mbarrier_init(shared.loads_issued, 2);
    ptx::mbarrier_init(shared.query_full, 1);
    ptx::mbarrier_init(shared.query_empty, 2 * kConsumerWarps);
    ptx::mbarrier_init(shared.turn, kConsumerWarps);
    ptx::mbarrier_init(shared.sums, kConsumerThreads);
    ptx::mbarrier_init_fence();
  }
  if constexpr (S.ctas == 2) ptx::cluster_arrive_relaxed();
  // Lengths, block table and maybe the query are read while the kernel ahead still writes the cache.
  list_sequences<S.ctas>(p, shared);
  __syncthreads();  // the barriers are initialized, and the sequences listed, for all threads
  ptx::let_next_kernel_start();
  if constexpr (S.ctas == 2) {  // those of the other CTA, too; who finds work may begin before
    if (threadIdx.x >= kWarpSize || ptx::cluster_rank() != 0) ptx::cluster_wait();
  }

  if (threadIdx.x < kWarpgroup) {
    ptx::decrease_registers<kLoadRegisters>();
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);  // the same in all lanes, visibly
    if (warp == 0) {
      if (S.ctas == 1 || ptx::cluster_rank() == 0) find_all_work<S.ctas>(p, shared);
    } else if (warp < 3) {
      load_tiles<S.ctas>(p, shared, warp - 1);
    } else {
      load_queries<S.ctas>(p, shared);
    }
  } else {
    ptx::increase_registers<kComputeRegisters>();
    ptx::wait_for_previous_kernel();  // spoilt rows are read again from the cache
    Consumer<S>(p, shared).run();
  }
  if constexpr (S.ctas == 2) {  // nobody ends while the other one may still arrive at its barriers
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

template <LatentDecodeSm90Spec S>
  requires(S.ctas == 1)
__global__ void __launch_bounds__(kThreads, 1) latent_decode_sm90(const __grid_constant__ LatentDecodeSm90Params p) {
  attend<S>(p);
}

template <LatentDecodeSm90Spec S>
  requires(S.ctas == 2)
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2) latent_decode_sm90(const __grid_constant__ LatentDecodeSm90Params p) {
  attend<S>(p);
}

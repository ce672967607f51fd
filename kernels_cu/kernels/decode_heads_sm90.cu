// decode_heads_sm90.cu: attention of single tokens over one split of their keys on Hopper. A CTA has several kv heads, a warp
// each, and reads what all of them have of a block as one run of bytes: memory gives whole blocks faster than the rows of one head.
//
//   grid    x: work x head_tiles + head tile. Works are splits of tokens, the longest first, and then nothing (see find_work)
//   CTA     S.heads warps that compute, and a warpgroup of which one warp loads: warpgroups are what shares out registers
//   reads   query once; key and value rows that the token admits once
//   writes  output and lse where there is one split or none; else acc and lse of this split, which the last warp of a token's
//           kv head to finish merges (when there are counters), or combine_splits.cu
//   smem    | barriers | what finds the work, then which slices are there | S.units x unit_keys rows of all heads |
// Invariants
//   Units of the ring hold the keys of a tile, then its values: K0 K0 V0 V0 K1 .. A warp reads its own head's part of each, into
//   registers, and gives the unit back before it computes.
//   Rows lie as in the cache, so all rows of a head start in the same banks; copies to places that are not multiples of 128
//   bytes are slower than memory. A warp therefore reads different parts of neighbouring rows at a time, and sorts registers.
//   Tiles start on multiples of 16; 16 keys, a slice, lie in one block. An unmapped block is neither read nor attended.
//   Values that the token does not admit are zeros in shared memory, or not used: nothing that is masked can reach the sums.
//   Lengths that enter the mask are read here; host bounds only size the grid. Empty splits leave at once.
//   A row's result does not depend on which split finished last.
#include <pagedattn/column_softmax.cuh>
#include <pagedattn/key_fragments.cuh>
#include <pagedattn/ptx/discard.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/ptx/opaque.cuh>
#include <pagedattn/ptx/setmaxnreg.cuh>
#include <pagedattn/ptx/tma.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>

struct DecodeHeadsSm90Spec {
  DType io;
  DType cache;
  int head_size;
  int heads;        // kv heads of a CTA
  int copy_tokens;  // of one copy: 16 where the CTA has all heads of a token, else 1
  int tile_keys;
  int unit_keys;    // of a unit of the ring
  int units;
};

struct DecodeHeadsSm90Params {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;
  ScoreRules rules;
  Output out;
  Partials partials;
  int* finished;         // [token_count, kv heads], zeros: splits that are done; null: no merge here
  int group_size;        // query heads of a kv head, 8 at most
  int head_tiles;        // kv heads / S.heads
  int query_is_new;      // the kernel ahead writes it
};

// A split of a token, and what it needs to know of it.
struct Work {
  Sequence sequence;
  KeyRange admitted;
  SplitPlan plan;
  int token;  // -1: there is no work
  int split;

  __device__ __forceinline__ KeyRange keys(const Partials& partials) const { return keys_of_split(partials, plan, admitted, split); }
};

template <DecodeHeadsSm90Spec S> struct DecodeHeads {
  using Io = element_t<S.io>;
  using F = KeyFragments<S.io, S.cache, S.head_size>;
  using Math = typename F::Math;
  static constexpr int kWarpgroup = 128;
  static constexpr int kThreads = S.heads * kWarpSize + kWarpgroup;
  static constexpr int kCtas = 2;  // of a multiprocessor
  static constexpr int kLoadRegisters = 32;
  static constexpr int kComputeRegisters = 104;
  static_assert(kLoadRegisters * kWarpgroup + kComputeRegisters * S.heads * kWarpSize <= ptx::start_registers(kCtas * kThreads) * kThreads,
                "more would wait forever");
  static constexpr int kWorkBytes = 256;
  static_assert(sizeof(Work) + 4 * S.units <= kWorkBytes, "what the loop knows of its units is there then");
  static constexpr int kSlice = 16;
  static constexpr int kSlices = S.tile_keys / kSlice;
  static constexpr int kUnitSlices = S.unit_keys / kSlice;
  static constexpr int kTileUnits = S.tile_keys / S.unit_keys;
  static constexpr int kSteps = F::Tile::kSteps;
  static constexpr int kRowBytes = F::Tile::kRowBytes;
  static constexpr int kParts = kRowBytes / 64;  // of a row: four vectors of 16 bytes
  static constexpr int kTokenBytes = S.heads * kRowBytes;
  static constexpr int kSliceBytes = kSlice * kTokenBytes;
  static constexpr int kUnitBytes = kUnitSlices * kSliceBytes;
  static constexpr uint32_t kAllSlices = (1u << kSlices) - 1;
  static constexpr uint32_t kAllUnitSlices = (1u << kUnitSlices) - 1;
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is one part, or pairs of them");

  static __device__ __forceinline__ uint64_t* s_full() { return shared_memory<uint64_t>(); }
  static __device__ __forceinline__ uint64_t* s_empty() { return s_full() + S.units; }
  static __device__ __forceinline__ unsigned char* s_unit(int slot) {
    return shared_memory<unsigned char>() + round_up(16 * S.units, 128) + kWorkBytes + slot * kUnitBytes;
  }
  // The CTA's work, and before it was found what finds it.
  static __device__ __forceinline__ Work* s_work() {
    return reinterpret_cast<Work*>(shared_memory<unsigned char>() + round_up(16 * S.units, 128));
  }
  // Which slices of each unit lie in mapped blocks, bit by bit, where what has found the work was.
  static __device__ __forceinline__ uint32_t* s_mapped() { return reinterpret_cast<uint32_t*>(s_work() + 1); }
  // Key of a score in its slice: element i of four.
  static __device__ __forceinline__ int key(int i) { return threadIdx.x % kWarpSize / 4 + 8 * (i / 2); }
  // Query row of acc and of scores in this lane, `element` 0 or 1.
  static __device__ __forceinline__ int row(int element) { return 2 * (threadIdx.x % 4) + element; }

  // With g = lane / 4, t = lane % 4: where vector t of the first part of row g is, and of odd rows of the second part, because two
  // rows are read together.
  static __device__ __forceinline__ int key_offset() {
    const int lane = threadIdx.x % kWarpSize;
    return threadIdx.x / kWarpSize * kRowBytes + lane / 4 * kTokenBytes + 16 * (lane % 4) + (kParts > 1 ? 16 * (lane & 4) : 0);
  }
  // Vectors t of two parts of a row; `offset` is that of the row and of the first part.
  static __device__ __forceinline__ void load_keys(Vector16 (&vectors)[2], const unsigned char* s_unit, int key_offset, int other_offset,
                                                   int offset) {
    const Vector16 x = *reinterpret_cast<const Vector16*>(s_unit + key_offset + offset);
    const Vector16 y = kParts > 1 ? *reinterpret_cast<const Vector16*>(s_unit + other_offset + offset) : x;
    const bool odd = kParts > 1 && key_offset & 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vectors[0].word[i] = odd ? y.word[i] : x.word[i];
      vectors[1].word[i] = odd ? x.word[i] : y.word[i];
    }
  }
  // Channels of this lane in each part of a query row, the keys' vectors: so many neighbours.
  static constexpr int kVector = 128 / bits_of(S.cache);
  static constexpr int kChannels = kVector * kParts;
  // Element i of four of a step's B operand, among this lane's channels; integer codes of 4 bits are widened in an order of their own.
  static __device__ __forceinline__ constexpr int query_element(int step, int i) {
    return S.cache == DType::i4 ? step / 2 * 8 + step % 2 * 2 + i / 2 + i % 2 * 4 : 4 * step + i;
  }

  // Both column groups of a part of 16 values, as ldmatrix gives them. Rows 2t and 2t + 1 read vector v where t = 0 reads v ^ t.
  static __device__ __forceinline__ int value_offset() {
    const int lane = threadIdx.x % kWarpSize;
    return threadIdx.x / kWarpSize * kRowBytes + (lane % 8 + 8 * (lane / 16)) * kTokenBytes + 16 * (lane / 8 % 2 ^ lane % 8 / 2);
  }
  static __device__ __forceinline__ void load_values(uint32_t (&groups)[2][4], const unsigned char* s_unit, int value_offset,
                                                     int other_offset, int offset, int flags) {
    const bool odd = flags & 1;
    const bool late = flags & 2;
    uint32_t x[2][4];
    ptx::ldmatrix_x4_transposed(x[0], s_unit + value_offset + offset);
    ptx::ldmatrix_x4_transposed(x[1], s_unit + other_offset + offset);
    uint32_t y[2][4];
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[group][i] = odd ? x[group][i ^ 1] : x[group][i];
    }
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) groups[group][i] = late ? y[group ^ 1][i] : y[group][i];
    }
  }
};

// Whether a key lies below `end`. One past 2^31 has become negative, and does not.
__device__ __forceinline__ bool is_below(int key, int end) { return static_cast<uint32_t>(key) < static_cast<uint32_t>(end); }

// Tiles of a split, and where the one starts that has `left` tiles from it on.
template <DecodeHeadsSm90Spec S> __device__ __forceinline__ int tiles_of(const KeyRange& range) {
  return ceil_div(range.end - range.begin / DecodeHeads<S>::kSlice * DecodeHeads<S>::kSlice, S.tile_keys);
}
template <DecodeHeadsSm90Spec S> __device__ __forceinline__ int tile_key(const KeyRange& range, int left) {
  return range.begin / DecodeHeads<S>::kSlice * DecodeHeads<S>::kSlice + (tiles_of<S>(range) - left) * S.tile_keys;
}

// The warp that loads: keys and values of each tile as soon as the unit is free. It looks up a batch of 32 blocks at a time, one
// batch ahead.
template <DecodeHeadsSm90Spec S> __device__ __forceinline__ void load_tiles(const DecodeHeadsSm90Params& p, const Work& own, int first_head) {
  using D = DecodeHeads<S>;
  constexpr int kBatch = kWarpSize / D::kSlices;  // tiles
  const KeyRange range = own.keys(p.partials);
  const int first = range.begin / D::kSlice * D::kSlice;
  const int tiles = tiles_of<S>(range);
  const KvHead<S.cache> keys(p.key_cache, first_head);
  const KvHead<S.cache> values(p.value_cache, first_head);
  const auto key_of_lane = [&](int first_tile) {
    return first + first_tile * S.tile_keys + static_cast<int>(threadIdx.x) % kWarpSize * D::kSlice;
  };
  const auto look_up = [&](int first_tile) {
    const int key = key_of_lane(first_tile);
    return is_below(key, range.end) ? block_of_position(p.blocks, own.sequence.index, key) : kUnmapped;
  };
  int next = look_up(0);
  ptx::wait_for_previous_kernel();  // which writes the cache
  int slot = 0;
  uint32_t parity = 1;  // of the phase before the first one: units are free
  uint32_t mapped = 0;
  const unsigned char* g_keys = nullptr;  // where the slice of this lane starts
  const unsigned char* g_values = nullptr;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile % kBatch == 0) {
      const int block = max_of(next, 0);
      const int offset = offset_in_block(p.blocks, key_of_lane(tile));
      mapped = __ballot_sync(kFullWarp, next != kUnmapped);
      g_keys = keys.row(block, offset);
      g_values = values.row(block, offset);
      next = look_up(tile + kBatch);
    }
#pragma unroll
    for (int unit = 0; unit < 2 * D::kTileUnits; ++unit) {
      const bool is_keys = unit < D::kTileUnits;
      const int first_lane = tile % kBatch * D::kSlices + unit % D::kTileUnits * D::kUnitSlices;
      const uint32_t own_mapped = mapped >> first_lane & D::kAllUnitSlices;
      ptx::mbarrier_wait(D::s_empty() + slot, parity);
      if (ptx::elect()) {
        D::s_mapped()[slot] = own_mapped;
        ptx::mbarrier_arrive_expect(D::s_full() + slot, __popc(own_mapped) * D::kSliceBytes);
      }
      __syncwarp();
#pragma unroll
      for (int slice = 0; slice < D::kUnitSlices; ++slice) {
        const uint64_t own_source = reinterpret_cast<uint64_t>(is_keys ? g_keys : g_values);
        const auto g_source = reinterpret_cast<const unsigned char*>(__shfl_sync(kFullWarp, own_source, first_lane + slice));
        if (!(own_mapped >> slice & 1u)) continue;
        unsigned char* s_slice = D::s_unit(slot) + slice * D::kSliceBytes;
        const int64_t token_bytes = (is_keys ? keys : values).token_bytes();
        if (ptx::elect()) {
#pragma unroll
          for (int token = 0; token < D::kSlice; token += S.copy_tokens) {
            ptx::bulk_load(s_slice + token * D::kTokenBytes, g_source + token * token_bytes, S.copy_tokens * D::kTokenBytes,
                           D::s_full() + slot);
          }
        }
        __syncwarp();
      }
      if (++slot == S.units) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// This lane's B operands of q . k, and what its two columns of products are to be multiplied by for scores in base 2. Rows beyond
// the group are zeros.
template <DecodeHeadsSm90Spec S>
__device__ __forceinline__ void load_query(const DecodeHeadsSm90Params& p, int token, int kv_head, uint2 (&query)[DecodeHeads<S>::kSteps],
                                           float (&factor)[2]) {
  using D = DecodeHeads<S>;
  using F = typename D::F;
  const int row = threadIdx.x % kWarpSize / 4;
  const int first_channel = D::kVector * (threadIdx.x % 4);
  const auto g_row = static_cast<const typename D::Io*>(p.query) + token * p.query_stride +
                     static_cast<int64_t>(kv_head * p.group_size + row) * S.head_size + first_channel;
  Vector16 words[D::kChannels / 8] = {};
#pragma unroll
  for (int i = 0; i < D::kChannels / 8; ++i) {
    const int part = 8 * i / D::kVector;
    if (row < p.group_size) words[i] = *reinterpret_cast<const Vector16*>(g_row + part * 4 * D::kVector + 8 * i % D::kVector);
  }
  const float* g_scale = p.key_cache.scale + kv_head * p.key_cache.scale_head_stride;
  const bool per_channel = F::kCodes && p.key_cache.scale_channel_stride != 0;
  float4 scale[D::kChannels / 4];  // on their way with the row
  if (per_channel) {
#pragma unroll
    for (int i = 0; i < D::kChannels / 4; ++i) {
      const int part = 4 * i / D::kVector;
      scale[i] = *reinterpret_cast<const float4*>(g_scale + first_channel + part * 4 * D::kVector + 4 * i % D::kVector);
    }
  }
  float x[D::kChannels];
#pragma unroll
  for (int i = 0; i < D::kChannels; ++i) {
    const uint32_t word = words[i / 8].word[i % 8 / 2];
    x[i] = i % 2 == 0 ? low_of<typename D::Io>(word) : high_of<typename D::Io>(word);
  }
  float own_factor = 1.0f;
  if constexpr (F::kCodes) {
    float top_scale = g_scale[0];
    if (per_channel) {
      top_scale = 0.0f;
#pragma unroll
      for (int i = 0; i < D::kChannels / 4; ++i) {
        top_scale = fmaxf(fmaxf(fmaxf(top_scale, fabsf(scale[i].x)), fmaxf(fabsf(scale[i].y), fabsf(scale[i].z))), fabsf(scale[i].w));
      }
      top_scale = group_max<4>(top_scale);
      if (top_scale == 0.0f) top_scale = 1.0f;
      const float inverse_scale = 1.0f / top_scale;
#pragma unroll
      for (int i = 0; i < D::kChannels / 4; ++i) {
        x[4 * i] *= scale[i].x * inverse_scale;
        x[4 * i + 1] *= scale[i].y * inverse_scale;
        x[4 * i + 2] *= scale[i].z * inverse_scale;
        x[4 * i + 3] *= scale[i].w * inverse_scale;
      }
    }
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < D::kChannels; ++i) top = finite_top(top, x[i]);
    const int exponent = exponent_of_row(group_max<4>(top));
    const float inverse = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < D::kChannels; ++i) x[i] *= inverse;
    own_factor = power_of_two(exponent) * top_scale;
  }
#pragma unroll
  for (int step = 0; step < D::kSteps; ++step) {
    const auto pair = [&](int i) { return ptx::pack_2<typename D::Math>(x[D::query_element(step, i)], x[D::query_element(step, i + 1)]); };
    query[step] = {pair(0), pair(2)};
  }
  own_factor *= p.rules.scale * kLog2E;
#pragma unroll
  for (int e = 0; e < 2; ++e) factor[e] = __shfl_sync(kFullWarp, own_factor, 4 * D::row(e));
}

// Clears this head's values of the keys outside of `range` in a slice.
template <DecodeHeadsSm90Spec S>
__device__ __forceinline__ void clear_values(unsigned char* s_head, int key, const KeyRange& range) {
  using D = DecodeHeads<S>;
  constexpr int kVectors = D::kRowBytes / 16;
  for (int i = threadIdx.x % kWarpSize; i < D::kSlice * kVectors; i += kWarpSize) {
    const int token = i / kVectors;
    if (range.contains(key + token)) continue;
    *reinterpret_cast<Vector16*>(s_head + token * D::kTokenBytes + 16 * (i % kVectors)) = Vector16{};
  }
  ptx::fence_async_proxy();  // before the copy engine writes there again
  __syncwarp();              // the cleared rows are visible to all lanes
}

// Counts this split of a token's kv head as done. The warp that finds all others done merges them in order; there are kMergedSplits at
// most. Four lanes have a row. It is on its own then, and each round trip to memory shows: one brings every lse, and acc of four splits,
// kAtOnce vectors a lane; a few more the rest.
template <DecodeHeadsSm90Spec S>
__device__ __forceinline__ void merge_splits(const DecodeHeadsSm90Params& p, const Work& own, int kv_head) {
  using D = DecodeHeads<S>;
  constexpr int kVectors = S.head_size / 16;  // of four channels, in a lane
  constexpr int kAtOnce = 2;
  static_assert(kVectors % kAtOnce == 0, "whole batches");
  const int lane = threadIdx.x % kWarpSize;
  const int splits = own.plan.count;
  __threadfence();  // this lane's part is visible to the device
  __syncwarp();     // those of the whole warp are
  int before = 0;
  if (lane == 0) before = atomicAdd(p.finished + static_cast<int64_t>(own.token) * p.head_tiles * S.heads + kv_head, 1);
  if (__shfl_sync(kFullWarp, before, 0) != splits - 1) return;
  __threadfence();  // the others' parts are visible

  const int row = lane / 4;
  const int head = kv_head * p.group_size + min_of(row, p.group_size - 1);
  const int64_t first_part = partial_row(p.partials, own.token, 0, p.out.num_heads, head);  // others follow num_heads rows apart
  float lse[2];  // of splits lane % 4 and 4 more, then their weights
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int split = 4 * half + lane % 4;
    lse[half] = split < splits ? p.partials.lse[first_part + static_cast<int64_t>(split) * p.out.num_heads] : negative_infinity();
  }
  const float* g_first = p.partials.acc + first_part * S.head_size + 4 * (lane % 4);
  const int64_t step = static_cast<int64_t>(p.out.num_heads) * S.head_size;
  float4 x[4][kAtOnce];
  const auto load_acc = [&](int first, int base) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* g_part = g_first + (base + i) * step;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        x[i][j] = base + i < splits ? *reinterpret_cast<const float4*>(g_part + 16 * (first + j)) : float4{};
      }
    }
  };
  load_acc(0, 0);
  SoftmaxState merged;
  merged.row_max = group_max<4>(fmaxf(lse[0], lse[1]));
  const auto weight = [&](int split) { return __shfl_sync(kFullWarp, split < 4 ? lse[0] : lse[1], split, 4); };
#pragma unroll
  for (int half = 0; half < 2; ++half) lse[half] = merged.weight(lse[half]);
#pragma unroll
  for (int split = 0; split < kMergedSplits; ++split) merged.row_sum += weight(split);
  const SoftmaxResult result = finalize(merged, sink_of<typename D::Io>(p.out.head_sink, head));
  if (lane % 4 == 0 && row < p.group_size) store_lse(p.out, own.token, head, result.lse);
  auto* g_row = output_row<typename D::Io>(p.out, own.token, head, S.head_size) + 4 * (lane % 4);
#pragma unroll 1
  for (int first = 0; first < kVectors; first += kAtOnce) {
    float4 acc[kAtOnce] = {};
#pragma unroll 1
    for (int base = 0; base < splits; base += 4) {
      if (first + base > 0) load_acc(first, base);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float own_weight = weight(base + i);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          acc[j].x += own_weight * x[i][j].x;
          acc[j].y += own_weight * x[i][j].y;
          acc[j].z += own_weight * x[i][j].z;
          acc[j].w += own_weight * x[i][j].w;
        }
      }
    }
    if (row >= p.group_size) continue;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      *reinterpret_cast<uint2*>(g_row + 16 * (first + j)) = {
          ptx::pack_2<typename D::Io>(acc[j].x * result.factor, acc[j].y * result.factor),
          ptx::pack_2<typename D::Io>(acc[j].z * result.factor, acc[j].w * result.factor)};
    }
  }
  // Nobody reads the parts again: they need not be written to memory while the next kernel reads.
  constexpr int kLineFloats = ptx::kDiscardBytes / 4;
  static_assert(S.head_size % kLineFloats == 0 && S.head_size / kLineFloats <= 4, "a lane has a line of a row or none");
  __syncwarp();  // all lanes have read the parts
  if (row >= p.group_size || lane % 4 >= S.head_size / kLineFloats) return;
  for (int split = 0; split < splits; ++split) {
    ptx::discard(p.partials.acc + first_part * S.head_size + split * step + lane % 4 * kLineFloats);
  }
}

// Stores this lane's channels of query row `element`, neighbours together.
template <DecodeHeadsSm90Spec S, class StoreOne, class StoreTwo>
__device__ __forceinline__ void store_row(const float (&acc)[DecodeHeads<S>::kSteps][4], int element, const StoreOne& store_one,
                                          const StoreTwo& store_two) {
  using F = typename DecodeHeads<S>::F;
#pragma unroll
  for (int step = 0; step < DecodeHeads<S>::kSteps; ++step) {
    if constexpr (F::kCodes) {
      store_two(F::value_channel(step, 0), {acc[step][element], acc[step][2 + element]});
    } else {
      store_one(F::value_channel(step, 0), acc[step][element]);
      store_one(F::value_channel(step, 1), acc[step][2 + element]);
    }
  }
}

// A warp that computes: its kv head over the tiles of a split. What is only needed at the edges is read from shared memory there: the
// loop's registers are few.
template <DecodeHeadsSm90Spec S> __device__ __forceinline__ void attend(const DecodeHeadsSm90Params& p, const Work& own, int first_head) {
  using D = DecodeHeads<S>;
  using F = typename D::F;
  const int lane = threadIdx.x % kWarpSize;
  const int kv_head = first_head + static_cast<int>(threadIdx.x) / kWarpSize;
  uint2 query[D::kSteps];
  float factor[2];
  if (p.query_is_new) ptx::wait_for_previous_kernel();  // which rewrites it
  load_query<S>(p, own.token, kv_head, query, factor);
  ptx::wait_for_previous_kernel();  // before anything is written

  const int key_offset = ptx::opaque(D::key_offset());
  const int value_offset = ptx::opaque(D::value_offset());
  int flags = lane % 4 + 4;  // which lane of four; whether this is the first tile
  float acc[D::kSteps][4] = {};
  SoftmaxState state[2];
  int turn = 0;  // slot, or after an odd number of rounds slot + S.units
  const auto slot_of_turn = [&] { return turn >= S.units ? turn - S.units : turn; };
  const auto release = [&] {  // each lane for itself, because compute-sanitizer does not see that one speaks for a warp
    ptx::mbarrier_arrive(D::s_empty() + slot_of_turn());
    turn = turn + 1 == 2 * S.units ? 0 : turn + 1;
  };

#pragma unroll 1
  for (int tiles = tiles_of<S>(own.keys(p.partials)); tiles > 0; --tiles) {
    flags = ptx::opaque(flags);
    uint32_t loaded = 0;  // slices of the tile
    float scores[D::kSlices][4] = {};
    const int other_key_offset = ptx::opaque(key_offset) ^ 64;
#pragma unroll
    for (int unit = 0; unit < D::kTileUnits; ++unit) {
      ptx::mbarrier_wait(D::s_full() + slot_of_turn(), turn >= S.units);
      const unsigned char* s_keys = D::s_unit(slot_of_turn());
      loaded |= D::s_mapped()[slot_of_turn()] << (unit * D::kUnitSlices);
#pragma unroll
      for (int part = 0; part < D::kParts; part += 2) {
        Vector16 low[D::kUnitSlices][2], high[D::kUnitSlices][2];
#pragma unroll
        for (int slice = 0; slice < D::kUnitSlices; ++slice) {
          const int offset = slice * D::kSliceBytes + 64 * part;
          D::load_keys(low[slice], s_keys, key_offset, other_key_offset, offset);
          D::load_keys(high[slice], s_keys, key_offset, other_key_offset, offset + 8 * D::kTokenBytes);
        }
        if (part + 2 >= D::kParts) release();
#pragma unroll
        for (int slice = 0; slice < D::kUnitSlices; ++slice) {
#pragma unroll
          for (int i = 0; i < 4 && 2 * part + i < F::Tile::kGroups; ++i) {
            const int word = i % 2 * 2;
            const Vector16 &first = low[slice][i / 2], &second = high[slice][i / 2];
            const uint32_t r[4] = {first.word[word], second.word[word], first.word[word + 1], second.word[word + 1]};
            uint32_t a[F::kSteps][4];
            F::keys(a, r);
#pragma unroll
            for (int j = 0; j < F::kSteps; ++j) {
              const uint2 b = query[(2 * part + i) * F::kSteps + j];
              ptx::mma_m16n8k16<typename D::Math>(scores[unit * D::kUnitSlices + slice], a[j], b.x, b.y);
            }
          }
        }
      }
    }

#pragma unroll
    for (int slice = 0; slice < D::kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[slice][i] *= F::kCodes ? factor[i % 2] : p.rules.scale * kLog2E;
      }
    }
    const bool masked = flags >= 4 || tiles == 1 || loaded != D::kAllSlices;
    flags &= 3;
    if (masked) {
      const KeyRange range = own.keys(p.partials);
      const int key = tile_key<S>(range, tiles);
#pragma unroll
      for (int slice = 0; slice < D::kSlices; ++slice) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(loaded >> slice & 1u) || !range.contains(key + D::kSlice * slice + D::key(i))) scores[slice][i] = negative_infinity();
        }
      }
    }

    // With 16 bits, slack takes more registers than it saves work.
    move_references<F::kCodes>(scores, state, [&](const float (&factor)[2]) {
      if (!F::kCodes && !__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
      for (int step = 0; step < D::kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[step][i] *= factor[i % 2];
      }
    });
    uint32_t weights[D::kSlices][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float reference = state[e].reference();
#pragma unroll
      for (int slice = 0; slice < D::kSlices; ++slice) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[slice][2 * half + e];
          score = ptx::exp2_approximate(score - reference);
          state[e].row_sum += score;
        }
      }
    }
#pragma unroll
    for (int slice = 0; slice < D::kSlices; ++slice) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[slice][half] = ptx::transpose_8x8(ptx::pack_2<typename D::Math>(scores[slice][2 * half], scores[slice][2 * half + 1]));
      }
    }

    const int other_value_offset = ptx::opaque(value_offset) ^ 32;
#pragma unroll
    for (int unit = 0; unit < D::kTileUnits; ++unit) {
      ptx::mbarrier_wait(D::s_full() + slot_of_turn(), turn >= S.units);
      unsigned char* s_values = D::s_unit(slot_of_turn());
      if (masked) {
        const KeyRange range = own.keys(p.partials);
        const int key = tile_key<S>(range, tiles) + unit * S.unit_keys;
        for (int slice = 0; slice < D::kUnitSlices; ++slice) {
          if (loaded >> (unit * D::kUnitSlices + slice) & 1u) {
            clear_values<S>(s_values + slice * D::kSliceBytes + (kv_head - first_head) * D::kRowBytes, key + D::kSlice * slice, range);
          }
        }
      }
      uint32_t r[D::kUnitSlices][D::kParts][2][4];
#pragma unroll
      for (int slice = 0; slice < D::kUnitSlices; ++slice) {
#pragma unroll
        for (int part = 0; part < D::kParts; ++part) {
          D::load_values(r[slice][part], s_values, value_offset, other_value_offset, slice * D::kSliceBytes + 64 * part, flags);
        }
      }
      release();
#pragma unroll
      for (int slice = 0; slice < D::kUnitSlices; ++slice) {
        const int slice_of_tile = unit * D::kUnitSlices + slice;
        if (!(loaded >> slice_of_tile & 1u)) continue;  // whatever lay there
        const auto& own_weights = weights[slice_of_tile];
#pragma unroll
        for (int group = 0; group < F::Tile::kGroups; ++group) {
          uint32_t a[F::kSteps][4];
          F::values(a, r[slice][group / 2][group % 2]);
#pragma unroll
          for (int j = 0; j < F::kSteps; ++j) {
            ptx::mma_m16n8k16<typename D::Math>(acc[group * F::kSteps + j], a[j], own_weights[0], own_weights[1]);
          }
        }
      }
    }
  }

  const int token = own.token;
  const int split = own.split;
  const int splits = own.plan.count;
  const bool is_final = splits == 1;
  float value_scale[D::kSteps][2];  // on their way while sums are put together
#pragma unroll
  for (int step = 0; step < D::kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) value_scale[step][half] = scale_of<S.cache>(p.value_cache, kv_head, F::value_channel(step, half));
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    state[e].row_sum += __shfl_xor_sync(kFullWarp, state[e].row_sum, 4);
    state[e].row_sum += __shfl_xor_sync(kFullWarp, state[e].row_sum, 8);
    state[e].row_sum += __shfl_xor_sync(kFullWarp, state[e].row_sum, 16);
    const int head = kv_head * p.group_size + min_of(D::row(e), p.group_size - 1);
    const SoftmaxResult result = finalize(state[e], is_final ? sink_of<typename D::Io>(p.out.head_sink, head) : negative_infinity());
#pragma unroll
    for (int step = 0; step < D::kSteps; ++step) {
      acc[step][e] *= result.factor * value_scale[step][0];
      acc[step][2 + e] *= result.factor * value_scale[step][1];
    }
    if (D::row(e) >= p.group_size) continue;
    const int64_t part = partial_row(p.partials, token, split, p.out.num_heads, head);
    if (is_final) {
      if (lane < 4) store_lse(p.out, token, head, result.lse);
      auto* g_row = output_row<typename D::Io>(p.out, token, head, S.head_size);
      store_row<S>(acc, e, [&](int channel, float value) { g_row[channel] = from_float<typename D::Io>(value); },
                   [&](int channel, float2 values) {
                     *reinterpret_cast<uint32_t*>(g_row + channel) = ptx::pack_2<typename D::Io>(values.x, values.y);
                   });
    } else {
      if (lane < 4) p.partials.lse[part] = lse_of(state[e]);
      float* g_row = p.partials.acc + part * S.head_size;
      store_row<S>(acc, e, [&](int channel, float value) { g_row[channel] = value; },
                   [&](int channel, float2 values) { *reinterpret_cast<float2*>(g_row + channel) = values; });
    }
  }
  if (!is_final && p.finished != nullptr) merge_splits<S>(p, own, kv_head);
}

// Work `number`: first the whole splits of all tokens, then the last one of each, the longest first, in four classes. A token
// without keys has one too, which writes its empty rows. So CTAs that start late have little to do. Each thread knows one
// token; of more tokens than threads the order matters less, and they come one after the other, as the splits of a single token do.
template <DecodeHeadsSm90Spec S> __device__ __forceinline__ const Work& find_work(const DecodeHeadsSm90Params& p, int number) {
  using D = DecodeHeads<S>;
  constexpr int kWarps = D::kThreads / kWarpSize;
  Work* s_found = D::s_work();
  uint64_t* s_classes = reinterpret_cast<uint64_t*>(s_found + 2);  // [kWarps], 16 bits a class
  int* s_whole = reinterpret_cast<int*>(s_classes + kWarps);        // [kWarps]
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int tokens = p.sequences.token_count;
  const bool few = tokens > 1 && tokens <= D::kThreads;
  const int token = few ? static_cast<int>(threadIdx.x) : threadIdx.x == 0 ? number % tokens : tokens;
  Work own{};
  own.token = token;
  int rest = 0;  // keys of the last split
  if (token < tokens) {
    own.sequence = sequence_of_one_token(p.sequences, token, capacity_of(p.blocks));
    if (own.sequence.is_active()) {
      own.admitted = admitted_keys(p.rules, position_of_token(p.sequences, own.sequence, token), token - own.sequence.begin, own.sequence.kv_len);
    }
    own.plan = plan_splits(p.partials, own.admitted);
    rest = own.admitted.end - own.plan.first - max_of(0, own.plan.count - 1) * p.partials.split_size;
  }
  const int whole = max_of(0, own.plan.count - 1);
  int place = number;  // of this token's first work
  int last_place = number;
  if (few) {
    place = whole;
#pragma unroll 1
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(kFullWarp, place, distance);
      if (lane >= distance) place += other;
    }
    if (lane == kWarpSize - 1) s_whole[warp] = place;
    place -= whole;
    const int quarter = p.partials.split_size / 4;  // of a multiple of 16
    const int own_class = token >= tokens ? -1 : 3 - (rest >= quarter) - (rest >= 2 * quarter) - (rest >= 3 * quarter);
    uint64_t classes = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t alike = __ballot_sync(kFullWarp, own_class == c);
      classes |= static_cast<uint64_t>(__popc(alike)) << (16 * c);
      if (own_class == c) last_place = __popc(alike & ((1u << lane) - 1));
    }
    if (lane == 0) s_classes[warp] = classes;
    if (threadIdx.x == 0) s_found->token = -1;
    __syncthreads();  // the counts of all warps are there
    uint64_t all = 0, before = 0;
    int all_whole = 0;
#pragma unroll 1
    for (int w = 0; w < ceil_div(tokens, kWarpSize); ++w) {  // those whose threads have a token
      if (w == warp) {
        before = all;
        place += all_whole;
      }
      all += s_classes[w];
      all_whole += s_whole[w];
    }
    last_place += all_whole;
    const uint64_t first_of_class = all * 0x0001'0001'0001'0000u;  // how many the classes ahead have, and 0 for the first one
    last_place += static_cast<int>((first_of_class + before) >> (16 * max_of(0, own_class)) & 0xffffu);
  }
  const bool in_whole = number >= place && number < place + whole;
  own.split = !few ? number / tokens : in_whole ? number - place : whole;
  if (token < tokens && (!few || in_whole || number == last_place)) *s_found = own;
  __syncthreads();  // the work is found
  return *s_found;
}

template <DecodeHeadsSm90Spec S>
__global__ void __launch_bounds__(DecodeHeads<S>::kThreads, DecodeHeads<S>::kCtas) decode_heads_sm90(const __grid_constant__ DecodeHeadsSm90Params p) {
  static_assert(S.unit_keys % 16 == 0 && S.tile_keys % S.unit_keys == 0, "a unit is whole slices, a tile whole units");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache holds the io type");
  using D = DecodeHeads<S>;
  const int head_tile = static_cast<int>(blockIdx.x % p.head_tiles);
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S.units; ++i) {
      ptx::mbarrier_init(D::s_full() + i, 1);
      ptx::mbarrier_init(D::s_empty() + i, S.heads * kWarpSize);
    }
    ptx::mbarrier_init_fence();
  }
  const Work& own = find_work<S>(p, static_cast<int>(blockIdx.x / p.head_tiles));  // its barrier is that of the initialized ones, too
  if (own.token < 0 || own.split >= own.plan.count) {
    ptx::wait_for_previous_kernel();
    if (own.token >= 0 && own.split == 0) {
      const RowTile rows{own.sequence, own.token - own.sequence.begin, 0, S.heads * p.group_size, 1 << 30};
      write_empty_tile<typename D::Io, D::kThreads>(p.out, rows, head_tile * S.heads * p.group_size, S.head_size);
    }
    return;
  }
  const int first_head = head_tile * S.heads;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);  // the same in all lanes, visibly
  if (warp >= S.heads) {
    ptx::decrease_registers<D::kLoadRegisters>();
    if (warp == S.heads) load_tiles<S>(p, own, first_head);
  } else {
    ptx::increase_registers<D::kComputeRegisters>();
    attend<S>(p, own, first_head);
  }
}

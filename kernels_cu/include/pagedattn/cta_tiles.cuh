// Key and value tiles that all warps of a CTA share, fetched kStages - 1 tiles ahead.
#pragma once

#include <pagedattn/kv_tile.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/split.cuh>

// The tiles of kKeys keys that cover a range of a sequence, and which of their blocks exist. The table is read one tile early:
// whoever goes on to a tile needs the answer at once. kAhead: how many tiles he is ahead of the one in use.
template <int kKeys, int kAhead> struct TileBlocks {
  static constexpr int kBlocks = kKeys / kKeyAlignment;  // of 16 keys; each lies in one block of the cache
  static_assert(kBlocks * (kAhead + 1) <= 32, "`mapped` remembers the blocks of every tile under way");

  const BlockTable& blocks;
  KeyRange range;
  int sequence;
  int first;              // key of tile 0
  int count;              // tiles
  int next_block;         // lane l: block of the l-th 16 keys of the tile that comes next
  uint32_t mapped = 0;    // which of them exist, of the tiles that came so far, the latest in the low bits

  __device__ __forceinline__ TileBlocks(const BlockTable& table, const KeyRange& wanted, int sequence_index)
      : blocks(table), range(wanted), sequence(sequence_index) {
    first = range.begin / kKeyAlignment * kKeyAlignment;
    count = range.end > range.begin ? ceil_div(range.end - first, kKeys) : 0;
    look_up(0);
  }

  __device__ __forceinline__ int key_of(int i) const { return first + i * kKeys; }

  // Takes the tile that was looked up for the latest.
  __device__ __forceinline__ void take() {
    mapped = mapped << kBlocks | (__ballot_sync(kFullWarp, next_block != kUnmapped) & ((1u << kBlocks) - 1u));
  }
  __device__ __forceinline__ void look_up(int i) {
    const int lane = threadIdx.x % kWarpSize;
    const int key = key_of(i) + kKeyAlignment * lane;
    next_block = lane < kBlocks && i < count && key < range.end ? block_of_position(blocks, sequence, key) : kUnmapped;
  }

  // Bits of the current tile's 16-key blocks.
  __device__ __forceinline__ uint32_t mapped_blocks() const { return mapped >> (kAhead * kBlocks) & ((1u << kBlocks) - 1u); }
  // Whether every key of tile i exists and is in `every`, so that no score needs a mask.
  __device__ __forceinline__ bool is_open(int i, const KeyRange& every) const {
    return mapped_blocks() == (1u << kBlocks) - 1u && key_of(i) >= every.begin && key_of(i) <= every.end - kKeys;
  }
};

// kValueSize is 0 when values are the first channels of the key rows: LATENT.
template <DType Cache, int kHeadSize, int kValueSize, int kKeys, int kStages, int kWarps>
struct CtaTiles : TileBlocks<kKeys, kStages - 1> {
  using Blocks = TileBlocks<kKeys, kStages - 1>;
  using KeyShape = TileShape<Cache, kHeadSize>;
  using ValueShape = TileShape<Cache, kValueSize == 0 ? kHeadSize : kValueSize>;
  static constexpr int kKeyBytes = kKeys * KeyShape::kStride;
  static constexpr int kStageBytes = kKeyBytes + (kValueSize == 0 ? 0 : kKeys * ValueShape::kStride);
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kRowsOfWarp = kKeys / kWarps;  // that a warp copies
  static constexpr int kRowsAtOnce = min_of(kRowsOfWarp, kKeyAlignment);
  static_assert(kKeys % kWarps == 0 && kKeys % kKeyAlignment == 0 && kRowsOfWarp % kRowsAtOnce == 0 &&
                    kKeyAlignment % kRowsAtOnce == 0, "the rows that a warp copies at once lie in one block");
  using Blocks::blocks, Blocks::range, Blocks::count, Blocks::next_block, Blocks::key_of;

  KvHead<Cache> keys;     // rows outside the range are zeros
  KvHead<Cache> values;
  unsigned char* s_stages;
  bool with_values;       // false: only keys are wanted

  __device__ __forceinline__ CtaTiles(const BlockTable& table, const KvCache& key_cache, const KvCache& value_cache, int kv_head,
                                      const KeyRange& wanted, int sequence_index, unsigned char* s_memory, bool load_values)
      : Blocks(table, wanted, sequence_index), keys(key_cache, kv_head), values(value_cache, kv_head), s_stages(s_memory),
        with_values(load_values) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue(i);
  }

  __device__ __forceinline__ unsigned char* key_tile(int i) const { return s_stages + i % kStages * kStageBytes; }
  __device__ __forceinline__ unsigned char* value_tile(int i) const { return key_tile(i) + (kValueSize == 0 ? 0 : kKeyBytes); }

  // Makes tile i visible to the CTA, and with it all that was stored to shared memory before; starts tile i + kStages - 1
  // in the stage of tile i - 1, which nobody reads any more.
  __device__ __forceinline__ void advance(int i) {
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps are done with tile i - 1, whose place is taken
      issue(i);
    }
    ptx::cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();
    if constexpr (kStages > 1) issue(i + kStages - 1);
  }

  // Starts the copies of tile i; tiles are issued one after the other.
  __device__ __forceinline__ void issue(int i) {
    this->take();
    const int row = static_cast<int>(threadIdx.x) / kWarpSize * kRowsOfWarp;
#pragma unroll
    for (int part = 0; part < kRowsOfWarp; part += kRowsAtOnce) {
      const int block = __shfl_sync(kFullWarp, next_block, (row + part) / kKeyAlignment);
      if (i >= count) continue;
      copy<KeyShape>(key_tile(i), keys, i, row + part, block);
      if constexpr (kValueSize != 0) {
        if (with_values) copy<ValueShape>(value_tile(i), values, i, row + part, block);
      }
    }
    ptx::cp_async_commit();
    this->look_up(i + 1);
  }

 private:
  template <class Shape>
  __device__ __forceinline__ void copy(unsigned char* s_tile, const KvHead<Cache>& head, int i, int row, int block) const {
    const int key = key_of(i) + row;
    const unsigned char* g_first = head.row(block == kUnmapped ? 0 : block, offset_in_block(blocks, key));
    copy_rows<Shape, kRowsAtOnce>(s_tile + row * Shape::kStride, key, range.begin, block == kUnmapped ? 0 : range.end, g_first,
                                  head.token_bytes(), head.alignment, head.base);
  }
};

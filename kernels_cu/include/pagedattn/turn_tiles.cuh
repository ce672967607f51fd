// Key and value tiles that all warps of a CTA share, one slot for each: while one product reads its slot, the other slot is filled.
//
//   turn      keys 0       values 0     keys 1       values 1
//   reads     K0           V0           K1           V1
//   copies    V0           K1           V1           K2
//   plans     K1           V1           K2           V2
//
// A turn begins with a barrier. Its copies are planned in the turn before, and issued one by one among its products: nothing but
// the barrier stands between the products of two turns.
#pragma once

#include <pagedattn/kv_tile.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/split.cuh>

template <DType Cache, int kHeadSize, int kKeys, int kWarps> struct TurnTiles {
  using Shape = TileShape<Cache, kHeadSize>;
  static constexpr int kBlocks = kKeys / kKeyAlignment;  // of 16 keys; each lies in one block of the cache
  static constexpr int kSlotBytes = kKeys * Shape::kStride;
  static constexpr int kRows = kKeys / kWarps;  // that a warp copies
  // Rows that start on 16 bytes and are a multiple of it are copied a few lanes to a row; others by copy_rows, at once.
  static constexpr bool kInParts = Shape::kRowBytes % 16 == 0 && kRows % Shape::kRowsAtOnce == 0;
  static constexpr int kParts = kInParts ? kRows / Shape::kRowsAtOnce : 0;
  static_assert(kKeys % kWarps == 0 && kKeys % kKeyAlignment == 0 && kKeyAlignment % kRows == 0, "the rows of a warp lie in one block");
  static_assert(Shape::kVectors <= kWarpSize, "a warp copies whole rows");

  const BlockTable& blocks;
  KvHead<Cache> keys;
  KvHead<Cache> values;
  KeyRange range;         // rows outside are zeros
  unsigned char* s_keys;
  unsigned char* s_values;
  int sequence;
  int key;                // first of the current tile
  uint32_t mapped;        // which of the 16-key blocks of the current tile exist
  // The next tile.
  int next_entry;         // of the table, for the 16 keys that are this lane's
  int next_block;         // that this warp copies from
  uint32_t next_mapped;
  // The copies that are planned.
  bool in_parts;
  const unsigned char* g_row;  // source of the next part
  uint32_t wanted;             // bit i: this lane's row of part i exists

  __device__ __forceinline__ TurnTiles(const BlockTable& table, const KvCache& key_cache, const KvCache& value_cache, int kv_head,
                                       const KeyRange& wanted_keys, int sequence_index, unsigned char* s_memory)
      : blocks(table), keys(key_cache, kv_head), values(value_cache, kv_head), range(wanted_keys), s_keys(s_memory),
        s_values(s_memory + kSlotBytes), sequence(sequence_index) {
    in_parts = kInParts && keys.alignment == 16 && values.alignment == 16;
    key = range.begin / kKeyAlignment * kKeyAlignment - kKeys;
    look_up(key + kKeys);
    plan_keys();
    if (!in_parts) copy_whole(keys, s_keys, key + kKeys);
#pragma unroll
    for (int part = 0; part < kParts; ++part) copy_keys(part);
    plan_values();
  }

  __device__ __forceinline__ bool has_more() const { return key + kKeys < range.end; }

  // Moves to the next tile and makes its keys visible to the CTA, with all that was stored to shared memory before. To be followed by
  // copy_values and then plan_keys.
  __device__ __forceinline__ void take_keys() {
    end_turn();
    key += kKeys;
    mapped = next_mapped;
    if (!in_parts) copy_whole(values, s_values, key);
    look_up(key + kKeys);
  }
  // Makes the values of the tile visible. To be followed by copy_keys and then plan_values.
  __device__ __forceinline__ void take_values() {
    end_turn();
    if (!in_parts) copy_whole(keys, s_keys, key + kKeys);
  }

  // Issue part `part` of kParts.
  __device__ __forceinline__ void copy_values(int part) { copy_part(values, s_values, part); }
  __device__ __forceinline__ void copy_keys(int part) { copy_part(keys, s_keys, part); }

  __device__ __forceinline__ void plan_keys() {
    const int block = block_of_entry(blocks, next_entry);
    next_mapped = __ballot_sync(kFullWarp, block != kUnmapped) & ((1u << kBlocks) - 1u);
    next_block = __shfl_sync(kFullWarp, block, first_row() / kKeyAlignment);
    plan(keys);
  }
  __device__ __forceinline__ void plan_values() { plan(values); }

  // Whether every key of the current tile exists and is in `every`, so that no score needs a mask.
  __device__ __forceinline__ bool is_open(const KeyRange& every) const {
    return mapped == (1u << kBlocks) - 1u && key >= every.begin && key <= every.end - kKeys;
  }

 private:
  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kWarpSize * kRows; }
  static __device__ __forceinline__ int lane_row() { return threadIdx.x % kWarpSize / Shape::kLanes; }
  static __device__ __forceinline__ int lane_byte() { return 16 * (threadIdx.x % Shape::kLanes); }

  __device__ __forceinline__ void end_turn() const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // What the table says is checked when it is needed. Behind the range it does not matter.
  __device__ __forceinline__ void look_up(int first) {
    const int position = first + kKeyAlignment * (threadIdx.x % kWarpSize % kBlocks);
    next_entry = entry_of_position(blocks, sequence, min_of(position, range.end - 1));
  }

  // Of the lane's rows of the parts, how many lie less than `distance` behind the first.
  static __device__ __forceinline__ int parts_within(int distance) {
    return min_of((max_of(distance, 0) + Shape::kRowsAtOnce - 1) / Shape::kRowsAtOnce, kParts);
  }

  __device__ __forceinline__ const unsigned char* first_source(const KvHead<Cache>& head, int first, int more) const {
    return head.row(next_block == kUnmapped ? 0 : next_block, offset_in_block(blocks, first + first_row()) + more);
  }
  __device__ __forceinline__ int end_of_block() const { return next_block == kUnmapped ? 0 : range.end; }

  __device__ __forceinline__ void plan(const KvHead<Cache>& head) {
    const int own = key + kKeys + first_row() + lane_row();
    g_row = first_source(head, key + kKeys, lane_row()) + lane_byte();
    wanted = ((1u << parts_within(end_of_block() - own)) - 1u) & ~((1u << parts_within(range.begin - own)) - 1u);
    if (Shape::kRowBytes < 16 * Shape::kLanes && lane_byte() >= Shape::kRowBytes) wanted = 0;  // zeros that pad the row
  }

  __device__ __forceinline__ void copy_part(const KvHead<Cache>& head, unsigned char* s_tile, int part) {
    constexpr bool kAllLanes = Shape::kVectors == Shape::kLanes;
    if (in_parts && (kAllLanes || lane_byte() < 16 * Shape::kVectors)) {
      unsigned char* s_first = s_tile + (first_row() + lane_row()) * Shape::kStride + lane_byte();
      ptx::cp_async<16>(s_first + part * Shape::kRowsAtOnce * Shape::kStride, g_row, wanted >> part & 1u ? 16 : 0);
    }
    g_row += Shape::kRowsAtOnce * head.token_bytes();
  }

  __device__ __forceinline__ void copy_whole(const KvHead<Cache>& head, unsigned char* s_tile, int first) const {
    copy_rows<Shape, kRows>(s_tile + first_row() * Shape::kStride, first + first_row(), range.begin, end_of_block(),
                            first_source(head, first, 0), head.token_bytes(), head.alignment, head.base);
  }
};

// Where a new token is stored.
#pragma once

#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/seqlens.cuh>

struct Slot {
  int block;   // kUnmapped: do not write
  int offset;  // in the block
};

// `slot_mapping` is [token_count], or null for the slot that follows from the token's place in its sequence.
__device__ __forceinline__ Slot slot_of_token(const int* slot_mapping, const BlockTable& table, const Sequence& s, int token) {
  Slot none{kUnmapped, 0};
  if (!s.is_active()) return none;
  if (slot_mapping != nullptr) {
    const int slot = slot_mapping[token];
    if (slot < 0 || slot >= static_cast<int64_t>(table.num_blocks) * table.block_size) return none;
    return {slot / table.block_size, slot % table.block_size};
  }
  const int64_t position = static_cast<int64_t>(s.past) + (token - s.begin);
  if (position >= capacity_of(table)) return none;
  return {block_of_position(table, s.index, static_cast<int>(position)), offset_in_block(table, static_cast<int>(position))};
}

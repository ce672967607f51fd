// Where position k of sequence b of head h lives in a cache.
//
// Paged      entry = entries[b * max_blocks_per_sequence + k / block_size] names the block; block_size is a power of two.
// Contiguous entries is null: sequence b owns block b, and block_size is its capacity, any number.
//
// Strides count storage elements, so a cache may be a strided view; the channels of one row are contiguous. Offsets are
// 64-bit. A table entry is checked before it is used: what it may not name is unmapped.
#pragma once

#include <pagedattn/types.cuh>

struct BlockTable {
  const int* entries;  // [batch_size, max_blocks_per_sequence], or null: contiguous
  int num_blocks;
  int block_size;
  int max_blocks_per_sequence;
};

struct KvCache {
  const void* data;     // [num_blocks, block_size, kv_num_heads, head_size]
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  const float* scale;   // [1], or [kv_num_heads, 1, head_size], or null
  int64_t scale_head_stride;  // 0 or head_size
  int scale_channel_stride;   // 0 or 1
};

constexpr int kUnmapped = -1;

// Positions that one sequence can have.
__device__ __forceinline__ int64_t capacity_of(const BlockTable& table) {
  const int64_t blocks = table.entries != nullptr ? table.max_blocks_per_sequence : 1;
  const int64_t capacity = blocks * table.block_size;
  return capacity < 0x7fffffff ? capacity : 0x7fffffff;
}

// What the table has for a position in [0, capacity).
__device__ __forceinline__ int entry_of_position(const BlockTable& table, int sequence, int position) {
  if (table.entries == nullptr) return sequence;
  const int shift = 31 - __clz(table.block_size);
  return table.entries[static_cast<int64_t>(sequence) * table.max_blocks_per_sequence + (position >> shift)];
}

// The block that an entry names, or kUnmapped.
__device__ __forceinline__ int block_of_entry(const BlockTable& table, int entry) {
  return entry >= 0 && entry < table.num_blocks ? entry : kUnmapped;
}

// Block of a position in [0, capacity), or kUnmapped.
__device__ __forceinline__ int block_of_position(const BlockTable& table, int sequence, int position) {
  return block_of_entry(table, entry_of_position(table, sequence, position));
}

__device__ __forceinline__ int offset_in_block(const BlockTable& table, int position) {
  return table.entries != nullptr ? position & (table.block_size - 1) : position;
}

// One head of one cache, as bytes. The strides stay in the Params, which cost no registers.
template <DType T> struct KvHead {
  static constexpr int kBytes = sizeof(element_t<T>);
  const KvCache& cache;
  const unsigned char* base;
  int alignment;  // 16 or 4: every row starts on a multiple of it; 1: nothing is known

  __device__ __forceinline__ KvHead(const KvCache& whole, int head)
      : cache(whole), base(static_cast<const unsigned char*>(whole.data) + head * whole.head_stride * kBytes) {
    const uint64_t all = reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>((whole.block_stride | whole.token_stride) * kBytes);
    alignment = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
  }

  __device__ __forceinline__ int64_t token_bytes() const { return cache.token_stride * kBytes; }
  __device__ __forceinline__ const unsigned char* row(int block, int offset) const {
    return base + block * cache.block_stride * kBytes + offset * token_bytes();
  }
};

// Scale of a channel; 1 when the cache is not quantized.
template <DType T> __device__ __forceinline__ float scale_of(const KvCache& cache, int head, int channel) {
  if constexpr (!is_quantized(T)) return 1.0f;
  return cache.scale[head * cache.scale_head_stride + static_cast<int64_t>(channel) * cache.scale_channel_stride];
}

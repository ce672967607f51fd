// Tiles of cache rows in shared memory: their shape, and how rows get there.
//
// A tile holds the rows as they are stored, codes included; kv_fragments.cuh turns codes into operands on the way into
// registers, so a quantized tile costs its stored bytes and no more. Rows are padded with zeros to a whole number of
// tensor-core steps, and their stride is an odd number of 16-byte units: eight consecutive rows then start in eight
// different groups of four banks, and the fragment loads do not conflict.
#pragma once

#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/ptx/cp_async.cuh>

// Channels that one fragment load covers: a tile row is a multiple of it.
__host__ __device__ constexpr int channel_step(DType cache) { return is_quantized(cache) ? 32 : 16; }

// Bytes from row to row of a tile of `channels` logical channels.
__host__ __device__ constexpr int tile_row_stride(DType cache, int channels) {
  return 16 * (ceil_div(row_bytes_of(cache, round_up(channels, channel_step(cache))), 16) | 1);
}

template <DType Cache, int kChannels> struct TileShape {
  static constexpr int kPadded = round_up(kChannels, channel_step(Cache));
  static constexpr int kStride = tile_row_stride(Cache, kChannels);
  static constexpr int kRowBytes = row_bytes_of(Cache, kChannels);                // in global memory
  static constexpr int kVectors = ceil_div(row_bytes_of(Cache, kPadded), 16);     // that operands are read from
};

// Copies 16 bytes of which the first `valid` exist; the rest become zeros. Asynchronous unless the rows are too odd.
__device__ __forceinline__ void copy_16(unsigned char* s_target, const unsigned char* g_source, int valid, int alignment) {
  if (alignment == 16) {
    ptx::cp_async<16>(s_target, g_source, valid);
  } else if (alignment == 4) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int rest = valid - i;
      ptx::cp_async<4>(s_target + i, rest > 0 ? g_source + i : g_source, rest < 0 ? 0 : rest < 4 ? rest : 4);
    }
  } else {
    Vector16 v{};
    for (int i = 0; i < valid; ++i) v.word[i / 4] |= static_cast<uint32_t>(g_source[i]) << (8 * (i % 4));
    *reinterpret_cast<Vector16*>(s_target) = v;
  }
}

// Starts the copy of kRows rows by kThreads threads; `thread` is this one's index among them. Row r holds position
// first + r; rows outside [begin, end), and all rows when `row_of` returns null for them, become zeros: what a token may
// not see is never read, and cannot reach it as 0 x NaN.
// `row_of(r)` is the address of row r's first byte, asked only for rows inside the range.
template <class Shape, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void copy_rows(unsigned char* s_tile, int first, int begin, int end, int alignment, int thread,
                                          const unsigned char* g_any, const RowOf& row_of) {
  constexpr int kTotal = kRows * Shape::kVectors;
#pragma unroll
  for (int base = 0; base < kTotal; base += kThreads) {
    const int i = base + thread;
    if (kTotal % kThreads != 0 && i >= kTotal) break;
    const int row = i / Shape::kVectors;
    const int byte = (i % Shape::kVectors) * 16;
    const bool wanted = first + row >= begin && first + row < end;
    const unsigned char* g_row = wanted ? row_of(row) : nullptr;
    const int valid = g_row == nullptr ? 0 : Shape::kRowBytes - byte < 16 ? max_of(0, Shape::kRowBytes - byte) : 16;
    copy_16(s_tile + row * Shape::kStride + byte, valid > 0 ? g_row + byte : g_any, valid, alignment);
  }
}

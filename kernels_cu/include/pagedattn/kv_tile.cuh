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
  // A power of two of lanes side by side copy a row: the addresses of a lane then differ by constants.
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : kVectors > 2 ? 4 : kVectors;
  static constexpr int kRowsAtOnce = kWarpSize / kLanes;
};

// Copies 16 bytes, of which the first `valid` exist, from a source of which no more than `alignment` is known; the rest
// become zeros.
__device__ __forceinline__ void copy_16(unsigned char* s_target, const unsigned char* g_source, int valid, int alignment) {
  if (alignment == 16) {
    ptx::cp_async<16>(s_target, g_source, valid);
  } else if (alignment == 4) {
#pragma unroll 1
    for (int i = 0; i < 16; i += 4) {
      const int rest = valid - i;
      ptx::cp_async<4>(s_target + i, rest > 0 ? g_source + i : g_source, rest < 0 ? 0 : rest < 4 ? rest : 4);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) s_target[i] = i < valid ? g_source[i] : 0;
  }
}

// Starts the copy of kRows neighbouring rows of one block by a warp. Row r holds position first + r and lies r * token_bytes
// behind `g_first`. Rows outside [begin, end) become zeros and are not read: what a token may not see cannot reach it, not
// even as 0 x NaN. `g_any` is an address that is never read but may be named.
template <class Shape, int kRows>
__device__ __forceinline__ void copy_rows(unsigned char* s_tile, int first, int begin, int end, const unsigned char* g_first,
                                          int64_t token_bytes, int alignment, const unsigned char* g_any) {
  constexpr int kVectors = Shape::kVectors;
  constexpr int kLanes = Shape::kLanes;
  constexpr int kRowsAtOnce = Shape::kRowsAtOnce;
  const int lane_row = threadIdx.x % kWarpSize / kLanes;
  const int lane_byte = 16 * (threadIdx.x % kLanes);
  // Nearly every tile is whole and aligned, and a warp that spends its time on addresses leaves the memory idle: so that
  // case is three instructions a copy, and all others share one small loop.
  if (Shape::kRowBytes % 16 == 0 && kRows % kRowsAtOnce == 0 && alignment == 16 && first >= begin && first + kRows <= end) {
    const unsigned char* g_source = g_first + lane_row * token_bytes + lane_byte;
    unsigned char* s_target = s_tile + lane_row * Shape::kStride + lane_byte;
#pragma unroll
    for (int base = 0; base < kRows; base += kRowsAtOnce) {
#pragma unroll
      for (int part = 0; part < kVectors; part += kLanes) {
        const int byte = 16 * part + lane_byte;
        if (kVectors % kLanes != 0 && byte >= 16 * kVectors) break;
        unsigned char* s_vector = s_target + base * Shape::kStride + 16 * part;
        if (16 * kVectors == Shape::kRowBytes) {
          ptx::cp_async<16>(s_vector, g_source + 16 * part);
        } else {  // the row is padded with zeros
          ptx::cp_async<16>(s_vector, byte < Shape::kRowBytes ? g_source + 16 * part : g_any, byte < Shape::kRowBytes ? 16 : 0);
        }
      }
      g_source += kRowsAtOnce * token_bytes;
    }
    return;
  }
#pragma unroll 1
  for (int row = lane_row; row < kRows; row += kRowsAtOnce) {
    const bool wanted = first + row >= begin && first + row < end;
#pragma unroll 1
    for (int byte = lane_byte; byte < 16 * kVectors; byte += 16 * kLanes) {
      const int valid = wanted ? max_of(0, min_of(16, Shape::kRowBytes - byte)) : 0;
      copy_16(s_tile + row * Shape::kStride + byte, valid > 0 ? g_first + row * token_bytes + byte : g_any, valid, alignment);
    }
  }
}

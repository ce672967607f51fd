// decode_split_kv.cu: attention of few query rows over one split of their keys. Bound by memory: each key and value row of
// the split is read once, in place, and serves all query heads of its group and all tokens of the tile.
//
//   grid    x: (row tile x split_count + split) x head_tiles + head tile, so that CTAs side by side read the same pages
//   CTA     S.warps warps; tiles of S.tile_keys keys go round the warps, each with a ring of its own, and meet once at the end
//   reads   query once; key and value rows that the tile admits once
//   writes  output and lse where there is one split or none; else acc and lse of this split, which the last CTA of the
//           tile to finish merges (when there are counters), or combine_splits.cu
//   smem    | what the end needs | queries | factors, key ranges, bias rows of the rows | per warp: S.units x tile_keys rows |;
//           later | what the end needs | acc | states |
// Invariants
//   A row tile is one token's query heads (kRows of them at most) or, with shares_tokens, a tile of row_tiles.cuh.
//   Units of a ring hold keys and values in turn: K0 V0 K1 V1 .. A unit is refilled as soon as it has been used.
//   Tiles start on multiples of 16; 16 keys lie in one block. An unmapped block is neither read nor attended.
//   Rows that no token of the tile admits are zeros in shared memory: nothing that is masked can reach the sums.
//   Lengths that enter the mask are read here; host bounds only size the grid. Empty splits leave at once.
//   A row's result depends neither on the other rows of its tile nor on which split finished last.
#include <pagedattn/column_softmax.cuh>
#include <pagedattn/key_fragments.cuh>
#include <pagedattn/hidden_values.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>

struct DecodeSpec {
  DType io;
  DType cache;
  int head_size;
  int row_tiles;  // of 8 query rows
  int warps;
  int ctas;       // of a multiprocessor: bounds the registers
  int tile_keys;
  int units;      // of a warp's ring
  bool has_rules;      // softcap or attention_bias
  bool shares_tokens;  // a tile holds the rows of neighbouring tokens of a sequence
};

struct DecodeParams {
  const void* query;     // [token_count, num_heads, head_size], rows query_stride apart
  int64_t query_stride;  // elements
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;
  ScoreRules rules;
  Output out;
  Partials partials;
  int* finished;         // [row tiles, head_tiles], zeros: splits that are done; null: no merge here
  int group_size;        // query heads of a kv head
  int row_chunks;        // tiles of a token's group; 1 with shares_tokens
  int head_tiles;        // kv heads x row_chunks
};

struct BiasRow { const void* g_bias; };

// What the end of the kernel needs to know again: it waits in shared memory, where it costs the main loop no registers.
struct KeptTile {
  RowTile tile;
  int splits;
  int is_last;  // whether this split was the last of its tile to finish
};

template <DecodeSpec S> struct Decode {
  using Io = element_t<S.io>;
  using F = KeyFragments<S.io, S.cache, S.head_size>;
  using Math = typename F::Math;
  using Tile = ColumnTile<S.cache, S.head_size>;
  static constexpr int kThreads = S.warps * kWarpSize;
  static constexpr int kNTiles = S.row_tiles;
  static constexpr int kRows = 8 * S.row_tiles;
  static constexpr int kBlocks = S.tile_keys / 16;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kUnitBytes = S.tile_keys * Tile::kStride;
  static constexpr int kQueryBytes = kRows * 2 * Tile::kPadded;
  static constexpr int kRowBytes = kRows * 24;  // of what the loop looks up for a row
  static constexpr int kKeptBytes = 64 + 4 * kRows + (F::kCodes ? 4 * Tile::kPadded : 0);
  static constexpr bool kQueryInRegisters = S.row_tiles * kSteps <= 16;
  static constexpr bool kRefillsLate = S.row_tiles > 2;  // when scores have made room for the addresses
  static constexpr int kAccStride = Tile::kPadded + 4;  // floats; the eight rows of a store start in different banks

  static __device__ __forceinline__ KeptTile* s_kept() { return shared_memory<KeptTile>(); }
  static __device__ __forceinline__ float* s_sink() { return reinterpret_cast<float*>(shared_memory<unsigned char>() + 64); }  // [kRows]
  static __device__ __forceinline__ float* s_value_scale() { return s_sink() + kRows; }  // [channels], of a quantized cache
  static __device__ __forceinline__ unsigned char* s_work() { return shared_memory<unsigned char>() + kKeptBytes; }
  static __device__ __forceinline__ float* s_factor() { return reinterpret_cast<float*>(s_work() + kQueryBytes); }
  static __device__ __forceinline__ KeyRange* s_keys() { return reinterpret_cast<KeyRange*>(s_factor() + 2 * kRows); }
  static __device__ __forceinline__ BiasRow* s_bias() { return reinterpret_cast<BiasRow*>(s_keys() + kRows); }
  static __device__ __forceinline__ unsigned char* s_units() { return s_work() + kQueryBytes + kRowBytes; }
  // Row of element `element` (0 or 1) of row tile n in this lane.
  static __device__ __forceinline__ int row(int n, int element) { return 8 * n + 2 * (threadIdx.x % 4) + element; }
  // Key of a score: element i of a 16-key block.
  static __device__ __forceinline__ int key(int block, int i) { return 16 * block + threadIdx.x % kWarpSize / 4 + 8 * (i / 2); }
};

// How a warp copies rows of a cache into a unit.
template <DecodeSpec S> struct RowCopy {
  using D = Decode<S>;
  using Tile = typename D::Tile;
  static constexpr int kVectors = Tile::kVectors;
  // A power of two of lanes side by side on a row: the addresses of a lane then differ by constants.
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : kVectors > 2 ? 4 : 2;
  static constexpr int kRowsAtOnce = kWarpSize / kLanes;

  // Bytes from a row of a block to where this lane starts.
  static __device__ __forceinline__ int64_t lane_offset(int64_t token_bytes) {
    return threadIdx.x % kWarpSize / kLanes * token_bytes + 16 * (threadIdx.x % kLanes);
  }

  // Copies 16 rows of one block that are whole and aligned. `g_source` is this lane's place in the first of them.
  static __device__ __forceinline__ void fast(unsigned char* s_rows, const unsigned char* g_source, int64_t token_bytes,
                                              const unsigned char* g_any) {
    const int lane_byte = 16 * (threadIdx.x % kLanes);
    unsigned char* s_target = s_rows + threadIdx.x % kWarpSize / kLanes * Tile::kStride + lane_byte;
#pragma unroll
    for (int base = 0; base < 16; base += kRowsAtOnce) {
#pragma unroll
      for (int part = 0; part < kVectors; part += kLanes) {
        const int byte = 16 * part + lane_byte;
        if (kVectors % kLanes != 0 && byte >= 16 * kVectors) break;
        unsigned char* s_vector = s_target + base * Tile::kStride + 16 * part;
        if (16 * kVectors == Tile::kRowBytes) {
          ptx::cp_async<16>(s_vector, g_source + 16 * part);
        } else {  // the row is padded with zeros
          ptx::cp_async<16>(s_vector, byte < Tile::kRowBytes ? g_source + 16 * part : g_any, byte < Tile::kRowBytes ? 16 : 0);
        }
      }
      g_source += kRowsAtOnce * token_bytes;
    }
  }
};

// One warp's tiles: which blocks each lies in, and the ring that they pass through.
template <DecodeSpec S> struct Ring {
  using D = Decode<S>;
  using Copy = RowCopy<S>;
  using Tile = typename D::Tile;
  static constexpr int kBlocks = D::kBlocks;
  static constexpr int kBatch = kWarpSize / kBlocks;  // tiles whose blocks a warp looks up at once
  static constexpr uint32_t kAllBlocks = (1u << kBlocks) - 1;
  const BlockTable& blocks;
  KvHead<S.cache> keys;
  KvHead<S.cache> values;
  KeyRange range;             // of the split
  int sequence;
  int tile_count;             // of this warp
  bool regular = false;       // rows are aligned, and their places fit 32 bits
  int issued = -1;            // tile whose keys were fetched last
  int next_blocks = kUnmapped;   // lane l: block l % kBlocks of tile l / kBlocks of the next batch of tiles
  int batch_blocks = kUnmapped;  // likewise, of this batch
  uint32_t batch_keys = 0;    // where in the cache that block's keys start, in units of 16 bytes
  uint32_t batch_values = 0;
  uint32_t batch_mapped = 0;  // bit l: whether the block of lane l is mapped
  uint32_t mapped = 0;        // bits kBlocks i ..: whether the blocks of the tile issued i tiles ago are
  int slot = 0;               // unit that is used, and then filled, next

  __device__ __forceinline__ int key_of(int tile) const {
    return range.begin / 16 * 16 + S.tile_keys * (static_cast<int>(threadIdx.x) / kWarpSize + tile * S.warps);
  }
  __device__ __forceinline__ unsigned char* unit() const {
    return D::s_units() + (threadIdx.x / kWarpSize * S.units + slot) * D::kUnitBytes;
  }
  __device__ __forceinline__ void advance() { slot = slot + 1 == S.units ? 0 : slot + 1; }

  __device__ __forceinline__ void begin() {
    const auto spans = [&](const KvHead<S.cache>& head) {
      const int64_t last = (blocks.num_blocks - 1) * head.cache.block_stride + (blocks.block_size - 1) * head.cache.token_stride;
      return head.cache.block_stride >= 0 && head.cache.token_stride >= 0 && last * KvHead<S.cache>::kBytes / 16 < 0xffffffffll;
    };
    regular = Tile::kRowBytes % 16 == 0 && keys.alignment == 16 && values.alignment == 16 && spans(keys) && spans(values);
    look_up(0);
  }

  // Starts the copy of the next tile's keys, or of nothing when there is none, so that groups can be counted.
  __device__ __forceinline__ void issue_keys() {
    ++issued;
    if (issued % kBatch == 0) {
      batch_blocks = next_blocks;
      batch_mapped = __ballot_sync(kFullWarp, batch_blocks != kUnmapped);
      const int offset = offset_in_block(blocks, own_key(issued));
      batch_keys = static_cast<uint32_t>((keys.row(batch_blocks, offset) - keys.base) / 16);
      batch_values = static_cast<uint32_t>((values.row(batch_blocks, offset) - values.base) / 16);
      look_up(issued + kBatch);
    }
    mapped = mapped << kBlocks | (batch_mapped >> (issued % kBatch * kBlocks) & kAllBlocks);
    copy(keys, batch_keys);
  }
  // The same for the values of the tile whose keys were issued last.
  __device__ __forceinline__ void issue_values() { copy(values, batch_values); }

  // Whether the blocks of a tile exist, for the tile whose keys were issued `back` tiles ago.
  __device__ __forceinline__ uint32_t mapped_blocks(int back) const { return mapped >> (back * kBlocks) & kAllBlocks; }

 private:
  // Key where this lane's block of the batch from `first_tile` starts.
  __device__ __forceinline__ int own_key(int first_tile) const {
    const int lane = threadIdx.x % kWarpSize;
    return key_of(first_tile + lane / kBlocks) + 16 * (lane % kBlocks);
  }

  // Starts the loads of a batch's blocks; they are used a whole batch later.
  __device__ __forceinline__ void look_up(int first_tile) {
    const int key = own_key(first_tile);
    const bool exists = first_tile + static_cast<int>(threadIdx.x) % kWarpSize / kBlocks < tile_count && key < range.end;
    next_blocks = exists ? block_of_position(blocks, sequence, key) : kUnmapped;
  }

  __device__ __forceinline__ void copy(const KvHead<S.cache>& head, uint32_t batch_rows) {
    if (issued < tile_count) {
      const int key = key_of(issued);
      const int first_lane = issued % kBatch * kBlocks;
      if (regular && key >= range.begin && key + S.tile_keys <= range.end && (mapped & kAllBlocks) == kAllBlocks) {
        const unsigned char* g_lane = head.base + Copy::lane_offset(head.token_bytes());
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const uint32_t rows = __shfl_sync(kFullWarp, batch_rows, first_lane + b);
          Copy::fast(unit() + 16 * b * Tile::kStride, g_lane + static_cast<uint64_t>(rows) * 16, head.token_bytes(), head.base);
        }
      } else {
        copy_slowly(head, key, first_lane);
      }
    }
    ptx::cp_async_commit();
  }

  // Any tile: rows outside of the range or in unmapped blocks become zeros and are not read.
  __device__ __forceinline__ void copy_slowly(const KvHead<S.cache>& head, int first_key, int first_lane) {
    static_assert(S.tile_keys * Tile::kVectors % kWarpSize == 0, "all lanes take part in the shuffles");
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < S.tile_keys * Tile::kVectors; i += kWarpSize) {
      const int row = i / Tile::kVectors;
      const int byte = i % Tile::kVectors * 16;
      const int key = first_key + row;
      const int block = __shfl_sync(kFullWarp, batch_blocks, first_lane + row / 16);
      const bool exists = block != kUnmapped && key >= range.begin && key < range.end;
      const int valid = exists ? max_of(0, min_of(16, Tile::kRowBytes - byte)) : 0;
      const unsigned char* g_source = valid > 0 ? head.row(block, offset_in_block(blocks, key)) + byte : head.base;
      copy_16(unit() + row * Tile::kStride + byte, g_source, valid, head.alignment);
    }
  }
};

// Takes values that are not finite out of a tile whose keys not every row admits: the rows that do admit them get them one product
// at a time, and then their rows are cleared, so that 0 x NaN cannot reach the others.
template <DecodeSpec S>
__device__ __forceinline__ void take_strange_rows(float (&acc)[Decode<S>::kNTiles][Decode<S>::kSteps][4], unsigned char* s_values, int key,
                                                  const uint32_t (&p_operand)[Decode<S>::kNTiles][Decode<S>::kBlocks][2]) {
  using D = Decode<S>;
  using Tile = typename D::Tile;
  if constexpr (S.cache != DType::i8 && S.cache != DType::i4) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int i = 0; i < S.tile_keys; ++i) {
      unsigned char* s_row = s_values + i * Tile::kStride;
      if (!is_strange_row<S.cache, Tile>(s_row)) continue;
#pragma unroll
      for (int n = 0; n < D::kNTiles; ++n) {
        uint32_t pair = 0;  // weights of keys i and i ^ 1 for row 8 n + lane / 4, in the lane whose t is i % 8 / 2
#pragma unroll
        for (int j = 0; j < 2 * D::kBlocks; ++j) {  // no branch: it would become an index, and p_operand local memory
          pair |= p_operand[n][j / 2][j % 2] & (i / 8 == j ? ~0u : 0u);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t both = __shfl_sync(kFullWarp, pair, 4 * (2 * (lane % 4) + e) + i % 8 / 2);
          const float own = i % 2 == 0 ? low_of<typename D::Math>(both) : high_of<typename D::Math>(both);
          if (!D::s_keys()[D::row(n, e)].contains(key + i)) continue;
#pragma unroll
          for (int step = 0; step < D::kSteps; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int channel = D::F::value_channel(step, half);
              float value;
              if constexpr (S.cache == DType::f8e4m3) {
                value = low_of<__half>(ptx::f8e4m3_to_half_2(s_row[channel]));
              } else {
                value = to_float(reinterpret_cast<const typename D::Io*>(s_row)[channel]);
              }
              acc[n][step][2 * half + e] += own * value;
            }
          }
        }
      }
      __syncwarp();  // every lane has taken what it needs from the row
      for (int byte = 16 * lane; byte < 16 * Tile::kVectors; byte += 16 * kWarpSize) {
        *reinterpret_cast<Vector16*>(s_row + byte) = Vector16{};
      }
      __syncwarp();  // the cleared row is visible
    }
  }
}

// Merges the warps' rows through shared memory and writes them, as the result or as this split's part of it.
template <DecodeSpec S>
__device__ __forceinline__ void merge_and_write(const DecodeParams& p, float (&acc)[Decode<S>::kNTiles][Decode<S>::kSteps][4],
                                                SoftmaxState (&state)[Decode<S>::kNTiles][2], const RowTile& tile, int split,
                                                bool is_final, int kv_head) {
  using D = Decode<S>;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  float* s_acc = reinterpret_cast<float*>(D::s_work());
  SoftmaxState* s_state = reinterpret_cast<SoftmaxState*>(s_acc + S.warps * D::kRows * D::kAccStride);

  ptx::cp_async_wait<0>();
  __syncthreads();  // every warp has left its ring: the units become room for acc
#pragma unroll
  for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = D::row(n, e);
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        state[n][e].row_sum += __shfl_xor_sync(kFullWarp, state[n][e].row_sum, distance);
      }
      if (row >= tile.rows) continue;
      if (lane < 4) s_state[warp * D::kRows + row] = state[n][e];
      float* s_row = s_acc + (warp * D::kRows + row) * D::kAccStride;
#pragma unroll
      for (int step = 0; step < D::kSteps; ++step) {
        s_row[D::F::value_channel(step, 0)] = acc[n][step][e];
        s_row[D::F::value_channel(step, 1)] = acc[n][step][2 + e];
      }
    }
  }
  __syncthreads();  // acc and state of all warps are visible to all threads

#pragma unroll 1
  for (int i = threadIdx.x; i < tile.rows * (S.head_size / 2); i += D::kThreads) {
    const int row = i / (S.head_size / 2);
    const int channel = i % (S.head_size / 2) * 2;
    const int token = tile.token(row);
    const int head = kv_head * p.group_size + tile.head_in_group(row);
    SoftmaxState merged;
#pragma unroll
    for (int w = 0; w < S.warps; ++w) merged.row_max = fmaxf(merged.row_max, s_state[w * D::kRows + row].row_max);
    float first = 0.0f;
    float second = 0.0f;
#pragma unroll
    for (int w = 0; w < S.warps; ++w) {
      const SoftmaxState& part = s_state[w * D::kRows + row];
      const float* s_row = s_acc + (w * D::kRows + row) * D::kAccStride + channel;
      const float weight = merged.weight(part.row_max);
      merged.row_sum += weight * part.row_sum;
      first += weight * s_row[0];
      second += weight * s_row[1];
    }
    const SoftmaxResult result = finalize(merged, is_final ? D::s_sink()[row] : negative_infinity());
    first *= result.factor * (D::F::kCodes ? D::s_value_scale()[channel] : 1.0f);
    second *= result.factor * (D::F::kCodes ? D::s_value_scale()[channel + 1] : 1.0f);
    if (is_final) {
      store_2(output_row<typename D::Io>(p.out, token, head, S.head_size), channel, S.head_size, first, second);
      if (channel == 0) store_lse(p.out, token, head, result.lse);
    } else {
      const int64_t at = partial_row(p.partials, token, split, p.out.num_heads, head);
      *reinterpret_cast<float2*>(p.partials.acc + at * S.head_size + channel) = {first, second};
      if (channel == 0) p.partials.lse[at] = lse_of(merged);
    }
  }
}

// Counts this split as done; the CTA that finds all others done merges them in order. It is on its own then, and each round trip
// to memory shows: one brings the lse of all rows, one the acc of kAtOnce pairs of channels a thread.
template <DecodeSpec S>
__device__ __forceinline__ void merge_splits(const DecodeParams& p, const RowTile& tile, int splits, int kv_head, int64_t counter) {
  using D = Decode<S>;
  constexpr int kPairs = S.head_size / 2;
  constexpr int kAtOnce = 4;
  __threadfence();  // this thread's parts are visible to the device
  __syncthreads();  // those of the whole CTA are, and s_work is free
  if (threadIdx.x == 0) D::s_kept()->is_last = atomicAdd(p.finished + counter, 1) == splits - 1;
  __syncthreads();  // is_last is visible
  if (!D::s_kept()->is_last) return;
  __threadfence();  // the other CTAs' parts are visible

  float* s_weight = reinterpret_cast<float*>(D::s_work());  // [kRows, kMergedSplits]
  float* s_scale = s_weight + D::kRows * kMergedSplits;      // [kRows], what the sum of weighted parts is multiplied by
  const auto head_of = [&](int row) { return kv_head * p.group_size + tile.head_in_group(row); };
  const auto part_of = [&](int row, int split) { return partial_row(p.partials, tile.token(row), split, p.out.num_heads, head_of(row)); };
  if (threadIdx.x < tile.rows) {
    const int row = threadIdx.x;
    float lse[kMergedSplits];
    SoftmaxState merged;
#pragma unroll
    for (int split = 0; split < kMergedSplits; ++split) {
      lse[split] = split < splits ? p.partials.lse[part_of(row, split)] : negative_infinity();
    }
#pragma unroll
    for (int split = 0; split < kMergedSplits; ++split) merged.row_max = fmaxf(merged.row_max, lse[split]);
#pragma unroll
    for (int split = 0; split < kMergedSplits; ++split) {
      lse[split] = merged.weight(lse[split]);
      merged.row_sum += lse[split];
    }
    const SoftmaxResult result = finalize(merged, D::s_sink()[row]);
#pragma unroll
    for (int split = 0; split < kMergedSplits; ++split) s_weight[row * kMergedSplits + split] = lse[split];
    s_scale[row] = result.factor;
    store_lse(p.out, tile.token(row), head_of(row), result.lse);
  }
  __syncthreads();  // the weights are visible

#pragma unroll 1
  for (int first = threadIdx.x; first < tile.rows * kPairs; first += kAtOnce * D::kThreads) {
    float2 acc[kAtOnce] = {};
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * D::kThreads;
        if (i >= tile.rows * kPairs) continue;
        const float weight = s_weight[i / kPairs * kMergedSplits + split];
        const float2 part = reinterpret_cast<const float2*>(p.partials.acc + part_of(i / kPairs, split) * S.head_size)[i % kPairs];
        acc[j].x += weight * part.x;
        acc[j].y += weight * part.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * D::kThreads;
      if (i >= tile.rows * kPairs) continue;
      const int row = i / kPairs;
      store_2(output_row<typename D::Io>(p.out, tile.token(row), head_of(row), S.head_size), i % kPairs * 2, S.head_size,
              acc[j].x * s_scale[row], acc[j].y * s_scale[row]);
    }
  }
}

template <DecodeSpec S>
__global__ void __launch_bounds__(S.warps * kWarpSize, S.ctas) decode_split_kv(const __grid_constant__ DecodeParams p) {
  static_assert(S.head_size % 8 == 0, "head_size must be a multiple of 8: rows are copied 16 bytes at a time");
  static_assert(S.row_tiles * Decode<S>::Tile::kPadded <= 512, "acc of all row tiles must fit the registers of a warp");
  static_assert(S.tile_keys % 16 == 0 && S.tile_keys <= 64, "a tile is whole blocks of 16 keys");
  static_assert(S.units >= 2 && (S.units + 1) / 2 * S.tile_keys / 16 <= 32, "`mapped` has a bit for each block in the ring");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache holds the io type");
  using D = Decode<S>;
  using Io = typename D::Io;

  const int head_tile = static_cast<int>(blockIdx.x % p.head_tiles);
  const int work = static_cast<int>(blockIdx.x / p.head_tiles);
  const int split = work % p.partials.split_count;
  const int number = work / p.partials.split_count;  // of the row tile; without shares_tokens, the token
  const int kv_head = head_tile / p.row_chunks;

  RowTile tile;
  KeyRange admitted{0, 0};  // that some token of the tile admits
  if constexpr (S.shares_tokens) {
    tile = find_row_tile(p.sequences, number, D::kRows, p.group_size, capacity_of(p.blocks));
    if (tile.rows > 0) {
      admitted = keys_of_tokens(p.sequences, p.rules, tile.sequence, tile.first_token, tile.last_token()).some;
    }
  } else {
    const int chunk = head_tile % p.row_chunks * D::kRows;
    tile.sequence = sequence_of_token(p.sequences, number, capacity_of(p.blocks));
    tile.first_token = number - tile.sequence.begin;
    tile.first_head = chunk;
    tile.rows = min_of(D::kRows, p.group_size - chunk);
    tile.group_size = 1 << 30;  // all rows are of this token
    if (tile.sequence.is_active()) {
      admitted = admitted_keys(p.rules, position_of_token(p.sequences, tile.sequence, number), tile.first_token, tile.sequence.kv_len);
    }
  }
  const SplitPlan plan = plan_splits(p.partials, admitted);
  ptx::let_next_kernel_start();
  if (split >= plan.count) {
    ptx::wait_for_previous_kernel();
    if (split == 0) write_empty_tile<Io, D::kThreads>(p.out, tile, kv_head * p.group_size, S.head_size);
    return;
  }
  const KeyRange range = keys_of_split(p.partials, plan, admitted, split);

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int tiles = ceil_div(range.end - range.begin / 16 * 16, S.tile_keys);
  Ring<S> ring{p.blocks, KvHead<S.cache>(p.key_cache, kv_head), KvHead<S.cache>(p.value_cache, kv_head), range,
               tile.sequence.index, tiles > warp ? ceil_div(tiles - warp, S.warps) : 0};
  ring.begin();
  ptx::wait_for_previous_kernel();  // which writes the cache, and maybe the query
  QueryRows<typename D::F, D::kRows, S.head_size, D::kThreads> query;
  query.load([&](int row) -> const Io* {
    if (row >= tile.rows) return nullptr;
    return static_cast<const Io*>(p.query) + tile.token(row) * p.query_stride +
           static_cast<int64_t>(kv_head * p.group_size + tile.head_in_group(row)) * S.head_size;
  });
#pragma unroll 1
  for (int u = 0; u < S.units; u += 2) {
    ring.issue_keys();
    ring.advance();
    if (u + 1 < S.units) {
      ring.issue_values();
      ring.advance();
    }
  }

  query.store(D::s_work(), D::s_factor(), p.key_cache, kv_head);
  static_assert(sizeof(KeptTile) <= 64, "its room in shared memory");
  if (threadIdx.x == 0) *D::s_kept() = {tile, plan.count, 0};
  if constexpr (D::F::kCodes) {
    for (int c = threadIdx.x; c < S.head_size; c += D::kThreads) D::s_value_scale()[c] = scale_of<S.cache>(p.value_cache, kv_head, c);
  }
  if (threadIdx.x < D::kRows) {
    const int row = threadIdx.x;
    KeyRange own = row < tile.rows ? range : KeyRange{0, 0};
    if constexpr (S.shares_tokens) own = keys_of_row(tile, row, p.sequences, p.rules, range);
    D::s_keys()[row] = own;
    D::s_sink()[row] = row < tile.rows ? sink_of<Io>(p.out.head_sink, kv_head * p.group_size + tile.head_in_group(row)) : 0.0f;
    if constexpr (S.has_rules) {
      D::s_bias()[row].g_bias = row < tile.rows ? bias_row_of_tile<Io>(tile, row, p.rules, kv_head * p.group_size) : nullptr;
    }
  }
  __syncthreads();  // the query rows and what is kept of them are visible to all warps

  const uint2* s_query = reinterpret_cast<const uint2*>(D::s_work());
  uint2 r_query[D::kQueryInRegisters ? D::kNTiles : 1][D::kQueryInRegisters ? D::kSteps : 1];
  if constexpr (D::kQueryInRegisters) {
#pragma unroll
    for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
      for (int step = 0; step < D::kSteps; ++step) r_query[n][step] = s_query[(n * D::kSteps + step) * kWarpSize + lane];
    }
  }
  const auto query_of = [&](int n, int step) {
    if constexpr (D::kQueryInRegisters) return r_query[n][step];
    else return s_query[(n * D::kSteps + step) * kWarpSize + lane];
  };
  KeyRange open = range;  // keys that all rows admit
  // What a dot product of a row is multiplied by; base 2 unless there are rules. Registers hold it while they suffice.
  const float common_factor = p.rules.scale * (S.has_rules ? 1.0f : kLog2E);
  const auto load_factor = [&](int n, int e) {
    if constexpr (D::F::kCodes) return common_factor * D::s_factor()[D::row(n, e)] * D::s_factor()[D::kRows + D::row(n, e)];
    return common_factor;
  };
  constexpr bool kKeepFactors = D::F::kCodes && D::kNTiles == 1;
  float r_factor[2];
  if constexpr (kKeepFactors) {
    r_factor[0] = load_factor(0, 0);
    r_factor[1] = load_factor(0, 1);
  }
  if constexpr (S.shares_tokens) {
    for (int row = 0; row < tile.rows; ++row) {
      open = {max_of(open.begin, D::s_keys()[row].begin), min_of(open.end, D::s_keys()[row].end)};
    }
  }

  float acc[D::kNTiles][D::kSteps][4] = {};
  SoftmaxState state[D::kNTiles][2];

#pragma unroll 1  // several copies of the body would not fit the instruction cache
  for (int i = 0; i < ring.tile_count; ++i) {
    const int key = ring.key_of(i);
    const uint32_t mapped = ring.mapped_blocks((S.units + 1) / 2 - 1);

    ptx::cp_async_wait<S.units - 1>();
    __syncwarp();  // the keys are visible to all lanes
    float scores[D::kNTiles][D::kBlocks][4] = {};
    {
      const unsigned char* s_tile = ring.unit();
#pragma unroll
      for (int group = 0; group < D::Tile::kGroups; ++group) {
#pragma unroll
        for (int block = 0; block < D::kBlocks; ++block) {
          uint32_t a[D::F::kSteps][4];
          D::F::keys(a, s_tile, 16 * block, group);
#pragma unroll
          for (int j = 0; j < D::F::kSteps; ++j) {
#pragma unroll
            for (int n = 0; n < D::kNTiles; ++n) {
              const uint2 b = query_of(n, group * D::F::kSteps + j);
              ptx::mma_m16n8k16<typename D::Math>(scores[n][block], a[j], b.x, b.y);
            }
          }
        }
      }
    }
    __syncwarp();  // all lanes have read the keys
    const auto refill = [&] {
      if constexpr (S.units % 2 == 0) ring.issue_keys();
      else ring.issue_values();
      ring.advance();
    };
    if constexpr (!D::kRefillsLate) refill();

    const bool masked = key < open.begin || open.end - key < S.tile_keys || mapped != (1u << D::kBlocks) - 1;
#pragma unroll
    for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = kKeepFactors ? r_factor[e] : load_factor(n, e);
#pragma unroll
        for (int b = 0; b < D::kBlocks; ++b) {
          scores[n][b][e] *= factor;
          scores[n][b][2 + e] *= factor;
        }
      }
    }
    if constexpr (S.has_rules) {
#pragma unroll
      for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
        for (int b = 0; b < D::kBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = D::row(n, j % 2);
            const int own = key + D::key(b, j);
            if (!D::s_keys()[row].contains(own)) continue;  // its bias may not exist
            scores[n][b][j] = kLog2E * capped_and_biased(p.rules, scores[n][b][j], static_cast<const Io*>(D::s_bias()[row].g_bias), own);
          }
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int n = 0; n < D::kNTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const KeyRange own = D::s_keys()[D::row(n, e)];
#pragma unroll
          for (int b = 0; b < D::kBlocks; ++b) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const bool exists = mapped >> b & 1u;
              if (!exists || !own.contains(key + D::key(b, 2 * half))) scores[n][b][2 * half + e] = negative_infinity();
            }
          }
        }
      }
    }

    uint32_t p_operand[D::kNTiles][D::kBlocks][2];
#pragma unroll
    for (int n = 0; n < D::kNTiles; ++n) {
      move_references<true>(scores[n], state[n], [&](const float (&factor)[2]) {
#pragma unroll
        for (int step = 0; step < D::kSteps; ++step) {
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[n][step][j] *= factor[j % 2];
        }
      });
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float reference = state[n][e].reference();
#pragma unroll
        for (int b = 0; b < D::kBlocks; ++b) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[n][b][2 * half + e];
            score = ptx::exp2_approximate(score - reference);
            state[n][e].row_sum += score;
          }
        }
      }
#pragma unroll
      for (int b = 0; b < D::kBlocks; ++b) {
        p_operand[n][b][0] = ptx::transpose_8x8(ptx::pack_2<typename D::Math>(scores[n][b][0], scores[n][b][1]));
        p_operand[n][b][1] = ptx::transpose_8x8(ptx::pack_2<typename D::Math>(scores[n][b][2], scores[n][b][3]));
      }
    }

    if constexpr (D::kRefillsLate) refill();

    ptx::cp_async_wait<S.units - 1>();
    __syncwarp();  // the values are visible to all lanes
    unsigned char* s_tile = ring.unit();
    if constexpr (S.shares_tokens) {
      if (masked) take_strange_rows<S>(acc, s_tile, key, p_operand);
    }
#pragma unroll
    for (int block = 0; block < D::kBlocks; ++block) {
#pragma unroll
      for (int group = 0; group < D::Tile::kGroups; ++group) {
        uint32_t a[D::F::kSteps][4];
        D::F::values(a, s_tile, 16 * block, group);
#pragma unroll
        for (int j = 0; j < D::F::kSteps; ++j) {
#pragma unroll
          for (int n = 0; n < D::kNTiles; ++n) {
            ptx::mma_m16n8k16<typename D::Math>(acc[n][group * D::F::kSteps + j], a[j], p_operand[n][block][0], p_operand[n][block][1]);
          }
        }
      }
    }
    __syncwarp();  // all lanes have read the values
    if constexpr (S.units % 2 == 0) ring.issue_values();
    else ring.issue_keys();
    ring.advance();
  }

  const KeptTile kept = *D::s_kept();
  merge_and_write<S>(p, acc, state, kept.tile, split, kept.splits == 1, kv_head);
  if (kept.splits > 1 && p.finished != nullptr) {
    merge_splits<S>(p, kept.tile, kept.splits, kv_head, static_cast<int64_t>(number) * p.head_tiles + head_tile);
  }
}

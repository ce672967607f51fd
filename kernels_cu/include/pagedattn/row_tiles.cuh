// Tiles of query rows. The rows of a sequence, for one kv head, are its new tokens times the query heads of the group:
//
//   row = token_in_sequence * group_size + head_in_group
//
// so one key tile serves all heads of a group, and a tile is as full for short sequences with many heads as for long ones.
//
// Tiles are numbered over the whole batch without a prefix sum: sequence b owns the numbers from
// cu[b] * group_size / tile_rows + b on, which leaves room for the one partial tile that each sequence may have. Numbers without
// rows end at once. Padding tokens after the last sequence are tiled as if they were one more sequence.
#pragma once

#include <pagedattn/epilogue.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/seqlens.cuh>

struct RowTile {
  Sequence sequence;   // inactive: its rows are written as empty
  int first_token;     // of the tile, in the sequence
  int first_head;      // of the tile's first row, in the group
  int rows;            // 0: nothing to do
  int group_size;

  __device__ int token_in_sequence(int row) const { return first_token + (first_head + row) / group_size; }
  __device__ int token(int row) const { return sequence.begin + token_in_sequence(row); }
  __device__ int head_in_group(int row) const { return (first_head + row) % group_size; }
  __device__ int last_token() const { return token_in_sequence(rows - 1); }
};

// Tile `own` of sequence b; b = batch_size stands for the padding tokens after the last sequence.
__device__ __forceinline__ RowTile row_tile_of(const SequenceTable& table, int b, int own, int tile_rows, int group_size,
                                               int64_t capacity) {
  RowTile tile;
  int tokens;
  if (b < table.batch_size) {
    tile.sequence = read_sequence(table, b, capacity);
    tokens = max_of(0, first_token_of(table, b + 1) - tile.sequence.begin);
  } else {
    tile.sequence = {b, first_token_of(table, b), 0, 0, 0};
    tokens = table.token_count - tile.sequence.begin;
  }
  const int64_t rows = static_cast<int64_t>(tokens) * group_size;
  const int64_t first_row = static_cast<int64_t>(own) * tile_rows;
  tile.group_size = group_size;
  tile.rows = first_row < 0 || first_row >= rows ? 0 : rows - first_row < tile_rows ? static_cast<int>(rows - first_row) : tile_rows;
  // first_row / group_size and its remainder, in 32 bits.
  const int part = own % group_size * tile_rows;
  tile.first_token = own / group_size * tile_rows + part / group_size;
  tile.first_head = part % group_size;
  return tile;
}

// Finds tile number `number`. All lanes of a warp call it together.
__device__ __forceinline__ RowTile find_row_tile(const SequenceTable& table, int number, int tile_rows, int group_size, int64_t capacity) {
  const int* g_offsets = table.cumulative_sequence_length;
  const auto start = [&](int b) { return static_cast<int64_t>(g_offsets[b]) * group_size / tile_rows + b; };
  const int b = find_last_start(table.batch_size + 1, number, start);
  return row_tile_of(table, b, static_cast<int>(number - start(b)), tile_rows, group_size, capacity);
}

struct TileKeys {
  KeyRange some;   // holds every key that some token of the tile admits
  KeyRange every;  // keys that every token admits

  __device__ bool differ() const { return some.begin != every.begin || some.end != every.end; }
};

// Keys of the tokens [first, last] of a sequence. All lanes of a warp call it together.
__device__ __forceinline__ TileKeys keys_of_tokens(const SequenceTable& table, const ScoreRules& rules, const Sequence& s, int first,
                                                   int last) {
  TileKeys keys{{0x7fffffff, 0}, {0, 0x7fffffff}};
  for (int j = first + static_cast<int>(threadIdx.x) % kWarpSize; j <= last; j += kWarpSize) {
    const KeyRange own = admitted_keys(rules, position_of_token(table, s, s.begin + j), j, s.kv_len);
    if (own.end > own.begin) keys.some = {min_of(keys.some.begin, own.begin), max_of(keys.some.end, own.end)};
    keys.every = {max_of(keys.every.begin, own.begin), min_of(keys.every.end, own.end)};
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    keys.some.begin = min_of(keys.some.begin, __shfl_xor_sync(kFullWarp, keys.some.begin, distance));
    keys.some.end = max_of(keys.some.end, __shfl_xor_sync(kFullWarp, keys.some.end, distance));
    keys.every.begin = max_of(keys.every.begin, __shfl_xor_sync(kFullWarp, keys.every.begin, distance));
    keys.every.end = min_of(keys.every.end, __shfl_xor_sync(kFullWarp, keys.every.end, distance));
  }
  if (keys.some.end == 0) keys.some.begin = 0;
  return keys;
}

// Keys that one row admits, cut to `range`; none for a row that does not exist.
__device__ __forceinline__ KeyRange keys_of_row(const RowTile& tile, int row, const SequenceTable& table, const ScoreRules& rules,
                                                const KeyRange& range) {
  if (row >= tile.rows) return {0, 0};
  const KeyRange own = admitted_keys(rules, position_of_token(table, tile.sequence, tile.token(row)), tile.token_in_sequence(row),
                                     tile.sequence.kv_len);
  return {max_of(own.begin, range.begin), min_of(own.end, range.end)};
}

// Bias row of one row, or null. `first_head` is the first query head of the group.
template <class Io>
__device__ __forceinline__ const Io* bias_row_of_tile(const RowTile& tile, int row, const ScoreRules& rules, int first_head) {
  return bias_row_of<Io>(rules, tile.sequence.index, first_head + tile.head_in_group(row), tile.token_in_sequence(row));
}

// Rows of tokens that attend nothing: output 0, lse -infinity.
template <class Io, int kThreads>
__device__ __forceinline__ void write_empty_tile(const Output& out, const RowTile& tile, int first_head, int v_head_size) {
  const int pairs = ceil_div(v_head_size, 2);
  for (int i = threadIdx.x; i < tile.rows * pairs; i += kThreads) {
    const int row = i / pairs;
    const int channel = i % pairs * 2;
    const int head = first_head + tile.head_in_group(row);
    store_2(output_row<Io>(out, tile.token(row), head, v_head_size), channel, v_head_size, 0.0f, 0.0f);
    if (channel == 0) store_lse(out, tile.token(row), head, negative_infinity());
  }
}

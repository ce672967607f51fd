// Which sequence a token belongs to, and how long that sequence is. Everything is read here, on the device.
//
// Values are not trusted: whatever the arrays hold, results stay inside [0, batch_size), [0, token_count] and
// [0, capacity], and a sequence that makes no sense is inactive.
#pragma once

#include <pagedattn/math.cuh>

struct SequenceTable {
  const int* cumulative_sequence_length;  // [batch_size + 1]
  const int* past_seqlens;                // [batch_size]
  const int* query_positions;             // [token_count], or null: past + index in the sequence
  int batch_size;
  int token_count;
};

struct Sequence {
  int index;    // its row in the tables
  int begin;    // its first token
  int q_len;    // its new tokens; 0 when it is inactive
  int past;     // tokens that were in the cache before
  int kv_len;   // past + q_len, cut to what the block table can name

  __device__ bool is_active() const { return q_len > 0; }
};

// Where sequence `index` begins and the one before ends, clipped to the rows there are, so that no difference of two overflows.
__device__ __forceinline__ int first_token_of(const SequenceTable& table, int index) {
  return max_of(0, min_of(table.token_count, table.cumulative_sequence_length[index]));
}

// The lengths of one sequence; a negative past makes it inactive.
__device__ __forceinline__ Sequence read_sequence(const SequenceTable& table, int index, int64_t capacity) {
  Sequence s;
  s.index = index;
  s.begin = first_token_of(table, index);
  const int end = first_token_of(table, index + 1);
  s.past = table.past_seqlens[index];
  s.q_len = s.past >= 0 && s.begin < end ? end - s.begin : 0;
  const int64_t kv_len = static_cast<int64_t>(s.past) + s.q_len;
  s.kv_len = s.q_len == 0 ? 0 : static_cast<int>(kv_len < capacity ? kv_len : capacity);
  return s;
}

// Largest index in [0, count) whose `start(index)` is at most `value`, for starts that never decrease; 0 if there is none.
// All lanes of a warp call it with the same arguments: each round probes 32 starts, so two rounds cover 1024. Starts that
// do decrease give some index in [0, count).
template <class Start> __device__ __forceinline__ int find_last_start(int count, int64_t value, const Start& start) {
  const int lane = threadIdx.x % kWarpSize;
  int first = 0;
  while (count > 1) {
    const int step = ceil_div(count, kWarpSize);
    const int offset = lane * step;
    const bool starts_before = offset < count && start(first + offset) <= value;
    const uint32_t votes = __ballot_sync(kFullWarp, starts_before);
    const int last = votes == 0 ? 0 : 31 - __clz(static_cast<int>(votes));
    first += last * step;
    count = min_of(step, count - last * step);
  }
  return first;
}

// The sequence of a token, inactive when no sequence owns it (a padding row). All lanes of a warp call it together.
__device__ __forceinline__ Sequence sequence_of_token(const SequenceTable& table, int token, int64_t capacity) {
  // In plain decode token t is sequence t; asking that first saves the dependent loads of the search.
  if (token < table.batch_size) {
    const Sequence s = read_sequence(table, token, capacity);
    if (s.begin <= token && token - s.begin < s.q_len) return s;
  }
  const int* g_offsets = table.cumulative_sequence_length;
  const int index = find_last_start(table.batch_size, token, [&](int i) { return static_cast<int64_t>(g_offsets[i]); });
  Sequence s = read_sequence(table, index, capacity);
  if (token < s.begin || token - s.begin >= s.q_len) s.q_len = 0;
  return s;
}

// The same for one thread alone. It probes what a warp probes, so that offsets which do decrease give the same sequence.
__device__ __forceinline__ Sequence sequence_of_one_token(const SequenceTable& table, int token, int64_t capacity) {
  if (token < table.batch_size) {
    const Sequence s = read_sequence(table, token, capacity);
    if (s.begin <= token && token - s.begin < s.q_len) return s;
  }
  int first = 0;
  for (int count = table.batch_size; count > 1;) {
    const int step = ceil_div(count, kWarpSize);
    int last = 0;
    for (int lane = 1; lane < kWarpSize && lane * step < count; ++lane) {
      if (table.cumulative_sequence_length[first + lane * step] <= token) last = lane;
    }
    first += last * step;
    count = min_of(step, count - last * step);
  }
  Sequence s = read_sequence(table, first, capacity);
  if (token < s.begin || token - s.begin >= s.q_len) s.q_len = 0;
  return s;
}

// Absolute position of a token, for rotation and for the mask. May be anything when query_positions does.
__device__ __forceinline__ int64_t position_of_token(const SequenceTable& table, const Sequence& s, int token) {
  return table.query_positions != nullptr ? table.query_positions[token]
                                          : static_cast<int64_t>(s.past) + (token - s.begin);
}

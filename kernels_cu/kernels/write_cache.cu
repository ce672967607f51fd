// write_cache.cu: everything between the inputs and attention. Splits packed rows, normalises and rotates query and key,
// quantizes key and value, and stores them at their slots.
//
//   grid    x: token_count x row_chunks     CTA  kThreads; a row is one head of one token, kLanes lanes each
//   reads   query, key, value once; one row of the angle tables a head
//   writes  key_cache, value_cache at the token's slot; query_out [token_count, num_heads, head_size] if it is not null
//   smem    one float32 row per group of kLanes lanes, for the partner channel of a rotation
// Rows of a token in order: num_heads query heads (none when query_out is null), kv_num_heads key heads, and as many
// value heads unless the cache is LATENT.
// Invariants
//   One value is rounded once, at its store; norm and rotation are float32.
//   A token without a slot stores nothing; a padding token stores nothing at all.
#include <pagedattn/ptx/convert.cuh>
#include <pagedattn/ptx/grid_dependency.cuh>
#include <pagedattn/qk_norm.cuh>
#include <pagedattn/quant.cuh>
#include <pagedattn/rope.cuh>
#include <pagedattn/slots.cuh>

struct WriteCacheSpec {
  DType io;
  DType cache;
  int head_size;
};

struct WriteCacheParams {
  const void* query;  // [token_count, num_heads, head_size], rows query_stride apart
  const void* key;    // [token_count, kv_num_heads, head_size]
  const void* value;  // likewise; null: LATENT, or nothing to store
  int64_t query_stride;  // elements from token to token
  int64_t key_stride;
  int64_t value_stride;
  void* query_out;    // [token_count, num_heads, head_size], contiguous; null: attention reads `query` itself
  const void* q_norm_weight;  // [head_size], or null: no norm
  const void* k_norm_weight;
  const int* slot_mapping;    // [token_count], or null
  SequenceTable sequences;
  BlockTable blocks;
  KvCache key_cache;
  KvCache value_cache;
  int* zeros;                 // [zero_count]: counters of the kernel that follows, set to 0
  int zero_count;
  Rotary rotary;
  int num_heads;
  int kv_num_heads;
  int row_chunks;      // CTAs of a token
  float qk_norm_epsilon;
};

constexpr int kThreads = 128;

// How lanes share a row: each holds kSteps vectors of eight channels, kLanes vectors apart.
template <WriteCacheSpec S> struct RowShape {
  static constexpr int kVectors = S.head_size / 8;
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : kVectors > 2 ? 4 : kVectors > 1 ? 2 : 1;
  static constexpr int kSteps = ceil_div(kVectors, kLanes);
  static constexpr int kRows = kThreads / kLanes;  // at a time in a CTA

  static __device__ __forceinline__ int channel(int lane, int step) { return 8 * (lane + step * kLanes); }
};

// A row as it lies in memory.
template <WriteCacheSpec S> struct Words {
  Vector16 vectors[RowShape<S>::kSteps];

  __device__ __forceinline__ void load(const element_t<S.io>* g_row, int lane, bool exists) {
#pragma unroll
    for (int step = 0; step < RowShape<S>::kSteps; ++step) {
      const int channel = RowShape<S>::channel(lane, step);
      vectors[step] = exists && channel < S.head_size ? load_8(g_row + channel) : Vector16{};
    }
  }
  __device__ __forceinline__ void unpack(float (&x)[8 * RowShape<S>::kSteps]) const {
    using Io = element_t<S.io>;
#pragma unroll
    for (int i = 0; i < 4 * RowShape<S>::kSteps; ++i) {
      x[2 * i] = low_of<Io>(vectors[i / 4].word[i % 4]);
      x[2 * i + 1] = high_of<Io>(vectors[i / 4].word[i % 4]);
    }
  }
};

template <WriteCacheSpec S>
__device__ __forceinline__ void normalize_row(float (&x)[8 * RowShape<S>::kSteps], const void* g_weight, float epsilon, int lane) {
  using Io = element_t<S.io>;
  const float inverse = inverse_root_mean_square<RowShape<S>::kLanes>(x, S.head_size, epsilon);
#pragma unroll
  for (int step = 0; step < RowShape<S>::kSteps; ++step) {
    const int channel = RowShape<S>::channel(lane, step);
    if (channel >= S.head_size) continue;
    const Vector16 w = load_8(static_cast<const Io*>(g_weight) + channel);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[8 * step + 2 * i] = x[8 * step + 2 * i] * inverse * low_of<Io>(w.word[i]);
      x[8 * step + 2 * i + 1] = x[8 * step + 2 * i + 1] * inverse * high_of<Io>(w.word[i]);
    }
  }
}

// A channel's partner lives in another lane, so the row passes through shared memory.
template <WriteCacheSpec S>
__device__ __forceinline__ void rotate_row(float (&x)[8 * RowShape<S>::kSteps], float* s_row, const Rotary& rotary,
                                           int64_t table_row, int lane) {
#pragma unroll
  for (int step = 0; step < RowShape<S>::kSteps; ++step) {
    const int channel = RowShape<S>::channel(lane, step);
    if (channel >= S.head_size) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) s_row[channel + i] = x[8 * step + i];
  }
  __syncwarp();  // the row is whole for every lane that shares it
#pragma unroll
  for (int step = 0; step < RowShape<S>::kSteps; ++step) {
    const int channel = RowShape<S>::channel(lane, step);
    if (channel >= S.head_size) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[8 * step + i] = rotated<element_t<S.io>>(rotary, table_row, s_row, channel + i);
  }
  __syncwarp();  // all partners are read before the next row overwrites this one
}

template <WriteCacheSpec S>
__device__ __forceinline__ void store_row(element_t<S.io>* g_row, const float (&x)[8 * RowShape<S>::kSteps], int lane) {
  using Io = element_t<S.io>;
#pragma unroll
  for (int step = 0; step < RowShape<S>::kSteps; ++step) {
    const int channel = RowShape<S>::channel(lane, step);
    if (channel >= S.head_size) continue;
    Vector16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = ptx::pack_2<Io>(x[8 * step + 2 * i], x[8 * step + 2 * i + 1]);
    store_8(g_row + channel, v);
  }
}

template <WriteCacheSpec S>
__device__ __forceinline__ void store_in_cache(const KvCache& cache, const Slot& slot, int head,
                                               const float (&x)[8 * RowShape<S>::kSteps], int lane) {
  element_t<S.cache>* g_row = static_cast<element_t<S.cache>*>(const_cast<void*>(cache.data)) + slot.block * cache.block_stride +
                              slot.offset * cache.token_stride + head * cache.head_stride;
  if constexpr (!is_quantized(S.cache)) {
    store_row<S>(g_row, x, lane);
  } else {
#pragma unroll
    for (int step = 0; step < RowShape<S>::kSteps; ++step) {
      const int channel = RowShape<S>::channel(lane, step);
      if (channel >= S.head_size) continue;
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = x[8 * step + i];
      store_codes_8<S.cache>(g_row, channel, values, [&](int i) { return scale_of<S.cache>(cache, head, channel + i); });
    }
  }
}

template <WriteCacheSpec S>
__global__ void __launch_bounds__(kThreads) write_cache(const __grid_constant__ WriteCacheParams p) {
  static_assert(S.head_size % 8 == 0, "rows are read eight channels at a time");
  static_assert(S.head_size <= 1024, "a lane holds at most four vectors of a row");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache stores the io type");
  using Shape = RowShape<S>;
  using Io = element_t<S.io>;

  ptx::let_next_kernel_start();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < p.zero_count; i += gridDim.x * static_cast<int64_t>(kThreads)) {
    p.zeros[i] = 0;
  }
  const int token = static_cast<int>(blockIdx.x / p.row_chunks);
  const int chunk = static_cast<int>(blockIdx.x % p.row_chunks);
  const int lane = threadIdx.x % Shape::kLanes;
  const int query_rows = p.query_out != nullptr ? p.num_heads : 0;
  const int rows = query_rows + p.kv_num_heads * (p.value != nullptr ? 2 : 1);
  const auto head_of = [&](int row) { return row < query_rows ? row : (row - query_rows) % p.kv_num_heads; };
  const auto load = [&](Words<S>& words, int row) {
    const bool is_query = row < query_rows;
    const bool is_key = !is_query && row < query_rows + p.kv_num_heads;
    const Io* g_source = is_query ? static_cast<const Io*>(p.query) + token * p.query_stride
                         : is_key ? static_cast<const Io*>(p.key) + token * p.key_stride
                                  : static_cast<const Io*>(p.value) + token * p.value_stride;
    words.load(g_source + static_cast<int64_t>(head_of(row)) * S.head_size, lane, row < rows);
  };
  // A CTA waits for memory, so its first row is on its way while the slot is looked up, and each next one while a row is worked on.
  Words<S> next;
  load(next, chunk * Shape::kRows + static_cast<int>(threadIdx.x) / Shape::kLanes);

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  if (!sequence.is_active()) return;
  const Slot slot = slot_of_token(p.slot_mapping, p.blocks, sequence, token);
  const int64_t table_row =
      p.rotary.cos_cache != nullptr ? rotary_row(p.rotary, position_of_token(p.sequences, sequence, token)) : 0;

  float* s_row = shared_memory<float>() + (threadIdx.x / Shape::kLanes) * S.head_size;

  // Trip counts are the same for a whole CTA, so that every lane reaches the shuffles and barriers of a warp.
  for (int first = chunk * Shape::kRows; first < rows; first += p.row_chunks * Shape::kRows) {
    const int row = first + threadIdx.x / Shape::kLanes;
    const bool exists = row < rows;
    const bool is_query = row < query_rows;
    const bool is_key = !is_query && row < query_rows + p.kv_num_heads;
    const int head = head_of(row);
    float x[8 * Shape::kSteps];
    next.unpack(x);
    load(next, row + p.row_chunks * Shape::kRows);

    // Value rows go through the motions of norm and rotation, whose shuffles need the whole warp, and keep their own x.
    if (p.q_norm_weight != nullptr || p.rotary.cos_cache != nullptr) {
      float y[8 * Shape::kSteps];
#pragma unroll
      for (int i = 0; i < 8 * Shape::kSteps; ++i) y[i] = x[i];
      if (p.q_norm_weight != nullptr) normalize_row<S>(y, is_query ? p.q_norm_weight : p.k_norm_weight, p.qk_norm_epsilon, lane);
      if (p.rotary.cos_cache != nullptr) rotate_row<S>(y, s_row, p.rotary, table_row, lane);
      if (is_query || is_key) {
#pragma unroll
        for (int i = 0; i < 8 * Shape::kSteps; ++i) x[i] = y[i];
      }
    }

    if (!exists) continue;
    if (is_query) {
      store_row<S>(static_cast<Io*>(p.query_out) + (static_cast<int64_t>(token) * p.num_heads + head) * S.head_size, x, lane);
    } else if (slot.block != kUnmapped) {
      store_in_cache<S>(is_key ? p.key_cache : p.value_cache, slot, head, x, lane);
    }
  }
}

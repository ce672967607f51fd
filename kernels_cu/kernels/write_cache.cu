// write_cache.cu: everything between the inputs and attention. Splits packed rows, normalises and rotates query and key,
// quantizes key and value, and stores them at their slots.
//
//   grid    x: kWarps warps each, of token_count x row_chunks; a row is one head of one token, kLanes lanes each
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
  int row_chunks;      // warps of a token
  float qk_norm_epsilon;
};

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

// How lanes share a row: each holds kSteps vectors of eight channels, kLanes vectors apart.
template <WriteCacheSpec S> struct RowShape {
  static constexpr int kVectors = S.head_size / 8;
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : kVectors > 2 ? 4 : kVectors > 1 ? 2 : 1;
  static constexpr int kSteps = ceil_div(kVectors, kLanes);
  static constexpr int kRows = kWarpSize / kLanes;  // at a time in a warp

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

// Scales of a row of codes; nothing where the cache has none. Lanes beyond the row read its last ones.
template <WriteCacheSpec S> struct Scales {
  Divisors of_step[is_quantized(S.cache) ? RowShape<S>::kSteps : 1];

  __device__ __forceinline__ void load(const KvCache& cache, int head, int lane) {
    if constexpr (is_quantized(S.cache)) {
#pragma unroll
      for (int step = 0; step < RowShape<S>::kSteps; ++step) {
        const int channel = min_of(RowShape<S>::channel(lane, step), S.head_size - 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) of_step[step].scale[i] = scale_of<S.cache>(cache, head, channel + i);
      }
    }
  }
};

// Stores a row at the token's slot, if it has one. Codes are ready before that is asked for.
template <WriteCacheSpec S>
__device__ __forceinline__ void store_in_cache(const KvCache& cache, Scales<S>& scales, const Slot& slot, int head,
                                               const float (&x)[8 * RowShape<S>::kSteps], int lane) {
  constexpr int kSteps = RowShape<S>::kSteps;
  const auto row = [&] {
    return static_cast<element_t<S.cache>*>(const_cast<void*>(cache.data)) + slot.block * cache.block_stride +
           slot.offset * cache.token_stride + head * cache.head_stride;
  };
  if constexpr (!is_quantized(S.cache)) {
    if (slot.block != kUnmapped) store_row<S>(row(), x, lane);
  } else {
    Codes8<S.cache> codes[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      scales.of_step[step].prepare();
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = x[8 * step + i];
      codes[step].encode(values, scales.of_step[step]);
    }
    if (slot.block == kUnmapped) return;
    auto* g_row = row();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int channel = RowShape<S>::channel(lane, step);
      if (channel < S.head_size) codes[step].store(g_row, channel);
    }
  }
}

// Whether new rows are stored as they come, and all of them can be moved 16 bytes at a time.
template <WriteCacheSpec S> __device__ __forceinline__ bool only_copies(const WriteCacheParams& p) {
  if (is_quantized(S.cache) || p.q_norm_weight != nullptr || p.rotary.cos_cache != nullptr) return false;
  const auto bits = [](const void* g_data) { return reinterpret_cast<uint64_t>(g_data); };
  const int64_t strides = p.key_stride | p.value_stride | p.key_cache.block_stride | p.key_cache.token_stride | p.key_cache.head_stride |
                          p.value_cache.block_stride | p.value_cache.token_stride | p.value_cache.head_stride;
  const uint64_t starts = bits(p.key) | bits(p.value) | bits(p.key_cache.data) | bits(p.value_cache.data);
  return ((starts | sizeof(element_t<S.io>) * static_cast<uint64_t>(strides)) & (sizeof(Vector16) - 1)) == 0;
}

// Copies the lane's part of heads `head`, head + step, ... of key and value to the token's slot. With nothing to compute, instructions
// are what long prompts would wait for: addresses are found once a token, and several loads are on their way, the first ones before
// the slot is known.
template <WriteCacheSpec S>
__device__ __forceinline__ void copy_heads(const WriteCacheParams& p, int token, int head, int step, int lane) {
  using Shape = RowShape<S>;
  using Io = element_t<S.io>;
  constexpr int kBatch = ceil_div(2, Shape::kSteps);  // heads at a time
  constexpr int kVectors = kBatch * Shape::kSteps;
  const bool has_value = p.value != nullptr;
  const Io* g_key = static_cast<const Io*>(p.key) + token * p.key_stride;
  const Io* g_value = static_cast<const Io*>(p.value) + token * p.value_stride;
  Vector16 keys[kVectors];
  Vector16 values[kVectors];
  // Calls move(vector, head, channel) for those of a batch that exist.
  const auto for_batch = [&](auto&& move) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int own = head + i / Shape::kSteps * step;
      const int channel = Shape::channel(lane, i % Shape::kSteps);
      if (own < p.kv_num_heads && channel < S.head_size) move(i, own, channel);
    }
  };
  const auto load = [&](int i, int own, int channel) {
    const int64_t offset = static_cast<int64_t>(own) * S.head_size + channel;
    keys[i] = *reinterpret_cast<const Vector16*>(g_key + offset);
    if (has_value) values[i] = *reinterpret_cast<const Vector16*>(g_value + offset);
  };
  for_batch(load);

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  const Slot slot = slot_of_token(p.slot_mapping, p.blocks, sequence, token);
  if (slot.block == kUnmapped) return;
  const auto slot_in = [&](const KvCache& cache) {
    return static_cast<Io*>(const_cast<void*>(cache.data)) + slot.block * cache.block_stride + slot.offset * cache.token_stride;
  };
  Io* g_key_slot = slot_in(p.key_cache);
  Io* g_value_slot = slot_in(p.value_cache);
  const auto store = [&](int i, int own, int channel) {
    *reinterpret_cast<Vector16*>(g_key_slot + own * p.key_cache.head_stride + channel) = keys[i];
    if (has_value) *reinterpret_cast<Vector16*>(g_value_slot + own * p.value_cache.head_stride + channel) = values[i];
  };
  for (;;) {
    for_batch(store);
    head += kBatch * step;
    if (head >= p.kv_num_heads) break;
    for_batch(load);
  }
}

template <WriteCacheSpec S>
__global__ void __launch_bounds__(kThreads) write_cache(const __grid_constant__ WriteCacheParams p) {
  static_assert(S.head_size % 8 == 0, "rows are read eight channels at a time");
  static_assert(S.head_size <= 1024, "a lane holds at most four vectors of a row");
  static_assert(is_quantized(S.cache) || S.cache == S.io, "an unquantized cache stores the io type");
  using Shape = RowShape<S>;
  using Io = element_t<S.io>;

  // Before anything else, so that the kernel ahead may be anyone's who waits for those ahead of his; and the next one, which reads lengths
  // and block tables while this one still runs, starts when all that was ahead of the call has ended.
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < p.zero_count; i += gridDim.x * static_cast<int64_t>(kThreads)) {
    p.zeros[i] = 0;
  }
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const int token = static_cast<int>(warp / static_cast<uint32_t>(p.row_chunks));
  if (token >= p.sequences.token_count) return;
  const int chunk = static_cast<int>(warp % static_cast<uint32_t>(p.row_chunks));
  const int lane = threadIdx.x % Shape::kLanes;
  const int query_rows = p.query_out != nullptr ? p.num_heads : 0;
  const int key_rows = query_rows + p.kv_num_heads;
  const int rows = key_rows + (p.value != nullptr ? p.kv_num_heads : 0);
  const int step = p.row_chunks * Shape::kRows;
  const int first_row = chunk * Shape::kRows + static_cast<int>(threadIdx.x) % kWarpSize / Shape::kLanes;
  if (query_rows == 0 && only_copies<S>(p)) {
    if constexpr (!is_quantized(S.cache)) copy_heads<S>(p, token, first_row, step, lane);
    return;
  }
  const Io* g_query = static_cast<const Io*>(p.query) + token * p.query_stride;
  const Io* g_key = static_cast<const Io*>(p.key) + token * p.key_stride;
  const Io* g_value = static_cast<const Io*>(p.value) + token * p.value_stride;
  const auto head_of = [&](int row) { return row < query_rows ? row : row < key_rows ? row - query_rows : row - key_rows; };
  Words<S> next;
  const auto load = [&](int row) {
    const Io* g_source = row < query_rows ? g_query : row < key_rows ? g_key : g_value;
    next.load(g_source + static_cast<int64_t>(head_of(row)) * S.head_size, lane, row < rows);
  };
  Scales<S> scales;
  const auto load_scales = [&](int row) {
    if (row >= query_rows && row < rows) scales.load(row < key_rows ? p.key_cache : p.value_cache, head_of(row), lane);
  };
  // A warp waits for memory, so its first rows are on their way while the slot is looked up, and the next ones while some are worked on.
  load(first_row);
  load_scales(first_row);

  const Sequence sequence = sequence_of_token(p.sequences, token, capacity_of(p.blocks));
  if (!sequence.is_active()) return;
  const Slot slot = slot_of_token(p.slot_mapping, p.blocks, sequence, token);
  const int64_t table_row =
      p.rotary.cos_cache != nullptr ? rotary_row(p.rotary, position_of_token(p.sequences, sequence, token)) : 0;

  float* s_row = shared_memory<float>() + (threadIdx.x / Shape::kLanes) * S.head_size;

  // Trip counts are the same for a whole warp, so that every lane reaches its shuffles and barriers.
  for (int first = chunk * Shape::kRows, row = first_row; first < rows; first += step, row += step) {
    const bool exists = row < rows;
    const bool is_query = row < query_rows;
    const bool is_key = !is_query && row < key_rows;
    const int head = head_of(row);
    float x[8 * Shape::kSteps];
    next.unpack(x);
    load(row + step);

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

    if (exists && is_query) {
      store_row<S>(static_cast<Io*>(p.query_out) + (static_cast<int64_t>(token) * p.num_heads + head) * S.head_size, x, lane);
    } else if (exists) {
      store_in_cache<S>(is_key ? p.key_cache : p.value_cache, scales, slot, head, x, lane);
    }
    load_scales(row + step);
  }
}

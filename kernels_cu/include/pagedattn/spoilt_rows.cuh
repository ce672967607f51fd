// Rows that a hidden value has spoilt, attended again.
//
// A row that does not admit a key has weight 0 for it, but the tensor cores multiply all the same, and 0 x NaN is NaN. Keys that
// no row of a tile admits are zeros in shared memory; what is left are keys that some rows admit and others do not. If the value
// of such a key is infinite or NaN, the rows that hide it show it in the end: a sum of values is NaN though the weights have a
// sum that is a number. So nothing is asked in the loop over tiles. Rows are looked at once, when they are done, and those that
// are spoilt are computed again from global memory by one warp each, key after key: slow, and right whatever the caches hold. (Keys
// in fours would be faster, but this code is a part of every kernel, and who calls one for the first time waits for its compilation.)
//
// A row whose own key is NaN has weights that are NaN, and is no case for this. A row whose own values are NaN looks like one that
// is spoilt; where that may be common, as in prompts of a model that is broken, is_spoilt_by_others tells them apart first.
#pragma once

#include <pagedattn/epilogue.cuh>
#include <pagedattn/kv_accessor.cuh>
#include <pagedattn/mask.cuh>
#include <pagedattn/row_tiles.cuh>
#include <pagedattn/softmax.cuh>
#include <pagedattn/split.cuh>

// Whether a value in a cache may be infinite or NaN. Integer codes are numbers: they spoil nothing.
__host__ __device__ constexpr bool can_spoil(DType cache) { return bits_of(cache) == 16 || cache == DType::f8e4m3; }

// Whether row `half` of a lane, in wgmma's layout of an accumulator, has a sum that is NaN, and a sum of weights that is not.
template <int kCount> __device__ __forceinline__ bool is_spoilt(const float (&acc)[kCount], int half, float weights) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float first = acc[i + 2 * half];
    const float second = acc[i + 2 * half + 1];
    found |= first != first || second != second;
  }
  return found && weights == weights;
}

struct Pair { float first, second; };

// Channels 2 pair and 2 pair + 1 of a row, without their scale; zeros beyond its end.
template <DType Type> __device__ __forceinline__ Pair pair_of(const void* g_row, int pair, int channels) {
  static_assert(can_spoil(Type), "rows of no other type are attended again");
  const bool exists = 2 * pair < channels;
  if constexpr (Type == DType::f8e4m3) {
    const uint32_t halves = ptx::f8e4m3_to_half_2(exists ? static_cast<const uint16_t*>(g_row)[pair] : 0u);
    return {low_of<__half>(halves), high_of<__half>(halves)};
  } else {
    const uint32_t word = exists ? static_cast<const uint32_t*>(g_row)[pair] : 0u;
    return {low_of<element_t<Type>>(word), high_of<element_t<Type>>(word)};
  }
}

// What a lane has seen that is not finite, in its channels: bit 2 i + j is channel 2 (lane + 32 i) + j.
struct Seen {
  uint32_t nan = 0;
  uint32_t positive = 0;  // infinity
  uint32_t negative = 0;

  __device__ __forceinline__ uint32_t any() const { return nan | positive | negative; }
  // A row that admits these values is NaN there whatever its weights are: 0 x infinity is NaN, and so is the sum of both infinities.
  __device__ __forceinline__ uint32_t nan_in_any_sum() const { return nan | (positive & negative); }

  __device__ __forceinline__ void look(float x, int bit) {
    nan |= static_cast<uint32_t>(is_nan(x)) << bit;
    positive |= static_cast<uint32_t>(x == -negative_infinity()) << bit;
    negative |= static_cast<uint32_t>(x == negative_infinity()) << bit;
  }
};

// The values of one head of a sequence, as a warp looks through them for a row.
template <DType Cache, int kValueSize> struct Values {
  static constexpr int kPairs = ceil_div(kValueSize / 2, kWarpSize);
  static constexpr int kMostKeys = 512;  // that are looked at before a row is attended again without

  const KvHead<Cache>& head;
  const BlockTable& blocks;
  int sequence;

  // Those of a lane's channels in `wanted` in which one of `keys` is infinite or NaN, or, with `in_any_sum`, in which a row that admits
  // all of them is NaN whatever its weights are. Looks at the mapped keys, the newest first, until no lane wants more. Not inlined:
  // three copies of it would be much to compile for what is rare.
  __device__ __noinline__ uint32_t find(const KeyRange& keys, uint32_t wanted, bool in_any_sum) const {
    Seen seen;
    const auto found = [&] { return in_any_sum ? seen.nan_in_any_sum() : seen.any(); };
#pragma unroll 1
    for (int key = keys.end - 1; key >= keys.begin; --key) {
      if (!__any_sync(kFullWarp, (wanted & ~found()) != 0)) break;
      const int block = block_of_position(blocks, sequence, key);
      if (block == kUnmapped) continue;
      const void* g_row = head.row(block, offset_in_block(blocks, key));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const Pair x = pair_of<Cache>(g_row, static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize, kValueSize);
        seen.look(x.first, 2 * i);
        seen.look(x.second, 2 * i + 1);
      }
    }
    return wanted & found();
  }

  // Whether a row that admits `own`, and was multiplied with the values of all of `all`, may be NaN in one of the channels `nan`
  // (a lane's, numbered as in Seen) only because of keys that it hides. False is certain: in each channel either no hidden value is
  // infinite or NaN, or the row's own values make a NaN of any sum. True may be wrong where more than kMostKeys keys would have to
  // be looked at, or where infinities of the row itself make the NaN. All lanes get the answer.
  __device__ __forceinline__ bool is_spoilt_by_others(uint32_t nan, const KeyRange& own, const KeyRange& all) const {
    const KeyRange below{all.begin, max_of(all.begin, min_of(own.begin, all.end))};
    const KeyRange above{min_of(all.end, max_of(own.end, all.begin)), all.end};
    if (below.end - below.begin <= kMostKeys - (above.end - above.begin)) {
      const uint32_t hidden = find(above, nan, false);
      nan = hidden | find(below, nan & ~hidden, false);
    }
    // The newest ones, because they are the ones that a row shares with fewest others.
    const KeyRange newest{max_of(own.begin, own.end - kMostKeys), own.end};
    const uint32_t explained = find(newest, nan, true);
    return __any_sync(kFullWarp, (nan & ~explained) != 0);
  }
};

// One row, as a warp attends it: lane l has channel pairs l, l + 32, ...
template <DType Io, DType Cache, int kHeadSize, int kValueSize> struct PlainRow {
  static constexpr int kQueryPairs = ceil_div(kHeadSize / 2, kWarpSize);
  static constexpr int kValuePairs = ceil_div(kValueSize / 2, kWarpSize);
  static_assert(kHeadSize % 2 == 0 && kValueSize % 2 == 0, "rows are read in pairs of channels");

  SoftmaxState state;
  float acc[kValuePairs][2];

  __device__ __forceinline__ static int pair(int i) { return static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize; }

  // Times the scale of its channels, where there are such.
  __device__ __forceinline__ static void apply_scale(float (&x)[2], const KvCache& cache, int head, int pair, int channels) {
    if constexpr (is_quantized(Cache)) {
      if (2 * pair >= channels) return;
      x[0] *= scale_of<Cache>(cache, head, 2 * pair);
      x[1] *= scale_of<Cache>(cache, head, 2 * pair + 1);
    }
  }

  // Attends the mapped ones among `keys`. Rows of query, keys and values start on multiples of 4 bytes; `g_bias` is the row's, or null.
  __device__ __forceinline__ void attend(const void* g_query, const KvCache& key_cache, const KvCache& value_cache, int kv_head,
                                         const BlockTable& blocks, int sequence, const KeyRange& keys, const ScoreRules& rules,
                                         const element_t<Io>* g_bias) {
    const KvHead<Cache> key_head(key_cache, kv_head);
    const KvHead<Cache> value_head(value_cache, kv_head);
    float query[kQueryPairs][2];
#pragma unroll
    for (int i = 0; i < kQueryPairs; ++i) {
      const Pair x = pair_of<Io>(g_query, pair(i), kHeadSize);
      query[i][0] = x.first;
      query[i][1] = x.second;
      apply_scale(query[i], key_cache, kv_head, pair(i), kHeadSize);
    }
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) acc[i][0] = acc[i][1] = 0.0f;
#pragma unroll 1
    for (int key = keys.begin; key < keys.end; ++key) {
      const int block = block_of_position(blocks, sequence, key);
      if (block == kUnmapped) continue;
      const int offset = offset_in_block(blocks, key);
      const void* g_key = key_head.row(block, offset);
      const void* g_value = value_head.row(block, offset);
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < kQueryPairs; ++i) {
        const Pair x = pair_of<Cache>(g_key, pair(i), kHeadSize);
        score += query[i][0] * x.first + query[i][1] * x.second;
      }
      score = kLog2E * capped_and_biased(rules, group_sum<kWarpSize>(score) * rules.scale, g_bias, key);
      const float factor = state.update_max(score);
      const float weight = state.weight(score);
      state.row_sum += weight;
#pragma unroll
      for (int i = 0; i < kValuePairs; ++i) {
        const Pair x = pair_of<Cache>(g_value, pair(i), kValueSize);
        acc[i][0] = acc[i][0] * factor + weight * x.first;
        acc[i][1] = acc[i][1] * factor + weight * x.second;
      }
    }
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) apply_scale(acc[i], value_cache, kv_head, pair(i), kValueSize);
  }

  // Calls store(channel, first, second) for every pair of channels, times `factor`.
  template <class Store> __device__ __forceinline__ void for_values(float factor, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) {
      if (2 * pair(i) < kValueSize) store(2 * pair(i), acc[i][0] * factor, acc[i][1] * factor);
    }
  }
};

// Attends row `row` of a LATENT kernel's work again, and writes what it should have been. A warp calls it.
template <DType Io, DType Cache, int kHeadSize, int kValueSize, class Params, class Work>
__device__ __forceinline__ void attend_row_again(const Params& p, const Work& work, int row) {
  using Element = element_t<Io>;
  const int token = work.tile.token(row);
  const int head = work.tile.head_in_group(row);
  PlainRow<Io, Cache, kHeadSize, kValueSize> plain;
  plain.attend(static_cast<const Element*>(p.query) + token * p.query_stride + head * kHeadSize, p.key_cache, p.key_cache, 0, p.blocks,
               work.tile.sequence.index, keys_of_row(work.tile, row, p.sequences, p.rules, work.keys), p.rules,
               bias_row_of_tile<Element>(work.tile, row, p.rules, 0));
  const float factor = finalize(plain.state, negative_infinity()).factor;
  if (work.split_count <= 1) {
    Element* g_row = output_row<Element>(p.out, token, head, kValueSize);
    plain.for_values(factor, [&](int channel, float a, float b) { store_2(g_row, channel, kValueSize, a, b); });
  } else {
    float* g_row = p.partials.acc + partial_row(p.partials, token, work.split, p.out.num_heads, head) * partial_width(kValueSize);
    plain.for_values(factor, [&](int channel, float a, float b) { *reinterpret_cast<float2*>(g_row + channel) = {a, b}; });
  }
}

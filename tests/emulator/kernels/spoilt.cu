// What spoilt_rows.cuh decides of rows, and how it attends them; a warp a row. The kernels that use it run on Hopper only.
#include <pagedattn/spoilt_rows.cuh>

struct SpoiltSpec { DType io; DType cache; int head_size; };

struct SpoiltParams {
  const void* query;  // [rows, head_size]
  KvCache key_cache;
  KvCache value_cache;
  BlockTable blocks;
  ScoreRules rules;
  const KeyRange* own;        // [rows]
  const unsigned char* nan;   // [rows, head_size] the channels that are NaN
  unsigned char* spoilt;      // [rows]
  float* output;              // [rows, head_size]
  int kv_head;
  int key_count;
};

template <SpoiltSpec S> __global__ void __launch_bounds__(kWarpSize) spoilt(const __grid_constant__ SpoiltParams p) {
  using Row = PlainRow<S.io, S.cache, S.head_size, S.head_size>;
  const int row = blockIdx.x;
  uint32_t nan = 0;
  for (int i = 0; i < Row::kValuePairs; ++i) {
    for (int j = 0; j < 2; ++j) {
      const int channel = 2 * Row::pair(i) + j;
      if (channel < S.head_size && p.nan[row * S.head_size + channel] != 0) nan |= 1u << (2 * i + j);
    }
  }
  const KvHead<S.cache> value_head(p.value_cache, p.kv_head);
  const Values<S.cache, S.head_size> values{value_head, p.blocks, 0};
  const bool found = values.is_spoilt_by_others(nan, p.own[row], {0, p.key_count});
  if (threadIdx.x == 0) p.spoilt[row] = found;

  Row plain;
  plain.attend(static_cast<const element_t<S.io>*>(p.query) + row * S.head_size, p.key_cache, p.value_cache, p.kv_head, p.blocks, 0, p.own[row],
               p.rules, static_cast<const element_t<S.io>*>(nullptr));
  float* g_row = p.output + row * S.head_size;
  plain.for_values(finalize(plain.state, negative_infinity()).factor, [&](int channel, float a, float b) {
    g_row[channel] = a;
    g_row[channel + 1] = b;
  });
}

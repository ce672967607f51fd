// Softmax of a tile of scores as mma_m16n8k16 leaves them with keys as its rows: query rows are its columns, of which a lane has two,
// and eight lanes, those with the same lane % 4, have the keys of a column.
#pragma once

#include <pagedattn/softmax.cuh>

// Moves the references, SoftmaxState::row_max, of both columns to what the scores of a tile ask for, with slack only if they ask for more
// than it, and calls `rescale` with what is to be multiplied to all that was accumulated. With slack most tiles need no maximum of a
// column. All lanes call it together; when a row's reference moves follows from its own scores alone.
template <bool kWithSlack, int kBlocks, class Rescale>
__device__ __forceinline__ void move_references(const float (&scores)[kBlocks][4], SoftmaxState (&state)[2], const Rescale& rescale) {
  float top[2];
  uint32_t lanes[2] = {kFullWarp, kFullWarp};  // that see a reason to move
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    top[e] = negative_infinity();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) top[e] = fmaxf(top[e], fmaxf(scores[b][e], scores[b][2 + e]));
    if constexpr (kWithSlack) lanes[e] = __ballot_sync(kFullWarp, top[e] > state[e].row_max + kSlack);
  }
  if ((lanes[0] | lanes[1]) == 0) return;
  const uint32_t own_column = 0x11111111u << threadIdx.x % 4;
  float factor[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(kFullWarp, top[e], distance));
    factor[e] = lanes[e] & own_column ? state[e].update_max(top[e]) : 1.0f;
  }
  rescale(factor);
}

// Online softmax in base 2: the running maximum and sum of one row, and every rule about rows that are empty.
//
// A row that has seen nothing, or only scores of -infinity, has row_max = -infinity and row_sum = 0. No operation here
// makes a NaN out of it: differences are taken against reference(), which is finite for such a row.
#pragma once

#include <pagedattn/math.cuh>
#include <pagedattn/ptx/exp2.cuh>

// Weights may be made against a reference that scores exceed by up to so much, in powers of two, before it moves: in the first tiles, and
// seldom later. Weights stay below 2^8, and most tiles leave what was accumulated as it is.
constexpr float kSlack = 8.0f;

struct SoftmaxState {
  float row_max = negative_infinity();  // of scores times log2(e)
  float row_sum = 0.0f;                 // of exp2(score - row_max)

  __device__ __forceinline__ float reference() const { return row_max == negative_infinity() ? 0.0f : row_max; }

  // Takes in the maximum of new scores; returns the factor for what was accumulated before.
  __device__ __forceinline__ float update_max(float new_max) {
    const float old_max = row_max;
    row_max = fmaxf(old_max, new_max);
    const float factor = ptx::exp2_approximate(old_max - reference());
    row_sum *= factor;
    return factor;
  }

  __device__ __forceinline__ float weight(float score) const { return ptx::exp2_approximate(score - reference()); }
};

// Base-2 logarithm of the sum of exp2(score): -infinity for an empty row.
__device__ __forceinline__ float lse_of(const SoftmaxState& state) {
  return state.row_sum != 0.0f ? state.row_max + log2f(state.row_sum) : negative_infinity();
}

struct SoftmaxResult {
  float factor;  // output = factor * accumulated
  float lse;     // natural logarithm, the sink included; -infinity for an empty row
};

// `sink_log2` is the head's sink times log2(e), or -infinity: an extra logit in the denominator only.
__device__ __forceinline__ SoftmaxResult finalize(const SoftmaxState& state, float sink_log2) {
  if (state.row_sum == 0.0f) return {0.0f, negative_infinity()};
  const float top = fmaxf(state.row_max, sink_log2);
  const float factor = exp2f(state.row_max - top);
  const float denominator = state.row_sum * factor + exp2f(sink_log2 - top);
  return {factor / denominator, kLn2 * (top + log2f(denominator))};
}

// The sink of a head in base 2; -infinity without one. `head_sink` is [num_heads] or null.
template <class T> __device__ __forceinline__ float sink_of(const void* head_sink, int head) {
  return head_sink == nullptr ? negative_infinity() : kLog2E * to_float(static_cast<const T*>(head_sink)[head]);
}

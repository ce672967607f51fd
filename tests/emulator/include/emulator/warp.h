// Barriers, votes, shuffles, reductions, and the tensor core's instructions: what threads do together.
//
// Each takes the place it was called from, for the message when the others are somewhere else.
#pragma once

#include <emulator/runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace emulator {

// The low bytes of `value` of lane `source`; a lane that does not take part gives poison.
EMULATOR_API uint64_t shuffle(unsigned mask, uint64_t value, int source, const char* what, const Place& place);
EMULATOR_API unsigned vote(unsigned mask, bool predicate, const char* what, const Place& place);

enum class Reduction { kAdd, kMin, kMax, kAnd, kOr, kXor };
EMULATOR_API uint32_t reduce(unsigned mask, uint32_t value, Reduction reduction, bool is_signed, const char* what,
                             const Place& place);

template <class T>
inline T shuffle_value(unsigned mask, T value, int source, const char* what, const Place& place) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, static_cast<const void*>(&value), sizeof(T));
  bits = shuffle(mask, bits, source, what, place);
  memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

}  // namespace emulator

// ---- barriers

inline void __syncthreads(const emulator::Place& place = emulator::Place::current()) {
  emulator::cta_barrier(false, "__syncthreads", place);
}
inline int __syncthreads_count(int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::cta_barrier(predicate != 0, "__syncthreads_count", place);
}
inline int __syncthreads_or(int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::cta_barrier(predicate != 0, "__syncthreads_or", place) > 0;
}
inline int __syncthreads_and(int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::cta_barrier(predicate == 0, "__syncthreads_and", place) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, const emulator::Place& place = emulator::Place::current()) {
  emulator::warp_collective(mask, nullptr, nullptr, "__syncwarp", place);
}

// ---- votes

inline unsigned __ballot_sync(unsigned mask, int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::vote(mask, predicate != 0, "__ballot_sync", place);
}
inline int __any_sync(unsigned mask, int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::vote(mask, predicate != 0, "__any_sync", place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const emulator::Place& place = emulator::Place::current()) {
  return emulator::vote(mask, predicate == 0, "__all_sync", place) == 0;
}

// ---- shuffles

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     const emulator::Place& place = emulator::Place::current()) {
  const int lane = static_cast<int>(emulator::current->lane), first = lane & ~(width - 1);
  return emulator::shuffle_value(mask, value, first + (source & (width - 1)), "__shfl_sync", place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        const emulator::Place& place = emulator::Place::current()) {
  const int lane = static_cast<int>(emulator::current->lane), first = lane & ~(width - 1);
  const int source = lane - static_cast<int>(delta);
  return emulator::shuffle_value(mask, value, source < first ? lane : source, "__shfl_up_sync", place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          const emulator::Place& place = emulator::Place::current()) {
  const int lane = static_cast<int>(emulator::current->lane), last = lane | (width - 1);
  const int source = lane + static_cast<int>(delta);
  return emulator::shuffle_value(mask, value, source > last ? lane : source, "__shfl_down_sync", place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         const emulator::Place& place = emulator::Place::current()) {
  const int lane = static_cast<int>(emulator::current->lane), last = lane | (width - 1);
  const int source = lane ^ lane_mask;
  return emulator::shuffle_value(mask, value, source > last ? lane : source, "__shfl_xor_sync", place);
}

// ---- reductions

#define EMULATOR_REDUCE(name, type, reduction)                                                                  \
  inline type name(unsigned mask, type value, const emulator::Place& place = emulator::Place::current()) {      \
    return static_cast<type>(emulator::reduce(mask, static_cast<uint32_t>(value), emulator::Reduction::reduction, \
                                              std::is_signed_v<type>, #name, place));                           \
  }
EMULATOR_REDUCE(__reduce_add_sync, int, kAdd)
EMULATOR_REDUCE(__reduce_add_sync, unsigned, kAdd)
EMULATOR_REDUCE(__reduce_min_sync, int, kMin)
EMULATOR_REDUCE(__reduce_min_sync, unsigned, kMin)
EMULATOR_REDUCE(__reduce_max_sync, int, kMax)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, kMax)
EMULATOR_REDUCE(__reduce_and_sync, unsigned, kAnd)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, kOr)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef EMULATOR_REDUCE

// ---- what the host branches of the ptx headers call

namespace emulator {

// cp.async: `bytes` arrive at `destination` by the wait, of which the first `source_bytes` come from `source`, the rest
// are zero. The source is read here, so that a bad address is found where it was written.
inline void cp_async(void* destination, const void* source, unsigned bytes, unsigned source_bytes) {
  unsigned char data[16] = {};
  for (unsigned i = 0; i < source_bytes; ++i) data[i] = static_cast<const unsigned char*>(source)[i];
  async_copy(destination, data, bytes);
}
inline void cp_async_commit() { async_commit(); }
inline void cp_async_wait(unsigned newest_groups_left_running) { async_wait(newest_groups_left_running); }
inline void cp_async_wait_all() {
  async_commit();
  async_wait(0);
}

// Element types of a matrix fragment.
enum class Element { kF16, kBF16, kE4M3, kS8 };

// mma.sync.aligned.m16n8k<K>.row.col, K elements of 16 or 8 bits to a 32-byte row: d = a b + c in float32 (int32 for
// kS8). `k` is 8 or 16 for elements of 16 bits, 16 or 32 for those of 8; registers as PTX lays them out.
EMULATOR_API void mma_m16n8(Element element, int k, void* d, const uint32_t* a, const uint32_t* b, const void* c,
                            const Place& place);

template <Element kElement, int kK, class Sum>
inline void mma_m16n8(Sum (&d)[4], const uint32_t* a, const uint32_t* b, const Sum (&c)[4],
                      const Place& place = Place::current()) {
  static_assert(kElement == Element::kF16 || kElement == Element::kBF16 ? kK == 8 || kK == 16 : kK == 16 || kK == 32);
  static_assert(std::is_same_v<Sum, std::conditional_t<kElement == Element::kS8, int, float>>, "the type of the sums");
  mma_m16n8(kElement, kK, d, a, b, c, place);
}

// ldmatrix.sync.aligned.m8n8.x<kMatrices>[.trans].shared.b16: lane 8 i + r gives the address of row r of matrix i.
EMULATOR_API void exchange_matrix(int matrices, bool transposed, uint32_t* registers, const void* row, const Place& place);

template <int kMatrices, bool kTransposed>
inline void ldmatrix(uint32_t* registers, const void* address, const Place& place = Place::current()) {
  // A row is read before the lanes meet: one that another lane wrote needs a __syncwarp first, as on the device.
  uint32_t row[4] = {};
  if (current->lane < 8 * kMatrices) {
    for (int i = 0; i < 4; ++i) row[i] = static_cast<const uint32_t*>(address)[i];
  }
  exchange_matrix(kMatrices, kTransposed, registers, row, place);
}

}  // namespace emulator

// Barriers of shared memory (mbarrier objects) and the copy engine's bulk copies, which arrive at them.
//
// A copy leaves its target undefined when it is started, and ends at any later time: one of those that are under way, at random, each time
// a thread waits. So what is read before its wait, and what is refilled while it is still read, shows.
#pragma once

#include <emulator/runtime.h>

namespace emulator {

// Accesses to a barrier are no accesses to shared memory that could race.
#define UNTRACED __attribute__((no_sanitize("thread")))

// What the 64 bits of a barrier hold.
struct Mbarrier {
  uint16_t phase : 1;     // parity of the phase that is under way
  uint16_t arrivals : 15;  // of a phase
  uint16_t missing;
  int32_t bytes;          // of copies, that are still to come
};
static_assert(sizeof(Mbarrier) == 8, "as large as the real one");

inline Mbarrier& mbarrier(uint64_t* s_barrier) { return *reinterpret_cast<Mbarrier*>(s_barrier); }

UNTRACED inline void complete_phase(Mbarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.missing = barrier.arrivals;
}

inline void mbarrier_init(uint64_t* s_barrier, int arrivals) {
  mbarrier(s_barrier) = {0, static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}

UNTRACED inline void mbarrier_arrive(uint64_t* s_barrier, int bytes, const Place& place = Place::current()) {
  passes_on(s_barrier);
  Mbarrier& barrier = mbarrier(s_barrier);
  if (barrier.missing == 0) fail("more threads arrive at a barrier than a phase has", place);
  barrier.bytes += bytes;
  --barrier.missing;
  complete_phase(barrier);
}

struct BulkCopy {
  void* target;
  const void* source;
  int bytes;
  uint64_t* s_barrier;
};
// Those of the CTA that runs: one at a time, so the executor has one worker.
struct BulkCopies {
  static constexpr int kMost = 4096;
  BulkCopy under_way[kMost];
  int count = 0;
  uint32_t random = 1;
};
inline BulkCopies bulk_copies;

inline void bulk_load(void* s_target, const void* g_source, int bytes, uint64_t* s_barrier, const Place& place = Place::current()) {
  const auto bits = reinterpret_cast<uint64_t>(s_target) | reinterpret_cast<uint64_t>(g_source) | static_cast<uint64_t>(bytes);
  if (bits % 16 != 0) fail("a bulk copy wants multiples of 16 bytes", place);
  const auto* source = static_cast<const volatile unsigned char*>(g_source);
  (void)(source[0] + source[bytes - 1]);  // a bad address is found where it was written
  memset(s_target, 0xff, bytes);
  if (bulk_copies.count == BulkCopies::kMost) fail("too many bulk copies under way", place);
  bulk_copies.under_way[bulk_copies.count++] = {s_target, g_source, bytes, s_barrier};
}

UNTRACED inline void end_a_copy() {
  BulkCopies& copies = bulk_copies;
  if (copies.count == 0) return;
  copies.random = copies.random * 1664525u + 1013904223u;
  BulkCopy& chosen = copies.under_way[(copies.random >> 8) % copies.count];
  const BulkCopy copy = chosen;
  chosen = copies.under_way[--copies.count];
  memcpy(copy.target, copy.source, copy.bytes);
  mbarrier(copy.s_barrier).bytes -= copy.bytes;
  complete_phase(mbarrier(copy.s_barrier));
}

UNTRACED inline void mbarrier_wait(uint64_t* s_barrier, uint32_t parity, const Place& place = Place::current()) {
  while (mbarrier(s_barrier).phase == parity) {
    end_a_copy();
    yield(place);
  }
  passes_on(s_barrier);
}

}  // namespace emulator

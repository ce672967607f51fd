// What a compiled kernel asks of the runtime: who am I, wait for the others, copy later.
//
// A CTA's threads are fibers of one OS thread. A fiber runs until it waits at a barrier or a warp collective; the last
// one to arrive does the collective's work for all. So nothing here is a data race of the host program, and the order in
// which fibers run is a free choice, which EMULATOR_SEED makes.
#pragma once

#include <crt/host_defines.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#define EMULATOR_API __attribute__((visibility("default")))

namespace emulator {

using Place = std::source_location;

struct Thread {
  uint3 thread_idx;
  unsigned lane;
  uint3 block_idx;
  unsigned warp;
  dim3 block_dim, grid_dim;
  void* shared;             // dynamic shared memory of the CTA
  unsigned shared_bytes;
};

// The running fiber. A variable of the OS thread, which fibers never leave.
extern EMULATOR_API thread_local Thread* current __attribute__((tls_model("initial-exec")));

// All threads of the CTA, at one place in the source. Returns how many passed true.
EMULATOR_API int cta_barrier(bool predicate, const char* what, const Place& place);
// bar.sync and bar.arrive: `count` threads, a multiple of the warp size; 0 means all threads of the CTA.
EMULATOR_API void named_barrier_sync(int id, int count, const Place& place);
EMULATOR_API void named_barrier_arrive(int id, int count, const Place& place);
// bar.red.or: whether any of the threads passed true.
EMULATOR_API bool named_barrier_any(int id, int count, bool predicate, const Place& place);
// An object through which threads meet: who comes later knows of all that those before did.
EMULATOR_API void passes_on(const void* object);

// Every lane of `mask` arrives with its operand at one place in the source; the last one calls
// `complete(operands, mask)`, which may read and write each of them; then all go on.
using Complete = void (*)(void* const (&operands)[32], unsigned mask);
EMULATOR_API void warp_collective(unsigned mask, Complete complete, void* operand, const char* what, const Place& place);

// For a loop that waits for another thread's write: lets the others run. A CTA that does nothing else is a deadlock.
EMULATOR_API void yield(const Place& place);

// Ends the launch with an error at this place.
[[noreturn]] EMULATOR_API void fail(const char* reason, const Place& place);

// cp.async. The destination is undefined from the issue to the wait: poison goes in at once, the data at the wait, so
// both a missing wait and a buffer refilled while others still read it show.
EMULATOR_API void async_copy(void* destination, const void* data, unsigned bytes);
EMULATOR_API void async_commit();
EMULATOR_API void async_wait(unsigned newest_groups_left_running);

}  // namespace emulator

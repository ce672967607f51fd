// Barriers of shared memory: mbarrier objects, which also count bytes that the copy engine delivers, and named barriers.
//
// A waiter names the parity of the phase that it waits for: 0 for the first one. Waiting for parity 1 on a fresh barrier
// returns at once.
#pragma once

#include <pagedattn/types.cuh>

namespace ptx {

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ uint32_t shared_address(const void* s_pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(s_pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* s_barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(s_barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(s_barrier)) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Makes the initialized barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and makes the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* s_barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(s_barrier)), "r"(bytes)
               : "memory");
}
#endif

// Arrives when all copies that this thread has started with cp.async have ended.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* s_barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(s_barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* s_barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(shared_address(s_barrier)), "r"(parity)
      : "memory");
}

// Named barriers 1..15; `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same, and every thread gets to know whether any of them brings true.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool own) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(own)) : "memory");
  return any != 0;
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#else

__device__ __forceinline__ void mbarrier_init(uint64_t* s_barrier, int arrivals) { emulator::mbarrier_init(s_barrier, arrivals); }
__device__ __forceinline__ void mbarrier_init_fence() {}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier) { emulator::mbarrier_arrive(s_barrier, 0); }
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* s_barrier, int bytes) { emulator::mbarrier_arrive(s_barrier, bytes); }
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* s_barrier) {
  emulator::async_commit();
  emulator::async_wait(0);
  emulator::mbarrier_arrive(s_barrier, 0);
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* s_barrier, uint32_t parity) { emulator::mbarrier_wait(s_barrier, parity); }

__device__ __forceinline__ void named_barrier_sync(int id, int threads, const emulator::Place& place = emulator::Place::current()) {
  emulator::named_barrier_sync(id, threads, place);
}
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool own,
                                                  const emulator::Place& place = emulator::Place::current()) {
  return emulator::named_barrier_any(id, threads, own, place);
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads, const emulator::Place& place = emulator::Place::current()) {
  emulator::named_barrier_arrive(id, threads, place);
  emulator::warp_collective(0xffffffffu, nullptr, nullptr, "bar.arrive", place);  // which the lanes of a warp execute together
}

#endif

}  // namespace ptx

// The copy engine: from global to shared memory, boxes of a tensor that a map describes, which the host encodes, or plain bytes.
#pragma once

#include <pagedattn/ptx/mbarrier.cuh>

// A CUtensorMap, opaque. It must be a __grid_constant__ parameter or lie in global memory.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// True in one lane of a whole warp, and the compiler knows that it is one: instructions that a single thread issues need no
// loop over lanes.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen != 0;
}

// Starts the copy of the box at a coordinate (innermost axis first); its bytes are counted on the barrier. Elements
// outside of the tensor arrive as zeros, and are counted too. One thread calls it.
__device__ __forceinline__ void tma_load(void* s_target, const TensorMap& map, uint64_t* s_barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(s_target)),
      "l"(&map), "r"(shared_address(s_barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* s_target, const TensorMap& map, uint64_t* s_barrier, int c0, int c1, int c2, int c3,
                                         int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::
          "r"(shared_address(s_target)),
      "l"(&map), "r"(shared_address(s_barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The way back: starts the copy of a box to memory; what lies outside of the tensor is left out. One thread calls it, and bulk_commit
// after one or more of them.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* s_source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(s_source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until what the calling thread has committed has been read from shared memory, or is in memory, visible to that thread.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Starts the copy of `bytes` that lie side by side; both addresses and the count are multiples of 16. One thread calls it.
__device__ __forceinline__ void bulk_load(void* s_target, const void* g_source, int bytes, uint64_t* s_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(s_target)),
               "l"(g_source), "r"(bytes), "r"(shared_address(s_barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_load(void* s_target, const void* g_source, int bytes, uint64_t* s_barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(s_target)),
      "l"(g_source), "r"(bytes), "r"(shared_address(s_barrier)), "l"(policy)
      : "memory");
}

// Brings `bytes` that lie side by side to L2; the address and the count are multiples of 16. One thread calls it.
__device__ __forceinline__ void bulk_prefetch(const void* g_source, int bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(g_source), "r"(bytes), "l"(policy) : "memory");
}

// How long L2 keeps what a copy reads: gone first, or as long as anything.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same copy under a policy.
__device__ __forceinline__ void tma_load(void* s_target, const TensorMap& map, uint64_t* s_barrier, uint64_t policy, int c0, int c1, int c2,
                                         int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(s_target)),
      "l"(&map), "r"(shared_address(s_barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Orders this thread's ordinary stores to shared memory before later reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#elif !defined(__CUDA_ARCH__)

__device__ __forceinline__ bool elect() { return threadIdx.x % kWarpSize == 13; }  // any one will do
__device__ __forceinline__ void bulk_load(void* s_target, const void* g_source, int bytes, uint64_t* s_barrier) {
  emulator::bulk_load(s_target, g_source, bytes, s_barrier);
}
__device__ __forceinline__ void fence_async_proxy() {}

#endif

}  // namespace ptx

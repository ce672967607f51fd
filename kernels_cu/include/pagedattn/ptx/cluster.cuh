// Clusters: CTAs that run side by side on neighbouring multiprocessors and reach each other's shared memory, where the same
// array lies at the same offset. A CTA is named by its rank in the cluster.
//
// What a CTA does to the shared memory of another one wants that one to be there: both meet before the first time
// (cluster_arrive_relaxed, cluster_wait) and after the last (cluster_arrive, cluster_wait).
#pragma once

#include <pagedattn/ptx/mbarrier.cuh>
#include <pagedattn/ptx/tma.cuh>

namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// The barrier of all threads of a cluster: each arrives, then waits for the others. Relaxed: what was written before is not
// made visible, except for barriers after mbarrier_init_fence.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where an object of this CTA's shared memory has its twin in CTA `rank`, as an address of the cluster's shared memory.
__device__ __forceinline__ uint32_t cluster_address(const void* s_pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(s_pointer)), "r"(rank));
  return address;
}

// The same as an ordinary pointer, for what CTAs of a cluster read of each other.
template <class T> __device__ __forceinline__ const T* cluster_twin(const T* s_pointer, int rank) {
  const T* twin;
  asm("mapa.u64 %0, %1, %2;" : "=l"(twin) : "l"(s_pointer), "r"(rank));
  return twin;
}

// Arrives at the barrier of CTA `rank`. To those who wait there it stands for what this thread has read, not for what it has
// written: a release for the cluster waits for all of a thread's writes, to global memory too.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* s_barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(s_barrier, rank)) : "memory");
}

// Waits for this CTA's barrier, and for what other CTAs have sent with it.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* s_barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(shared_address(s_barrier)), "r"(parity)
      : "memory");
}

// Arrives at the barrier of CTA `rank` and stores a value there, which is complete when the phase is. One thread calls it.
template <class T> __device__ __forceinline__ void send(T* s_target, const T& value, uint64_t* s_barrier, int rank) {
  struct Words {
    Vector16 part[sizeof(T) / sizeof(Vector16)];
  };
  static_assert(sizeof(T) == sizeof(Words), "goes in parts of 16 bytes");
  const Words words = __builtin_bit_cast(Words, value);
  const uint32_t target = cluster_address(s_target, rank);
  const uint32_t barrier = cluster_address(s_barrier, rank);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "n"(sizeof(T)) : "memory");
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(Vector16)); ++i) {
    const uint32_t(&word)[4] = words.part[i].word;
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     target + 16 * i),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(barrier)
                 : "memory");
  }
}

// The copy of a box to the same place in every CTA whose rank is a bit of `ranks`; its bytes are counted on the barrier of each.
__device__ __forceinline__ void tma_load_multicast(void* s_target, const TensorMap& map, uint64_t* s_barrier, uint16_t ranks,
                                                   uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(shared_address(s_target)),
      "l"(&map), "r"(shared_address(s_barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ranks), "l"(policy)
      : "memory");
}

#endif

}  // namespace ptx

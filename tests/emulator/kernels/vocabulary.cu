// A use of each word of the CUDA vocabulary. One CTA of 128 threads; the test computes what each thread must write.
#include <pagedattn/ptx/ldmatrix.cuh>
#include <pagedattn/ptx/mma.cuh>

enum Word {
  kIndices, kSyncthreads, kCount, kOr, kAnd, kNamedBarrier, kArrive,
  kShfl, kShflUp, kShflDown, kShflXor, kShflWidth, kShflHalfWarp, kShflDouble, kBallot, kAny, kAll,
  kReduceAdd, kReduceMin, kReduceMax, kReduceAnd, kReduceOr, kReduceXor,
  kAtomicAdd, kAtomicFloat, kAtomicMax, kAtomicExch, kAtomicCas, kAtomicInc, kAtomicShared,
  kPopc, kClz, kFfs, kBrev, kBytePerm, kFunnel, kMulhi, kDp4a, kRoundToInt, kMinMax, kPartialWarp, kPoll,
};

struct VocabularySpec {};

struct VocabularyParams {
  const int* source;  // [128]
  int* target;        // [128]
  int* scratch;       // [128], zeros
  int word;
};

__device__ int use(Word word, const VocabularyParams& p, int x) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  __shared__ int s_tile[128];
  if (word == kIndices) {
    return threadIdx.x + 1000 * blockIdx.x + 10000 * blockDim.x + 10000000 * (gridDim.y + gridDim.z + blockDim.z) + threadIdx.y;
  } else if (word == kSyncthreads) {
    s_tile[thread] = x;
    __syncthreads();
    return s_tile[127 - thread];
  } else if (word == kCount) {
    return __syncthreads_count(x % 3 == 0);
  } else if (word == kOr) {
    return 10 * __syncthreads_or(x == 77) + __syncthreads_or(x < 0);
  } else if (word == kAnd) {
    return 10 * __syncthreads_and(x >= 0) + __syncthreads_and(x != 77);
  } else if (word == kNamedBarrier) {  // two pairs of warps, each with a barrier of its own
    s_tile[thread] = x;
    emulator::named_barrier_sync(1 + warp / 2, 64, emulator::Place::current());
    return s_tile[thread ^ 63];
  } else if (word == kArrive) {  // warp 0 makes what warps 1 to 3 wait for
    if (warp == 0) {
      s_tile[lane] = x;
      emulator::named_barrier_arrive(3, 128, emulator::Place::current());
      return x;
    }
    emulator::named_barrier_sync(3, 128, emulator::Place::current());
    return s_tile[lane];
  } else if (word == kShfl) {
    return __shfl_sync(kAllLanes, x, 3 * lane + 1);
  } else if (word == kShflUp) {
    return __shfl_up_sync(kAllLanes, x, 5);
  } else if (word == kShflDown) {
    return __shfl_down_sync(kAllLanes, x, 5);
  } else if (word == kShflXor) {
    return __shfl_xor_sync(kAllLanes, x, 21);
  } else if (word == kShflWidth) {
    return __shfl_sync(kAllLanes, x, 2, 8) + 1000 * __shfl_up_sync(kAllLanes, x, 3, 8) +
           100000 * __shfl_down_sync(kAllLanes, x % 8, 3, 8);
  } else if (word == kShflHalfWarp) {  // each half by itself
    if (lane < 16) return __shfl_xor_sync(0x0000ffffu, x, 7);
    return __shfl_xor_sync(0xffff0000u, x, 9);
  } else if (word == kShflDouble) {
    return static_cast<int>(__shfl_xor_sync(kAllLanes, x * 1e9, 3) / 1e9);
  } else if (word == kBallot) {
    return static_cast<int>(__ballot_sync(kAllLanes, x % 5 == 2));
  } else if (word == kAny) {
    return __any_sync(kAllLanes, x == 77);
  } else if (word == kAll) {
    return __all_sync(kAllLanes, x != 77);
  } else if (word == kReduceAdd) {
    return __reduce_add_sync(kAllLanes, x - 60);
  } else if (word == kReduceMin) {
    return __reduce_min_sync(kAllLanes, x - 60);
  } else if (word == kReduceMax) {
    return __reduce_max_sync(kAllLanes, x - 60);
  } else if (word == kReduceAnd) {
    return static_cast<int>(__reduce_and_sync(kAllLanes, static_cast<unsigned>(x) | 64u));
  } else if (word == kReduceOr) {
    return static_cast<int>(__reduce_or_sync(kAllLanes, static_cast<unsigned>(x)));
  } else if (word == kReduceXor) {
    return static_cast<int>(__reduce_xor_sync(kAllLanes, static_cast<unsigned>(x)));
  } else if (word == kAtomicAdd) {
    atomicAdd(&p.scratch[0], x);
    __syncthreads();
    return p.scratch[0];
  } else if (word == kAtomicFloat) {
    float* sum = reinterpret_cast<float*>(&p.scratch[0]);
    atomicAdd(sum, static_cast<float>(x));
    __syncthreads();
    return static_cast<int>(*sum);
  } else if (word == kAtomicMax) {
    atomicMax(&p.scratch[0], x);
    atomicMin(&p.scratch[1], -x);
    __syncthreads();
    return p.scratch[0] - p.scratch[1];
  } else if (word == kAtomicExch) {  // every value but one comes back, and that one stays
    p.scratch[64 + atomicExch(&p.scratch[0], thread) % 64] = 1;
    return 0;
  } else if (word == kAtomicCas) {
    while (atomicCAS(&p.scratch[0], thread, thread + 1) != thread) __nanosleep(10);  // in order of the threads
    return thread;
  } else if (word == kAtomicInc) {
    const int ticket = static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(&p.scratch[0]), 9));
    __syncthreads();
    return ticket >= 0 && ticket <= 9 ? p.scratch[0] : -1;
  } else if (word == kAtomicShared) {
    if (thread == 0) s_tile[0] = 0;
    __syncthreads();
    atomicOr(&s_tile[0], 1 << lane);
    __syncthreads();
    return s_tile[0];
  } else if (word == kPopc) {
    return __popc(x * 0x01010101u);
  } else if (word == kClz) {
    return __clz(x - 1);
  } else if (word == kFfs) {
    return __ffs(x & ~1);
  } else if (word == kBrev) {
    return static_cast<int>(__brev(static_cast<unsigned>(x)));
  } else if (word == kBytePerm) {
    return static_cast<int>(__byte_perm(0x03020100u + x, 0x87868584u, 0x9c61));
  } else if (word == kFunnel) {
    return static_cast<int>(__funnelshift_l(0x80000000u, static_cast<unsigned>(x), 3) ^ __funnelshift_r(5u, static_cast<unsigned>(x), 2));
  } else if (word == kMulhi) {
    return __mulhi(x << 20, -(x << 18)) + static_cast<int>(__umulhi(0xffffffffu, static_cast<unsigned>(x)));
  } else if (word == kDp4a) {
    return __dp4a(static_cast<int>(0x80ff0102u), static_cast<int>(0x7f03fe00u + x), -7);
  } else if (word == kRoundToInt) {
    const float y = 0.5f * static_cast<float>(x - 60);
    const int odd = __float2int_rn(3e9f) == 2147483647 && __float2int_rz(-3e9f) == -2147483647 - 1 &&
                    __float2int_rn(__int_as_float(0x7fc00000)) == 0 && __float2uint_rn(-1.0f) == 0;
    return 8000 * (__float2int_rn(y) + 100) + 40 * (__float2int_rd(y) - __float2int_ru(y)) + __float2int_rz(y) + odd;
  } else if (word == kMinMax) {
    return 1000 * max(x, 70) + min(x, 50) + static_cast<int>(fmaxf(__int_as_float(0x7fc00000), 1.0f)) + static_cast<int>(max(0.5f, 2.0f));
  } else if (word == kPartialWarp) {
    return __shfl_xor_sync(kAllLanes, x, 1);
  } else if (word == kPoll) {
    volatile int* s_flag = s_tile;
    if (thread == 0) *s_flag = 0;
    __syncthreads();
    if (thread == 127) *s_flag = 5;
    while (*s_flag != 5) __nanosleep(20);
    return *s_flag;
  }
  return -1;
}

template <VocabularySpec S>
__global__ void __launch_bounds__(128) vocabulary(const __grid_constant__ VocabularyParams p) {
  p.target[threadIdx.x] = use(static_cast<Word>(p.word), p, p.source[threadIdx.x]);
}

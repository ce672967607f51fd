// One planted fault each: what the emulator must find, and name by the line that a comment marks with "<-".
#include <pagedattn/ptx/cp_async.cuh>

enum Fault {
  kReadPastEnd, kReadBefore, kWritePastEnd, kDynamicSharedPastEnd, kStaticSharedPastEnd, kUninitializedShared,
  kMissingBarrier, kMissingBarrierInLoop, kRaceBetweenWarps, kMissingWarpBarrier, kMissingWait, kEarlyRefill,
  kDivergentBarrier, kExitedAtBarrier, kBarrierAfterExit, kDivergentWarp, kExitedLane, kNotInMask, kNamedBarrierStarves,
  kPollsForever, kLoopsForever, kDivideByZero, kTrap, kMisaligned, kShiftTooFar,
};

struct FaultsSpec {};

struct FaultsParams {
  const float* source;  // [count]
  float* target;        // [count]
  int count;            // threads of the grid
  int offset;
  int fault;
};

template <FaultsSpec S>
__global__ void __launch_bounds__(128) faults(const __grid_constant__ FaultsParams p) {
  const int thread = threadIdx.x, i = blockIdx.x * 128 + thread, warp = thread / 32, lane = thread % 32;
  float* s_dynamic = shared_memory<float>();
  if (p.fault == kReadPastEnd) {
    p.target[i] = p.source[i + p.offset];  // <- kReadPastEnd
  } else if (p.fault == kReadBefore) {
    p.target[i] = p.source[i - p.offset];  // <- kReadBefore
  } else if (p.fault == kWritePastEnd) {
    p.target[i + p.offset] = 1.0f;  // <- kWritePastEnd
  } else if (p.fault == kDynamicSharedPastEnd) {
    s_dynamic[thread + p.offset] = 1.0f;  // <- kDynamicSharedPastEnd
    __syncthreads();
    p.target[i] = s_dynamic[thread];
  } else if (p.fault == kStaticSharedPastEnd) {
    __shared__ float s_tile[128];
    float* s_end = s_tile + p.offset;
    s_end[thread] = 1.0f;  // <- kStaticSharedPastEnd
    __syncthreads();
    p.target[i] = s_tile[thread];
  } else if (p.fault == kUninitializedShared) {
    __shared__ float s_tile[128];
    if (thread % 2) s_tile[thread] = s_dynamic[thread] = 1.0f;
    __syncthreads();
    p.target[i] = s_tile[thread] + s_dynamic[thread];  // <- kUninitializedShared
  } else if (p.fault == kMissingBarrier) {
    s_dynamic[thread] = p.source[i];
    p.target[i] = s_dynamic[127 - thread];  // <- kMissingBarrier
  } else if (p.fault == kMissingBarrierInLoop) {
    float sum = 0.0f;
    for (int step = 0; step < 3; ++step) {
      s_dynamic[thread] = p.source[i] * (step + 1);  // <- kMissingBarrierInLoop
      __syncthreads();
      sum += s_dynamic[127 - thread];  // one more barrier belongs behind this line
    }
    p.target[i] = sum;
  } else if (p.fault == kRaceBetweenWarps) {
    if (lane == 0) s_dynamic[0] = p.source[i];  // <- kRaceBetweenWarps
    __syncthreads();
    p.target[i] = s_dynamic[0];
  } else if (p.fault == kMissingWarpBarrier) {
    s_dynamic[thread] = p.source[i];
    p.target[i] = s_dynamic[32 * warp + 31 - lane];  // <- kMissingWarpBarrier
  } else if (p.fault == kMissingWait) {
    ptx::cp_async<4>(&s_dynamic[thread], &p.source[i], 4);
    ptx::cp_async_commit();
    __syncthreads();
    p.target[i] = s_dynamic[thread];  // <- kMissingWait
  } else if (p.fault == kEarlyRefill) {
    s_dynamic[thread] = p.source[i];
    __syncthreads();
    const float mine = s_dynamic[127 - thread];
    ptx::cp_async<4>(&s_dynamic[thread], &p.source[i], 4);  // <- kEarlyRefill
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    p.target[i] = mine + s_dynamic[127 - thread];
  } else if (p.fault == kDivergentBarrier) {
    if (warp % 2) {
      __syncthreads();  // <- kDivergentBarrier
    } else {
      __syncthreads();
    }
  } else if (p.fault == kExitedAtBarrier) {
    if (warp == 3) return;
    __syncthreads();  // <- kExitedAtBarrier
  } else if (p.fault == kBarrierAfterExit) {
    if (warp == 0) return;
    __syncthreads();  // <- kBarrierAfterExit
  } else if (p.fault == kDivergentWarp) {
    if (lane < 16) {
      p.target[i] = __shfl_xor_sync(0xffffffffu, p.source[i], 1);  // <- kDivergentWarp
    } else {
      p.target[i] = __shfl_xor_sync(0xffffffffu, p.source[i], 2);
    }
  } else if (p.fault == kExitedLane) {
    if (lane == 0) return;
    __syncwarp();  // <- kExitedLane
  } else if (p.fault == kNotInMask) {
    p.target[i] = __shfl_sync(0x0000ffffu, p.source[i], 0);  // <- kNotInMask
  } else if (p.fault == kNamedBarrierStarves) {
    if (warp < 2) emulator::named_barrier_sync(1, 96, emulator::Place::current());  // <- kNamedBarrierStarves
  } else if (p.fault == kPollsForever) {
    volatile float* s_flag = s_dynamic;
    while (*s_flag != 1.0f) __nanosleep(20);  // <- kPollsForever
  } else if (p.fault == kLoopsForever) {
    volatile float* s_flag = s_dynamic;
    while (*s_flag != 1.0f) continue;  // <- kLoopsForever
  } else if (p.fault == kDivideByZero) {
    p.target[i] = static_cast<float>(p.count / (p.offset + warp));  // <- kDivideByZero
  } else if (p.fault == kTrap) {
    if (i == 70) __trap();  // <- kTrap
  } else if (p.fault == kMisaligned) {
    *reinterpret_cast<float4*>(p.target + p.offset) = float4{};  // <- kMisaligned
  } else if (p.fault == kShiftTooFar) {
    p.target[i] = static_cast<float>(1 << (p.offset + lane));  // <- kShiftTooFar
  }
}

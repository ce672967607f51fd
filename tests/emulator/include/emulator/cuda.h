// The CUDA vocabulary, for a .cu file that g++ compiles unchanged. Included before its first line.
#pragma once

#include <emulator/runtime.h>

// Standard headers first: they spell attributes with words that are macros below.
#include <cassert>
#include <cmath>
#include <cstdio>

#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <emulator/atomics.h>
#include <emulator/copies.h>
#include <emulator/intrinsics.h>
#include <emulator/warp.h>

#define threadIdx (::emulator::current->thread_idx)
#define blockIdx (::emulator::current->block_idx)
#define blockDim (::emulator::current->block_dim)
#define gridDim (::emulator::current->grid_dim)
constexpr int warpSize = 32;

// The seam in pagedattn/types.cuh: `extern __shared__` has no meaning here.
inline unsigned char* pagedattn_dynamic_shared_memory() {
  return static_cast<unsigned char*>(::emulator::current->shared);
}

#define __noinline__ __attribute__((noinline))
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))  // which, unlike alignas, may also follow __shared__

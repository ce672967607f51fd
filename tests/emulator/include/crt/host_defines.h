// What vector_types.h and the half, bfloat16 and fp8 headers need of the compiler's own crt/host_defines.h,
// which the runtime-header wheel does not carry. A toolkit has one; its include guard is set here to keep it out.
#pragma once
#define __HOST_DEFINES_H__

#define __host__
#define __device__
#define __global__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __no_return__ __attribute__((noreturn))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL

// One CTA at a time runs on a worker thread, so a variable of the thread is a variable of the CTA.
#define __shared__ static thread_local

#define __cluster_dims__(...) _Pragma("GCC error \"__cluster_dims__: clusters of CTAs do not run in the emulator\"")

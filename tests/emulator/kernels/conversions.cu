// The CUDA headers' conversions between float and 16-bit, 8-bit codes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct ConversionsSpec { int type; bool decodes; };  // type: 0 float16, 1 bfloat16, 2 float8 e4m3, 3 float8 e5m2

struct ConversionsParams {
  unsigned short* codes;  // [count]
  float* values;          // [count]
  int count;
};

template <ConversionsSpec S>
__global__ void conversions(const __grid_constant__ ConversionsParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  unsigned short& code = p.codes[i];
  float& value = p.values[i];
  if constexpr (S.type == 0) {
    if constexpr (S.decodes) value = __half2float(__ushort_as_half(code));
    else code = __half_as_ushort(__float2half_rn(value));
  } else if constexpr (S.type == 1) {
    if constexpr (S.decodes) value = __bfloat162float(__ushort_as_bfloat16(code));
    else code = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  } else {
    constexpr __nv_fp8_interpretation_t kKind = S.type == 2 ? __NV_E4M3 : __NV_E5M2;
    if constexpr (S.decodes) {
      value = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<unsigned char>(code), kKind)));
    } else {
      code = __nv_cvt_float_to_fp8(value, __NV_NOSAT, kKind);
    }
  }
}

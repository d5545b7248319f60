/*# SPDX-License-Identifier: Apache-2.0 #*/
// Element types under the names the tuner uses. No CUDA headers: 16-bit floats are storage only,
// arithmetic is done in fp32.
using fp32 = float;
using fp64 = double;
struct alignas(2) fp16 {
  unsigned short bits;
};
struct alignas(2) bf16 {
  unsigned short bits;
};

template <typename To>
__device__ __forceinline__ To convert(fp32 value) {
  return static_cast<To>(value);
}
template <typename To>
__device__ __forceinline__ To convert(fp64 value) {
  return static_cast<To>(value);
}
template <typename To>
__device__ __forceinline__ To convert(fp16 value) {
  fp32 wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return static_cast<To>(wide);
}
template <typename To>
__device__ __forceinline__ To convert(bf16 value) {
  // bf16 is the upper half of fp32, so widening is a shift and NaN payloads survive.
  return static_cast<To>(__uint_as_float(static_cast<unsigned>(value.bits) << 16));
}
template <>
__device__ __forceinline__ fp16 convert<fp16>(fp32 value) {
  fp16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
template <>
__device__ __forceinline__ bf16 convert<bf16>(fp32 value) {
  bf16 narrow;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#else
  // Round to nearest even by hand; a NaN keeps its upper bits and is made quiet.
  const unsigned bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  narrow.bits = static_cast<unsigned short>((is_nan ? bits | 0x400000u : rounded) >> 16);
#endif
  return narrow;
}
template <>
__device__ __forceinline__ fp16 convert<fp16>(fp16 value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 convert<bf16>(bf16 value) {
  return value;
}

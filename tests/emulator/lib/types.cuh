/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/types.cuh: the same names, conversions in plain C++. #*/
using fp32 = float;
using fp64 = double;
struct alignas(2) fp16 {
  unsigned short bits;
};
struct alignas(2) bf16 {
  unsigned short bits;
};

// Powers of two scale exactly, so the FPU does the normalising and rounding of fp16.
inline float emulator_half_to_float(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16;
  const unsigned magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) return __uint_as_float(0x7fffffffu);
  if (magnitude == 0x7c00u) return __uint_as_float(sign | 0x7f800000u);
  const float scaled = __uint_as_float(magnitude << 13) * 0x1p112f;
  return __uint_as_float(sign | __float_as_uint(scaled));
}
inline unsigned short emulator_float_to_half(float value) {
  const unsigned bits = __float_as_uint(value);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const float shifted = __uint_as_float(magnitude) + 0.5f;
    return static_cast<unsigned short>(sign | (__float_as_uint(shifted) - 0x3f000000u));
  }
  const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<unsigned short>(sign | ((rounded - 0x38000000u) >> 13));
}

template <typename To>
To convert(fp32 value) {
  return static_cast<To>(value);
}
template <typename To>
To convert(fp64 value) {
  return static_cast<To>(value);
}
template <typename To>
To convert(fp16 value) {
  return static_cast<To>(emulator_half_to_float(value.bits));
}
template <typename To>
To convert(bf16 value) {
  return static_cast<To>(__uint_as_float(static_cast<unsigned>(value.bits) << 16));
}
template <>
inline fp16 convert<fp16>(fp32 value) {
  return {emulator_float_to_half(value)};
}
template <>
inline bf16 convert<bf16>(fp32 value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
inline fp16 convert<fp16>(fp16 value) {
  return value;
}
template <>
inline bf16 convert<bf16>(bf16 value) {
  return value;
}

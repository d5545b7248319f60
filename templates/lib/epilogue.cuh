/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/types.cuh and lib/config.cuh. #*/
// What C gets is act(alpha * sum + beta * C + bias), in the type of sums, and rounded once.
enum Activation {
  ACTIVATION_NONE = 0,
  ACTIVATION_RELU = 1,
  ACTIVATION_GELU = 2,
  ACTIVATION_SILU = 3,
};

// Within 2 ulp: a correctly rounded quotient takes as long as the rest of an activation.
__device__ __forceinline__ fp32 quotient(fp32 left, fp32 right) {
  return __fdividef(left, right);
}
__device__ __forceinline__ fp64 quotient(fp64 left, fp64 right) {
  return left / right;
}

// NaN stays NaN.
template <typename T>
__device__ __forceinline__ T activated(T x) {
  if constexpr (ACTIVATION == ACTIVATION_RELU) {
    return x < 0 ? 0 : x;
  } else if constexpr (ACTIVATION == ACTIVATION_GELU) {
    constexpr T SQRT_HALF = 0.70710678118654752440;
    return static_cast<T>(0.5) * x * (1 + erf(x * SQRT_HALF));
  } else if constexpr (ACTIVATION == ACTIVATION_SILU) {
    // x / (1 + exp(-x)), with the exponential of what is negative: it never overflows.
    const T decay = exp(-fabs(x));
    return quotient(x < 0 ? x * decay : x, 1 + decay);
  } else {
    return x;
  }
}

// tunegen_matmul_naive: C = act(alpha * A B + beta * C + bias), spec naive, for sm_90.
// SPDX-License-Identifier: Apache-2.0
// Config: BLOCK_M=16 BLOCK_N=16
// Regenerate: tunegen inspect matmul --arch sm_90 --spec naive --problem 1000x1001x1002 --dtype bf16 --layout tt --attribute activation=gelu --attribute beta=1 --attribute bias=1 --param BLOCK_M=16 --param BLOCK_N=16 --emit cuda

// C = act(alpha * A B + beta * C + bias), one thread per element of C.
//
//   A is M x K, B is K x N, C is M x N, all row-major; a transposed operand is stored K x M or
//   N x K. The tutorial kernel: every thread walks along K through global memory. It is kept as
//   the baseline that a tuned kernel is compared with.
//
//           N
//        +-----+        threadIdx.x runs along N, so a warp writes one line of C and reads one
//      K |  B  |        line of B (layouts n) while A is broadcast.
//        +-----+
//   +---++-----+
// M | A ||  C  |
//   +---++-----+

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

using Element = bf16;
using Accumulator = fp32;
using Output = bf16;
enum : int {
  BLOCK_M = 16,
  BLOCK_N = 16,
  TRANSPOSE_A = 1,
  TRANSPOSE_B = 1,
  READS_C = 1,
  HAS_BIAS = 1,
  ACTIVATION = 2,
};

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

extern "C" __global__ void __launch_bounds__(BLOCK_M* BLOCK_N, 1) tunegen_matmul_naive(
    const Element* __restrict__ a,  // (batch, M, K), or (batch, K, M) when TRANSPOSE_A
    const Element* __restrict__ b,  // (batch, K, N), or (batch, N, K) when TRANSPOSE_B
    Output* __restrict__ c,         // (batch, M, N), read only when READS_C
    // For every row.
    const Output* __restrict__ bias,  // (N)
    int batch, int m, int n, int k, long long lda, long long ldb, long long ldc,
    long long batch_stride_a, long long batch_stride_b, long long batch_stride_c, Accumulator alpha,
    Accumulator beta) {
  static_assert(BLOCK_M * BLOCK_N <= 1024, "a block has at most 1024 threads");
  // Blocks lie along x only: y and z end at 65535.
  const int blocks_n = (n + BLOCK_N - 1) / BLOCK_N;
  const int row = static_cast<int>(blockIdx.x / blocks_n) * BLOCK_M + threadIdx.y;
  const int col = static_cast<int>(blockIdx.x % blocks_n) * BLOCK_N + threadIdx.x;
  if (row >= m || col >= n) return;

  for (int matrix = blockIdx.z; matrix < batch; matrix += gridDim.z) {
    const Element* a_matrix = a + matrix * batch_stride_a;
    const Element* b_matrix = b + matrix * batch_stride_b;
    Output* c_element = c + matrix * batch_stride_c + row * ldc + col;
    Accumulator sum = 0;
    for (int i = 0; i < k; ++i) {
      const Element a_value = TRANSPOSE_A ? a_matrix[i * lda + row] : a_matrix[row * lda + i];
      const Element b_value = TRANSPOSE_B ? b_matrix[col * ldb + i] : b_matrix[i * ldb + col];
      sum += convert<Accumulator>(a_value) * convert<Accumulator>(b_value);
    }
    sum *= alpha;
    // beta == 0 must not read C: it may hold NaN.
    if constexpr (READS_C) sum += beta * convert<Accumulator>(*c_element);
    if constexpr (HAS_BIAS) sum += convert<Accumulator>(bias[col]);
    *c_element = convert<Output>(activated(sum));
  }
}

// tunegen_matmul_split_k_reduce: C = act(alpha * A B + beta * C + bias), spec wgmma_padded, for sm_90a.
// SPDX-License-Identifier: Apache-2.0
// Config: SWAP_OPERANDS=0 BLOCK_M=64 BLOCK_N=128 CONSUMERS=1 PINGPONG=0 STORE_PARTS=1 BLOCK_K=64 STAGES=8 CLUSTER_M=1 CLUSTER_N=1 CLUSTER_K=1 SPLIT_K=2 RASTER_GROUP=1 RASTER_COLUMNS=0 SPARE_SMS=0 MMA_IN_FLIGHT=1 PRODUCER_REGISTERS=24 L2_PROMOTION=128 PROGRAMMATIC_LAUNCH=1 STREAMED_OPERAND=0 STREAM_K=0
// Regenerate: tunegen inspect matmul --arch sm_90 --spec wgmma_padded --problem 1000x1001x1002 --dtype fp16 --layout nn --param SWAP_OPERANDS=0 --param BLOCK_M=64 --param BLOCK_N=128 --param CONSUMERS=1 --param PINGPONG=0 --param STORE_PARTS=1 --param BLOCK_K=64 --param STAGES=8 --param CLUSTER_M=1 --param CLUSTER_N=1 --param CLUSTER_K=1 --param SPLIT_K=2 --param RASTER_GROUP=1 --param RASTER_COLUMNS=0 --param SPARE_SMS=0 --param MMA_IN_FLIGHT=1 --param PRODUCER_REGISTERS=24 --param L2_PROMOTION=128 --param PROGRAMMATIC_LAUNCH=1 --param STREAMED_OPERAND=0 --param STREAM_K=0 --emit cuda

// C = act(alpha * (sum of SPLIT_K partial products) + beta * C + bias).
//
//   The sums of all slices of K lie behind one another. A thread adds WIDTH neighbouring elements,
//   always in the order of the slices: the same input gives the same bits.

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

using Element = fp16;
using Accumulator = fp32;
using Output = fp16;
enum : int {
  SWAP_OPERANDS = 0,
  BLOCK_M = 64,
  BLOCK_N = 128,
  CONSUMERS = 1,
  PINGPONG = 0,
  STORE_PARTS = 1,
  BLOCK_K = 64,
  STAGES = 8,
  CLUSTER_M = 1,
  CLUSTER_N = 1,
  CLUSTER_K = 1,
  SPLIT_K = 2,
  RASTER_GROUP = 1,
  RASTER_COLUMNS = 0,
  SPARE_SMS = 0,
  MMA_IN_FLIGHT = 1,
  PRODUCER_REGISTERS = 24,
  L2_PROMOTION = 128,
  PROGRAMMATIC_LAUNCH = 1,
  STREAMED_OPERAND = 0,
  STREAM_K = 0,
  READS_C = 0,
  HAS_BIAS = 0,
  ACTIVATION = 0,
  ALIGN_C = 1,
  REDUCE_THREADS = 256,
};

// Compile-time arithmetic on sizes; CUDA's own min and max are no constant expressions.
__device__ constexpr int least(int a, int b) {
  return a < b ? a : b;
}
__device__ constexpr int most(int a, int b) {
  return a > b ? a : b;
}

// N elements that are loaded and stored in one access, so their address is a multiple of N.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* address) {
  return *reinterpret_cast<const Vector<T, N>*>(address);
}
template <int N, typename T>
__device__ __forceinline__ void store_vector(T* address, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(address) = vector;
}

// The first `left` of N elements, zeros for the rest; nothing beyond them is read.
template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_inside(const T* address, int left) {
  if (left >= N) return load_vector<N>(address);
  Vector<T, N> vector{};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) vector.values[i] = address[i];
  }
  return vector;
}

// Stores the first `left` of N elements.
template <int N, typename T>
__device__ __forceinline__ void store_inside(T* address, const Vector<T, N>& vector, int left) {
  if (left >= N) {
    store_vector(address, vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) address[i] = vector.values[i];
  }
}

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

// Programmatic dependent launch: with PROGRAMMATIC_LAUNCH the next kernel on the stream may begin
// once all blocks of this one have, if it was launched so, and this one may have begun before the
// kernel ahead of it was done. Nothing that other kernels touch may be read or written before the
// wait. L2 may be told to fetch it: should the kernel ahead write to it still, L2 knows.
//
//   Loads must not be non-coherent: the assembler takes what they read to be constant, and moves
//   them to before the wait. Pointers that are not RESTRICT keep the compiler from making them so.
#define RESTRICT __restrict__
#undef RESTRICT
#define RESTRICT
__device__ __forceinline__ void let_next_launch_begin() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
__device__ __forceinline__ void wait_for_previous_launch() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void fetch_ahead(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

enum : int {
  WIDTH = 16 / sizeof(Accumulator),
  VECTOR_C = least(ALIGN_C, WIDTH),
};

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS) tunegen_matmul_split_k_reduce(
    const Accumulator* RESTRICT partials,  // (SPLIT_K, batch, M, N), N padded to whole WIDTHs
    Output* RESTRICT c,                    // (batch, M, N), read only when READS_C
    int batch, int m, int n, long long ldc, long long batch_stride_c, Accumulator alpha,
    Accumulator beta) {
  const Output* bias = nullptr;
  let_next_launch_begin();
  wait_for_previous_launch();
  const int row_vectors = (n + WIDTH - 1) / WIDTH;
  const long long rows = static_cast<long long>(batch) * m;
  const long long index = static_cast<long long>(blockIdx.x) * REDUCE_THREADS + threadIdx.x;
  const long long row = index / row_vectors;
  if (row >= rows) return;

  Vector<Accumulator, WIDTH> parts[SPLIT_K];
#pragma unroll
  for (int split = 0; split < SPLIT_K; ++split) {
    parts[split] = load_vector<WIDTH>(partials + (split * rows * row_vectors + index) * WIDTH);
  }
#pragma unroll
  for (int split = 1; split < SPLIT_K; ++split) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) parts[0].values[i] += parts[split].values[i];
  }

  const int col = static_cast<int>(index - row * row_vectors) * WIDTH;
  Output* target = c + row / m * batch_stride_c + row % m * ldc + col;
#pragma unroll
  for (int i = 0; i < WIDTH; i += VECTOR_C) {
    Vector<Output, VECTOR_C> result;
    Vector<Output, VECTOR_C> biases;
    if constexpr (HAS_BIAS) biases = load_inside<VECTOR_C>(bias + col + i, n - col - i);
    // beta == 0 must not read C: it may hold NaN.
    if constexpr (READS_C) result = load_inside<VECTOR_C>(target + i, n - col - i);
#pragma unroll
    for (int j = 0; j < VECTOR_C; ++j) {
      Accumulator value = alpha * parts[0].values[i + j];
      if constexpr (READS_C) value += beta * convert<Accumulator>(result.values[j]);
      if constexpr (HAS_BIAS) value += convert<Accumulator>(biases.values[j]);
      result.values[j] = convert<Output>(activated(value));
    }
    store_inside(target + i, result, n - col - i);
  }
}

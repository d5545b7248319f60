// tunegen_matmul_pad_rows: C = act(alpha * A B + beta * C + bias), spec wgmma_padded, for sm_90a.
// SPDX-License-Identifier: Apache-2.0
// Config: SWAP_OPERANDS=0 BLOCK_M=64 BLOCK_N=128 CONSUMERS=1 PINGPONG=0 STORE_PARTS=1 BLOCK_K=64 STAGES=8 CLUSTER_M=1 CLUSTER_N=1 CLUSTER_K=1 SPLIT_K=1 RASTER_GROUP=1 RASTER_COLUMNS=0 SPARE_SMS=0 MMA_IN_FLIGHT=1 PRODUCER_REGISTERS=24 L2_PROMOTION=128 PROGRAMMATIC_LAUNCH=1
// Regenerate: tunegen inspect matmul --arch sm_90 --spec wgmma_padded --problem 1000x1001x1002 --dtype fp16 --layout nn --param SWAP_OPERANDS=0 --param BLOCK_M=64 --param BLOCK_N=128 --param CONSUMERS=1 --param PINGPONG=0 --param STORE_PARTS=1 --param BLOCK_K=64 --param STAGES=8 --param CLUSTER_M=1 --param CLUSTER_N=1 --param CLUSTER_K=1 --param SPLIT_K=1 --param RASTER_GROUP=1 --param RASTER_COLUMNS=0 --param SPARE_SMS=0 --param MMA_IN_FLIGHT=1 --param PRODUCER_REGISTERS=24 --param L2_PROMOTION=128 --param PROGRAMMATIC_LAUNCH=1 --emit cuda

// Copies a matrix whose rows begin anywhere to one whose rows begin at whole lines of 128 bytes.
//
//   A thread copies vectors of eight elements, those of all rows numbered through, side by side.
//   Where one begins inside 16 bytes of memory it is cut out of the two whole ones that it lies
//   in: memory is read and written by 16 bytes a lane although rows are not aligned to them.

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
  SPLIT_K = 1,
  RASTER_GROUP = 1,
  RASTER_COLUMNS = 0,
  SPARE_SMS = 0,
  MMA_IN_FLIGHT = 1,
  PRODUCER_REGISTERS = 24,
  L2_PROMOTION = 128,
  PROGRAMMATIC_LAUNCH = 1,
  PAD_THREADS = 256,
  PAD_UNROLL = 4,
};

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

using Words = Vector<unsigned long long, 2>;

// Eight elements of a row of `columns` from `col` on, zeros beyond its end.
__device__ __forceinline__ Words load_eight(const unsigned short* row, int col, int columns) {
  if (col < 8 || columns - col < 16) {  // words of 16 bytes around them may not be the row's own
    Words words{};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (columns - col > i) {
        words.values[i / 4] |= static_cast<unsigned long long>(row[col + i]) << i % 4 * 16;
      }
    }
    return words;
  }
  const unsigned long long address = reinterpret_cast<unsigned long long>(row + col);
  const int skipped = static_cast<int>(address % 16) * 8;  // bits
  const auto* whole = reinterpret_cast<const unsigned long long*>(row + col - skipped / 16);
  const Words low = load_vector<2>(whole);
  const Words high = load_vector<2>(whole + 2);
  const bool upper = skipped >= 64;
  const unsigned long long first = upper ? low.values[1] : low.values[0];
  const unsigned long long second = upper ? high.values[0] : low.values[1];
  const unsigned long long third = upper ? high.values[1] : high.values[0];
  const int shift = skipped % 64;
  if (shift == 0) return {first, second};
  return {first >> shift | second << (64 - shift), second >> shift | third << (64 - shift)};
}

extern "C" __global__ void __launch_bounds__(PAD_THREADS) tunegen_matmul_pad_rows(
    const unsigned short* RESTRICT source,  // (rows, columns), ld apart
    unsigned short* RESTRICT target,        // (rows, columns), padded_ld apart: whole lines
    long long rows, int columns, long long ld, long long padded_ld) {
  const int per_row = (columns + 7) / 8;
  // A block counts from the row in which it begins: that is less to divide.
  const long long block_first = static_cast<long long>(blockIdx.x) * (PAD_THREADS * PAD_UNROLL);
  const long long block_row = block_first / per_row;
  const int skipped = static_cast<int>(block_first - block_row * per_row);
  let_next_launch_begin();
  wait_for_previous_launch();
  Words values[PAD_UNROLL];
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    const unsigned index = skipped + i * PAD_THREADS + threadIdx.x;
    const long long row = block_row + index / per_row;
    const int col = static_cast<int>(index % per_row) * 8;
    if (row < rows) values[i] = load_eight(source + row * ld, col, columns);
  }
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    const unsigned index = skipped + i * PAD_THREADS + threadIdx.x;
    const long long row = block_row + index / per_row;
    const int col = static_cast<int>(index % per_row) * 8;
    if (row < rows) {
      auto* to = reinterpret_cast<unsigned long long*>(target + row * padded_ld + col);
      store_vector(to, values[i]);
    }
  }
}

// tunegen_matmul_pad_rows: C = act(alpha * A B + beta * C + bias), spec wgmma_padded, for sm_90a.
// SPDX-License-Identifier: Apache-2.0
// Config: SWAP_OPERANDS=0 BLOCK_M=64 BLOCK_N=128 CONSUMERS=1 PINGPONG=0 STORE_PARTS=1 BLOCK_K=64 STAGES=8 CLUSTER_M=1 CLUSTER_N=1 CLUSTER_K=1 SPLIT_K=1 RASTER_GROUP=1 RASTER_COLUMNS=0 SPARE_SMS=0 MMA_IN_FLIGHT=1 PRODUCER_REGISTERS=24 L2_PROMOTION=128 PROGRAMMATIC_LAUNCH=1 STREAMED_OPERAND=0 STREAM_K=0
// Regenerate: tunegen inspect matmul --arch sm_90 --spec wgmma_padded --problem 1000x1001x1002 --dtype fp16 --layout nn --param SWAP_OPERANDS=0 --param BLOCK_M=64 --param BLOCK_N=128 --param CONSUMERS=1 --param PINGPONG=0 --param STORE_PARTS=1 --param BLOCK_K=64 --param STAGES=8 --param CLUSTER_M=1 --param CLUSTER_N=1 --param CLUSTER_K=1 --param SPLIT_K=1 --param RASTER_GROUP=1 --param RASTER_COLUMNS=0 --param SPARE_SMS=0 --param MMA_IN_FLIGHT=1 --param PRODUCER_REGISTERS=24 --param L2_PROMOTION=128 --param PROGRAMMATIC_LAUNCH=1 --param STREAMED_OPERAND=0 --param STREAM_K=0 --emit cuda

// Copies matrices whose rows begin anywhere to ones whose rows begin at whole lines of 128 bytes.
//
//   A thread copies vectors of eight elements, those of all rows numbered through, side by side.
//   Each is cut out of the one or two words of 16 bytes that it lies in, whatever else they hold:
//   memory is read and written by 16 bytes a lane although rows are not aligned to them. Only
//   where a word reaches beyond the first or last element of the whole matrix is it not read, and
//   the vector copied element by element.

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
  STREAMED_OPERAND = 0,
  STREAM_K = 0,
  PAD_THREADS = 256,
  PAD_UNROLL = 2,
  PAD_MATRICES = 2,
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

// Global loads and stores of 2 to 32 bytes with a cache policy. Every access is one instruction,
// issued in the order of the source; its address is a multiple of its size.

// The non-coherent loads are for data that nothing writes while the kernel runs.
enum LoadPolicy {
  LOAD_DEFAULT = 0,
  LOAD_NONCOHERENT = 1,
  LOAD_NONCOHERENT_NO_ALLOCATE = 2,  // leaves no copy in L1
  LOAD_STREAMING = 3,                // first to be evicted
  LOAD_NO_ALLOCATE = 4,
};
enum StorePolicy {
  STORE_DEFAULT = 0,
  STORE_STREAMING = 1,      // first to be evicted
  STORE_WRITE_THROUGH = 2,  // to memory at once
  STORE_NO_ALLOCATE = 3,    // leaves no copy in L1
};

// The load that resembles POLICY most among those that see the kernel's own writes.
__device__ constexpr int coherent(int policy) {
  return policy == LOAD_NONCOHERENT               ? LOAD_DEFAULT
         : policy == LOAD_NONCOHERENT_NO_ALLOCATE ? LOAD_NO_ALLOCATE
                                                  : policy;
}

// A vector as PTX sees it: 32-bit registers, or a 16-bit one.
template <typename T, int N>
union Registers {
  Vector<T, N> vector;
  unsigned words[(sizeof(T) * N + 3) / 4];
  unsigned short half;
};

// The access with its predicate in one piece of PTX: as a branch it would not be batched with the
// ones around it. Predicates known at compile time disappear. 32-byte accesses need sm_100.
#define IF_INSIDE(OPERAND, ACCESS) \
  "{.reg .pred inside; setp.ne.s32 inside, " OPERAND ", 0; @inside " ACCESS ";}"

#define LOAD_VECTOR(OPCODE)                                                                    \
  if constexpr (BYTES == 2) {                                                                  \
    asm volatile(IF_INSIDE("%2", OPCODE ".b16 %0, [%1]")                                       \
                 : "=h"(to.half)                                                               \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 4) {                                                           \
    asm volatile(IF_INSIDE("%2", OPCODE ".b32 %0, [%1]")                                       \
                 : "=r"(to.words[0])                                                           \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 8) {                                                           \
    asm volatile(IF_INSIDE("%3", OPCODE ".v2.b32 {%0, %1}, [%2]")                              \
                 : "=r"(to.words[0]), "=r"(to.words[1])                                        \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 16) {                                                          \
    asm volatile(IF_INSIDE("%5", OPCODE ".v4.b32 {%0, %1, %2, %3}, [%4]")                      \
                 : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])  \
                 : "l"(address), "r"(inside));                                                 \
  } else {                                                                                     \
    asm volatile(IF_INSIDE("%9", OPCODE ".v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8]")      \
                 : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3]), \
                   "=r"(to.words[4]), "=r"(to.words[5]), "=r"(to.words[6]), "=r"(to.words[7])  \
                 : "l"(address), "r"(inside));                                                 \
  }

#define STORE_VECTOR(OPCODE)                                                                     \
  if constexpr (BYTES == 2) {                                                                    \
    asm volatile(IF_INSIDE("%2", OPCODE ".b16 [%0], %1")::"l"(address), "h"(from.half),          \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 4) {                                                             \
    asm volatile(IF_INSIDE("%2", OPCODE ".b32 [%0], %1")::"l"(address), "r"(from.words[0]),      \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 8) {                                                             \
    asm volatile(IF_INSIDE("%3", OPCODE ".v2.b32 [%0], {%1, %2}")::"l"(address),                 \
                 "r"(from.words[0]), "r"(from.words[1]), "r"(inside)                             \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 16) {                                                            \
    asm volatile(IF_INSIDE("%5", OPCODE ".v4.b32 [%0], {%1, %2, %3, %4}")::"l"(address),         \
                 "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]), \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else {                                                                                       \
    asm volatile(                                                                                \
        IF_INSIDE("%9", OPCODE ".v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}")::"l"(address),  \
        "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]),          \
        "r"(from.words[4]), "r"(from.words[5]), "r"(from.words[6]), "r"(from.words[7]),          \
        "r"(inside)                                                                              \
        : "memory");                                                                             \
  }

// The bytes that a miss makes L2 fetch: as it likes (0), 128, or 256 (sm_80 and later).
#define LOAD_VECTOR_PREFETCHING(OPCODE)   \
  if constexpr (L2_BYTES == 0) {          \
    LOAD_VECTOR(OPCODE)                   \
  } else if constexpr (L2_BYTES == 128) { \
    LOAD_VECTOR(OPCODE ".L2::128B")       \
  } else if constexpr (L2_BYTES == 256) { \
    LOAD_VECTOR(OPCODE ".L2::256B")       \
  }

// N elements at `address`, or something arbitrary where not `inside`: then nothing is read.
template <int N, int POLICY, int L2_BYTES = 0, typename T>
__device__ __forceinline__ Vector<T, N> load_global(const T* address, int inside = 1) {
  constexpr int BYTES = sizeof(T) * N;
  Registers<T, N> to;
  if constexpr (POLICY == LOAD_DEFAULT) {
    LOAD_VECTOR_PREFETCHING("ld.global")
  } else if constexpr (POLICY == LOAD_NONCOHERENT) {
    LOAD_VECTOR_PREFETCHING("ld.global.nc")
  } else if constexpr (POLICY == LOAD_NONCOHERENT_NO_ALLOCATE) {
    LOAD_VECTOR_PREFETCHING("ld.global.nc.L1::no_allocate")
  } else if constexpr (POLICY == LOAD_STREAMING) {
    LOAD_VECTOR_PREFETCHING("ld.global.cs")
  } else if constexpr (POLICY == LOAD_NO_ALLOCATE) {
    LOAD_VECTOR_PREFETCHING("ld.global.L1::no_allocate")
  }
  return to.vector;
}

// The same for a store.
template <int POLICY, typename T, int N>
__device__ __forceinline__ void store_global(
    T* address, const Vector<T, N>& vector, int inside = 1) {
  constexpr int BYTES = sizeof(T) * N;
  const Registers<T, N> from{vector};
  if constexpr (POLICY == STORE_DEFAULT) {
    STORE_VECTOR("st.global")
  } else if constexpr (POLICY == STORE_STREAMING) {
    STORE_VECTOR("st.global.cs")
  } else if constexpr (POLICY == STORE_WRITE_THROUGH) {
    STORE_VECTOR("st.global.wt")
  } else if constexpr (POLICY == STORE_NO_ALLOCATE) {
    STORE_VECTOR("st.global.L1::no_allocate")
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

using Element = unsigned short;
using Word = Vector<unsigned, 4>;

// Rows that are ld apart, and their copies, which are padded_ld apart.
struct Matrix {
  const Element* source;
  Element* target;
  long long rows;
  int columns;
  long long ld, padded_ld;
};

__device__ __forceinline__ unsigned long long address_of(const Element* element) {
  return reinterpret_cast<unsigned long long>(element);
}

// A thread's vectors, one after the other. Only the first takes a division that differs between
// threads: from each to the next it is equally far, but for the end of a row.
struct Walk {
  const Element* source;
  Element* target;
  unsigned vector;  // of the row

  __device__ __forceinline__ Walk(const Matrix& matrix, unsigned per_row, unsigned long long index)
      : vector(static_cast<unsigned>(index % per_row)) {
    const auto row = static_cast<long long>(index / per_row);
    source = matrix.source + row * matrix.ld + vector * 8ll;
    target = matrix.target + row * matrix.padded_ld + vector * 8ll;
  }
  __device__ __forceinline__ void advance(const Matrix& matrix, unsigned per_row) {
    const unsigned rows = PAD_THREADS / per_row, vectors = PAD_THREADS % per_row;
    vector += vectors;
    source += rows * matrix.ld + vectors * 8ll;
    target += rows * matrix.padded_ld + vectors * 8ll;
    if (vector >= per_row) {
      vector -= per_row;
      source += matrix.ld - per_row * 8ll;
      target += matrix.padded_ld - per_row * 8ll;
    }
  }
  // How many bytes of the vector are the row's; the others are zeros in the copy.
  __device__ __forceinline__ int bytes(const Matrix& matrix) const {
    const int left = matrix.columns - static_cast<int>(vector * 8);
    return left < 8 ? left * 2 : 16;
  }
};

// What begins `skipped` bytes into two words, zeros after the first `bytes` of it.
__device__ __forceinline__ Word cut(const Word& low, const Word& high, int skipped, int bytes) {
  unsigned eights[6], fours[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const unsigned near = i < 4 ? low.values[i % 4] : high.values[i % 4];
    const unsigned far = i < 2 ? low.values[i + 2] : high.values[i - 2];
    eights[i] = skipped & 8 ? far : near;
  }
#pragma unroll
  for (int i = 0; i < 5; ++i) fours[i] = skipped & 4 ? eights[i + 1] : eights[i];
  Word found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned long long pair = static_cast<unsigned long long>(fours[i + 1]) << 32 | fours[i];
    const unsigned value = static_cast<unsigned>(pair >> (skipped & 2) * 8);
    const int own = bytes - i * 4;
    found.values[i] = own >= 4 ? value : own == 2 ? value & 0xffff : 0;
  }
  return found;
}

__device__ __forceinline__ void copy_elements(const Element* source, Element* target, int bytes) {
  Element values[8]{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i * 2 < bytes) values[i] = source[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) target[i] = values[i];
}

extern "C" __global__ void __launch_bounds__(PAD_THREADS) tunegen_matmul_pad_rows(
    // Copied by the first blocks; those after them copy the other matrix.
    const Element* first_source,  // (first_rows, first_columns), first_ld apart
    Element* first_target,        // the same, first_padded_ld apart: whole lines
    long long first_rows, int first_columns, long long first_ld, long long first_padded_ld,
    int first_blocks,
    const Element* source,  // (rows, columns), ld apart
    Element* target,        // the same, padded_ld apart: whole lines
    long long rows, int columns, long long ld, long long padded_ld) {
  Matrix matrix{source, target, rows, columns, ld, padded_ld};
  auto block = static_cast<int>(blockIdx.x);
  if (block < first_blocks) {
    matrix = {first_source, first_target, first_rows, first_columns, first_ld, first_padded_ld};
  } else {
    block -= first_blocks;
  }
  constexpr unsigned OF_BLOCK = PAD_THREADS * PAD_UNROLL;
  const unsigned per_row = (static_cast<unsigned>(matrix.columns) + 7) / 8;
  const auto first = static_cast<unsigned long long>(block) * OF_BLOCK;
  const auto left = static_cast<unsigned long long>(matrix.rows) * per_row - first;
  const unsigned vectors = left < OF_BLOCK ? static_cast<unsigned>(left) : OF_BLOCK;
  // Between these, words are the matrix's own, from its first element to its last.
  const Element* const behind = matrix.source + (matrix.rows - 1) * matrix.ld + matrix.columns;
  const unsigned long long begin = (address_of(matrix.source) + 15) / 16 * 16;
  const unsigned long long end = address_of(behind) / 16 * 16;
  const Walk start(matrix, per_row, first + threadIdx.x);
  let_next_launch_begin();
  wait_for_previous_launch();
  // Nothing branches, and nothing is waited for, before all loads are on their way.
  Word low[PAD_UNROLL], high[PAD_UNROLL];
  Element* targets[PAD_UNROLL];
  int skipped[PAD_UNROLL], bytes[PAD_UNROLL];
  bool whole[PAD_UNROLL];
  Walk at = start;
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    const unsigned long long address = address_of(at.source);
    targets[i] = at.target;
    bytes[i] = at.bytes(matrix);
    skipped[i] = static_cast<int>(address % 16);
    // Of a vector that the matrix does not have this never holds: it lies behind the last one.
    whole[i] = address >= begin & address + bytes[i] <= end;
    const auto* words = reinterpret_cast<const unsigned*>(address - address % 16);
    low[i] = load_global<4, LOAD_DEFAULT>(words, whole[i]);
    high[i] = load_global<4, LOAD_DEFAULT>(words + 4, whole[i] & (skipped[i] + bytes[i] > 16));
    at.advance(matrix, per_row);
  }
  unsigned ragged = 0;
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    const bool exists = threadIdx.x + i * PAD_THREADS < vectors;
    ragged |= static_cast<unsigned>(exists & !whole[i]) << i;
  }
  // Hardly ever, and while the words are on their way. Without a branch here the assembler cuts
  // the first vectors, and so waits for them, before it loads the last ones.
  at = start;
#pragma unroll 1
  for (; ragged; ragged >>= 1) {
    if (ragged & 1) copy_elements(at.source, at.target, at.bytes(matrix));
    at.advance(matrix, per_row);
  }
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    const Word found = cut(low[i], high[i], skipped[i], bytes[i]);
    store_global<STORE_DEFAULT>(reinterpret_cast<unsigned*>(targets[i]), found, whole[i]);
  }
}

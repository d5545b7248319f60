// tunegen_matmul_gemv: C = act(alpha * A B + beta * C + bias), spec gemv, for sm_90.
// SPDX-License-Identifier: Apache-2.0
// Config: ROWS=8 COLS=4 LANES_K=8 UNROLL=2 WARPS_K=8 WARPS_N=1 MIN_BLOCKS=1 TILE_K=1024 SPLIT_K=1 REDUCE=0 LOAD_POLICY=2 PROGRAMMATIC_LAUNCH=1
// Regenerate: tunegen inspect matmul --arch sm_90 --spec gemv --problem 8x4096x4096 --dtype bf16 --layout tt --attribute activation=gelu --attribute beta=1 --attribute bias=1 --param ROWS=8 --param COLS=4 --param LANES_K=8 --param UNROLL=2 --param WARPS_K=8 --param WARPS_N=1 --param MIN_BLOCKS=1 --param TILE_K=1024 --param SPLIT_K=1 --param REDUCE=0 --param LOAD_POLICY=2 --param PROGRAMMATIC_LAUNCH=1 --emit cuda

// C = act(alpha * A B + beta * C + bias) for a matrix A of few rows: every element of B is used M
// times only, so what counts is how many bytes of B are under way at any time.
//
//   A is M x K, B is K x N, C is M x N, all row-major; a transposed operand is stored K x M or
//   N x K. A block computes all rows of BLOCK_N columns of C, or a slice of their sums. Its lanes
//   lie along K and along N; each walks down K for COLS columns of its own, RUN_K steps a round,
//   and goes from B straight to registers: UNROLL rounds are under way while one is multiplied.
//
//          K ->                                   N ->
//        +------+------+------+---            +------+------+------+---
//    N   | lane | lane | lane | next      K   | lane | lane | lane |
//    |   +------+------+------+ round     |   +------+------+------+
//    v   | lane | lane | lane |           v   | lane | lane | lane |
//        +------+------+------+---            +------+------+------+---
//         B stored N x K: vectors              next round
//         of B run along K                     B stored K x N: vectors of B run along N
//
//   At the end the lanes along K add up their sums by shuffles, the warps along K through shared
//   memory, and the SPLIT_K blocks along K through the workspace or the shared memory of their
//   cluster, always in the same order: the same input gives the same bits. Whoever has a total
//   takes it to C.

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
  ROWS = 8,
  COLS = 4,
  LANES_K = 8,
  UNROLL = 2,
  WARPS_K = 8,
  WARPS_N = 1,
  MIN_BLOCKS = 1,
  TILE_K = 1024,
  SPLIT_K = 1,
  REDUCE = 0,
  LOAD_POLICY = 2,
  PROGRAMMATIC_LAUNCH = 1,
  TRANSPOSE_A = 1,
  TRANSPOSE_B = 1,
  READS_C = 1,
  HAS_BIAS = 1,
  ACTIVATION = 2,
  ALIGN_A = 8,
  ALIGN_B = 8,
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
  }
}

// N elements as they come from memory. 16-bit ones share registers in pairs.
template <typename T, int N, bool PAIRS = (sizeof(T) == 2 && N > 1)>
struct Packed {
  using Part = T;
  enum : int { PARTS = N };
  Vector<Part, PARTS> parts;

  __device__ __forceinline__ T at(int i) const { return parts.values[i]; }
};
template <typename T, int N>
struct Packed<T, N, true> {
  using Part = unsigned;
  enum : int { PARTS = N / 2 };
  Vector<Part, PARTS> parts;

  __device__ __forceinline__ T at(int i) const {
    return {static_cast<unsigned short>(parts.values[i / 2] >> (i % 2 * 16))};
  }
};

// load_global and load_inside of lib/memory.cuh and lib/vector.cuh.
template <int N, int POLICY, typename T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* address, int inside) {
  using Part = typename Packed<T, N>::Part;
  constexpr int PARTS = Packed<T, N>::PARTS;
  return {load_global<PARTS, POLICY>(reinterpret_cast<const Part*>(address), inside)};
}
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed_inside(const T* address, int left) {
  union {
    Vector<T, N> loaded;
    Packed<T, N> packed;
  };
  loaded = load_inside<N>(address, left);
  return packed;
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
  THREADS = 32 * WARPS_N * WARPS_K,
  LANES_N = 32 / LANES_K,
  BLOCK_N = WARPS_N * LANES_N * COLS,
  TAKES_TICKETS = SPLIT_K > 1 && REDUCE == 0,
  IN_CLUSTER = SPLIT_K > 1 && REDUCE == 1,
};

// What one thread has of B in a round: RUN_K consecutive steps of K times COLS columns, in LOADS
// vectors. Rows of B as stored run along K where it is transposed, else along N.
enum : int {
  SHARED_VECTOR = 16 / sizeof(Accumulator),  // elements of A per access to shared memory
  VECTOR_B = TRANSPOSE_B ? ALIGN_B : least(ALIGN_B, COLS),
  RUN_K = TRANSPOSE_B ? VECTOR_B : SHARED_VECTOR,
  LOADS = RUN_K * COLS / VECTOR_B,
  LANES_ALONG_K = WARPS_K * LANES_K,
  ROUND_K = LANES_ALONG_K * RUN_K,
  TURN_K = UNROLL * ROUND_K,
  UNIT_K = LANES_K * RUN_K,  // slices of K are whole ones: a line of B where lanes are along K
};

// Neighbouring columns of a thread; between them lie those of the other lanes.
enum : int { STRIP_N = TRANSPOSE_B ? COLS : VECTOR_B };

// Lanes that are neighbours in memory are neighbours in the warp.
enum : int { LANE_STEP_K = TRANSPOSE_B ? 1 : LANES_N, LANE_STEP_N = TRANSPOSE_B ? LANES_K : 1 };

__device__ __forceinline__ int lane_along_k() {
  const int lane = threadIdx.x % 32;
  return threadIdx.x / 32 % WARPS_K * LANES_K + lane / LANE_STEP_K % LANES_K;
}

// Column of the block that is a thread's column j.
__device__ __forceinline__ int column_of(int j) {
  const int lane_n = threadIdx.x % 32 / LANE_STEP_N % LANES_N;
  const int strip = j / STRIP_N * LANES_N + lane_n;
  return threadIdx.x / 32 / WARPS_K * (LANES_N * COLS) + strip * STRIP_N + j % STRIP_N;
}

// The steps of K of one block, as even as whole units are; none where K is short.
struct Slice {
  int start, stop;

  __device__ __forceinline__ Slice(int index, int k) {
    const int units = (k + UNIT_K - 1) / UNIT_K;
    const int spare = units % SPLIT_K;
    const int first = units / SPLIT_K * index + least(index, spare);
    start = least(first * UNIT_K, k);
    stop = least((first + units / SPLIT_K + (index < spare)) * UNIT_K, k);
  }
  // Where vectors along K end; fewer steps than a vector has may be left.
  __device__ __forceinline__ int whole() const {
    return TRANSPOSE_B ? start + (stop - start) / VECTOR_B * VECTOR_B : stop;
  }
};

static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(
    ROWS * COLS * (sizeof(Accumulator) / 4) <= 64, "a thread's sums take at most 64 registers");
static_assert(
    UNROLL * LOADS * VECTOR_B * sizeof(Element) <= 256,
    "a thread has at most 256 bytes of B under way");
static_assert(
    UNROLL * RUN_K * ROWS * COLS <= 1024,
    "at most 1024 unrolled multiply-adds, as they stand twice, fit the instruction cache");
static_assert(TILE_K % TURN_K == 0, "a tile of A is whole turns of the unrolled loop");
static_assert(TURN_K <= 8192, "a turn of the unrolled loop is at most 8192 steps of K");
static_assert(
    MIN_BLOCKS == 1 || MIN_BLOCKS * THREADS > 256,
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers");
static_assert(REDUCE == 0 || SPLIT_K > 1, "a single slice of K is not reduced");
static_assert(REDUCE == 0 || SPLIT_K <= 8, "a cluster has at most 8 blocks");

// Elements of A that are brought by one access: from shared memory, or through L1.
enum : int {
  VECTOR_A = TRANSPOSE_A ? 1 : least(ALIGN_A, TILE_K ? least(RUN_K, SHARED_VECTOR) : RUN_K),
  PART_K = TILE_K ? least(RUN_K, SHARED_VECTOR) : RUN_K,
  POLICY_B = PROGRAMMATIC_LAUNCH ? coherent(LOAD_POLICY) : LOAD_POLICY,
};

// The rows of A: TILE_K steps at a time in shared memory, already widened; without tiles they are
// read where they are used. Rows beyond M are the last one again, and their sums are not stored.
class Rows {
 public:
  __device__ __forceinline__ Rows(const Element* a, long long lda, int m, Accumulator* tile)
      : a_(a),
        row_step_(TRANSPOSE_A ? 1 : lda),
        k_step_(TRANSPOSE_A ? lda : 1),
        m_(m),
        tile_(tile) {}

  // Puts steps [start, stop) into the tile. A run lies in parts of one access each, the first parts
  // of all runs together: lanes side by side along K meet no bank conflicts. Few rows at a time, as
  // B is under way in registers.
  __device__ __forceinline__ void stage(int start, int stop) {
    constexpr int BATCH = least(ROWS, 4);
#pragma unroll 1
    for (int k = threadIdx.x * VECTOR_A; k < stop - start; k += THREADS * VECTOR_A) {
      Accumulator* to = tile_ + part(k % RUN_K / PART_K, k / RUN_K) + k % PART_K;
      const int left = stop - start - k;
#pragma unroll 1
      for (int first = 0; first < ROWS; first += BATCH) {
        Vector<Element, VECTOR_A> from[BATCH];
        if (left >= VECTOR_A) {
#pragma unroll
          for (int i = 0; i < BATCH; ++i) from[i] = load_vector<VECTOR_A>(at(first + i, start + k));
        } else {
#pragma unroll
          for (int i = 0; i < BATCH; ++i) {
            from[i] = load_inside<VECTOR_A>(at(first + i, start + k), left);
          }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          Vector<Accumulator, VECTOR_A> wide;
#pragma unroll
          for (int j = 0; j < VECTOR_A; ++j)
            wide.values[j] = convert<Accumulator>(from[i].values[j]);
          store_vector(to + (first + i) * TILE_K, wide);
        }
      }
    }
  }

  // PART_K steps of a row from step k on, `first` of a run that is number `run` of the tile;
  // `left` steps are there from k on.
  template <bool TAIL>
  __device__ __forceinline__ void load(
      Accumulator (&values)[PART_K], int row, int k, int first, int run, int left) const {
    if constexpr (TILE_K > 0) {
      const auto part_k = load_vector<PART_K>(tile_ + row * TILE_K + part(first / PART_K, run));
#pragma unroll
      for (int i = 0; i < PART_K; ++i) values[i] = part_k.values[i];
    } else {
#pragma unroll
      for (int i = 0; i < PART_K; i += VECTOR_A) {
        const Element* address = at(row, k + i);
        const auto from =
            TAIL ? load_inside<VECTOR_A>(address, left - i) : load_vector<VECTOR_A>(address);
#pragma unroll
        for (int j = 0; j < VECTOR_A; ++j) values[i + j] = convert<Accumulator>(from.values[j]);
      }
    }
  }

  __device__ __forceinline__ Accumulator element(int row, int k) const {
    return convert<Accumulator>(*at(row, k));
  }

 private:
  __device__ __forceinline__ const Element* at(int row, int k) const {
    return a_ + least(row, m_ - 1) * row_step_ + k * k_step_;
  }
  __device__ static __forceinline__ int part(int index, int run) {
    return (index * (TILE_K / RUN_K) + run) * PART_K;
  }

  const Element* a_;
  long long row_step_, k_step_;
  int m_;
  Accumulator* tile_;
};

// A thread's elements of B in one round. 16-bit ones stay in pairs until they are used: taken apart
// as they arrive, they would be waited for a turn too early.
struct Round {
  Packed<Element, VECTOR_B> vectors[LOADS];

  __device__ __forceinline__ Accumulator at(int i, int j) const {
    const int vector = TRANSPOSE_B ? j : i * (COLS / VECTOR_B) + j / VECTOR_B;
    return convert<Accumulator>(vectors[vector].at(TRANSPOSE_B ? i : j % VECTOR_B));
  }
};

// A thread's columns of B, from step k on. Those beyond N are the last ones again; WHOLE says that
// no vector along N ends beyond it.
template <bool WHOLE>
class Columns {
 public:
  __device__ static __forceinline__ bool covers(int block_col, int n) {
    return TRANSPOSE_B || n % VECTOR_B == 0 || block_col + BLOCK_N <= n;
  }

  __device__ __forceinline__ Columns(const Element* b, long long ldb, int block_col, int n, int k)
      : k_step_(TRANSPOSE_B ? 1 : ldb) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      const int col = block_col + column_of(TRANSPOSE_B ? v : v * VECTOR_B);
      const int inside = WHOLE ? least(col, n - (TRANSPOSE_B ? 1 : VECTOR_B)) : col;
      next_[v] = b + inside * (TRANSPOSE_B ? ldb : 1) + k * k_step_;
      left_[v] = n - inside;
    }
  }

  // Round number `index` of this turn, of which `left` steps of K are there: the others are
  // arbitrary.
  __device__ __forceinline__ void load(Round& round, int index, int left) const {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int step = TRANSPOSE_B ? 0 : load / COUNT;
      const int v = TRANSPOSE_B ? load : load % COUNT;
      const Element* address = next_[v] + (index * ROUND_K + step) * k_step_;
      const bool inside = step < left;
      if constexpr (WHOLE) {
        round.vectors[load] = load_packed<VECTOR_B, POLICY_B>(address, inside);
      } else {
        round.vectors[load] = load_packed_inside<VECTOR_B>(address, inside ? left_[v] : 0);
      }
    }
  }

  // Has L2 fetch what load() will ask for.
  __device__ __forceinline__ void fetch(int index, int left) const {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int step = TRANSPOSE_B ? 0 : load / COUNT;
      const int v = TRANSPOSE_B ? load : load % COUNT;
      if (step < left && left_[v] > 0) fetch_ahead(next_[v] + (index * ROUND_K + step) * k_step_);
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) next_[v] += TURN_K * k_step_;
  }

 private:
  enum : int { COUNT = TRANSPOSE_B ? COLS : COLS / VECTOR_B };  // addresses

  const Element* next_[COUNT];
  int left_[COUNT];
  long long k_step_;
};

// Adds a round's products to the sums. Its run begins at step k and is number `run` of the tile of
// A; with TAIL only the first `left` steps count.
template <bool TAIL>
__device__ __forceinline__ void multiply(
    Accumulator (&sums)[ROWS * COLS], const Rows& rows, const Round& round, int k, int run,
    int left) {
#pragma unroll
  for (int first = 0; first < RUN_K; first += PART_K) {
    Accumulator b_values[PART_K][COLS];
#pragma unroll
    for (int i = 0; i < PART_K; ++i) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) b_values[i][j] = round.at(first + i, j);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      Accumulator a_values[PART_K];
      rows.load<TAIL>(a_values, row, k + first, first, run, left - first);
#pragma unroll
      for (int i = 0; i < PART_K; ++i) {
        // Not a product with zero: B may hold infinities there.
        if (TAIL && first + i >= left) continue;
#pragma unroll
        for (int j = 0; j < COLS; ++j) sums[row * COLS + j] += a_values[i] * b_values[i][j];
      }
    }
  }
}

// Adds the products of a slice, but for what is left of K behind whole vectors. Loads of B are
// ahead of their use by a turn, over the borders of tiles of A as well; the first of them wait for
// the launch ahead.
template <typename AnyColumns>
__device__ __forceinline__ void walk(
    Accumulator (&sums)[ROWS * COLS], Rows& rows, AnyColumns columns, const Slice& slice) {
  const int stop = slice.whole();
  const int own = lane_along_k();
  int k = slice.start + own * RUN_K;
  if constexpr (PROGRAMMATIC_LAUNCH == 2) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) columns.fetch(u, stop - k - u * ROUND_K);
  }
  wait_for_previous_launch();
  Round rounds[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) columns.load(rounds[u], u, stop - k - u * ROUND_K);

  for (int tile = slice.start; tile < stop;) {
    const int tile_stop = TILE_K ? least(stop, tile + TILE_K) : stop;
    if constexpr (TILE_K > 0) {
      if (tile > slice.start) __syncthreads();
      rows.stage(tile, tile_stop);
      __syncthreads();
    }
    int run = own;
    for (; tile + TURN_K <= tile_stop; tile += TURN_K) {
      columns.advance();
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        multiply<false>(sums, rows, rounds[u], k + u * ROUND_K, run + u * LANES_ALONG_K, RUN_K);
        columns.load(rounds[u], u, stop - k - TURN_K - u * ROUND_K);
      }
      k += TURN_K;
      run += UNROLL * LANES_ALONG_K;
    }
    // Tiles are whole turns, so less than one is left of the last tile only.
    if (tile < tile_stop) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int left = stop - k - u * ROUND_K;
        if (left > 0) {
          multiply<!TRANSPOSE_B>(
              sums, rows, rounds[u], k + u * ROUND_K, run + u * LANES_ALONG_K, left);
        }
      }
      tile = tile_stop;
    }
  }
}

// The steps of a slice behind whole vectors along K, one a lane.
__device__ __forceinline__ void add_rest(
    Accumulator (&sums)[ROWS * COLS], const Rows& rows, const Element* b, long long ldb,
    int block_col, int n, const Slice& slice) {
  if constexpr (TRANSPOSE_B && VECTOR_B > 1) {
    for (int k = slice.whole() + lane_along_k(); k < slice.stop; k += LANES_ALONG_K) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        const int col = least(block_col + column_of(j), n - 1);
        const Accumulator b_value = convert<Accumulator>(b[col * ldb + k]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          sums[row * COLS + j] += rows.element(row, k) * b_value;
        }
      }
    }
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

// Adds COUNT values up over the lanes along K, the farthest first. As long as there are several, a
// lane hands one half of them over and keeps the other, so that each total ends in one lane: the
// lane's totals are `first` and the following ones. A lane that is no owner has what another has.
template <int COUNT, int DISTANCE>
__device__ __forceinline__ void fold(Accumulator* values, int& first, bool& is_owner) {
  if constexpr (DISTANCE >= LANE_STEP_K) {
    const bool upper = threadIdx.x & DISTANCE;
    if constexpr (COUNT > 1) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const Accumulator kept = upper ? values[i + COUNT / 2] : values[i];
        const Accumulator given = upper ? values[i] : values[i + COUNT / 2];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, given, DISTANCE);
      }
      if (upper) first += COUNT / 2;
      fold<COUNT / 2, DISTANCE / 2>(values, first, is_owner);
    } else {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], DISTANCE);
      is_owner = is_owner && !upper;
      fold<1, DISTANCE / 2>(values, first, is_owner);
    }
  }
}

// Adds a thread's sums up over its warp's lanes along K, and leaves them for add_warps.
__device__ __forceinline__ void add_lanes(
    Accumulator (&sums)[ROWS * COLS], Accumulator* warp_sums) {
  int first = 0;
  bool is_owner = true;
  fold<ROWS * COLS, LANE_STEP_K * LANES_K / 2>(sums, first, is_owner);
  if (!is_owner) return;
  warp_sums += threadIdx.x / 32 % WARPS_K * (ROWS * BLOCK_N);
#pragma unroll
  for (int i = 0; i < most(ROWS * COLS / LANES_K, 1); ++i) {
    const int row = (first + i) / COLS;
    warp_sums[row * BLOCK_N + column_of((first + i) % COLS)] = sums[i];
  }
}

// Element i of ROWS x BLOCK_N, added up over the warps along K.
__device__ __forceinline__ Accumulator add_warps(const Accumulator* warp_sums, int i) {
  Accumulator sum = warp_sums[i];
#pragma unroll
  for (int warp = 1; warp < WARPS_K; ++warp) sum += warp_sums[warp * (ROWS * BLOCK_N) + i];
  return sum;
}

// The sum over all slices, each given by of_slice(index).
template <typename OfSlice>
__device__ __forceinline__ Accumulator add_slices(const OfSlice& of_slice) {
  Accumulator parts[SPLIT_K];
#pragma unroll
  for (int s = 0; s < SPLIT_K; ++s) parts[s] = of_slice(s);
#pragma unroll
  for (int s = 1; s < SPLIT_K; ++s) parts[0] += parts[s];
  return parts[0];
}

// Where a block's elements of C go.
struct Target {
  Output* c;
  long long ldc;
  int block_col, m, n;
  Accumulator alpha, beta;
  const Output* bias;

  __device__ __forceinline__ void store(int i, Accumulator sum) const {
    const int col = block_col + i % BLOCK_N;
    if (col >= n) return;
    Output* element = c + i / BLOCK_N * ldc + col;
    Accumulator value = alpha * sum;
    // beta == 0 must not read C: it may hold NaN.
    if constexpr (READS_C) value += beta * convert<Accumulator>(*element);
    if constexpr (HAS_BIAS) value += convert<Accumulator>(bias[col]);
    *element = convert<Output>(activated(value));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) tunegen_matmul_gemv(
    const Element* RESTRICT a,  // (batch, M, K), or (batch, K, M) when TRANSPOSE_A
    const Element* RESTRICT b,  // (batch, K, N), or (batch, N, K) when TRANSPOSE_B
    Output* RESTRICT c,         // (batch, M, N), read only when READS_C
    // For every row.
    const Output* RESTRICT bias,  // (N)
    int batch, int m, int n, int k, long long lda, long long ldb, long long ldc,
    long long batch_stride_a, long long batch_stride_b, long long batch_stride_c, Accumulator alpha,
    Accumulator beta) {
  extern __shared__ __align__(16) unsigned char shared[];
  Accumulator* a_tile = reinterpret_cast<Accumulator*>(shared);
  Accumulator* warp_sums = a_tile + ROWS * TILE_K;  // (WARPS_K, ROWS, BLOCK_N)

  const int blocks_n = (n + BLOCK_N - 1) / BLOCK_N;
  const int matrix = static_cast<int>(blockIdx.x) / blocks_n;
  const int block_col = (static_cast<int>(blockIdx.x) - matrix * blocks_n) * BLOCK_N;
  a += matrix * batch_stride_a;
  b += matrix * batch_stride_b;
  c += matrix * batch_stride_c;
  const Slice slice(blockIdx.y, k);

  let_next_launch_begin();
  Accumulator sums[ROWS * COLS] = {};
  Rows rows(a, lda, m, a_tile);
  const int k_first = slice.start + lane_along_k() * RUN_K;
  if (Columns<true>::covers(block_col, n)) {
    walk(sums, rows, Columns<true>(b, ldb, block_col, n, k_first), slice);
  } else {
    walk(sums, rows, Columns<false>(b, ldb, block_col, n, k_first), slice);
  }
  add_rest(sums, rows, b, ldb, block_col, n, slice);

  add_lanes(sums, warp_sums);
  __syncthreads();
  const Target target{c, ldc, block_col, m, n, alpha, beta, bias};
  if constexpr (SPLIT_K == 1) {
    for (int i = threadIdx.x; i < m * BLOCK_N; i += THREADS) {
      target.store(i, add_warps(warp_sums, i));
    }
  }
}

// tunegen_matmul_mma: C = act(alpha * A B + beta * C + bias), spec mma, for sm_90.
// SPDX-License-Identifier: Apache-2.0
// Config: BLOCK_M=128 WARP_M=64 BLOCK_N=128 WARP_N=32 MMA_ROWS=16 MMA_K=8 BLOCK_K=16 REGISTER_BUFFERS=1 STAGES=4 STAGED_STORE=0 MIN_BLOCKS=1 SPLIT_K=1 RASTER_GROUP=8 PROGRAMMATIC_LAUNCH=1
// Regenerate: tunegen inspect matmul --arch sm_90 --spec mma --problem 4096x4096x4096 --dtype fp64 --layout nn --param BLOCK_M=128 --param WARP_M=64 --param BLOCK_N=128 --param WARP_N=32 --param MMA_ROWS=16 --param MMA_K=8 --param BLOCK_K=16 --param REGISTER_BUFFERS=1 --param STAGES=4 --param STAGED_STORE=0 --param MIN_BLOCKS=1 --param SPLIT_K=1 --param RASTER_GROUP=8 --param PROGRAMMATIC_LAUNCH=1 --emit cuda

// C = act(alpha * A B + beta * C + bias) on the tensor cores, by the instructions of a warp (sm_80 and later).
//
//   A is M x K, B is K x N, C is M x N, all row-major; a transposed operand is stored K x M or
//   N x K. A block computes BLOCK_M x BLOCK_N elements of C and walks along K in tiles of BLOCK_K.
//   Each of its warps owns WARP_M x WARP_N of them, as sums of instructions for 16 x 8.
//
//                     BLOCK_N
//                  +-----------+
//          BLOCK_K |  B tile   |       global memory -> shared memory (a ring of STAGES tiles,
//                  +-----------+       all but one under way) -> fragments -> tensor cores
//         BLOCK_K
//        +-------+ +-----+-----+
//        |       | |     |     |
//        |       | |     |     | WARP_M
// BLOCK_M| A tile| +-----+-----+
//        |       | |     |     |
//        |       | |     |     |
//        +-------+ +-----+-----+
//                         WARP_N

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

using Element = fp64;
using Accumulator = fp64;
using Output = fp64;
enum : int {
  BLOCK_M = 128,
  WARP_M = 64,
  BLOCK_N = 128,
  WARP_N = 32,
  MMA_ROWS = 16,
  MMA_K = 8,
  BLOCK_K = 16,
  REGISTER_BUFFERS = 1,
  STAGES = 4,
  STAGED_STORE = 0,
  MIN_BLOCKS = 1,
  SPLIT_K = 1,
  RASTER_GROUP = 8,
  PROGRAMMATIC_LAUNCH = 1,
  TRANSPOSE_A = 0,
  TRANSPOSE_B = 0,
  READS_C = 0,
  HAS_BIAS = 0,
  ACTIVATION = 0,
  ALIGN_A = 2,
  ALIGN_B = 2,
  ALIGN_C = 2,
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

enum : int {
  WARPS_M = BLOCK_M / WARP_M,
  WARPS_N = BLOCK_N / WARP_N,
  THREADS = 32 * WARPS_M * WARPS_N,
};

static_assert(BLOCK_M % WARP_M == 0, "WARP_M divides BLOCK_M");
static_assert(BLOCK_N % WARP_N == 0, "WARP_N divides BLOCK_N");
static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(
    MIN_BLOCKS == 1 || MIN_BLOCKS * THREADS > 256,
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers");
static_assert(MMA_ROWS == 16 || MMA_K == 4, "instructions for 8 rows take 4 steps of K");
static_assert(BLOCK_K % MMA_K == 0, "MMA_K divides BLOCK_K");
static_assert(
    WARP_M * WARP_N * sizeof(Accumulator) <= 32 * 128 * 4,
    "sums take at most 128 registers of a thread");

// Asynchronous copies from global to shared memory (cp.async, sm_80 and later): the data passes
// through no register, and arrives when its group has been waited for.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    // Whole vectors skip L1: the block reads them once.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global), "n"(BYTES)
                 : "memory");
  }
}

// As above, but an invalid source is not read: shared memory is set to zero instead.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int source_bytes = valid ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global),
               "n"(BYTES), "r"(source_bytes)
               : "memory");
}

// Closes the group of the copies made since the last call.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until no more than IN_FLIGHT of this thread's latest groups are still copying.
template <int IN_FLIGHT>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT) : "memory");
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

// Shared memory as instructions address it: in 32 bits, of this block or of another of its cluster.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// The address of the same place in block `rank` of the cluster.
__device__ __forceinline__ SharedAddress remote_address(SharedAddress address, unsigned rank) {
  SharedAddress remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// The instructions of warps on matrices (sm_80 and later), and accesses by shared addresses.

// Makes the compiler forget what it knows of a number: what is computed from it in a loop is then
// not computed before, and kept in registers of its own.
__device__ __forceinline__ int forget(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Copies BYTES from global to shared memory, in flight until its group has been waited for. Whole
// vectors skip L1: the block reads them once.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(SharedAddress to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
  }
}

// As above, but only the first `source_bytes` are read; zeros fill the rest.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(
    SharedAddress to, const void* from, int source_bytes) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(source_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void store_shared(SharedAddress to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void load_shared(fp64& first, fp64& second, SharedAddress from) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(first), "=d"(second)
               : "r"(from)
               : "memory");
}

// Four matrices of 8 x 8 elements of 16 bits; lane 8 i + r gives the address of row r of matrix i.
// A lane gets two neighbours of row lane / 4, or with TRANSPOSED of column lane / 4, from each.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], SharedAddress row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  }
}

// sums += A B for A of 16 x 16 and B of 16 x 8 elements. A lane has of A, at rows lane / 4 and that
// plus 8, two neighbours along K from 2 (lane % 4) on, and two more 8 further on; of B the same at
// column lane / 4; and of the sums, in both rows, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_matrices(
    fp32 (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_matrices(
    fp32 (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, fp16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in fp64, for 8 or 16 rows and 4, 8 or 16 steps of K. Of every four steps a lane has
// number lane % 4: one element of each half of A's rows, one of B.
__device__ __forceinline__ void multiply_8x8x4(fp64& sum0, fp64& sum1, fp64 a, fp64 b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(sum0), "+d"(sum1)
      : "d"(a), "d"(b));
}
__device__ __forceinline__ void multiply_16x8x4(fp64 (&sums)[4], const fp64* a, fp64 b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(b));
}
__device__ __forceinline__ void multiply_16x8x8(fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
__device__ __forceinline__ void multiply_16x8x16(
    fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1, fp64 b2, fp64 b3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, "
      "{%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b0), "d"(b1), "d"(b2), "d"(b3));
}

// A tile of an operand in shared memory, and a warp's fragments of it in registers.

// TILE x BLOCK_K elements in rows as the operand is stored: along K, or ACROSS it. Chunks of 16
// bytes change places within their row, so that those that lanes read at once lie in different
// banks.
template <int TILE, bool ACROSS>
struct SharedTile {
  enum : int {
    CHUNK = 16 / sizeof(Element),
    ROWS = ACROSS ? BLOCK_K : TILE,
    COLS = ACROSS ? TILE : BLOCK_K,
    CHUNKS = COLS / CHUNK,  // of a row
    ROW_BYTES = CHUNKS * 16,
    BYTES = ROWS * ROW_BYTES,
    PERIOD = least(CHUNKS & -CHUNKS, 8),  // chunks among which places are changed
  };

  // Matrices of 8 x 8 take the same chunk of 8 rows. In fp64, 8 lanes take 4 neighbouring chunks
  // of 2 rows, or across K 2 neighbouring ones of every second of 8 rows.
  static __device__ __forceinline__ int swizzle(int row) {
    if constexpr (sizeof(Element) == 2) return row / (8 / PERIOD) % PERIOD;
    if constexpr (ACROSS) return row / 2 % 4 * 2;
    return PERIOD == 8 ? row % 2 * 4 : 0;
  }
  // Bytes from the start of the tile.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16;
  }
};

template <typename T>
struct RegisterOf {
  using Type = unsigned;  // two elements
};
template <>
struct RegisterOf<fp64> {
  using Type = fp64;
};
using Register = RegisterOf<Element>::Type;

enum : int {
  STEP_K = sizeof(Element) == 2 ? 16 : most(8, MMA_K),  // steps of K of a fragment
  STEPS = BLOCK_K / STEP_K,
  FRAGMENT_REGISTERS = 16 * STEP_K * sizeof(Element) / (32 * sizeof(Register)),
};

// 16 rows of A, or columns of B, of STEP_K steps. A register has one half of the rows and one group
// of steps, 8 in 16 bits and 4 in fp64. Instructions take neighbouring registers: both halves of
// A's rows and then the next group; all groups of one half of B's columns.
struct Fragment {
  Register values[FRAGMENT_REGISTERS];
};
template <bool OF_B>
__device__ constexpr int fragment_register(int half, int group) {
  return OF_B ? half * (FRAGMENT_REGISTERS / 2) + group : 2 * group + half;
}

// Which of the 16 rows a lane's register of half h stands for. fp64 across K: loads bring two
// neighbouring rows, which become one of each half.
template <bool ACROSS>
__device__ constexpr int fragment_row(int half, int row) {
  return ACROSS && sizeof(Element) == 8 ? 2 * row + half : 8 * half + row;
}

template <bool OF_B, int TILE, int WARP_TILE, bool ACROSS>
struct FragmentLoader {
  using Tile = SharedTile<TILE, ACROSS>;
  enum : int {
    WIDE = sizeof(Element) == 8,
    // Swizzled chunks of a row have offsets of their own; after a period they repeat.
    OFFSETS = WIDE ? (ACROSS ? 1 : least(2, BLOCK_K / 8))
                   : least(ACROSS ? WARP_TILE / 16 : STEPS, most(1, Tile::PERIOD / 2)),
  };
  int offsets[OFFSETS];  // of this lane from the start of the tile

  __device__ __forceinline__ FragmentLoader(int warp_start, int lane) {
    // Which half of the rows and which group of steps has the matrix whose row a lane points to.
    const int half = OF_B ? lane / 16 : lane / 8 % 2;
    const int group = OF_B ? lane / 8 % 2 : lane / 16;
#pragma unroll
    for (int i = 0; i < OFFSETS; ++i) {
      if constexpr (!WIDE && !ACROSS) {
        offsets[i] = Tile::offset(warp_start + half * 8 + lane % 8, 2 * i + group);
      } else if constexpr (!WIDE) {
        offsets[i] = Tile::offset(group * 8 + lane % 8, warp_start / 8 + 2 * i + half);
      } else if constexpr (!ACROSS) {
        offsets[i] = Tile::offset(warp_start + lane / 4, 4 * i + lane % 4);
      } else {
        offsets[i] = Tile::offset(lane % 4 * 2, warp_start / 2 + lane / 4);
      }
    }
  }

  __device__ __forceinline__ void load(
      Fragment (&fragments)[WARP_TILE / 16], SharedAddress tile, int step) const {
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; ++i) {
      if constexpr (!WIDE) {
        const int along = ACROSS ? i : step;  // which of its chunks
        const int down = ACROSS ? step : i;   // which 16 of its rows
        load_matrices<ACROSS>(
            fragments[i].values, tile + offsets[along % OFFSETS] +
                                     along / OFFSETS * (OFFSETS * 32) +
                                     down * (16 * Tile::ROW_BYTES));
      } else {
        load_wide(fragments[i].values, tile, step, i);
      }
    }
  }

 private:
  // A lane's 16 bytes are two steps of one row, or across K two rows of one step.
  __device__ __forceinline__ void load_wide(
      Register* values, SharedAddress tile, int step, int i) const {
#pragma unroll
    for (int eight = 0; eight < STEP_K / 8; ++eight) {
      const int position = step * (STEP_K / 8) + eight;  // which eight steps of the tile
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (ACROSS) {
          load_shared(
              values[fragment_register<OF_B>(0, 2 * eight + j)],
              values[fragment_register<OF_B>(1, 2 * eight + j)],
              tile + offsets[0] + (8 * position + j) * Tile::ROW_BYTES + i * 128);
        } else {
          load_shared(
              values[fragment_register<OF_B>(j, 2 * eight)],
              values[fragment_register<OF_B>(j, 2 * eight + 1)],
              tile + offsets[position % OFFSETS] + position / OFFSETS * (OFFSETS * 64) +
                  (16 * i + 8 * j) * Tile::ROW_BYTES);
        }
      }
    }
  }
};

// Sums of a warp, by 16 x 16: for each half of the columns, two neighbours in each half of the rows.
using Sums = Accumulator[WARP_M / 16][WARP_N / 16][2][4];

// The instructions that a pair of fragments takes for each half of the columns.
enum : int {
  PARTS = sizeof(Element) == 2 ? 1 : STEP_K / MMA_K,
};

template <typename T>
__device__ __forceinline__ void multiply_fragments(
    Accumulator (&sums)[2][4], const T (&a)[FRAGMENT_REGISTERS], const T (&b)[FRAGMENT_REGISTERS],
    int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* right = b + half * (FRAGMENT_REGISTERS / 2);
    if constexpr (sizeof(T) == 4) {
      multiply_matrices(sums[half], a, right[0], right[1], Element{});
    } else if constexpr (MMA_ROWS == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_8x8x4(sums[half][2 * i], sums[half][2 * i + 1], a[2 * part + i], right[part]);
      }
    } else if constexpr (MMA_K == 4) {
      multiply_16x8x4(sums[half], a + 2 * part, right[part]);
    } else if constexpr (MMA_K == 8) {
      multiply_16x8x8(sums[half], a + 4 * part, right[2 * part], right[2 * part + 1]);
    } else {
      multiply_16x8x16(sums[half], a, right[0], right[1], right[2], right[3]);
    }
  }
}

// Adds the products of a step to the sums.
__device__ __forceinline__ void multiply_add(
    Sums& sums, const Fragment (&a)[WARP_M / 16], const Fragment (&b)[WARP_N / 16]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll
      for (int j = 0; j < WARP_N / 16; ++j) {
        multiply_fragments(sums[i][j], a[i].values, b[j].values, part);
      }
    }
  }
}

// One operand's way from global to shared memory, a tile at a time: asynchronous copies as wide as
// all rows are aligned. Rows of 16-bit elements that begin at any element take the way through
// registers instead, two elements a word: a row that begins in the middle of a word is read in
// whole words, which are shifted on their way.
template <int TILE, bool ACROSS, int ALIGN>
struct TileCopy {
  using Tile = SharedTile<TILE, ACROSS>;
  enum : int {
    ELEMENT = sizeof(Element),
    // See lib/programmatic_launch.cuh.
    POLICY = PROGRAMMATIC_LAUNCH ? LOAD_DEFAULT : LOAD_NONCOHERENT,
    SHIFTED = ALIGN * ELEMENT < 4,
    VECTOR = SHIFTED ? 2 : ALIGN,
    ROW_VECTORS = Tile::COLS / VECTOR,
    ROW_THREADS = least(ROW_VECTORS, THREADS),
    ROW_PASSES = ROW_VECTORS / ROW_THREADS,
    ROW_STEP = THREADS / ROW_THREADS,
    PASSES = (Tile::ROWS + ROW_STEP - 1) / ROW_STEP,  // along the rows, each of ROW_PASSES
    // Swizzling repeats after 8 rows; passes until then have targets of their own.
    TARGETS = least(
        PASSES, ROW_STEP % 8 == 0   ? 1
                : ROW_STEP % 4 == 0 ? 2
                : ROW_STEP % 2 == 0 ? 4
                                    : 8),
  };
  static_assert(
      ROW_VECTORS % ROW_THREADS == 0 && THREADS % ROW_THREADS == 0,
      "threads fill whole rows of both tiles");
  static_assert(PASSES * ROW_PASSES <= 32, "a thread makes at most 32 copies to each tile");

  const Element* source;  // this thread's first vector of the tile that is copied next
  long long ld, step;     // elements from one row to the next, and to that of the next pass
  int row, col;           // where that vector lies in the tile
  int extent;             // how many of the TILE rows or columns lie inside the matrix, may be more
  int targets[TARGETS];
  // Where SHIFTED: whether the first row, and rows by turns, begin in the middle of a word, and
  // two words for each pass, which hold the two elements wanted.
  int odd, odd_turns;
  unsigned staged[SHIFTED ? PASSES * ROW_PASSES : 1][2];

  __device__ __forceinline__ TileCopy(
      const Element* matrix, long long row_elements, int tile_start, int tile_extent, int k_start)
      : ld(row_elements), step(ROW_STEP * ld), extent(tile_extent - tile_start) {
    const int thread = threadIdx.x;
    row = thread / ROW_THREADS;
    col = thread % ROW_THREADS * VECTOR;
    const long long first_row = (ACROSS ? k_start : tile_start) + row;
    source = matrix + first_row * ld + (ACROSS ? tile_start : k_start) + col;
#pragma unroll
    for (int i = 0; i < TARGETS; ++i) {
      targets[i] =
          Tile::offset(row + i * ROW_STEP, col / Tile::CHUNK) + col % Tile::CHUNK * ELEMENT;
    }
    odd = static_cast<int>(reinterpret_cast<unsigned long long>(source) / ELEMENT % 2);
    odd_turns = ROW_STEP % 2 == 0 ? 0 : static_cast<int>(ld % 2);
  }

  // Starts to bring the next tile. GUARDED reads nothing outside the matrix, and sets to zero what
  // lies beyond the `k_left` steps; unguarded may read one element before and after its rows.
  template <bool GUARDED>
  __device__ __forceinline__ void fetch(SharedAddress tile, int k_left) {
    const Element* row_start = source;
    const int own_row = forget(row);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const Element* from = GUARDED ? first_inside(own_row, pass) : row_start;
      row_start += step;
#pragma unroll
      for (int part = 0; part < ROW_PASSES; ++part) {
        const int next = part * ROW_THREADS * VECTOR;
        if constexpr (SHIFTED) {
          stage<GUARDED>(pass, part, from + next, left(own_row, pass, next, k_left));
        } else if (in_tile(pass)) {
          if constexpr (GUARDED) {
            const int bytes = left(own_row, pass, next, k_left) * ELEMENT;
            copy_to_shared<VECTOR * ELEMENT>(tile + target(pass, part), from + next, bytes);
          } else {
            copy_to_shared<VECTOR * ELEMENT>(tile + target(pass, part), from + next);
          }
        }
      }
    }
    source += ACROSS ? BLOCK_K * ld : BLOCK_K;
  }

  // Puts what came through registers into the tile that it was fetched for.
  __device__ __forceinline__ void land(SharedAddress tile) const {
    if constexpr (SHIFTED) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
        for (int part = 0; part < ROW_PASSES; ++part) {
          const unsigned (&words)[2] = staged[pass * ROW_PASSES + part];
          const unsigned long long both =
              static_cast<unsigned long long>(words[1]) << 32 | words[0];
          if (in_tile(pass)) {
            store_shared(
                tile + target(pass, part), static_cast<unsigned>(both >> (16 * is_odd(pass))));
          }
        }
      }
    }
  }

 private:
  // Whether a pass's row lies in the tile; all do, unless the last rows are fewer than threads.
  __device__ __forceinline__ bool in_tile(int pass) const {
    return Tile::ROWS % ROW_STEP == 0 || pass + 1 < PASSES || row + pass * ROW_STEP < Tile::ROWS;
  }

  // The first vector of a pass. Rows of A or columns of B that lie outside give sums that are not
  // stored: any values will do, so those of the last one inside.
  __device__ __forceinline__ const Element* first_inside(int own_row, int pass) const {
    const int down = pass * ROW_STEP;
    return source + (ACROSS ? down : least(own_row + down, extent - 1) - own_row) * ld;
  }

  // How many elements lie inside, of the vector `next` elements behind a pass's first one.
  __device__ __forceinline__ int left(int own_row, int pass, int next, int k_left) const {
    const int along = (ACROSS ? extent : k_left) - col - next;
    const bool row_inside = !ACROSS || own_row + pass * ROW_STEP < k_left;
    return row_inside ? most(0, least(along, VECTOR)) : 0;
  }

  __device__ __forceinline__ int target(int pass, int part) const {
    return targets[pass % TARGETS] + pass / TARGETS * (TARGETS * ROW_STEP * Tile::ROW_BYTES) +
           part * (ROW_THREADS * VECTOR * ELEMENT);
  }

  __device__ __forceinline__ int is_odd(int pass) const {
    return pass % 2 == 0 ? odd : odd ^ odd_turns;
  }

  // Reads two elements in whole words: both lie in the first one, or its upper and the second's
  // lower half.
  template <bool GUARDED>
  __device__ __forceinline__ void stage(int pass, int part, const Element* from, int count) {
    unsigned (&words)[2] = staged[pass * ROW_PASSES + part];
    if constexpr (GUARDED) {
      const auto* halves = reinterpret_cast<const unsigned short*>(from);
      const unsigned low = half_inside(halves, count > 0);
      const unsigned high = half_inside(halves + 1, count > 1);
      words[0] = is_odd(pass) ? low << 16 : low | high << 16;
      words[1] = high;
    } else {
      const auto* word = reinterpret_cast<const unsigned*>(from - is_odd(pass));
      const bool inside = in_tile(pass);
      words[0] = load_global<1, POLICY>(word, inside).values[0];
      words[1] = load_global<1, POLICY>(word + 1, inside && is_odd(pass)).values[0];
    }
  }

  static __device__ __forceinline__ unsigned half_inside(const unsigned short* half, bool inside) {
    return inside ? load_global<1, POLICY>(half, inside).values[0] : 0;
  }
};

static_assert(
    REGISTER_BUFFERS == 1 || STEPS % 2 == 0, "two sets of fragments take an even number of steps");

// Where a warp's sums lie: its block in C, and its own first element in the block.
struct Place {
  int block_row, block_col;
  int warp_row, warp_col;
  int lane;
};

// Walks along K through a ring of STAGES tiles in shared memory and adds the tiles' products to a
// warp's sums.
//
// While one tile is multiplied the next ones are under way. One barrier a tile publishes the next
// tile and frees the last one, before the last step's products: the wait for the next tile's first
// fragments lies behind these.
struct Pipeline {
  using CopyA = TileCopy<BLOCK_M, TRANSPOSE_A, ALIGN_A>;
  using CopyB = TileCopy<BLOCK_N, !TRANSPOSE_B, ALIGN_B>;
  enum : int {
    AHEAD = STAGES - 1,  // from the tile that is multiplied to the one that is fetched meanwhile
    STAGE_BYTES = CopyA::Tile::BYTES + CopyB::Tile::BYTES,
    // Elements that unguarded copies may read before and after a row.
    MARGIN = CopyA::SHIFTED || CopyB::SHIFTED,
  };

  CopyA a_copy;
  CopyB b_copy;
  FragmentLoader<false, BLOCK_M, WARP_M, TRANSPOSE_A> a_loader;
  FragmentLoader<true, BLOCK_N, WARP_N, !TRANSPOSE_B> b_loader;
  SharedAddress ring;  // stages of a tile of A and one of B
  int read = 0;        // bytes from the start of the ring to the stage that is multiplied
  int write = 0;       // and to the one that is filled next
  bool interior;       // no row or column of the tiles is outside of the matrices
  Fragment a[REGISTER_BUFFERS][WARP_M / 16];
  Fragment b[REGISTER_BUFFERS][WARP_N / 16];

  __device__ __forceinline__ Pipeline(
      SharedAddress shared, const Element* a_matrix, long long lda, const Element* b_matrix,
      long long ldb, const Place& place, int m, int n, int k_start)
      : a_copy(a_matrix, lda, place.block_row, m, k_start),
        b_copy(b_matrix, ldb, place.block_col, n, k_start),
        a_loader(place.warp_row, place.lane),
        b_loader(place.warp_col, place.lane),
        ring(shared),
        interior(place.block_row + BLOCK_M <= m && place.block_col + BLOCK_N <= n) {}

  // Adds the products of `k_steps` steps.
  __device__ __forceinline__ void run(Sums& sums, int k_steps) {
    const int tiles = (k_steps + BLOCK_K - 1) / BLOCK_K;
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < AHEAD; ++tile) {
      if (tile < tiles) {
        fetch(tile, k_steps);
        land();
      }
      copy_async_commit();
    }
    publish();
    if constexpr (REGISTER_BUFFERS == 2) load_fragments(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) multiply(sums, tile, tiles, k_steps);
  }

 private:
  // Multiplies tile `tile`, which is in shared memory; leaves with the next one there.
  __device__ __forceinline__ void multiply(Sums& sums, int tile, int tiles, int k_steps) {
    const bool fetching = tile + AHEAD < tiles;
    if (fetching) fetch(tile + AHEAD, k_steps);
    copy_async_commit();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int ahead = step + REGISTER_BUFFERS - 1;
      if (ahead < STEPS) {
        load_fragments(ahead);
      } else {
        // After the last tile these are of a stage without meaning, and are not used.
        hand_over(fetching);
        load_fragments(0);
      }
      multiply_add(sums, a[step % REGISTER_BUFFERS], b[step % REGISTER_BUFFERS]);
    }
    if constexpr (REGISTER_BUFFERS == 1) hand_over(fetching);
  }

  __device__ __forceinline__ void hand_over(bool fetching) {
    if (fetching) land();
    advance(read);
    publish();
  }

  // The next tile becomes readable by every thread, the last one's stage writable.
  __device__ __forceinline__ void publish() {
    copy_async_wait<AHEAD - 1>();
    __syncthreads();
  }

  __device__ __forceinline__ void fetch(int tile, int k_steps) {
    const int k_left = k_steps - tile * BLOCK_K;
    if (interior && tile >= MARGIN && k_left >= BLOCK_K + MARGIN) {
      a_copy.template fetch<false>(ring + write, k_left);
      b_copy.template fetch<false>(ring + write + CopyA::Tile::BYTES, k_left);
    } else {
      a_copy.template fetch<true>(ring + write, k_left);
      b_copy.template fetch<true>(ring + write + CopyA::Tile::BYTES, k_left);
    }
  }

  // Ends the fetch of a tile, as far as it came through registers.
  __device__ __forceinline__ void land() {
    a_copy.land(ring + write);
    b_copy.land(ring + write + CopyA::Tile::BYTES);
    advance(write);
  }

  static __device__ __forceinline__ void advance(int& stage) {
    stage = stage == AHEAD * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
  }

  __device__ __forceinline__ void load_fragments(int step) {
    a_loader.load(a[step % REGISTER_BUFFERS], ring + read, step);
    b_loader.load(b[step % REGISTER_BUFFERS], ring + read + CopyA::Tile::BYTES, step);
  }
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

// The way of a warp's sums to C, 16 rows at a time: from registers, two neighbours an access, or
// through shared memory, whence whole rows of the warp go out as wide as C is aligned. A slice of K
// leaves its bare sums, which a second kernel adds up.
enum : int {
  PAIR_VECTOR = least(2, ALIGN_C),
  // Rows in shared memory are 8 elements apart, so that pairs of 8 rows lie in different banks.
  PITCH = WARP_N + 8,
  ROW_VECTOR = least(ALIGN_C, 16 / sizeof(Output)),
  ROW_VECTORS = WARP_N / ROW_VECTOR,
  ROW_PASSES = 16 * ROW_VECTORS / 32,
};

// Sums that meet C wait for it unrounded.
template <bool ROUNDED>
struct StagedOf {
  using Type = Output;
};
template <>
struct StagedOf<false> {
  using Type = Accumulator;
};
using Staged = StagedOf<!READS_C>::Type;

// Whether a lane's pairs of neighbours have one of each half of the columns, as
// fragment_row says; else both are of one half.
enum : int {
  MIXED_HALVES = !TRANSPOSE_B && sizeof(Element) == 8,
};

// Where a warp's sums go: `c` is its first element, of which `rows` and `cols` from there on lie
// inside, `bias` that of its first column.
struct Target {
  Output* c;
  long long ldc;
  const Output* bias;
  int rows, cols;

  __device__ __forceinline__ int inside(int row, int col) const {
    return row < rows ? cols - col : 0;
  }
};

// Of 16 rows and 16 columns: a lane's pair has two neighbours in one row.
struct Pair {
  int row, col;
  Accumulator values[2];
};
__device__ __forceinline__ int column_of_pair(int index, int lane) {
  return MIXED_HALVES ? lane % 4 * 4 + 2 * index : 8 * index + lane % 4 * 2;
}

// The bias of a lane's pairs, two for every 16 columns.
struct Biases {
  Vector<Output, PAIR_VECTOR> parts[WARP_N / 8][2 / PAIR_VECTOR];

  __device__ __forceinline__ Biases(const Target& target, int lane) {
    if constexpr (HAS_BIAS) {
      if (target.cols >= WARP_N) {
        load<true>(target, lane);
      } else {
        load<false>(target, lane);
      }
    }
  }
  __device__ __forceinline__ Accumulator at(int pair, int i) const {
    return convert<Accumulator>(parts[pair][i / PAIR_VECTOR].values[i % PAIR_VECTOR]);
  }

 private:
  // WHOLE: all columns lie inside.
  template <bool WHOLE>
  __device__ __forceinline__ void load(const Target& target, int lane) {
#pragma unroll
    for (int j = 0; j < WARP_N / 8; ++j) {
#pragma unroll
      for (int first = 0; first < 2; first += PAIR_VECTOR) {
        const int col = j / 2 * 16 + column_of_pair(j % 2, lane) + first;
        const Output* from = target.bias + col;
        parts[j][first / PAIR_VECTOR] = WHOLE ? load_vector<PAIR_VECTOR>(from)
                                              : load_inside<PAIR_VECTOR>(from, target.cols - col);
      }
    }
  }
};

// Pair number `index` of 16 columns, `number` of the warp's. Nothing but C is still to be added.
__device__ __forceinline__ Pair pair_of(
    const Accumulator (&sums)[2][4], int row_half, int index, int lane, Accumulator alpha,
    const Biases& biases, int number) {
  Pair pair{fragment_row<TRANSPOSE_A>(row_half, lane / 4), column_of_pair(index, lane), {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Accumulator sum =
        MIXED_HALVES ? sums[i][2 * row_half + index] : sums[index][2 * row_half + i];
    pair.values[i] = SPLIT_K == 1 ? alpha * sum : sum;
    if constexpr (HAS_BIAS) pair.values[i] += biases.at(number, i);
    if constexpr (!READS_C) pair.values[i] = activated(pair.values[i]);
  }
  return pair;
}

__device__ __forceinline__ void store_from_registers(
    const Sums& sums, const Target& target, int lane, Accumulator alpha, Accumulator beta) {
  const Biases biases(target, lane);
#pragma unroll
  for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll
    for (int row_half = 0; row_half < 2; ++row_half) {
      // A row is read before it is written: one wait for C.
      Vector<Output, PAIR_VECTOR> results[WARP_N / 8][2 / PAIR_VECTOR];
#pragma unroll
      for (int pass = READS_C ? 0 : 1; pass < 2; ++pass) {
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j) {
          const Pair pair = pair_of(sums[i][j / 2], row_half, j % 2, lane, alpha, biases, j);
          const int row = 16 * i + pair.row;
#pragma unroll
          for (int first = 0; first < 2; first += PAIR_VECTOR) {
            const int col = j / 2 * 16 + pair.col + first;
            Output* address = target.c + row * target.ldc + col;
            Vector<Output, PAIR_VECTOR>& result = results[j][first / PAIR_VECTOR];
            if (pass == 0) {
              result = load_inside<PAIR_VECTOR>(address, target.inside(row, col));
              continue;
            }
#pragma unroll
            for (int k = 0; k < PAIR_VECTOR; ++k) {
              Accumulator value = pair.values[first + k];
              // beta == 0 must not read C: it may hold NaN.
              if constexpr (READS_C) {
                value = activated(value + beta * convert<Accumulator>(result.values[k]));
              }
              result.values[k] = convert<Output>(value);
            }
            store_inside(address, result, target.inside(row, col));
          }
        }
      }
    }
  }
}

// `strip` is the warp's own part of shared memory, 16 rows.
__device__ __forceinline__ void store_through_shared(
    const Sums& sums, Staged* strip, const Target& target, int lane, Accumulator alpha,
    Accumulator beta) {
  constexpr int PIECE = least(ROW_VECTOR, 16 / sizeof(Staged));
  const Biases biases(target, lane);
  const int own_row = lane / ROW_VECTORS;
  const int own_col = lane % ROW_VECTORS * ROW_VECTOR;
#pragma unroll
  for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll
    for (int part = 0; part < WARP_N / 4; ++part) {
      const int index = part % 2;
      const Pair pair = pair_of(
          sums[i][part / 4], part / 2 % 2, index, lane, alpha, biases, part / 4 * 2 + index);
      Vector<Staged, 2> staged;
#pragma unroll
      for (int k = 0; k < 2; ++k) staged.values[k] = convert<Staged>(pair.values[k]);
      store_vector(strip + pair.row * PITCH + part / 4 * 16 + pair.col, staged);
    }
    __syncwarp();
    Vector<Output, ROW_VECTOR> results[ROW_PASSES];
#pragma unroll
    for (int phase = READS_C ? 0 : 1; phase < 2; ++phase) {
#pragma unroll
      for (int pass = 0; pass < ROW_PASSES; ++pass) {
        const int row = own_row + pass * 32 / ROW_VECTORS;
        const int col = own_col + pass * 32 % ROW_VECTORS * ROW_VECTOR;
        Output* address = target.c + (16 * i + row) * target.ldc + col;
        const int inside = target.inside(16 * i + row, col);
        if (phase == 0) {
          results[pass] = load_inside<ROW_VECTOR>(address, inside);
          continue;
        }
#pragma unroll
        for (int k = 0; k < ROW_VECTOR; k += PIECE) {
          const auto piece = load_vector<PIECE>(strip + row * PITCH + col + k);
#pragma unroll
          for (int l = 0; l < PIECE; ++l) {
            Output& result = results[pass].values[k + l];
            if constexpr (READS_C) {
              const Accumulator value = convert<Accumulator>(piece.values[l]);
              result = convert<Output>(activated(value + beta * convert<Accumulator>(result)));
            } else {
              result = convert<Output>(piece.values[l]);
            }
          }
        }
        store_inside(address, results[pass], inside);
      }
    }
    __syncwarp();
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) tunegen_matmul_mma(
    const Element* RESTRICT a,  // (batch, M, K), or (batch, K, M) when TRANSPOSE_A
    const Element* RESTRICT b,  // (batch, K, N), or (batch, N, K) when TRANSPOSE_B
    Output* RESTRICT c,         // (batch, M, N), read only when READS_C; with SPLIT_K > 1 the
                                // partial sums, (SPLIT_K, batch, M, N)
    int batch, int m, int n, int k, long long lda, long long ldb, long long ldc,
    long long batch_stride_a, long long batch_stride_b, long long batch_stride_c, Accumulator alpha,
    Accumulator beta) {
  const Output* bias = nullptr;
  extern __shared__ __align__(128) unsigned char shared_memory[];

  // The blocks of all matrices lie along x: y and z end at 65535. Groups of RASTER_GROUP rows of
  // blocks are walked column by column, so that blocks that run together share rows and columns.
  const int blocks_m = (m + BLOCK_M - 1) / BLOCK_M;
  const int blocks_n = (n + BLOCK_N - 1) / BLOCK_N;
  const int matrix = static_cast<int>(blockIdx.x) / (blocks_m * blocks_n);
  const int block = static_cast<int>(blockIdx.x) - matrix * (blocks_m * blocks_n);
  const int group_start = block / blocks_n / RASTER_GROUP * RASTER_GROUP;
  const int group_rows = least(blocks_m - group_start, RASTER_GROUP);
  const int in_group = block - group_start * blocks_n;
  const int warp = threadIdx.x / 32;
  const Place place{
      (group_start + in_group % group_rows) * BLOCK_M, in_group / group_rows * BLOCK_N,
      warp / WARPS_N * WARP_M, warp % WARPS_N * WARP_N, static_cast<int>(threadIdx.x) % 32};

  // Slices of K are whole tiles and as even as they can be; some are empty where K is short.
  const int slice = blockIdx.y;
  const int tiles = (k + BLOCK_K - 1) / BLOCK_K;
  const int spare_tiles = tiles % SPLIT_K;
  const int first_tile = tiles / SPLIT_K * slice + least(slice, spare_tiles);
  const int slice_tiles = tiles / SPLIT_K + (slice < spare_tiles);
  const int k_start = first_tile * BLOCK_K;
  const int k_steps = least(slice_tiles * BLOCK_K, k - k_start);

  let_next_launch_begin();
  wait_for_previous_launch();
  Sums sums = {};
  Pipeline pipeline(
      shared_address(shared_memory), a + matrix * batch_stride_a, lda, b + matrix * batch_stride_b,
      ldb, place, m, n, k_start);
  pipeline.run(sums, k_steps);

  const long long matrices_before = static_cast<long long>(slice) * batch + matrix;
  const int row = place.block_row + place.warp_row;
  const int col = place.block_col + place.warp_col;
  const Target target{
      c + matrices_before * batch_stride_c + row * ldc + col, ldc, HAS_BIAS ? bias + col : nullptr,
      m - row, n - col};
  if constexpr (STAGED_STORE) {
    Staged* strip = reinterpret_cast<Staged*>(shared_memory) + warp * (16 * PITCH);
    store_through_shared(sums, strip, target, place.lane, alpha, beta);
  } else {
    store_from_registers(sums, target, place.lane, alpha, beta);
  }
}

// tunegen_matmul_simt: C = act(alpha * A B + beta * C + bias), spec simt, for sm_90.
// SPDX-License-Identifier: Apache-2.0
// Config: BLOCK_M=128 WARP_M=32 THREAD_M=8 BLOCK_N=64 WARP_N=32 THREAD_N=4 SHARED_BUFFERS=2 ASYNC_COPY=0 BLOCK_K=16 REGISTER_BUFFERS=2 UNROLL_K=16 VECTOR_WIDTH=8 PADDING=4 MIN_BLOCKS=1 SPLIT_K=1 RASTER_GROUP=1
// Regenerate: tunegen inspect matmul --arch sm_90 --spec simt --problem 1000x1001x1002 --dtype bf16 --layout tt --attribute activation=gelu --attribute beta=1 --attribute bias=1 --param BLOCK_M=128 --param WARP_M=32 --param THREAD_M=8 --param BLOCK_N=64 --param WARP_N=32 --param THREAD_N=4 --param SHARED_BUFFERS=2 --param ASYNC_COPY=0 --param BLOCK_K=16 --param REGISTER_BUFFERS=2 --param UNROLL_K=16 --param VECTOR_WIDTH=8 --param PADDING=4 --param MIN_BLOCKS=1 --param SPLIT_K=1 --param RASTER_GROUP=1 --emit cuda

// C = act(alpha * A B + beta * C + bias) on the CUDA cores.
//
//   A is M x K, B is K x N, C is M x N, all row-major; a transposed operand is stored K x M or
//   N x K. A block computes BLOCK_M x BLOCK_N elements of C and walks along K in tiles of BLOCK_K.
//   Each of its warps owns WARP_M x WARP_N of them, each thread THREAD_M x THREAD_N, which stay in
//   registers: every step along K is an outer product of two short fragments.
//
//                     BLOCK_N
//                  +-----------+
//          BLOCK_K |  B tile   |       global memory -> shared memory (SHARED_BUFFERS tiles, some
//                  +-----------+       under way while one is multiplied) -> fragments -> sums;
//         BLOCK_K                      without buffers, global memory -> fragments -> sums
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

using Element = bf16;
using Accumulator = fp32;
using Output = bf16;
enum : int {
  BLOCK_M = 128,
  WARP_M = 32,
  THREAD_M = 8,
  BLOCK_N = 64,
  WARP_N = 32,
  THREAD_N = 4,
  SHARED_BUFFERS = 2,
  ASYNC_COPY = 0,
  BLOCK_K = 16,
  REGISTER_BUFFERS = 2,
  UNROLL_K = 16,
  VECTOR_WIDTH = 8,
  PADDING = 4,
  MIN_BLOCKS = 1,
  SPLIT_K = 1,
  RASTER_GROUP = 1,
  TRANSPOSE_A = 1,
  TRANSPOSE_B = 1,
  READS_C = 1,
  HAS_BIAS = 1,
  ACTIVATION = 2,
  ALIGN_A = 8,
  ALIGN_B = 2,
  ALIGN_C = 1,
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
static_assert(
    WARP_M % THREAD_M == 0 && WARP_N % THREAD_N == 0 &&
        WARP_M / THREAD_M * (WARP_N / THREAD_N) == 32,
    "32 threads of THREAD_M x THREAD_N cover WARP_M x WARP_N");
static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(
    !ASYNC_COPY || SHARED_BUFFERS >= 2,
    "asynchronous copies fill another buffer than the one that is read");
static_assert(
    ASYNC_COPY || SHARED_BUFFERS <= 2,
    "copies through registers are one tile ahead and need at most 2 buffers");
static_assert(
    !ASYNC_COPY || sizeof(Element) >= 4,
    "asynchronous copies move elements of 4 or 8 bytes as they are");
static_assert(SHARED_BUFFERS == 0 || BLOCK_K >= 8, "a barrier is worth at least 8 steps of K");
static_assert(
    SHARED_BUFFERS == 0 || least(BLOCK_M, BLOCK_N) * BLOCK_K >= THREADS,
    "every thread copies a part of both tiles");
static_assert(
    UNROLL_K == BLOCK_K || 4 * UNROLL_K == BLOCK_K,
    "UNROLL_K is all of BLOCK_K or a quarter: as one turn is peeled, a half is all");
static_assert(
    SHARED_BUFFERS || UNROLL_K == BLOCK_K, "without shared memory the whole tile is unrolled");
static_assert(
    UNROLL_K * THREAD_M * THREAD_N <= 2048,
    "at most 2048 unrolled multiply-adds fit the instruction cache");
static_assert(
    PADDING == 0 || (SHARED_BUFFERS && (!TRANSPOSE_A || TRANSPOSE_B)),
    "padding is for operands that are transposed on their way to shared memory");
static_assert(
    MIN_BLOCKS == 1 || MIN_BLOCKS * THREADS > 256,
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers");

// The outer product that one thread computes at every step of K.
//
// A thread owns THREAD_M x THREAD_N elements of its warp's tile, in strips of 16 bytes that
// interleave with those of the other lanes: neighbouring lanes read neighbouring strips of shared
// memory, and neighbouring pieces of C are written by neighbouring lanes.
enum : int {
  LANES_M = WARP_M / THREAD_M,
  LANES_N = WARP_N / THREAD_N,
};

__device__ constexpr int strip_of(int thread_elements) {
  return least(thread_elements, 16 / static_cast<int>(sizeof(Accumulator)));
}
enum : int {
  STRIP_M = strip_of(THREAD_M),
  STRIP_N = strip_of(THREAD_N),
};

// Where a thread's first element lies: that of its block in C, and its own in the block.
struct Place {
  int block_row, block_col;
  int thread_row, thread_col;
};

// Shared memory serves 16 lanes at once where pairs of lanes (0 and 1, or 0 and 2) want the same
// 16 bytes, and only 8 otherwise. So bit 0 of the lane goes along N and bit 1 along M: either
// operand then has such pairs.
__device__ __forceinline__ int lane_m(int lane) {
  return LANES_N == 1 ? lane : lane / 2 % LANES_M;
}
__device__ __forceinline__ int lane_n(int lane) {
  return LANES_N == 1 ? 0 : lane / (2 * LANES_M) * 2 + lane % 2;
}

// Where element `i` of a thread's fragment lies in the warp's tile, from the lane's first element.
template <int STRIP, int LANES>
__device__ constexpr int warp_offset(int i) {
  return i / STRIP * STRIP * LANES + i % STRIP;
}

template <int THREAD, int LANES>
__device__ __forceinline__ void load_fragment(
    Accumulator (&fragment)[THREAD], const Accumulator* row) {
  constexpr int STRIP = strip_of(THREAD);
#pragma unroll
  for (int i = 0; i < THREAD; i += STRIP) {
    const auto strip = load_vector<STRIP>(row + warp_offset<STRIP, LANES>(i));
#pragma unroll
    for (int j = 0; j < STRIP; ++j) fragment[i + j] = strip.values[j];
  }
}

__device__ __forceinline__ void multiply_add(
    Accumulator (&sums)[THREAD_M][THREAD_N], const Accumulator (&a)[THREAD_M],
    const Accumulator (&b)[THREAD_N]) {
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sums[i][j] += a[i] * b[j];
  }
}

// Elements of an operand's tile that a thread brings from global memory.
__device__ constexpr int share_of(int block, int thread_elements) {
  return SHARED_BUFFERS ? block * BLOCK_K / THREADS : thread_elements * BLOCK_K;
}

// The widest global access to an operand: as wide as asked for and aligned, no longer than its rows
// in a tile, and leaving something to do for every thread. Transposed on their way, asynchronous
// copies bring one element each.
__device__ constexpr int vector_of(
    bool k_contiguous, int alignment, int block, int thread_elements) {
  const int widest = least(least(VECTOR_WIDTH, alignment), share_of(block, thread_elements));
  if (k_contiguous) return ASYNC_COPY ? 1 : least(widest, BLOCK_K);
  return least(widest, SHARED_BUFFERS ? block : strip_of(thread_elements));
}

enum : int {
  VECTOR_A = vector_of(!TRANSPOSE_A, ALIGN_A, BLOCK_M, THREAD_M),
  VECTOR_B = vector_of(TRANSPOSE_B, ALIGN_B, BLOCK_N, THREAD_N),
  VECTOR_C = least(least(VECTOR_WIDTH, ALIGN_C), STRIP_N),
};
static_assert(
    most(most(VECTOR_A, VECTOR_B), VECTOR_C) == VECTOR_WIDTH,
    "some operand is accessed VECTOR_WIDTH elements at a time");
static_assert(
    share_of(BLOCK_M, THREAD_M) <= 32 * VECTOR_A && share_of(BLOCK_N, THREAD_N) <= 32 * VECTOR_B,
    "a thread makes at most 32 accesses to each tile");

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

// One operand's way from global to shared memory, a tile of BLOCK_K x TILE at a time.
//
// In global memory the tile lies as its matrix is stored: in rows along K (K_CONTIGUOUS), or in
// rows along M or N. In shared memory it always lies as [k][TILE + PADDING], so that the inner
// product reads both operands along the fast axis, and in the accumulator's type, so that 16-bit
// elements are widened once and not at every use.
template <int TILE, bool K_CONTIGUOUS, int VECTOR>
struct TileCopy {
  enum : int {
    PITCH = TILE + PADDING,
    ROWS = K_CONTIGUOUS ? TILE : BLOCK_K,
    ROW_VECTORS = (K_CONTIGUOUS ? BLOCK_K : TILE) / VECTOR,
    PASSES = ROWS * ROW_VECTORS / THREADS,
  };

  // Threads side by side along one row. Rows along K are scattered over shared rows, where fewer
  // lanes along K and more along the tile meet fewer banks twice; a sector of 32 bytes is the
  // least that global memory delivers.
  enum : int {
    SECTOR_VECTORS = most(1, 32 / static_cast<int>(VECTOR * sizeof(Element))),
    ROW_THREADS = K_CONTIGUOUS ? most(least(ROW_VECTORS, SECTOR_VECTORS), THREADS / ROWS)
                               : least(ROW_VECTORS, THREADS),
    ROW_PASSES = ROW_VECTORS / ROW_THREADS,
    ROW_STEP = THREADS / ROW_THREADS,
  };

  const Element* source;  // this thread's first vector of the tile that is copied next
  long long ld;
  int row, col;  // where that vector lies in the tile
  int extent;    // how many of the TILE rows or columns lie inside the matrix, may be more
  Vector<Element, VECTOR> staged[PASSES];

  __device__ __forceinline__ TileCopy(
      const Element* matrix, long long row_elements, int tile_start, int tile_extent, int k_start)
      : ld(row_elements), extent(tile_extent - tile_start) {
    const int thread = threadIdx.x;
    row = thread / ROW_THREADS;
    col = thread % ROW_THREADS * VECTOR;
    const long long first_row = (K_CONTIGUOUS ? tile_start : k_start) + row;
    source = matrix + first_row * ld + (K_CONTIGUOUS ? k_start : tile_start) + col;
  }

  // Unguarded code multiplies a leading dimension of 32 bits into a 64-bit offset, in one
  // instruction.
  __device__ __forceinline__ bool narrow() const { return ld == static_cast<unsigned>(ld); }

  template <bool GUARDED>
  __device__ __forceinline__ void advance() {
    source += K_CONTIGUOUS ? BLOCK_K : rows<GUARDED>(BLOCK_K);
  }

  // Global memory to registers. GUARDED sets to zero what lies outside the matrix; `k_left` is
  // how many of the BLOCK_K steps lie inside.
  template <bool GUARDED>
  __device__ __forceinline__ void stage(int k_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      staged[pass] = GUARDED ? load_inside<VECTOR>(vector<GUARDED>(pass), inside(pass, k_left))
                             : load_vector<VECTOR>(vector<GUARDED>(pass));
    }
  }

  // Registers to shared memory, widened.
  __device__ __forceinline__ void store(Accumulator* tile) {
    constexpr int WIDTH = least(VECTOR, 16 / static_cast<int>(sizeof(Accumulator)));
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if constexpr (K_CONTIGUOUS) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          *target(tile, pass, i) = convert<Accumulator>(staged[pass].values[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i += WIDTH) {
          Vector<Accumulator, WIDTH> wide;
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) {
            wide.values[j] = convert<Accumulator>(staged[pass].values[i + j]);
          }
          store_vector(target(tile, pass, i), wide);
        }
      }
    }
  }

  // Global to shared memory without registers, in flight until it is waited for.
  template <bool GUARDED>
  __device__ __forceinline__ void copy(Accumulator* tile, int k_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (!K_CONTIGUOUS && (!GUARDED || inside(pass, k_left) >= VECTOR)) {
        copy_async<VECTOR * sizeof(Element)>(target(tile, pass, 0), vector<GUARDED>(pass));
      } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          if constexpr (GUARDED) {
            const bool valid = i < inside(pass, k_left);
            copy_async<sizeof(Element)>(target(tile, pass, i), vector<GUARDED>(pass) + i, valid);
          } else {
            copy_async<sizeof(Element)>(target(tile, pass, i), vector<GUARDED>(pass) + i);
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int row_offset(int pass) {
    return pass / ROW_PASSES * ROW_STEP;
  }
  static __device__ __forceinline__ int col_offset(int pass) {
    return pass % ROW_PASSES * (ROW_THREADS * VECTOR);
  }

  // Elements from one row to the `count`-th after it.
  template <bool GUARDED>
  __device__ __forceinline__ long long rows(int count) const {
    return GUARDED ? count * ld : static_cast<long long>(static_cast<unsigned>(ld)) * count;
  }

  template <bool GUARDED>
  __device__ __forceinline__ const Element* vector(int pass) const {
    return source + rows<GUARDED>(row_offset(pass)) + col_offset(pass);
  }

  // How many elements of a pass's vector lie inside the matrix: negative, or more than VECTOR.
  __device__ __forceinline__ int inside(int pass, int k_left) const {
    const int rows_left = (K_CONTIGUOUS ? extent : k_left) - (row + row_offset(pass));
    const int cols_left = (K_CONTIGUOUS ? k_left : extent) - (col + col_offset(pass));
    return rows_left > 0 ? cols_left : 0;
  }

  __device__ __forceinline__ Accumulator* target(Accumulator* tile, int pass, int element) const {
    const int r = row + row_offset(pass);
    const int c = col + col_offset(pass) + element;
    return tile + (K_CONTIGUOUS ? c * PITCH + r : r * PITCH + c);
  }
};

// Walks along K through shared memory and adds the tiles' products to a thread's sums.
//
// While one tile is multiplied the next ones are under way: in registers, one tile ahead, or as
// asynchronous copies into the other buffers. One barrier a tile publishes the next tile and frees
// the last one. Tiles that lie wholly inside the matrices go through a loop without any check;
// those at an edge, and the last ones, through a shorter version of it with all checks.
struct Pipeline {
  using CopyA = TileCopy<BLOCK_M, !TRANSPOSE_A, VECTOR_A>;
  using CopyB = TileCopy<BLOCK_N, TRANSPOSE_B, VECTOR_B>;
  enum : int {
    A_TILE = BLOCK_K * CopyA::PITCH,
    SLOT = A_TILE + BLOCK_K * CopyB::PITCH,  // elements of one buffer
  };

  // From the tile that is multiplied to the one that is fetched meanwhile.
  enum : int { AHEAD = ASYNC_COPY ? SHARED_BUFFERS - 1 : 1 };

  CopyA a_copy;
  CopyB b_copy;
  // Shared memory is SHARED_BUFFERS slots, each a tile of A and one of B.
  const Accumulator* a_read;  // this thread's first element of the slot that is multiplied
  const Accumulator* b_read;
  Accumulator* write;  // the slot that is filled next
  int read_slot = SHARED_BUFFERS - 1;
  int write_slot = 0;
  Accumulator a[REGISTER_BUFFERS][THREAD_M];
  Accumulator b[REGISTER_BUFFERS][THREAD_N];

  __device__ __forceinline__ Pipeline(
      const Element* a_matrix, long long lda, const Element* b_matrix, long long ldb,
      const Place& place, int m, int n, int k_start)
      : a_copy(a_matrix, lda, place.block_row, m, k_start),
        b_copy(b_matrix, ldb, place.block_col, n, k_start) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    write = reinterpret_cast<Accumulator*>(shared_memory);
    a_read = write + (SHARED_BUFFERS - 1) * SLOT + place.thread_row;
    b_read = write + (SHARED_BUFFERS - 1) * SLOT + A_TILE + place.thread_col;
  }

  // Adds the products of `k_steps` steps. `interior`: no row or column of the tiles is outside.
  __device__ __forceinline__ void run(
      Accumulator (&sums)[THREAD_M][THREAD_N], int k_steps, bool interior) {
    const int tiles = (k_steps + BLOCK_K - 1) / BLOCK_K;
    if (tiles == 0) return;
    start(k_steps, tiles);
    const bool narrow = a_copy.narrow() && b_copy.narrow();
    const int whole = interior && narrow ? k_steps / BLOCK_K : 0;
    int tile = 0;
#pragma unroll 1
    for (; tile < whole - AHEAD; ++tile) step<false, UNROLL_K>(sums, tile, tiles, k_steps);
#pragma unroll 1
    for (; tile < tiles; ++tile) step<true, REGISTER_BUFFERS>(sums, tile, tiles, k_steps);
  }

 private:
  __device__ __forceinline__ void start(int k_steps, int tiles) {
#pragma unroll 1
    for (int tile = 0; tile < AHEAD; ++tile) {
      if (tile < tiles) fetch<true>(k_steps - tile * BLOCK_K);
      if constexpr (ASYNC_COPY) copy_async_commit();
    }
    publish();
    if constexpr (REGISTER_BUFFERS == 2) {
      load_fragments(0, a_read, b_read);
    }
  }

  // Multiplies tile `tile`, which is in shared memory; leaves with the next one there.
  template <bool GUARDED, int UNROLL>
  __device__ __forceinline__ void step(
      Accumulator (&sums)[THREAD_M][THREAD_N], int tile, int tiles, int k_steps) {
    if (!GUARDED || tile + AHEAD < tiles) fetch<GUARDED>(k_steps - (tile + AHEAD) * BLOCK_K);
    if constexpr (ASYNC_COPY) copy_async_commit();

    const Accumulator* a_row = a_read;
    const Accumulator* b_row = b_read;
#pragma unroll 1
    for (int part = 1; part < BLOCK_K / UNROLL; ++part) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        load_ahead(i, a_row, b_row);
        multiply_add(sums, a[i % REGISTER_BUFFERS], b[i % REGISTER_BUFFERS]);
      }
      a_row += UNROLL * CopyA::PITCH;
      b_row += UNROLL * CopyB::PITCH;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (i < UNROLL + 1 - REGISTER_BUFFERS) {
        load_ahead(i, a_row, b_row);
      } else {
        // The last fragments are in registers: hand over before they are used, so that the wait
        // for the first fragments of the next tile lies behind their products.
        publish();
        if (!GUARDED || tile + 1 < tiles) {
          load_fragments(0, a_read, b_read);
        }
      }
      multiply_add(sums, a[i % REGISTER_BUFFERS], b[i % REGISTER_BUFFERS]);
    }
    if constexpr (REGISTER_BUFFERS == 1) publish();
  }

  // Starts to bring the next tile from global memory.
  template <bool GUARDED>
  __device__ __forceinline__ void fetch(int k_left) {
    if constexpr (ASYNC_COPY) {
      a_copy.template copy<GUARDED>(write, k_left);
      b_copy.template copy<GUARDED>(write + A_TILE, k_left);
      write += to_next(write_slot);
    } else {
      a_copy.template stage<GUARDED>(k_left);
      b_copy.template stage<GUARDED>(k_left);
    }
    a_copy.template advance<GUARDED>();
    b_copy.template advance<GUARDED>();
  }

  // The next tile becomes readable by every thread, the last one's buffer writable.
  __device__ __forceinline__ void publish() {
    if constexpr (ASYNC_COPY) {
      copy_async_wait<AHEAD - 1>();
    } else {
      if constexpr (SHARED_BUFFERS == 1) __syncthreads();
      a_copy.store(write);
      b_copy.store(write + A_TILE);
      write += to_next(write_slot);
    }
    __syncthreads();
    const int step = to_next(read_slot);
    a_read += step;
    b_read += step;
  }

  // Elements from a slot to the one after it, which it becomes.
  static __device__ __forceinline__ int to_next(int& slot) {
    const bool last = slot == SHARED_BUFFERS - 1;
    slot = last ? 0 : slot + 1;
    return last ? -(SHARED_BUFFERS - 1) * SLOT : SLOT;
  }

  // The fragments of step `i`, or of the step after it where there is a second set of registers.
  __device__ __forceinline__ void load_ahead(
      int i, const Accumulator* a_row, const Accumulator* b_row) {
    const int step = i + REGISTER_BUFFERS - 1;
    load_fragments(
        step % REGISTER_BUFFERS, a_row + step * CopyA::PITCH, b_row + step * CopyB::PITCH);
  }

  __device__ __forceinline__ void load_fragments(
      int set, const Accumulator* a_row, const Accumulator* b_row) {
    load_fragment<THREAD_M, LANES_M>(a[set], a_row);
    load_fragment<THREAD_N, LANES_N>(b[set], b_row);
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

// Writes a thread's sums; (row, col) is its first element of C. A slice of K writes them as they
// are, for a second kernel to add up.
__device__ __forceinline__ void store(
    const Accumulator (&sums)[THREAD_M][THREAD_N], Output* c, long long ldc, const Output* bias,
    int row, int col, int m, int n, Accumulator alpha, Accumulator beta) {
  Vector<Output, VECTOR_C> biases[THREAD_N / VECTOR_C];
  if constexpr (HAS_BIAS) {
#pragma unroll
    for (int j = 0; j < THREAD_N; j += VECTOR_C) {
      const int first = col + warp_offset<STRIP_N, LANES_N>(j);
      biases[j / VECTOR_C] = load_inside<VECTOR_C>(bias + first, n - first);
    }
  }
#pragma unroll
  for (int first = 0; first < THREAD_M; first += STRIP_M) {
    // A strip of rows is read before it is written: one wait for C, not one a row.
    Vector<Output, VECTOR_C> results[STRIP_M][THREAD_N / VECTOR_C];
#pragma unroll
    for (int pass = READS_C ? 0 : 1; pass < 2; ++pass) {
#pragma unroll
      for (int i = 0; i < STRIP_M; ++i) {
        const int r = row + warp_offset<STRIP_M, LANES_M>(first + i);
#pragma unroll
        for (int j = 0; j < THREAD_N; j += VECTOR_C) {
          const int inside = r < m ? n - col - warp_offset<STRIP_N, LANES_N>(j) : 0;
          Output* target = c + r * ldc + col + warp_offset<STRIP_N, LANES_N>(j);
          Vector<Output, VECTOR_C>& result = results[i][j / VECTOR_C];
          if (pass == 0) {
            result = load_inside<VECTOR_C>(target, inside);
            continue;
          }
#pragma unroll
          for (int jj = 0; jj < VECTOR_C; ++jj) {
            Accumulator value = sums[first + i][j + jj];
            if constexpr (SPLIT_K == 1) value *= alpha;
            // beta == 0 must not read C: it may hold NaN.
            if constexpr (READS_C) value += beta * convert<Accumulator>(result.values[jj]);
            if constexpr (HAS_BIAS) value += convert<Accumulator>(biases[j / VECTOR_C].values[jj]);
            result.values[jj] = convert<Output>(activated(value));
          }
          store_inside(target, result, inside);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) tunegen_matmul_simt(
    const Element* __restrict__ a,  // (batch, M, K), or (batch, K, M) when TRANSPOSE_A
    const Element* __restrict__ b,  // (batch, K, N), or (batch, N, K) when TRANSPOSE_B
    Output* __restrict__ c,         // (batch, M, N), read only when READS_C; with SPLIT_K > 1 the
                                    // partial sums, (SPLIT_K, batch, M, N)
    // For every row.
    const Output* __restrict__ bias,  // (N)
    int batch, int m, int n, int k, long long lda, long long ldb, long long ldc,
    long long batch_stride_a, long long batch_stride_b, long long batch_stride_c, Accumulator alpha,
    Accumulator beta) {
  // The blocks of all matrices lie along x: y and z end at 65535, and a loop over matrices would
  // keep the addresses of the next one in registers. Groups of RASTER_GROUP rows of blocks are
  // walked column by column, so that blocks that run together share rows and columns.
  const int blocks_m = (m + BLOCK_M - 1) / BLOCK_M;
  const int blocks_n = (n + BLOCK_N - 1) / BLOCK_N;
  const int matrix = static_cast<int>(blockIdx.x) / (blocks_m * blocks_n);
  const int block = static_cast<int>(blockIdx.x) - matrix * (blocks_m * blocks_n);
  const int group_start = block / blocks_n / RASTER_GROUP * RASTER_GROUP;
  const int group_rows = least(blocks_m - group_start, RASTER_GROUP);
  const int in_group = block - group_start * blocks_n;
  const int block_row = (group_start + in_group % group_rows) * BLOCK_M;
  const int block_col = in_group / group_rows * BLOCK_N;

  // Slices of K are whole tiles and as even as they can be; some are empty where K is short.
  const int slice = blockIdx.y;
  const int tiles = (k + BLOCK_K - 1) / BLOCK_K;
  const int spare_tiles = tiles % SPLIT_K;
  const int first_tile = tiles / SPLIT_K * slice + least(slice, spare_tiles);
  const int slice_tiles = tiles / SPLIT_K + (slice < spare_tiles);
  const int k_start = first_tile * BLOCK_K;
  const int k_steps = least(slice_tiles * BLOCK_K, k - k_start);

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Place place{
      block_row, block_col, warp / WARPS_N * WARP_M + lane_m(lane) * STRIP_M,
      warp % WARPS_N * WARP_N + lane_n(lane) * STRIP_N};

  Accumulator sums[THREAD_M][THREAD_N] = {};
  Pipeline pipeline(
      a + matrix * batch_stride_a, lda, b + matrix * batch_stride_b, ldb, place, m, n, k_start);
  pipeline.run(sums, k_steps, block_row + BLOCK_M <= m && block_col + BLOCK_N <= n);

  const long long matrices_before = static_cast<long long>(slice) * batch + matrix;
  store(
      sums, c + matrices_before * batch_stride_c, ldc, bias, block_row + place.thread_row,
      block_col + place.thread_col, m, n, alpha, beta);
}

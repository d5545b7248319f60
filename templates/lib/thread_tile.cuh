/*# SPDX-License-Identifier: Apache-2.0 #*/
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

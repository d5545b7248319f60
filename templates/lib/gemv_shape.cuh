/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/integers.cuh, and the enumerators of the block's shape. #*/
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

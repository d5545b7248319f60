/*# SPDX-License-Identifier: Apache-2.0 #*/
// Where sums lie in the registers of a warpgroup, as the tensor cores leave them: warp w has rows
// 16 w to 16 w + 15 of 64, a thread two neighbours in each of two rows, eight apart, of every eight
// columns. Rows are those of the left operand: columns of C with SWAP_OPERANDS.
__device__ __forceinline__ int row_of_sum(int thread, int index) {
  return thread / 32 * 16 + thread % 32 / 4 + index / 2 % 2 * 8;
}
__device__ __forceinline__ int column_of_sum(int thread, int index) {
  return index / 4 * 8 + thread % 4 * 2 + index % 2;
}

// The part of C that a consumer's sums of one tile belong to.
struct Target {
  Output* c;  // of this matrix, or of this slice's sums
  long long ldc;
  int m, n;
  int row, col;  // of the consumer's first sum
  int matrix, thread;
  fp32 alpha, beta;

  // A slice of K leaves its bare sums.
  __device__ __forceinline__ fp32 scaled(fp32 sum) const {
    return SPLIT_K == 1 ? alpha * sum : sum;
  }
};

// Where a consumer stages sums on their way, the barrier of its threads, and the map of C.
struct Staging {
  unsigned address;
  const unsigned char* memory;
  int barrier;
  const TensorMap* map;
};

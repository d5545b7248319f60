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
  const Output* bias;
  int m, n;
  int row, col;  // of the consumer's first sum
  int matrix, thread;
  fp32 alpha, beta;

  // A slice of K leaves its bare sums.
  __device__ __forceinline__ fp32 scaled(fp32 sum) const {
    return SPLIT_K == 1 ? alpha * sum : sum;
  }
};

// The bias of a thread's sums of COLUMNS columns of the right operand, from column `col` of C on: of
// two neighbours in every eight, or with SWAP_OPERANDS of two columns of C in all.
template <int COLUMNS>
struct Bias {
  enum : int {
    WIDTH = !SWAP_OPERANDS && ALIGN_C > 1 ? 2 : 1,
    PAIRS = SWAP_OPERANDS ? 1 : COLUMNS / 8,
  };
  Vector<Output, WIDTH> parts[PAIRS][2 / WIDTH];

  __device__ __forceinline__ void load(const Target& target, int col) {
    if constexpr (HAS_BIAS) {
      if (col + (SWAP_OPERANDS ? 64 : COLUMNS) <= target.n) {
        load_columns<true>(target, col);
      } else {
        load_columns<false>(target, col);
      }
    }
  }
  // Of sum number `index`.
  __device__ __forceinline__ fp32 at(int index) const {
    const int which = SWAP_OPERANDS ? index / 2 % 2 : index % 2;
    return convert<fp32>(parts[SWAP_OPERANDS ? 0 : index / 4][which / WIDTH].values[which % WIDTH]);
  }

 private:
  // WHOLE: all columns lie inside.
  template <bool WHOLE>
  __device__ __forceinline__ void load_columns(const Target& target, int col) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
      for (int j = 0; j < 2 / WIDTH; ++j) {
        const int first = col + (SWAP_OPERANDS ? row_of_sum(target.thread, 2 * j)
                                               : column_of_sum(target.thread, 4 * i + j));
        const Output* from = target.bias + first;
        parts[i][j] = WHOLE ? load_vector<WIDTH>(from) : load_inside<WIDTH>(from, target.n - first);
      }
    }
  }
};

// Where a consumer stages sums on their way, the barrier of its threads, and the map of C.
struct Staging {
  unsigned address;
  unsigned char* memory;
  int barrier;
  const TensorMap* map;
};

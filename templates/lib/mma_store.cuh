/*# SPDX-License-Identifier: Apache-2.0 #*/
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

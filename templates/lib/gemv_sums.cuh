/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/gemv_shape.cuh. #*/
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

/*# SPDX-License-Identifier: Apache-2.0 #*/
// The way of a consumer's sums to C where elements have four bytes: from registers, since eight
// neighbours fill a sector of 32 bytes either way. See wgmma_layout.cuh for who has which sum.
__device__ __forceinline__ void store_tile(const Sums& sums, const Target& target, const Staging&) {
#pragma unroll
  for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < MMA_N / 2; ++j) {
      const int down = i * 64 + row_of_sum(target.thread, j);
      const int along = column_of_sum(target.thread, j);
      const int row = target.row + (SWAP_OPERANDS ? along : down);
      const int col = target.col + (SWAP_OPERANDS ? down : along);
      if (row < target.m && col < target.n) {
        Output& element = target.c[row * target.ldc + col];
        fp32 value = target.scaled(sums[i][j]);
        if constexpr (READS_C) value += target.beta * convert<fp32>(element);
        element = convert<Output>(value);
      }
    }
  }
}

__device__ __forceinline__ void finish_stores(const Target&) {}

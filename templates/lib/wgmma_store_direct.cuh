/*# SPDX-License-Identifier: Apache-2.0 #*/
// The way of a consumer's sums to C where elements have four bytes: from registers, since eight
// neighbours fill a sector of 32 bytes either way. See wgmma_layout.cuh for who has which sum.
// Loads of the bias are for eight columns of the right operand: more of them would take registers
// that sums still have.
__device__ __forceinline__ void store_tile(const Sums& sums, const Target& target, const Staging&) {
  Bias<8> bias;
#pragma unroll
  for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < MMA_N / 2; ++j) {
      if (j % 4 == 0) bias.load(target, target.col + (SWAP_OPERANDS ? i * 64 : j * 2));
      const int down = i * 64 + row_of_sum(target.thread, j);
      const int along = column_of_sum(target.thread, j);
      const int row = target.row + (SWAP_OPERANDS ? along : down);
      const int col = target.col + (SWAP_OPERANDS ? down : along);
      if (row < target.m && col < target.n) {
        Output& element = target.c[row * target.ldc + col];
        fp32 value = target.scaled(sums[i][j]);
        if constexpr (READS_C) value += target.beta * convert<fp32>(element);
        if constexpr (HAS_BIAS) value += bias.at(j % 4);
        element = convert<Output>(activated(value));
      }
    }
  }
}

__device__ __forceinline__ void finish_stores(const Target&) {}

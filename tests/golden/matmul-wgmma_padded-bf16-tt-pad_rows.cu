// tunegen_matmul_pad_rows: C = act(alpha * A B + beta * C + bias), spec wgmma_padded, for sm_90a.
// SPDX-License-Identifier: Apache-2.0
// Config: SWAP_OPERANDS=0 BLOCK_M=64 BLOCK_N=128 CONSUMERS=1 PINGPONG=0 STORE_PARTS=1 BLOCK_K=64 STAGES=8 CLUSTER_M=1 CLUSTER_N=1 CLUSTER_K=1 SPLIT_K=1 RASTER_GROUP=1 RASTER_COLUMNS=0 SPARE_SMS=0 MMA_IN_FLIGHT=1 PRODUCER_REGISTERS=24 L2_PROMOTION=256
// Regenerate: tunegen inspect matmul --arch sm_90 --spec wgmma_padded --problem 1000x1001x1002 --dtype bf16 --layout tt --attribute activation=gelu --attribute beta=1 --attribute bias=1 --param SWAP_OPERANDS=0 --param BLOCK_M=64 --param BLOCK_N=128 --param CONSUMERS=1 --param PINGPONG=0 --param STORE_PARTS=1 --param BLOCK_K=64 --param STAGES=8 --param CLUSTER_M=1 --param CLUSTER_N=1 --param CLUSTER_K=1 --param SPLIT_K=1 --param RASTER_GROUP=1 --param RASTER_COLUMNS=0 --param SPARE_SMS=0 --param MMA_IN_FLIGHT=1 --param PRODUCER_REGISTERS=24 --param L2_PROMOTION=256 --emit cuda

// Copies a matrix whose rows begin anywhere to one whose rows begin at multiples of 16 bytes.
//
//   A warp takes a row, or a part of it, two bytes a lane: side by side, so that whole sectors are
//   read and written although neither rows nor their starts are aligned to more.

enum : int {
  SWAP_OPERANDS = 0,
  BLOCK_M = 64,
  BLOCK_N = 128,
  CONSUMERS = 1,
  PINGPONG = 0,
  STORE_PARTS = 1,
  BLOCK_K = 64,
  STAGES = 8,
  CLUSTER_M = 1,
  CLUSTER_N = 1,
  CLUSTER_K = 1,
  SPLIT_K = 1,
  RASTER_GROUP = 1,
  RASTER_COLUMNS = 0,
  SPARE_SMS = 0,
  MMA_IN_FLIGHT = 1,
  PRODUCER_REGISTERS = 24,
  L2_PROMOTION = 256,
  PAD_THREADS = 256,
  PAD_UNROLL = 8,
};

enum : int {
  WARPS = PAD_THREADS / 32,
  PART = 32 * PAD_UNROLL,  // elements of a row that a warp has in flight
};

extern "C" __global__ void __launch_bounds__(PAD_THREADS) tunegen_matmul_pad_rows(
    const unsigned short* __restrict__ source,  // (rows, columns), ld apart
    unsigned short* __restrict__ target,        // (rows, columns), padded_ld apart
    long long rows, int columns, long long ld, long long padded_ld) {
  const int parts = (columns + PART - 1) / PART;
  const long long item = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const long long row = item / parts;
  if (row >= rows) return;
  const int first = static_cast<int>(item - row * parts) * PART + threadIdx.x % 32;
  const unsigned short* from = source + row * ld + first;
  unsigned short* to = target + row * padded_ld + first;
  unsigned short values[PAD_UNROLL];
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    if (first + 32 * i < columns) values[i] = __ldg(from + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < PAD_UNROLL; ++i) {
    if (first + 32 * i < columns) to[32 * i] = values[i];
  }
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
// How operands get to the tensor cores: one thread has the copy engine fill a ring of stages, the
// consumers multiply what is full and hand it back.

// A place in the ring, and the parity of the round.
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int stages) {
    const int passed = stage + stages;
    stage = passed % STAGES;
    parity ^= passed / STAGES & 1;
  }
};

// Steps of K, in blocks of BLOCK_K.
struct Slice {
  int first, count;
};

struct Stages {
  unsigned left, right;  // operands of stage 0 in shared memory
  unsigned full, empty;  // barriers of stage 0

  __device__ __forceinline__ unsigned left_at(int stage) const { return left + stage * LEFT_BYTES; }
  __device__ __forceinline__ unsigned right_at(int stage) const {
    return right + stage * RIGHT_BYTES;
  }
  __device__ __forceinline__ unsigned full_at(int stage) const { return full + stage * 8; }
  __device__ __forceinline__ unsigned empty_at(int stage) const { return empty + stage * 8; }
};

// Blocks of the cluster that want the same rows of an operand each bring a part of them, for all.
struct Share {
  int part;               // which one this block brings
  unsigned short blocks;  // a bit for each of those that want it
};

__device__ __forceinline__ Share share_of_a(int rank) {
  unsigned blocks = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER_N; ++i) blocks |= 1u << (rank % CLUSTER_M + i * CLUSTER_M);
  return {rank / CLUSTER_M, static_cast<unsigned short>(blocks)};
}
__device__ __forceinline__ Share share_of_b(int rank) {
  const unsigned blocks = ((1u << CLUSTER_M) - 1) << rank / CLUSTER_M * CLUSTER_M;
  return {rank % CLUSTER_M, static_cast<unsigned short>(blocks)};
}

// What this block brings of ROWS of an operand from `row` on, BLOCK_K steps of K at a time.
template <int ROWS, bool ACROSS, int SHARERS, int POLICY>
struct Operand {
  enum : int {
    BOXES = ACROSS ? (ROWS + 63) / 64 : BLOCK_K / 64,
    HEIGHT = ACROSS ? BLOCK_K : ROWS,  // rows of 128 bytes of a box, shared out
    PART = HEIGHT / SHARERS,
  };
  const TensorMap& map;
  int row, matrix;
  Share share;

  // Brings the steps from `k` on to shared memory.
  __device__ __forceinline__ void load(unsigned target, unsigned barrier, int k) const {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      const unsigned place = target + (i * HEIGHT + start()) * 128;
      if constexpr (SHARERS > 1) {
        load_box_multicast<POLICY>(place, map, barrier, x(i, k), y(k), matrix, share.blocks);
      } else {
        load_box<POLICY>(place, map, barrier, x(i, k), y(k), matrix);
      }
    }
  }
  // Brings them to L2.
  __device__ __forceinline__ void prefetch(int k) const {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) prefetch_box(map, x(i, k), y(k), matrix);
  }

 private:
  __device__ __forceinline__ int start() const { return (SHARERS > 1 ? share.part : 0) * PART; }
  __device__ __forceinline__ int x(int box, int k) const { return (ACROSS ? row : k) + box * 64; }
  __device__ __forceinline__ int y(int k) const { return (ACROSS ? k : row) + start(); }
};

// Both operands of a tile.
struct Operands {
  enum : int {
    LEFT_IS = SWAP_OPERANDS ? 2 : 1,  // as STREAMED_OPERAND counts
    RIGHT_IS = 3 - LEFT_IS,
    LEFT_POLICY = STREAMED_OPERAND == LEFT_IS ? LINE_EVICT_FIRST : LINE_NORMAL,
    RIGHT_POLICY = STREAMED_OPERAND == RIGHT_IS ? LINE_EVICT_FIRST : LINE_NORMAL,
  };
  Operand<LEFT_ROWS, LEFT_ACROSS, LEFT_SHARERS, LEFT_POLICY> left;
  Operand<MMA_N, RIGHT_ACROSS, RIGHT_SHARERS, RIGHT_POLICY> right;

  __device__ __forceinline__
  Operands(const TensorMap& left_map, const TensorMap& right_map, const Tile& tile, int rank)
      : left{
            left_map, SWAP_OPERANDS ? tile.col : tile.row, tile.matrix,
            SWAP_OPERANDS ? share_of_b(rank) : share_of_a(rank)},
        right{
            right_map, SWAP_OPERANDS ? tile.row : tile.col, tile.matrix,
            SWAP_OPERANDS ? share_of_a(rank) : share_of_b(rank)} {}
};

// Has L2 bring as much of a slice as the ring holds.
__device__ __forceinline__ void prefetch_stages(const Operands& operands, const Slice& slice) {
#pragma unroll 1
  for (int i = 0; i < STAGES && i < slice.count; ++i) {
    const int k = (slice.first + i) * BLOCK_K;
    operands.left.prefetch(k);
    operands.right.prefetch(k);
  }
}

// The producer's part of a tile. Its blocks of K follow those of the tile before in the ring.
__device__ __forceinline__ void fill_stages(
    const Stages& stages, Ring& ring, const Operands& operands, const Slice& slice) {
#pragma unroll 1
  for (int i = 0; i < slice.count; ++i) {
    const int k = (slice.first + i) * BLOCK_K;
    const unsigned full = stages.full_at(ring.stage);
    barrier_wait(stages.empty_at(ring.stage), ring.parity ^ 1);
    barrier_expect(full, LEFT_BYTES + RIGHT_BYTES);
    operands.left.load(stages.left_at(ring.stage), full, k);
    operands.right.load(stages.right_at(ring.stage), full, k);
    ring.advance();
  }
}

// Hands a stage back to every block that has copied into it: one arrival a warp.
__device__ __forceinline__ void release(const Stages& stages, int stage, int lane, int rank) {
  const unsigned empty = stages.empty_at(stage);
  if constexpr (CLUSTER_M * CLUSTER_N == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else {
    const bool shares =
        lane % CLUSTER_M == rank % CLUSTER_M || lane / CLUSTER_M == rank / CLUSTER_M;
    if (lane < CLUSTER_M * CLUSTER_N && shares) barrier_arrive_at(empty, lane);
  }
}

// A consumer's sums: MMA_ROWS times 64 rows of the left operand by MMA_N of the right one.
using Sums = fp32[MMA_ROWS][MMA_N / 2];

// Multiplies the stages of one tile; `first_row` is the consumer's first row of the left operand.
// Calls `hand_over` when all products are on their way.
template <typename HandOver>
__device__ __forceinline__ void multiply_stages(
    Sums& sums, const Stages& stages, Ring& ring, int blocks, int first_row, int lane, int rank,
    const HandOver& hand_over) {
  // Blocks of 64 rows are slabs across K, and follow each other in every 64 steps along K.
  constexpr int LEFT_64 = LEFT_ACROSS ? BLOCK_K * 128 : 64 * 128;
  const unsigned long long left =
      operand_descriptor(stages.left + first_row / 64 * LEFT_64, LEFT_ACROSS, BLOCK_K * 128);
  const unsigned long long right = operand_descriptor(stages.right, RIGHT_ACROSS, BLOCK_K * 128);
  int previous = -1;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(stages.full_at(ring.stage), ring.parity);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_K / 16; ++step) {
      const int left_step = LEFT_ACROSS ? step * 2048 : step / 4 * LEFT_ROWS * 128 + step % 4 * 32;
      const int right_step = RIGHT_ACROSS ? step * 2048 : step / 4 * MMA_N * 128 + step % 4 * 32;
#pragma unroll
      for (int i = 0; i < MMA_ROWS; ++i) {
        wgmma(
            sums[i], left + ((ring.stage * LEFT_BYTES + i * LEFT_64 + left_step) >> 4),
            right + ((ring.stage * RIGHT_BYTES + right_step) >> 4), block + step);
      }
    }
    wgmma_commit();
    wgmma_wait<MMA_IN_FLIGHT>();
    if constexpr (MMA_IN_FLIGHT == 0) {
      release(stages, ring.stage, lane, rank);
    } else {
      if (previous >= 0) release(stages, previous, lane, rank);
      previous = ring.stage;
    }
    ring.advance();
  }
  hand_over();
  if constexpr (MMA_IN_FLIGHT > 0) {
    wgmma_wait<0>();
    if (previous >= 0) release(stages, previous, lane, rank);
  }
}

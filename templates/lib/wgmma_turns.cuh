/*# SPDX-License-Identifier: Apache-2.0 #*/
// What a block has to do at its turns: whole tiles, or even slices of them.
struct Part {
  Tile tile;
  Slice slice;
};

// What all threads of a block need.
struct Job {
  Stages stages;
  TileOrder order;
  int k;
  int rank;         // of the block in its cluster
  int first, step;  // turn of this cluster, and turns to its next one

  __device__ __forceinline__ Job(const Stages& stages, const TileOrder& order, int k, int rank)
      : stages(stages),
        order(order),
        k(k),
        rank(rank),
        first(static_cast<int>(blockIdx.x) / CLUSTER),
        step(static_cast<int>(gridDim.x) / CLUSTER) {}

  __device__ __forceinline__ bool has(int turn) const { return turn < order.count; }
  // The blocks of a cluster that share K have one part of the slice each.
  __device__ __forceinline__ Part part(int turn) const {
    const Tile tile = order.at(turn, CLUSTER_K > 1 ? 0 : rank);
    return {tile, slice(tile.slice * CLUSTER_K + (CLUSTER_K > 1 ? rank : 0))};
  }

 private:
  // Slices are as even as they can be, some are empty where K is short.
  __device__ __forceinline__ Slice slice(int slice) const {
    constexpr int SLICES = SPLIT_K * CLUSTER_K;
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const int spare = blocks % SLICES;
    return {
        blocks / SLICES * slice + (slice < spare ? slice : spare),
        blocks / SLICES + (slice < spare)};
  }
};

// There are none: nobody finishes what another one began.
struct Partials {};

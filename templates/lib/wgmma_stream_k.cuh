/*# SPDX-License-Identifier: Apache-2.0 #*/
// What a block has to do at its turns where tiles do not come out even: whole tiles first, then a
// share of the blocks of K of the remaining tiles, laid end to end and cut as evenly as they can be
// (stream-K, arXiv:2301.03598). A share is worked off from its end. Who has the last block of K of
// a tile adds what others have of it, all of them clusters of a lower number, who come to it before
// anything else of their shares: nobody waits for somebody who waits.
struct Part {
  Tile tile;
  Slice slice;
  bool is_last;  // has the last block of K
};

// The share of a cluster, in shared memory: registers are for sums, and a producer has few.
struct Range {
  int whole;                    // tiles that each cluster has for itself
  int first_tile, first_block;  // a share begins with this block of K of this tile
  int last_tile, last_end;      // and ends where the part of this one does
  int first_sharer;             // cluster that has the first block of K of its first tile

  // Blocks of K of the tiles that are shared are counted from the first one's first: memory bounds
  // them to 35 bits.
  __device__ __forceinline__ Range(const TileOrder& order, int blocks, int cluster, int clusters) {
    const int waves = order.count / clusters;
    whole = waves < STREAM_K ? 0 : waves - (STREAM_K - 1);
    const long long all = static_cast<long long>(order.count - whole * clusters) * blocks;
    const long long sharers = all < clusters ? all : clusters;  // no block of K is cut
    const long long begin = cluster < sharers ? all * cluster / sharers : all;
    const long long end = cluster < sharers ? all * (cluster + 1) / sharers : all;
    first_tile = static_cast<int>(begin / blocks);
    const long long first = static_cast<long long>(first_tile) * blocks;
    first_block = static_cast<int>(begin - first);
    last_tile = begin == end ? first_tile - 1 : static_cast<int>((end - 1) / blocks);
    last_end = static_cast<int>(end - static_cast<long long>(last_tile) * blocks);
    first_sharer = begin == end ? cluster : static_cast<int>(((first + 1) * sharers - 1) / all);
  }
};

// What all threads of a block need.
struct Job {
  Stages stages;
  TileOrder order;
  int blocks;  // of K
  int rank;    // of the block in its cluster
  const volatile Range& range;
  enum : int { first = 0, step = 1 };

  // One thread writes the share, the others read it behind a barrier.
  __device__ __forceinline__
  Job(const Stages& stages, const TileOrder& order, int k, int rank, unsigned char* memory)
      : stages(stages),
        order(order),
        blocks((k + BLOCK_K - 1) / BLOCK_K),
        rank(rank),
        range(*reinterpret_cast<const volatile Range*>(memory)) {
    if (threadIdx.x == 0) {
      *reinterpret_cast<Range*>(memory) = Range(order, blocks, cluster(), clusters());
    }
  }

  // The number of this cluster, and how many there are.
  __device__ __forceinline__ static int cluster() { return static_cast<int>(blockIdx.x) / CLUSTER; }
  __device__ __forceinline__ static int clusters() { return static_cast<int>(gridDim.x) / CLUSTER; }

  __device__ __forceinline__ bool has(int turn) const {
    return turn <= range.whole + range.last_tile - range.first_tile;
  }
  __device__ __forceinline__ Part part(int turn) const {
    const int whole = range.whole;
    if (turn < whole) return {order.at(cluster() + turn * clusters(), rank), {0, blocks}, true};
    const int index = range.last_tile - (turn - whole);
    const int from = index == range.first_tile ? range.first_block : 0;
    const int to = index == range.last_tile ? range.last_end : blocks;
    return {order.at(whole * clusters() + index, rank), {from, to - from}, to == blocks};
  }
};

/*# SPDX-License-Identifier: Apache-2.0 #*/
// Walks along K through a ring of STAGES tiles in shared memory and adds the tiles' products to a
// warp's sums.
//
// While one tile is multiplied the next ones are under way. One barrier a tile publishes the next
// tile and frees the last one, before the last step's products: the wait for the next tile's first
// fragments lies behind these.
struct Pipeline {
  using CopyA = TileCopy<BLOCK_M, TRANSPOSE_A, ALIGN_A>;
  using CopyB = TileCopy<BLOCK_N, !TRANSPOSE_B, ALIGN_B>;
  enum : int {
    AHEAD = STAGES - 1,  // from the tile that is multiplied to the one that is fetched meanwhile
    STAGE_BYTES = CopyA::Tile::BYTES + CopyB::Tile::BYTES,
    // Elements that unguarded copies may read before and after a row.
    MARGIN = CopyA::SHIFTED || CopyB::SHIFTED,
  };

  CopyA a_copy;
  CopyB b_copy;
  FragmentLoader<false, BLOCK_M, WARP_M, TRANSPOSE_A> a_loader;
  FragmentLoader<true, BLOCK_N, WARP_N, !TRANSPOSE_B> b_loader;
  SharedAddress ring;  // stages of a tile of A and one of B
  int read = 0;        // bytes from the start of the ring to the stage that is multiplied
  int write = 0;       // and to the one that is filled next
  bool interior;       // no row or column of the tiles is outside of the matrices
  Fragment a[REGISTER_BUFFERS][WARP_M / 16];
  Fragment b[REGISTER_BUFFERS][WARP_N / 16];

  __device__ __forceinline__ Pipeline(
      SharedAddress shared, const Element* a_matrix, long long lda, const Element* b_matrix,
      long long ldb, const Place& place, int m, int n, int k_start)
      : a_copy(a_matrix, lda, place.block_row, m, k_start),
        b_copy(b_matrix, ldb, place.block_col, n, k_start),
        a_loader(place.warp_row, place.lane),
        b_loader(place.warp_col, place.lane),
        ring(shared),
        interior(place.block_row + BLOCK_M <= m && place.block_col + BLOCK_N <= n) {}

  // Adds the products of `k_steps` steps.
  __device__ __forceinline__ void run(Sums& sums, int k_steps) {
    const int tiles = (k_steps + BLOCK_K - 1) / BLOCK_K;
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < AHEAD; ++tile) {
      if (tile < tiles) {
        fetch(tile, k_steps);
        land();
      }
      copy_async_commit();
    }
    publish();
    if constexpr (REGISTER_BUFFERS == 2) load_fragments(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) multiply(sums, tile, tiles, k_steps);
  }

 private:
  // Multiplies tile `tile`, which is in shared memory; leaves with the next one there.
  __device__ __forceinline__ void multiply(Sums& sums, int tile, int tiles, int k_steps) {
    const bool fetching = tile + AHEAD < tiles;
    if (fetching) fetch(tile + AHEAD, k_steps);
    copy_async_commit();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int ahead = step + REGISTER_BUFFERS - 1;
      if (ahead < STEPS) {
        load_fragments(ahead);
      } else {
        // After the last tile these are of a stage without meaning, and are not used.
        hand_over(fetching);
        load_fragments(0);
      }
      multiply_add(sums, a[step % REGISTER_BUFFERS], b[step % REGISTER_BUFFERS]);
    }
    if constexpr (REGISTER_BUFFERS == 1) hand_over(fetching);
  }

  __device__ __forceinline__ void hand_over(bool fetching) {
    if (fetching) land();
    advance(read);
    publish();
  }

  // The next tile becomes readable by every thread, the last one's stage writable.
  __device__ __forceinline__ void publish() {
    copy_async_wait<AHEAD - 1>();
    __syncthreads();
  }

  __device__ __forceinline__ void fetch(int tile, int k_steps) {
    const int k_left = k_steps - tile * BLOCK_K;
    if (interior && tile >= MARGIN && k_left >= BLOCK_K + MARGIN) {
      a_copy.template fetch<false>(ring + write, k_left);
      b_copy.template fetch<false>(ring + write + CopyA::Tile::BYTES, k_left);
    } else {
      a_copy.template fetch<true>(ring + write, k_left);
      b_copy.template fetch<true>(ring + write + CopyA::Tile::BYTES, k_left);
    }
  }

  // Ends the fetch of a tile, as far as it came through registers.
  __device__ __forceinline__ void land() {
    a_copy.land(ring + write);
    b_copy.land(ring + write + CopyA::Tile::BYTES);
    advance(write);
  }

  static __device__ __forceinline__ void advance(int& stage) {
    stage = stage == AHEAD * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
  }

  __device__ __forceinline__ void load_fragments(int step) {
    a_loader.load(a[step % REGISTER_BUFFERS], ring + read, step);
    b_loader.load(b[step % REGISTER_BUFFERS], ring + read + CopyA::Tile::BYTES, step);
  }
};

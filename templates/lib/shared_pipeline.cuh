/*# SPDX-License-Identifier: Apache-2.0 #*/
// Walks along K through shared memory and adds the tiles' products to a thread's sums.
//
// While one tile is multiplied the next ones are under way: in registers, one tile ahead, or as
// asynchronous copies into the other buffers. One barrier a tile publishes the next tile and frees
// the last one. Tiles that lie wholly inside the matrices go through a loop without any check;
// those at an edge, and the last ones, through a shorter version of it with all checks.
struct Pipeline {
  using CopyA = TileCopy<BLOCK_M, !TRANSPOSE_A, VECTOR_A>;
  using CopyB = TileCopy<BLOCK_N, TRANSPOSE_B, VECTOR_B>;
  enum : int {
    A_TILE = BLOCK_K * CopyA::PITCH,
    SLOT = A_TILE + BLOCK_K * CopyB::PITCH,  // elements of one buffer
  };

  // From the tile that is multiplied to the one that is fetched meanwhile.
  enum : int { AHEAD = ASYNC_COPY ? SHARED_BUFFERS - 1 : 1 };

  CopyA a_copy;
  CopyB b_copy;
  // Shared memory is SHARED_BUFFERS slots, each a tile of A and one of B.
  const Accumulator* a_read;  // this thread's first element of the slot that is multiplied
  const Accumulator* b_read;
  Accumulator* write;  // the slot that is filled next
  int read_slot = SHARED_BUFFERS - 1;
  int write_slot = 0;
  Accumulator a[REGISTER_BUFFERS][THREAD_M];
  Accumulator b[REGISTER_BUFFERS][THREAD_N];

  __device__ __forceinline__ Pipeline(
      const Element* a_matrix, long long lda, const Element* b_matrix, long long ldb,
      const Place& place, int m, int n, int k_start)
      : a_copy(a_matrix, lda, place.block_row, m, k_start),
        b_copy(b_matrix, ldb, place.block_col, n, k_start) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    write = reinterpret_cast<Accumulator*>(shared_memory);
    a_read = write + (SHARED_BUFFERS - 1) * SLOT + place.thread_row;
    b_read = write + (SHARED_BUFFERS - 1) * SLOT + A_TILE + place.thread_col;
  }

  // Adds the products of `k_steps` steps. `interior`: no row or column of the tiles is outside.
  __device__ __forceinline__ void run(
      Accumulator (&sums)[THREAD_M][THREAD_N], int k_steps, bool interior) {
    const int tiles = (k_steps + BLOCK_K - 1) / BLOCK_K;
    if (tiles == 0) return;
    start(k_steps, tiles);
    const bool narrow = a_copy.narrow() && b_copy.narrow();
    const int whole = interior && narrow ? k_steps / BLOCK_K : 0;
    int tile = 0;
#pragma unroll 1
    for (; tile < whole - AHEAD; ++tile) step<false, UNROLL_K>(sums, tile, tiles, k_steps);
#pragma unroll 1
    for (; tile < tiles; ++tile) step<true, REGISTER_BUFFERS>(sums, tile, tiles, k_steps);
  }

 private:
  __device__ __forceinline__ void start(int k_steps, int tiles) {
#pragma unroll 1
    for (int tile = 0; tile < AHEAD; ++tile) {
      if (tile < tiles) fetch<true>(k_steps - tile * BLOCK_K);
      if constexpr (ASYNC_COPY) copy_async_commit();
    }
    publish();
    if constexpr (REGISTER_BUFFERS == 2) {
      load_fragments(0, a_read, b_read);
    }
  }

  // Multiplies tile `tile`, which is in shared memory; leaves with the next one there.
  template <bool GUARDED, int UNROLL>
  __device__ __forceinline__ void step(
      Accumulator (&sums)[THREAD_M][THREAD_N], int tile, int tiles, int k_steps) {
    if (!GUARDED || tile + AHEAD < tiles) fetch<GUARDED>(k_steps - (tile + AHEAD) * BLOCK_K);
    if constexpr (ASYNC_COPY) copy_async_commit();

    const Accumulator* a_row = a_read;
    const Accumulator* b_row = b_read;
#pragma unroll 1
    for (int part = 1; part < BLOCK_K / UNROLL; ++part) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        load_ahead(i, a_row, b_row);
        multiply_add(sums, a[i % REGISTER_BUFFERS], b[i % REGISTER_BUFFERS]);
      }
      a_row += UNROLL * CopyA::PITCH;
      b_row += UNROLL * CopyB::PITCH;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (i < UNROLL + 1 - REGISTER_BUFFERS) {
        load_ahead(i, a_row, b_row);
      } else {
        // The last fragments are in registers: hand over before they are used, so that the wait
        // for the first fragments of the next tile lies behind their products.
        publish();
        if (!GUARDED || tile + 1 < tiles) {
          load_fragments(0, a_read, b_read);
        }
      }
      multiply_add(sums, a[i % REGISTER_BUFFERS], b[i % REGISTER_BUFFERS]);
    }
    if constexpr (REGISTER_BUFFERS == 1) publish();
  }

  // Starts to bring the next tile from global memory.
  template <bool GUARDED>
  __device__ __forceinline__ void fetch(int k_left) {
    if constexpr (ASYNC_COPY) {
      a_copy.template copy<GUARDED>(write, k_left);
      b_copy.template copy<GUARDED>(write + A_TILE, k_left);
      write += to_next(write_slot);
    } else {
      a_copy.template stage<GUARDED>(k_left);
      b_copy.template stage<GUARDED>(k_left);
    }
    a_copy.template advance<GUARDED>();
    b_copy.template advance<GUARDED>();
  }

  // The next tile becomes readable by every thread, the last one's buffer writable.
  __device__ __forceinline__ void publish() {
    if constexpr (ASYNC_COPY) {
      copy_async_wait<AHEAD - 1>();
    } else {
      if constexpr (SHARED_BUFFERS == 1) __syncthreads();
      a_copy.store(write);
      b_copy.store(write + A_TILE);
      write += to_next(write_slot);
    }
    __syncthreads();
    const int step = to_next(read_slot);
    a_read += step;
    b_read += step;
  }

  // Elements from a slot to the one after it, which it becomes.
  static __device__ __forceinline__ int to_next(int& slot) {
    const bool last = slot == SHARED_BUFFERS - 1;
    slot = last ? 0 : slot + 1;
    return last ? -(SHARED_BUFFERS - 1) * SLOT : SLOT;
  }

  // The fragments of step `i`, or of the step after it where there is a second set of registers.
  __device__ __forceinline__ void load_ahead(
      int i, const Accumulator* a_row, const Accumulator* b_row) {
    const int step = i + REGISTER_BUFFERS - 1;
    load_fragments(
        step % REGISTER_BUFFERS, a_row + step * CopyA::PITCH, b_row + step * CopyB::PITCH);
  }

  __device__ __forceinline__ void load_fragments(
      int set, const Accumulator* a_row, const Accumulator* b_row) {
    load_fragment<THREAD_M, LANES_M>(a[set], a_row);
    load_fragment<THREAD_N, LANES_N>(b[set], b_row);
  }
};

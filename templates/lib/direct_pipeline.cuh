/*# SPDX-License-Identifier: Apache-2.0 #*/
// A thread's own fragments of one operand for BLOCK_K steps, straight from global memory: L1 serves
// the lanes and warps that read the same elements. They stay unwidened until they are used, so that
// a load is not waited for before that.
template <int THREAD, int LANES, bool K_CONTIGUOUS, int VECTOR>
struct DirectTile {
  enum : int { STRIP = strip_of(THREAD) };

  const Element* source;  // this thread's first element of the steps that are loaded next
  long long ld;
  int extent;  // how many elements from there on lie inside the matrix, may be more than owned
  Element sets[REGISTER_BUFFERS][BLOCK_K][THREAD];

  __device__ __forceinline__
  DirectTile(const Element* matrix, long long row_elements, int start, int tile_extent, int k_start)
      : ld(row_elements), extent(tile_extent - start) {
    source = K_CONTIGUOUS ? matrix + start * ld + k_start : matrix + k_start * ld + start;
  }

  // Loads a set and moves on. GUARDED sets to zero what lies outside the matrix; `k_left` steps lie
  // inside.
  template <bool GUARDED>
  __device__ __forceinline__ void load(Element (&fragment)[BLOCK_K][THREAD], int k_left) {
    constexpr int K_STEP = K_CONTIGUOUS ? VECTOR : 1;
    constexpr int TILE_STEP = K_CONTIGUOUS ? 1 : VECTOR;
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += K_STEP) {
#pragma unroll
      for (int i = 0; i < THREAD; i += TILE_STEP) {
        const int offset = warp_offset<STRIP, LANES>(i);
        const Element* from = source + (K_CONTIGUOUS ? offset * ld + k : k * ld + offset);
        const int rows_left = K_CONTIGUOUS ? extent - offset : k_left - k;
        const int cols_left = K_CONTIGUOUS ? k_left - k : extent - offset;
        const auto vector = GUARDED ? load_inside<VECTOR>(from, rows_left > 0 ? cols_left : 0)
                                    : load_vector<VECTOR>(from);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          fragment[K_CONTIGUOUS ? k + j : k][K_CONTIGUOUS ? i : i + j] = vector.values[j];
        }
      }
    }
    source += K_CONTIGUOUS ? BLOCK_K : BLOCK_K * ld;
  }
};

// Walks along K without shared memory. With a second set of registers the loads of the next steps
// are under way while these are multiplied.
struct Pipeline {
  DirectTile<THREAD_M, LANES_M, !TRANSPOSE_A, VECTOR_A> a;
  DirectTile<THREAD_N, LANES_N, TRANSPOSE_B, VECTOR_B> b;

  __device__ __forceinline__ Pipeline(
      const Element* a_matrix, long long lda, const Element* b_matrix, long long ldb,
      const Place& place, int m, int n, int k_start)
      : a(a_matrix, lda, place.block_row + place.thread_row, m, k_start),
        b(b_matrix, ldb, place.block_col + place.thread_col, n, k_start) {}

  // Adds the products of `k_steps` steps. `interior`: no row or column is outside the matrices.
  __device__ __forceinline__ void run(
      Accumulator (&sums)[THREAD_M][THREAD_N], int k_steps, bool interior) {
    int k = 0;
    if constexpr (REGISTER_BUFFERS == 2) load<true>(0, k_steps);
    constexpr int ROUND = BLOCK_K * REGISTER_BUFFERS;
    // How far the loads of a round reach beyond its start.
    constexpr int REACH = REGISTER_BUFFERS == 2 ? BLOCK_K * 3 : BLOCK_K;
    if (interior) {
#pragma unroll 1
      for (; k + REACH <= k_steps; k += ROUND) round<false>(sums, k_steps - k);
    }
#pragma unroll 1
    for (; k < k_steps; k += ROUND) round<true>(sums, k_steps - k);
  }

 private:
  template <bool GUARDED>
  __device__ __forceinline__ void round(Accumulator (&sums)[THREAD_M][THREAD_N], int k_left) {
#pragma unroll
    for (int set = 0; set < REGISTER_BUFFERS; ++set) {
      const int ahead = REGISTER_BUFFERS - 1;
      load<GUARDED>((set + ahead) % REGISTER_BUFFERS, k_left - (set + ahead) * BLOCK_K);
      multiply(sums, set);
    }
  }

  template <bool GUARDED>
  __device__ __forceinline__ void load(int set, int k_left) {
    a.template load<GUARDED>(a.sets[set], k_left);
    b.template load<GUARDED>(b.sets[set], k_left);
  }

  __device__ __forceinline__ void multiply(Accumulator (&sums)[THREAD_M][THREAD_N], int set) {
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      Accumulator a_wide[THREAD_M];
      Accumulator b_wide[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a_wide[i] = convert<Accumulator>(a.sets[set][k][i]);
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b_wide[j] = convert<Accumulator>(b.sets[set][k][j]);
      multiply_add(sums, a_wide, b_wide);
    }
  }
};

/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/packed.cuh, lib/programmatic_launch.cuh and lib/gemv_shape.cuh. #*/
// Elements of A that are brought by one access: from shared memory, or through L1.
enum : int {
  VECTOR_A = TRANSPOSE_A ? 1 : least(ALIGN_A, TILE_K ? least(RUN_K, SHARED_VECTOR) : RUN_K),
  PART_K = TILE_K ? least(RUN_K, SHARED_VECTOR) : RUN_K,
  POLICY_B = PROGRAMMATIC_LAUNCH ? coherent(LOAD_POLICY) : LOAD_POLICY,
};

// The rows of A: TILE_K steps at a time in shared memory, already widened; without tiles they are
// read where they are used. Rows beyond M are the last one again, and their sums are not stored.
class Rows {
 public:
  __device__ __forceinline__ Rows(const Element* a, long long lda, int m, Accumulator* tile)
      : a_(a),
        row_step_(TRANSPOSE_A ? 1 : lda),
        k_step_(TRANSPOSE_A ? lda : 1),
        m_(m),
        tile_(tile) {}

  // Puts steps [start, stop) into the tile. A run lies in parts of one access each, the first parts
  // of all runs together: lanes side by side along K meet no bank conflicts. Few rows at a time, as
  // B is under way in registers.
  __device__ __forceinline__ void stage(int start, int stop) {
    constexpr int BATCH = least(ROWS, 4);
#pragma unroll 1
    for (int k = threadIdx.x * VECTOR_A; k < stop - start; k += THREADS * VECTOR_A) {
      Accumulator* to = tile_ + part(k % RUN_K / PART_K, k / RUN_K) + k % PART_K;
      const int left = stop - start - k;
#pragma unroll 1
      for (int first = 0; first < ROWS; first += BATCH) {
        Vector<Element, VECTOR_A> from[BATCH];
        if (left >= VECTOR_A) {
#pragma unroll
          for (int i = 0; i < BATCH; ++i) from[i] = load_vector<VECTOR_A>(at(first + i, start + k));
        } else {
#pragma unroll
          for (int i = 0; i < BATCH; ++i) {
            from[i] = load_inside<VECTOR_A>(at(first + i, start + k), left);
          }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          Vector<Accumulator, VECTOR_A> wide;
#pragma unroll
          for (int j = 0; j < VECTOR_A; ++j)
            wide.values[j] = convert<Accumulator>(from[i].values[j]);
          store_vector(to + (first + i) * TILE_K, wide);
        }
      }
    }
  }

  // PART_K steps of a row from step k on, `first` of a run that is number `run` of the tile;
  // `left` steps are there from k on.
  template <bool TAIL>
  __device__ __forceinline__ void load(
      Accumulator (&values)[PART_K], int row, int k, int first, int run, int left) const {
    if constexpr (TILE_K > 0) {
      const auto part_k = load_vector<PART_K>(tile_ + row * TILE_K + part(first / PART_K, run));
#pragma unroll
      for (int i = 0; i < PART_K; ++i) values[i] = part_k.values[i];
    } else {
#pragma unroll
      for (int i = 0; i < PART_K; i += VECTOR_A) {
        const Element* address = at(row, k + i);
        const auto from =
            TAIL ? load_inside<VECTOR_A>(address, left - i) : load_vector<VECTOR_A>(address);
#pragma unroll
        for (int j = 0; j < VECTOR_A; ++j) values[i + j] = convert<Accumulator>(from.values[j]);
      }
    }
  }

  __device__ __forceinline__ Accumulator element(int row, int k) const {
    return convert<Accumulator>(*at(row, k));
  }

 private:
  __device__ __forceinline__ const Element* at(int row, int k) const {
    return a_ + least(row, m_ - 1) * row_step_ + k * k_step_;
  }
  __device__ static __forceinline__ int part(int index, int run) {
    return (index * (TILE_K / RUN_K) + run) * PART_K;
  }

  const Element* a_;
  long long row_step_, k_step_;
  int m_;
  Accumulator* tile_;
};

// A thread's elements of B in one round. 16-bit ones stay in pairs until they are used: taken apart
// as they arrive, they would be waited for a turn too early.
struct Round {
  Packed<Element, VECTOR_B> vectors[LOADS];

  __device__ __forceinline__ Accumulator at(int i, int j) const {
    const int vector = TRANSPOSE_B ? j : i * (COLS / VECTOR_B) + j / VECTOR_B;
    return convert<Accumulator>(vectors[vector].at(TRANSPOSE_B ? i : j % VECTOR_B));
  }
};

// A thread's columns of B, from step k on. Those beyond N are the last ones again; WHOLE says that
// no vector along N ends beyond it.
template <bool WHOLE>
class Columns {
 public:
  __device__ static __forceinline__ bool covers(int block_col, int n) {
    return TRANSPOSE_B || n % VECTOR_B == 0 || block_col + BLOCK_N <= n;
  }

  __device__ __forceinline__ Columns(const Element* b, long long ldb, int block_col, int n, int k)
      : k_step_(TRANSPOSE_B ? 1 : ldb) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      const int col = block_col + column_of(TRANSPOSE_B ? v : v * VECTOR_B);
      const int inside = WHOLE ? least(col, n - (TRANSPOSE_B ? 1 : VECTOR_B)) : col;
      next_[v] = b + inside * (TRANSPOSE_B ? ldb : 1) + k * k_step_;
      left_[v] = n - inside;
    }
  }

  // Round number `index` of this turn, of which `left` steps of K are there: the others are
  // arbitrary.
  __device__ __forceinline__ void load(Round& round, int index, int left) const {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int step = TRANSPOSE_B ? 0 : load / COUNT;
      const int v = TRANSPOSE_B ? load : load % COUNT;
      const Element* address = next_[v] + (index * ROUND_K + step) * k_step_;
      const bool inside = step < left;
      if constexpr (WHOLE) {
        round.vectors[load] = load_packed<VECTOR_B, POLICY_B>(address, inside);
      } else {
        round.vectors[load] = load_packed_inside<VECTOR_B>(address, inside ? left_[v] : 0);
      }
    }
  }

  // Has L2 fetch what load() will ask for.
  __device__ __forceinline__ void fetch(int index, int left) const {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int step = TRANSPOSE_B ? 0 : load / COUNT;
      const int v = TRANSPOSE_B ? load : load % COUNT;
      if (step < left && left_[v] > 0) fetch_ahead(next_[v] + (index * ROUND_K + step) * k_step_);
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) next_[v] += TURN_K * k_step_;
  }

 private:
  enum : int { COUNT = TRANSPOSE_B ? COLS : COLS / VECTOR_B };  // addresses

  const Element* next_[COUNT];
  int left_[COUNT];
  long long k_step_;
};

// Adds a round's products to the sums. Its run begins at step k and is number `run` of the tile of
// A; with TAIL only the first `left` steps count.
template <bool TAIL>
__device__ __forceinline__ void multiply(
    Accumulator (&sums)[ROWS * COLS], const Rows& rows, const Round& round, int k, int run,
    int left) {
#pragma unroll
  for (int first = 0; first < RUN_K; first += PART_K) {
    Accumulator b_values[PART_K][COLS];
#pragma unroll
    for (int i = 0; i < PART_K; ++i) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) b_values[i][j] = round.at(first + i, j);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      Accumulator a_values[PART_K];
      rows.load<TAIL>(a_values, row, k + first, first, run, left - first);
#pragma unroll
      for (int i = 0; i < PART_K; ++i) {
        // Not a product with zero: B may hold infinities there.
        if (TAIL && first + i >= left) continue;
#pragma unroll
        for (int j = 0; j < COLS; ++j) sums[row * COLS + j] += a_values[i] * b_values[i][j];
      }
    }
  }
}

// Adds the products of a slice, but for what is left of K behind whole vectors. Loads of B are
// ahead of their use by a turn, over the borders of tiles of A as well; the first of them wait for
// the launch ahead.
template <typename AnyColumns>
__device__ __forceinline__ void walk(
    Accumulator (&sums)[ROWS * COLS], Rows& rows, AnyColumns columns, const Slice& slice) {
  const int stop = slice.whole();
  const int own = lane_along_k();
  int k = slice.start + own * RUN_K;
  if constexpr (PROGRAMMATIC_LAUNCH == 2) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) columns.fetch(u, stop - k - u * ROUND_K);
  }
  wait_for_previous_launch();
  Round rounds[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) columns.load(rounds[u], u, stop - k - u * ROUND_K);

  for (int tile = slice.start; tile < stop;) {
    const int tile_stop = TILE_K ? least(stop, tile + TILE_K) : stop;
    if constexpr (TILE_K > 0) {
      if (tile > slice.start) __syncthreads();
      rows.stage(tile, tile_stop);
      __syncthreads();
    }
    int run = own;
    for (; tile + TURN_K <= tile_stop; tile += TURN_K) {
      columns.advance();
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        multiply<false>(sums, rows, rounds[u], k + u * ROUND_K, run + u * LANES_ALONG_K, RUN_K);
        columns.load(rounds[u], u, stop - k - TURN_K - u * ROUND_K);
      }
      k += TURN_K;
      run += UNROLL * LANES_ALONG_K;
    }
    // Tiles are whole turns, so less than one is left of the last tile only.
    if (tile < tile_stop) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int left = stop - k - u * ROUND_K;
        if (left > 0) {
          multiply<!TRANSPOSE_B>(
              sums, rows, rounds[u], k + u * ROUND_K, run + u * LANES_ALONG_K, left);
        }
      }
      tile = tile_stop;
    }
  }
}

// The steps of a slice behind whole vectors along K, one a lane.
__device__ __forceinline__ void add_rest(
    Accumulator (&sums)[ROWS * COLS], const Rows& rows, const Element* b, long long ldb,
    int block_col, int n, const Slice& slice) {
  if constexpr (TRANSPOSE_B && VECTOR_B > 1) {
    for (int k = slice.whole() + lane_along_k(); k < slice.stop; k += LANES_ALONG_K) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        const int col = least(block_col + column_of(j), n - 1);
        const Accumulator b_value = convert<Accumulator>(b[col * ldb + k]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          sums[row * COLS + j] += rows.element(row, k) * b_value;
        }
      }
    }
  }
}

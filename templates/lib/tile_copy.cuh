/*# SPDX-License-Identifier: Apache-2.0 #*/
// One operand's way from global to shared memory, a tile of BLOCK_K x TILE at a time.
//
// In global memory the tile lies as its matrix is stored: in rows along K (K_CONTIGUOUS), or in
// rows along M or N. In shared memory it always lies as [k][TILE + PADDING], so that the inner
// product reads both operands along the fast axis, and in the accumulator's type, so that 16-bit
// elements are widened once and not at every use.
template <int TILE, bool K_CONTIGUOUS, int VECTOR>
struct TileCopy {
  enum : int {
    PITCH = TILE + PADDING,
    ROWS = K_CONTIGUOUS ? TILE : BLOCK_K,
    ROW_VECTORS = (K_CONTIGUOUS ? BLOCK_K : TILE) / VECTOR,
    PASSES = ROWS * ROW_VECTORS / THREADS,
  };

  // Threads side by side along one row. Rows along K are scattered over shared rows, where fewer
  // lanes along K and more along the tile meet fewer banks twice; a sector of 32 bytes is the
  // least that global memory delivers.
  enum : int {
    SECTOR_VECTORS = most(1, 32 / static_cast<int>(VECTOR * sizeof(Element))),
    ROW_THREADS = K_CONTIGUOUS ? most(least(ROW_VECTORS, SECTOR_VECTORS), THREADS / ROWS)
                               : least(ROW_VECTORS, THREADS),
    ROW_PASSES = ROW_VECTORS / ROW_THREADS,
    ROW_STEP = THREADS / ROW_THREADS,
  };

  const Element* source;  // this thread's first vector of the tile that is copied next
  long long ld;
  int row, col;  // where that vector lies in the tile
  int extent;    // how many of the TILE rows or columns lie inside the matrix, may be more
  Vector<Element, VECTOR> staged[PASSES];

  __device__ __forceinline__ TileCopy(
      const Element* matrix, long long row_elements, int tile_start, int tile_extent, int k_start)
      : ld(row_elements), extent(tile_extent - tile_start) {
    const int thread = threadIdx.x;
    row = thread / ROW_THREADS;
    col = thread % ROW_THREADS * VECTOR;
    const long long first_row = (K_CONTIGUOUS ? tile_start : k_start) + row;
    source = matrix + first_row * ld + (K_CONTIGUOUS ? k_start : tile_start) + col;
  }

  // Unguarded code multiplies a leading dimension of 32 bits into a 64-bit offset, in one
  // instruction.
  __device__ __forceinline__ bool narrow() const { return ld == static_cast<unsigned>(ld); }

  template <bool GUARDED>
  __device__ __forceinline__ void advance() {
    source += K_CONTIGUOUS ? BLOCK_K : rows<GUARDED>(BLOCK_K);
  }

  // Global memory to registers. GUARDED sets to zero what lies outside the matrix; `k_left` is
  // how many of the BLOCK_K steps lie inside.
  template <bool GUARDED>
  __device__ __forceinline__ void stage(int k_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      staged[pass] = GUARDED ? load_inside<VECTOR>(vector<GUARDED>(pass), inside(pass, k_left))
                             : load_vector<VECTOR>(vector<GUARDED>(pass));
    }
  }

  // Registers to shared memory, widened.
  __device__ __forceinline__ void store(Accumulator* tile) {
    constexpr int WIDTH = least(VECTOR, 16 / static_cast<int>(sizeof(Accumulator)));
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if constexpr (K_CONTIGUOUS) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          *target(tile, pass, i) = convert<Accumulator>(staged[pass].values[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i += WIDTH) {
          Vector<Accumulator, WIDTH> wide;
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) {
            wide.values[j] = convert<Accumulator>(staged[pass].values[i + j]);
          }
          store_vector(target(tile, pass, i), wide);
        }
      }
    }
  }

  // Global to shared memory without registers, in flight until it is waited for.
  template <bool GUARDED>
  __device__ __forceinline__ void copy(Accumulator* tile, int k_left) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (!K_CONTIGUOUS && (!GUARDED || inside(pass, k_left) >= VECTOR)) {
        copy_async<VECTOR * sizeof(Element)>(target(tile, pass, 0), vector<GUARDED>(pass));
      } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          if constexpr (GUARDED) {
            const bool valid = i < inside(pass, k_left);
            copy_async<sizeof(Element)>(target(tile, pass, i), vector<GUARDED>(pass) + i, valid);
          } else {
            copy_async<sizeof(Element)>(target(tile, pass, i), vector<GUARDED>(pass) + i);
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int row_offset(int pass) {
    return pass / ROW_PASSES * ROW_STEP;
  }
  static __device__ __forceinline__ int col_offset(int pass) {
    return pass % ROW_PASSES * (ROW_THREADS * VECTOR);
  }

  // Elements from one row to the `count`-th after it.
  template <bool GUARDED>
  __device__ __forceinline__ long long rows(int count) const {
    return GUARDED ? count * ld : static_cast<long long>(static_cast<unsigned>(ld)) * count;
  }

  template <bool GUARDED>
  __device__ __forceinline__ const Element* vector(int pass) const {
    return source + rows<GUARDED>(row_offset(pass)) + col_offset(pass);
  }

  // How many elements of a pass's vector lie inside the matrix: negative, or more than VECTOR.
  __device__ __forceinline__ int inside(int pass, int k_left) const {
    const int rows_left = (K_CONTIGUOUS ? extent : k_left) - (row + row_offset(pass));
    const int cols_left = (K_CONTIGUOUS ? k_left : extent) - (col + col_offset(pass));
    return rows_left > 0 ? cols_left : 0;
  }

  __device__ __forceinline__ Accumulator* target(Accumulator* tile, int pass, int element) const {
    const int r = row + row_offset(pass);
    const int c = col + col_offset(pass) + element;
    return tile + (K_CONTIGUOUS ? c * PITCH + r : r * PITCH + c);
  }
};

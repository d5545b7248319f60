/*# SPDX-License-Identifier: Apache-2.0 #*/
// A tile of an operand in shared memory, and a warp's fragments of it in registers.

// TILE x BLOCK_K elements in rows as the operand is stored: along K, or ACROSS it. Chunks of 16
// bytes change places within their row, so that those that lanes read at once lie in different
// banks.
template <int TILE, bool ACROSS>
struct SharedTile {
  enum : int {
    CHUNK = 16 / sizeof(Element),
    ROWS = ACROSS ? BLOCK_K : TILE,
    COLS = ACROSS ? TILE : BLOCK_K,
    CHUNKS = COLS / CHUNK,  // of a row
    ROW_BYTES = CHUNKS * 16,
    BYTES = ROWS * ROW_BYTES,
    PERIOD = least(CHUNKS & -CHUNKS, 8),  // chunks among which places are changed
  };

  // Matrices of 8 x 8 take the same chunk of 8 rows. In fp64, 8 lanes take 4 neighbouring chunks
  // of 2 rows, or across K 2 neighbouring ones of every second of 8 rows.
  static __device__ __forceinline__ int swizzle(int row) {
    if constexpr (sizeof(Element) == 2) return row / (8 / PERIOD) % PERIOD;
    if constexpr (ACROSS) return row / 2 % 4 * 2;
    return PERIOD == 8 ? row % 2 * 4 : 0;
  }
  // Bytes from the start of the tile.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16;
  }
};

template <typename T>
struct RegisterOf {
  using Type = unsigned;  // two elements
};
template <>
struct RegisterOf<fp64> {
  using Type = fp64;
};
using Register = RegisterOf<Element>::Type;

enum : int {
  STEP_K = sizeof(Element) == 2 ? 16 : most(8, MMA_K),  // steps of K of a fragment
  STEPS = BLOCK_K / STEP_K,
  FRAGMENT_REGISTERS = 16 * STEP_K * sizeof(Element) / (32 * sizeof(Register)),
};

// 16 rows of A, or columns of B, of STEP_K steps. A register has one half of the rows and one group
// of steps, 8 in 16 bits and 4 in fp64. Instructions take neighbouring registers: both halves of
// A's rows and then the next group; all groups of one half of B's columns.
struct Fragment {
  Register values[FRAGMENT_REGISTERS];
};
template <bool OF_B>
__device__ constexpr int fragment_register(int half, int group) {
  return OF_B ? half * (FRAGMENT_REGISTERS / 2) + group : 2 * group + half;
}

// Which of the 16 rows a lane's register of half h stands for. fp64 across K: loads bring two
// neighbouring rows, which become one of each half.
template <bool ACROSS>
__device__ constexpr int fragment_row(int half, int row) {
  return ACROSS && sizeof(Element) == 8 ? 2 * row + half : 8 * half + row;
}

template <bool OF_B, int TILE, int WARP_TILE, bool ACROSS>
struct FragmentLoader {
  using Tile = SharedTile<TILE, ACROSS>;
  enum : int {
    WIDE = sizeof(Element) == 8,
    // Swizzled chunks of a row have offsets of their own; after a period they repeat.
    OFFSETS = WIDE ? (ACROSS ? 1 : least(2, BLOCK_K / 8))
                   : least(ACROSS ? WARP_TILE / 16 : STEPS, most(1, Tile::PERIOD / 2)),
  };
  int offsets[OFFSETS];  // of this lane from the start of the tile

  __device__ __forceinline__ FragmentLoader(int warp_start, int lane) {
    // Which half of the rows and which group of steps has the matrix whose row a lane points to.
    const int half = OF_B ? lane / 16 : lane / 8 % 2;
    const int group = OF_B ? lane / 8 % 2 : lane / 16;
#pragma unroll
    for (int i = 0; i < OFFSETS; ++i) {
      if constexpr (!WIDE && !ACROSS) {
        offsets[i] = Tile::offset(warp_start + half * 8 + lane % 8, 2 * i + group);
      } else if constexpr (!WIDE) {
        offsets[i] = Tile::offset(group * 8 + lane % 8, warp_start / 8 + 2 * i + half);
      } else if constexpr (!ACROSS) {
        offsets[i] = Tile::offset(warp_start + lane / 4, 4 * i + lane % 4);
      } else {
        offsets[i] = Tile::offset(lane % 4 * 2, warp_start / 2 + lane / 4);
      }
    }
  }

  __device__ __forceinline__ void load(
      Fragment (&fragments)[WARP_TILE / 16], SharedAddress tile, int step) const {
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; ++i) {
      if constexpr (!WIDE) {
        const int along = ACROSS ? i : step;  // which of its chunks
        const int down = ACROSS ? step : i;   // which 16 of its rows
        load_matrices<ACROSS>(
            fragments[i].values, tile + offsets[along % OFFSETS] +
                                     along / OFFSETS * (OFFSETS * 32) +
                                     down * (16 * Tile::ROW_BYTES));
      } else {
        load_wide(fragments[i].values, tile, step, i);
      }
    }
  }

 private:
  // A lane's 16 bytes are two steps of one row, or across K two rows of one step.
  __device__ __forceinline__ void load_wide(
      Register* values, SharedAddress tile, int step, int i) const {
#pragma unroll
    for (int eight = 0; eight < STEP_K / 8; ++eight) {
      const int position = step * (STEP_K / 8) + eight;  // which eight steps of the tile
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (ACROSS) {
          load_shared(
              values[fragment_register<OF_B>(0, 2 * eight + j)],
              values[fragment_register<OF_B>(1, 2 * eight + j)],
              tile + offsets[0] + (8 * position + j) * Tile::ROW_BYTES + i * 128);
        } else {
          load_shared(
              values[fragment_register<OF_B>(j, 2 * eight)],
              values[fragment_register<OF_B>(j, 2 * eight + 1)],
              tile + offsets[position % OFFSETS] + position / OFFSETS * (OFFSETS * 64) +
                  (16 * i + 8 * j) * Tile::ROW_BYTES);
        }
      }
    }
  }
};

// Sums of a warp, by 16 x 16: for each half of the columns, two neighbours in each half of the rows.
using Sums = Accumulator[WARP_M / 16][WARP_N / 16][2][4];

// The instructions that a pair of fragments takes for each half of the columns.
enum : int {
  PARTS = sizeof(Element) == 2 ? 1 : STEP_K / MMA_K,
};

template <typename T>
__device__ __forceinline__ void multiply_fragments(
    Accumulator (&sums)[2][4], const T (&a)[FRAGMENT_REGISTERS], const T (&b)[FRAGMENT_REGISTERS],
    int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* right = b + half * (FRAGMENT_REGISTERS / 2);
    if constexpr (sizeof(T) == 4) {
      multiply_matrices(sums[half], a, right[0], right[1], Element{});
    } else if constexpr (MMA_ROWS == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_8x8x4(sums[half][2 * i], sums[half][2 * i + 1], a[2 * part + i], right[part]);
      }
    } else if constexpr (MMA_K == 4) {
      multiply_16x8x4(sums[half], a + 2 * part, right[part]);
    } else if constexpr (MMA_K == 8) {
      multiply_16x8x8(sums[half], a + 4 * part, right[2 * part], right[2 * part + 1]);
    } else {
      multiply_16x8x16(sums[half], a, right[0], right[1], right[2], right[3]);
    }
  }
}

// Adds the products of a step to the sums.
__device__ __forceinline__ void multiply_add(
    Sums& sums, const Fragment (&a)[WARP_M / 16], const Fragment (&b)[WARP_N / 16]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll
      for (int j = 0; j < WARP_N / 16; ++j) {
        multiply_fragments(sums[i][j], a[i].values, b[j].values, part);
      }
    }
  }
}

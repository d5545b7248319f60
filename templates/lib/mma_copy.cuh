/*# SPDX-License-Identifier: Apache-2.0 #*/
// One operand's way from global to shared memory, a tile at a time: asynchronous copies as wide as
// all rows are aligned. Rows of 16-bit elements that begin at any element take the way through
// registers instead, two elements a word: a row that begins in the middle of a word is read in
// whole words, which are shifted on their way.
template <int TILE, bool ACROSS, int ALIGN>
struct TileCopy {
  using Tile = SharedTile<TILE, ACROSS>;
  enum : int {
    ELEMENT = sizeof(Element),
    // See lib/programmatic_launch.cuh.
    POLICY = PROGRAMMATIC_LAUNCH ? LOAD_DEFAULT : LOAD_NONCOHERENT,
    SHIFTED = ALIGN * ELEMENT < 4,
    VECTOR = SHIFTED ? 2 : ALIGN,
    ROW_VECTORS = Tile::COLS / VECTOR,
    ROW_THREADS = least(ROW_VECTORS, THREADS),
    ROW_PASSES = ROW_VECTORS / ROW_THREADS,
    ROW_STEP = THREADS / ROW_THREADS,
    PASSES = (Tile::ROWS + ROW_STEP - 1) / ROW_STEP,  // along the rows, each of ROW_PASSES
    // Swizzling repeats after 8 rows; passes until then have targets of their own.
    TARGETS = least(
        PASSES, ROW_STEP % 8 == 0   ? 1
                : ROW_STEP % 4 == 0 ? 2
                : ROW_STEP % 2 == 0 ? 4
                                    : 8),
  };
  static_assert(
      ROW_VECTORS % ROW_THREADS == 0 && THREADS % ROW_THREADS == 0,
      "threads fill whole rows of both tiles");
  static_assert(PASSES * ROW_PASSES <= 32, "a thread makes at most 32 copies to each tile");

  const Element* source;  // this thread's first vector of the tile that is copied next
  long long ld, step;     // elements from one row to the next, and to that of the next pass
  int row, col;           // where that vector lies in the tile
  int extent;             // how many of the TILE rows or columns lie inside the matrix, may be more
  int targets[TARGETS];
  // Where SHIFTED: whether the first row, and rows by turns, begin in the middle of a word, and
  // two words for each pass, which hold the two elements wanted.
  int odd, odd_turns;
  unsigned staged[SHIFTED ? PASSES * ROW_PASSES : 1][2];

  __device__ __forceinline__ TileCopy(
      const Element* matrix, long long row_elements, int tile_start, int tile_extent, int k_start)
      : ld(row_elements), step(ROW_STEP * ld), extent(tile_extent - tile_start) {
    const int thread = threadIdx.x;
    row = thread / ROW_THREADS;
    col = thread % ROW_THREADS * VECTOR;
    const long long first_row = (ACROSS ? k_start : tile_start) + row;
    source = matrix + first_row * ld + (ACROSS ? tile_start : k_start) + col;
#pragma unroll
    for (int i = 0; i < TARGETS; ++i) {
      targets[i] =
          Tile::offset(row + i * ROW_STEP, col / Tile::CHUNK) + col % Tile::CHUNK * ELEMENT;
    }
    odd = static_cast<int>(reinterpret_cast<unsigned long long>(source) / ELEMENT % 2);
    odd_turns = ROW_STEP % 2 == 0 ? 0 : static_cast<int>(ld % 2);
  }

  // Starts to bring the next tile. GUARDED reads nothing outside the matrix, and sets to zero what
  // lies beyond the `k_left` steps; unguarded may read one element before and after its rows.
  template <bool GUARDED>
  __device__ __forceinline__ void fetch(SharedAddress tile, int k_left) {
    const Element* row_start = source;
    const int own_row = forget(row);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const Element* from = GUARDED ? first_inside(own_row, pass) : row_start;
      row_start += step;
#pragma unroll
      for (int part = 0; part < ROW_PASSES; ++part) {
        const int next = part * ROW_THREADS * VECTOR;
        if constexpr (SHIFTED) {
          stage<GUARDED>(pass, part, from + next, left(own_row, pass, next, k_left));
        } else if (in_tile(pass)) {
          if constexpr (GUARDED) {
            const int bytes = left(own_row, pass, next, k_left) * ELEMENT;
            copy_to_shared<VECTOR * ELEMENT>(tile + target(pass, part), from + next, bytes);
          } else {
            copy_to_shared<VECTOR * ELEMENT>(tile + target(pass, part), from + next);
          }
        }
      }
    }
    source += ACROSS ? BLOCK_K * ld : BLOCK_K;
  }

  // Puts what came through registers into the tile that it was fetched for.
  __device__ __forceinline__ void land(SharedAddress tile) const {
    if constexpr (SHIFTED) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
        for (int part = 0; part < ROW_PASSES; ++part) {
          const unsigned (&words)[2] = staged[pass * ROW_PASSES + part];
          const unsigned long long both =
              static_cast<unsigned long long>(words[1]) << 32 | words[0];
          if (in_tile(pass)) {
            store_shared(
                tile + target(pass, part), static_cast<unsigned>(both >> (16 * is_odd(pass))));
          }
        }
      }
    }
  }

 private:
  // Whether a pass's row lies in the tile; all do, unless the last rows are fewer than threads.
  __device__ __forceinline__ bool in_tile(int pass) const {
    return Tile::ROWS % ROW_STEP == 0 || pass + 1 < PASSES || row + pass * ROW_STEP < Tile::ROWS;
  }

  // The first vector of a pass. Rows of A or columns of B that lie outside give sums that are not
  // stored: any values will do, so those of the last one inside.
  __device__ __forceinline__ const Element* first_inside(int own_row, int pass) const {
    const int down = pass * ROW_STEP;
    return source + (ACROSS ? down : least(own_row + down, extent - 1) - own_row) * ld;
  }

  // How many elements lie inside, of the vector `next` elements behind a pass's first one.
  __device__ __forceinline__ int left(int own_row, int pass, int next, int k_left) const {
    const int along = (ACROSS ? extent : k_left) - col - next;
    const bool row_inside = !ACROSS || own_row + pass * ROW_STEP < k_left;
    return row_inside ? most(0, least(along, VECTOR)) : 0;
  }

  __device__ __forceinline__ int target(int pass, int part) const {
    return targets[pass % TARGETS] + pass / TARGETS * (TARGETS * ROW_STEP * Tile::ROW_BYTES) +
           part * (ROW_THREADS * VECTOR * ELEMENT);
  }

  __device__ __forceinline__ int is_odd(int pass) const {
    return pass % 2 == 0 ? odd : odd ^ odd_turns;
  }

  // Reads two elements in whole words: both lie in the first one, or its upper and the second's
  // lower half.
  template <bool GUARDED>
  __device__ __forceinline__ void stage(int pass, int part, const Element* from, int count) {
    unsigned (&words)[2] = staged[pass * ROW_PASSES + part];
    if constexpr (GUARDED) {
      const auto* halves = reinterpret_cast<const unsigned short*>(from);
      const unsigned low = half_inside(halves, count > 0);
      const unsigned high = half_inside(halves + 1, count > 1);
      words[0] = is_odd(pass) ? low << 16 : low | high << 16;
      words[1] = high;
    } else {
      const auto* word = reinterpret_cast<const unsigned*>(from - is_odd(pass));
      const bool inside = in_tile(pass);
      words[0] = load_global<1, POLICY>(word, inside).values[0];
      words[1] = load_global<1, POLICY>(word + 1, inside && is_odd(pass)).values[0];
    }
  }

  static __device__ __forceinline__ unsigned half_inside(const unsigned short* half, bool inside) {
    return inside ? load_global<1, POLICY>(half, inside).values[0] : 0;
  }
};

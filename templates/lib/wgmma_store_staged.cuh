/*# SPDX-License-Identifier: Apache-2.0 #*/
// The way of a consumer's sums to C where elements have two bytes: through shared memory, a portion
// at a time, and from there by the copy engine, or by threads where rows of C have no 16 bytes.
enum : int {
  // A portion: rows and columns of C.
  STAGED_ROWS = SWAP_OPERANDS ? STORE_COLUMNS : 64,
  STAGED_COLS = SWAP_OPERANDS ? 64 : STORE_COLUMNS,
  // The last portion of a row is narrower where they do not divide it.
  UNEVEN = !SWAP_OPERANDS && MMA_N % STORE_COLUMNS != 0,
  // Columns lie in boxes whose rows are as wide as the swizzle.
  COMMON_COLS = UNEVEN ? STAGED_COLS | MMA_N : STAGED_COLS,
  BOX_COLS = COMMON_COLS % 64 == 0 ? 64
  : COMMON_COLS % 32 == 0          ? 32
                                   : 16,
  BOX_BYTES = STAGED_ROWS * BOX_COLS * 2,
};

// Offset of an element of the portion. For the copy engine its swizzle, under which eight rows of
// 16 bytes lie in different banks; for threads, which go along the rows, an odd number of 16 bytes
// from row to row.
__device__ __forceinline__ int staged_offset(int row, int col) {
  if constexpr (!TMA_STORE) return (row * (STAGED_COLS / 8 | 1) * 8 + col) * 2;
  const int bytes = (row * BOX_COLS + col % BOX_COLS) * 2;
  const int swizzle = (bytes >> 7 & (BOX_COLS / 8 - 1)) << 4;
  return col / BOX_COLS * BOX_BYTES + (bytes ^ swizzle);
}

__device__ __forceinline__ unsigned pack(fp32 first, fp32 second) {
  return convert<Output>(first).bits | static_cast<unsigned>(convert<Output>(second).bits) << 16;
}

// Writes four 8 x 8 matrices, transposed with SWAP_OPERANDS; a lane gives the address of one row.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&rows)[4]) {
  if constexpr (SWAP_OPERANDS) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
                 : "memory");
  }
}

// Rounds the sums of a portion whose first element of C is (row, col), and stages them: COLUMNS of
// the right operand.
template <int COLUMNS>
__device__ __forceinline__ void stage_sums(
    const fp32* sums, unsigned buffer, const Target& target, const Bias<COLUMNS>& bias, int row,
    int col) {
  const int lane = target.thread % 32;
#pragma unroll
  for (int j = 0; j < COLUMNS / 2; j += 8) {
    unsigned rows[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      fp32 pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = target.scaled(sums[j + i + e]);
        if constexpr (READS_C) {
          const int down = row_of_sum(target.thread, j + i + e);
          const int along = column_of_sum(target.thread, j + i + e);
          const int r = row + (SWAP_OPERANDS ? along : down);
          const int s = col + (SWAP_OPERANDS ? down : along);
          if (r < target.m && s < target.n) {
            pair[e] += target.beta * convert<fp32>(target.c[r * target.ldc + s]);
          }
        }
        if constexpr (HAS_BIAS) pair[e] += bias.at(j + i + e);
        pair[e] = activated(pair[e]);
      }
      rows[i / 2] = pack(pair[0], pair[1]);
    }
    // Matrix i of the four: eight rows down with i % 2, eight columns along with i / 2.
    const int matrix = lane / 8;
    const int down = target.thread / 32 * 16 + matrix % 2 * 8;
    const int along = j * 2 + matrix / 2 * 8;
    store_matrices(
        buffer + (SWAP_OPERANDS ? staged_offset(along + lane % 8, down)
                                : staged_offset(down + lane % 8, along)),
        rows);
  }
}

// Whether the copy engine may write a portion from column `col` of C on. It writes whole 16 bytes:
// where the last ones of a row are not all of C, what follows the row would be overwritten,
// whatever extent the map of C states.
template <int COLS>
__device__ __forceinline__ bool ends_in_whole_chunks(const Target& target, int col) {
  return target.n % 8 == 0 || col + COLS <= target.n;
}

// Writes a staged portion whose first element of C is (row, col), side by side along the rows:
// ALIGN_C elements a thread at a time, which are 16 bytes at least.
template <int COLS>
__device__ __forceinline__ void store_aligned_rows(
    const Target& target, const Staging& staging, int row, int col) {
  constexpr int WIDTH = ALIGN_C < BOX_COLS ? ALIGN_C : BOX_COLS;
  constexpr int PER_ROW = COLS / WIDTH;
#pragma unroll 4
  for (int i = target.thread; i < STAGED_ROWS * PER_ROW; i += 128) {
    const int down = i / PER_ROW;
    const int along = i % PER_ROW * WIDTH;
    const int inside = row + down < target.m ? target.n - col - along : 0;
    const auto values = *reinterpret_cast<const Vector<Output, WIDTH>*>(
        staging.memory + staged_offset(down, along));
    store_inside(target.c + (row + down) * target.ldc + col + along, values, inside);
  }
}

// The same for rows that begin anywhere: 16 bytes of memory are cut out of the two times 16 bytes
// that they lie in as staged, so that all but the ends of a row are stored whole.
template <int COLS>
__device__ __forceinline__ void store_ragged_rows(
    const Target& target, const Staging& staging, int row, int col) {
  constexpr int CHUNKS = COLS / 8;
  const int columns = target.n - col < COLS ? target.n - col : COLS;
#pragma unroll 4
  for (int i = target.thread; i < STAGED_ROWS * (CHUNKS + 1); i += 128) {
    const int down = i / (CHUNKS + 1);
    if (row + down >= target.m) continue;
    Output* const begin = target.c + (row + down) * target.ldc + col;
    // Elements before the first 16 bytes that begin in the row: a chunk of their own.
    const int before = static_cast<int>(0 - reinterpret_cast<unsigned long long>(begin) / 2 & 7);
    const int chunk = i % (CHUNKS + 1) - 1;
    const int first = chunk * 8 + before;
    const auto staged = [&](int which) {
      const int inside = which < 0 ? 0 : which < CHUNKS ? which : CHUNKS - 1;
      return *reinterpret_cast<const Words*>(staging.memory + staged_offset(down, inside * 8));
    };
    union {
      Words words;
      Vector<Output, 8> vector;
    } values{cut(staged(chunk), staged(chunk + 1), before * 2)};
    if (first >= 0 && first + 8 <= columns) {
      store_vector(begin + first, values.vector);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (first + e >= 0 && first + e < columns) begin[first + e] = values.vector.values[e];
      }
    }
  }
}

// By the copy engine, in one thread, or by all.
template <int COLS>
__device__ __forceinline__ void store_portion(
    const Target& target, const Staging& staging, int row, int col) {
  if (TMA_STORE && ends_in_whole_chunks<COLS>(target, col)) {
    if (target.thread != 0) return;
#pragma unroll
    for (int i = 0; i < COLS / BOX_COLS; ++i) {
      const unsigned box = staging.address + i * BOX_BYTES;
      store_box(*staging.map, box, col + i * BOX_COLS, row, target.matrix);
    }
    store_commit();
    return;
  }
  if constexpr (ALIGN_C % 8 == 0) {
    store_aligned_rows<COLS>(target, staging, row, col);
  } else {
    store_ragged_rows<COLS>(target, staging, row, col);
  }
}

// A portion of COLUMNS of the right operand, the first of which is (row, col) of C.
template <int COLUMNS>
__device__ __forceinline__ void store_sums(
    const fp32* sums, const Target& target, const Staging& staging, int row, int col) {
  // Before the barrier, which hides the wait.
  Bias<COLUMNS> bias;
  bias.load(target, col);
  // The portion before has left shared memory.
  if (TMA_STORE && target.thread == 0) store_wait_read<0>();
  named_sync(staging.barrier, 128);
  stage_sums<COLUMNS>(sums, staging.address, target, bias, row, col);
  if constexpr (TMA_STORE) fence_async_proxy();
  named_sync(staging.barrier, 128);
  store_portion<SWAP_OPERANDS ? 64 : COLUMNS>(target, staging, row, col);
}

__device__ __forceinline__ void store_tile(
    const Sums& sums, const Target& target, const Staging& staging) {
  constexpr int WHOLE = MMA_N / STORE_COLUMNS * STORE_COLUMNS;
#pragma unroll
  for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < WHOLE; j += STORE_COLUMNS) {
      const int row = target.row + (SWAP_OPERANDS ? j : i * 64);
      const int col = target.col + (SWAP_OPERANDS ? i * 64 : j);
      store_sums<STORE_COLUMNS>(sums[i] + j / 2, target, staging, row, col);
    }
    if constexpr (UNEVEN) {
      store_sums<MMA_N % STORE_COLUMNS>(
          sums[i] + WHOLE / 2, target, staging, target.row + i * 64, target.col + WHOLE);
    }
  }
}

// Before shared memory goes away.
__device__ __forceinline__ void finish_stores(const Target& target) {
  if (TMA_STORE && target.thread == 0) store_wait_read<0>();
}

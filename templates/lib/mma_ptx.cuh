/*# SPDX-License-Identifier: Apache-2.0 #*/
// The instructions of warps on matrices (sm_80 and later), and accesses by shared addresses.

// Makes the compiler forget what it knows of a number: what is computed from it in a loop is then
// not computed before, and kept in registers of its own.
__device__ __forceinline__ int forget(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Copies BYTES from global to shared memory, in flight until its group has been waited for. Whole
// vectors skip L1: the block reads them once.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(SharedAddress to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
  }
}

// As above, but only the first `source_bytes` are read; zeros fill the rest.
template <int BYTES>
__device__ __forceinline__ void copy_to_shared(
    SharedAddress to, const void* from, int source_bytes) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(source_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void store_shared(SharedAddress to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void load_shared(fp64& first, fp64& second, SharedAddress from) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(first), "=d"(second)
               : "r"(from)
               : "memory");
}

// Four matrices of 8 x 8 elements of 16 bits; lane 8 i + r gives the address of row r of matrix i.
// A lane gets two neighbours of row lane / 4, or with TRANSPOSED of column lane / 4, from each.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], SharedAddress row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  }
}

// sums += A B for A of 16 x 16 and B of 16 x 8 elements. A lane has of A, at rows lane / 4 and that
// plus 8, two neighbours along K from 2 (lane % 4) on, and two more 8 further on; of B the same at
// column lane / 4; and of the sums, in both rows, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_matrices(
    fp32 (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_matrices(
    fp32 (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, fp16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in fp64, for 8 or 16 rows and 4, 8 or 16 steps of K. Of every four steps a lane has
// number lane % 4: one element of each half of A's rows, one of B.
__device__ __forceinline__ void multiply_8x8x4(fp64& sum0, fp64& sum1, fp64 a, fp64 b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(sum0), "+d"(sum1)
      : "d"(a), "d"(b));
}
__device__ __forceinline__ void multiply_16x8x4(fp64 (&sums)[4], const fp64* a, fp64 b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(b));
}
__device__ __forceinline__ void multiply_16x8x8(fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
__device__ __forceinline__ void multiply_16x8x16(
    fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1, fp64 b2, fp64 b3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, "
      "{%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b0), "d"(b1), "d"(b2), "d"(b3));
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/types.cuh and lib/config.cuh. #*/
// Elements whose type is known at run time only, and where they lie.

// function(Element{}) for the type with that code.
template <typename Function>
__device__ __forceinline__ void with_element(int dtype, Function function) {
  switch (dtype) {
    case DTYPE_FP64:
      return function(fp64{});
    case DTYPE_FP32:
      return function(fp32{});
    case DTYPE_FP16:
      return function(fp16{});
    case DTYPE_BF16:
      return function(bf16{});
  }
}

// function(Bits{}) for the unsigned type of so many bytes.
template <typename Function>
__device__ __forceinline__ void with_bits(int bytes, Function function) {
  switch (bytes) {
    case 8:
      return function(0ull);
    case 4:
      return function(0u);
    case 2:
      return function(static_cast<unsigned short>(0));
    case 1:
      return function(static_cast<unsigned char>(0));
  }
}

// Whether every byte is the poison, whose bits are all ones.
template <typename Bits>
__device__ __forceinline__ bool is_poison(Bits bits) {
  return bits == static_cast<Bits>(~0ull);
}
template <typename Element>
__device__ __forceinline__ bool holds_poison(const Element* address) {
  bool poison = false;
  with_bits(sizeof(Element), [&](auto bits) {
    using Bits = decltype(bits);
    poison = is_poison(*reinterpret_cast<const Bits*>(address));
  });
  return poison;
}

// A row-major array of three dimensions with gaps: n elements along each, s elements from one to
// the next. Rows do not overlap.
struct Strided {
  unsigned long long n0, n1, n2, s0, s1, s2;

  __device__ __forceinline__ unsigned long long count() const { return n0 * n1 * n2; }

  // Where the index-th element lies.
  __device__ __forceinline__ unsigned long long offset(unsigned long long index) const {
    const unsigned long long row = index / n2;
    return row / n1 * s0 + row % n1 * s1 + index % n2 * s2;
  }

  // Whether an element of the array lies there.
  __device__ __forceinline__ bool owns(unsigned long long offset) const {
    const unsigned long long in_matrix = offset % s0;
    const unsigned long long in_row = in_matrix % s1;
    return offset / s0 < n0 && in_matrix / s1 < n1 && in_row / s2 < n2 && in_row % s2 == 0;
  }
};

// Kernels take signed numbers; dividing unsigned ones is faster.
__device__ __forceinline__ Strided
strided(long long n0, long long n1, long long n2, long long s0, long long s1, long long s2) {
  using Unsigned = unsigned long long;
  return {static_cast<Unsigned>(n0), static_cast<Unsigned>(n1), static_cast<Unsigned>(n2),
          static_cast<Unsigned>(s0), static_cast<Unsigned>(s1), static_cast<Unsigned>(s2)};
}

// What this thread looks at: first(), and every step() from there on.
__device__ __forceinline__ unsigned long long first_index() {
  return static_cast<unsigned long long>(blockIdx.x) * THREADS + threadIdx.x;
}
__device__ __forceinline__ unsigned long long index_step() {
  return static_cast<unsigned long long>(gridDim.x) * THREADS;
}

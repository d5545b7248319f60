/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/vector.cuh and lib/memory.cuh. #*/
// N elements as they come from memory. 16-bit ones share registers in pairs.
template <typename T, int N, bool PAIRS = (sizeof(T) == 2 && N > 1)>
struct Packed {
  using Part = T;
  enum : int { PARTS = N };
  Vector<Part, PARTS> parts;

  __device__ __forceinline__ T at(int i) const { return parts.values[i]; }
};
template <typename T, int N>
struct Packed<T, N, true> {
  using Part = unsigned;
  enum : int { PARTS = N / 2 };
  Vector<Part, PARTS> parts;

  __device__ __forceinline__ T at(int i) const {
    return {static_cast<unsigned short>(parts.values[i / 2] >> (i % 2 * 16))};
  }
};

// load_global and load_inside of lib/memory.cuh and lib/vector.cuh.
template <int N, int POLICY, typename T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* address, int inside) {
  using Part = typename Packed<T, N>::Part;
  constexpr int PARTS = Packed<T, N>::PARTS;
  return {load_global<PARTS, POLICY>(reinterpret_cast<const Part*>(address), inside)};
}
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed_inside(const T* address, int left) {
  union {
    Vector<T, N> loaded;
    Packed<T, N> packed;
  };
  loaded = load_inside<N>(address, left);
  return packed;
}

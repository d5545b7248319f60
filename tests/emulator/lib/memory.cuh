/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/memory.cuh: a cache policy changes no value. #*/
constexpr int LOAD_DEFAULT = 0;
constexpr int LOAD_NONCOHERENT = 1;
constexpr int LOAD_NONCOHERENT_NO_ALLOCATE = 2;
constexpr int LOAD_STREAMING = 3;
constexpr int LOAD_NO_ALLOCATE = 4;

constexpr int STORE_DEFAULT = 0;
constexpr int STORE_STREAMING = 1;
constexpr int STORE_WRITE_THROUGH = 2;

constexpr int coherent(int policy) {
  return policy == LOAD_NONCOHERENT               ? LOAD_DEFAULT
         : policy == LOAD_NONCOHERENT_NO_ALLOCATE ? LOAD_NO_ALLOCATE
                                                  : policy;
}

template <int N, int POLICY, int L2_BYTES = 0, typename T>
Vector<T, N> load_global(const T* address, int inside = 1) {
  Vector<T, N> vector;
  if (inside) vector = load_vector<N>(address);
  return vector;
}
template <int POLICY, typename T, int N>
void store_global(T* address, const Vector<T, N>& vector, int inside = 1) {
  if (inside) store_vector(address, vector);
}

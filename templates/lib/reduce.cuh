/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/config.cuh. #*/
// The sum of a block's THREADS partial results, always in the same order: the same input gives the
// same bits. `shared` has room for THREADS of them; Partial::add adds another one.
template <typename Partial>
__device__ __forceinline__ void reduce_block(Partial* shared, const Partial& own, Partial* sum) {
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = own;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread].add(shared[thread + half]);
  }
  if (thread == 0) *sum = shared[0];
}

// How many of something there are, and where the first one is.
struct Count {
  long long count, first;

  __device__ __forceinline__ void found(long long at) {
    if (count == 0 || at < first) first = at;
    ++count;
  }
  __device__ __forceinline__ void add(const Count& other) {
    if (other.count && (count == 0 || other.first < first)) first = other.first;
    count += other.count;
  }
};

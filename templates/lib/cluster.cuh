/*# SPDX-License-Identifier: Apache-2.0 #*/
// Waits until all threads of the cluster are here, and what they wrote to shared memory is visible
// to all of them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// What block `rank` of the cluster has where this one has `address`.
template <typename T>
__device__ __forceinline__ T load_shared_of(int rank, const T* address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a register or a pair of them");
  const SharedAddress remote = remote_address(shared_address(address), rank);
  T value;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  } else {
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(remote) : "memory");
  }
  return value;
}

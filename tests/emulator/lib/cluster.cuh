/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/cluster.cuh: the blocks of a cluster run side by side. #*/
#define cluster_sync() emulator_barrier(kCluster, __LINE__)

template <typename T>
T load_shared_of(int rank, const T* address) {
  return *static_cast<const T*>(emulator_shared_of(rank, address, __builtin_LINE()));
}

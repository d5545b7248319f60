/*# SPDX-License-Identifier: Apache-2.0 #*/
// Shared memory as instructions address it: in 32 bits, of this block or of another of its cluster.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// The address of the same place in block `rank` of the cluster.
__device__ __forceinline__ SharedAddress remote_address(SharedAddress address, unsigned rank) {
  SharedAddress remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

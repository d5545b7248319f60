/*# SPDX-License-Identifier: Apache-2.0 #*/
// Copies of boxes between a tensor in global memory and shared memory, by the copy engine. What
// lies outside of the tensor is read as zero and not written.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What L2 does with lines that copies bring: as usual, or they are the first to leave it.
enum LinePolicy { LINE_NORMAL = 0, LINE_EVICT_FIRST = 1 };

__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Brings the box at (x, y, z) to shared memory; `barrier` counts its bytes.
template <int POLICY>
__device__ __forceinline__ void load_box(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int y, int z) {
  if constexpr (POLICY == LINE_EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

// Brings the box to L2 only.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}

// The load to the same place of every block of the cluster whose bit is set in `blocks`; each
// counts it at its own barrier.
template <int POLICY>
__device__ __forceinline__ void load_box_multicast(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int y, int z,
    unsigned short blocks) {
  if constexpr (POLICY == LINE_EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
  }
}

// Writes a box from shared memory, which has to stay until store_wait_read. The kernel's end waits
// for the writes.
__device__ __forceinline__ void store_box(
    const TensorMap& map, unsigned source, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(source), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last PENDING groups of stores have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Shows what this thread wrote to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
// Asynchronous copies from global to shared memory (cp.async, sm_80 and later): the data passes
// through no register, and arrives when its group has been waited for.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    // Whole vectors skip L1: the block reads them once.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global), "n"(BYTES)
                 : "memory");
  }
}

// As above, but an invalid source is not read: shared memory is set to zero instead.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int source_bytes = valid ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global),
               "n"(BYTES), "r"(source_bytes)
               : "memory");
}

// Closes the group of the copies made since the last call.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until no more than IN_FLIGHT of this thread's latest groups are still copying.
template <int IN_FLIGHT>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT) : "memory");
}

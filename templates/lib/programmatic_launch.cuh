/*# SPDX-License-Identifier: Apache-2.0 #*/
// Programmatic dependent launch: with PROGRAMMATIC_LAUNCH the next kernel on the stream may begin
// once all blocks of this one have, if it was launched so, and this one may have begun before the
// kernel ahead of it was done. Nothing that other kernels touch may be read or written before the
// wait. L2 may be told to fetch it: should the kernel ahead write to it still, L2 knows.
//
//   Loads must not be non-coherent: the assembler takes what they read to be constant, and moves
//   them to before the wait. Pointers that are not RESTRICT keep the compiler from making them so.
#define RESTRICT __restrict__
//% if PROGRAMMATIC_LAUNCH
#undef RESTRICT
#define RESTRICT
//% endif
__device__ __forceinline__ void let_next_launch_begin() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
__device__ __forceinline__ void wait_for_previous_launch() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void fetch_ahead(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
// How many blocks have been here before this one. What they wrote to global memory, each before a
// barrier of its block and this, is visible to the block that comes after them, behind a barrier.
__device__ __forceinline__ int take_ticket(int* counter) {
  int ticket;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(counter)
               : "memory");
  return ticket;
}

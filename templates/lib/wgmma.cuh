/*# SPDX-License-Identifier: Apache-2.0 #*/
// Matrix products of a warpgroup, 64 x MMA_N sums at a time, both operands in shared memory.
//
// Operands lie in rows of 128 bytes, whose 16-byte chunks the copy engine has swizzled by the row.
// Along K: a row of the operand's own dimension holds 64 steps of K. Across: a row for each step
// of K holds 64 elements of the other dimension, `slab_bytes` before the next 64.
__device__ __forceinline__ unsigned long long operand_descriptor(
    unsigned address, bool across, int slab_bytes) {
  const unsigned long long swizzled_128 = 1ull << 62;
  const unsigned long long eight_rows = 1024 >> 4;
  const unsigned long long leading = across ? slab_bytes >> 4 : 1;
  return swizzled_128 | eight_rows << 32 | leading << 16 | (address & 0x3ffff) >> 4;
}

// Give registers of a warpgroup back, and take them. All of its warps do so.
template <int COUNT>
__device__ __forceinline__ void set_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void set_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// sums = left * right + (accumulate ? sums : 0), over 16 steps of K.
__device__ __forceinline__ void wgmma(
    fp32 (&sums)[MMA_N / 2], unsigned long long left, unsigned long long right, int accumulate) {
  // clang-format off
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %${MMA_N // 2 + 2}, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n${MMA_N}k16.f32.${'f16.f16' if IS_FP16 else 'bf16.bf16'} {"
      //% for group in range(0, MMA_N // 2, 4)
      "%${group}, %${group + 1}, %${group + 2}, %${group + 3}${'' if loop.last else ', '}"
      //% endfor
      "}, %${MMA_N // 2}, %${MMA_N // 2 + 1}, accumulate, 1, 1, ${LEFT_ACROSS}, ${RIGHT_ACROSS};\n"
      "}"
      :
      //% for group in range(0, MMA_N // 2, 4)
      "+f"(sums[${group}]), "+f"(sums[${group + 1}]), "+f"(sums[${group + 2}]), "+f"(sums[${group + 3}])${'' if loop.last else ','}
      //% endfor
      : "l"(left), "l"(right), "r"(accumulate));
  // clang-format on
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
// Compile-time arithmetic on sizes; CUDA's own min and max are no constant expressions.
__device__ constexpr int least(int a, int b) {
  return a < b ? a : b;
}
__device__ constexpr int most(int a, int b) {
  return a > b ? a : b;
}

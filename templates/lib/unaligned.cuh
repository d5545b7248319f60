/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/vector.cuh. matmul/pad_rows.cu.jinja has a cut of its own, in words of four bytes,
    which puts zeros behind the end of a row as well: ptxas makes other code of each in the other's
    place. #*/
// Sixteen bytes that lie across two whole ones.
using Words = Vector<unsigned long long, 2>;

// The 16 bytes from byte `skipped` of `low` on, which `high` follows.
__device__ __forceinline__ Words cut(const Words& low, const Words& high, int skipped) {
  const bool upper = skipped >= 8;
  const unsigned long long first = upper ? low.values[1] : low.values[0];
  const unsigned long long second = upper ? high.values[0] : low.values[1];
  const unsigned long long third = upper ? high.values[1] : high.values[0];
  const int shift = skipped % 8 * 8;  // bits
  if (shift == 0) return {first, second};
  return {first >> shift | second << (64 - shift), second >> shift | third << (64 - shift)};
}

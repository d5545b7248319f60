/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/async_copy.cuh. The runtime copies when a group is waited for. #*/
template <int BYTES>
void copy_async(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator_async_copy(shared, global, BYTES, BYTES, __builtin_LINE());
}
template <int BYTES>
void copy_async(void* shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator_async_copy(shared, global, BYTES, valid ? BYTES : 0, __builtin_LINE());
}
inline void copy_async_commit() {
  emulator_async_commit();
}
template <int IN_FLIGHT>
void copy_async_wait() {
  emulator_async_wait(IN_FLIGHT);
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/shared_address.cuh: the addresses of the host. #*/
using SharedAddress = size_t;

inline SharedAddress shared_address(const void* pointer) {
  return reinterpret_cast<SharedAddress>(pointer);
}

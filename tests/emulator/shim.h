// SPDX-License-Identifier: Apache-2.0
// What a generated kernel finds predefined, for a host compiler: force-included before the kernel.
#pragma once

#include <math.h>

#include <type_traits>
#include <utility>

#include "runtime.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, so a static variable is shared by exactly its threads. The section
// lets the runtime poison them all between blocks.
#define __shared__ static __attribute__((section("emulator_shared")))
#define __syncthreads() emulator_barrier(kBlock, __LINE__)
#define __syncwarp() emulator_barrier(kWarp, __LINE__)

using std::size_t;

extern "C" emulator_uint3 threadIdx, blockIdx, blockDim, gridDim;

template <typename To, typename From>
To emulator_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float value) {
  return emulator_bit_cast<unsigned>(value);
}
inline float __uint_as_float(unsigned bits) {
  return emulator_bit_cast<float>(bits);
}

// Of a whole warp.
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask, int line = __builtin_LINE()) {
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = emulator_exchange(bits, lane_mask, line);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
void emulator_gather(const T* given, T (&all)[32], int line) {
  emulator_gather_bytes(given, sizeof(T), all, line);
}

inline float cospi(float half_turns) {
  return cos(static_cast<float>(M_PI) * half_turns);
}
inline double cospi(double half_turns) {
  return cos(M_PI * half_turns);
}

inline float __fdividef(float left, float right) {
  return left / right;
}

// The kernel's parameters as one letter each, to be held against the launch plan's arguments.
template <typename T>
constexpr char emulator_letter() {
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_integral_v<T>) return sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : '?';
  return std::is_same_v<T, float> ? 'f' : std::is_same_v<T, double> ? 'd' : '?';
}
template <typename... T>
const char* emulator_letters(void (*)(T...)) {
  static constexpr char letters[] = {emulator_letter<T>()..., '\0'};
  return letters;
}
template <typename... T, size_t... I>
void emulator_call(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<T>*>(arguments[I])...);
}
template <typename... T>
void emulator_call(void (*kernel)(T...), void** arguments) {
  emulator_call(kernel, arguments, std::index_sequence_for<T...>{});
}

// Defined by the linker where the kernel has static shared variables.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulator_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_emulator_shared[];

// Stands after the kernel and makes it callable from outside.
#define EMULATOR_EXPORT(kernel)                                                            \
  extern "C" const char* emulator_signature() {                                            \
    return emulator_letters(kernel);                                                       \
  }                                                                                        \
  extern "C" int emulator_launch(                                                          \
      const EmulatorLaunch* launch, void** arguments, EmulatorFault* fault) {              \
    const auto entry = [](void** values) { emulator_call(kernel, values); };               \
    return emulator_run(                                                                   \
        launch, entry, arguments, __start_emulator_shared, __stop_emulator_shared, fault); \
  }

/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# The host's version of lib/mma_ptx.cuh: lanes give their part to the warp, each takes what the
    layout of the instruction hands to it. #*/
inline int forget(int number) {
  return number;
}
template <int BYTES>
void copy_to_shared(SharedAddress to, const void* from) {
  emulator_async_copy(reinterpret_cast<void*>(to), from, BYTES, BYTES, __builtin_LINE());
}
template <int BYTES>
void copy_to_shared(SharedAddress to, const void* from, int source_bytes) {
  emulator_async_copy(reinterpret_cast<void*>(to), from, BYTES, source_bytes, __builtin_LINE());
}
inline void store_shared(SharedAddress to, unsigned word) {
  *reinterpret_cast<unsigned*>(to) = word;
}
inline void load_shared(fp64& first, fp64& second, SharedAddress from) {
  const auto pair = *reinterpret_cast<const Vector<fp64, 2>*>(from);
  first = pair.values[0];
  second = pair.values[1];
}

using EmulatorRow = Vector<unsigned short, 8>;

template <bool TRANSPOSED>
void load_matrices(unsigned (&to)[4], SharedAddress row) {
  EmulatorRow rows[32];
  emulator_gather(reinterpret_cast<const EmulatorRow*>(row), rows, __builtin_LINE());
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    unsigned short pair[2];
    for (int j = 0; j < 2; ++j) {
      const int across = lane / 4;
      const int along = lane % 4 * 2 + j;
      pair[j] =
          TRANSPOSED ? rows[8 * i + along].values[across] : rows[8 * i + across].values[along];
    }
    to[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
  }
}

// What a lane holds of A and B, and the sums of its two rows and columns. `a` and `b` find a
// lane's element of a half of the rows, and of one of the groups of steps.
template <typename Lanes, typename Sum, typename A, typename B>
void emulator_multiply(
    Sum (&sums)[4], const Lanes& lanes, int groups, int per_lane, A a, B b, int rows = 4) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < rows; ++i) {
    double sum = sums[i];
    for (int group = 0; group < groups; ++group) {
      for (int member = 0; member < 4; ++member) {
        for (int element = 0; element < per_lane; ++element) {
          const auto& left = lanes[lane / 4 * 4 + member];
          const auto& right = lanes[(lane % 4 * 2 + i % 2) * 4 + member];
          sum = fma(a(left, i / 2, group, element), b(right, group, element), sum);
        }
      }
    }
    sums[i] = static_cast<Sum>(sum);
  }
}

template <typename Half>
void multiply_matrices(fp32 (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Half) {
  struct Lane {
    unsigned a[4], b[2];
  } lanes[32];
  const Lane own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator_gather(&own, lanes, __builtin_LINE());
  const auto element_of = [](unsigned pair, int element) {
    return convert<double>(Half{static_cast<unsigned short>(pair >> 16 * element)});
  };
  emulator_multiply(
      sums, lanes, 2, 2,
      [&](const Lane& l, int half, int group, int i) {
        return element_of(l.a[2 * group + half], i);
      },
      [&](const Lane& l, int group, int i) { return element_of(l.b[group], i); });
}

template <int STEPS_OF_K>
void emulator_multiply_wide(fp64 (&sums)[4], const fp64* a, const fp64* b, int halves) {
  struct Lane {
    fp64 a[STEPS_OF_K / 2], b[STEPS_OF_K / 4];
  } own, lanes[32];
  for (int i = 0; i < STEPS_OF_K / 4; ++i) {
    own.b[i] = b[i];
    for (int half = 0; half < halves; ++half) own.a[2 * i + half] = a[halves * i + half];
  }
  emulator_gather(&own, lanes, __builtin_LINE());
  emulator_multiply(
      sums, lanes, STEPS_OF_K / 4, 1,
      [](const Lane& l, int half, int group, int) { return l.a[2 * group + half]; },
      [](const Lane& l, int group, int) { return l.b[group]; }, 2 * halves);
}
inline void multiply_8x8x4(fp64& sum0, fp64& sum1, fp64 a, fp64 b) {
  fp64 sums[4] = {sum0, sum1};
  emulator_multiply_wide<4>(sums, &a, &b, 1);
  sum0 = sums[0];
  sum1 = sums[1];
}
inline void multiply_16x8x4(fp64 (&sums)[4], const fp64* a, fp64 b) {
  emulator_multiply_wide<4>(sums, a, &b, 2);
}
inline void multiply_16x8x8(fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1) {
  const fp64 b[2] = {b0, b1};
  emulator_multiply_wide<8>(sums, a, b, 2);
}
inline void multiply_16x8x16(fp64 (&sums)[4], const fp64* a, fp64 b0, fp64 b1, fp64 b2, fp64 b3) {
  const fp64 b[4] = {b0, b1, b2, b3};
  emulator_multiply_wide<16>(sums, a, b, 2);
}

/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/vector.cuh. #*/
// Global loads and stores of 2 to 32 bytes with a cache policy. Every access is one instruction,
// issued in the order of the source; its address is a multiple of its size.

// The non-coherent loads are for data that nothing writes while the kernel runs.
enum LoadPolicy {
  LOAD_DEFAULT = 0,
  LOAD_NONCOHERENT = 1,
  LOAD_NONCOHERENT_NO_ALLOCATE = 2,  // leaves no copy in L1
  LOAD_STREAMING = 3,                // first to be evicted
  LOAD_NO_ALLOCATE = 4,
};
enum StorePolicy {
  STORE_DEFAULT = 0,
  STORE_STREAMING = 1,      // first to be evicted
  STORE_WRITE_THROUGH = 2,  // to memory at once
  STORE_NO_ALLOCATE = 3,    // leaves no copy in L1
};

// The load that resembles POLICY most among those that see the kernel's own writes.
__device__ constexpr int coherent(int policy) {
  return policy == LOAD_NONCOHERENT               ? LOAD_DEFAULT
         : policy == LOAD_NONCOHERENT_NO_ALLOCATE ? LOAD_NO_ALLOCATE
                                                  : policy;
}

// A vector as PTX sees it: 32-bit registers, or a 16-bit one.
template <typename T, int N>
union Registers {
  Vector<T, N> vector;
  unsigned words[(sizeof(T) * N + 3) / 4];
  unsigned short half;
};

// The access with its predicate in one piece of PTX: as a branch it would not be batched with the
// ones around it. Predicates known at compile time disappear. 32-byte accesses need sm_100.
#define IF_INSIDE(OPERAND, ACCESS) \
  "{.reg .pred inside; setp.ne.s32 inside, " OPERAND ", 0; @inside " ACCESS ";}"

#define LOAD_VECTOR(OPCODE)                                                                    \
  if constexpr (BYTES == 2) {                                                                  \
    asm volatile(IF_INSIDE("%2", OPCODE ".b16 %0, [%1]")                                       \
                 : "=h"(to.half)                                                               \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 4) {                                                           \
    asm volatile(IF_INSIDE("%2", OPCODE ".b32 %0, [%1]")                                       \
                 : "=r"(to.words[0])                                                           \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 8) {                                                           \
    asm volatile(IF_INSIDE("%3", OPCODE ".v2.b32 {%0, %1}, [%2]")                              \
                 : "=r"(to.words[0]), "=r"(to.words[1])                                        \
                 : "l"(address), "r"(inside));                                                 \
  } else if constexpr (BYTES == 16) {                                                          \
    asm volatile(IF_INSIDE("%5", OPCODE ".v4.b32 {%0, %1, %2, %3}, [%4]")                      \
                 : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])  \
                 : "l"(address), "r"(inside));                                                 \
  } else {                                                                                     \
    asm volatile(IF_INSIDE("%9", OPCODE ".v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8]")      \
                 : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3]), \
                   "=r"(to.words[4]), "=r"(to.words[5]), "=r"(to.words[6]), "=r"(to.words[7])  \
                 : "l"(address), "r"(inside));                                                 \
  }

#define STORE_VECTOR(OPCODE)                                                                     \
  if constexpr (BYTES == 2) {                                                                    \
    asm volatile(IF_INSIDE("%2", OPCODE ".b16 [%0], %1")::"l"(address), "h"(from.half),          \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 4) {                                                             \
    asm volatile(IF_INSIDE("%2", OPCODE ".b32 [%0], %1")::"l"(address), "r"(from.words[0]),      \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 8) {                                                             \
    asm volatile(IF_INSIDE("%3", OPCODE ".v2.b32 [%0], {%1, %2}")::"l"(address),                 \
                 "r"(from.words[0]), "r"(from.words[1]), "r"(inside)                             \
                 : "memory");                                                                    \
  } else if constexpr (BYTES == 16) {                                                            \
    asm volatile(IF_INSIDE("%5", OPCODE ".v4.b32 [%0], {%1, %2, %3, %4}")::"l"(address),         \
                 "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]), \
                 "r"(inside)                                                                     \
                 : "memory");                                                                    \
  } else {                                                                                       \
    asm volatile(                                                                                \
        IF_INSIDE("%9", OPCODE ".v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}")::"l"(address),  \
        "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]),          \
        "r"(from.words[4]), "r"(from.words[5]), "r"(from.words[6]), "r"(from.words[7]),          \
        "r"(inside)                                                                              \
        : "memory");                                                                             \
  }

// The bytes that a miss makes L2 fetch: as it likes (0), 128, or 256 (sm_80 and later).
#define LOAD_VECTOR_PREFETCHING(OPCODE)   \
  if constexpr (L2_BYTES == 0) {          \
    LOAD_VECTOR(OPCODE)                   \
  } else if constexpr (L2_BYTES == 128) { \
    LOAD_VECTOR(OPCODE ".L2::128B")       \
  } else if constexpr (L2_BYTES == 256) { \
    LOAD_VECTOR(OPCODE ".L2::256B")       \
  }

// N elements at `address`, or something arbitrary where not `inside`: then nothing is read.
template <int N, int POLICY, int L2_BYTES = 0, typename T>
__device__ __forceinline__ Vector<T, N> load_global(const T* address, int inside = 1) {
  constexpr int BYTES = sizeof(T) * N;
  Registers<T, N> to;
  if constexpr (POLICY == LOAD_DEFAULT) {
    LOAD_VECTOR_PREFETCHING("ld.global")
  } else if constexpr (POLICY == LOAD_NONCOHERENT) {
    LOAD_VECTOR_PREFETCHING("ld.global.nc")
  } else if constexpr (POLICY == LOAD_NONCOHERENT_NO_ALLOCATE) {
    LOAD_VECTOR_PREFETCHING("ld.global.nc.L1::no_allocate")
  } else if constexpr (POLICY == LOAD_STREAMING) {
    LOAD_VECTOR_PREFETCHING("ld.global.cs")
  } else if constexpr (POLICY == LOAD_NO_ALLOCATE) {
    LOAD_VECTOR_PREFETCHING("ld.global.L1::no_allocate")
  }
  return to.vector;
}

// The same for a store.
template <int POLICY, typename T, int N>
__device__ __forceinline__ void store_global(
    T* address, const Vector<T, N>& vector, int inside = 1) {
  constexpr int BYTES = sizeof(T) * N;
  const Registers<T, N> from{vector};
  if constexpr (POLICY == STORE_DEFAULT) {
    STORE_VECTOR("st.global")
  } else if constexpr (POLICY == STORE_STREAMING) {
    STORE_VECTOR("st.global.cs")
  } else if constexpr (POLICY == STORE_WRITE_THROUGH) {
    STORE_VECTOR("st.global.wt")
  } else if constexpr (POLICY == STORE_NO_ALLOCATE) {
    STORE_VECTOR("st.global.L1::no_allocate")
  }
}

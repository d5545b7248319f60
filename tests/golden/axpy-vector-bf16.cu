// tunegen_axpy_vector: y = a x + y, spec vector, for sm_90.
// SPDX-License-Identifier: Apache-2.0
// Config: THREADS=128 VECTOR_BYTES=16 UNROLL=1 BLOCKS_PER_SM=0 STORE_POLICY=0 UNUSED_SHARED_KIB=0 LOAD_POLICY=0 L2_PREFETCH_BYTES=0
// Regenerate: tunegen inspect axpy --arch sm_90 --spec vector --problem 1000 --dtype bf16 --param THREADS=128 --param VECTOR_BYTES=16 --param UNROLL=1 --param BLOCKS_PER_SM=0 --param STORE_POLICY=0 --param UNUSED_SHARED_KIB=0 --param LOAD_POLICY=0 --param L2_PREFETCH_BYTES=0 --emit cuda

// y = a x + y over n elements, in place. A zero `a` is a factor like any other: 0 * Inf is NaN.

// Element types under the names the tuner uses. No CUDA headers: 16-bit floats are storage only,
// arithmetic is done in fp32.
using fp32 = float;
using fp64 = double;
struct alignas(2) fp16 {
  unsigned short bits;
};
struct alignas(2) bf16 {
  unsigned short bits;
};

template <typename To>
__device__ __forceinline__ To convert(fp32 value) {
  return static_cast<To>(value);
}
template <typename To>
__device__ __forceinline__ To convert(fp64 value) {
  return static_cast<To>(value);
}
template <typename To>
__device__ __forceinline__ To convert(fp16 value) {
  fp32 wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return static_cast<To>(wide);
}
template <typename To>
__device__ __forceinline__ To convert(bf16 value) {
  // bf16 is the upper half of fp32, so widening is a shift and NaN payloads survive.
  return static_cast<To>(__uint_as_float(static_cast<unsigned>(value.bits) << 16));
}
template <>
__device__ __forceinline__ fp16 convert<fp16>(fp32 value) {
  fp16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
template <>
__device__ __forceinline__ bf16 convert<bf16>(fp32 value) {
  bf16 narrow;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#else
  // Round to nearest even by hand; a NaN keeps its upper bits and is made quiet.
  const unsigned bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  narrow.bits = static_cast<unsigned short>((is_nan ? bits | 0x400000u : rounded) >> 16);
#endif
  return narrow;
}
template <>
__device__ __forceinline__ fp16 convert<fp16>(fp16 value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 convert<bf16>(bf16 value) {
  return value;
}

using Element = bf16;
using Accumulator = fp32;
enum : int {
  THREADS = 128,
  VECTOR_BYTES = 16,
  UNROLL = 1,
  BLOCKS_PER_SM = 0,
  STORE_POLICY = 0,
  UNUSED_SHARED_KIB = 0,
  LOAD_POLICY = 0,
  L2_PREFETCH_BYTES = 0,
};

// N elements that are loaded and stored in one access, so their address is a multiple of N.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* address) {
  return *reinterpret_cast<const Vector<T, N>*>(address);
}
template <int N, typename T>
__device__ __forceinline__ void store_vector(T* address, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(address) = vector;
}

// The first `left` of N elements, zeros for the rest; nothing beyond them is read.
template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_inside(const T* address, int left) {
  if (left >= N) return load_vector<N>(address);
  Vector<T, N> vector{};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) vector.values[i] = address[i];
  }
  return vector;
}

// Stores the first `left` of N elements.
template <int N, typename T>
__device__ __forceinline__ void store_inside(T* address, const Vector<T, N>& vector, int left) {
  if (left >= N) {
    store_vector(address, vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) address[i] = vector.values[i];
  }
}

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

// out[i] = function(inputs[i]...) for contiguous arrays of n elements at any address.
//
//          <- tile 0 -> <- tile 1 ->     <- rest ->
//   | head |            |            | ... |      |tail|
//          ^ first aligned vector                 ^ less than a vector
//
// A block takes tile blockIdx.x, and every gridDim.x-th from there when the grid is persistent.
// In a tile each thread has UNROLL vectors, THREADS vectors apart, so that a warp touches whole
// lines; all its loads are issued before the first is used. The block whose turn comes after the
// last full tile takes the rest, the only vectors whose bounds are checked.

enum : int {
  VECTOR = VECTOR_BYTES / static_cast<int>(sizeof(Element)),  // elements
  TILE = THREADS * UNROLL * VECTOR,                           // elements
};
static_assert(VECTOR >= 1, "a vector holds at least one element");

// An input that no thread writes.
struct ReadOnly {
  enum : int { POLICY = LOAD_POLICY };
  const Element* data;
};

// An input that is the output too: each element is written by the thread that has read it.
struct InPlace {
  enum : int { POLICY = coherent(LOAD_POLICY) };
  const Element* data;
};

// COUNT vectors of N elements of an input, on their way to one thread.
template <int N, int COUNT, int POLICY>
struct Stream {
  const Element* first;
  Vector<Element, N> vectors[COUNT];

  __device__ __forceinline__ explicit Stream(const Element* address) : first(address) {}
  __device__ __forceinline__ void load(int i, bool inside) {
    vectors[i] = load_global<N, POLICY, L2_PREFETCH_BYTES>(first + i * (THREADS * N), inside);
  }
};

// One thread's vectors of a batch; where GUARDED, only those less than `end` from its first one.
template <int N, int COUNT, bool GUARDED, typename Function, typename... Streams>
__device__ __forceinline__ void process(
    Element* out, int end, Function function, Streams... inputs) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) (inputs.load(i, !GUARDED || i * THREADS < end), ...);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    Vector<Element, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.values[e] = function(inputs.vectors[i].values[e]...);
    store_global<STORE_POLICY>(out + i * (THREADS * N), result, !GUARDED || i * THREADS < end);
  }
}

// One tile in batches of COUNT vectors a thread; where GUARDED, only its first `end` vectors.
template <int N, int COUNT, bool GUARDED, typename Function, typename... Inputs>
__device__ __forceinline__ void process_tile(
    Element* out, int end, Function function, Inputs... inputs) {
  constexpr int BATCH = THREADS * COUNT;
  const int thread = static_cast<int>(threadIdx.x);
  out += thread * N;
  ((inputs.data += thread * N), ...);
#pragma unroll 1
  for (int first = 0; first < TILE / N; first += BATCH) {
    process<N, COUNT, GUARDED>(
        out, end - first - thread, function, Stream<N, COUNT, Inputs::POLICY>(inputs.data)...);
    out += BATCH * N;
    ((inputs.data += BATCH * N), ...);
  }
}

// Whole arrays, whose first `head` elements stand before the first aligned vector.
template <int N, int COUNT, typename Function, typename... Inputs>
__device__ __forceinline__ void process_arrays(
    Element* out, long long n, int head, Function function, Inputs... inputs) {
  const auto body = static_cast<unsigned long long>(n - head);
  const auto full_tiles = static_cast<unsigned>(body / TILE);
  const int rest = static_cast<int>(body % TILE);
  unsigned tile = blockIdx.x;
  const auto first = [&] { return head + static_cast<long long>(tile) * TILE; };

  if constexpr (BLOCKS_PER_SM == 0) {
    if (tile < full_tiles) {
      process_tile<N, COUNT, false>(out + first(), 0, function, Inputs{inputs.data + first()}...);
    }
  } else {
    for (; tile < full_tiles; tile += gridDim.x) {
      process_tile<N, COUNT, false>(out + first(), 0, function, Inputs{inputs.data + first()}...);
    }
  }
  if (tile == full_tiles) {
    process_tile<N, COUNT, true>(
        out + first(), rest / N, function, Inputs{inputs.data + first()}...);
  }
  // Head and tail have less than a vector each. The block that started first takes them.
  if constexpr (N > 1) {
    const int edge = static_cast<int>(threadIdx.x);
    const int tail = rest % N;
    if (blockIdx.x != 0 || edge >= head + tail) return;
    const long long i = edge < head ? edge : n - tail + (edge - head);
    process<1, 1, false>(out + i, 0, function, Stream<1, 1, Inputs::POLICY>(inputs.data + i)...);
  }
}

// Bytes from the last address that a vector could start at.
__device__ __forceinline__ int misalignment(const Element* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % VECTOR_BYTES);
}

template <typename Function, typename... Inputs>
__device__ __forceinline__ void elementwise(
    Element* out, long long n, Function function, Inputs... inputs) {
  constexpr int OPERANDS = sizeof...(Inputs) > 1 ? sizeof...(Inputs) : 1;
  static_assert(
      (UNROLL * VECTOR_BYTES / 4 * OPERANDS + 32) * THREADS <= 65536,
      "a block's registers hold its vectors and 32 more per thread");
  constexpr int ELEMENT_BYTES = sizeof(Element);

  if constexpr (VECTOR == 1) {
    process_arrays<1, UNROLL>(out, n, 0, function, inputs...);
  } else if (((misalignment(inputs.data) == misalignment(out)) && ...)) {
    // One head brings all of them to an aligned address.
    const int head = (VECTOR_BYTES - misalignment(out)) % VECTOR_BYTES / ELEMENT_BYTES;
    process_arrays<VECTOR, UNROLL>(
        out, n, n < head ? static_cast<int>(n) : head, function, inputs...);
  } else {
    // No address suits all: element by element, as many in flight as the same registers hold, 16
    // at most, which is enough for the memory and short enough for the instruction cache.
    constexpr int IN_FLIGHT = UNROLL * VECTOR_BYTES / (ELEMENT_BYTES > 4 ? ELEMENT_BYTES : 4);
    process_arrays<1, (IN_FLIGHT < 16 ? IN_FLIGHT : 16)>(out, n, 0, function, inputs...);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tunegen_axpy_vector(
    const Element* x,  // (n)
    Element* y,        // (n)
    long long n, Accumulator a) {
  elementwise(
      y, n,
      [a](Element x_value, Element y_value) {
        return convert<Element>(a * convert<Accumulator>(x_value) + convert<Accumulator>(y_value));
      },
      ReadOnly{x}, InPlace{y});
}

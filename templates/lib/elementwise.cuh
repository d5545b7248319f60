/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# After lib/types.cuh, lib/config.cuh, lib/vector.cuh and lib/memory.cuh. #*/
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

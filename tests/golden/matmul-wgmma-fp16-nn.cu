// tunegen_matmul_wgmma: C = act(alpha * A B + beta * C + bias), spec wgmma, for sm_90a.
// SPDX-License-Identifier: Apache-2.0
// Config: SWAP_OPERANDS=0 BLOCK_M=128 BLOCK_N=256 CONSUMERS=2 PINGPONG=0 STORE_PARTS=2 BLOCK_K=64 STAGES=4 CLUSTER_M=1 CLUSTER_N=1 CLUSTER_K=1 SPLIT_K=1 RASTER_GROUP=8 RASTER_COLUMNS=0 SPARE_SMS=0 MMA_IN_FLIGHT=1 PRODUCER_REGISTERS=40 L2_PROMOTION=256 PROGRAMMATIC_LAUNCH=1 STREAMED_OPERAND=0 STREAM_K=0
// Regenerate: tunegen inspect matmul --arch sm_90 --spec wgmma --problem 4096x4096x4096 --dtype fp16 --layout nn --param SWAP_OPERANDS=0 --param BLOCK_M=128 --param BLOCK_N=256 --param CONSUMERS=2 --param PINGPONG=0 --param STORE_PARTS=2 --param BLOCK_K=64 --param STAGES=4 --param CLUSTER_M=1 --param CLUSTER_N=1 --param CLUSTER_K=1 --param SPLIT_K=1 --param RASTER_GROUP=8 --param RASTER_COLUMNS=0 --param SPARE_SMS=0 --param MMA_IN_FLIGHT=1 --param PRODUCER_REGISTERS=40 --param L2_PROMOTION=256 --param PROGRAMMATIC_LAUNCH=1 --param STREAMED_OPERAND=0 --param STREAM_K=0 --emit cuda

// C = act(alpha * A B + beta * C + bias) on Hopper's tensor cores.
//
//   A is M x K, B is K x N, C is M x N, all row-major; a transposed operand is stored K x M or
//   N x K. Blocks stay on their multiprocessor and take tiles of BLOCK_M x BLOCK_N of C in turn.
//   One warp has the copy engine fill a ring of STAGES, each BLOCK_K steps of both operands;
//   CONSUMERS warpgroups multiply them: together on one tile, a share of its rows each, or, with
//   PINGPONG, in turns on a tile each, so that one multiplies while the other writes C.
//
//   Tensor cores take 64 rows of a left operand by up to 256 columns of a right one. The left is A
//   and the right B, or with SWAP_OPERANDS the left is B and the right A, both transposed: then
//   few rows of C cost few columns of an instruction. Blocks of a cluster share operands: each
//   brings a part to all.
//
//      copy engine            left   right              tensor cores          stmatrix, copy engine
//   A, B  ------->  stage 0  | 0 |  | 0 |  stage 1 ...  ----------->  sums  ---------------->  C
//   ^ barrier `empty`                                   ^ barrier `full`

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

using Output = fp16;
enum : int {
  SWAP_OPERANDS = 0,
  BLOCK_M = 128,
  BLOCK_N = 256,
  CONSUMERS = 2,
  PINGPONG = 0,
  STORE_PARTS = 2,
  BLOCK_K = 64,
  STAGES = 4,
  CLUSTER_M = 1,
  CLUSTER_N = 1,
  CLUSTER_K = 1,
  SPLIT_K = 1,
  RASTER_GROUP = 8,
  RASTER_COLUMNS = 0,
  SPARE_SMS = 0,
  MMA_IN_FLIGHT = 1,
  PRODUCER_REGISTERS = 40,
  L2_PROMOTION = 256,
  PROGRAMMATIC_LAUNCH = 1,
  STREAMED_OPERAND = 0,
  STREAM_K = 0,
  IS_FP16 = 1,
  MMA_N = 256,
  LEFT_ACROSS = 0,
  RIGHT_ACROSS = 1,
  CONSUMER_REGISTERS = 232,
  STORE_COLUMNS = 128,
  DIRECT_STORE = 0,
  TMA_STORE = 1,
  ALIGN_C = 8,
  READS_C = 0,
  HAS_BIAS = 0,
  ACTIVATION = 0,
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

enum : int {
  LEFT_ROWS = SWAP_OPERANDS ? BLOCK_N : BLOCK_M,
  CLUSTER = CLUSTER_M * CLUSTER_N * CLUSTER_K,
  LEFT_SHARERS = SWAP_OPERANDS ? CLUSTER_M : CLUSTER_N,
  RIGHT_SHARERS = SWAP_OPERANDS ? CLUSTER_N : CLUSTER_M,
  // Across K an operand lies in slabs of 64.
  LEFT_BYTES = LEFT_ROWS * BLOCK_K * 2,
  RIGHT_BYTES = (RIGHT_ACROSS ? (MMA_N + 63) / 64 * 64 : MMA_N) * BLOCK_K * 2,
  TILE_CONSUMERS = PINGPONG ? 1 : CONSUMERS,  // warpgroups that work on a tile
  MMA_ROWS = LEFT_ROWS / 64 / TILE_CONSUMERS,
  THREADS = 128 * (1 + CONSUMERS),
  // Staged sums; rows of C that threads store are an odd number of 16 bytes apart.
  STORE_BYTES = DIRECT_STORE ? 0
  : TMA_STORE                ? 64 * STORE_COLUMNS * 2
  : SWAP_OPERANDS            ? STORE_COLUMNS * (64 / 8 + 1) * 16
                             : 64 * (STORE_COLUMNS / 8 | 1) * 16,
  STAGES_BYTES = STAGES * (LEFT_BYTES + RIGHT_BYTES),
  // What the blocks of a cluster that have slices of K send to the first one, from all consumers.
  INBOX_BYTES = (CLUSTER_K - 1) * CONSUMERS * MMA_ROWS * 64 * MMA_N * 4,
};

static_assert(
    LEFT_ROWS % (64 * TILE_CONSUMERS) == 0,
    "each consumer of a tile has whole blocks of 64 rows of the left operand");
static_assert(!PINGPONG || CONSUMERS == 2, "two consumers take turns");
static_assert(
    MMA_ROWS * MMA_N / 2 <= (CONSUMERS == 3             ? 96
                             : PRODUCER_REGISTERS == 24 ? 192
                                                        : 176),
    "sums fit the registers that a consumer has");
static_assert(
    MMA_N > (STORE_PARTS - 1) * STORE_COLUMNS && (MMA_N % STORE_COLUMNS == 0 || !SWAP_OPERANDS),
    "sums are staged in parts of whole 16 columns, the last of them may be narrower");
static_assert(
    CONSUMERS == 2 || PRODUCER_REGISTERS == 24,
    "three consumers leave a producer 24 registers, one needs no change");
static_assert(
    CLUSTER_M * CLUSTER_N * CLUSTER_K <= 2 || CLUSTER_M * CLUSTER_N == 1,
    "a cluster shares an operand among 2 blocks, or K among 2, 4 or 8");
static_assert(
    STREAM_K == 0 || SPLIT_K * CLUSTER_K == 1,
    "tiles whose steps of K all blocks share have no other slices");
static_assert(
    !DIRECT_STORE || STORE_PARTS == 1,
    "slices of K, and results of four bytes, are stored from registers, in one part");
static_assert(
    RIGHT_ACROSS || MMA_N % (8 * RIGHT_SHARERS) == 0,
    "blocks that share an operand bring whole groups of 8 rows");
static_assert(
    STAGES * (LEFT_BYTES + RIGHT_BYTES + 16) + CONSUMERS * (STORE_BYTES + 16) + INBOX_BYTES +
            (STREAM_K ? 32 : 0) <=
        232448,
    "stages and staged sums fit shared memory");

// Shared memory as instructions address it: in 32 bits, of this block or of another of its cluster.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// The address of the same place in block `rank` of the cluster.
__device__ __forceinline__ SharedAddress remote_address(SharedAddress address, unsigned rank) {
  SharedAddress remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Waits until all threads of the cluster are here, and what they wrote to shared memory is visible
// to all of them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// What block `rank` of the cluster has where this one has `address`.
template <typename T>
__device__ __forceinline__ T load_shared_of(int rank, const T* address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a register or a pair of them");
  const SharedAddress remote = remote_address(shared_address(address), rank);
  T value;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  } else {
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(remote) : "memory");
  }
  return value;
}

// Barriers in shared memory that count arrivals and the bytes of copies under way. A barrier ends
// a phase when both are complete; who waits names the parity of the phase that must have ended.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces bytes that copies will bring before the phase may end.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier of this block.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. Spelled without .release.cluster,
// which would put a fence of the whole device in front of every arrival.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank))
               : "memory");
}

__device__ __forceinline__ bool barrier_try(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  while (!barrier_try(barrier, parity)) {
  }
}

// Named barriers of a block, for `threads` of its threads.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Copies of boxes between a tensor in global memory and shared memory, by the copy engine. What
// lies outside of the tensor is read as zero and not written.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What L2 does with lines that copies bring: as usual, or they are the first to leave it.
enum LinePolicy { LINE_NORMAL = 0, LINE_EVICT_FIRST = 1 };

__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Brings the box at (x, y, z) to shared memory; `barrier` counts its bytes.
template <int POLICY>
__device__ __forceinline__ void load_box(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int y, int z) {
  if constexpr (POLICY == LINE_EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

// Brings the box to L2 only.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}

// The load to the same place of every block of the cluster whose bit is set in `blocks`; each
// counts it at its own barrier.
template <int POLICY>
__device__ __forceinline__ void load_box_multicast(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int y, int z,
    unsigned short blocks) {
  if constexpr (POLICY == LINE_EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
  }
}

// Writes a box from shared memory, which has to stay until store_wait_read. The kernel's end waits
// for the writes.
__device__ __forceinline__ void store_box(
    const TensorMap& map, unsigned source, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(source), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last PENDING groups of stores have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Shows what this thread wrote to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

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
      "setp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, "
      "%4, %5, %6, %7, "
      "%8, %9, %10, %11, "
      "%12, %13, %14, %15, "
      "%16, %17, %18, %19, "
      "%20, %21, %22, %23, "
      "%24, %25, %26, %27, "
      "%28, %29, %30, %31, "
      "%32, %33, %34, %35, "
      "%36, %37, %38, %39, "
      "%40, %41, %42, %43, "
      "%44, %45, %46, %47, "
      "%48, %49, %50, %51, "
      "%52, %53, %54, %55, "
      "%56, %57, %58, %59, "
      "%60, %61, %62, %63, "
      "%64, %65, %66, %67, "
      "%68, %69, %70, %71, "
      "%72, %73, %74, %75, "
      "%76, %77, %78, %79, "
      "%80, %81, %82, %83, "
      "%84, %85, %86, %87, "
      "%88, %89, %90, %91, "
      "%92, %93, %94, %95, "
      "%96, %97, %98, %99, "
      "%100, %101, %102, %103, "
      "%104, %105, %106, %107, "
      "%108, %109, %110, %111, "
      "%112, %113, %114, %115, "
      "%116, %117, %118, %119, "
      "%120, %121, %122, %123, "
      "%124, %125, %126, %127"
      "}, %128, %129, accumulate, 1, 1, 0, 1;\n"
      "}"
      :
      "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
      "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
      "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
      "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
      "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
      "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
      "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
      "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
      "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
      "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
      "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
      "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
      "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
      "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
      "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
      "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
      "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]),
      "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
      "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]),
      "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
      "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
      "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
      "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]),
      "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
      "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
      "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
      "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
      "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
      "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
      "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
      "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
      "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
      : "l"(left), "l"(right), "r"(accumulate));
  // clang-format on
}

// The order in which blocks take tiles of C. Clusters of CLUSTER_M x CLUSTER_N tiles are taken
// together; groups of RASTER_GROUP rows of clusters are walked column by column (columns and rows
// change places with RASTER_COLUMNS), so that what runs at once shares rows and columns.
struct Tile {
  int matrix, slice;  // of K, among those that blocks of other clusters have
  int row, col;       // of its first element
};

struct TileOrder {
  int groups_m, groups_n, count;

  __device__ __forceinline__ TileOrder(int batch, int m, int n)
      : groups_m((m + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M)),
        groups_n((n + CLUSTER_N * BLOCK_N - 1) / (CLUSTER_N * BLOCK_N)),
        count(groups_m * groups_n * SPLIT_K * batch) {}

  // The tile that block `rank` of the cluster has when it is the cluster's turn `index`.
  __device__ __forceinline__ Tile at(int index, int rank) const {
    const int per_slice = groups_m * groups_n;
    const int slice = index / per_slice;
    const int in_slice = index - slice * per_slice;
    const int fast = RASTER_COLUMNS ? groups_n : groups_m;
    const int slow = RASTER_COLUMNS ? groups_m : groups_n;
    const int start = in_slice / (slow * RASTER_GROUP) * RASTER_GROUP;
    const int height = fast - start < RASTER_GROUP ? fast - start : RASTER_GROUP;
    const int in_group = in_slice - start * slow;
    const int first = start + in_group % height;
    const int second = in_group / height;
    const int group_m = RASTER_COLUMNS ? second : first;
    const int group_n = RASTER_COLUMNS ? first : second;
    return {
        slice / SPLIT_K, slice % SPLIT_K, (group_m * CLUSTER_M + rank % CLUSTER_M) * BLOCK_M,
        (group_n * CLUSTER_N + rank / CLUSTER_M) * BLOCK_N};
  }
};

// How operands get to the tensor cores: one thread has the copy engine fill a ring of stages, the
// consumers multiply what is full and hand it back.

// A place in the ring, and the parity of the round.
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int stages) {
    const int passed = stage + stages;
    stage = passed % STAGES;
    parity ^= passed / STAGES & 1;
  }
};

// Steps of K, in blocks of BLOCK_K.
struct Slice {
  int first, count;
};

struct Stages {
  unsigned left, right;  // operands of stage 0 in shared memory
  unsigned full, empty;  // barriers of stage 0

  __device__ __forceinline__ unsigned left_at(int stage) const { return left + stage * LEFT_BYTES; }
  __device__ __forceinline__ unsigned right_at(int stage) const {
    return right + stage * RIGHT_BYTES;
  }
  __device__ __forceinline__ unsigned full_at(int stage) const { return full + stage * 8; }
  __device__ __forceinline__ unsigned empty_at(int stage) const { return empty + stage * 8; }
};

// Blocks of the cluster that want the same rows of an operand each bring a part of them, for all.
struct Share {
  int part;               // which one this block brings
  unsigned short blocks;  // a bit for each of those that want it
};

__device__ __forceinline__ Share share_of_a(int rank) {
  unsigned blocks = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER_N; ++i) blocks |= 1u << (rank % CLUSTER_M + i * CLUSTER_M);
  return {rank / CLUSTER_M, static_cast<unsigned short>(blocks)};
}
__device__ __forceinline__ Share share_of_b(int rank) {
  const unsigned blocks = ((1u << CLUSTER_M) - 1) << rank / CLUSTER_M * CLUSTER_M;
  return {rank % CLUSTER_M, static_cast<unsigned short>(blocks)};
}

// What this block brings of ROWS of an operand from `row` on, BLOCK_K steps of K at a time.
template <int ROWS, bool ACROSS, int SHARERS, int POLICY>
struct Operand {
  enum : int {
    BOXES = ACROSS ? (ROWS + 63) / 64 : BLOCK_K / 64,
    HEIGHT = ACROSS ? BLOCK_K : ROWS,  // rows of 128 bytes of a box, shared out
    PART = HEIGHT / SHARERS,
  };
  const TensorMap& map;
  int row, matrix;
  Share share;

  // Brings the steps from `k` on to shared memory.
  __device__ __forceinline__ void load(unsigned target, unsigned barrier, int k) const {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      const unsigned place = target + (i * HEIGHT + start()) * 128;
      if constexpr (SHARERS > 1) {
        load_box_multicast<POLICY>(place, map, barrier, x(i, k), y(k), matrix, share.blocks);
      } else {
        load_box<POLICY>(place, map, barrier, x(i, k), y(k), matrix);
      }
    }
  }
  // Brings them to L2.
  __device__ __forceinline__ void prefetch(int k) const {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) prefetch_box(map, x(i, k), y(k), matrix);
  }

 private:
  __device__ __forceinline__ int start() const { return (SHARERS > 1 ? share.part : 0) * PART; }
  __device__ __forceinline__ int x(int box, int k) const { return (ACROSS ? row : k) + box * 64; }
  __device__ __forceinline__ int y(int k) const { return (ACROSS ? k : row) + start(); }
};

// Both operands of a tile.
struct Operands {
  enum : int {
    LEFT_IS = SWAP_OPERANDS ? 2 : 1,  // as STREAMED_OPERAND counts
    RIGHT_IS = 3 - LEFT_IS,
    LEFT_POLICY = STREAMED_OPERAND == LEFT_IS ? LINE_EVICT_FIRST : LINE_NORMAL,
    RIGHT_POLICY = STREAMED_OPERAND == RIGHT_IS ? LINE_EVICT_FIRST : LINE_NORMAL,
  };
  Operand<LEFT_ROWS, LEFT_ACROSS, LEFT_SHARERS, LEFT_POLICY> left;
  Operand<MMA_N, RIGHT_ACROSS, RIGHT_SHARERS, RIGHT_POLICY> right;

  __device__ __forceinline__
  Operands(const TensorMap& left_map, const TensorMap& right_map, const Tile& tile, int rank)
      : left{
            left_map, SWAP_OPERANDS ? tile.col : tile.row, tile.matrix,
            SWAP_OPERANDS ? share_of_b(rank) : share_of_a(rank)},
        right{
            right_map, SWAP_OPERANDS ? tile.row : tile.col, tile.matrix,
            SWAP_OPERANDS ? share_of_a(rank) : share_of_b(rank)} {}
};

// Has L2 bring as much of a slice as the ring holds.
__device__ __forceinline__ void prefetch_stages(const Operands& operands, const Slice& slice) {
#pragma unroll 1
  for (int i = 0; i < STAGES && i < slice.count; ++i) {
    const int k = (slice.first + i) * BLOCK_K;
    operands.left.prefetch(k);
    operands.right.prefetch(k);
  }
}

// The producer's part of a tile. Its blocks of K follow those of the tile before in the ring.
__device__ __forceinline__ void fill_stages(
    const Stages& stages, Ring& ring, const Operands& operands, const Slice& slice) {
#pragma unroll 1
  for (int i = 0; i < slice.count; ++i) {
    const int k = (slice.first + i) * BLOCK_K;
    const unsigned full = stages.full_at(ring.stage);
    barrier_wait(stages.empty_at(ring.stage), ring.parity ^ 1);
    barrier_expect(full, LEFT_BYTES + RIGHT_BYTES);
    operands.left.load(stages.left_at(ring.stage), full, k);
    operands.right.load(stages.right_at(ring.stage), full, k);
    ring.advance();
  }
}

// Hands a stage back to every block that has copied into it: one arrival a warp.
__device__ __forceinline__ void release(const Stages& stages, int stage, int lane, int rank) {
  const unsigned empty = stages.empty_at(stage);
  if constexpr (CLUSTER_M * CLUSTER_N == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else {
    const bool shares =
        lane % CLUSTER_M == rank % CLUSTER_M || lane / CLUSTER_M == rank / CLUSTER_M;
    if (lane < CLUSTER_M * CLUSTER_N && shares) barrier_arrive_at(empty, lane);
  }
}

// A consumer's sums: MMA_ROWS times 64 rows of the left operand by MMA_N of the right one.
using Sums = fp32[MMA_ROWS][MMA_N / 2];

// Multiplies the stages of one tile; `first_row` is the consumer's first row of the left operand.
// Calls `hand_over` when all products are on their way.
template <typename HandOver>
__device__ __forceinline__ void multiply_stages(
    Sums& sums, const Stages& stages, Ring& ring, int blocks, int first_row, int lane, int rank,
    const HandOver& hand_over) {
  // Blocks of 64 rows are slabs across K, and follow each other in every 64 steps along K.
  constexpr int LEFT_64 = LEFT_ACROSS ? BLOCK_K * 128 : 64 * 128;
  const unsigned long long left =
      operand_descriptor(stages.left + first_row / 64 * LEFT_64, LEFT_ACROSS, BLOCK_K * 128);
  const unsigned long long right = operand_descriptor(stages.right, RIGHT_ACROSS, BLOCK_K * 128);
  int previous = -1;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(stages.full_at(ring.stage), ring.parity);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_K / 16; ++step) {
      const int left_step = LEFT_ACROSS ? step * 2048 : step / 4 * LEFT_ROWS * 128 + step % 4 * 32;
      const int right_step = RIGHT_ACROSS ? step * 2048 : step / 4 * MMA_N * 128 + step % 4 * 32;
#pragma unroll
      for (int i = 0; i < MMA_ROWS; ++i) {
        wgmma(
            sums[i], left + ((ring.stage * LEFT_BYTES + i * LEFT_64 + left_step) >> 4),
            right + ((ring.stage * RIGHT_BYTES + right_step) >> 4), block + step);
      }
    }
    wgmma_commit();
    wgmma_wait<MMA_IN_FLIGHT>();
    if constexpr (MMA_IN_FLIGHT == 0) {
      release(stages, ring.stage, lane, rank);
    } else {
      if (previous >= 0) release(stages, previous, lane, rank);
      previous = ring.stage;
    }
    ring.advance();
  }
  hand_over();
  if constexpr (MMA_IN_FLIGHT > 0) {
    wgmma_wait<0>();
    if (previous >= 0) release(stages, previous, lane, rank);
  }
}

// Slices of K that the blocks of a cluster multiply side by side. The others send their sums to
// shared memory of the first, which adds them up in the order of the slices: the same input gives
// the same bits.
enum : int {
  SENDERS = CLUSTER_K - 1,
  SENT_BYTES = MMA_ROWS * 64 * MMA_N * 4,  // by one consumer of one block
};

// A consumer's part: where sums arrive, the barrier that counts them in the first block, and the
// one that says to a sender that they have been read.
struct Exchange {
  unsigned inbox, arrived, read;
  unsigned parity = 0;

  // Four sums of a thread lie side by side, those of a warp one after the other.
  __device__ __forceinline__ static unsigned offset(int thread, int i, int j) {
    return ((i * (MMA_N / 8) + j / 4) * 128 + thread) * 16;
  }

  // Sends to the first block. Stores that count themselves need no fence.
  __device__ __forceinline__ void send(const Sums& sums, int rank, int thread) const {
    barrier_wait(read, parity ^ 1);
    const unsigned to = remote_address(inbox + (rank - 1) * SENT_BYTES, 0);
    const unsigned counter = remote_address(arrived, 0);
#pragma unroll
    for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < MMA_N / 2; j += 4) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
            "[%0], {%2, %3, %4, %5}, [%1];" ::"r"(to + offset(thread, i, j)),
            "r"(counter), "f"(sums[i][j]), "f"(sums[i][j + 1]), "f"(sums[i][j + 2]),
            "f"(sums[i][j + 3])
            : "memory");
      }
    }
  }

  // Adds what the others sent.
  __device__ __forceinline__ void receive(Sums& sums, const unsigned char* memory, int thread) {
    if (thread == 0) barrier_expect(arrived, SENDERS * SENT_BYTES);
    barrier_wait(arrived, parity);
#pragma unroll 1
    for (int sender = 0; sender < SENDERS; ++sender) {
#pragma unroll
      for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < MMA_N / 2; j += 4) {
          const float4 sent =
              *reinterpret_cast<const float4*>(memory + sender * SENT_BYTES + offset(thread, i, j));
          sums[i][j] += sent.x;
          sums[i][j + 1] += sent.y;
          sums[i][j + 2] += sent.z;
          sums[i][j + 3] += sent.w;
        }
      }
    }
    __syncwarp();
    if (thread % 32 < SENDERS) barrier_arrive_at(read, thread % 32 + 1);
  }
};

// Programmatic dependent launch: with PROGRAMMATIC_LAUNCH the next kernel on the stream may begin
// once all blocks of this one have, if it was launched so, and this one may have begun before the
// kernel ahead of it was done. Nothing that other kernels touch may be read or written before the
// wait. L2 may be told to fetch it: should the kernel ahead write to it still, L2 knows.
//
//   Loads must not be non-coherent: the assembler takes what they read to be constant, and moves
//   them to before the wait. Pointers that are not RESTRICT keep the compiler from making them so.
#define RESTRICT __restrict__
#undef RESTRICT
#define RESTRICT
__device__ __forceinline__ void let_next_launch_begin() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
__device__ __forceinline__ void wait_for_previous_launch() {
  if constexpr (PROGRAMMATIC_LAUNCH > 0) asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void fetch_ahead(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// What C gets is act(alpha * sum + beta * C + bias), in the type of sums, and rounded once.
enum Activation {
  ACTIVATION_NONE = 0,
  ACTIVATION_RELU = 1,
  ACTIVATION_GELU = 2,
  ACTIVATION_SILU = 3,
};

// Within 2 ulp: a correctly rounded quotient takes as long as the rest of an activation.
__device__ __forceinline__ fp32 quotient(fp32 left, fp32 right) {
  return __fdividef(left, right);
}
__device__ __forceinline__ fp64 quotient(fp64 left, fp64 right) {
  return left / right;
}

// NaN stays NaN.
template <typename T>
__device__ __forceinline__ T activated(T x) {
  if constexpr (ACTIVATION == ACTIVATION_RELU) {
    return x < 0 ? 0 : x;
  } else if constexpr (ACTIVATION == ACTIVATION_GELU) {
    constexpr T SQRT_HALF = 0.70710678118654752440;
    return static_cast<T>(0.5) * x * (1 + erf(x * SQRT_HALF));
  } else if constexpr (ACTIVATION == ACTIVATION_SILU) {
    // x / (1 + exp(-x)), with the exponential of what is negative: it never overflows.
    const T decay = exp(-fabs(x));
    return quotient(x < 0 ? x * decay : x, 1 + decay);
  } else {
    return x;
  }
}

// Where sums lie in the registers of a warpgroup, as the tensor cores leave them: warp w has rows
// 16 w to 16 w + 15 of 64, a thread two neighbours in each of two rows, eight apart, of every eight
// columns. Rows are those of the left operand: columns of C with SWAP_OPERANDS.
__device__ __forceinline__ int row_of_sum(int thread, int index) {
  return thread / 32 * 16 + thread % 32 / 4 + index / 2 % 2 * 8;
}
__device__ __forceinline__ int column_of_sum(int thread, int index) {
  return index / 4 * 8 + thread % 4 * 2 + index % 2;
}

// The part of C that a consumer's sums of one tile belong to.
struct Target {
  Output* c;  // of this matrix, or of this slice's sums
  long long ldc;
  const Output* bias;
  int m, n;
  int row, col;  // of the consumer's first sum
  int matrix, thread;
  fp32 alpha, beta;

  // A slice of K leaves its bare sums.
  __device__ __forceinline__ fp32 scaled(fp32 sum) const {
    return SPLIT_K == 1 ? alpha * sum : sum;
  }
};

// The bias of a thread's sums of COLUMNS columns of the right operand, from column `col` of C on: of
// two neighbours in every eight, or with SWAP_OPERANDS of two columns of C in all.
template <int COLUMNS>
struct Bias {
  enum : int {
    WIDTH = !SWAP_OPERANDS && ALIGN_C > 1 ? 2 : 1,
    PAIRS = SWAP_OPERANDS ? 1 : COLUMNS / 8,
  };
  Vector<Output, WIDTH> parts[PAIRS][2 / WIDTH];

  __device__ __forceinline__ void load(const Target& target, int col) {
    if constexpr (HAS_BIAS) {
      if (col + (SWAP_OPERANDS ? 64 : COLUMNS) <= target.n) {
        load_columns<true>(target, col);
      } else {
        load_columns<false>(target, col);
      }
    }
  }
  // Of sum number `index`.
  __device__ __forceinline__ fp32 at(int index) const {
    const int which = SWAP_OPERANDS ? index / 2 % 2 : index % 2;
    return convert<fp32>(parts[SWAP_OPERANDS ? 0 : index / 4][which / WIDTH].values[which % WIDTH]);
  }

 private:
  // WHOLE: all columns lie inside.
  template <bool WHOLE>
  __device__ __forceinline__ void load_columns(const Target& target, int col) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
      for (int j = 0; j < 2 / WIDTH; ++j) {
        const int first = col + (SWAP_OPERANDS ? row_of_sum(target.thread, 2 * j)
                                               : column_of_sum(target.thread, 4 * i + j));
        const Output* from = target.bias + first;
        parts[i][j] = WHOLE ? load_vector<WIDTH>(from) : load_inside<WIDTH>(from, target.n - first);
      }
    }
  }
};

// Where a consumer stages sums on their way, the barrier of its threads, and the map of C.
struct Staging {
  unsigned address;
  unsigned char* memory;
  int barrier;
  const TensorMap* map;
};

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

// The way of a consumer's sums to C where elements have two bytes: through shared memory, a portion
// at a time, and from there by the copy engine, or by threads where rows of C have no 16 bytes.
enum : int {
  // A portion: rows and columns of C.
  STAGED_ROWS = SWAP_OPERANDS ? STORE_COLUMNS : 64,
  STAGED_COLS = SWAP_OPERANDS ? 64 : STORE_COLUMNS,
  // The last portion of a row is narrower where they do not divide it.
  UNEVEN = !SWAP_OPERANDS && MMA_N % STORE_COLUMNS != 0,
  // Columns lie in boxes whose rows are as wide as the swizzle.
  COMMON_COLS = UNEVEN ? STAGED_COLS | MMA_N : STAGED_COLS,
  BOX_COLS = COMMON_COLS % 64 == 0 ? 64
  : COMMON_COLS % 32 == 0          ? 32
                                   : 16,
  BOX_BYTES = STAGED_ROWS * BOX_COLS * 2,
};

// Offset of an element of the portion. For the copy engine its swizzle, under which eight rows of
// 16 bytes lie in different banks; for threads, which go along the rows, an odd number of 16 bytes
// from row to row.
__device__ __forceinline__ int staged_offset(int row, int col) {
  if constexpr (!TMA_STORE) return (row * (STAGED_COLS / 8 | 1) * 8 + col) * 2;
  const int bytes = (row * BOX_COLS + col % BOX_COLS) * 2;
  const int swizzle = (bytes >> 7 & (BOX_COLS / 8 - 1)) << 4;
  return col / BOX_COLS * BOX_BYTES + (bytes ^ swizzle);
}

__device__ __forceinline__ unsigned pack(fp32 first, fp32 second) {
  return convert<Output>(first).bits | static_cast<unsigned>(convert<Output>(second).bits) << 16;
}

// Writes four 8 x 8 matrices, transposed with SWAP_OPERANDS; a lane gives the address of one row.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&rows)[4]) {
  if constexpr (SWAP_OPERANDS) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
                 : "memory");
  }
}

// Rounds the sums of a portion whose first element of C is (row, col), and stages them: COLUMNS of
// the right operand.
template <int COLUMNS>
__device__ __forceinline__ void stage_sums(
    const fp32* sums, unsigned buffer, const Target& target, const Bias<COLUMNS>& bias, int row,
    int col) {
  const int lane = target.thread % 32;
#pragma unroll
  for (int j = 0; j < COLUMNS / 2; j += 8) {
    unsigned rows[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      fp32 pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = target.scaled(sums[j + i + e]);
        if constexpr (READS_C) {
          const int down = row_of_sum(target.thread, j + i + e);
          const int along = column_of_sum(target.thread, j + i + e);
          const int r = row + (SWAP_OPERANDS ? along : down);
          const int s = col + (SWAP_OPERANDS ? down : along);
          if (r < target.m && s < target.n) {
            pair[e] += target.beta * convert<fp32>(target.c[r * target.ldc + s]);
          }
        }
        if constexpr (HAS_BIAS) pair[e] += bias.at(j + i + e);
        pair[e] = activated(pair[e]);
      }
      rows[i / 2] = pack(pair[0], pair[1]);
    }
    // Matrix i of the four: eight rows down with i % 2, eight columns along with i / 2.
    const int matrix = lane / 8;
    const int down = target.thread / 32 * 16 + matrix % 2 * 8;
    const int along = j * 2 + matrix / 2 * 8;
    store_matrices(
        buffer + (SWAP_OPERANDS ? staged_offset(along + lane % 8, down)
                                : staged_offset(down + lane % 8, along)),
        rows);
  }
}

// Whether the copy engine may write a portion from column `col` of C on. It writes whole 16 bytes:
// where the last ones of a row are not all of C, what follows the row would be overwritten,
// whatever extent the map of C states.
template <int COLS>
__device__ __forceinline__ bool ends_in_whole_chunks(const Target& target, int col) {
  return target.n % 8 == 0 || col + COLS <= target.n;
}

// Writes a staged portion whose first element of C is (row, col), side by side along the rows:
// ALIGN_C elements a thread at a time, which are 16 bytes at least.
template <int COLS>
__device__ __forceinline__ void store_aligned_rows(
    const Target& target, const Staging& staging, int row, int col) {
  constexpr int WIDTH = ALIGN_C < BOX_COLS ? ALIGN_C : BOX_COLS;
  constexpr int PER_ROW = COLS / WIDTH;
#pragma unroll 4
  for (int i = target.thread; i < STAGED_ROWS * PER_ROW; i += 128) {
    const int down = i / PER_ROW;
    const int along = i % PER_ROW * WIDTH;
    const int inside = row + down < target.m ? target.n - col - along : 0;
    const auto values = *reinterpret_cast<const Vector<Output, WIDTH>*>(
        staging.memory + staged_offset(down, along));
    store_inside(target.c + (row + down) * target.ldc + col + along, values, inside);
  }
}

// The same for rows that begin anywhere: 16 bytes of memory are cut out of the two times 16 bytes
// that they lie in as staged, so that all but the ends of a row are stored whole.
template <int COLS>
__device__ __forceinline__ void store_ragged_rows(
    const Target& target, const Staging& staging, int row, int col) {
  constexpr int CHUNKS = COLS / 8;
  const int columns = target.n - col < COLS ? target.n - col : COLS;
#pragma unroll 4
  for (int i = target.thread; i < STAGED_ROWS * (CHUNKS + 1); i += 128) {
    const int down = i / (CHUNKS + 1);
    if (row + down >= target.m) continue;
    Output* const begin = target.c + (row + down) * target.ldc + col;
    // Elements before the first 16 bytes that begin in the row: a chunk of their own.
    const int before = static_cast<int>(0 - reinterpret_cast<unsigned long long>(begin) / 2 & 7);
    const int chunk = i % (CHUNKS + 1) - 1;
    const int first = chunk * 8 + before;
    const auto staged = [&](int which) {
      const int inside = which < 0 ? 0 : which < CHUNKS ? which : CHUNKS - 1;
      return *reinterpret_cast<const Words*>(staging.memory + staged_offset(down, inside * 8));
    };
    union {
      Words words;
      Vector<Output, 8> vector;
    } values{cut(staged(chunk), staged(chunk + 1), before * 2)};
    if (first >= 0 && first + 8 <= columns) {
      store_vector(begin + first, values.vector);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (first + e >= 0 && first + e < columns) begin[first + e] = values.vector.values[e];
      }
    }
  }
}

// By the copy engine, in one thread, or by all.
template <int COLS>
__device__ __forceinline__ void store_portion(
    const Target& target, const Staging& staging, int row, int col) {
  if (TMA_STORE && ends_in_whole_chunks<COLS>(target, col)) {
    if (target.thread != 0) return;
#pragma unroll
    for (int i = 0; i < COLS / BOX_COLS; ++i) {
      const unsigned box = staging.address + i * BOX_BYTES;
      store_box(*staging.map, box, col + i * BOX_COLS, row, target.matrix);
    }
    store_commit();
    return;
  }
  if constexpr (ALIGN_C % 8 == 0) {
    store_aligned_rows<COLS>(target, staging, row, col);
  } else {
    store_ragged_rows<COLS>(target, staging, row, col);
  }
}

// A portion of COLUMNS of the right operand, the first of which is (row, col) of C.
template <int COLUMNS>
__device__ __forceinline__ void store_sums(
    const fp32* sums, const Target& target, const Staging& staging, int row, int col) {
  // Before the barrier, which hides the wait.
  Bias<COLUMNS> bias;
  bias.load(target, col);
  // The portion before has left shared memory.
  if (TMA_STORE && target.thread == 0) store_wait_read<0>();
  named_sync(staging.barrier, 128);
  stage_sums<COLUMNS>(sums, staging.address, target, bias, row, col);
  if constexpr (TMA_STORE) fence_async_proxy();
  named_sync(staging.barrier, 128);
  store_portion<SWAP_OPERANDS ? 64 : COLUMNS>(target, staging, row, col);
}

__device__ __forceinline__ void store_tile(
    const Sums& sums, const Target& target, const Staging& staging) {
  constexpr int WHOLE = MMA_N / STORE_COLUMNS * STORE_COLUMNS;
#pragma unroll
  for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < WHOLE; j += STORE_COLUMNS) {
      const int row = target.row + (SWAP_OPERANDS ? j : i * 64);
      const int col = target.col + (SWAP_OPERANDS ? i * 64 : j);
      store_sums<STORE_COLUMNS>(sums[i] + j / 2, target, staging, row, col);
    }
    if constexpr (UNEVEN) {
      store_sums<MMA_N % STORE_COLUMNS>(
          sums[i] + WHOLE / 2, target, staging, target.row + i * 64, target.col + WHOLE);
    }
  }
}

// Before shared memory goes away.
__device__ __forceinline__ void finish_stores(const Target& target) {
  if (TMA_STORE && target.thread == 0) store_wait_read<0>();
}

// What a block has to do at its turns: whole tiles, or even slices of them.
struct Part {
  Tile tile;
  Slice slice;
};

// What all threads of a block need.
struct Job {
  Stages stages;
  TileOrder order;
  int k;
  int rank;         // of the block in its cluster
  int first, step;  // turn of this cluster, and turns to its next one

  __device__ __forceinline__ Job(const Stages& stages, const TileOrder& order, int k, int rank)
      : stages(stages),
        order(order),
        k(k),
        rank(rank),
        first(static_cast<int>(blockIdx.x) / CLUSTER),
        step(static_cast<int>(gridDim.x) / CLUSTER) {}

  __device__ __forceinline__ bool has(int turn) const { return turn < order.count; }
  // The blocks of a cluster that share K have one part of the slice each.
  __device__ __forceinline__ Part part(int turn) const {
    const Tile tile = order.at(turn, CLUSTER_K > 1 ? 0 : rank);
    return {tile, slice(tile.slice * CLUSTER_K + (CLUSTER_K > 1 ? rank : 0))};
  }

 private:
  // Slices are as even as they can be, some are empty where K is short.
  __device__ __forceinline__ Slice slice(int slice) const {
    constexpr int SLICES = SPLIT_K * CLUSTER_K;
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const int spare = blocks % SLICES;
    return {
        blocks / SLICES * slice + (slice < spare ? slice : spare),
        blocks / SLICES + (slice < spare)};
  }
};

// There are none: nobody finishes what another one began.
struct Partials {};

// The producer: one thread. L2 may have its first stages before the launch ahead is done: should
// that one write to them, L2 knows.
__device__ __forceinline__ void produce(
    const Job& job, const TensorMap& left, const TensorMap& right) {
  if constexpr (PROGRAMMATIC_LAUNCH == 2) {
    if (job.has(job.first)) {
      const Part part = job.part(job.first);
      prefetch_stages(Operands(left, right, part.tile, job.rank), part.slice);
    }
  }
  wait_for_previous_launch();
  Ring ring;
#pragma unroll 1
  for (int turn = job.first; job.has(turn); turn += job.step) {
    const Part part = job.part(turn);
    fill_stages(job.stages, ring, Operands(left, right, part.tile, job.rank), part.slice);
  }
}

// A consumer: the threads of a warpgroup. Barrier 4 + consumer says that it is its turn with the
// tensor cores.
__device__ __forceinline__ void consume(
    const Job& job, Target target, const Staging& staging, Exchange exchange,
    const Partials& partials, const unsigned char* inbox, Output* c, long long batch_stride_c,
    int batch, int consumer) {
  wait_for_previous_launch();
  const int first_row = PINGPONG ? 0 : consumer * MMA_ROWS * 64;
  const int step = PINGPONG ? 2 * job.step : job.step;
  Ring ring;
  int turn = job.first;
  if (PINGPONG && consumer == 1) {
    if (job.has(turn)) {
      named_arrive(4, 256);
      ring.skip(job.part(turn).slice.count);
    }
    turn += job.step;
  }
#pragma unroll 1
  for (; job.has(turn); turn += step) {
    const Part part = job.part(turn);
    const Tile& tile = part.tile;
    Sums sums;
    if (part.slice.count == 0) {
#pragma unroll
      for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < MMA_N / 2; ++j) sums[i][j] = 0;
      }
    }
    if constexpr (PINGPONG) named_sync(4 + consumer, 256);
    const bool other_follows = PINGPONG && job.has(turn + job.step);
    multiply_stages(
        sums, job.stages, ring, part.slice.count, first_row, target.thread % 32, job.rank, [&] {
          if (other_follows) named_arrive(5 - consumer, 256);
        });
    if (other_follows) ring.skip(job.part(turn + job.step).slice.count);
    if constexpr (CLUSTER_K > 1) {
      if (job.rank > 0) {
        exchange.send(sums, job.rank, target.thread);
      } else {
        exchange.receive(sums, inbox, target.thread);
      }
      exchange.parity ^= 1;
      if (job.rank > 0) continue;
    }
    const long long before = static_cast<long long>(tile.slice) * batch + tile.matrix;
    target.c = c + before * batch_stride_c;
    target.row = tile.row + (SWAP_OPERANDS ? 0 : first_row);
    target.col = tile.col + (SWAP_OPERANDS ? first_row : 0);
    target.matrix = tile.matrix;
    store_tile(sums, target, staging);
  }
  finish_stores(target);
}

__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

#define IN_CLUSTERS
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) tunegen_matmul_wgmma(
    const __grid_constant__ TensorMap left_map,   // B with SWAP_OPERANDS, else A
    const __grid_constant__ TensorMap right_map,  // A with SWAP_OPERANDS, else B
    const __grid_constant__ TensorMap c_map,      // any where C is not stored through it
    Output* RESTRICT c,  // (batch, M, N), read only when READS_C; with SPLIT_K > 1 the partial
                         // sums, (SPLIT_K, batch, M, N)
    int batch, int m, int n, int k, long long ldc, long long batch_stride_c, fp32 alpha,
    fp32 beta) {
  const Output* bias = nullptr;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);
  const int inbox = STAGES_BYTES + CONSUMERS * STORE_BYTES;
  const unsigned barriers = base + inbox + INBOX_BYTES;
  const unsigned exchanges = barriers + 16 * STAGES;
  const Stages stages{base, base + STAGES * LEFT_BYTES, barriers, barriers + 8 * STAGES};
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Job job(stages, TileOrder(batch, m, n), k, rank);
  const Partials partials{};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(job.stages.full_at(i), 1);
      barrier_init(job.stages.empty_at(i), 4 * TILE_CONSUMERS * (CLUSTER_M + CLUSTER_N - 1));
    }
    for (int i = 0; i < CONSUMERS; ++i) {
      barrier_init(exchanges + 16 * i, 1);
      barrier_init(exchanges + 16 * i + 8, 4);
    }
    barrier_init_fence();
    prefetch_map(left_map);
    prefetch_map(right_map);
  }
  if constexpr (CLUSTER > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  let_next_launch_begin();

  // A warpgroup's role is known to the compiler to be the same for a whole warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    if constexpr (CONSUMERS > 1) set_registers_down<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(job, left_map, right_map);
    __syncwarp();
  } else {
    if constexpr (CONSUMERS > 1) set_registers_up<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const int staged = STAGES_BYTES + consumer * STORE_BYTES;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const Target target{c, ldc, bias, m, n, 0, 0, 0, thread, alpha, beta};
    const Staging staging{base + staged, shared + staged, 1 + consumer, &c_map};
    const int sent = inbox + consumer * (CLUSTER_K - 1) * SENT_BYTES;
    const Exchange exchange{base + sent, exchanges + 16 * consumer, exchanges + 16 * consumer + 8};
    consume(
        job, target, staging, exchange, partials, shared + sent, c, batch_stride_c, batch,
        consumer);
    __syncwarp();
  }
  // A block's shared memory stays until the others of the cluster are done with it.
  if constexpr (CLUSTER > 1) cluster_sync();
}

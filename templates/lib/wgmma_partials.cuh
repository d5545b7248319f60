/*# SPDX-License-Identifier: Apache-2.0 #*/
// Sums of tiles that others finish. A cluster leaves one part at most; what is left lies as
// Exchange has it.
struct Partials {
  enum : int { SLOT = MMA_ROWS * MMA_N / 8 * 128 };  // four sums each
  int* flags;
  float4* slots;

  // Leaves sums for the cluster that finishes the tile.
  __device__ __forceinline__ void leave(
      const Sums& sums, const Job& job, int consumer, int thread, int barrier) const {
    const int own = slot(job, job.cluster(), consumer);
    float4* const to = slots + static_cast<long long>(own) * SLOT + thread;
#pragma unroll
    for (int i = 0; i < MMA_ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < MMA_N / 2; j += 4) {
        __stcg(
            to + (i * (MMA_N / 8) + j / 4) * 128,
            make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
      }
    }
    named_sync(barrier, 128);
    if (thread == 0) {
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + own) : "memory");
    }
  }

  // Adds what others have left of a tile, in the order of their numbers: the same input gives the
  // same bits.
  __device__ __forceinline__ void add(
      Sums& sums, const Job& job, int consumer, int thread, const Staging& staging) const {
    const int first = job.range.first_sharer;
    if (thread == 0) {
      // What was staged last has left shared memory.
      if constexpr (TMA_STORE) store_wait_read<0>();
#pragma unroll 1
      for (int other = first; other < job.cluster(); ++other) {
        wait_for(flags + slot(job, other, consumer));
      }
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    named_sync(staging.barrier, 128);
#pragma unroll 1
    for (int other = first; other < job.cluster(); ++other) {
      const long long theirs = slot(job, other, consumer);
      add_slot(sums, slots + theirs * SLOT + thread, thread, staging);
    }
  }

 private:
  // Sums leave few registers for loads under way: they pass through the thread's own places where
  // sums are staged, as many at once as there are, if any. In the workspace 128 threads lie side by
  // side.
  __device__ __forceinline__ static void add_slot(
      Sums& sums, const float4* from, int thread, const Staging& staging) {
    enum : int {
      ALL = SLOT / 128,
      STAGED = STORE_BYTES / (128 * 16),
      PLACES = STAGED == 0 ? 1
      : STAGED < ALL       ? STAGED
                           : ALL,
    };
    float4* const places = reinterpret_cast<float4*>(staging.memory) + thread;
    if constexpr (STAGED > 0) {
#pragma unroll
      for (int i = 0; i < PLACES; ++i) {
        copy_async<16>(places + i * 128, from + i * 128);
        copy_async_commit();
      }
    }
#pragma unroll
    for (int i = 0; i < ALL; ++i) {
      float4 left;
      if constexpr (STAGED > 0) {
        copy_async_wait<PLACES - 1>();
        left = places[i % PLACES * 128];
      } else {
        left = __ldcg(from + i * 128);
      }
      fp32* const four = sums[i / (MMA_N / 8)] + i % (MMA_N / 8) * 4;
      four[0] += left.x;
      four[1] += left.y;
      four[2] += left.z;
      four[3] += left.w;
      if constexpr (STAGED > 0) {
        if (i + PLACES < ALL) copy_async<16>(places + i % PLACES * 128, from + (i + PLACES) * 128);
        copy_async_commit();
      }
    }
  }
  // Consumers that take turns have whole tiles, and either may have the part that is left.
  __device__ __forceinline__ static int slot(const Job& job, int cluster, int consumer) {
    const int block = cluster * CLUSTER + job.rank;
    return block * TILE_CONSUMERS + (PINGPONG ? 0 : consumer);
  }
  // Leaves the flag as it was, for the next call. Acquires nothing: a fence each time round would
  // be slow, one behind all flags does.
  __device__ __forceinline__ static void wait_for(int* flag) {
    int value;
    do {
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    } while (value == 0);
    *flag = 0;
  }
};

/*# SPDX-License-Identifier: Apache-2.0 #*/
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

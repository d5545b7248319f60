// SPDX-License-Identifier: Apache-2.0
// The seam between a kernel built for the host, the runtime that runs its threads, and Python.
#pragma once

#include <stddef.h>

extern "C" {

struct emulator_uint3 {
  unsigned x, y, z;
};

struct EmulatorLaunch {
  emulator_uint3 grid, block;
  unsigned shared_bytes;   // dynamic shared memory
  unsigned seed;           // of the order in which blocks, and threads between barriers, run
  unsigned limit_s;        // processor time after which the kernel counts as hanging
  emulator_uint3 cluster;  // of blocks that run side by side; an extent of 0 is one of 1
};

enum EmulatorFaultKind { kNone, kMemory, kAlignment, kUndefined, kBarrier, kHang };

struct EmulatorFault {
  int kind;
  int line;  // of the generated source, 0 where unknown
  const void* address;
  emulator_uint3 block, thread;
  char message[200];
};

// Which threads wait for one another.
enum EmulatorScope { kWarp, kBlock, kCluster };

// Runs every thread of every block; the kind of fault, kNone for a launch that went well.
int emulator_run(
    const EmulatorLaunch* launch, void (*entry)(void**), void** arguments, char* shared_start,
    char* shared_stop, EmulatorFault* fault);

// The dynamic shared memory of the running block.
void* emulator_dynamic_shared();

// What a thread of a kernel calls; `line` is for messages.
void emulator_barrier(EmulatorScope scope, int line);
// What the thread of the same warp whose lane differs in `lane_mask` gives.
unsigned long long emulator_exchange(unsigned long long given, int lane_mask, int line);
// What each lane of the warp gives, in their order.
void emulator_gather_bytes(const void* given, size_t bytes, void* all, int line);
// Where block `rank` of the cluster has what this one has at `address` of its shared memory.
const void* emulator_shared_of(int rank, const void* address, int line);
void emulator_async_copy(void* target, const void* source, int bytes, int source_bytes, int line);
void emulator_async_commit();
void emulator_async_wait(int groups_in_flight);
}

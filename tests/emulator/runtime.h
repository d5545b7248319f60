// SPDX-License-Identifier: Apache-2.0
// The seam between a kernel built for the host, the runtime that runs its threads, and Python.
#pragma once

extern "C" {

struct emulator_uint3 {
  unsigned x, y, z;
};

struct EmulatorLaunch {
  emulator_uint3 grid, block;
  unsigned shared_bytes;  // dynamic shared memory
  unsigned seed;          // of the order in which blocks, and threads between barriers, run
  unsigned limit_s;       // processor time after which the kernel counts as hanging
};

enum EmulatorFaultKind { kNone, kMemory, kAlignment, kUndefined, kBarrier, kHang };

struct EmulatorFault {
  int kind;
  int line;  // of the generated source, 0 where unknown
  const void* address;
  emulator_uint3 block, thread;
  char message[200];
};

// Runs every thread of every block; the kind of fault, kNone for a launch that went well.
int emulator_run(
    const EmulatorLaunch* launch, void (*entry)(void**), void** arguments, char* shared_start,
    char* shared_stop, EmulatorFault* fault);

// The dynamic shared memory of the running block.
void* emulator_dynamic_shared();

// What a thread of a kernel calls; `line` is for messages.
void emulator_barrier(int line);
void emulator_async_copy(void* target, const void* source, int bytes, int source_bytes, int line);
void emulator_async_commit();
void emulator_async_wait(int groups_in_flight);
}

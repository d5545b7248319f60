// SPDX-License-Identifier: Apache-2.0
// Runs the threads of one block at a time as fibers of this one OS thread.
//
// Between two barriers each thread runs without interruption, in an order drawn from a seed: what
// one thread reads before another has written it is poison, so a missing barrier shows. Faults
// (wild addresses, undefined arithmetic, barriers that not all threads reach, a kernel that does
// not end) leave the launch by a long jump and become a value.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <utility>
#include <vector>

extern "C" {
emulator_uint3 threadIdx, blockIdx, blockDim, gridDim;
}

namespace {

constexpr int kUnset = 0xff;  // a NaN in every floating-point type
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 256 << 10;
constexpr size_t kSharedFence = 64 << 20;

enum class State { kReady, kAtBarrier, kReturned };

struct AsyncCopy {
  void* target;
  const void* source;
  size_t bytes, source_bytes;
};

struct Thread {
  ucontext_t context;
  emulator_uint3 index;
  State state;
  int line;  // of the barrier at which it waits
  std::vector<AsyncCopy> issued;
  std::vector<std::vector<AsyncCopy>> committed;
};

struct Region {
  char* start;
  size_t bytes;
};

// An order drawn from a seed (a linear congruential generator, its upper bits).
class Shuffle {
 public:
  Shuffle(size_t count, unsigned seed) : state_(seed) {
    for (size_t i = 0; i < count; ++i) order.push_back(i);
  }
  void next() {
    for (size_t i = order.size(); i > 1; --i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      std::swap(order[i - 1], order[(state_ >> 33) % i]);
    }
  }
  std::vector<size_t> order;

 private:
  unsigned long long state_;
};

// Whole pages of memory between two fences that fault when touched.
Region fenced(size_t bytes, size_t fence) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* base = mmap(nullptr, bytes + 2 * fence, PROT_NONE, flags, -1, 0);
  if (base == MAP_FAILED) abort();
  char* start = static_cast<char*>(base) + fence;
  if (mprotect(start, bytes, PROT_READ | PROT_WRITE)) abort();
  return {start, bytes};
}

ucontext_t scheduler;
sigjmp_buf escape;
Thread* current;
std::vector<Thread> threads;
std::vector<Region> stacks;
Region shared;
char* dynamic_shared;
void (*kernel_entry)(void**);
void** kernel_arguments;
EmulatorFault* report;

[[noreturn]] void fail(
    EmulatorFaultKind kind, const char* message, int line = 0, const void* address = nullptr) {
  report->kind = kind;
  report->line = line;
  report->address = address;
  report->block = blockIdx;
  report->thread = current->index;
  snprintf(report->message, sizeof report->message, "%s", message);
  siglongjmp(escape, 1);
}

void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGVTALRM) fail(kHang, "did not end within its time limit");
  fail(kMemory, "touched memory outside of its operands", 0, info->si_addr);
}

// Signal handlers, on a stack of their own, for the length of one launch.
class SignalGuard {
 public:
  explicit SignalGuard(unsigned limit_s) {
    static Region stack = fenced(kStackBytes, kStackBytes);
    stack_t alternate = {};
    alternate.ss_sp = stack.start;
    alternate.ss_size = stack.bytes;
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &action, &old_actions_[i]);
    itimerval limit = {{0, 0}, {static_cast<time_t>(limit_s), 0}};
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  }
  ~SignalGuard() {
    itimerval off = {};
    setitimer(ITIMER_VIRTUAL, &off, nullptr);
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals = 3;
  static constexpr int kNumbers[kSignals] = {SIGSEGV, SIGBUS, SIGVTALRM};
  struct sigaction old_actions_[kSignals];
  stack_t old_stack_;
};

void fiber_main() {
  kernel_entry(kernel_arguments);
  current->state = State::kReturned;  // uc_link goes back to the scheduler
}

void start(Thread& thread, const Region& stack) {
  thread.state = State::kReady;
  thread.issued.clear();
  thread.committed.clear();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = stack.start;
  thread.context.uc_stack.ss_size = stack.bytes;
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, fiber_main, 0);
}

void resume(Thread& thread) {
  current = &thread;
  threadIdx = thread.index;
  swapcontext(&scheduler, &thread.context);
}

// Lets all threads go on once each of them stands at the same barrier; false when all are done.
// From sm_70 on the hardware lets a thread that has returned count as one that waits. No kernel
// here needs that, and one that does has usually lost a thread by mistake.
bool release() {
  const Thread* waiting = nullptr;
  for (const Thread& thread : threads) {
    if (thread.state == State::kAtBarrier) waiting = &thread;
  }
  if (!waiting) return false;
  for (Thread& thread : threads) {
    current = &thread;
    if (thread.state == State::kReturned) {
      fail(kBarrier, "returned while other threads wait at a barrier", waiting->line);
    }
    if (thread.line != waiting->line) {
      fail(kBarrier, "waits at another barrier than other threads do", thread.line);
    }
    thread.state = State::kReady;
  }
  return true;
}

void run_block(Shuffle& shuffle) {
  for (size_t i = 0; i < threads.size(); ++i) start(threads[i], stacks[i]);
  do {
    shuffle.next();
    for (size_t i : shuffle.order) {
      if (threads[i].state == State::kReady) resume(threads[i]);
    }
  } while (release());
}

void run_grid(const EmulatorLaunch& launch, char* shared_start, char* shared_stop) {
  const emulator_uint3 grid = launch.grid;
  Shuffle blocks(size_t{grid.x} * grid.y * grid.z, launch.seed);
  Shuffle order(threads.size(), launch.seed);
  blocks.next();
  for (size_t block : blocks.order) {
    blockIdx = {
        static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
        static_cast<unsigned>(block / grid.x / grid.y)};
    memset(shared.start, kUnset, shared.bytes);
    memset(shared_start, kUnset, shared_stop - shared_start);
    run_block(order);
  }
}

void prepare(const EmulatorLaunch& launch) {
  gridDim = launch.grid;
  blockDim = launch.block;
  threads.clear();
  threads.resize(size_t{launch.block.x} * launch.block.y * launch.block.z);
  for (size_t i = 0; i < threads.size(); ++i) {
    const emulator_uint3 block = launch.block;
    threads[i].index = {
        static_cast<unsigned>(i % block.x), static_cast<unsigned>(i / block.x % block.y),
        static_cast<unsigned>(i / block.x / block.y)};
  }
  current = threads.data();
  while (stacks.size() < threads.size()) stacks.push_back(fenced(kStackBytes, kStackBytes));
  if (!shared.start) shared = fenced(kSharedBytes, kSharedFence);
  // Its end lies at the fence, as far as the alignment that every launch has allows.
  dynamic_shared = shared.start + shared.bytes - (launch.shared_bytes + 15) / 16 * 16;
}

}  // namespace

extern "C" {

int emulator_run(
    const EmulatorLaunch* launch, void (*entry)(void**), void** arguments, char* shared_start,
    char* shared_stop, EmulatorFault* fault) {
  kernel_entry = entry;
  kernel_arguments = arguments;
  report = fault;
  report->kind = kNone;
  prepare(*launch);
  SignalGuard guard(launch->limit_s);
  if (sigsetjmp(escape, 1) == 0) run_grid(*launch, shared_start, shared_stop);
  return report->kind;
}

void* emulator_dynamic_shared() {
  return dynamic_shared;
}

void emulator_barrier(int line) {
  current->state = State::kAtBarrier;
  current->line = line;
  swapcontext(&current->context, &scheduler);
}

// The target is undefined until the copy is waited for. Copying then, not now, shows a missing
// wait; poisoning now shows a target that others still read.
void emulator_async_copy(void* target, const void* source, int bytes, int source_bytes, int line) {
  const size_t addresses = reinterpret_cast<size_t>(target) | reinterpret_cast<size_t>(source);
  if (addresses % bytes) fail(kAlignment, "misaligned asynchronous copy", line, source);
  memset(target, kUnset, bytes);
  current->issued.push_back(
      {target, source, static_cast<size_t>(bytes), static_cast<size_t>(source_bytes)});
}

void emulator_async_commit() {
  current->committed.push_back(std::move(current->issued));
  current->issued.clear();
}

void emulator_async_wait(int groups_in_flight) {
  auto& groups = current->committed;
  while (groups.size() > static_cast<size_t>(groups_in_flight)) {
    for (const AsyncCopy& copy : groups.front()) {
      memset(copy.target, 0, copy.bytes);
      memcpy(copy.target, copy.source, copy.source_bytes);
    }
    groups.erase(groups.begin());
  }
}

// What the compiler calls where -fsanitize finds a fault; each handler is first told where.
struct SanitizerLocation {
  const char* file;
  unsigned line, column;
};
int kernel_line(const SanitizerLocation* where) {
  return strstr(where->file, "kernel.cu") ? static_cast<int>(where->line) : 0;
}
#define SANITIZER_HANDLER(name, message)                       \
  void __ubsan_handle_##name(const SanitizerLocation* where) { \
    fail(kUndefined, message, kernel_line(where));             \
  }
SANITIZER_HANDLER(out_of_bounds, "array index out of bounds")
SANITIZER_HANDLER(add_overflow, "signed integer overflow")
SANITIZER_HANDLER(sub_overflow, "signed integer overflow")
SANITIZER_HANDLER(mul_overflow, "signed integer overflow")
SANITIZER_HANDLER(negate_overflow, "signed integer overflow")
SANITIZER_HANDLER(divrem_overflow, "integer division by zero or overflow")
SANITIZER_HANDLER(shift_out_of_bounds, "shift by a negative or too large count")
SANITIZER_HANDLER(builtin_unreachable, "end of a path that cannot be reached")
void __ubsan_handle_type_mismatch_v1(const SanitizerLocation* where, const void* address) {
  fail(kAlignment, "misaligned access", kernel_line(where), address);
}
}

// SPDX-License-Identifier: Apache-2.0
// Runs the threads of one block, or cluster, at a time as fibers of this one OS thread.
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

#include <algorithm>
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
constexpr size_t kWarpThreads = 32;
constexpr size_t kGatheredBytes = 96;  // of a lane, for one instruction on matrices

enum class State { kReady, kAtBarrier, kReturned };

struct AsyncCopy {
  void* target;
  const void* source;
  size_t bytes, source_bytes;
};

struct Thread {
  ucontext_t context;
  emulator_uint3 index, block;
  size_t rank;  // of its block in the cluster
  State state;
  EmulatorScope scope;  // of the barrier at which it waits
  int line;
  unsigned long long given[2];  // to its warp, in turns: the last but one has been taken by all
  char gathered[2][kGatheredBytes];  // likewise
  unsigned exchanges;
  std::vector<AsyncCopy> issued;
  std::vector<std::vector<AsyncCopy>> committed;
};

struct Region {
  char* start;
  size_t bytes;
};

// Numbers drawn from a seed (a linear congruential generator, its upper bits).
class Chance {
 public:
  explicit Chance(unsigned seed) : state_(seed) {}
  size_t below(size_t limit) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % limit;
  }

 private:
  unsigned long long state_;
};

// An order drawn from a seed.
class Shuffle {
 public:
  Shuffle(size_t count, unsigned seed) : chance_(seed) {
    for (size_t i = 0; i < count; ++i) order.push_back(i);
  }
  void next() {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[chance_.below(i)]);
  }
  std::vector<size_t> order;

 private:
  Chance chance_;
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
std::vector<Region> shared;  // of each block of a cluster
size_t shared_bytes;         // dynamic
size_t block_threads;
void (*kernel_entry)(void**);
void** kernel_arguments;
EmulatorFault* report;

[[noreturn]] void fail(
    EmulatorFaultKind kind, const char* message, int line = 0, const void* address = nullptr) {
  report->kind = kind;
  report->line = line;
  report->address = address;
  report->block = current->block;
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
  thread.exchanges = 0;
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
  blockIdx = thread.block;
  swapcontext(&scheduler, &thread.context);
}

// Those threads that wait for one another in a scope: [first, stop).
struct Group {
  size_t first, stop;
};
Group group_of(size_t thread, EmulatorScope scope) {
  if (scope == kCluster) return {0, threads.size()};
  const size_t block = thread / block_threads * block_threads;
  if (scope == kBlock) return {block, block + block_threads};
  const size_t warp = block + (thread - block) / kWarpThreads * kWarpThreads;
  return {warp, std::min(warp + kWarpThreads, block + block_threads)};
}

// The first thread of a group that does not stand where `waiting` does.
const Thread* missing(const Group& group, const Thread& waiting) {
  for (size_t i = group.first; i < group.stop; ++i) {
    const Thread& thread = threads[i];
    const bool waits = thread.state == State::kAtBarrier;
    if (!waits || thread.scope != waiting.scope || thread.line != waiting.line) return &thread;
  }
  return nullptr;
}

// Lets the threads of groups go on that all stand at the same barrier: of one such group at least,
// of the others by chance, since warps and blocks do not keep step. False when all threads are
// done. From sm_70 on the hardware lets a thread that has returned count as one that waits. No
// kernel here needs that, and one that does has usually lost a thread by mistake.
bool release(Chance& chance) {
  std::vector<Group> complete;
  const Thread* absent = nullptr;
  const Thread* awaited_by = nullptr;
  for (size_t i = 0; i < threads.size(); ++i) {
    if (threads[i].state != State::kAtBarrier) continue;
    const Group group = group_of(i, threads[i].scope);
    if (const Thread* thread = missing(group, threads[i])) {
      absent = thread;
      awaited_by = &threads[i];
    } else {
      complete.push_back(group);
      i = group.stop - 1;
    }
  }
  if (complete.empty() && absent) {
    current = const_cast<Thread*>(absent);
    if (absent->state == State::kReturned) {
      fail(kBarrier, "returned while other threads wait at a barrier", awaited_by->line);
    }
    fail(kBarrier, "waits at another barrier than other threads do", absent->line);
  }
  const size_t certain = complete.empty() ? 0 : chance.below(complete.size());
  for (size_t i = 0; i < complete.size(); ++i) {
    if (i != certain && chance.below(2)) continue;
    for (size_t j = complete[i].first; j < complete[i].stop; ++j) {
      threads[j].state = State::kReady;
    }
  }
  return !complete.empty();
}

// One block, or the blocks of one cluster side by side.
void run_together(Shuffle& shuffle, Chance& chance) {
  for (size_t i = 0; i < threads.size(); ++i) start(threads[i], stacks[i]);
  do {
    shuffle.next();
    for (size_t i : shuffle.order) {
      if (threads[i].state == State::kReady) resume(threads[i]);
    }
  } while (release(chance));
}

size_t volume(const emulator_uint3& extents) {
  return size_t{extents.x} * extents.y * extents.z;
}

emulator_uint3 cluster_of(const EmulatorLaunch& launch) {
  const emulator_uint3 given = launch.cluster;
  return {std::max(given.x, 1u), std::max(given.y, 1u), std::max(given.z, 1u)};
}

emulator_uint3 position(size_t index, const emulator_uint3& extents) {
  return {
      static_cast<unsigned>(index % extents.x),
      static_cast<unsigned>(index / extents.x % extents.y),
      static_cast<unsigned>(index / extents.x / extents.y)};
}

void run_grid(const EmulatorLaunch& launch, char* shared_start, char* shared_stop) {
  const emulator_uint3 cluster = cluster_of(launch);
  const emulator_uint3 clusters = {
      launch.grid.x / cluster.x, launch.grid.y / cluster.y, launch.grid.z / cluster.z};
  if (volume(clusters) * volume(cluster) != volume(launch.grid)) {
    fail(kUndefined, "the grid is not whole clusters");
  }
  if (volume(cluster) > 1 && shared_stop != shared_start) {
    fail(kUndefined, "blocks of a cluster have no static shared variables of their own here");
  }
  Shuffle blocks(volume(clusters), launch.seed);
  Shuffle order(threads.size(), launch.seed);
  Chance chance(launch.seed);
  blocks.next();
  for (size_t index : blocks.order) {
    const emulator_uint3 at = position(index, clusters);
    for (Thread& thread : threads) {
      const emulator_uint3 in_cluster = position(thread.rank, cluster);
      thread.block = {
          at.x * cluster.x + in_cluster.x, at.y * cluster.y + in_cluster.y,
          at.z * cluster.z + in_cluster.z};
    }
    for (const Region& region : shared) memset(region.start, kUnset, region.bytes);
    memset(shared_start, kUnset, shared_stop - shared_start);
    run_together(order, chance);
  }
}

void prepare(const EmulatorLaunch& launch) {
  gridDim = launch.grid;
  blockDim = launch.block;
  block_threads = volume(launch.block);
  threads.clear();
  threads.resize(block_threads * volume(cluster_of(launch)));
  for (size_t i = 0; i < threads.size(); ++i) {
    threads[i].index = position(i % block_threads, launch.block);
    threads[i].rank = i / block_threads;
  }
  current = threads.data();
  while (stacks.size() < threads.size()) stacks.push_back(fenced(kStackBytes, kStackBytes));
  while (shared.size() < volume(cluster_of(launch))) {
    shared.push_back(fenced(kSharedBytes, kSharedFence));
  }
  shared_bytes = launch.shared_bytes;
}

// Its end lies at the fence, as far as the alignment that every launch has allows.
char* dynamic_shared_of(size_t rank) {
  return shared[rank].start + shared[rank].bytes - (shared_bytes + 15) / 16 * 16;
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
  return dynamic_shared_of(current->rank);
}

void emulator_barrier(EmulatorScope scope, int line) {
  current->state = State::kAtBarrier;
  current->scope = scope;
  current->line = line;
  swapcontext(&current->context, &scheduler);
}

unsigned long long emulator_exchange(unsigned long long given, int lane_mask, int line) {
  const unsigned turn = current->exchanges++ % 2;
  current->given[turn] = given;
  emulator_barrier(kWarp, line);
  const size_t own = current - threads.data();
  const Group warp = group_of(own, kWarp);
  const size_t other = warp.first + ((own - warp.first) ^ lane_mask);
  if (other >= warp.stop)
    fail(kUndefined, "exchanges with a lane that the warp does not have", line);
  return threads[other].given[turn];
}

void emulator_gather_bytes(const void* given, size_t bytes, void* all, int line) {
  if (bytes > kGatheredBytes) fail(kUndefined, "gives more than a lane may", line);
  const unsigned turn = current->exchanges++ % 2;
  memcpy(current->gathered[turn], given, bytes);
  emulator_barrier(kWarp, line);
  const Group warp = group_of(current - threads.data(), kWarp);
  if (warp.stop - warp.first != kWarpThreads) fail(kUndefined, "needs a whole warp", line);
  for (size_t i = 0; i < kWarpThreads; ++i) {
    memcpy(static_cast<char*>(all) + i * bytes, threads[warp.first + i].gathered[turn], bytes);
  }
}

const void* emulator_shared_of(int rank, const void* address, int line) {
  const size_t blocks = threads.size() / block_threads;
  if (rank < 0 || static_cast<size_t>(rank) >= blocks) {
    fail(kUndefined, "the cluster has no block of this rank", line);
  }
  const char* const own = dynamic_shared_of(current->rank);
  return dynamic_shared_of(rank) + (static_cast<const char*>(address) - own);
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

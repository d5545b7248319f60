// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: as much of libcuda as tunegen calls, over the host's memory.
//
// What is put on a stream runs at once, and a stream that captures notes it. A module's image is
// the path of a kernel that the emulator has built. A kernel's fault loses the context, as on a
// device. What cannot be right (a wild address, a handle that is none, a call that must not be
// made while a stream captures) is answered with the error that the driver would give.
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../emulator/runtime.h"

namespace {

enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kUnsupportedPtxVersion = 222,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kCaptureUnsupported = 900,
};

using Address = unsigned long long;
using Launcher = int (*)(const EmulatorLaunch*, void**, EmulatorFault*);
using Action = std::function<Status()>;

struct Kernel {
  void* library;
  Launcher launch;
  std::string signature;
  int shared_limit;
};
struct Event {
  bool recorded;
  timespec at;
};
struct Graph {
  std::vector<Action> actions;
};
struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const struct Attribute* attributes;
  unsigned attribute_count;
};
struct Attribute {  // CUlaunchAttribute
  int id, padding;
  unsigned cluster[16];
};

// What cuTensorMapEncodeTiled was given, in 128 bytes. The real ones are the driver's secret.
struct TensorMap {
  uint64_t address, extents[5], strides[4];
  uint32_t box[5];
  uint16_t type, rank, swizzle, promotion;
  uint32_t unused[5];
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap has 128 bytes");

constexpr int kSharedLimit = 227 << 10;
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kProgrammatic = 6;      // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr size_t kMemoryBytes = 256 << 20;

Status lost = kSuccess;
bool current = false;
size_t used = 0;
std::map<Address, size_t> blocks;
std::set<void*> streams, graphs, executables, events, modules;
Graph* capture = nullptr;

template <typename T>
bool is(const std::set<void*>& known, T* handle) {
  return known.count(handle) != 0;
}

bool owned(Address start, size_t bytes) {
  for (const auto& [address, size] : blocks) {
    if (start >= address && start + bytes <= address + size) return true;
  }
  return false;
}

// What every call on a context checks first.
#define CONTEXT                         \
  if (!current) return kInvalidContext; \
  if (lost) return lost;
#define NOT_CAPTURING \
  if (capture) return kCaptureUnsupported;

Status put(void* stream, Action action) {
  CONTEXT
  if (!is(streams, stream)) return kInvalidHandle;
  if (capture) {
    capture->actions.push_back(action);
    return kSuccess;
  }
  const Status status = action();
  if (status >= kIllegalAddress) lost = status;  // seen when the stream is waited for
  return kSuccess;
}

Status move(Address to, Address from, size_t bytes, void* stream) {
  return put(stream, [=] {
    memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return kSuccess;
  });
}

// The values of a kernel's arguments, which are gone when a graph is launched.
std::vector<std::vector<char>> values_of(const Kernel& kernel, void** arguments) {
  std::vector<std::vector<char>> values;
  for (size_t i = 0; i < kernel.signature.size(); ++i) {
    const size_t size = strchr("if", kernel.signature[i]) ? 4 : 8;
    const char* value = static_cast<const char*>(arguments[i]);
    values.emplace_back(value, value + size);
  }
  return values;
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) {
  return flags ? kInvalidValue : kSuccess;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return index ? 101 : kSuccess;
}
int cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "NVIDIA Emulated");
  return kSuccess;
}
int cuDeviceGetUuid(char* uuid, int) {
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<char>(i * 17);
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> known = {
      {75, 9},        {76, 0},      {36, 3201000},      {37, 6144}, {16, 132},
      {38, 60 << 20}, {81, 233472}, {97, kSharedLimit}, {39, 2048}, {106, 32},
      {13, 1980000},  {82, 65536},  {111, 1024}};
  const auto found = known.find(attribute);
  if (found == known.end()) return kInvalidValue;
  *value = found->second;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &current;
  return kSuccess;
}
int cuCtxSetCurrent(void* context) {
  current = context == &current;
  return current ? kSuccess : kInvalidContext;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return current ? kSuccess : kInvalidContext;
}

int cuStreamCreate(void** stream, unsigned flags) {
  CONTEXT
  if (flags != 1) return kInvalidValue;  // blocking ones would wait for the default stream
  streams.insert(*stream = malloc(1));
  return kSuccess;
}
int cuStreamSynchronize(void* stream) {
  CONTEXT NOT_CAPTURING return is(streams, stream) ? kSuccess : kInvalidHandle;
}

int cuMemGetInfo(size_t* free, size_t* total) {
  CONTEXT
  *free = kMemoryBytes - used;
  *total = kMemoryBytes;
  return kSuccess;
}
int cuMemAlloc(Address* address, size_t bytes) {
  CONTEXT NOT_CAPTURING if (!bytes) return kInvalidValue;
  if (bytes > kMemoryBytes - used) return kOutOfMemory;
  *address = reinterpret_cast<Address>(aligned_alloc(512, (bytes + 511) / 512 * 512));
  memset(reinterpret_cast<void*>(*address), 0xa5, bytes);
  blocks[*address] = bytes;
  used += bytes;
  return kSuccess;
}
int cuMemFree(Address address) {
  CONTEXT NOT_CAPTURING const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalidValue;
  used -= found->second;
  blocks.erase(found);
  free(reinterpret_cast<void*>(address));
  return kSuccess;
}
int cuMemcpyHtoDAsync(Address to, const void* from, size_t bytes, void* stream) {
  NOT_CAPTURING
  if (!owned(to, bytes)) return kInvalidValue;
  return move(to, reinterpret_cast<Address>(from), bytes, stream);
}
int cuMemcpyDtoHAsync(void* to, Address from, size_t bytes, void* stream) {
  NOT_CAPTURING
  if (!owned(from, bytes)) return kInvalidValue;
  return move(reinterpret_cast<Address>(to), from, bytes, stream);
}
int cuMemcpyDtoDAsync(Address to, Address from, size_t bytes, void* stream) {
  if (!owned(to, bytes) || !owned(from, bytes)) return kInvalidValue;
  return move(to, from, bytes, stream);
}
int cuMemsetD8Async(Address to, unsigned char byte, size_t count, void* stream) {
  if (!owned(to, count)) return kInvalidValue;
  return put(stream, [=] {
    memset(reinterpret_cast<void*>(to), byte, count);
    return kSuccess;
  });
}

int cuTensorMapEncodeTiled(
    TensorMap* map, unsigned type, unsigned rank, uint64_t address, const uint64_t* extents,
    const uint64_t* strides, const uint32_t* box, const uint32_t* steps, unsigned interleave,
    unsigned swizzle, unsigned promotion, unsigned fill) {
  if (address % 16 || !rank || rank > 5 || interleave || fill) return kInvalidValue;
  TensorMap made = {};
  made.address = address;
  made.type = type;
  made.rank = rank;
  made.swizzle = swizzle;
  made.promotion = promotion;
  for (unsigned i = 0; i < rank; ++i) {
    if (!extents[i] || extents[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) {
      return kInvalidValue;
    }
    made.extents[i] = extents[i];
    made.box[i] = box[i];
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return kInvalidValue;
    made.strides[i] = strides[i];
  }
  *map = made;
  return kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
  CONTEXT NOT_CAPTURING const char* text = static_cast<const char*>(image);
  if (!strncmp(text, ".version 99", 11)) return kUnsupportedPtxVersion;
  if (!strncmp(
          text,
          "\x7f"
          "ELF",
          4))
    return kNoBinaryForGpu;
  dlopen(getenv("TUNEGEN_EMULATOR_RUNTIME"), RTLD_NOW | RTLD_GLOBAL);
  void* library = dlopen(text, RTLD_NOW | RTLD_LOCAL);
  if (!library) return kInvalidImage;
  auto* kernel = new Kernel{library, nullptr, "", 48 << 10};
  kernel->launch = reinterpret_cast<Launcher>(dlsym(library, "emulator_launch"));
  kernel->signature = reinterpret_cast<const char* (*)()>(dlsym(library, "emulator_signature"))();
  modules.insert(*module = kernel);
  return kSuccess;
}
int cuModuleUnload(void* module) {
  CONTEXT NOT_CAPTURING if (!modules.erase(module)) return kInvalidHandle;
  delete static_cast<Kernel*>(module);
  return kSuccess;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  CONTEXT
  if (!is(modules, module)) return kInvalidHandle;
  if (!dlsym(static_cast<Kernel*>(module)->library, name)) return kNotFound;
  *function = module;
  return kSuccess;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  CONTEXT NOT_CAPTURING if (!is(modules, function)) return kInvalidHandle;
  if (attribute != 8 || value > kSharedLimit) return kInvalidValue;
  static_cast<Kernel*>(function)->shared_limit = value;
  return kSuccess;
}
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  CONTEXT
  if (!is(modules, function) || !is(streams, config->stream)) return kInvalidHandle;
  const Kernel* kernel = static_cast<Kernel*>(function);
  const unsigned* block = config->block;
  if (extra || block[0] * block[1] * block[2] > 1024) return kInvalidValue;
  if (static_cast<int>(config->shared_bytes) > kernel->shared_limit) return kInvalidValue;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const Attribute& attribute = config->attributes[i];
    const unsigned* cluster = attribute.cluster;
    if (attribute.id == kProgrammatic) continue;  // launches follow one another here
    if (attribute.id != kClusterDimension || cluster[0] * cluster[1] * cluster[2] > 8 ||
        !cluster[0] || config->grid[0] % cluster[0]) {
      return kInvalidValue;
    }
  }
  EmulatorLaunch launch = {};
  launch.grid = {config->grid[0], config->grid[1], config->grid[2]};
  launch.block = {block[0], block[1], block[2]};
  launch.shared_bytes = config->shared_bytes;
  launch.limit_s = 3600;
  const auto values = values_of(*kernel, arguments);
  return put(config->stream, [=]() mutable {
    std::vector<void*> pointers;
    for (const auto& value : values) pointers.push_back(const_cast<char*>(value.data()));
    EmulatorFault fault = {};
    kernel->launch(&launch, pointers.data(), &fault);
    if (fault.kind) fprintf(stderr, "%s in line %d\n", fault.message, fault.line);
    return !fault.kind ? kSuccess : fault.kind == kMemory ? kIllegalAddress : kLaunchFailed;
  });
}

int cuStreamBeginCapture(void* stream, int mode) {
  CONTEXT NOT_CAPTURING if (!is(streams, stream)) return kInvalidHandle;
  if (mode != 1) return kInvalidValue;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  capture = new Graph;
  return kSuccess;
}
int cuStreamEndCapture(void* stream, void** graph) {
  CONTEXT
  if (!is(streams, stream) || !capture) return kInvalidValue;
  graphs.insert(*graph = capture);
  capture = nullptr;
  return kSuccess;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  CONTEXT
  if (!is(graphs, graph) || flags) return kInvalidValue;
  executables.insert(*executable = new Graph(*static_cast<Graph*>(graph)));
  return kSuccess;
}
int cuGraphDestroy(void* graph) {
  CONTEXT
  if (!graphs.erase(graph)) return kInvalidHandle;
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
int cuGraphUpload(void* executable, void* stream) {
  CONTEXT
  return is(executables, executable) && is(streams, stream) ? kSuccess : kInvalidHandle;
}
int cuGraphLaunch(void* executable, void* stream) {
  CONTEXT
  if (!is(executables, executable)) return kInvalidHandle;
  for (const Action& action : static_cast<Graph*>(executable)->actions) {
    if (const Status status = put(stream, action)) return status;
  }
  return kSuccess;
}
int cuGraphExecDestroy(void* executable) {
  CONTEXT
  if (!executables.erase(executable)) return kInvalidHandle;
  delete static_cast<Graph*>(executable);
  return kSuccess;
}

int cuEventCreate(void** event, unsigned flags) {
  CONTEXT
  if (flags) return kInvalidValue;  // others take no times
  events.insert(*event = new Event{});
  return kSuccess;
}
int cuEventRecord(void* event, void* stream) {
  CONTEXT NOT_CAPTURING if (!is(events, event) || !is(streams, stream)) return kInvalidHandle;
  static_cast<Event*>(event)->recorded = true;
  clock_gettime(CLOCK_MONOTONIC, &static_cast<Event*>(event)->at);
  return kSuccess;
}
int cuEventSynchronize(void* event) {
  CONTEXT
  return is(events, event) ? kSuccess : kInvalidHandle;
}
int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  CONTEXT
  if (!is(events, start) || !is(events, end)) return kInvalidHandle;
  const Event& from = *static_cast<Event*>(start);
  const Event& to = *static_cast<Event*>(end);
  if (!from.recorded || !to.recorded) return kInvalidHandle;
  *milliseconds = static_cast<float>(
      1e3 * (to.at.tv_sec - from.at.tv_sec) + 1e-6 * (to.at.tv_nsec - from.at.tv_nsec));
  return kSuccess;
}
int cuEventDestroy(void* event) {
  CONTEXT
  if (!events.erase(event)) return kInvalidHandle;
  delete static_cast<Event*>(event);
  return kSuccess;
}

// The bindings ask for every function by name and by the version of CUDA in which it became what
// they expect. cuCtxGetDevice has a second form since 13.0.
int cuGetProcAddress_v2(
    const char* symbol, void** function, int version, uint64_t, int* symbol_status) {
  const bool later = !strcmp(symbol, "cuCtxGetDevice") && version >= 13000;
  *function = later ? nullptr : dlsym(RTLD_DEFAULT, symbol);
  if (!*function && !later) {
    Dl_info self;
    dladdr(reinterpret_cast<void*>(cuInit), &self);
    void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, symbol);
  }
  if (symbol_status) *symbol_status = *function ? 0 : 1;
  return *function ? kSuccess : kNotFound;
}
}

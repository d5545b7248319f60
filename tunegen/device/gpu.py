# SPDX-License-Identifier: Apache-2.0
"""One GPU in one process: memory, kernels, launches, graphs, events."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.device.driver import bindings, call
from tunegen.errors import DeviceError
from tunegen.model import CompiledKernel, DeviceClass, Launch, LaunchPlan

_SCALARS: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "workspace": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}

# A kernel gets this much shared memory without being asked for more.
_PLAIN_SHARED_BYTES = 48 * 1024

# Rates per clock and multiprocessor by capability: (fp32, fp64), CUDA programming guide, table of
# arithmetic throughput.
_RATES = {
    75: (64, 2), 80: (64, 32), 86: (128, 2), 87: (128, 2), 88: (128, 2), 89: (128, 2),
    90: (128, 64), 100: (128, 64), 103: (128, 2), 110: (128, 2), 120: (128, 2), 121: (128, 2),
}  # fmt: skip


class Gpu:
    """A GPU opened by this process, with one stream of its own.

    Raises :class:`DeviceError` where there is no driver or no such device, naming what there is.
    A CUDA error in any method is a :class:`tunegen.device.CudaError`.
    """

    def __init__(self, index: int = 0) -> None:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise DeviceError(f"no device {index}: there are {count}, numbered from 0")
        self.index = index
        self._device = call("cuDeviceGet", index)
        self._context = call("cuDevicePrimaryCtxRetain", self._device)
        call("cuCtxSetCurrent", self._context)
        self.stream = call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def device_class(self) -> DeviceClass:
        """What kind of GPU it is, as the driver describes it."""
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR")
        arch = major * 10 + self._attribute("COMPUTE_CAPABILITY_MINOR")
        name = call("cuDeviceGetName", 128, self._device).split(b"\0")[0].decode()
        memory_mhz = self._attribute("MEMORY_CLOCK_RATE") // 1000
        width = self._attribute("GLOBAL_MEMORY_BUS_WIDTH")
        fp32, fp64 = _RATES.get(arch, (128, 2))
        return DeviceClass(
            name=name,
            arch=f"sm_{arch}",
            sm_count=self._attribute("MULTIPROCESSOR_COUNT"),
            l2_bytes=self._attribute("L2_CACHE_SIZE"),
            shared_bytes_per_sm=self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            shared_bytes_per_block=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            threads_per_sm=self._attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
            blocks_per_sm=self._attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            clock_mhz=self._attribute("CLOCK_RATE") // 1000,
            memory_clock_mhz=memory_mhz,
            # Double data rate: two transfers per clock on every pin of the bus.
            memory_gbps=2 * memory_mhz * 1e6 * width / 8 / 1e9,
            fp32_per_clock=fp32,
            fp64_per_clock=fp64,
            registers_per_sm=self._attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            shared_bytes_reserved=self._attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
            source="the driver",
        )

    def _attribute(self, name: str) -> int:
        kind = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", kind, self._device))

    # --- memory ------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes of device memory that are free now."""
        return int(call("cuMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        """Address of ``size`` new bytes; raises :class:`DeviceError` with the bytes needed and
        free where they do not fit."""
        if size > (free := self.free_bytes()):
            raise DeviceError(f"{size:,} bytes of device memory are needed, {free:,} are free")
        return int(call("cuMemAlloc", max(size, 1)))

    def release(self, address: int) -> None:
        call("cuMemFree", address)

    def upload(self, address: int, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values)
        if values.nbytes:
            call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)

    def download(self, address: int, out: NDArray[Any]) -> NDArray[Any]:
        if out.nbytes:
            call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return out

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set bytes, in the order of the stream."""
        if size:
            call("cuMemsetD8Async", address, byte, size, self.stream)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within the device, in the order of the stream."""
        if size:
            call("cuMemcpyDtoDAsync", to, source, size, self.stream)

    # --- kernels -----------------------------------------------------------------------------

    def load(self, kernels: Sequence[CompiledKernel]) -> LoadedKernels:
        """Load the cubins; :meth:`LoadedKernels.close` unloads them."""
        return LoadedKernels(kernels)

    def synchronize(self) -> None:
        """Wait for the stream; raises what its kernels did wrong."""
        call("cuStreamSynchronize", self.stream)

    # --- graphs and timing -------------------------------------------------------------------

    def graph(self, record: Callable[[], None]) -> Graph:
        """What ``record`` puts on the stream, as a graph that replays it."""
        mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.stream, mode)
        try:
            record()
        finally:
            captured = call("cuStreamEndCapture", self.stream)
        try:
            return Graph(call("cuGraphInstantiate", captured, 0), self.stream)
        finally:
            call("cuGraphDestroy", captured)

    @contextmanager
    def timer(self) -> Iterator[Callable[[], float]]:
        """Time what the block puts on the stream: the yielded function gives microseconds.

        It waits for the end, so call it after the block.
        """
        start, end = call("cuEventCreate", 0), call("cuEventCreate", 0)

        def elapsed() -> float:
            call("cuEventSynchronize", end)
            milliseconds = float(call("cuEventElapsedTime", start, end))
            call("cuEventDestroy", start)
            call("cuEventDestroy", end)
            return milliseconds * 1e3

        call("cuEventRecord", start, self.stream)
        yield elapsed
        call("cuEventRecord", end, self.stream)


class Graph:
    """A recorded sequence of launches."""

    def __init__(self, handle: Any, stream: Any) -> None:
        self._handle = handle
        self._stream = stream

    def launch(self) -> None:
        call("cuGraphLaunch", self._handle, self._stream)

    def close(self) -> None:
        call("cuGraphExecDestroy", self._handle)


class LoadedKernels:
    """Cubins in device memory, ready to launch."""

    def __init__(self, kernels: Sequence[CompiledKernel]) -> None:
        self._modules = []
        self._functions: dict[str, Any] = {}
        self._grown: dict[str, int] = {}
        for kernel in kernels:
            module = call("cuModuleLoadData", kernel.cubin)
            self._modules.append(module)
            entry = kernel.entry.encode()
            self._functions[kernel.name] = call("cuModuleGetFunction", module, entry)

    def close(self) -> None:
        for module in self._modules:
            call("cuModuleUnload", module)
        self._modules.clear()

    def bind(
        self,
        plan: LaunchPlan,
        operands: Mapping[str, int],
        scalars: Mapping[str, float],
        workspace: int = 0,
    ) -> Call:
        """A call with its arguments: a bound plan, addresses of operands, scalars by name."""
        return Call(
            [
                _prepare(self._function(launch), launch, operands, scalars, workspace)
                for launch in plan.launches
            ]
        )

    def _function(self, launch: Launch) -> Any:
        function = self._functions[launch.kernel]
        asked = max(launch.shared_bytes, self._grown.get(launch.kernel, _PLAIN_SHARED_BYTES))
        if asked > self._grown.get(launch.kernel, _PLAIN_SHARED_BYTES):
            kind = bindings().CUfunction_attribute
            name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            call("cuFuncSetAttribute", function, getattr(kind, name), asked)
            self._grown[launch.kernel] = asked
        return function


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One launch with everything that its pointers point to kept alive."""

    function: Any
    config: Any
    pointers: Any
    values: tuple[Any, ...]


class Call:
    """The launches of one call of an operation, with their arguments."""

    def __init__(self, launches: Sequence[_Prepared]) -> None:
        self._launches = launches

    def launch(self, stream: Any) -> None:
        """Put the launches on ``stream``. Raises :class:`CudaError` where one is refused."""
        for item in self._launches:
            item.config.hStream = stream
            call(
                "cuLaunchKernelEx", item.config, item.function,
                ctypes.addressof(item.pointers) if item.values else 0, 0,
            )  # fmt: skip


def _prepare(
    function: Any,
    launch: Launch,
    operands: Mapping[str, int],
    scalars: Mapping[str, float],
    workspace: int,
) -> _Prepared:
    values = []
    for argument in launch.arguments:
        match argument.type:
            case "pointer":
                value: float = operands[argument.name]
            case "workspace":
                value = workspace + int(argument.value)
            case "int32" | "int64":
                value = int(argument.value)
            case _:
                value = scalars[argument.name]
        values.append(_SCALARS[argument.type](value))
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    return _Prepared(function, _config(launch), pointers, tuple(values))


def _config(launch: Launch) -> Any:
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (int(extent) for extent in launch.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    config.numAttrs = 0
    if launch.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = launch.cluster
        attribute.value = value
        config.attrs = [attribute]
        config.numAttrs = 1
    return config

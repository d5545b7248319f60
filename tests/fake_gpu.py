# SPDX-License-Identifier: Apache-2.0
"""A GPU whose memory is the host's, whose kernels are Python functions and whose clock is counted.

It has the methods of :class:`tunegen.device.Gpu`. A "cubin" names the function that is its kernel.
What is launched runs at once, but its faults show where a device would show them: at the next
synchronisation, and for ever after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tunegen.device import CudaError
from tunegen.errors import DeviceError
from tunegen.model import (
    CompiledKernel,
    DeviceClass,
    Launch,
    LaunchPlan,
    Resources,
    Telemetry,
)

DEVICE = DeviceClass(
    name="fake", arch="sm_90", sm_count=4, l2_bytes=1 << 20, shared_bytes_per_sm=228 << 10,
    shared_bytes_per_block=227 << 10, threads_per_sm=2048, blocks_per_sm=32, clock_mhz=1000,
    memory_clock_mhz=1000, memory_gbps=100.0, fp32_per_clock=128, fp64_per_clock=64,
)  # fmt: skip

_ALIGNMENT = 512


class Fault(Exception):
    """What a kernel does to its context; the driver's name for it."""


class Memory:
    """Device memory at its real addresses; an access outside of every allocation is a fault."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[np.ndarray, int]] = {}

    def allocate(self, size: int) -> int:
        block = np.full(size + _ALIGNMENT, 0xA5, np.uint8)  # what was there before
        address = -(-block.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._blocks[address] = (block, size)
        return address

    def release(self, address: int) -> None:
        del self._blocks[address]

    @property
    def used(self) -> int:
        return sum(size for _, size in self._blocks.values())

    def view(self, address: int, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """``count`` elements, to be read and written."""
        dtype = np.dtype(dtype)
        size = count * dtype.itemsize
        for start, (block, extent) in self._blocks.items():
            if start <= address and address + size <= start + extent:
                first = address - block.ctypes.data
                return block[first : first + size].view(dtype)
        if not size:
            return np.zeros(0, dtype)
        raise Fault("CUDA_ERROR_ILLEGAL_ADDRESS")


Values = dict[str, Any]
Run = Callable[[Memory, Launch, Values], None]


@dataclasses.dataclass
class FakeKernel:
    """``us`` is how long a launch takes, or what gives it for a launch's values."""

    run: Run
    us: float | Callable[[Values], float] = 1.0
    launches: int = 0


def compiled(name: str, cubin: str | None = None, target: str = "sm_90") -> CompiledKernel:
    return CompiledKernel(
        name=name, entry=f"tunegen_{name}", target=target, ptx=b"", cubin=(cubin or name).encode(),
        resources=Resources(32, 0, 0, 0, 0), warnings="", rejection="", nvrtc="13.0", seconds=0.0,
        from_cache=False,
    )  # fmt: skip


class FakeGpu:
    """``host_us`` is what the host takes for each call that puts something on the stream: the
    device waits for it where it has nothing else to do. Moving a megabyte takes a microsecond.
    """

    def __init__(
        self,
        kernels: dict[str, FakeKernel],
        *,
        memory_bytes: int = 256 << 20,
        device: DeviceClass = DEVICE,
        host_us: float = 0.0,
    ) -> None:
        self.kernels = kernels
        self.memory = Memory()
        self.index, self.stream = 0, 0
        self.ns = 0
        self.copy_us = 0.0
        self._host_ns = 0
        self._host_us = host_us
        self.lost = ""
        self.graphs = self.loaded = 0
        self._memory_bytes = memory_bytes
        self._device = device
        self._recording: list[Callable[[], None]] | None = None

    def device_class(self) -> DeviceClass:
        return self._device

    # --- memory ------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        return self._memory_bytes - self.memory.used

    def allocate(self, size: int) -> int:
        self._alive("cuMemAlloc")
        if size > self.free_bytes():
            raise DeviceError(
                f"{size:,} bytes of device memory are needed, {self.free_bytes():,} are free"
            )
        return self.memory.allocate(max(size, 1))

    def release(self, address: int) -> None:
        self.synchronize()
        self.memory.release(address)

    def upload(self, address: int, values: np.ndarray) -> None:
        self.memory.view(address, values.nbytes)[:] = np.frombuffer(
            np.ascontiguousarray(values).tobytes(), np.uint8
        )

    def download(self, address: int, out: np.ndarray) -> np.ndarray:
        self.synchronize()
        assert out.flags.c_contiguous
        out.view(np.uint8).reshape(-1)[:] = self.memory.view(address, out.nbytes)
        return out

    def fill(self, address: int, byte: int, size: int) -> None:
        self._do(size / 1e6, lambda: self.memory.view(address, size).fill(byte))

    def copy(self, to: int, source: int, size: int) -> None:
        def copy() -> None:
            self.memory.view(to, size)[:] = self.memory.view(source, size)

        self._do(self.copy_us + size / 1e6, copy)

    # --- kernels -----------------------------------------------------------------------------

    def load(self, kernels) -> FakeLoaded:
        self._alive("cuModuleLoadData")
        for kernel in kernels:
            if kernel.target != self._device.arch:
                raise DeviceError(f"{kernel.name} was made for {kernel.target}")
        self.loaded += len(kernels)
        return FakeLoaded(self, {kernel.name: kernel for kernel in kernels})

    def synchronize(self) -> None:
        self._alive("cuStreamSynchronize")
        self._host_ns = max(self._host_ns, self.ns)

    def graph(self, record) -> FakeGraph:
        self._recording = []
        try:
            record()
            self.graphs += 1
            return FakeGraph(self, self._recording)
        finally:
            self._recording = None

    def mark(self) -> FakeMark:
        assert self._recording is None
        self._call()
        return FakeMark(self, self.ns)

    def _call(self) -> None:
        """The host calls; an idle device waits until it has."""
        self._host_ns += round(self._host_us * 1e3)
        self.ns = max(self.ns, self._host_ns)

    def _alive(self, call: str) -> None:
        if self.lost:
            raise CudaError(call, self.lost)

    def _do(self, us: float, action: Callable[[], None]) -> None:
        """Put an action on the stream."""
        if self._recording is not None:
            self._recording.append(lambda: self._run(us, action))
            return
        self._call()
        self._run(us, action)

    def _run(self, us: float, action: Callable[[], None]) -> None:
        if self.lost:
            return
        self.ns += round(us * 1e3)
        try:
            action()
        except Fault as fault:
            self.lost = str(fault)


class FakeLoaded:
    def __init__(self, gpu: FakeGpu, kernels: dict[str, CompiledKernel]) -> None:
        self._gpu, self._kernels = gpu, kernels

    def bind(self, plan, operands, scalars, workspace=0) -> FakeCall:
        launches = []
        for launch in plan.launches:
            values = _values(plan, launch, operands, scalars, workspace)
            launches.append((self._kernels[launch.kernel], launch, values))
        return FakeCall(self._gpu, launches)

    def close(self) -> None:
        self._gpu.loaded -= len(self._kernels)


class FakeCall:
    def __init__(
        self, gpu: FakeGpu, launches: list[tuple[CompiledKernel, Launch, Values]]
    ) -> None:
        self._gpu, self._launches = gpu, launches

    def launch(self, stream: Any) -> None:
        for kernel, launch, values in self._launches:
            self._gpu._alive("cuLaunchKernelEx")
            if math.prod(launch.block) > 1024:
                raise CudaError("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE")
            fake = self._gpu.kernels[kernel.cubin.decode()]
            us = fake.us(values) if callable(fake.us) else fake.us

            def run(fake=fake, launch=launch, values=values) -> None:
                fake.launches += 1
                fake.run(self._gpu.memory, launch, values)

            self._gpu._do(us, run)


class FakeGraph:
    def __init__(self, gpu: FakeGpu, actions: list[Callable[[], None]]) -> None:
        self._gpu, self._actions = gpu, actions

    def launch(self) -> None:
        self._gpu._alive("cuGraphLaunch")
        self._gpu._call()
        for action in self._actions:
            action()

    def close(self) -> None:
        self._gpu.graphs -= 1


class FakeMark:
    def __init__(self, gpu: FakeGpu, ns: int) -> None:
        self._gpu, self._ns = gpu, ns

    def wait(self) -> None:
        self._gpu.synchronize()

    def since_us(self, earlier: FakeMark) -> float:
        return (self._ns - earlier._ns) / 1e3

    def close(self) -> None:
        pass


class FakeMonitor:
    """A card that takes 500 W of device time."""

    uuid = "GPU-fake"
    own_pids = (1,)

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def driver(self) -> str:
        return "580.65.06"

    def energy_mj(self) -> int:
        return self._gpu.ns // 2000

    def read(self) -> Telemetry:
        return Telemetry(sm_clock_mhz=1980, power_w=500.0, energy_mj=self.energy_mj())


def _values(plan: LaunchPlan, launch: Launch, operands, scalars, workspace: int) -> Values:
    """A tensor map is where its tensor begins: there is no copy engine to take more of it."""
    values: Values = {}
    begins = {
        m.name: (workspace if m.in_workspace else operands[m.array]) + int(m.offset)
        for m in plan.tensor_maps
    }
    for argument in launch.arguments:
        match argument.type:
            case "pointer":
                values[argument.name] = operands[argument.name]
            case "workspace":
                values[argument.name] = workspace + int(argument.value)
            case "int32" | "int64":
                values[argument.name] = int(argument.value)
            case "tensor_map":
                values[argument.name] = begins[argument.name]
            case _:
                values[argument.name] = scalars[argument.name]
    return values

# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that keeps books: it takes the calls of :func:`tunegen.device.driver.call`.

Handles are those of cuda.bindings, memory is the host's. A launch is recorded with its arguments
as the driver would read them, and run on the CPU where its kernel was built for the emulator.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
from typing import Any, NamedTuple

from tunegen.device import driver
from tunegen.device.driver import CudaError
from tunegen.model import LaunchPlan

_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64, "workspace": ctypes.c_uint64, "int32": ctypes.c_int32,
    "int64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class Described(NamedTuple):
    """What a tensor map was encoded from."""

    type: str
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    l2_promotion: str


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch, its arguments in order."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    values: tuple[Any, ...]
    context: int


@dataclasses.dataclass
class FakeDriver:
    """``current`` is the context of the calling thread, ``refuse`` the calls that fail and with
    what. ``signatures`` are the argument types of entry points, ``kernels`` their emulated code.
    """

    arch: int = 90
    devices: int = 1
    name: str = "NVIDIA H200"
    cuda: int = 13000
    sm_count: int = 132
    shared_bytes: int = 227 * 1024
    static_bytes: int = 0
    free_bytes: int = 1 << 40
    current: int = 0
    current_device: int = 0
    capturing: bool = False
    refuse: dict[str, str] = dataclasses.field(default_factory=dict)
    signatures: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api = driver.bindings()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[Launched] = []
        self.images: list[bytes] = []
        self.loaded: dict[int, str] = {}
        self.blocks: dict[int, Any] = {}
        self.functions: dict[int, str] = {}
        self.allowed: dict[str, int] = {}
        self.encoded: dict[bytes, Described] = {}
        self._stack: list[int] = []
        self._handle = itertools.count(0x1000)

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, arguments))
        if name in self.refuse:
            raise CudaError(name, self.refuse[name])
        return getattr(self, name)(*arguments)

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def signed_by(self, plan: LaunchPlan) -> None:
        for launch in plan.launches:
            types = [argument.type for argument in launch.arguments]
            self.signatures[f"tunegen_{launch.kernel}"] = types

    # --- devices and contexts ----------------------------------------------------------------

    def cuInit(self, flags):
        assert flags == 0

    def cuDriverGetVersion(self):
        return self.cuda

    def cuDeviceGetCount(self):
        return self.devices

    def cuDeviceGet(self, index):
        assert 0 <= int(index) < self.devices
        return self.api.CUdevice(int(index))

    def cuDeviceGetName(self, length, device):
        return self.name.encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, kind, device):
        values = {
            "COMPUTE_CAPABILITY_MAJOR": self.arch // 10,
            "COMPUTE_CAPABILITY_MINOR": self.arch % 10,
            "MULTIPROCESSOR_COUNT": self.sm_count,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.shared_bytes,
        }
        return values[kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    @staticmethod
    def primary(device: int) -> int:
        return 0xC0DE00 + device

    def cuDevicePrimaryCtxRetain(self, device):
        return self.api.CUcontext(self.primary(int(device)))

    def cuCtxGetCurrent(self):
        return self.api.CUcontext(self.current)

    def cuCtxSetCurrent(self, context):
        self.current = int(context)

    def cuCtxGetDevice(self):
        return self.api.CUdevice(self.current_device)

    def cuCtxPushCurrent(self, context):
        self._stack.append(self.current)
        self.current = int(context)

    def cuCtxPopCurrent(self):
        popped, self.current = self.current, self._stack.pop()
        return self.api.CUcontext(popped)

    def cuCtxSynchronize(self):
        pass

    # --- memory ------------------------------------------------------------------------------

    def cuMemGetInfo(self):
        return self.free_bytes, self.free_bytes

    def cuMemAlloc(self, size):
        memory = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        ctypes.memset(address, 0xFF, size)
        self.blocks[address] = memory
        return self.api.CUdeviceptr(address)

    def cuMemFree(self, address):
        del self.blocks[int(address)]

    def cuMemsetD8Async(self, address, byte, size, stream):
        ctypes.memset(int(address), byte, size)

    # --- streams and events ------------------------------------------------------------------

    def cuStreamIsCapturing(self, stream):
        kinds = self.api.CUstreamCaptureStatus
        active = kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return active if self.capturing else kinds.CU_STREAM_CAPTURE_STATUS_NONE

    def cuStreamSynchronize(self, stream):
        pass

    def cuEventCreate(self, flags):
        return self.api.CUevent(next(self._handle))

    def cuEventRecord(self, event, stream):
        pass

    def cuStreamWaitEvent(self, stream, event, flags):
        pass

    def cuEventDestroy(self, event):
        pass

    # --- tensor maps -------------------------------------------------------------------------

    def cuTensorMapEncodeTiled(
        self, kind, rank, address, extents, strides, box, steps, interleave, swizzle, l2, fill
    ):
        assert (rank, rank - 1, rank) == (len(extents), len(strides), len(box))
        assert [int(step) for step in steps] == [1] * rank
        assert interleave.name == "CU_TENSOR_MAP_INTERLEAVE_NONE"
        assert fill.name == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
        assert address % 16 == 0
        content = hashlib.sha512(str(next(self._handle)).encode()).digest() * 2
        self.encoded[content] = Described(
            kind.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_"),
            address,
            tuple(map(int, extents)),
            tuple(map(int, strides)),
            tuple(map(int, box)),
            swizzle.name.removeprefix("CU_TENSOR_MAP_SWIZZLE_"),
            l2.name.removeprefix("CU_TENSOR_MAP_L2_PROMOTION_"),
        )
        encoded = self.api.CUtensorMap()
        ctypes.memmove(encoded.getPtr(), content, 128)
        return encoded

    # --- kernels -----------------------------------------------------------------------------

    def cuModuleLoadData(self, image):
        handle = next(self._handle)
        self.images.append(image)
        self.loaded[handle] = "module"
        return self.api.CUmodule(handle)

    def cuModuleUnload(self, module):
        del self.loaded[int(module)]

    def cuModuleGetFunction(self, module, entry):
        assert int(module) in self.loaded
        handle = next(self._handle)
        self.functions[handle] = entry.decode()
        return self.api.CUfunction(handle)

    def cuFuncGetAttribute(self, kind, function):
        assert kind == self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return self.static_bytes

    def cuFuncSetAttribute(self, function, kind, value):
        name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        assert kind == getattr(self.api.CUfunction_attribute, name)
        self.allowed[self.functions[int(function)]] = value

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra == 0
        entry = self.functions[int(function)]
        types = self.signatures[entry]
        pointers = (ctypes.c_void_p * len(types)).from_address(parameters)
        launched = Launched(
            entry,
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ),
            config.sharedMemBytes,
            int(config.hStream),
            tuple(
                self._value(kind, pointer) for kind, pointer in zip(types, pointers, strict=True)
            ),
            self.current,
        )
        self.launches.append(launched)
        if entry in self.kernels:
            self._run(launched, parameters)

    def _value(self, kind: str, pointer: int) -> Any:
        if kind == "tensor_map":
            assert pointer % 64 == 0
            return self.encoded[ctypes.string_at(pointer, 128)]
        return _TYPES[kind].from_address(pointer).value

    def _run(self, launched: Launched, parameters: int) -> None:
        from emulator import build

        shape = build.Launch(
            build.Vec3(*launched.grid), build.Vec3(*launched.block), launched.shared_bytes, 1, 20
        )
        fault = build.Fault()
        library = self.kernels[launched.entry].library
        library.emulator_launch(
            ctypes.byref(shape), ctypes.c_void_p(parameters), ctypes.byref(fault)
        )
        assert not fault.kind, f"{launched.entry}: {fault.message.decode()} in line {fault.line}"

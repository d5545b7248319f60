# SPDX-License-Identifier: Apache-2.0
"""Cubins in, calls out: kernels loaded into the current context and launched by their plan."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunegen.device.driver import CudaError, arch_of, bindings, call, driver_cuda
from tunegen.device.tensor_map import EncodedMap
from tunegen.errors import DeviceError
from tunegen.model import Argument, CompiledKernel, Launch, LaunchPlan

_SCALARS: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "workspace": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}

# What the driver says of an image that is not for it: of another architecture, or too new.
_MISFITS = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_INVALID_PTX",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class LoadedKernels:
    """Kernels in device memory, ready to launch: their cubins, or the PTX of those without one.

    Raises :class:`DeviceError` naming image and device where they do not fit, else
    :class:`CudaError`.
    """

    def __init__(self, kernels: Sequence[CompiledKernel]) -> None:
        self._modules: list[Any] = []
        self._functions: dict[str, Any] = {}
        self._shared_bytes: dict[str, int] = {}
        try:
            for kernel in kernels:
                self._load(kernel)
        except (CudaError, DeviceError):
            self.close()
            raise

    def _load(self, kernel: CompiledKernel) -> None:
        try:
            # PTX is text and ends where C's strings do.
            module = call("cuModuleLoadData", kernel.cubin or kernel.ptx + b"\0")
        except CudaError as error:
            if error.code in _MISFITS:
                raise _misfit(kernel, error) from error
            raise
        self._modules.append(module)
        entry = kernel.entry.encode()
        self._functions[kernel.name] = call("cuModuleGetFunction", module, entry)

    def close(self) -> None:
        """Unload them. A context that is lost has unloaded them already."""
        while self._modules:
            try:
                call("cuModuleUnload", self._modules.pop())
            except CudaError as error:
                if not error.sticky:
                    raise

    def bind(
        self,
        plan: LaunchPlan,
        operands: Mapping[str, int],
        scalars: Mapping[str, float],
        workspace: int = 0,
    ) -> Call:
        """A call with its arguments: a bound plan, addresses of operands, scalars by name.

        Raises :class:`CudaError` where a tensor map is refused.
        """
        values = _Values(plan, operands, scalars, workspace)
        return Call([_prepare(self._function(launch), launch, values) for launch in plan.launches])

    def _function(self, launch: Launch) -> Any:
        """The kernel of a launch, allowed to use as much dynamic shared memory as it asks for:
        without that, 48 KiB less its static shared memory."""
        function = self._functions[launch.kernel]
        if launch.shared_bytes > self._shared_bytes.get(launch.kernel, 0):
            kind = bindings().CUfunction_attribute
            name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            call("cuFuncSetAttribute", function, getattr(kind, name), launch.shared_bytes)
            self._shared_bytes[launch.kernel] = launch.shared_bytes
        return function


def _misfit(kernel: CompiledKernel, error: CudaError) -> DeviceError:
    arch = arch_of(call("cuCtxGetDevice"))
    kind = "its cubin" if kernel.cubin else "its PTX"
    return DeviceError(
        f"{kernel.name} cannot be loaded ({error.code}): {kind} was made for {kernel.target} by "
        f"NVRTC {kernel.nvrtc}, the device is {arch} with a driver for CUDA {driver_cuda()}",
        hint="tunegen doctor",
    )


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
                ctypes.addressof(item.pointers), 0,
            )  # fmt: skip


class _Values:
    """The values of one call's arguments, in host memory."""

    def __init__(
        self,
        plan: LaunchPlan,
        operands: Mapping[str, int],
        scalars: Mapping[str, float],
        workspace: int,
    ) -> None:
        self._operands, self._scalars, self._workspace = operands, scalars, workspace
        self._maps = {m.name: EncodedMap(m) for m in plan.tensor_maps}
        for encoded in self._maps.values():
            of = encoded.tensor_map
            encoded.place(workspace if of.in_workspace else operands[of.array])

    def place(self, argument: Argument) -> tuple[int, Any]:
        """The host address of an argument's value, and what keeps it there."""
        match argument.type:
            case "tensor_map":
                encoded = self._maps[argument.name]
                return encoded.address, encoded
            case "pointer":
                value: float = self._operands[argument.name]
            case "workspace":
                value = self._workspace + int(argument.value)
            case "int32" | "int64":
                value = int(argument.value)
            case "fp32" | "fp64":
                value = self._scalars[argument.name]
        cell = _SCALARS[argument.type](value)
        return ctypes.addressof(cell), cell


def _prepare(function: Any, launch: Launch, values: _Values) -> _Prepared:
    placed = [values.place(argument) for argument in launch.arguments]
    # cuLaunchKernelEx takes the address of an array of the arguments' addresses.
    pointers = (ctypes.c_void_p * max(1, len(placed)))(*(address for address, _ in placed))
    return _Prepared(function, launch_config(launch), pointers, tuple(kept for _, kept in placed))


def launch_config(launch: Launch) -> Any:
    """The driver's description of a launch, but for its stream."""
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (int(extent) for extent in launch.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    kinds, attributes = driver.CUlaunchAttributeID, []
    if launch.cluster != (1, 1, 1):
        cluster = driver.CUlaunchAttributeValue()
        cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z = launch.cluster
        attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster))
    if launch.programmatic:
        early = driver.CUlaunchAttributeValue()
        early.programmaticStreamSerializationAllowed = 1
        attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, early))
    if attributes:
        config.attrs = [_attribute(kind, value) for kind, value in attributes]
    config.numAttrs = len(attributes)
    return config


def _attribute(kind: Any, value: Any) -> Any:
    attribute = bindings().CUlaunchAttribute()
    attribute.id, attribute.value = kind, value
    return attribute

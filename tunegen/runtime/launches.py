# SPDX-License-Identifier: Apache-2.0
"""A plan made ready: functions, launch configurations and argument values where the driver takes
them from, so that a call only writes what changed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunegen.device import driver
from tunegen.device.loading import launch_config
from tunegen.device.tensor_map import EncodedMap
from tunegen.errors import DeviceError, PlanError
from tunegen.model import MAP_ALIGNMENT, Launch, LaunchPlan
from tunegen.runtime.context import Context, refusals
from tunegen.runtime.program import Program

_INTEGERS: dict[str, Any] = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}
_SCALARS: dict[str, Any] = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}

# Dynamic shared memory that a kernel gets without being asked for more.
_PLAIN_SHARED_BYTES = 48 * 1024


class Modules:
    """A program's images, loaded into the current context."""

    def __init__(self, program: Program, context: Context) -> None:
        self._modules: list[Any] = []
        self.functions: dict[str, Any] = {}
        failure = f"{program.name}, {program.source}, does not load on {context}"
        try:
            with refusals(failure, hint=program.needs):
                for image in program.images:
                    # The driver takes PTX as a C string; a cubin knows its own size.
                    module = driver.call("cuModuleLoadData", image.content + b"\0")
                    self._modules.append(module)
                    self.functions[image.kernel] = driver.call(
                        "cuModuleGetFunction", module, image.entry.encode()
                    )
                for launch in program.plan.launches:
                    self._allow_shared(program, context, launch)
        except DeviceError:
            self.unload()
            raise

    def unload(self) -> None:
        self.functions.clear()
        while self._modules:
            driver.call("cuModuleUnload", self._modules.pop())

    def _allow_shared(self, program: Program, context: Context, launch: Launch) -> None:
        """Opt in to what a launch needs; raise :class:`DeviceError` where no block can have it."""
        function, kinds = self.functions[launch.kernel], driver.bindings().CUfunction_attribute
        static = int(
            driver.call("cuFuncGetAttribute", kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        )
        if static + launch.shared_bytes > context.shared_bytes:
            raise DeviceError(
                f"{program.name} needs {static + launch.shared_bytes} bytes of shared memory per "
                f"block, {context} has {context.shared_bytes}"
            )
        if launch.shared_bytes > _PLAIN_SHARED_BYTES:
            kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.call("cuFuncSetAttribute", function, kind, launch.shared_bytes)


class Arguments:
    """The argument values that change from call to call, at places that do not."""

    def __init__(self, program: Program) -> None:
        self._pointers = {o.name: ctypes.c_uint64() for o in program.operands}
        used = {
            (argument.name, argument.type)
            for launch in program.plan.launches
            for argument in launch.arguments
            if argument.type in _SCALARS
        }
        self._scalars: dict[tuple[str, str], Any] = {key: _SCALARS[key[1]]() for key in used}
        self.pointers = tuple(self._pointers.values())
        self.scalars = tuple((cell, name) for (name, _), cell in self._scalars.items())

    def cell(self, name: str, kind: str) -> Any:
        """Where the value of a "pointer" or of a scalar of type ``kind`` is kept."""
        return self._pointers[name] if kind == "pointer" else self._scalars[name, kind]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One launch. ``keep`` holds what the parameters at ``address`` point to."""

    function: Any
    config: Any
    address: int
    keep: tuple[Any, ...]


class Binding:
    """A plan bound to sizes, with the values that belong to these sizes filled in.

    ``needed`` says for every operand whether it has elements. ``workspace_bytes`` is 0 where no
    workspace is used, and its first ``zeroed_bytes`` have to be zero. Tensor maps are encoded when
    an address is first seen.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        functions: Mapping[str, Any],
        arguments: Arguments,
        needed: Sequence[bool],
    ) -> None:
        self.needed = tuple(needed)
        self.workspace_bytes = int(plan.workspace_bytes)
        self.zeroed_bytes = plan.zeroed
        self._workspace = ctypes.c_uint64()
        self._workspaces: list[tuple[Any, int]] = []
        self._maps = {m.name: EncodedMap(m) for m in plan.tensor_maps}
        self._described = tuple(
            (
                self._maps[m.name],
                self._workspace if m.in_workspace else arguments.cell(m.array, "pointer"),
            )
            for m in plan.tensor_maps
        )
        self._stream = 0
        self.launches = tuple(
            self._prepare(launch, functions[launch.kernel], arguments) for launch in plan.launches
        )

    def place_workspace(self, address: int) -> None:
        self._workspace.value = address
        for cell, offset in self._workspaces:
            cell.value = address + offset

    def submit(self, stream: int) -> None:
        """Put every launch on ``stream``; raises :class:`tunegen.device.CudaError`, and
        :class:`PlanError` for an address that no tensor map can have."""
        for encoded, cell in self._described:
            _place(encoded, cell.value)
        if stream != self._stream:
            for launch in self.launches:
                launch.config.hStream = stream
            self._stream = stream
        for launch in self.launches:
            driver.call("cuLaunchKernelEx", launch.config, launch.function, launch.address, 0)

    def _prepare(self, launch: Launch, function: Any, arguments: Arguments) -> Prepared:
        kept: list[Any] = []
        addresses = []
        for argument in launch.arguments:
            if argument.type == "tensor_map":
                encoded = self._maps[argument.name]
                kept.append(encoded)
                addresses.append(encoded.address)
                continue
            value = int(argument.value)
            if argument.type == "workspace":
                cell = ctypes.c_uint64()
                self._workspaces.append((cell, value))
            elif argument.type in _INTEGERS:
                cell = _INTEGERS[argument.type](value)
                if cell.value != value:
                    raise PlanError(f"{argument.name} is {value}, more than {argument.type} holds")
            else:
                cell = arguments.cell(argument.name, argument.type)
            kept.append(cell)
            addresses.append(ctypes.addressof(cell))
        pointers = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        address = ctypes.addressof(pointers) if addresses else 0
        return Prepared(function, launch_config(launch), address, (pointers, *kept))


def _place(encoded: EncodedMap, base: int) -> None:
    if base % MAP_ALIGNMENT:
        wanted = encoded.tensor_map
        raise PlanError(
            f"tensor map {wanted.name} needs {wanted.array} at a multiple of {MAP_ALIGNMENT} "
            f"bytes: it is at {base:#x}",
            hint="give an aligned copy",
        )
    encoded.place(base)

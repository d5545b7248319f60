# SPDX-License-Identifier: Apache-2.0
"""One call of an operation, from its launch plan to its outputs."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from emulator import build
from emulator.build import Unemulatable
from emulator.memory import MODULUS, UNSET, Region, is_unset, unset
from tunegen.model import (
    DTYPE_BYTES,
    Argument,
    Array,
    Config,
    DeviceClass,
    KernelSpec,
    Launch,
    Limit,
    Problem,
)

# Processor time of one launch; the largest test takes well under a second.
LIMIT_S = 20

Kind = Literal[
    "memory",  # an address outside of every operand, or a write to an input
    "alignment",  # a misaligned access
    "undefined",  # arithmetic or an index without meaning
    "barrier",  # a barrier that not all threads reach
    "hang",
    "plan",  # a launch plan that does not fit the kernel or the device
    "stray_write",  # a write next to the elements of an operand
    "unset",  # an element of an output that nothing wrote, or a copy of what nothing wrote
    "wrong_value",
]
_LETTERS = {
    "pointer": "p", "workspace": "p", "int32": "i", "int64": "l", "fp32": "f", "fp64": "d",
}  # fmt: skip
_FAULTS: tuple[Kind, ...] = ("memory", "alignment", "undefined", "barrier", "hang")


class WrongKernel(AssertionError):
    """What a kernel did wrong, and with which config and problem."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run: a config of a spec on a problem, as if on a device."""

    spec: KernelSpec
    config: Config
    problem: Problem
    device: DeviceClass

    @property
    def arrays(self) -> dict[str, Array]:
        return {array.name: array for array in self.spec.operation.arrays(self.problem)}

    def wrong(self, kind: Kind, message: str) -> WrongKernel:
        operation, problem = self.spec.operation, self.problem
        words = [operation.name, self.spec.name, operation.text(problem), problem.dtype]
        words += [problem.layout, *(f"{k}={v}" for k, v in operation.special(problem).items())]
        words += ["on", self.device.arch, "with", str(self.config)]
        return WrongKernel(kind, f"{message}\n  {' '.join(filter(None, words))}")


def run(
    case: Case,
    operands: Mapping[str, np.ndarray],
    scalars: Mapping[str, float] | None = None,
    *,
    residues: Mapping[str, int] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Run one call and return its outputs, as stored, in their logical shapes.

    ``operands`` holds the arrays that are read, in the types of :data:`emulator.numbers.STORED`;
    what is only written starts as poison. ``scalars`` defaults to the operation's. ``residues``
    are base addresses modulo 32, by default drawn from what the spec's limits allow. ``seed`` also
    draws the sides on which operands are fenced, and the order of blocks and threads.

    Raises :class:`WrongKernel`, and :class:`Unemulatable` for what needs a GPU.
    """
    spec, problem = case.spec, case.problem
    plan = spec.bound_plan(case.config, problem, case.device)
    if plan.tensor_maps:
        names = ", ".join(m.name for m in plan.tensor_maps)
        raise Unemulatable(f"{spec.name} takes tensor maps ({names}): there is no copy engine")
    for limit in spec.limits(case.config, problem):
        if not _is_of_address(case, limit) and not limit.holds(problem.names):
            raise case.wrong("plan", f"the limits demand {limit}")
    kernels = build.build(spec, case.config, problem, case.device.arch)
    random = np.random.default_rng(seed)
    with ExitStack() as stack:
        regions = {}
        for name, array in case.arrays.items():
            step = _step(case, array)
            drawn = int(random.integers(MODULUS)) // step * step if random.integers(2) else None
            region = Region(
                array.bytes,
                side="end" if random.integers(2) else "start",
                residue=(residues or {}).get(name, drawn),
                step=step,
            )
            regions[name] = stack.enter_context(region)
            if array.role == "out":
                unset(region.elements(array))
            else:
                region.elements(array)[...] = operands[name]
            if array.role == "in":
                region.protect(mmap.PROT_READ)
        workspace = stack.enter_context(Region(int(plan.workspace_bytes)))
        workspace.bytes[:] = UNSET & 0xFF
        workspace.bytes[: plan.zeroed] = 0
        call = _Call(
            case, kernels, regions, workspace, {**dict(spec.operation.scalars), **(scalars or {})}
        )
        for launch in plan.launches:
            call.launch(launch, int(random.integers(2**31)))
        if workspace.bytes[: plan.zeroed].any():
            raise case.wrong("stray_write", "left a workspace that is not zero")
        return call.outputs()


def _step(case: Case, array: Array) -> int:
    """Bytes that the record's limits demand an operand's address to be a multiple of."""
    step = DTYPE_BYTES[array.dtype]
    for limit in case.spec.limits(case.config, case.problem):
        # The attribute `align` is what the addresses of all operands keep.
        named = limit.quantity == array.name and _is_of_address(case, limit)
        if named or limit.quantity == "align":
            step = math.lcm(step, limit.value)
    return step


def _is_of_address(case: Case, limit: Limit) -> bool:
    """Whether a limit is about an operand's base address, not a size of the same name."""
    return limit.quantity in case.arrays and limit.rule == "multiple_of"


@dataclasses.dataclass(frozen=True)
class _Call:
    """The memory and the kernels of one call."""

    case: Case
    kernels: Mapping[str, build.HostKernel]
    regions: Mapping[str, Region]
    workspace: Region
    scalars: Mapping[str, float]

    def launch(self, launch: Launch, seed: int) -> None:
        kernel = self.kernels[launch.kernel]
        signature = "".join(_LETTERS[argument.type] for argument in launch.arguments)
        if signature != kernel.signature:
            raise self.case.wrong(
                "plan", f"{launch.kernel} takes {kernel.signature}, the plan gives {signature}"
            )
        if math.prod(launch.block) > 1024:
            raise self.case.wrong("plan", f"{launch.kernel} has a block of {launch.block} threads")
        if launch.shared_bytes > self.case.device.shared_bytes_per_block:
            raise self.case.wrong(
                "plan", f"{launch.kernel} asks for {launch.shared_bytes} shared bytes"
            )
        fault = kernel(
            build.Launch(
                build.Vec3(*launch.grid), build.Vec3(*launch.block),
                launch.shared_bytes, seed, LIMIT_S, build.Vec3(*launch.cluster),
            ),
            [self._value(argument) for argument in launch.arguments],
        )  # fmt: skip
        if fault.kind:
            raise self.case.wrong(_FAULTS[fault.kind - 1], self._describe(fault, kernel))

    def _value(self, argument: Argument) -> Any:
        value = int(argument.value)
        match argument.type:
            case "pointer":
                return ctypes.c_void_p(self.regions[argument.name].address)
            case "workspace":
                return ctypes.c_void_p(self.workspace.address + value)
            case "int32":
                return ctypes.c_int32(value)
            case "int64":
                return ctypes.c_int64(value)
            case "fp32":
                return ctypes.c_float(self.scalars[argument.name])
            case "fp64":
                return ctypes.c_double(self.scalars[argument.name])

    def _describe(self, fault: build.Fault, kernel: build.HostKernel) -> str:
        words = [f"{kernel.source.name}: thread {fault.thread} of block {fault.block}"]
        words.append(fault.message.decode())
        if fault.line:
            line = kernel.source.text.splitlines()[fault.line - 1].strip()
            words.append(f"in line {fault.line}: {line}")
        if fault.address is not None:
            words.append(f"at address {fault.address:#x}")
            for name, region in self.regions.items():
                if region.owns(fault.address):
                    offset = fault.address - region.address
                    words.append(f"(byte {offset} of {name}, which has {region.size})")
        return " ".join(words)

    def outputs(self) -> dict[str, np.ndarray]:
        outputs = {}
        for name, array in self.case.arrays.items():
            if not self.regions[name].intact(array):
                raise self.case.wrong("stray_write", f"wrote next to {name} or between its rows")
            if array.role == "in":
                continue
            outputs[name] = self.regions[name].elements(array).copy()
            missing = np.argwhere(is_unset(outputs[name]))
            if len(missing):
                raise self.case.wrong(
                    "unset",
                    f"{len(missing)} elements of {name} are unset, "
                    f"the first at {tuple(map(int, missing[0]))}",
                )
        return outputs

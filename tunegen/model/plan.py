# SPDX-License-Identifier: Apache-2.0
"""Launch plans: everything one call of an operation puts on a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunegen.errors import PlanError
from tunegen.model.expr import Expr, evaluate

ArgumentType = Literal["pointer", "workspace", "int32", "int64", "fp32", "fp64"]

# CUDA's limits on a grid, the same for every capability from 3.0 on.
GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument.

    "pointer" is the operand ``name``; "workspace" the plan's workspace at byte offset ``value``;
    integers carry a formula as a :class:`Launch` does; "fp32" and "fp64" are the run-time scalar
    ``name``, given by the caller.
    """

    name: str
    type: ArgumentType
    value: int | str = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a plan. Extents are numbers, or formulas over the problem's sizes and
    attributes and ``SM_COUNT``, the device's number of multiprocessors.

    A launch whose grid comes out empty is not made: there is nothing to write.
    """

    kernel: str
    grid: tuple[int | str, int | str, int | str]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor that a launch takes by value, over the operand ``array``.

    Extents in elements, strides in bytes, innermost first, as the driver takes them.
    """

    name: str
    array: str
    dtype: str
    extents: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launches of one call, in order, and the memory they need besides the operands.

    ``workspace_init`` says what must be in the workspace before the first call: "none" or "zero";
    a plan leaves a zeroed workspace zeroed.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int | str = 0
    workspace_init: Literal["none", "zero"] = "none"
    tensor_maps: tuple[TensorMap, ...] = ()

    def bind(self, sizes: Mapping[str, int]) -> LaunchPlan:
        """The plan with every formula evaluated; empty launches are left out. ``sizes`` are the
        problem's sizes and attributes by name, and ``SM_COUNT`` where formulas name it.

        Raises :class:`PlanError` for a grid beyond CUDA's limits.
        """
        launches = []
        for launch in self.launches:
            x, y, z = (evaluate(extent, sizes) for extent in launch.grid)
            if not (x and y and z):
                continue
            for axis, extent, limit in zip("xyz", (x, y, z), GRID_LIMITS, strict=True):
                if extent > limit:
                    raise PlanError(
                        f"{launch.kernel} needs {extent} blocks in {axis}, more than {limit}"
                    )
            arguments = tuple(
                Argument(a.name, a.type, evaluate(a.value, sizes)) for a in launch.arguments
            )
            launches.append(
                Launch(
                    launch.kernel, (x, y, z), launch.block, arguments,
                    launch.shared_bytes, launch.cluster,
                )
            )  # fmt: skip
        maps = tuple(
            TensorMap(
                m.name, m.array, m.dtype,
                tuple(evaluate(extent, sizes) for extent in m.extents),
                tuple(evaluate(stride, sizes) for stride in m.strides),
                m.box, m.swizzle, m.l2_promotion,
            )
            for m in self.tensor_maps
        )  # fmt: skip
        workspace = evaluate(self.workspace_bytes, sizes) if launches else 0
        return LaunchPlan(tuple(launches), workspace, self.workspace_init, maps)


@dataclass(frozen=True, slots=True)
class Limit:
    """A precondition that dispatch must check before it launches a recorded kernel.

    ``quantity`` is a size, an attribute, or an operand (its base address).
    """

    quantity: str
    rule: Literal["multiple_of", "at_most", "at_least", "equal"]
    value: int

    def holds(self, quantities: Mapping[str, int]) -> bool:
        """Whether it holds; a quantity that is not given counts as unknown and does not."""
        if self.quantity not in quantities:
            return False
        actual = quantities[self.quantity]
        match self.rule:
            case "multiple_of":
                return actual % self.value == 0
            case "at_most":
                return actual <= self.value
            case "at_least":
                return actual >= self.value
            case "equal":
                return actual == self.value

    def __str__(self) -> str:
        words = {"multiple_of": "a multiple of", "at_most": "at most", "at_least": "at least",
                 "equal": "equal to"}  # fmt: skip
        return f"{self.quantity} {words[self.rule]} {self.value}"


def formula(value: int | Expr) -> int | str:
    """A number as it is, an :class:`Expr` as text: what launches and arguments store."""
    return str(value) if isinstance(value, Expr) else int(value)

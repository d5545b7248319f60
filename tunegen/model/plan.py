# SPDX-License-Identifier: Apache-2.0
"""Launch plans: everything one call of an operation puts on a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tunegen.errors import PlanError
from tunegen.model.expr import evaluate
from tunegen.model.tensor_map import TensorMap

ArgumentType = Literal["pointer", "workspace", "tensor_map", "int32", "int64", "fp32", "fp64"]

# CUDA's limits on a grid, the same for every capability from 3.0 on.
GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument.

    "pointer" is the operand ``name``; "workspace" the plan's workspace at byte offset ``value``;
    "tensor_map" the plan's tensor map ``name``, by value; integers carry a formula as a
    :class:`Launch` does; "fp32" and "fp64" are the run-time scalar ``name``, given by the caller.
    """

    name: str
    type: ArgumentType
    value: int | str = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a plan. Extents are numbers, or formulas over the problem's sizes and
    attributes and ``SM_COUNT``, the device's number of multiprocessors.

    A launch whose grid comes out empty is not made: there is nothing to write. ``cluster`` is for
    kernels that do not fix their own with ``__cluster_dims__``. A ``programmatic`` launch may
    begin while the one ahead of it on the stream still runs (CUDA's programmatic dependent launch,
    from compute capability 9.0 on): its kernel waits for that one itself, with
    ``griddepcontrol.wait``, before it touches memory. It is as right where it is launched plainly.
    """

    kernel: str
    grid: tuple[int | str, int | str, int | str]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False

    @property
    def tensor_maps(self) -> tuple[str, ...]:
        """Names of the tensor maps that it takes."""
        return tuple(a.name for a in self.arguments if a.type == "tensor_map")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launches of one call, in order, and the memory they need besides the operands.

    ``workspace_init`` says what must be in the workspace before the first call: "none", or "zero"
    in its first ``zeroed_bytes``, which are all of them where that is None. A plan leaves what is
    zeroed as it was.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int | str = 0
    workspace_init: Literal["none", "zero"] = "none"
    tensor_maps: tuple[TensorMap, ...] = ()
    zeroed_bytes: int | str | None = None

    @property
    def zeroed(self) -> int:
        """Bytes at the start of a bound plan's workspace that have to be zero before its use."""
        if self.workspace_init == "none":
            return 0
        return int(self.workspace_bytes if self.zeroed_bytes is None else self.zeroed_bytes)

    def bind(self, sizes: Mapping[str, int]) -> LaunchPlan:
        """The plan with every formula evaluated; empty launches are left out, and tensor maps that
        no other launch takes. ``sizes`` are the problem's sizes and attributes by name, and
        ``SM_COUNT`` where formulas name it.

        Raises :class:`PlanError` for a grid beyond CUDA's limits, and for a tensor map that is not
        there, that the driver would refuse, or that ends outside of the workspace.
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
            launches.append(replace(launch, grid=(x, y, z), arguments=arguments))
        workspace = evaluate(self.workspace_bytes, sizes) if launches else 0
        maps = self._bound_maps(launches, workspace, sizes)
        zeroed = self.zeroed_bytes
        if zeroed is not None:
            zeroed = min(evaluate(zeroed, sizes), workspace)
        return LaunchPlan(tuple(launches), workspace, self.workspace_init, maps, zeroed)

    def _bound_maps(
        self, launches: Sequence[Launch], workspace_bytes: int, sizes: Mapping[str, int]
    ) -> tuple[TensorMap, ...]:
        """The maps that the launches take, in the plan's order."""
        known = [tensor_map.name for tensor_map in self.tensor_maps]
        if len(set(known)) < len(known):
            raise PlanError(f"two tensor maps of a plan have one name: {', '.join(known)}")
        taken = {name: launch.kernel for launch in launches for name in launch.tensor_maps}
        for name, kernel in taken.items():
            if name not in known:
                has = ", ".join(known) or "none"
                raise PlanError(f"{kernel} takes the tensor map {name}, the plan has {has}")
        bound = [m.bind(sizes) for m in self.tensor_maps if m.name in taken]
        for tensor_map in bound:
            if tensor_map.in_workspace and tensor_map.end > workspace_bytes:
                raise PlanError(
                    f"tensor map {tensor_map.name} ends {tensor_map.end} bytes into a workspace "
                    f"of {workspace_bytes}"
                )
        return tuple(bound)


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

# SPDX-License-Identifier: Apache-2.0
"""Whether what kernels did is right, and in words what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.device import Gpu
from tunegen.model import DTYPE_BYTES, Array
from tunegen.model.checks import POISON
from tunegen.runner.checkers import Comparison, Count
from tunegen.runner.operands import Operands, Placed, place

# A single element may be off by this many times the RMS error that is allowed, relative to the RMS
# of the result. Rounding stays below: an element is at most some 6 times the RMS, and its rounding
# error at most twice the RMS of rounding errors.
_OUTLIER = 32

_STORED = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. ``reason`` is empty for a right result; the errors are the worst ones
    over all outputs, see :class:`tunegen.runner.checkers.Comparison`."""

    reason: str = ""
    relative_error: float = 0.0
    largest_error: float = 0.0


class Checks:
    """Checks what a launch left in the operands, and runs launches to be checked."""

    def __init__(self, gpu: Gpu, operands: Operands) -> None:
        self._gpu = gpu
        self._operands = operands

    def launch(self, launch: Callable[[int], None], index: int = 0) -> None:
        """Launch once on poisoned outputs and restored inputs, and wait; raises what the kernels
        do wrong."""
        self._operands.poison(index)
        launch(index)
        self._gpu.synchronize()

    def inspect(
        self,
        index: int = 0,
        *,
        tolerance: float = np.inf,
        exact: bool = False,
        workspace: Placed | None = None,
    ) -> Finding:
        """What the last launch on a set left there: results, guard bands and gaps, inputs.

        ``tolerance`` is the largest relative RMS error; ``exact`` demands the expected values
        rounded to the output's type. An output without expected values is not compared.
        """
        reasons = []
        relative = largest = 0.0
        for name, placed in self._operands.sets[index].items():
            if placed.array.role != "in" and name in self._operands.expected:
                compared = self._compare(placed)
                relative = max(relative, compared.relative_error)
                largest = max(largest, compared.largest_error)
                reasons += self._wrong(placed, compared, tolerance, exact)
            reasons += self._astray(placed)
            if placed.array.role == "in":
                reasons += self._changed(placed)
        if workspace is not None:
            reasons += self._astray(workspace)
        return Finding("; ".join(reasons), relative, largest)

    def repeats(self, launch: Callable[[int], None], times: int) -> bool:
        """Whether ``times`` further launches give the very bits that lie in the first set.

        Raises :class:`tunegen.errors.DeviceError` where there is no memory to keep them.
        """
        kept = {}
        try:
            for name, placed in self._operands.sets[0].items():
                if placed.array.role != "in":
                    kept[name] = self._gpu.allocate(placed.array.bytes)
                    self._gpu.copy(kept[name], placed.address, placed.array.bytes)
            for _ in range(times):
                self.launch(launch)
                for name, address in kept.items():
                    placed = self._operands.sets[0][name]
                    if self._differences(placed.array, placed.address, address).count:
                        return False
            return True
        finally:
            for address in kept.values():
                self._gpu.release(address)

    # --- what is wrong -----------------------------------------------------------------------

    def _wrong(
        self, placed: Placed, found: Comparison, tolerance: float, exact: bool
    ) -> list[str]:
        name, of = placed.array.name, f"of {found.elements:,} elements of {placed.array.name}"
        if found.unwritten.count:
            at = _index(placed.array, found.unwritten.first)
            return [f"{found.unwritten.count:,} {of} were not written, the first at {at}"]
        if found.special.count:
            values = self._values(placed, found.special.first)
            return [
                f"{found.special.count:,} {of} are NaN or infinite where they should not be, or "
                f"not where they should, the first {values}"
            ]
        if exact:
            if not found.inexact.count:
                return []
            values = self._values(placed, found.inexact.first)
            return [f"{found.inexact.count:,} {of} are not exact on integers, the first {values}"]
        worst = f"the largest error is {found.largest_error:.3g}"
        if not found.relative_error <= tolerance:
            return [
                f"the relative RMS error of {name} is {found.relative_error:.3g}, more than "
                f"{tolerance:.3g}; {worst} {self._values(placed, found.largest_at)}"
            ]
        if found.largest_error > _OUTLIER * tolerance * found.expected_rms:
            return [
                f"one element of {name} is far off, although the relative RMS error is "
                f"{found.relative_error:.3g}: {worst} {self._values(placed, found.largest_at)}"
            ]
        return []

    def _astray(self, placed: Placed) -> list[str]:
        array = placed.array
        found = self._operands.checkers.stray(
            array, placed.buffer, placed.buffer_bytes, placed.address
        )
        if not found.count:
            return []
        distance = found.first * DTYPE_BYTES[array.dtype]
        if found.first < 0:
            where = f"{-distance:,} bytes before its first one"
        elif found.first >= array.elements:
            where = f"{distance - array.bytes:,} bytes behind its last one"
        else:
            where = f"between its rows, {distance:,} bytes from its first one"
        return [f"wrote to {found.count:,} places beside the elements of {array.name}: {where}"]

    def _changed(self, placed: Placed) -> list[str]:
        array = placed.array
        original = self._operands.originals[array.name]
        found = self._differences(array, placed.address, original.address)
        if not found.count:
            return []
        return [
            f"changed {found.count:,} elements of its input {array.name}, the first "
            f"{found.first * DTYPE_BYTES[array.dtype]:,} bytes from its start"
        ]

    def _compare(self, placed: Placed) -> Comparison:
        expected = self._operands.expected[placed.array.name]
        return self._operands.checkers.compare(placed.array, placed.address, expected)

    def _differences(self, array: Array, left: int, right: int) -> Count:
        return self._operands.checkers.differences(array, left, right)

    def _values(self, placed: Placed, index: int) -> str:
        """``at (3, 7): 1.5 instead of 1.25``."""
        array = placed.array
        position = np.unravel_index(index, array.shape)
        offset = sum(int(i) * s for i, s in zip(position, array.strides, strict=True))
        stored = np.zeros(1, _STORED[array.dtype])
        self._gpu.download(placed.address + offset * stored.itemsize, stored)
        expected = self._operands.expected[array.name]
        wanted = self._gpu.download(expected + index * 8, np.zeros(1))
        return (
            f"at {_index(array, index)}: {_value(stored, array.dtype):.9g} "
            f"instead of {wanted[0]:.9g}"
        )


def _index(array: Array, index: int) -> str:
    position = [int(i) for i in np.unravel_index(index, array.shape)]
    return f"({', '.join(map(str, position))})"


def _value(stored: NDArray[Any], dtype: str) -> float:
    if dtype == "bf16":  # the upper half of fp32
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return float(stored[0])


class Workspace:
    """The memory that a plan needs besides the operands, between guard bands, and in the state in
    which the plan wants it: its first ``zeroed`` bytes zero, the others poison."""

    def __init__(self, gpu: Gpu, size: int, *, zeroed: int) -> None:
        # Guard bands are looked at in units of two bytes.
        units = -(-size // 2)
        array = Array("the workspace", (units,), (1,), "fp16", "inout")
        self._gpu = gpu
        self._zeroed = zeroed
        self._memory = gpu.allocate(place(array, 0).end)
        self.placed = place(array, self._memory)
        self.refresh()

    def refresh(self) -> None:
        """Make it as it is before the first call."""
        self._gpu.fill(self.placed.buffer, POISON, self.placed.buffer_bytes)
        if self._zeroed:
            self._gpu.fill(self.placed.address, 0, self._zeroed)

    def close(self) -> None:
        self._gpu.release(self._memory)

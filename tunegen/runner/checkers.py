# SPDX-License-Identifier: Apache-2.0
"""The kernels that draw inputs and look at results, ready to be called: one launch, one answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.device import Gpu
from tunegen.model import DTYPE_BYTES, Array, CompiledKernel, Launch, LaunchPlan
from tunegen.model import checks as launches

_PARTIALS_BYTES = launches.MAX_BLOCKS * max(launches.COUNT.itemsize, launches.COMPARISON.itemsize)


@dataclass(frozen=True, slots=True)
class Count:
    """How many of something there are, and the first one's index; 0 and 0 where there is none."""

    count: int = 0
    first: int = 0

    @classmethod
    def of(cls, partials: NDArray[Any]) -> Count:
        found = partials[partials["count"] > 0]
        if not len(found):
            return cls()
        return cls(int(found["count"].sum()), int(found["first"].min()))


@dataclass(frozen=True, slots=True)
class Comparison:
    """An array against what was expected: squares summed over its elements, the largest absolute
    error and its index, elements that nothing wrote, that are NaN or infinite where the other is
    not, and that are not the expected value rounded to their type."""

    elements: int
    error_squares: float
    expected_squares: float
    largest_error: float
    largest_at: int
    unwritten: Count
    special: Count
    inexact: Count

    @property
    def relative_error(self) -> float:
        """The RMS error over the RMS of what was expected; infinite where that is zero and the
        result is not."""
        if not self.error_squares:
            return 0.0
        if not self.expected_squares:
            return math.inf
        return math.sqrt(self.error_squares / self.expected_squares)

    @property
    def expected_rms(self) -> float:
        return math.sqrt(self.expected_squares / max(1, self.elements))


class Checkers:
    """The kernels of :mod:`tunegen.model.checks`, loaded. Addresses are on the device."""

    def __init__(self, gpu: Gpu, kernels: Sequence[CompiledKernel]) -> None:
        self._gpu = gpu
        self._kernels = gpu.load(kernels)
        self._partials = gpu.allocate(_PARTIALS_BYTES)

    def close(self) -> None:
        self._gpu.release(self._partials)
        self._kernels.close()

    def draw(self, array: Array, address: int, seed: int, *, integers: bool) -> None:
        """Fill an array with random elements, which depend on seed and index alone."""
        self._launch(launches.random(array, seed, integers=integers), {"out": address})

    def compare(self, array: Array, address: int, expected: int) -> Comparison:
        """An array against fp64 elements without gaps."""
        if not array.elements:
            return Comparison(0, 0.0, 0.0, 0.0, 0, Count(), Count(), Count())
        launch = launches.compare(array)
        partials = self._result(
            launch, {"actual": address, "expected": expected}, launches.COMPARISON
        )
        largest = float(partials["largest_error"].max())
        worst = partials["largest_at"][partials["largest_error"] == largest]
        return Comparison(
            elements=math.prod(array.shape),
            error_squares=float(partials["error_squares"].sum()),
            expected_squares=float(partials["expected_squares"].sum()),
            largest_error=largest,
            largest_at=int(worst.min()),
            unwritten=Count.of(partials["unwritten"]),
            special=Count.of(partials["special"]),
            inexact=Count.of(partials["inexact"]),
        )

    def stray(self, array: Array, buffer: int, buffer_bytes: int, address: int) -> Count:
        """What does not hold the poison in a buffer besides the elements of the array in it, in
        elements from the array's first one: negative ones lie before it."""
        element = DTYPE_BYTES[array.dtype]
        front = (address - buffer) // element
        launch = launches.stray(array, units=buffer_bytes // element, front=front)
        found = Count.of(self._result(launch, {"buffer": buffer}, launches.COUNT))
        return Count(found.count, found.first - front) if found.count else found

    def differences(self, array: Array, left: int, right: int) -> Count:
        """Where two arrays differ bit by bit, gaps included, in elements from their first one."""
        if not array.elements:
            return Count()
        launch = launches.differences(DTYPE_BYTES[array.dtype], array.elements)
        return Count.of(self._result(launch, {"left": left, "right": right}, launches.COUNT))

    def _result(
        self, launch: Launch, operands: Mapping[str, int], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        self._launch(launch, {**operands, "partials": self._partials})
        return self._gpu.download(self._partials, np.zeros(int(launch.grid[0]), dtype))

    def _launch(self, launch: Launch, operands: Mapping[str, int]) -> None:
        self._kernels.bind(LaunchPlan((launch,)), operands, {}).launch(self._gpu.stream)

# SPDX-License-Identifier: Apache-2.0
"""The operands of a problem in device memory: several sets of them, each between guard bands.

::

    set 0           | guard | A | guard | guard | B | guard | guard | C | guard |
    set 1           ...
    originals         A  B        what sets are filled from, and compared with
    expected          C           fp64, without gaps

Everything that holds no element is poison. All sets hold the same values, so that a result may be
taken from any of them. It is one allocation: a kernel that writes far astray damages something
else in it, which is why :meth:`Operands.refresh` makes all of it anew after a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.device import Gpu
from tunegen.errors import DeviceError
from tunegen.model import DTYPE_BYTES, Array
from tunegen.model.checks import POISON
from tunegen.runner.checkers import Checkers
from tunegen.runner.protocol import Executable, Prepare

# Vectors, tensor maps and swizzled tiles ask for no more than 256 bytes.
ALIGNMENT = 256

# A guard band is as long as its operand, within these bounds: long enough that a few rows too many
# end in it, and no burden to small problems.
_LEAST_GUARD, _MOST_GUARD = 512, 1 << 16

# Modules, graphs and local memory of the kernels to come.
_RESERVE_BYTES = 64 << 20

_FP64 = np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class Placed:
    """An array in device memory: ``address`` of its first element, and the buffer around it."""

    array: Array
    buffer: int
    buffer_bytes: int
    address: int

    @property
    def end(self) -> int:
        return self.buffer + self.buffer_bytes


def place(array: Array, start: int, offset: int = 0) -> Placed:
    """The array at the first aligned place from ``start`` on that leaves room for a guard band,
    moved by ``offset`` bytes.

    Raises :class:`DeviceError` for an offset that cuts an element, and for more dimensions than
    the kernels that check know.
    """
    if len(array.shape) > 3:
        raise DeviceError(f"{array.name} has {len(array.shape)} dimensions, more than three")
    if offset < 0 or offset % DTYPE_BYTES[array.dtype]:
        raise DeviceError(f"{array.name} cannot lie {offset} bytes from an aligned address")
    guard = min(max(_aligned(array.bytes), _LEAST_GUARD), _MOST_GUARD)
    buffer = _aligned(start)
    address = buffer + guard + offset
    return Placed(array, buffer, _aligned(address + array.bytes) + guard - buffer, address)


def _aligned(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Layout:
    """What lies where, for memory that begins at some address and ends at ``end``."""

    sets: tuple[dict[str, Placed], ...]
    originals: dict[str, Placed]
    expected: dict[str, int]
    end: int

    @classmethod
    def of(cls, request: Prepare, start: int) -> _Layout:
        end = start
        sets = []
        for _ in range(request.sets):
            placed = {}
            for array in request.arrays:
                offset = request.offsets.get(array.name, 0)
                placed[array.name] = place(array, end, offset)
                end = placed[array.name].end
            sets.append(placed)
        originals = {}
        for array in _read(request.arrays):
            originals[array.name] = place(array, end)
            end = originals[array.name].end
        expected = {}
        for array in _written(request.arrays):
            if request.reference is not None or array.name in (request.expected or {}):
                expected[array.name] = _aligned(end)
                end = expected[array.name] + math.prod(array.shape) * _FP64.itemsize
        return cls(tuple(sets), originals, expected, end)


def _read(arrays: Sequence[Array]) -> Iterator[Array]:
    return (array for array in arrays if array.role != "out")


def _written(arrays: Sequence[Array]) -> Iterator[Array]:
    return (array for array in arrays if array.role != "in")


class Operands:
    """The operands that :class:`Prepare` asks for, filled.

    Raises :class:`DeviceError` with the bytes needed and free where they do not fit; nothing is
    allocated then.
    """

    def __init__(self, gpu: Gpu, request: Prepare) -> None:
        if request.sets < 1:
            raise DeviceError(f"{request.sets} sets of operands are none")
        self._gpu = gpu
        self._request = request
        self.scalars = request.scalars
        self.bytes = _Layout.of(request, 0).end
        free = gpu.free_bytes()
        if self.bytes + _RESERVE_BYTES > free:
            sets = "one set" if request.sets == 1 else f"{request.sets} sets"
            raise DeviceError(
                f"{sets} of operands with guard bands, originals and expected results need "
                f"{self.bytes:,} bytes of device memory and {_RESERVE_BYTES:,} for kernels, "
                f"{free:,} are free"
            )
        with ExitStack() as undo:
            self._memory = gpu.allocate(self.bytes)
            undo.callback(gpu.release, self._memory)
            self.checkers = Checkers(gpu, request.checks)
            undo.callback(self.checkers.close)
            self._layout = _Layout.of(request, self._memory)
            self.refresh()
            self._undo = undo.pop_all()

    @property
    def sets(self) -> tuple[dict[str, Placed], ...]:
        return self._layout.sets

    @property
    def originals(self) -> Mapping[str, Placed]:
        """What the operands that a call reads held at first, by name."""
        return self._layout.originals

    @property
    def expected(self) -> Mapping[str, int]:
        """Addresses of the expected results by name; none where none were asked for."""
        return self._layout.expected

    @property
    def unexpected(self) -> tuple[str, ...]:
        """The outputs of which no values are expected."""
        outputs = (array.name for array in _written(self._request.arrays))
        return tuple(name for name in outputs if name not in self.expected)

    @property
    def in_place(self) -> bool:
        """Whether a call changes what it reads."""
        return any(array.role == "inout" for array in self._request.arrays)

    def addresses(self, index: int) -> dict[str, int]:
        """Where the operands of one set begin."""
        return {name: placed.address for name, placed in self.sets[index].items()}

    def refresh(self) -> None:
        """Make everything as if nothing had ever run."""
        request, gpu = self._request, self._gpu
        gpu.fill(self._memory, POISON, self.bytes)
        for position, (name, placed) in enumerate(self.originals.items()):
            if request.given is not None and name in request.given:
                gpu.upload(placed.address, _with_gaps(placed.array, request.given[name]))
            else:
                self.checkers.draw(
                    placed.array, placed.address, _seed(request.seed, position),
                    integers=request.inputs == "integers",
                )  # fmt: skip
        for placed_set in self.sets:
            for name, original in self.originals.items():
                gpu.copy(placed_set[name].address, original.address, original.array.bytes)
        if request.reference is not None:
            self._compute(request.reference)
        for name, values in (request.expected or {}).items():
            gpu.upload(self.expected[name], np.asarray(values, dtype=_FP64))
        gpu.synchronize()

    def _compute(self, reference: Executable) -> None:
        """Have the expected results written by a kernel, from the first set."""
        operands = self.addresses(0)
        operands |= {f"reference_{name}": address for name, address in self.expected.items()}
        kernels = self._gpu.load(reference.kernels)
        try:
            kernels.bind(reference.plan, operands, self.scalars).launch(self._gpu.stream)
            self._gpu.synchronize()
        finally:
            kernels.close()

    def restore(self, index: int) -> None:
        """Give what a call changes in place its first values, in one set."""
        for array in self._request.arrays:
            if array.role == "inout":
                original = self.originals[array.name]
                self._gpu.copy(self.sets[index][array.name].address, original.address, array.bytes)

    def poison(self, index: int) -> None:
        """Make one set ready for a launch that is checked: nothing in it has been written."""
        self.restore(index)
        for placed in self.sets[index].values():
            if placed.array.role == "out":
                self._gpu.fill(placed.buffer, POISON, placed.buffer_bytes)

    def close(self) -> None:
        self._undo.close()


def _seed(seed: int, position: int) -> int:
    """A seed of 63 bits for each operand."""
    return (seed + (position << 40)) & (1 << 63) - 1


def _with_gaps(array: Array, values: NDArray[Any]) -> NDArray[Any]:
    """The memory from the first to the last element of an array, poison between its rows."""
    content: NDArray[Any] = np.full(array.bytes, POISON, np.uint8)
    if array.elements:
        element = DTYPE_BYTES[array.dtype]
        stored = np.asarray(values)
        if stored.shape != array.shape or stored.itemsize != element:
            raise DeviceError(
                f"{array.name} is given as {stored.dtype}{list(stored.shape)}, "
                f"it is {array.dtype}{list(array.shape)}"
            )
        strides = [stride * element for stride in array.strides]
        inside = content.view(stored.dtype)
        np.lib.stride_tricks.as_strided(inside, array.shape, strides)[...] = stored
    return content

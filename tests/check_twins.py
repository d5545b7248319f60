# SPDX-License-Identifier: Apache-2.0
"""The kernels that draw and check, a second time in NumPy: for a GPU that has no others, and for
the others to be held against."""

from __future__ import annotations

import numpy as np
from emulator.numbers import STORED, load, store
from fake_gpu import FakeKernel, Memory, Values

from tunegen.model import DTYPE_BYTES, Launch
from tunegen.model import checks as launches

_DTYPES = {code: dtype for dtype, code in launches.DTYPE_CODES.items()}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(seed: int, count: int) -> np.ndarray:
    """SplitMix64 of seed and index."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def integers(seed: int, count: int) -> np.ndarray:
    high = bits(seed, count) >> np.uint64(32)
    return (high * np.uint64(5) >> np.uint64(32)).astype(np.float64) - 2


def normals(seed: int, count: int) -> np.ndarray:
    drawn = bits(seed, count)
    high = (drawn >> np.uint64(32)).astype(np.float64)
    low = (drawn & np.uint64(0xFFFFFFFF)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((high + 0.5) / 2**32))
    return radius * np.cos(2 * np.pi * low / 2**32)


def elements(memory: Memory, address: int, values: Values, item: np.dtype) -> np.ndarray:
    """The logical elements of an array, without its gaps, in a shape of three."""
    extents = [values[name] for name in ("n0", "n1", "n2")]
    strides = [values[name] for name in ("s0", "s1", "s2")]
    if 0 in extents:
        return np.zeros(extents, item)
    span = 1 + sum((n - 1) * s for n, s in zip(extents, strides, strict=True))
    flat = memory.view(address, span, item)
    # A stride beyond the array is only ever multiplied by zero.
    steps = [s * flat.itemsize if n > 1 else 0 for n, s in zip(extents, strides, strict=True)]
    return np.lib.stride_tricks.as_strided(flat, extents, steps)


def random(memory: Memory, launch: Launch, values: Values) -> None:
    dtype = _DTYPES[values["dtype"]]
    out = elements(memory, values["out"], values, np.dtype(STORED[dtype]))
    draw = integers if values["integers"] else normals
    out[...] = store(draw(values["seed"], out.size).reshape(out.shape), dtype)


def compare(memory: Memory, launch: Launch, values: Values) -> None:
    dtype = _DTYPES[values["dtype"]]
    stored = elements(memory, values["actual"], values, np.dtype(STORED[dtype])).reshape(-1)
    wanted = memory.view(values["expected"], stored.size, np.float64)
    found = load(stored, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = load(store(wanted, dtype), dtype)
    unwritten = stored.view(_BITS[stored.itemsize]) == np.iinfo(_BITS[stored.itemsize]).max
    finite = np.isfinite(found) & np.isfinite(rounded) & ~unwritten
    same = (found == rounded) | (np.isnan(found) & np.isnan(rounded))
    errors = np.where(finite, np.abs(found - np.where(finite, wanted, 0)), 0)
    partials = memory.view(values["partials"], int(launch.grid[0]), launches.COMPARISON)
    partials[:] = np.zeros(1, launches.COMPARISON)
    partials[0] = (
        np.sum(errors**2),
        np.sum(wanted[finite] ** 2),
        errors.max(),
        errors.argmax(),
        count(unwritten),
        count(~finite & ~same & ~unwritten),
        count(finite & ~same),
    )


def stray(memory: Memory, launch: Launch, values: Values) -> None:
    unit = values["unit_bytes"]
    content = memory.view(values["buffer"], values["units"], _BITS[unit])
    outside = np.ones(values["units"], bool)
    marks = Memory()
    address = marks.allocate(values["units"])
    marks.view(address, values["units"], np.uint8)[:] = 1
    elements(marks, address + values["front"], values, np.dtype(np.uint8))[...] = 0
    outside = marks.view(address, values["units"], np.uint8).astype(bool)
    found = outside & (content != np.iinfo(_BITS[unit]).max)
    _leave(memory, launch, values, found)


def differences(memory: Memory, launch: Launch, values: Values) -> None:
    kind = _BITS[values["unit_bytes"]]
    left = memory.view(values["left"], values["units"], kind)
    right = memory.view(values["right"], values["units"], kind)
    _leave(memory, launch, values, left != right)


def _leave(memory: Memory, launch: Launch, values: Values, found: np.ndarray) -> None:
    partials = memory.view(values["partials"], int(launch.grid[0]), launches.COUNT)
    partials[:] = np.zeros(1, launches.COUNT)
    partials[-1] = count(found)


def count(found: np.ndarray) -> tuple[int, int]:
    return int(found.sum()), int(found.argmax()) if found.any() else -1


def kernels() -> dict[str, FakeKernel]:
    """Fresh ones, by the cubin that stands for them."""
    functions = {"random": random, "compare": compare, "stray": stray, "differences": differences}
    return {name: FakeKernel(run, us=5.0) for name, run in functions.items()}


assert set(_BITS) >= set(DTYPE_BYTES.values())

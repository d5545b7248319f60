# SPDX-License-Identifier: Apache-2.0
"""How the kernels that fill and check operands are called.

They are written in :mod:`tunegen.kernels.checks` and launched by the runner; this is what the two
agree on. A launch names its pointers: the caller gives the addresses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tunegen.model.expr import ceil_div
from tunegen.model.plan import Argument, Launch
from tunegen.model.problem import DTYPE_BYTES, Array

THREADS = 256

# A grid strides over what is more. The kernels that count leave one partial result per block.
MAX_BLOCKS = 1024

# What memory holds that nothing has written: a NaN in every floating-point type, and one that no
# arithmetic gives.
POISON = 0xFF

# Integer inputs lie between -2 and 2: the products of 2^20 pairs add up to at most 2^22, which
# fp32 holds in whatever order they are added.
INTEGER_RANGE = 2

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPE_BYTES)}

_COUNT = [("count", np.int64), ("first", np.int64)]

# One block's partial results, as the kernels write them; ``first`` is undefined where ``count``
# is 0, and ``largest_at`` where ``largest_error`` is.
COUNT: np.dtype[Any] = np.dtype(_COUNT)
COMPARISON: np.dtype[Any] = np.dtype(
    [
        ("error_squares", np.float64),
        ("expected_squares", np.float64),
        ("largest_error", np.float64),
        ("largest_at", np.int64),
        ("unwritten", _COUNT),
        ("special", _COUNT),
        ("inexact", _COUNT),
    ]
)


def random(array: Array, seed: int, *, integers: bool) -> Launch:
    """Fill the elements at ``out``; ``seed`` is less than 2^63."""
    return _launch(
        "random",
        math.prod(array.shape),
        Argument("out", "pointer"),
        _dtype(array),
        Argument("integers", "int32", int(integers)),
        Argument("seed", "int64", seed),
        *_strided(array),
    )


def compare(array: Array) -> Launch:
    """Compare the elements at ``actual`` with the fp64 ones, without gaps, at ``expected``; a
    :data:`COMPARISON` per block goes to ``partials``."""
    return _launch(
        "compare",
        math.prod(array.shape),
        Argument("actual", "pointer"),
        Argument("expected", "pointer"),
        Argument("partials", "pointer"),
        _dtype(array),
        *_strided(array),
    )


def stray(array: Array, *, units: int, front: int) -> Launch:
    """Look for what is not poison at ``buffer``, which has room for ``units`` elements and in
    which the array begins after ``front`` of them. A :data:`COUNT` per block goes to ``partials``;
    its ``first`` counts elements from the start of the buffer."""
    dense = array.elements == math.prod(array.shape)
    skipped = array.elements if dense else 0
    return _launch(
        "stray",
        units - skipped,
        Argument("buffer", "pointer"),
        Argument("partials", "pointer"),
        Argument("unit_bytes", "int32", DTYPE_BYTES[array.dtype]),
        Argument("units", "int64", units),
        Argument("front", "int64", front),
        Argument("skipped", "int64", skipped),
        *_strided(array),
    )


def differences(unit_bytes: int, units: int) -> Launch:
    """Compare ``units`` elements at ``left`` and ``right`` bit by bit; a :data:`COUNT` per block
    goes to ``partials``."""
    return _launch(
        "differences",
        units,
        Argument("left", "pointer"),
        Argument("right", "pointer"),
        Argument("partials", "pointer"),
        Argument("unit_bytes", "int32", unit_bytes),
        Argument("units", "int64", units),
    )


def _launch(kernel: str, items: int, *arguments: Argument) -> Launch:
    blocks = min(MAX_BLOCKS, max(1, ceil_div(items, THREADS)))
    return Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), arguments)


def _dtype(array: Array) -> Argument:
    return Argument("dtype", "int32", DTYPE_CODES[array.dtype])


def _strided(array: Array) -> tuple[Argument, ...]:
    """Extents and strides as three dimensions, the first ones 1 where there are fewer."""
    if len(array.shape) > 3:
        raise ValueError(f"{array.name} has {len(array.shape)} dimensions, checks know three")
    missing = 3 - len(array.shape)
    extents = (1,) * missing + array.shape
    # A dimension of one element has no second one: its stride is put out of reach.
    beyond = array.elements + 1
    strides = (beyond,) * missing + array.strides
    strides = tuple(s if n > 1 else beyond for n, s in zip(extents, strides, strict=True))
    names = ("n0", "n1", "n2", "s0", "s1", "s2")
    return tuple(
        Argument(name, "int64", value)
        for name, value in zip(names, extents + strides, strict=True)
    )

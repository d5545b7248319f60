# SPDX-License-Identifier: Apache-2.0
"""The kernels that draw inputs and check results; :mod:`tunegen.model.checks` says how they are
called. One set serves every dtype, so it is compiled once per architecture."""

from __future__ import annotations

from tunegen.model import KernelDefinition
from tunegen.model.checks import DTYPE_CODES, INTEGER_RANGE, THREADS

_CONSTANTS = {
    "THREADS": THREADS,
    "INTEGER_RANGE": INTEGER_RANGE,
    **{f"DTYPE_{dtype.upper()}": code for dtype, code in DTYPE_CODES.items()},
}

DEFINITIONS = tuple(
    KernelDefinition(name, f"check/{name}.cu.jinja", constants=_CONSTANTS)
    for name in ("random", "compare", "stray", "differences")
)

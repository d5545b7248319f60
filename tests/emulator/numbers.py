# SPDX-License-Identifier: Apache-2.0
"""Element types as NumPy stores them, and how exact they are. NumPy lacks bf16: it is uint16."""

from __future__ import annotations

import numpy as np

STORED = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}

# Half the spacing of numbers next above 1: the relative error of one rounding.
UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

# Half the smallest number above 0: the absolute error of one rounding.
UNDERFLOW = {"fp64": 2.0**-1075, "fp32": 2.0**-150, "fp16": 2.0**-25, "bf16": 2.0**-134}


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` rounded to nearest even, as stored."""
    if dtype != "bf16":
        return np.asarray(values).astype(STORED[dtype])
    single = np.asarray(values).astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FFF, rounded).astype(np.uint16)


def load(stored: np.ndarray, dtype: str) -> np.ndarray:
    """What a stored array stands for, in fp64."""
    single = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else stored
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return single.astype(np.float64)

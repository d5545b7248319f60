# SPDX-License-Identifier: Apache-2.0
"""The formula over whole spaces: millions of configurations in the order of their promise."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from tunegen.model import ConfigTable, DeviceClass, KernelSpec, Problem
from tunegen.perfmodel.predict import predict_us

# Rows at once: a column of them is 128 KiB, so that those in use stay in a core's cache. Four
# times as many took twice as long.
_CHUNK_ROWS = 1 << 14

# More threads than this gain little: NumPy releases the interpreter only inside its loops.
_MAX_THREADS = 8


def rank(
    spec: KernelSpec, problem: Problem, device: DeviceClass, table: ConfigTable
) -> NDArray[np.float64]:
    """Predicted microseconds of every configuration of ``table``, in its order, uncompiled.

    Infinite for those of which no block fits on a multiprocessor.
    """
    times = np.empty(len(table), dtype=np.float64)

    def fill(first: int) -> None:
        rows = slice(first, first + _CHUNK_ROWS)
        work = spec.work(table.columns(rows), problem, device)
        times[rows] = predict_us(work, device)  # a number where nothing depends on the config

    starts = range(0, len(table), _CHUNK_ROWS)
    workers = min(os.cpu_count() or 1, _MAX_THREADS, max(len(starts), 1))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fill, starts))
    return times

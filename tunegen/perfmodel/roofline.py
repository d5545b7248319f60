# SPDX-License-Identifier: Apache-2.0
"""The least time that a device can take for a problem, whatever the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tunegen.model import ACCUMULATOR, DTYPE_BYTES, DeviceClass, Operation, Problem
from tunegen.perfmodel.predict import DRAM_COPY_EFFICIENCY, DRAM_ONE_WAY_EFFICIENCY, LAUNCH_US


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds that no kernel can beat, what they are spent on, and the counts behind them."""

    us: float
    bound: Literal["memory", "compute", "launch"]
    bytes: int
    flops: int


def floor(operation: Operation, problem: Problem, device: DeviceClass) -> Floor:
    """max(bytes / ceiling, flops / peak) + launch.

    Every input is read and every output written once, from and to device memory; the arithmetic
    runs at the fastest unit's dense rate, tensor cores included.
    """
    traffic, flops = operation.bytes(problem), operation.flops(problem)
    memory_us = traffic / (device.memory_gbps * _efficiency(operation, problem) * 1e3)
    compute_us = flops / (2 * _peak(problem.dtype, device) * device.sm_count * device.clock_mhz)
    longest = max(memory_us, compute_us)
    bound: Literal["memory", "compute", "launch"]
    if longest <= LAUNCH_US:
        bound = "launch"
    else:
        bound = "memory" if memory_us >= compute_us else "compute"
    return Floor(longest + LAUNCH_US, bound, traffic, flops)


def _efficiency(operation: Operation, problem: Problem) -> float:
    """Reachable share of the memory rate: turning from reading to writing costs, most at 1:1."""
    read = written = 0
    for array in operation.arrays(problem):
        size = math.prod(array.shape) * DTYPE_BYTES[array.dtype]
        read += size if array.role != "out" else 0
        written += size if array.role != "in" else 0
    mixed = 4 * read * written / (read + written) ** 2 if read + written else 0.0
    return DRAM_ONE_WAY_EFFICIENCY - (DRAM_ONE_WAY_EFFICIENCY - DRAM_COPY_EFFICIENCY) * mixed


def _peak(dtype: str, device: DeviceClass) -> int:
    """Multiply-adds per clock and SM of the fastest unit for a dtype."""
    if dtype == "fp64":
        return max(device.fp64_per_clock, device.tensor64_per_clock)
    if DTYPE_BYTES[dtype] == 2 and ACCUMULATOR[dtype] == "fp32":
        return max(device.fp32_per_clock, device.tensor16_per_clock)
    return device.fp32_per_clock

# SPDX-License-Identifier: Apache-2.0
"""The least time that a device can take for a problem, whatever the kernel.

Of a calibration's repeats the fastest counts: a floor is a bound, and the card itself has been
below the median in half of them. A repeat is the median of a block of many calls, no lucky one;
what a record takes, the median of its finals, can be in as good a place in memory at as good a
minute. Predictions, which shall be right on average, are made from medians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunegen.model import (
    ACCUMULATOR,
    DTYPE_BYTES,
    STREAM_WRITES,
    Calibration,
    DeviceClass,
    Operation,
    Problem,
    StreamPoint,
)
from tunegen.perfmodel.predict import LAUNCH_US

# The share of the datasheet's memory rate that no measurement exceeds: 97 % reading (fast.cu on
# H100) or writing, 90 % copying (H100, H200, B300).
ONE_WAY_CEILING = 0.98
COPY_CEILING = 0.91


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds that no kernel can beat, what they are spent on, and the counts behind them.

    ``ceilings`` says where the rates are from. Measured ones have a ``spread``, the share by which
    repeats of what binds differed: a time so much below the floor contradicts nothing.
    """

    us: float
    bound: Literal["memory", "compute", "launch"]
    bytes: int
    flops: int
    ceilings: Literal["datasheet", "calibration"] = "datasheet"
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class _Limit:
    us: float
    spread: float = 0.0


def floor(
    operation: Operation,
    problem: Problem,
    device: DeviceClass,
    calibration: Calibration | None = None,
) -> Floor:
    """max(bytes / ceiling, flops / peak) + launch.

    Every input is read and every output written once, from and to device memory; the arithmetic
    runs at the fastest unit's dense rate, tensor cores included.

    With a calibration the ceiling is the best that its own kernels reached at as many bytes and
    with the same mix of reads and writes, and peak and launch are measured too. Rates of tensor
    cores remain the datasheet's.
    """
    traffic, flops = operation.bytes(problem), operation.flops(problem)
    written = _written_share(operation, problem)
    launch = _Limit(LAUNCH_US)
    if calibration is not None:
        launch = _Limit(calibration.launch_us.low, calibration.launch_us.spread)
    memory = _memory(traffic, written, device, calibration, launch.us)
    compute = _compute(flops, problem.dtype, device, calibration)
    longest = max((memory, compute), key=lambda limit: limit.us)
    bound: Literal["memory", "compute", "launch"]
    if longest.us <= launch.us:
        bound, longest = "launch", _Limit(longest.us, launch.spread)
    else:
        bound = "memory" if longest is memory else "compute"
    return Floor(
        us=longest.us + launch.us,
        bound=bound,
        bytes=traffic,
        flops=flops,
        ceilings="datasheet" if calibration is None else "calibration",
        spread=longest.spread,
    )


def _written_share(operation: Operation, problem: Problem) -> float:
    """The part of the traffic that is written; what is updated in place is read as well."""
    read = written = 0
    for array in operation.arrays(problem):
        size = math.prod(array.shape) * DTYPE_BYTES[array.dtype]
        read += size if array.role != "out" else 0
        written += size if array.role != "in" else 0
    return written / (read + written) if read + written else 0.0


# --- memory --------------------------------------------------------------------------------------


def _memory(
    traffic: int,
    written: float,
    device: DeviceClass,
    calibration: Calibration | None,
    launch_us: float,
) -> _Limit:
    """Microseconds for the traffic alone, without the launch."""
    measured = [
        (share, _stream(calibration.streams[name], traffic, launch_us))
        for name, share in STREAM_WRITES.items()
        if calibration is not None and calibration.streams.get(name)
    ]
    if not measured:
        # Turning from reading to writing costs, most where there is as much of both.
        mixed = 4 * written * (1 - written)
        ceiling = ONE_WAY_CEILING - (ONE_WAY_CEILING - COPY_CEILING) * mixed
        return _Limit(traffic / (device.memory_gbps * ceiling * 1e3))
    below = max((pair for pair in measured if pair[0] <= written), default=measured[0])
    above = min((pair for pair in measured if pair[0] >= written), default=measured[-1])
    (low_share, low), (high_share, high) = below, above
    part = (written - low_share) / (high_share - low_share) if high_share > low_share else 0.0
    return _Limit(
        low.us + part * (high.us - low.us), max(low.spread, high.spread) if part else low.spread
    )


def _stream(points: Sequence[StreamPoint], traffic: int, launch_us: float) -> _Limit:
    """Microseconds for the traffic at the rate between the measured sizes around it, without the
    launch; above the largest, at that one's rate."""
    largest = points[-1]
    if traffic >= largest.bytes:
        us = (largest.us.low - launch_us) * traffic / largest.bytes
        return _Limit(max(us, 0.0), largest.us.spread)
    above = next(point for point in points if point.bytes > traffic)
    below = max((p for p in points if p.bytes <= traffic), key=lambda p: p.bytes, default=None)
    from_bytes, from_us = (below.bytes, below.us.low) if below else (0, launch_us)
    part = (traffic - from_bytes) / (above.bytes - from_bytes)
    us = from_us + part * (above.us.low - from_us) - launch_us
    spread = max(above.us.spread, below.us.spread if below else 0.0)
    return _Limit(max(us, 0.0), spread)


# --- arithmetic ----------------------------------------------------------------------------------


def _compute(
    flops: int, dtype: str, device: DeviceClass, calibration: Calibration | None
) -> _Limit:
    """Microseconds at the rate of the fastest unit for a dtype."""
    cores, tensor = _multiply_adds(dtype, device)
    per_unit = 2 * device.sm_count * device.clock_mhz
    peak = calibration.peak_tflops.get(ACCUMULATOR[dtype]) if calibration else None
    cores_flops, spread = float(cores * per_unit), 0.0  # a microsecond
    if peak is not None:
        cores_flops, spread = peak.high * 1e6, peak.spread
    if tensor * per_unit > cores_flops:
        return _Limit(flops / (tensor * per_unit))
    return _Limit(flops / cores_flops, spread)


def _multiply_adds(dtype: str, device: DeviceClass) -> tuple[int, int]:
    """Per clock and SM: outside of tensor cores, and on them (0: none for this dtype)."""
    if ACCUMULATOR[dtype] == "fp64":
        return device.fp64_per_clock, device.tensor64_per_clock
    return device.fp32_per_clock, device.tensor16_per_clock if DTYPE_BYTES[dtype] == 2 else 0

# SPDX-License-Identifier: Apache-2.0
"""Kernels that measure a device: what its memories deliver, what it computes, what a launch costs.

A probe is one thing to measure, with the contenders that do it: the best of them is the figure.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunegen.kernels.calibrate.chip import (
    CHAIN_LAUNCHES,
    SHARED_BYTES_PER_CLOCK,
    TARGET_US,
    l2_read,
    launches,
    peaks,
    shared_read,
)
from tunegen.kernels.calibrate.probe import Choices, Contender, Probe
from tunegen.kernels.calibrate.streaming import COLD_L2_MULTIPLE, STREAMS, streams
from tunegen.model import DeviceClass

__all__ = [
    "CHAIN_LAUNCHES",
    "COLD_L2_MULTIPLE",
    "SHARED_BYTES_PER_CLOCK",
    "STREAMS",
    "TARGET_US",
    "Choices",
    "Contender",
    "Probe",
    "every",
    "l2_read",
    "launches",
    "peaks",
    "shared_read",
    "streams",
]


def every(device: DeviceClass, most_bytes: int) -> Iterator[Probe]:
    """All probes of a device, those with operands of at most ``most_bytes``."""
    yield launches()
    yield from peaks(device)
    yield shared_read(device)
    yield l2_read(device)
    yield from streams(device, most_bytes)

# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a record in itself: numbers that cannot be, names that do not fit."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunegen.errors import UsageError
from tunegen.model import ARCHS, TuningRecord, capability

FindingKind = Literal[
    "malformed",  # the file cannot be read, or not by this release
    "not canonical",  # it reads, but these are not the bytes that would be written
    "impossible",  # numbers that cannot be, names that do not fit together
    "misplaced",  # the record belongs into another file or layer
    "illegal",  # unknown operation, spec or parameter, or a constraint is broken
    "stale",  # its kernels are generated differently today
]

# An operation's name becomes a file's name.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong in a database; ``record`` is None where it is the whole file."""

    layer: str
    path: Path
    kind: FindingKind
    reason: str
    record: TuningRecord | None = None


def instant(created: str) -> datetime.datetime | None:
    """The moment a record was made; None where it is no ISO 8601 time with its UTC offset."""
    try:
        moment = datetime.datetime.fromisoformat(created)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


def faults(record: TuningRecord) -> tuple[str, ...]:
    """Why a record cannot be true, whatever kernels there are; empty where nothing speaks against
    it. Such a record is never written, never answers, and is found by a check."""
    return (
        *_naming_faults(record),
        *_timing_faults(record),
        *_quality_faults(record),
        *_resource_faults(record),
    )


def _naming_faults(record: TuningRecord) -> Iterator[str]:
    if not _NAME.fullmatch(record.operation):
        yield f"operation {record.operation!r} is no name"
    if record.arch not in ARCHS:
        yield f"arch {record.arch!r} is none of {', '.join(ARCHS)}"
    try:
        if f"sm_{capability(record.target)}" != record.arch:
            yield f"target {record.target} is not of {record.arch}"
    except UsageError as error:
        yield error.message
    if not record.measurement.policy:
        yield "no policy says how it was timed"
    if instant(record.created) is None:
        yield f"created {record.created!r} is no ISO 8601 time with a UTC offset"


def _timing_faults(record: TuningRecord) -> Iterator[str]:
    measured = record.measurement
    for name, time in (("median_us", measured.median_us), ("default_us", record.default_us)):
        if time is not None and not (time > 0 and math.isfinite(time)):
            yield f"{name} is {time}, not a positive time"
    if measured.samples < 1:
        yield f"{measured.samples} samples"
    interval = (measured.low_us, measured.high_us)
    if interval != (0.0, 0.0) and not 0 < interval[0] <= measured.median_us <= interval[1]:
        yield f"median_us {measured.median_us} is not within {interval[0]} to {interval[1]}"
    if record.trials < 1:
        yield f"the winner of {record.trials} trials"


def _quality_faults(record: TuningRecord) -> Iterator[str]:
    ratio, error, tolerance = record.baseline_ratio, record.relative_error, record.tolerance
    if ratio is not None and not (ratio > 0 and math.isfinite(ratio)):
        yield f"baseline_ratio is {ratio}, not positive"
    if ratio is not None and not record.baseline:
        yield "baseline_ratio without a baseline"
    if error is not None and not (error >= 0 and math.isfinite(error)):
        yield f"relative_error is {error}"
    if tolerance is not None and not (tolerance > 0 and math.isfinite(tolerance)):
        yield f"tolerance is {tolerance}, not positive"
    if error is not None and tolerance is not None and error > tolerance:
        yield f"relative_error {error} is above the tolerance of {tolerance}"


def _resource_faults(record: TuningRecord) -> Iterator[str]:
    for name, size in record.problem.sizes:
        if size < 0:
            yield f"size {name} is {size}"
    for image in record.images:
        for name in ("registers", "spill_bytes", "shared_bytes"):
            if getattr(image, name) < 0:
                yield f"{image.name} has {getattr(image, name)} {name}"
    for limit in record.limits:
        if limit.rule == "multiple_of" and limit.value < 1:
            yield f"limit {limit}"
    device = record.device
    if not device.name:
        yield "a device without a name"
    if min(device.sm_count, device.shared_bytes_per_block) < 1:
        yield f"{device.sm_count} SMs with {device.shared_bytes_per_block} bytes of shared memory"

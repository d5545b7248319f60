# SPDX-License-Identifier: Apache-2.0
"""Tuning records: a winner with everything needed to rebuild it and to distrust it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunegen.model.outcome import Evidence, Measurement
from tunegen.model.plan import Limit
from tunegen.model.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage:
    """Identity and resources of one compiled kernel of a record."""

    name: str
    source_digest: str
    cubin_sha256: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """What tells one kind of GPU from another, as far as timings go."""

    name: str
    sm_count: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_clock_mhz: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The best known configuration of a spec for a problem on a device class.

    ``evidence`` is "measured" only where a GPU ran it; ``measurement`` holds the winner's time and
    policy, ``default_us`` that of the default configuration in the same comparison.
    ``baseline_ratio`` is the vendor library's time over ours, where it was measured.
    """

    operation: str
    spec: str
    arch: str
    target: str
    problem: Problem
    config: dict[str, int]
    device: DeviceIdentity
    evidence: Evidence
    measurement: Measurement
    default_us: float
    images: tuple[KernelImage, ...]
    limits: tuple[Limit, ...]
    nvrtc: str
    tunegen: str
    created: str
    trials: int
    seed: int
    command: str
    baseline: str = ""
    baseline_ratio: float | None = None
    relative_error: float | None = None
    deterministic: bool | None = None
    driver: str = ""
    min_driver: str = ""
    extra: dict[str, float] = field(default_factory=dict)

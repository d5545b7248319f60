# SPDX-License-Identifier: Apache-2.0
"""Tuning records: a winner with everything needed to rebuild it and to distrust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tunegen.model.device_class import DeviceClass
from tunegen.model.outcome import Evidence, Measurement
from tunegen.model.plan import Limit
from tunegen.model.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage:
    """Identity and resources of one compiled kernel of a record.

    Registers are per thread, ``spill_bytes`` too (stores and loads together); ``shared_bytes`` is
    what one block needs, static and dynamic together. ``code_sha256`` is the digest of the machine
    code alone, by which another toolkit's cubin can be told to be the same kernel; empty where it
    was not recorded.
    """

    name: str
    source_digest: str
    cubin_sha256: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    code_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """What tells one kind of GPU from another, as far as timings go."""

    name: str
    sm_count: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_clock_mhz: int

    @classmethod
    def of(cls, device: DeviceClass) -> DeviceIdentity:
        """What a record keeps of a device class."""
        return cls(
            name=device.name,
            sm_count=device.sm_count,
            shared_bytes_per_block=device.shared_bytes_per_block,
            l2_bytes=device.l2_bytes,
            memory_clock_mhz=device.memory_clock_mhz,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The best known configuration of a spec for a problem on a device class.

    ``evidence`` is "measured" only where a GPU ran it; ``measurement`` holds the winner's time and
    policy, ``default_us`` the median time of the default configuration in the same comparison,
    None where the default failed. ``baseline_ratio`` is the time of ``baseline``, the vendor's
    library, over ours, where it was measured. ``relative_error`` is the RMS error against fp64
    over the RMS of the result, ``tolerance`` the largest one that was let through.

    ``arch`` is the capability (``sm_90``) that the record is filed under, ``target`` what the
    kernels were compiled for (``sm_90a``). ``created`` is a date and time of ISO 8601 with its
    offset from UTC, ``command`` the command line that tunes again.
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
    default_us: float | None
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
    tolerance: float | None = None
    deterministic: bool | None = None
    driver: str = ""
    min_driver: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What sets a record apart from others: who computes what, on what, and judged how.

        Comparable, so that it orders records too. Two records with the same identity are the same
        winner found twice; records that differ in any part of it stand side by side.
        """
        problem, device = self.problem, self.device
        return (
            self.arch,
            self.operation,
            problem.dtype,
            problem.layout,
            tuple(sorted(problem.sizes)),
            tuple(sorted(problem.attributes)),
            device.name,
            device.sm_count,
            device.shared_bytes_per_block,
            device.l2_bytes,
            device.memory_clock_mhz,
            self.spec,
            tuple(sorted(self.config.items())),
            self.evidence,
            self.measurement.policy,
            -1.0 if self.tolerance is None else self.tolerance,
        )

# SPDX-License-Identifier: Apache-2.0
"""Architectures, compiler targets and the kinds of GPU that timings belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunegen.errors import UsageError, unknown

# Capabilities that NVRTC 13 compiles for; 13.0 dropped everything before Turing.
ARCHS = (
    "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90",
    "sm_100", "sm_103", "sm_110", "sm_120", "sm_121",
)  # fmt: skip

_TARGET = re.compile(r"sm_(\d{2,3})([af]?)")


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A kind of GPU: timings of one class are never taken for those of another.

    Limits come from the CUDA programming guide's table of compute capabilities; rates are per
    clock and multiprocessor, or the vendor's datasheet figures. ``source`` says from where.
    ``clock_mhz`` is the highest boost clock, ``memory_clock_mhz`` as the driver reports it.
    ``tensor16_per_clock`` and ``tensor64_per_clock`` are dense multiply-adds of tensor cores:
    16-bit inputs with fp32 sums, and fp64. 0 stands for none, and in ``l2_gbps`` for unknown.
    """

    name: str
    arch: str
    sm_count: int
    l2_bytes: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_gbps: float
    fp32_per_clock: int
    fp64_per_clock: int
    source: str = ""
    registers_per_sm: int = 65536
    shared_bytes_reserved: int = 1024
    l2_gbps: float = 0.0
    tensor16_per_clock: int = 0
    tensor64_per_clock: int = 0

    @property
    def capability(self) -> int:
        """90 for ``sm_90``."""
        return capability(self.arch)


def capability(target: str) -> int:
    """90 for ``sm_90`` and for ``sm_90a``."""
    match = _TARGET.fullmatch(target)
    if not match:
        raise UsageError(f"malformed target {target!r}: write sm_90, sm_90a or sm_100f")
    return int(match[1])


def check_arch(arch: str) -> str:
    """``arch`` itself; raises :class:`UsageError` naming the nearest ones when it is unknown."""
    if arch in ARCHS:
        return arch
    match = _TARGET.fullmatch(arch)
    if match and match[2] and f"sm_{match[1]}" in ARCHS:
        raise UsageError(
            f"arch {arch!r} carries a suffix: ask for sm_{match[1]}, "
            "each kernel adds the suffix that it needs"
        )
    raise unknown("arch", arch, ARCHS)

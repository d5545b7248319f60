# SPDX-License-Identifier: Apache-2.0
"""A small table of GPUs from Turing to Blackwell, with where each figure comes from.

Limits per multiprocessor and block: the table of technical specifications per compute capability
in the CUDA programming guide 13.0, which has no column for 8.8, 10.3 and 12.1; the occupancy
header of the CUDA 13 runtime (``cuda_occupancy.h``) treats them like 8.6, 10.0 and 12.0.
Multiply-adds per clock: the table of arithmetic throughput in the CUDA best practices guide 13.
The other figures are named in each chip's ``source``. L2 rates are nowhere specified: where
``source`` names no measurement, the rate is an estimate from the measured bytes per clock and
multiprocessor of the nearest chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunegen.errors import UsageError, unknown
from tunegen.model import DeviceClass, check_arch

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Limits:
    """What all chips of a capability share."""

    threads_per_sm: int
    blocks_per_sm: int
    shared_kib_per_sm: int
    shared_kib_per_block: int
    fp32_per_clock: int
    fp64_per_clock: int

    @property
    def shared_bytes_reserved(self) -> int:
        """The system's share of every block: the SM's total less the most one block can have."""
        return (self.shared_kib_per_sm - self.shared_kib_per_block) * _KIB


_LIMITS = {
    "sm_75": _Limits(1024, 16, 64, 64, 64, 2),
    "sm_80": _Limits(2048, 32, 164, 163, 64, 32),
    "sm_86": _Limits(1536, 16, 100, 99, 128, 2),
    "sm_87": _Limits(1536, 16, 164, 163, 128, 2),
    "sm_88": _Limits(1536, 16, 100, 99, 128, 2),
    "sm_89": _Limits(1536, 24, 100, 99, 128, 2),
    "sm_90": _Limits(2048, 32, 228, 227, 128, 64),
    "sm_100": _Limits(2048, 32, 228, 227, 128, 64),
    "sm_103": _Limits(2048, 32, 228, 227, 128, 2),
    "sm_110": _Limits(1536, 24, 228, 227, 128, 2),
    "sm_120": _Limits(1536, 24, 100, 99, 128, 2),
    "sm_121": _Limits(1536, 24, 100, 99, 128, 2),
}


def _chip(
    name: str,
    arch: str,
    sm_count: int,
    clock_mhz: int,
    l2_mib: float,
    l2_gbps: float,
    memory_clock_mhz: int,
    memory_gbps: float,
    tensor16_per_clock: int,
    source: str,
    tensor64_per_clock: int = 0,
) -> DeviceClass:
    limits = _LIMITS[arch]
    return DeviceClass(
        name=name,
        arch=arch,
        sm_count=sm_count,
        l2_bytes=int(l2_mib * _MIB),
        shared_bytes_per_sm=limits.shared_kib_per_sm * _KIB,
        shared_bytes_per_block=limits.shared_kib_per_block * _KIB,
        threads_per_sm=limits.threads_per_sm,
        blocks_per_sm=limits.blocks_per_sm,
        clock_mhz=clock_mhz,
        memory_clock_mhz=memory_clock_mhz,
        memory_gbps=memory_gbps,
        fp32_per_clock=limits.fp32_per_clock,
        fp64_per_clock=limits.fp64_per_clock,
        source=source,
        shared_bytes_reserved=limits.shared_bytes_reserved,
        l2_gbps=l2_gbps,
        tensor16_per_clock=tensor16_per_clock,
        tensor64_per_clock=tensor64_per_clock,
    )


# Names are those that the driver reports. The first chip of an arch is its default.
# Columns: name, arch, SMs, clock, L2 MiB, L2 GB/s, memory clock, memory GB/s, 16-bit tensor rate.
CHIPS: tuple[DeviceClass, ...] = (
    _chip(
        "Tesla T4", "sm_75", 40, 1590, 4, 1270, 5001, 320, 512,
        "Turing whitepaper and T4 datasheet; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA GeForce RTX 2080 Ti", "sm_75", 68, 1545, 5.5, 2100, 7000, 616, 256,
        "Turing whitepaper; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA TITAN RTX", "sm_75", 72, 1770, 6, 2550, 7001, 672, 512,
        "Turing whitepaper; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA A100-SXM4-80GB", "sm_80", 108, 1410, 40, 4830, 1593, 2039, 1024,
        "A100 whitepaper and datasheet; L2 rate as measured on the 40 GB card",
        tensor64_per_clock=64,
    ),
    _chip(
        "NVIDIA A100-SXM4-40GB", "sm_80", 108, 1410, 40, 4830, 1215, 1555, 1024,
        "A100 whitepaper and datasheet; L2 rate measured by users in NVIDIA's developer forum, "
        "of 5120 bytes per clock in the whitepaper",
        tensor64_per_clock=64,
    ),
    _chip(
        "NVIDIA RTX A6000", "sm_86", 84, 1800, 6, 3000, 8001, 768, 512,
        "Ampere GA102 whitepaper; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA GeForce RTX 3090", "sm_86", 82, 1695, 6, 2800, 9751, 936, 256,
        "Ampere GA102 whitepaper; L2 rate is an estimate",
    ),
    _chip(
        "Orin", "sm_87", 16, 1300, 4, 500, 3200, 204.8, 1024,
        "Jetson AGX Orin 64 GB datasheet; L2 rate is an estimate",
    ),
    _chip(
        "sm_88 (no public chip)", "sm_88", 16, 1300, 4, 500, 3200, 204.8, 1024,
        "no chip of this capability is documented: limits of cuda_occupancy.h, "
        "the other figures are those of Jetson AGX Orin as its nearest relative",
    ),
    _chip(
        "NVIDIA L40S", "sm_89", 142, 2520, 96, 4500, 9001, 864, 512,
        "L40S datasheet, deviceQuery; L2 rate scaled from the RTX 4090's",
    ),
    _chip(
        "NVIDIA GeForce RTX 4090", "sm_89", 128, 2520, 72, 4400, 10501, 1008, 256,
        "Ada whitepaper; L2 rate between the 3.9 and 4.9 TB/s of public microbenchmarks",
    ),
    _chip(
        "NVIDIA H200", "sm_90", 132, 1980, 60, 10200, 3201, 4800, 2048,
        "H200 datasheet, clocks and L2 size as read from a card; "
        "L2 rate scaled from the H800's, Luo et al., arXiv 2402.13499",
        tensor64_per_clock=128,
    ),
    _chip(
        "NVIDIA H100 80GB HBM3", "sm_90", 132, 1980, 50, 10200, 2619, 3350, 2048,
        "H100 whitepaper and SXM datasheet; "
        "L2 rate scaled from the H800's, Luo et al., arXiv 2402.13499",
        tensor64_per_clock=128,
    ),
    _chip(
        "NVIDIA H100 PCIe", "sm_90", 114, 1755, 50, 7850, 1593, 2039, 2048,
        "H100 whitepaper and PCIe datasheet; "
        "L2 rate measured on the H800 PCIe by Luo et al., arXiv 2402.13499",
        tensor64_per_clock=128,
    ),
    _chip(
        "NVIDIA B200", "sm_100", 148, 1965, 126.5, 12900, 3996, 8000, 4096,
        "Blackwell architecture brief and HGX B200 datasheet, SMs and L2 size as users read them; "
        "L2 rate scaled from the B300's",
        tensor64_per_clock=64,
    ),
    _chip(
        "NVIDIA B300 SXM6 AC", "sm_103", 148, 2032, 126.5, 13300, 3996, 8000, 4096,
        "HGX B300 datasheet, clock, SMs and L2 rate from public microbenchmarks",
    ),
    _chip(
        "NVIDIA Thor", "sm_110", 20, 1575, 32, 900, 4266, 273, 4096,
        "Jetson T5000 datasheet, deviceQuery; fp64 and L2 rates are estimates",
    ),
    _chip(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "sm_120", 188, 2617, 128, 7700, 14001, 1792, 512,
        "RTX Blackwell PRO whitepaper; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA GeForce RTX 5090", "sm_120", 170, 2407, 96, 6400, 14001, 1792, 256,
        "RTX Blackwell whitepaper, deviceQuery; L2 rate is an estimate",
    ),
    _chip(
        "NVIDIA GB10", "sm_121", 48, 2418, 24, 1800, 8533, 273, 512,
        "DGX Spark hardware guide, deviceQuery; L2 and tensor rates are estimates",
    ),
)  # fmt: skip


def chips_of(arch: str) -> tuple[DeviceClass, ...]:
    """The chips of a capability, its default first. Raises :class:`UsageError` for a bad one."""
    check_arch(arch)
    return tuple(chip for chip in CHIPS if chip.arch == arch)


def default_chip(arch: str) -> DeviceClass:
    """What is assumed where only the arch is known. Raises :class:`UsageError` for a bad one."""
    return chips_of(arch)[0]


def find_chip(name: str) -> DeviceClass:
    """The chip of that name, in any case and in part: ``h200``, ``rtx 4090``.

    Raises :class:`UsageError` with the nearest names for none and for several.
    """
    wanted = _compact(name)
    exact = [chip for chip in CHIPS if _compact(chip.name) == wanted]
    found = exact or [chip for chip in CHIPS if wanted and wanted in _compact(chip.name)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(chip.name for chip in found)
        raise UsageError(f"chip {name!r} is one of several: {names}")
    raise unknown("chip", name, [chip.name for chip in CHIPS])


def _compact(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

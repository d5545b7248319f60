# SPDX-License-Identifier: Apache-2.0
"""What runs where: drivers, capabilities and shared memory."""

from __future__ import annotations

import re

from tunegen.errors import UsageError
from tunegen.model import CompiledKernel, capability

# Driver branch from which on a driver loads the cubins of a toolkit's major. CUDA Toolkit release
# notes, "Minimum Required Driver Version for CUDA Minor Version Compatibility".
CUBIN_DRIVERS = {13: "580"}

# Driver branch that came with the toolkit that introduced a PTX version: older drivers refuse the
# text, which minor version compatibility does not cover. PTX ISA, "Release History" (9.0 is that
# of CUDA 13.0 and so on); CUDA Toolkit release notes, "CUDA Toolkit and Corresponding Driver
# Versions" up to 13.2, and from 13.3 on the toolkit that NVIDIA's driver packages name.
PTX_DRIVERS = {
    "9.0": "580", "9.1": "590", "9.2": "595", "9.3": "610", "9.4": "615", "9.5": "620",
}  # fmt: skip

# Most shared memory of one block in KiB, opt-in included. CUDA C++ Programming Guide, table of
# technical specifications per compute capability; 8.8, 10.3 and 12.1, which it lacks, from
# cuda_occupancy.h of the CUDA 13 runtime headers.
SHARED_KIB_PER_BLOCK = {
    75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227,
    120: 99, 121: 99,
}  # fmt: skip

# Embedded chips take cubins of their own capability only: "Binary compatibility is supported only
# for the desktop", CUDA C++ Programming Guide.
EMBEDDED = {87, 88}


def min_driver(kernel: CompiledKernel) -> str:
    """The driver branch that a kernel's cubin needs ("580"), empty where it is not known."""
    return CUBIN_DRIVERS.get(int(kernel.nvrtc.split(".")[0]), "")


def ptx_min_driver(isa: str) -> str:
    """The driver branch that PTX of this version ("9.0") needs, empty where it is not known."""
    return PTX_DRIVERS.get(isa, "")


def cuda_branch(version: str) -> str:
    """The driver branch that brought a CUDA library of this version ("13.0"), empty where it is
    not known. A later one, from the cuda-compat packages, can stand beside an older driver."""
    major, minor = version.split(".")
    return PTX_DRIVERS.get(f"{int(major) - 4}.{minor}", "")  # PTX 9.x is that of CUDA 13.x


def driver_too_old(driver: str | None, needed: str) -> bool:
    """Whether ``driver`` ("580.65.06") cannot be trusted with what needs branch ``needed``.

    An unknown driver (None) is given the benefit of the doubt, an unknown need is not.
    """
    if driver is None:
        return False
    return not needed or _version(driver) < _version(needed)


def _version(driver: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(\.\d+)*", driver):
        raise UsageError(f"malformed driver version {driver!r}: write 580.65.06 or 580")
    return tuple(map(int, driver.split(".")))


def cubin_runs_on(target: str, arch: str) -> bool:
    """Whether a device of capability ``arch`` loads a cubin for ``target``.

    Its own capability always; a lower minor one of the same major only without suffix, and never
    from or to embedded chips.
    """
    built, device = capability(target), capability(arch)
    if built == device:
        return True
    plain = target == f"sm_{built}" and not {built, device} & EMBEDDED
    return plain and built // 10 == device // 10 and built < device


def shared_memory_lacks(shared_bytes: int, arch: str) -> str:
    """Why a block with this much shared memory does not fit, or the empty string.

    Capabilities newer than the table are left to the driver.
    """
    limit = SHARED_KIB_PER_BLOCK.get(capability(arch))
    if limit is None or shared_bytes <= limit * 1024:
        return ""
    return f"needs {shared_bytes} bytes of shared memory per block, {arch} has {limit * 1024}"

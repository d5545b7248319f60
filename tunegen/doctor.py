# SPDX-License-Identifier: Apache-2.0
"""What is installed, in: whether it fits together, what is missing, and the command that mends it.

What other modules know how to find is handed in, so that doctor reports what tunegen really uses.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tunegen.errors import ToolkitError
from tunegen.model import ARCHS, FoundGpus, GpuInfo, capability
from tunegen.resources import data_dir

Status = Literal["ok", "warning", "missing", "conflict"]

PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")

# The toolkit's major: compiler, bindings and tools must share it.
TOOLKIT = 13

# The first driver that loads what a toolkit of that major compiles (CUDA 13.0 release notes).
MIN_DRIVER = 580


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``fix`` is the command that mends it, empty where nothing is to mend.

    "warning" leaves some commands without what they need, "missing" and "conflict" break what
    every installation must be able to do.
    """

    name: str
    status: Status
    found: str
    needed: str
    fix: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.status in ("missing", "conflict")


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, the versions of it that tunegen works with, and what it is there for.

    One that is not ``required`` may be absent, or come as a part of an installed CUDA toolkit.
    """

    name: str
    least: str
    below: str
    purpose: str
    required: bool = True

    @property
    def needed(self) -> str:
        return f">={self.least},<{self.below}"


PACKAGES = (
    Package("cuda-bindings", "13.0", "14", "calls NVRTC and the driver"),
    Package("cuda-pathfinder", "1.0", "2", "finds the CUDA libraries"),
    Package("nvidia-ml-py", "13.0", "14", "finds GPUs, reads clocks and power"),
    Package("optuna", "5.0", "6", "searches"),
    Package("nvidia-cuda-nvrtc", "13.0", "14", "compiles", required=False),
    Package("nvidia-cuda-nvdisasm", "13.0", "14", "shows SASS", required=False),
    Package("nvidia-nvjitlink", "13.0", "14", "assembles shipped PTX in tests", required=False),
    Package("torch", "2.9", "3", "baselines and torch operators", required=False),
)


def examine(
    gpus: FoundGpus,
    *,
    nvrtc_version: Callable[[], str],
    nvdisasm: Callable[[], object],
    folders: Mapping[str, Path],
    files: Mapping[str, Path],
    caches: Mapping[str, Path],
) -> tuple[Check, ...]:
    """Every check, in the order in which things depend on each other.

    ``nvrtc_version`` and ``nvdisasm`` find the library and the tool, or raise
    :class:`ToolkitError`; ``folders`` and ``files`` are those that tunegen writes to, by what is
    in them, and ``caches`` the folders that it can do without. Raises nothing for what is missing:
    that is what it reports. No GPU is a warning.
    """
    nvrtc = _nvrtc(nvrtc_version)
    return (
        _python(),
        _tunegen(),
        *(_package(package) for package in PACKAGES),
        nvrtc,
        _nvdisasm(nvdisasm),
        _driver(gpus, "" if nvrtc.failed else nvrtc.found),
        *_gpus(gpus),
        *(_folder(name, folder) for name, folder in folders.items()),
        *(_file(name, path) for name, path in files.items()),
        *(_cache(name, folder) for name, folder in caches.items()),
    )


def _python() -> Check:
    version = platform.python_version()
    system, machine = platform.system(), platform.machine()
    fits = _numbers(version) >= _numbers(PYTHON)
    known = system == "Linux" and machine in MACHINES
    return Check(
        "Python",
        ("ok" if known else "warning") if fits else "conflict",
        f"{version} on {system} {machine}",
        f"{PYTHON} or newer on Linux {' or '.join(MACHINES)}",
        fix="" if fits else f"python{PYTHON} -m venv .venv",
    )


def _tunegen() -> Check:
    folder = data_dir("templates")
    version = _version("tunegen") or "a checkout that is not installed"
    if folder.is_dir():
        return Check("tunegen", "ok", version, "with its templates", detail=f"in {folder.parent}")
    return Check(
        "tunegen", "missing", f"{version}, without templates", "with its templates",
        fix="pip install --force-reinstall tunegen",
    )  # fmt: skip


def _package(package: Package) -> Check:
    found = _version(package.name)
    fix = f"pip install '{package.name}{package.needed}'"
    if not found:
        return Check(
            package.name,
            "missing" if package.required else "ok",
            "not installed",
            package.needed if package.required else f"{package.needed}, optional",
            fix if package.required else "",
            package.purpose,
        )
    fits = _numbers(package.least) <= _numbers(found) < _numbers(package.below)
    return Check(
        package.name, "ok" if fits else "conflict", found, package.needed,
        "" if fits else fix, package.purpose,
    )  # fmt: skip


def _nvrtc(version: Callable[[], str]) -> Check:
    needed = f"any version of major {TOOLKIT}"
    fix = f"pip install 'nvidia-cuda-nvrtc=={TOOLKIT}.*'"
    try:
        found = version()
    except ToolkitError as error:
        return Check("NVRTC library", "missing", error.message, needed, error.hint or fix)
    if _numbers(found)[0] != TOOLKIT:
        return Check("NVRTC library", "conflict", found, needed, fix)
    wheel = _version("nvidia-cuda-nvrtc")
    if wheel and _numbers(wheel) != _numbers(found):
        return Check(
            "NVRTC library", "warning", found, f"the installed wheel's {wheel}",
            "unset LD_LIBRARY_PATH", "another copy of the library was found first",
        )  # fmt: skip
    return Check("NVRTC library", "ok", found, needed, detail="compiles without a driver")


def _nvdisasm(tool: Callable[[], object]) -> Check:
    needed, detail = "for inspect --emit sass", "everything else works without it"
    try:
        return Check("nvdisasm", "ok", str(tool()), needed)
    except ToolkitError as error:
        return Check("nvdisasm", "warning", error.message, needed, error.hint, detail)


def _driver(gpus: FoundGpus, nvrtc: str) -> Check:
    needed = f"{MIN_DRIVER} or newer, to run kernels"
    if not gpus.driver:
        detail = "tune predicts; kernels, inspect, export and db need no driver"
        return Check("driver", "warning", "none", needed, gpus.hint, detail)
    found = f"{gpus.driver}, knows CUDA {gpus.driver_cuda}"
    if _numbers(gpus.driver)[0] < MIN_DRIVER:
        detail = f"it refuses what a toolkit of major {TOOLKIT} compiles"
        return Check("driver", "conflict", found, needed, "install a newer driver", detail)
    release = _numbers(nvrtc)[:2]  # drivers know CUDA 13.4, not its patches
    if release > _numbers(gpus.driver_cuda):
        return Check(
            "driver",
            "warning",
            found,
            f"CUDA {'.'.join(map(str, release))} to load PTX of NVRTC {nvrtc}",
            f"pip install 'nvidia-cuda-nvrtc=={gpus.driver_cuda}.*'",
            "cubins load, since the major is the same; PTX of the newer NVRTC is refused",
        )
    return Check("driver", "ok", found, needed)


def _gpus(gpus: FoundGpus) -> Iterator[Check]:
    needed = f"{ARCHS[0]} to {ARCHS[-1]}, to measure"
    if not gpus.devices:
        detail = "without one, tune predicts with the model"
        yield Check("GPU", "warning", gpus.reason, needed, gpus.hint, detail)
        return
    for gpu in gpus.devices:
        concerns = "; ".join(_concerns(gpu))
        yield Check(
            f"GPU {gpu.index}", "warning" if concerns else "ok",
            f"{gpu.name}, {gpu.arch}, {gpu.memory_bytes / 2**30:.1f} GiB, "
            f"{gpu.free_bytes / 2**30:.1f} free",
            needed, "nvidia-smi" if concerns else "", concerns,
        )  # fmt: skip
    if gpus.hidden or len(gpus.devices) > 1:
        yield _several(gpus)


def _concerns(gpu: GpuInfo) -> Iterator[str]:
    if gpu.arch not in ARCHS:
        known = capability(gpu.arch) < capability(ARCHS[0])
        yield f"NVRTC {'no longer compiles' if known else 'is not known to compile'} for it"
    if gpu.mig:
        yield f"MIG is on, {len(gpu.slices)} instances: a slice's times are not the card's"
    if gpu.other_processes:
        yield f"{gpu.other_processes} other processes use it: its times would not count"


def _several(gpus: FoundGpus) -> Check:
    kinds = Counter(gpu.name for gpu in gpus.devices)
    found = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if gpus.hidden:
        found += f", {gpus.hidden} more hidden by CUDA_VISIBLE_DEVICES"
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(kinds) == 1 or by_bus:
        return Check("GPUs together", "ok", found, "one kind, or CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return Check(
        "GPUs together",
        "warning",
        found,
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "without it CUDA counts the fastest first, nvidia-smi by slot",
    )


def _folder(name: str, folder: Path) -> Check:
    # os.path, since Path raises for a place that may not be looked into.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    writable = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return _place(name, folder, "a writable folder", None if writable else there)


def _file(name: str, path: Path) -> Check:
    # What makes and removes files beside it needs the folder in any case.
    check = _folder(name, path.parent)
    if check.failed:
        return check
    there = os.path.exists(path)
    writable = not there or (os.path.isfile(path) and os.access(path, os.W_OK))
    return _place(name, path, "a writable file", None if writable else path)


def _place(name: str, place: Path, needed: str, refused: Path | None) -> Check:
    if refused is None:
        return Check(name, "ok", str(place), needed)
    return Check(
        name, "conflict", f"{refused} cannot be written", needed,
        fix="export XDG_CACHE_HOME=DIR XDG_DATA_HOME=DIR",
    )  # fmt: skip


def _cache(name: str, folder: Path) -> Check:
    check = _folder(name, folder)
    if not check.failed:
        return check
    return replace(check, status="warning", detail="nothing is kept: all is compiled each time")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (13, 4, 4) for ``13.4.4``, (2, 9) for ``2.9rc1+cu130``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)

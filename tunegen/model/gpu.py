# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as its driver describes them before and while something runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU. ``index`` is its place in PCI bus order, which is how NVML and nvidia-smi count.

    ``slices`` are the UUIDs of its MIG instances; with ``mig`` on, work runs only in one of them.
    ``other_processes`` counts the compute processes of others that are on it now.
    """

    index: int
    name: str
    uuid: str
    arch: str
    memory_bytes: int
    free_bytes: int
    mig: bool = False
    slices: tuple[str, ...] = ()
    other_processes: int = 0


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """The GPUs that a program started here may use, in the order of CUDA_VISIBLE_DEVICES.

    Where there is none, ``reason`` says why and ``hint`` what to try. ``driver`` ("580.65.06") and
    ``driver_cuda``, the newest CUDA that it knows ("13.0"), are empty without a driver; ``hidden``
    counts the GPUs that CUDA_VISIBLE_DEVICES takes away.
    """

    devices: tuple[GpuInfo, ...] = ()
    reason: str = ""
    hint: str = ""
    driver: str = ""
    driver_cuda: str = ""
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The card as NVML describes it at one moment; None: not told.

    Clocks in MHz, power in W (averaged by the driver, over a second on recent cards), temperature
    in degrees Celsius, reasons for throttling in words, energy since the driver was loaded in mJ.
    ``utilization_percent`` is the share of NVML's last sample period (up to a second) in which a
    kernel ran. ``other_pids`` are the processes that compute on the card besides the one that
    asks, numbered as NVML numbers them: in a container that need not be the container's way.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    energy_mj: int | None = None
    utilization_percent: int | None = None
    other_pids: tuple[int, ...] = ()

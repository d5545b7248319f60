# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a tune runs on: which, whether they may be used, and the workers on them."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tunegen import codegen, compiler
from tunegen.bundle import driver_too_old
from tunegen.bundle.compatibility import CUBIN_DRIVERS
from tunegen.database import default_folder
from tunegen.device import find_gpus
from tunegen.device.telemetry import Monitor
from tunegen.errors import DeviceError, UsageError, unknown
from tunegen.model import (
    Candidate,
    DeviceClass,
    DeviceIdentity,
    FoundGpus,
    GpuInfo,
    KernelSource,
    Problem,
)
from tunegen.perfmodel import CHIPS
from tunegen.runner.process import COMMAND, Worker
from tunegen.runner.protocol import PRELOAD, Opened
from tunegen.runner.quarantine import Quarantine
from tunegen.runner.station import Station

EVALUATORS = ("auto", "model", "gpu")

_PREDICT = "--evaluator model predicts"

# Which GPUs, as nvidia-smi counts; None for the first one.
Devices = tuple[int, ...] | Literal["all"] | None


def check_devices(devices: int | str | Sequence[int] | None) -> Devices:
    """What a caller wrote: an index or several, a text as in ``"0,1"``, or ``"all"``.

    Raises :class:`UsageError` for what is none of these, or names a GPU twice.
    """
    if devices is None or devices == "all":
        return None if devices is None else "all"
    if isinstance(devices, int):
        return (devices,)
    words = devices.split(",") if isinstance(devices, str) else list(map(str, devices))
    numbers = [word.strip() for word in words]
    if not numbers or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UsageError(f"device={devices!r}: it is an index, several as in 0,1, or all")
    indices = tuple(map(int, numbers))
    if len(set(indices)) < len(indices):
        raise UsageError(f"device={devices!r} names a GPU twice")
    return indices


def devices_text(devices: Devices) -> str:
    """How the command line has it; empty for None."""
    return "all" if devices == "all" else ",".join(map(str, devices or ()))


def choose_gpus(
    evaluator: str,
    *,
    arch: str | None = None,
    chip: str | None = None,
    devices: Devices = None,
    shared: bool = False,
    found: FoundGpus | None = None,
) -> tuple[GpuInfo, ...]:
    """The GPUs to measure on, as :func:`choose_gpu` chooses one; none to predict instead.

    Raises :class:`UsageError` for GPUs of more than one kind, as far as can be told before they
    are opened, and as :func:`choose_gpu` does.
    """
    _check_evaluator(evaluator, devices_text(devices))
    if found is None and evaluator != "model":
        found = find_gpus()
    indices: Sequence[int | None] = (None,)
    if devices == "all":
        assert found is not None
        if not found.devices:
            raise DeviceError(f"--device all: {found.reason}", hint="tunegen doctor")
        indices = [gpu.index for gpu in found.devices]
    elif devices is not None:
        indices = devices
    chosen = [
        choose_gpu(evaluator, arch=arch, chip=chip, index=index, shared=shared, found=found)
        for index in indices
    ]
    gpus = tuple(gpu for gpu in chosen if gpu is not None)
    for gpu in gpus:
        if (gpu.name, gpu.arch) != (gpus[0].name, gpus[0].arch):
            raise _of_two_classes(gpus[0], gpus[0].name, gpu, gpu.name)
    return gpus


def check_class(gpus: Sequence[GpuInfo], opened: Sequence[DeviceClass]) -> None:
    """Raise :class:`UsageError` where GPUs, once opened, are not of one device class."""
    first = DeviceIdentity.of(opened[0])
    for gpu, device in zip(gpus, opened, strict=True):
        other = DeviceIdentity.of(device)
        ours, theirs = (
            ", ".join(
                f"{name} {value}" if name != "name" else str(value)
                for name, value in dataclasses.asdict(one).items()
                if name == "name" or getattr(first, name) != getattr(other, name)
            )
            for one in (first, other)
        )
        if first != other:
            raise _of_two_classes(gpus[0], ours, gpu, theirs)


def _of_two_classes(one: GpuInfo, its: str, other: GpuInfo, others: str) -> UsageError:
    return UsageError(
        f"GPU {one.index} is {its} and GPU {other.index} is {others}, which are two device "
        "classes: a study is of one",
        hint=f"--device {one.index}",
    )


def choose_gpu(
    evaluator: str,
    *,
    arch: str | None = None,
    chip: str | None = None,
    index: int | None = None,
    shared: bool = False,
    found: FoundGpus | None = None,
) -> GpuInfo | None:
    """The GPU to measure on, None to predict instead.

    "auto" measures where there is a GPU of the arch and chip asked for, and predicts elsewhere;
    with an ``index``, and with "gpu", it must be there. ``index`` counts as nvidia-smi does.

    Raises :class:`DeviceError` for a GPU that is not there, is another one than was asked for, has
    a driver that is too old, or is in use by others, unless ``shared``.
    """
    _check_evaluator(evaluator, "" if index is None else str(index))
    if evaluator == "model":
        return None
    found = find_gpus() if found is None else found
    demanded = evaluator == "gpu" or index is not None
    if not found.devices:
        if not demanded:
            return None
        asked = f"--device {index}" if index is not None else "--evaluator gpu"
        raise DeviceError(f"{asked}: {found.reason}", hint="tunegen doctor")
    gpu = _pick(found, index)
    if other := _differs(gpu, arch, chip):
        if not demanded:
            return None
        raise DeviceError(other, hint=_PREDICT)
    _check_driver(found)
    if not shared:
        _check_alone(gpu)
    return gpu


def _check_evaluator(evaluator: str, devices: str) -> None:
    if evaluator not in EVALUATORS:
        raise unknown("evaluator", evaluator, EVALUATORS)
    if evaluator == "model" and devices:
        raise UsageError(f"the model runs on no device, so --device {devices} means nothing")


def _pick(found: FoundGpus, index: int | None) -> GpuInfo:
    if index is None:
        return found.devices[0]
    for gpu in found.devices:
        if gpu.index == index:
            return gpu
    there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in found.devices)
    raise DeviceError(f"there is no GPU {index}, there is {there}", hint="tunegen devices")


def _differs(gpu: GpuInfo, arch: str | None, chip: str | None) -> str:
    """In what a GPU is not the one asked for, or the empty string."""
    if arch is not None and arch != gpu.arch:
        return f"{arch} was asked for, GPU {gpu.index} ({gpu.name}) is {gpu.arch}"
    if chip is not None and chip != gpu.name:
        return f"{chip} was asked for, GPU {gpu.index} is {gpu.name}"
    return ""


def _check_driver(found: FoundGpus) -> None:
    nvrtc = compiler.nvrtc_version()
    needed = CUBIN_DRIVERS.get(int(nvrtc.split(".")[0]), "")
    if needed and found.driver and driver_too_old(found.driver, needed):
        raise DeviceError(
            f"driver {found.driver} does not load cubins of NVRTC {nvrtc}, which need {needed}",
            hint=_PREDICT,
        )


def _check_alone(gpu: GpuInfo) -> None:
    if gpu.mig:
        raise DeviceError(
            f"GPU {gpu.index} ({gpu.name}) is split (MIG): times on a slice depend on the others",
            hint=f"--shared measures all the same, {_PREDICT}",
        )
    if gpu.other_processes:
        raise in_company(gpu, gpu.other_processes)


def in_company(gpu: GpuInfo, count: int) -> DeviceError:
    """The error for a GPU that so many processes of others use."""
    others = "another process computes" if count == 1 else f"{count} other processes compute"
    return DeviceError(
        f"{others} on GPU {gpu.index} ({gpu.name})",
        hint=f"--shared measures all the same, {_PREDICT}",
    )


def environment(gpu: GpuInfo) -> dict[str, str]:
    """What makes a GPU the only one that a process sees."""
    uuid = gpu.slices[0] if gpu.mig and gpu.slices else gpu.uuid
    return {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def station(gpu: GpuInfo) -> Station:
    """A station on a GPU; no worker is started yet."""
    return Station(lambda: Worker(COMMAND, environment(gpu)))


def vendor_worker(gpu: GpuInfo) -> tuple[Worker | None, str]:
    """A worker that loads torch, for the vendor's library; None with the reason without torch.

    It is started at once: what it loads takes seconds, in which a search can run.
    """
    if importlib.util.find_spec("torch") is None:
        return None, "torch, through which it is called, is not installed"
    return Worker(COMMAND, {**environment(gpu), PRELOAD: "torch"}), ""


def device_class(opened: Opened) -> DeviceClass:
    """The device that a worker opened, with the rates that no driver tells from the table of
    chips where it is in there."""
    device = opened.device
    for chip in CHIPS:
        if (chip.name, chip.arch, chip.sm_count) == (device.name, device.arch, device.sm_count):
            return dataclasses.replace(
                device,
                l2_gbps=device.l2_gbps or chip.l2_gbps,
                tensor16_per_clock=device.tensor16_per_clock or chip.tensor16_per_clock,
                tensor64_per_clock=device.tensor64_per_clock or chip.tensor64_per_clock,
            )
    return device


def quarantine(problem: Problem, arch: str, gpu: GpuInfo) -> Quarantine:
    """Where what faults and hangs is kept: beside the user's database."""

    def sources(candidate: Candidate) -> tuple[KernelSource, ...]:
        return codegen.render(candidate.spec, candidate.config, problem, arch)

    def telemetry() -> Mapping[str, Any]:
        return dataclasses.asdict(Monitor(gpu.uuid).read())

    return Quarantine(default_folder().parent / "quarantine", sources, telemetry)

# SPDX-License-Identifier: Apache-2.0
"""The GPUs that are there, and the one that something is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunegen import calibration
from tunegen.device import find_gpus
from tunegen.errors import DeviceError
from tunegen.model import Calibration, FoundGpus, GpuInfo
from tunegen.session.gpu import choose_gpu


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU with the calibration of its kind, None where it was never calibrated."""

    gpu: GpuInfo
    calibration: Calibration | None


@dataclass(frozen=True, slots=True)
class GpuListing:
    """What was found: the GPUs that programs started here may use, or the reason for none."""

    found: FoundGpus
    gpus: tuple[ListedGpu, ...]


def list_gpus(*, folder: Path | None = None, found: FoundGpus | None = None) -> GpuListing:
    """The GPUs of this machine, without opening any. No GPU is no error."""
    found = find_gpus() if found is None else found
    stored = calibration.stored(folder)

    def of(gpu: GpuInfo) -> Calibration | None:
        # Without opening a GPU, its driver tells name and capability, not the rest of its class.
        same = (c for c in stored if (c.device.name, c.arch) == (gpu.name, gpu.arch))
        return next(same, None)

    return GpuListing(found, tuple(ListedGpu(gpu, of(gpu)) for gpu in found.devices))


def measuring_gpu(
    index: int | None, *, shared: bool = False, found: FoundGpus | None = None
) -> GpuInfo:
    """The GPU to measure on: the one with that index, as nvidia-smi counts, or the first.

    Raises :class:`DeviceError` where there is none, its driver is too old, or others use it,
    unless ``shared``.
    """
    found = find_gpus() if found is None else found
    if not found.devices:
        raise DeviceError(found.reason, hint=found.hint or "tunegen doctor")
    gpu = choose_gpu("gpu", index=index, shared=shared, found=found)
    assert gpu is not None  # "gpu" demands one
    return gpu

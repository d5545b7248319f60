# SPDX-License-Identifier: Apache-2.0
"""The GPUs that are here, found through NVML: no context is made, nothing is loaded on them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tunegen.model import FoundGpus, GpuInfo

T = TypeVar("T")

_DEVICE_NODES = Path("/dev")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))  # Docker's and Podman's
_GIVE_GPUS = "docker run --gpus all IMAGE"

# What nvmlInit's failures mean; the rest are named by NVML itself.
_NO_LIBRARY = "no NVIDIA driver (libnvidia-ml.so.1 not found)"
_INIT_FAILURES = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": (_NO_LIBRARY, "install NVIDIA's driver, 580 or newer"),
    "NVML_ERROR_DRIVER_NOT_LOADED": (
        "the NVIDIA driver is installed but not loaded",
        "sudo modprobe nvidia",
    ),
    "NVML_ERROR_NO_PERMISSION": (
        "the NVIDIA driver is loaded, this user may not open /dev/nvidiactl",
        "ls -l /dev/nvidia*",
    ),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "the driver's library and its kernel module are of different versions",
        "reboot, or reload the kernel module",
    ),
}


def find_gpus() -> FoundGpus:
    """What is there and usable, or the reason why nothing is. Raises nothing for an absent GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return FoundGpus(
            reason="nvidia-ml-py is not installed, so GPUs cannot be looked for",
            hint="pip install 'nvidia-ml-py>=13,<14'",
        )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _no_driver(nvml, error)
    try:
        return _found(nvml)
    except nvml.NVMLError as error:
        return FoundGpus(reason=f"NVML: {error}", hint="nvidia-smi")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _no_driver(nvml: Any, error: Any) -> FoundGpus:
    known = {getattr(nvml, name): text for name, text in _INIT_FAILURES.items()}
    reason, hint = known.get(error.value, (f"NVML: {error}", "nvidia-smi"))
    if _in_container() and not _device_nodes():
        return FoundGpus(reason=f"{reason}, in a container that was given no GPU", hint=_GIVE_GPUS)
    return FoundGpus(reason=reason, hint=hint)


def _found(nvml: Any) -> FoundGpus:
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 13000 for 13.0
    driver_cuda = f"{number // 1000}.{number % 1000 // 10}"

    def none(reason: str, hint: str, hidden: int = 0) -> FoundGpus:
        return FoundGpus((), f"driver {driver} found, {reason}", hint, driver, driver_cuda, hidden)

    count = nvml.nvmlDeviceGetCount()
    if not count:
        if _in_container():
            return none("but the container was given no GPU", _GIVE_GPUS)
        return none("but no GPU", "nvidia-smi")
    if not _has_libcuda():
        return none(
            "and a GPU, but no libcuda.so.1 to use it with",
            "containers need NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    devices, failures = [], []
    for index in range(count):
        try:
            devices.append(_describe(nvml, index))
        except nvml.NVMLError as error:
            failures.append(f"GPU {index}: {error}")
    if not devices:
        return none("; ".join(failures), "nvidia-smi")
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = visible(tuple(devices), setting)
    hidden = len(devices) - len(usable)
    if not usable:
        return none(
            f"but CUDA_VISIBLE_DEVICES={setting!r} hides every GPU ({hidden})",
            "unset CUDA_VISIBLE_DEVICES",
            hidden,
        )
    return FoundGpus(usable, "", "", driver, driver_cuda, hidden)


def visible(devices: tuple[GpuInfo, ...], setting: str | None) -> tuple[GpuInfo, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order.

    Entries are indices, or the first characters of a GPU's or a MIG instance's UUID; as in CUDA,
    an entry that names nothing ends the list. With GPUs of several kinds, CUDA counts the fastest
    first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, so an index may mean another one there.
    """
    if setting is None:
        return devices
    chosen: list[GpuInfo] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [device for device in devices if _names(entry, device)]
        if not named:
            break
        chosen += named[:1]
    return tuple(dict.fromkeys(chosen))


def _names(entry: str, device: GpuInfo) -> bool:
    if entry.isdecimal():
        return int(entry) == device.index
    return any(
        uuid.startswith(entry)
        for uuid in (device.uuid, *device.slices)
        if entry.startswith(("GPU-", "MIG-"))
    )


def _describe(nvml: Any, index: int) -> GpuInfo:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    mig = _optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
    return GpuInfo(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        arch=f"sm_{major}{minor}",
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        mig=mig == nvml.NVML_DEVICE_MIG_ENABLE,
        slices=tuple(_slices(nvml, handle)) if mig else (),
        other_processes=_optional(nvml, lambda: _others(nvml, handle), 0),
    )


def _slices(nvml: Any, handle: Any) -> Iterator[str]:
    for position in range(_optional(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except nvml.NVMLError:  # positions may be empty
            continue
        yield _text(nvml.nvmlDeviceGetUUID(instance))


def _others(nvml: Any, handle: Any) -> int:
    processes = (
        *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle),
    )
    return len({process.pid for process in processes} - {os.getpid()})


def _optional(nvml: Any, query: Callable[[], T], otherwise: T) -> T:
    """The answer, or ``otherwise`` where this GPU or driver has no such thing."""
    try:
        return query()
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _in_container() -> bool:
    marks = any(mark.exists() for mark in _CONTAINER_MARKS)
    return marks or "KUBERNETES_SERVICE_HOST" in os.environ or "container" in os.environ


def _device_nodes() -> bool:
    # /dev/dxg is the GPU of WSL 2, which has no /dev/nvidia*.
    return any(_DEVICE_NODES.glob("nvidia*")) or (_DEVICE_NODES / "dxg").exists()


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

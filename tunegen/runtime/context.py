# SPDX-License-Identifier: Apache-2.0
"""The CUDA context that kernels are loaded into: the caller's, or the device's primary one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunegen.device import driver
from tunegen.errors import DeviceError

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


@contextmanager
def refusals(what: str, hint: str = "") -> Iterator[None]:
    """A driver's refusal in the block becomes a :class:`DeviceError` that says what was tried."""
    try:
        yield
    except driver.CudaError as error:
        raise DeviceError(f"{what}: {error}", hint=hint) from error


class Context:
    """A context on one device.

    It is the calling thread's current context where there is one and it is on the device asked
    for, else the device's primary context, which torch and the CUDA runtime use too. A primary
    context that had to be retained is kept until the process ends. ``cuda`` is the newest CUDA
    that the driver knows, ``13.0``.

    Raises :class:`DeviceError` where there is no driver or no such device, naming what there is.
    """

    def __init__(self, index: int | None = None) -> None:
        with refusals("CUDA cannot be used", hint="tunegen doctor"):
            driver.call("cuInit", 0)
            self.index, self._context = _current_or_primary(index)
            self.handle = int(self._context)
            device = driver.call("cuDeviceGet", self.index)
            name: bytes = driver.call("cuDeviceGetName", 128, device)
            self.arch, self.cuda = driver.arch_of(device), driver.driver_cuda()
            self.sm_count = driver.attribute(device, "MULTIPROCESSOR_COUNT")
            self.shared_bytes = driver.attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.name = name.split(b"\0")[0].decode()

    def __str__(self) -> str:
        return f"device {self.index}, {self.name} ({self.arch}, driver for CUDA {self.cuda})"

    def is_current(self) -> bool:
        """Whether this is the context of the calling thread."""
        return int(driver.call("cuCtxGetCurrent")) == self.handle

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context current in the block, the caller's afterwards."""
        driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")

    def allocate(self, size: int, purpose: str) -> int:
        """Address of ``size`` new bytes; raises :class:`DeviceError` with the bytes needed and
        free where they do not fit."""
        hint = "free memory on the device"
        free = int(driver.call("cuMemGetInfo")[0])
        if size > free:
            raise DeviceError(
                f"{purpose} needs {size:,} bytes, {free:,} are free on {self}", hint=hint
            )
        with refusals(f"{purpose} needs {size:,} bytes on {self}", hint):
            return int(driver.call("cuMemAlloc", size))

    def order(self, producer: int, consumer: int) -> None:
        """Let what is put on ``consumer`` from now on wait for what is on ``producer``."""
        event = driver.call("cuEventCreate", _NO_TIMING)
        try:
            driver.call("cuEventRecord", event, producer)
            driver.call("cuStreamWaitEvent", consumer, event, 0)
        finally:
            driver.call("cuEventDestroy", event)


def _current_or_primary(index: int | None) -> tuple[int, Any]:
    count = int(driver.call("cuDeviceGetCount"))
    if index is not None and not 0 <= index < count:
        raise DeviceError(f"no device {index}: there are {count}, numbered from 0")
    if not count:
        raise DeviceError("the driver sees no device", hint="tunegen doctor")
    current = driver.call("cuCtxGetCurrent")
    if int(current):
        here = int(driver.call("cuCtxGetDevice"))
        if index in (None, here):
            return here, current
    index = index or 0
    primary = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", index))
    if not int(current):
        driver.call("cuCtxSetCurrent", primary)
    return index, primary

# SPDX-License-Identifier: Apache-2.0
"""What it takes to bring data to the device and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from tunegen.device import Gpu
from tunegen.device.driver import call
from tunegen.runner.protocol import Transfer, Transferred

# The first copies touch new pages and wake the link from its power saving.
_WARM_UPS = 2


def transfer(gpu: Gpu, request: Transfer) -> Transferred:
    """Time copies between host and device, on memory of their own.

    Raises :class:`tunegen.errors.DeviceError` where the device has no room for them,
    :class:`tunegen.device.CudaError` where the host has no pages to lock.
    """
    with ExitStack() as undo:
        device = gpu.allocate(request.bytes)
        undo.callback(gpu.release, device)
        memory = _pinned if request.pinned else _pageable
        host = undo.enter_context(memory(request.bytes))
        samples = [
            _copy_us(gpu, request, device, host) for _ in range(_WARM_UPS + request.repeats)
        ]
    return Transferred(tuple(samples[_WARM_UPS:]))


def _copy_us(gpu: Gpu, request: Transfer, device: int, host: int) -> float:
    gpu.synchronize()
    started = time.perf_counter()
    if request.to_device:
        call("cuMemcpyHtoDAsync", device, host, request.bytes, gpu.stream)
    else:
        call("cuMemcpyDtoHAsync", host, device, request.bytes, gpu.stream)
    gpu.synchronize()
    return (time.perf_counter() - started) * 1e6


@contextmanager
def _pageable(size: int) -> Iterator[int]:
    """The address of memory as every program has it, its pages in place."""
    memory = np.full(max(size, 1), 0x55, dtype=np.uint8)
    yield memory.ctypes.data


@contextmanager
def _pinned(size: int) -> Iterator[int]:
    """The address of page-locked memory."""
    address = int(call("cuMemAllocHost", max(size, 1)))
    try:
        yield address
    finally:
        call("cuMemFreeHost", address)

# SPDX-License-Identifier: Apache-2.0
"""Bringing data to the device and back, on a driver that keeps books."""

from __future__ import annotations

import ctypes
import math

import pytest
from in_process import InProcess, gpu_with

from tunegen.device import CudaError
from tunegen.runner import transfer as module
from tunegen.runner.protocol import Failed, Open, Transfer, Transferred


class Books:
    """Page-locked memory is the C library's; copies are made and written down."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.copies = []
        self.pinned = {}
        self.freed = []
        self.refuse = ""

    def __call__(self, name, *arguments):
        if name == self.refuse:
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
        return getattr(self, name)(*arguments)

    def cuMemAllocHost(self, size):
        memory = ctypes.create_string_buffer(size)
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cuMemFreeHost(self, address):
        del self.pinned[address]
        self.freed.append(address)

    def cuMemcpyHtoDAsync(self, device, host, size, stream):
        self._copy("to device", device, host, size)
        ctypes.memmove(self.gpu.memory.view(device, size).ctypes.data, host, size)

    def cuMemcpyDtoHAsync(self, host, device, size, stream):
        self._copy("to host", device, host, size)
        ctypes.memmove(host, self.gpu.memory.view(device, size).ctypes.data, size)

    def _copy(self, direction, device, host, size):
        self.copies.append((direction, host in self.pinned, size))


@pytest.fixture
def gpu():
    return gpu_with({}, memory_bytes=1 << 20)


@pytest.fixture
def books(gpu, monkeypatch):
    found = Books(gpu)
    monkeypatch.setattr(module, "call", found)
    return found


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("to_device", [False, True])
def test_so_many_copies_are_timed(gpu, books, to_device, pinned):
    worker = InProcess(gpu)
    worker.ask(Open(0), 1)
    answer = worker.ask(Transfer(1000, to_device, pinned, 5), 1)
    assert isinstance(answer, Transferred)
    assert len(answer.samples_us) == 5
    assert all(us > 0 and math.isfinite(us) for us in answer.samples_us)
    direction = "to device" if to_device else "to host"
    assert set(books.copies) == {(direction, pinned, 1000)}
    assert len(books.copies) > 5, "the first ones are not timed"
    assert not books.pinned
    assert len(books.freed) == pinned
    assert gpu.memory.used == 0


def test_no_room_on_the_device_is_an_answer(gpu, books):
    worker = InProcess(gpu)
    worker.ask(Open(0), 1)
    answer = worker.ask(Transfer(2 << 20, True, False, 5), 1)
    assert isinstance(answer, Failed)
    assert not answer.sticky
    assert "2,097,152 bytes of device memory are needed" in answer.reason


@pytest.mark.parametrize("refused", ["cuMemAllocHost", "cuMemcpyHtoDAsync"])
def test_what_the_driver_refuses_leaves_nothing_behind(gpu, books, refused):
    books.refuse = refused
    worker = InProcess(gpu)
    worker.ask(Open(0), 1)
    answer = worker.ask(Transfer(1000, True, True, 5), 1)
    assert isinstance(answer, Failed)
    assert answer.kind == "device"
    assert not books.pinned
    assert gpu.memory.used == 0


def test_a_transfer_needs_a_device(gpu, books):
    answer = InProcess(gpu).ask(Transfer(1000, True, True, 5), 1)
    assert isinstance(answer, Failed)
    assert "no device" in answer.reason

# SPDX-License-Identifier: Apache-2.0
"""What :mod:`tests.test_emulated_driver` has a process of its own do with the driver: ``python
calls.py NAME IMAGE``. Each function below is one such thing, and asserts what comes of it."""

from __future__ import annotations

import ctypes
import struct
import sys
import time

import numpy as np
import pytest

from tunegen.device import CudaError, EncodedMap, LoadedKernels, open_gpu
from tunegen.device.driver import bindings, call
from tunegen.errors import DeviceError
from tunegen.model import (
    Argument,
    CompiledKernel,
    Launch,
    LaunchPlan,
    Resources,
    TensorMap,
)

MEMORY = 256 << 20


def kernel(cubin: bytes, ptx: bytes = b"") -> CompiledKernel:
    """templates/vector/reference.cu.jinja in its form for axpy in fp32."""
    return CompiledKernel(
        name="vector_reference", entry="tunegen_vector_reference", target="sm_80", ptx=ptx,
        cubin=cubin, resources=Resources(0, 0, 0, 0, 0), warnings="", rejection="", nvrtc="13.5",
        seconds=0.0, from_cache=False,
    )  # fmt: skip


def plan(n: int, **launch) -> LaunchPlan:
    arguments = (
        Argument("x", "pointer"), Argument("work", "workspace", 4), Argument("out", "pointer"),
        Argument("a", "fp32"), Argument("n", "int64", n),
    )  # fmt: skip
    return LaunchPlan(
        (Launch("vector_reference", (2, 1, 1), (256, 1, 1), arguments, **launch),), 4 * n + 4
    )


def refused(code: str, action) -> CudaError:
    with pytest.raises(CudaError) as caught:
        action()
    assert caught.value.code == code
    return caught.value


def device(image: bytes) -> None:
    gpu, monitor = open_gpu(0)
    found = gpu.device_class()
    assert (found.name, found.arch, found.sm_count) == ("NVIDIA Emulated", "sm_90", 132)
    assert found.l2_bytes == 60 << 20
    assert found.shared_bytes_per_block == 227 << 10
    assert found.shared_bytes_reserved == 1024
    assert found.clock_mhz == 1980
    assert round(found.memory_gbps) == 4917  # 3201 MHz, 6144 bits, two transfers a clock
    assert found.fp64_per_clock == 64
    assert monitor.uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert monitor.read().sm_clock_mhz is None  # there is no NVML
    with pytest.raises(DeviceError, match="no device 1: there are 1"):
        open_gpu(1)


def memory(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    values = np.arange(1000, dtype=np.float32)
    address = gpu.allocate(4000)
    assert gpu.free_bytes() == MEMORY - 4000
    gpu.upload(address, values)
    np.testing.assert_array_equal(gpu.download(address, np.empty_like(values)), values)
    gpu.upload(address, values[::2])  # not in one piece
    np.testing.assert_array_equal(gpu.download(address, np.empty(500, np.float32)), values[::2])
    gpu.fill(address + 8, 0xFF, 8)
    gpu.copy(address + 100, address, 16)
    content = gpu.download(address + 100, np.empty(16, np.uint8))
    assert content.tolist() == [0, 0, 0, 0, 0, 0, 0, 0x40] + [0xFF] * 8
    gpu.fill(address, 0, 0)
    gpu.copy(address, address, 0)
    gpu.download(address, np.empty(0))
    gpu.release(gpu.allocate(0))
    needed = f"{MEMORY + 1:,} bytes of device memory are needed, {MEMORY - 4000:,} are free"
    with pytest.raises(DeviceError, match=needed):
        gpu.allocate(MEMORY + 1)
    gpu.release(address)
    assert gpu.free_bytes() == MEMORY
    refused("CUDA_ERROR_INVALID_VALUE", lambda: gpu.fill(address, 0, 4))


def launches(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    n = 1000
    x = np.arange(n, dtype=np.float32)
    y = np.linspace(-1, 1, n, dtype=np.float32)
    x_at, work, out = gpu.allocate(4 * n), gpu.allocate(4 * n + 4), gpu.allocate(8 * n)
    gpu.upload(x_at, x)
    gpu.upload(work + 4, y)
    loaded = gpu.load([kernel(image)])
    for factor, shared in ((0.5, 0), (-3.0, 100 << 10)):
        call_ = loaded.bind(
            plan(n, shared_bytes=shared), {"x": x_at, "out": out}, {"a": factor}, work
        )
        call_.launch(gpu.stream)
        found = gpu.download(out, np.empty(n))
        np.testing.assert_array_equal(found, np.float64(factor) * x + y)
    # Arguments are kept: a graph replays them.
    graph = gpu.graph(lambda: call_.launch(gpu.stream))
    gpu.fill(out, 0, 8 * n)
    gpu.synchronize()
    graph.launch()
    np.testing.assert_array_equal(gpu.download(out, np.empty(n)), np.float64(-3) * x + y)
    graph.close()

    def bound(**launch):
        return loaded.bind(plan(n, **launch), {"x": x_at, "out": out}, {"a": 1.0}, work)

    bound(cluster=(2, 1, 1)).launch(gpu.stream)
    three = bound(cluster=(3, 1, 1))  # does not divide the grid
    refused("CUDA_ERROR_INVALID_VALUE", lambda: three.launch(gpu.stream))
    refused("CUDA_ERROR_INVALID_VALUE", lambda: bound(shared_bytes=228 << 10))
    gpu.synchronize()  # none of that lost the context
    loaded.close()
    loaded.close()


def tensor_maps(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    x, work = gpu.allocate(1 << 20), gpu.allocate(1 << 20)
    wide = TensorMap(
        "x_map", "x", "bf16", (100, 2**32, 3), (208, 2**40 - 16), (64, 8, 1), 128, 256
    )
    flat = TensorMap("flat", "workspace", "fp64", (1000,), (), (256,), 0, 0, offset=48)
    arguments = (Argument("x_map", "tensor_map"), Argument("flat", "tensor_map"))
    launch = Launch("vector_reference", (1, 1, 1), (32, 1, 1), arguments)
    bound = LaunchPlan((launch,), 1 << 20, tensor_maps=(wide, flat)).bind({})
    call_ = gpu.load([kernel(image)]).bind(bound, {"x": x + 16}, {}, work)
    (prepared,) = call_._launches
    kinds = bindings().CUtensorMapDataType
    for address, numbers in zip(
        prepared.pointers,
        (
            (x + 16, 100, 2**32, 3, 0, 0, 208, 2**40 - 16, 0, 0, 64, 8, 1, 0, 0,
             kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, 3, 3),
            (work + 48, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 256, 0, 0, 0, 0,
             kinds.CU_TENSOR_MAP_DATA_TYPE_UINT64, 1, 0, 0),
        ),
        strict=True,
    ):  # fmt: skip
        assert address % 64 == 0
        expected = struct.pack("=10Q5I4H20x", *map(int, numbers))
        assert ctypes.string_at(address, 128) == expected
    refused("CUDA_ERROR_INVALID_VALUE", lambda: EncodedMap(wide).place(x + 8))


def graphs(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    address = gpu.allocate(16)

    def spoilt() -> None:
        gpu.fill(address, 1, 4)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gpu.graph(spoilt)
    gpu.fill(address, 2, 4)
    # The stream is as before, and what may not be recorded says so.
    refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", lambda: gpu.graph(gpu.synchronize))
    graph = gpu.graph(lambda: gpu.fill(address, 3, 4))
    assert gpu.download(address, np.empty(1, np.uint8)) == 2
    graph.launch()
    assert gpu.download(address, np.empty(1, np.uint8)) == 3
    graph.close()


def times(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    first = gpu.mark()
    time.sleep(0.02)
    second = gpu.mark()
    second.wait()
    assert 20e3 <= second.since_us(first) < 2e6
    assert second.since_us(second) == 0
    first.close()
    first.close()  # once is enough, twice is no harm
    refused("CUDA_ERROR_INVALID_HANDLE", lambda: second.since_us(first))


def misfits(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    loaded = gpu.load([kernel(b"", image.rstrip(b"\0"))])  # "PTX" gets its final zero here
    loaded.close()
    for cubin, ptx, code, kind in (
        (b"\x7fELF of another device", b"", "NO_BINARY_FOR_GPU", "cubin"),
        (b"", b".version 99.0", "UNSUPPORTED_PTX_VERSION", "PTX"),
        (b"nothing\0", b"", "INVALID_IMAGE", "cubin"),
    ):
        with pytest.raises(DeviceError) as caught:
            gpu.load([kernel(image), kernel(cubin, ptx)])
        assert caught.value.message == (
            f"vector_reference cannot be loaded (CUDA_ERROR_{code}): its {kind} was made for "
            "sm_80 by NVRTC 13.5, the device is sm_90 with a driver for CUDA 13.0"
        )
    gpu.synchronize()
    gpu.load([kernel(image)])


def fault(image: bytes) -> None:
    gpu, _ = open_gpu(0)
    loaded = gpu.load([kernel(image)])
    wild = loaded.bind(plan(1000), {"x": 1 << 45, "out": 1 << 45}, {"a": 1.0}, 1 << 45)
    mark = gpu.mark()
    wild.launch(gpu.stream)
    for action in (gpu.synchronize, mark.wait, lambda: gpu.allocate(4)):
        assert refused("CUDA_ERROR_ILLEGAL_ADDRESS", action).sticky
    mark.close()
    loaded.close()  # what is gone need not be given back


def no_context(image: bytes) -> None:
    error = refused("CUDA_ERROR_INVALID_CONTEXT", lambda: LoadedKernels([kernel(image)]))
    assert not error.sticky
    refused("CUDA_ERROR_INVALID_DEVICE", lambda: call("cuDeviceGet", 7))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2].encode() + b"\0")

# SPDX-License-Identifier: Apache-2.0
"""Tensor maps in host memory: what the driver is asked to encode, and where the result lies."""

from __future__ import annotations

import ctypes

import pytest
from fake_driver import Described, FakeDriver

from tunegen.device import CudaError, EncodedMap, driver, loading, tensor_map
from tunegen.model import Argument, Launch, TensorMap

BOX = {"fp64": 16, "fp32": 32, "fp16": 64, "bf16": 64}


def made(dtype="bf16", swizzle=128, l2_promotion=256, **more) -> TensorMap:
    box = (BOX[dtype], 8, 1)
    return TensorMap(
        "m", "x", dtype, (100, 50, 3), (1024, 2**20), box, swizzle, l2_promotion, **more
    )


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "call", fake)
    return fake


def described(gpu: FakeDriver, encoded: EncodedMap) -> Described:
    return gpu.encoded[ctypes.string_at(encoded.address, 128)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("fp16", "UINT16"), ("bf16", "UINT16"), ("fp32", "UINT32"), ("fp64", "UINT64")],
)
def test_every_bit_of_an_element_is_kept(gpu, dtype, kind):
    encoded = EncodedMap(made(dtype, offset=4096))
    encoded.place(0x10000)
    assert described(gpu, encoded) == Described(
        kind, 0x11000, (100, 50, 3), (1024, 2**20), (BOX[dtype], 8, 1), "128B", "L2_256B"
    )


@pytest.mark.parametrize(
    ("swizzle", "name"), [(0, "NONE"), (32, "32B"), (64, "64B"), (128, "128B")]
)
def test_swizzles(gpu, swizzle, name):
    encoded = EncodedMap(made(swizzle=swizzle))
    encoded.place(0)
    assert described(gpu, encoded).swizzle == name


@pytest.mark.parametrize(
    ("size", "name"), [(0, "NONE"), (64, "L2_64B"), (128, "L2_128B"), (256, "L2_256B")]
)
def test_promotions(gpu, size, name):
    encoded = EncodedMap(made(l2_promotion=size))
    encoded.place(0)
    assert described(gpu, encoded).l2_promotion == name


def test_maps_begin_where_kernel_parameters_may(gpu):
    several = [EncodedMap(made()) for _ in range(20)]
    assert all(encoded.address % 64 == 0 for encoded in several)
    for i, encoded in enumerate(several):
        encoded.place(0x100 * i)
    assert [described(gpu, encoded).address for encoded in several] == [
        0x100 * i for i in range(20)
    ]


def test_an_address_is_encoded_once(gpu, monkeypatch):
    encoded = EncodedMap(made())
    for base in (0x100, 0x100, 0x200, 0x100, 0x200):
        encoded.place(base)
        assert described(gpu, encoded).address == base
    assert gpu.count("cuTensorMapEncodeTiled") == 2
    monkeypatch.setattr(tensor_map, "_KNOWN", 2)
    for base in (0x300, 0x100, 0x200):
        encoded.place(base)
        assert described(gpu, encoded).address == base
        assert len(encoded._known) <= 2


def test_a_refusal_leaves_the_map_as_it_was(gpu):
    encoded = EncodedMap(made())
    encoded.place(0x100)
    gpu.refuse["cuTensorMapEncodeTiled"] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(CudaError, match="cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"):
        encoded.place(0x200)
    assert described(gpu, encoded).address == 0x100
    gpu.refuse.clear()
    encoded.place(0x200)
    assert described(gpu, encoded).address == 0x200


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_only_clusters_that_a_kernel_does_not_fix_are_asked_for(cluster):
    launch = Launch("k", (2, 1, 1), (32, 1, 1), (Argument("x", "pointer"),), cluster=cluster)
    config = loading.launch_config(launch)
    assert config.numAttrs == (cluster != (1, 1, 1))


@pytest.mark.parametrize("cluster", [(1, 1, 1), (1, 4, 1)])
def test_programmatic_launches_are_asked_for(cluster):
    arguments = (Argument("x", "pointer"),)
    launch = Launch("k", (2, 4, 1), (32, 1, 1), arguments, cluster=cluster, programmatic=True)
    config = loading.launch_config(launch)
    kinds = driver.bindings().CUlaunchAttributeID
    found = {attribute.id: attribute.value for attribute in config.attrs}
    assert config.numAttrs == len(found) == 1 + (cluster != (1, 1, 1))
    early = found.pop(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    assert early.programmaticStreamSerializationAllowed == 1
    assert set(found) <= {kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION}

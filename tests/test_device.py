# SPDX-License-Identifier: Apache-2.0
"""Finding GPUs: with a stand-in for NVML, since the machines that run this rarely have one."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass, field

import pytest

from tunegen.device import detect as device
from tunegen.model import GpuInfo


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Card:
    name: str | bytes = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    capability: tuple[int, int] = (9, 0)
    memory: tuple[int, int] = (100, 60)
    mig: int | None = None  # None: this card knows no MIG
    slices: list[str | None] = field(default_factory=list)
    pids: tuple[int, ...] = ()
    mps_pids: tuple[int, ...] = ()
    broken: bool = False


class Nvml(types.ModuleType):
    """The calls of pynvml that are used, over a list of cards."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    def __init__(self, *cards: Card, init: int = 0, cuda: int = 13000) -> None:
        super().__init__("pynvml")
        self.cards, self.init, self.cuda, self.open = cards, init, cuda, 0

    def nvmlInit(self):
        if self.init:
            raise NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.cards[index].broken:
            raise NVMLError(15)
        return self.cards[index]

    def nvmlDeviceGetName(self, card):
        return card.name

    def nvmlDeviceGetUUID(self, handle):
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return card.capability

    def nvmlDeviceGetMemoryInfo(self, card):
        return types.SimpleNamespace(total=card.memory[0], free=card.memory[1])

    def nvmlDeviceGetMigMode(self, card):
        if card.mig is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [card.mig, card.mig]

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return len(card.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if card.slices[index] is None:
            raise NVMLError(6)
        return card.slices[index]

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [types.SimpleNamespace(pid=pid) for pid in card.pids]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, card):
        return [types.SimpleNamespace(pid=pid) for pid in card.mps_pids]


@pytest.fixture(autouse=True)
def bare_host(monkeypatch, tmp_path):
    """No container, no device nodes, no settings, libcuda in place."""
    for name in ("CUDA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_CONTAINER_MARKS", (tmp_path / ".dockerenv",))
    monkeypatch.setattr(device, "_DEVICE_NODES", tmp_path)
    monkeypatch.setattr(device, "_has_libcuda", lambda: True)


@pytest.fixture
def install(monkeypatch):
    def put(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_describes_a_gpu(install):
    nvml = install(Nvml(Card(name=b"NVIDIA H200"), cuda=13020))
    found = device.find_gpus()
    assert found.devices == (GpuInfo(0, "NVIDIA H200", "GPU-aaaa", "sm_90", 100, 60),)
    assert (found.driver, found.driver_cuda, found.reason) == ("580.65.06", "13.2", "")
    assert nvml.open == 0, "NVML is shut down again"


def test_mig_instances_and_other_processes(install):
    card = Card(
        capability=(12, 1),
        mig=1,
        slices=["MIG-1", None, "MIG-2"],
        pids=(os.getpid(), 7),
        mps_pids=(7, 8),
    )
    install(Nvml(card))
    (gpu,) = device.find_gpus().devices
    assert gpu.mig
    assert gpu.slices == ("MIG-1", "MIG-2")
    assert gpu.other_processes == 2, "7 once, 8, and not this process"
    assert gpu.arch == "sm_121"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (Nvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1"),
        (Nvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (Nvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidiactl"),
        (Nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (999, "error 999"),
    ],
)
def test_each_way_of_having_no_driver_is_told_apart(install, error, word):
    install(Nvml(Card(), init=error))
    found = device.find_gpus()
    assert not found.devices
    assert not found.driver
    assert word in found.reason
    assert found.hint


def test_a_container_without_gpus_is_named(install, tmp_path):
    install(Nvml(init=Nvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert "container" not in device.find_gpus().reason
    (tmp_path / ".dockerenv").touch()
    found = device.find_gpus()
    assert "container" in found.reason
    assert "--gpus" in found.hint
    # With device nodes in place the container is not to blame.
    (tmp_path / "nvidia0").touch()
    assert "container" not in device.find_gpus().reason


def test_a_driver_without_a_gpu(install):
    install(Nvml())
    found = device.find_gpus()
    assert not found.devices
    assert "no GPU" in found.reason
    assert found.driver == "580.65.06"


def test_a_driver_without_libcuda(install, monkeypatch):
    monkeypatch.setattr(device, "_has_libcuda", lambda: False)
    install(Nvml(Card()))
    found = device.find_gpus()
    assert not found.devices
    assert "libcuda.so.1" in found.reason


def test_a_lost_gpu_does_not_hide_the_others(install):
    install(Nvml(Card(broken=True), Card(uuid="GPU-b")))
    assert [gpu.index for gpu in device.find_gpus().devices] == [1]
    install(Nvml(Card(broken=True)))
    found = device.find_gpus()
    assert not found.devices
    assert "GPU 0: error 15" in found.reason


def test_without_nvml_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    found = device.find_gpus()
    assert "nvidia-ml-py" in found.reason
    assert found.hint.startswith("pip install")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 1 ", [2, 1]),
        ("0,9,1", [0]),  # CUDA stops at the first entry that names nothing
        ("GPU-b", [1]),
        ("GPU-cc,GPU-a", [2, 0]),
        ("MIG-2", [2]),
        ("none", []),
        ("1,1", [1]),
    ],
)
def test_cuda_visible_devices(install, monkeypatch, setting, expected):
    split = Card(uuid="GPU-cccc", mig=1, slices=["MIG-22"])
    cards = (Card(uuid="GPU-aaaa"), Card(uuid="GPU-bbbb"), split)
    install(Nvml(*cards))
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = device.find_gpus()
    assert [gpu.index for gpu in found.devices] == expected
    assert found.hidden == len(cards) - len(expected)
    if not expected:
        assert "CUDA_VISIBLE_DEVICES" in found.reason
        assert found.hint == "unset CUDA_VISIBLE_DEVICES"


def test_here(monkeypatch):
    """Whatever this machine has: an answer, and a reason exactly where there is no GPU."""
    monkeypatch.undo()
    found = device.find_gpus()
    assert bool(found.reason) == (not found.devices)

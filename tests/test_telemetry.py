# SPDX-License-Identifier: Apache-2.0
"""What the card says of itself, from a stand-in for NVML."""

from __future__ import annotations

import os
import sys
import types

import pytest

from tunegen.device import CudaError, Monitor, driver, loading
from tunegen.device.driver import bindings
from tunegen.model import Telemetry


class NVMLError(Exception):
    pass


class Nvml(types.ModuleType):
    """One card, "GPU-a", with a slice "MIG-a"; ``missing`` queries fail."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        super().__init__("pynvml")
        self.missing = set()
        self.reasons = 0
        self.pids = {"GPU-a": set(), "MIG-a": set()}
        self.mps_pids = set()

    def _answer(self, name, handle, value):
        assert handle in self.pids
        if name in self.missing or (handle.startswith("MIG") and name != "processes"):
            raise NVMLError(name)
        return value

    def nvmlInit(self):
        if "init" in self.missing:
            raise NVMLError("init")

    def nvmlSystemGetDriverVersion(self):
        return b"580.65.06"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.pids:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle == "MIG-a"
        return "GPU-a"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self._answer("clock", handle, {1: 1755, 2: 3201}[kind])

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("power", handle, 698_250)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self._answer("temperature", handle, 61)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer("reasons", handle, self.reasons)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer("energy", handle, 123_456_789)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("utilization", handle, types.SimpleNamespace(gpu=97))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._answer("processes", handle, _listed(self.pids[handle]))

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle):
        return self._answer("processes", handle, _listed(self.mps_pids))


def _listed(pids):
    return [types.SimpleNamespace(pid=pid) for pid in pids]


@pytest.fixture
def nvml(monkeypatch):
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_all_figures_in_their_units(nvml):
    assert Monitor("GPU-a").read() == Telemetry(
        sm_clock_mhz=1755, memory_clock_mhz=3201, power_w=698.25, temperature_c=61,
        energy_mj=123_456_789, utilization_percent=97,
    )  # fmt: skip
    assert Monitor("GPU-a").driver() == "580.65.06"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("power", "power_w"), ("temperature", "temperature_c"), ("energy", "energy_mj"),
        ("utilization", "utilization_percent"),
    ],
)  # fmt: skip
def test_what_is_not_told_is_none(nvml, query, field):
    whole = Monitor("GPU-a").read()
    nvml.missing = {query}
    partial = Monitor("GPU-a").read()
    assert getattr(partial, field) is None
    assert getattr(whole, field) is not None
    assert partial.sm_clock_mhz == 1755
    nvml.missing = {"clock", "reasons", "processes"}
    nvml.reasons = 4
    found = Monitor("GPU-a").read()
    assert (found.sm_clock_mhz, found.memory_clock_mhz, found.throttle) == (None, None, ())


@pytest.mark.parametrize("how", ["no package", "no driver", "no such card"])
def test_nothing_is_raised_where_nothing_is_told(nvml, monkeypatch, how):
    if how == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if how == "no driver":
        nvml.missing = {"init"}
    monitor = Monitor("GPU-b" if how == "no such card" else "GPU-a")
    monitor.opened()
    assert monitor.read() == Telemetry()
    assert monitor.driver() == ""
    assert monitor.energy_mj() is None


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x4, ("power limit",)),
        (0x20, ("thermal limit",)),
        (0x4 | 0x8 | 0x40, ("power limit", "hardware slowdown", "hardware thermal slowdown")),
        (0x8000, ()),  # of a later driver
    ],
)
def test_throttling_in_words(nvml, bits, words):
    nvml.reasons = bits
    assert Monitor("GPU-a").read().throttle == words


def test_a_slice_tells_the_cards_figures_and_its_own_processes(nvml):
    nvml.pids = {"GPU-a": {1, 2, 3}, "MIG-a": {3}}
    found = Monitor("MIG-a").read()
    assert found.power_w == 698.25
    assert found.other_pids == (3,)


@pytest.mark.parametrize("container", [False, True])
def test_this_process_is_not_company(nvml, container):
    """Whether NVML numbers it as the system does or, from outside of a container, otherwise."""
    own = 31337 if container else os.getpid()
    nvml.pids["GPU-a"] = {700}
    monitor = Monitor("GPU-a")
    assert monitor.read().other_pids == (700,)
    nvml.pids["GPU-a"] |= {own}  # the context is made
    monitor.opened()
    assert monitor.read().other_pids == (700,)
    assert own in monitor.own_pids
    nvml.pids["GPU-a"] |= {800}
    nvml.mps_pids = {900}
    assert monitor.read().other_pids == (700, 800, 900)


def test_errors_that_lose_the_context_are_those_of_the_manual():
    codes = {code.name: code.__doc__ or "" for code in bindings().CUresult}
    told = {name for name, text in codes.items() if "must be terminated and relaunched" in text}
    for name in told:
        assert CudaError("a call", name).sticky, name
    for name in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_FOUND"):
        assert not CudaError("a call", name).sticky
    assert CudaError("a call", "CUDA_ERROR_ECC_UNCORRECTABLE").foreign
    assert not CudaError("a call", "CUDA_ERROR_ILLEGAL_ADDRESS").foreign
    assert str(CudaError("cuInit", "CUDA_ERROR_NO_DEVICE")) == "cuInit: CUDA_ERROR_NO_DEVICE"


def test_known_errors_exist():
    names = {code.name for code in bindings().CUresult}
    assert names >= driver._STICKY >= driver._FOREIGN
    assert names >= loading._MISFITS

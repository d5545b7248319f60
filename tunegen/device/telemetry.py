# SPDX-License-Identifier: Apache-2.0
"""What the card says of itself while it works: clocks, power, temperature, energy, company."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from tunegen.model import Telemetry

T = TypeVar("T")

# NVML's reasons for a clock below the highest, nvmlClocksEventReason*. That the card is idle is
# left out: it says nothing of the time when it was not.
_REASONS = {
    0x002: "clocks set by an administrator",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal limit",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}


class Monitor:
    """Reads NVML for the device with a UUID. What is not told is None; nothing is ever raised.

    Made before the process has a context on the device, so that it can tell the process's own
    entry in NVML's list from those of others: in a container NVML's process numbers are not the
    container's.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._nvml: Any = None
        self._card: Any = None
        self._device: Any = None
        self._open()
        self._own = frozenset([os.getpid()])
        self._before = self._processes()

    def _open(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._nvml = nvml
            self._device = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
            # Clocks and power are the whole card's, also where the device is a slice of it.
            self._card = self._device
            if self.uuid.startswith("MIG-"):
                self._card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._device)

    @property
    def own_pids(self) -> tuple[int, ...]:
        """The numbers under which NVML may list this process."""
        return tuple(sorted(self._own))

    def opened(self) -> None:
        """Say that this process has its context now: who is new on the device is this process."""
        self._own |= self._processes() - self._before

    def driver(self) -> str:
        """``580.65.06``, or the empty string."""
        version = self._ask(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return version.decode() if isinstance(version, bytes) else version or ""

    def energy_mj(self) -> int | None:
        """Energy of the card since the driver was loaded, in mJ."""
        return self._ask(lambda nvml: int(nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)))

    def read(self) -> Telemetry:
        """The card now."""
        card = self._card
        power_mw = self._ask(lambda nvml: nvml.nvmlDeviceGetPowerUsage(card))
        reasons = self._ask(lambda nvml: nvml.nvmlDeviceGetCurrentClocksEventReasons(card)) or 0
        return Telemetry(
            sm_clock_mhz=self._ask(lambda n: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM)),
            memory_clock_mhz=self._ask(lambda n: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_MEM)),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=self._ask(
                lambda n: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU)
            ),
            throttle=tuple(text for bit, text in _REASONS.items() if reasons & bit),
            energy_mj=self.energy_mj(),
            utilization_percent=self._ask(lambda n: n.nvmlDeviceGetUtilizationRates(card).gpu),
            other_pids=tuple(sorted(self._processes() - self._own)),
        )

    def _processes(self) -> frozenset[int]:
        """Who computes on the device, in NVML's numbers."""
        device = self._device
        listed = (
            *(self._ask(lambda n: n.nvmlDeviceGetComputeRunningProcesses(device)) or ()),
            *(self._ask(lambda n: n.nvmlDeviceGetMPSComputeRunningProcesses(device)) or ()),
        )
        return frozenset(int(process.pid) for process in listed)

    def _ask(self, query: Callable[[Any], T]) -> T | None:
        if self._device is None:
            return None
        try:
            return query(self._nvml)
        except self._nvml.NVMLError:
            return None  # this card, driver or user may not

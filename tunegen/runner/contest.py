# SPDX-License-Identifier: Apache-2.0
"""Several contenders on the same operands, ready to be timed in turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tunegen.device import Gpu, Monitor
from tunegen.errors import DeviceError
from tunegen.runner.checks import Checks, Finding
from tunegen.runner.loaded import Loaded
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import Enter, Entered, Policy, Timed
from tunegen.runner.timing import Stopwatch
from tunegen.runner.vendor import VendorCall


class Contest:
    """Contenders by name, kept until all of them leave."""

    def __init__(self, gpu: Gpu, monitor: Monitor, operands: Operands) -> None:
        self._gpu = gpu
        self._monitor = monitor
        self._operands = operands
        self._checks = Checks(gpu, operands)
        self._entries: dict[str, tuple[Stopwatch, ExitStack]] = {}

    def enter(self, request: Enter) -> Entered:
        """Load a contender, run it once and compare its result; one of the same name leaves."""
        self._leave(request.name)
        with ExitStack() as undo:
            direct, description = False, ""
            launch: Callable[[int], None]
            if request.executable is None:
                vendor = VendorCall(self._gpu, self._operands, request)
                launch, direct, description = vendor.launch, vendor.direct, vendor.description
            else:
                loaded = Loaded(self._gpu, self._operands, request.executable)
                undo.callback(loaded.close)
                launch = loaded.launch
            found = self._inspected(launch)
            stopwatch = Stopwatch(self._gpu, self._operands, launch, direct=direct)
            undo.callback(stopwatch.close)
            self._entries[request.name] = (stopwatch, undo.pop_all())
        return Entered(relative_error=found.relative_error, description=description)

    def _inspected(self, launch: Callable[[int], None]) -> Finding:
        self._checks.launch(launch)
        return self._checks.inspect()

    def block(self, name: str, policy: Policy, seconds: float) -> Timed:
        """Time a contender; raises :class:`DeviceError` for a name that has not entered."""
        if name not in self._entries:
            raise DeviceError(f"no contender {name!r}: there are {', '.join(self._entries)}")
        stopwatch, _ = self._entries[name]
        return stopwatch.block(policy, seconds, self._monitor)

    def leave(self) -> None:
        """Unload every contender."""
        for name in list(self._entries):
            self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self._entries:
            self._entries.pop(name)[1].close()

# SPDX-License-Identifier: Apache-2.0
"""A worker kept in one state, a device opened and a problem prepared, and replaced when lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tunegen.errors import DeviceError
from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import (
    Answer,
    Enter,
    Entered,
    Failed,
    Open,
    Opened,
    Prepare,
    Prepared,
    Request,
)

# Starting Python, loading NumPy and making a context takes one to two seconds; without persistence
# mode the driver initialises every card of the host first, some seconds for each.
OPEN_SECONDS = 90.0

# After a hang or a fault the driver may refuse the next context for a moment.
_START_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0

# A worker that dies, unlike one that hangs, may have been killed by somebody else.
_ATTEMPTS = 2

# Loading the cubins of a contender, and running it once.
ENTER_SECONDS = 30.0

# Allocating, filling and computing the expected results; see :func:`prepare_seconds`.
_PREPARE_SECONDS = 60.0

# A plain fp64 kernel does more than this on every card, those with 1/64 of the rate included.
_SLOWEST_REFERENCE_FLOPS = 5e10


def prepare_seconds(flops: int) -> float:
    """How long :class:`Prepare` may take for a problem of so many operations."""
    return _PREPARE_SECONDS + flops / _SLOWEST_REFERENCE_FLOPS


class Station:
    """Asks a worker, and brings a fresh one to the same state where the last one was lost.

    A worker is started by ``start`` when it is first needed. ``restarts`` counts the others, and
    ``restarting_seconds`` is what bringing them to the state took. ``own_pids`` are the numbers
    under which NVML knows all of them.

    Any thread may ask, one at a time. Workers end with the thread that started them (see
    :mod:`tunegen.runner.lifeline`), so that is one of the station's own.
    """

    def __init__(self, start: Callable[[], Worker], index: int = 0) -> None:
        self._start = start
        self._index = index
        self._starter: ThreadPoolExecutor | None = None
        self._worker: Worker | None = None
        self._opened: Opened | None = None
        self._prepared: tuple[Prepare, float] | None = None
        self._entered: dict[str, tuple[Enter, float]] = {}
        self.own_pids: set[int] = set()
        self.restarts = 0
        self.restarting_seconds = 0.0

    def open(self) -> Opened:
        """The device that the worker works on, opened if it is not yet.

        Raises :class:`DeviceError` where no worker can open it.
        """
        self._restore()
        assert self._opened is not None
        return self._opened

    def prepare(self, request: Prepare, timeout_s: float) -> Prepared:
        """Prepare a problem; a fresh worker will prepare the same. Contenders are left.

        Raises :class:`DeviceError` where that fails: for want of memory, say.
        """
        self._prepared = None
        self._entered.clear()
        answer = self.ask(request, timeout_s)
        if not isinstance(answer, Prepared):
            reason = answer.reason if isinstance(answer, Failed) else str(answer)
            raise DeviceError(f"the operands cannot be prepared: {reason}")
        self._prepared = (request, timeout_s)
        return answer

    def enter(self, request: Enter, timeout_s: float) -> Answer | Lost:
        """Load a contender; a fresh worker will load it again."""
        answer = self.ask(request, timeout_s)
        if isinstance(answer, Entered):
            self._entered[request.name] = (request, timeout_s)
        return answer

    def forget(self, name: str) -> None:
        """Do not load a contender again."""
        self._entered.pop(name, None)

    def ask(self, request: Request, timeout_s: float) -> Answer | Lost:
        """The answer of a worker in the state wanted.

        After a loss, or a failure that loses the device's context, the worker is gone, and the
        next request goes to a fresh one. What need not be the request's own doing, a worker that
        died or a device that failed, is tried once more. Raises :class:`DeviceError` where there
        is no worker to have.
        """
        answer: Answer | Lost
        for _ in range(_ATTEMPTS):
            self._restore()
            assert self._worker is not None
            answer = self._worker.ask(request, timeout_s)
            self._settle(answer)
            if not _is_foreign(answer):
                break
        return answer

    def close(self) -> None:
        """End the worker. The station can be used again."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _settle(self, answer: Answer | Lost) -> None:
        """Part with a worker that cannot be asked again."""
        if self._worker is None:
            return
        if isinstance(answer, Lost) or (isinstance(answer, Failed) and answer.sticky):
            self._worker.kill()
            self._worker = None

    def _restore(self) -> None:
        """Have a worker in the state wanted."""
        if self._worker is not None and not self._worker.alive:
            self._worker.kill()
            self._worker = None
        if self._worker is not None:
            return
        first, started = self._opened is None, time.perf_counter()
        for attempt in range(_START_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            loss = self._bring_up()
            if not loss:
                break
        else:
            raise DeviceError(f"no worker can open the GPU: {loss}", hint="tunegen doctor")
        if not first:
            self.restarts += 1
            self.restarting_seconds += time.perf_counter() - started

    def _bring_up(self) -> str:
        """Start a worker; why it was lost on the way, or the empty string."""
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, thread_name_prefix="tunegen-starter")
        self._worker = self._starter.submit(self._start).result()
        state: list[tuple[Request, float]] = [(Open(self._index), OPEN_SECONDS)]
        state += [self._prepared] if self._prepared else []
        for request, timeout_s in (*state, *self._entered.values()):
            answer = self._worker.ask(request, timeout_s)
            if isinstance(answer, Opened):
                self._opened = answer
                self.own_pids.update(answer.nvml_pids)
            elif isinstance(answer, Failed) and not answer.sticky:
                self.close()
                raise DeviceError(answer.reason, hint="tunegen doctor")
            elif not isinstance(answer, Prepared | Entered):
                self._worker.kill()
                self._worker = None
                return answer.reason if isinstance(answer, Failed) else str(answer)
        return ""


def _is_foreign(answer: Answer | Lost) -> bool:
    """Whether something else than the request may be to blame."""
    if isinstance(answer, Lost):
        return answer.kind != "timed_out"
    return isinstance(answer, Failed) and answer.sticky and answer.kind == "device"

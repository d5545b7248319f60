# SPDX-License-Identifier: Apache-2.0
"""The GPU as an evaluator: candidates in, outcomes out, whatever the kernels do."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

from tunegen.model import (
    Candidate,
    DeviceClass,
    Evidence,
    Outcome,
    Problem,
)
from tunegen.runner.process import Lost
from tunegen.runner.protocol import Executable, Failed, Policy, Tried, Try
from tunegen.runner.quarantine import Quarantine, blame
from tunegen.runner.station import Station

# What a trial takes besides the kernels, loading, checking and some 40 ms of timing, is below
# 0.3 s; on a machine whose cores all compile it may be ten times that.
TRY_FLOOR_SECONDS = 3.0

# A trial launches what is slow some ten times before it is dropped: a kernel that takes a hundred
# times as long as the best one is still told from one that never ends.
TRY_BEST_MULTIPLE = 1000.0

# The first trial of all warms up driver and card, and nobody knows how long it takes: by a model
# or an earlier run where there is one, else so long.
FIRST_TRY_SECONDS = 10.0
UNKNOWN_US = 30_000.0

# The best one is timed again after so many trials, to see whether the card has become slower or
# faster meanwhile; with 20 ms of timing that is 1 or 2 % of the work.
RETIME_EVERY = 16
_RETIME_BUDGET_MS = 20.0


def try_seconds(best_us: float | None, expected_us: float | None = None) -> float:
    """How long a trial may take, given the best time so far, or before that the time expected."""
    if best_us is not None:
        return TRY_FLOOR_SECONDS + TRY_BEST_MULTIPLE * best_us / 1e6
    return FIRST_TRY_SECONDS + TRY_BEST_MULTIPLE * (expected_us or UNKNOWN_US) / 1e6


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the evaluator's time: checking results, timing, replacing lost workers (bringing
    them to the same state included), and waiting for workers that were lost in the end."""

    verifying: float = 0.0
    timing: float = 0.0
    restarting: float = 0.0
    lost: float = 0.0


@dataclass(slots=True)
class Fastest:
    """The best time in microseconds of all evaluators that share this, freed of drift; None before
    the first success."""

    us: float | None = None


@dataclass(frozen=True, slots=True)
class _Incumbent:
    """The best candidate so far; ``us`` is its time, freed of the drift when it was taken.
    ``executable`` is None once it failed when it was timed again."""

    executable: Executable | None
    tolerance: float
    us: float


class GpuEvaluator:
    """Evaluator of candidates on the GPU of a :class:`Station`, on the problem prepared there.

    ``expected_us`` is about what a call will take, for the limit of the first trial.

    A candidate that faults, hangs or kills the worker goes to the ``quarantine``, and a fresh
    worker goes on.

    Times drift with temperature and clocks. Every 16 trials the best candidate is timed again;
    ``drift`` in a measurement's details is its time then over its time at first. Medians are as
    measured: whoever compares trials divides by the drift.

    Of several GPUs of one class each has an evaluator, which share ``fastest``. They are made
    comparable by :meth:`align`: drift is then over the time on one of them. With ``gpu``, its
    index, measurements say which one it was.

    Raises :class:`tunegen.errors.DeviceError` where no worker can be had any more.
    """

    evidence: Evidence = "measured"
    needs_kernels = True

    def __init__(
        self,
        station: Station,
        device: DeviceClass,
        *,
        policy: Policy = "burst",
        quarantine: Quarantine | None = None,
        expected_us: float | None = None,
        fastest: Fastest | None = None,
        gpu: int | None = None,
    ) -> None:
        self._station = station
        self._device = device
        self._policy: Policy = policy
        self._quarantine = quarantine
        self._expected_us = expected_us
        self._fastest = fastest or Fastest()
        self._gpu = {} if gpu is None else {"gpu": gpu}
        self._best: _Incumbent | None = None
        self._since_retimed = 0
        self._drift = 1.0
        self._verifying = self._timing = self._lost = 0.0

    @property
    def spent(self) -> Spent:
        """Where the seconds went so far."""
        return Spent(self._verifying, self._timing, self._station.restarting_seconds, self._lost)

    @property
    def best_us(self) -> float | None:
        """The best time so far, of all that share it, under the clocks of now; None before the
        first success."""
        return self._fastest.us * self._drift if self._fastest.us is not None else None

    def align(self, us: float) -> None:
        """Let drift be over the times of a GPU of the same class, on which the only candidate that
        was tried so far takes ``us``, freed of drift."""
        assert self._best is not None
        self._drift *= self._best.us / us
        self._best = dataclasses.replace(self._best, us=us)
        self._fastest.us = us

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        assert candidate.kernels is not None  # said by needs_kernels
        plan = candidate.spec.bound_plan(candidate.config, problem, self._device)
        if not plan.launches:
            return Outcome("rejected", reason="the output is empty: there is nothing to launch")
        self._since_retimed += 1
        if self._since_retimed > RETIME_EVERY:
            self._retime()
        executable = Executable(candidate.kernels, plan)
        tolerance = candidate.spec.tolerance(problem)
        answer = self._try(executable, tolerance)
        if not isinstance(answer, Tried):
            fault = blame(answer, candidate, problem, plan, self._quarantine)
            return Outcome(fault.kind, reason=fault.reason)
        outcome = _sound(answer.outcome)
        if not outcome.ok or outcome.measurement is None:
            return outcome
        us = outcome.median_us / self._drift
        if self._best is None or us < self._best.us:
            self._best = _Incumbent(executable, tolerance, us)
            self._since_retimed = 0
        self._fastest.us = min(us, self._fastest.us or us)
        measurement = outcome.measurement
        details = {**measurement.details, "drift": round(self._drift, 4), **self._gpu}
        return dataclasses.replace(
            outcome, measurement=dataclasses.replace(measurement, details=details)
        )

    def _try(
        self, executable: Executable, tolerance: float, budget_ms: float | None = None
    ) -> Tried | Failed | Lost:
        request = Try(executable, tolerance, self._policy, best_us=self.best_us)
        if budget_ms is not None:
            request = dataclasses.replace(request, best_us=None, budget_ms=budget_ms)
        restarting_s, started = self._station.restarting_seconds, time.perf_counter()
        answer = self._station.ask(request, try_seconds(self.best_us, self._expected_us))
        waited_s = time.perf_counter() - started
        match answer:
            case Tried():
                self._verifying += answer.verify_seconds
                self._timing += answer.timing_seconds
                return answer
            case Failed():
                return answer
            case Lost():
                self._lost += waited_s - (self._station.restarting_seconds - restarting_s)
                return answer
            case _:
                return Failed(f"the worker answered a {type(answer).__name__}", False, "device")

    def _retime(self) -> None:
        """Time the best candidate again. One that fails now is not timed a third time: the finals
        will tell what it is worth."""
        self._since_retimed = 0
        if self._best is None or self._best.executable is None:
            return
        answer = self._try(self._best.executable, self._best.tolerance, _RETIME_BUDGET_MS)
        if isinstance(answer, Tried) and (outcome := _sound(answer.outcome)).ok:
            self._drift = outcome.median_us / self._best.us
        else:
            self._best = dataclasses.replace(self._best, executable=None)


def _sound(outcome: Outcome) -> Outcome:
    """The outcome, unless it is a success with a time that no kernel can have."""
    if outcome.kind != "measured":
        return outcome
    us = outcome.median_us if outcome.measurement is not None else math.nan
    if math.isfinite(us) and us > 0:
        return outcome
    return Outcome("launch_failed", reason=f"it was timed at {us} us, which is no time")

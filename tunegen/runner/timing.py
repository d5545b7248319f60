# SPDX-License-Identifier: Apache-2.0
"""How long a call takes: what the policies mean, blocks of a contest, and the race of a trial."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tunegen.device import Gpu, Monitor
from tunegen.errors import DeviceError
from tunegen.model import Measurement
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import Policy, Timed
from tunegen.runner.rotation import Rotation, Run

# Events have a resolution of half a microsecond, and a gap of about one lies between two graphs:
# an interval that is timed lasts at least this long, in microseconds.
LEAST_INTERVAL_US = 200.0

# A single launch onto an idle device is seen this much longer than it is, at worst: what the host
# takes to launch it, and the other launches of its plan.
_HOST_US = 100.0

# Calls of at least this length are known well enough after a glance.
_LONG_US = 1000.0

# The part of a trial's timing after which a candidate must be close to the best to be timed on,
# and what is close: a quarter of what it takes to be dropped at once.
_FIRST_PART = 0.25
_LEAST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Regime:
    """What a policy means: how long an interval and an uninterrupted run last, whether the card
    rests as long as it has worked, and whether all calls use the same operands."""

    interval_us: float
    run_us: float
    rests: bool
    one_set: bool = False


REGIMES: Mapping[Policy, Regime] = {
    "burst": Regime(interval_us=500.0, run_us=10e3, rests=True),
    "warm": Regime(interval_us=500.0, run_us=10e3, rests=True, one_set=True),
    "sustained": Regime(interval_us=20e3, run_us=200e3, rests=False),
}


def regime_of(policy: Policy) -> Regime:
    """What a policy means; raises :class:`DeviceError` for one that does not exist."""
    if policy not in REGIMES:
        raise DeviceError(f"no policy {policy!r}: there are {', '.join(REGIMES)}")
    return REGIMES[policy]


@dataclass(frozen=True, slots=True)
class _Paced:
    """A rotation, and how long a call takes in it."""

    rotation: Rotation
    call_us: float

    @property
    def interval_us(self) -> float:
        return self.rotation.calls * self.call_us

    def runs(self, count: int, run_us: float) -> Iterator[int]:
        """``count`` intervals in runs of about ``run_us``."""
        longest = max(1, int(run_us / self.interval_us))
        for start in range(0, count, longest):
            yield min(longest, count - start)


class Stopwatch:
    """Times calls of ``launch``, which takes the number of a set and has been run before.

    ``direct`` launches every call anew; otherwise short ones are replayed from graphs.
    """

    def __init__(
        self,
        gpu: Gpu,
        operands: Operands,
        launch: Callable[[int], None],
        *,
        direct: bool = False,
    ) -> None:
        self._gpu = gpu
        self._operands = operands
        self._launch = launch
        self._direct = direct
        self._paced: dict[tuple[bool, float], _Paced] = {}

    def close(self) -> None:
        for paced in self._paced.values():
            paced.rotation.close()
        self._paced.clear()

    def block(self, policy: Policy, seconds: float, monitor: Monitor) -> Timed:
        """Times under a policy for about so many seconds of device time.

        Raises :class:`DeviceError` for a time of zero.
        """
        regime = regime_of(policy)
        paced = self._pace(min(regime.interval_us, seconds * 1e6 / 8), regime)
        count = max(_LEAST_SAMPLES, round(seconds * 1e6 / paced.interval_us))
        log = _Log()
        under_way: Run | None = None
        before = monitor.read()
        for size in paced.runs(count, regime.run_us):
            run = paced.rotation.enqueue(size, lead_in=regime.rests or under_way is None)
            if regime.rests:
                _rest(log.collect(run))
                continue
            # One run always waits behind the one that is collected: the card is never idle.
            if under_way is not None:
                log.collect(under_way)
            under_way = run
        after = monitor.read()  # of a sustained block before its end: an idle card clocks up
        if under_way is not None:
            log.collect(under_way)
        return Timed(
            samples_us=tuple(log.samples_us),
            calls=log.calls,
            seconds=log.us / 1e6,
            before=before,
            after=dataclasses.replace(after, energy_mj=monitor.energy_mj()),
        )

    def race(
        self, policy: Policy, *, best_us: float | None, drop: float, budget_ms: float
    ) -> Measurement:
        """A trial's time. A glance drops what is far behind, a quarter of the budget what is not
        close, and all of it goes to the rest.

        Raises :class:`DeviceError` for a time of zero.
        """
        regime = regime_of(policy)
        best = math.inf if best_us is None else best_us
        call_us = self._glance(1)
        if call_us - _HOST_US <= 4 * drop * best:
            call_us = min(call_us, self._glance(2))
        if call_us - _HOST_US > drop * best:
            return summary([call_us], policy, {"raced_out": True})
        paced = self._pace(min(regime.interval_us, budget_ms * 1e3 / 8), regime, call_us)
        details: dict[str, Any] = {
            "calls_per_interval": paced.rotation.calls,
            "interval_us": round(paced.interval_us, 3),
        }
        if paced.call_us > drop * best:
            return summary([paced.call_us], policy, {**details, "raced_out": True})
        log = _Log()
        count = max(_LEAST_SAMPLES, round(budget_ms * 1e3 / paced.interval_us))
        first = max(_LEAST_SAMPLES, math.ceil(count * _FIRST_PART))
        self._sample(paced, first, regime, log)
        if statistics.median(log.samples_us) > best * (1 + (drop - 1) * _FIRST_PART):
            return summary(log.samples_us, policy, {**details, "raced_out": True})
        self._sample(paced, count - first, regime, log)
        return summary(log.samples_us, policy, details)

    def _sample(self, paced: _Paced, count: int, regime: Regime, log: _Log) -> None:
        for size in paced.runs(count, regime.run_us):
            us = log.collect(paced.rotation.enqueue(size, lead_in=True))
            if regime.rests:
                _rest(us)

    def _glance(self, calls: int) -> float:
        """Microseconds of a single call, the least of some that are launched one by one."""
        with closing(
            Rotation(self._gpu, self._operands, self._launch, 1, direct=True)
        ) as rotation:
            return min(rotation.enqueue(calls, lead_in=True).collect()[0])

    def _pace(self, interval_us: float, regime: Regime, call_us: float | None = None) -> _Paced:
        """Calls in intervals of about that length, or as long as the sets allow; ``call_us`` is
        what a glance at one gave."""
        interval_us = max(interval_us, LEAST_INTERVAL_US)
        key = (regime.one_set, interval_us)
        if key not in self._paced:
            if call_us is None:
                call_us = self._glance(2)
            self._rotate(key, call_us)
            if call_us < _LONG_US:
                self._measure(key)
            # The host takes a short call for longer than it is, until the device is slower than
            # the host.
            while self._paced[key].interval_us < LEAST_INTERVAL_US:
                paced = self._paced[key]
                if not paced.rotation.can_grow:
                    break
                paced.rotation.close()
                self._rotate(key, paced.call_us)
                self._measure(key)
        return self._paced[key]

    def _rotate(self, key: tuple[bool, float], call_us: float) -> None:
        one_set, interval_us = key
        calls = math.ceil(interval_us / max(call_us, 0.1))
        rotation = Rotation(
            self._gpu, self._operands, self._launch, calls, one_set=one_set, direct=self._direct
        )
        self._paced[key] = _Paced(rotation, call_us)

    def _measure(self, key: tuple[bool, float]) -> None:
        """Take the time of a call from an interval."""
        (call_us,), _ = self._paced[key].rotation.enqueue(1, lead_in=True).collect()
        self._paced[key] = dataclasses.replace(self._paced[key], call_us=_positive(call_us))


def _positive(us: float) -> float:
    """Microseconds that something took; zero means that it did not run."""
    if us > 0:
        return us
    raise DeviceError("the kernels were timed at 0 us: they did not run")


def _rest(us: float) -> None:
    """Let the card rest as long as it has worked, so that it stays clear of its power limit."""
    time.sleep(us / 1e6)


class _Log:
    """Samples so far, with the calls made and the device time taken for them."""

    def __init__(self) -> None:
        self.samples_us: list[float] = []
        self.us = 0.0
        self.calls = 0

    def collect(self, run: Run) -> float:
        """Wait for a run and take its times; its device time in microseconds."""
        samples, us = run.collect()
        self.samples_us += samples
        self.us += us
        self.calls += run.calls
        return us


def summary(
    samples_us: Sequence[float], policy: Policy, details: Mapping[str, Any]
) -> Measurement:
    """The median with an interval that holds the true one with a probability of at least 95 %:
    between order statistics, as the binomial distribution of the number below it has it. Fewer
    than six samples give no such interval: then it is from the least to the greatest.

    Raises :class:`DeviceError` for a time of zero.
    """
    ordered = sorted(samples_us)
    _positive(ordered[0])
    count = len(ordered)
    rank = _rank(count)
    return Measurement(
        median_us=statistics.median(ordered),
        policy=policy,
        low_us=ordered[rank],
        high_us=ordered[count - 1 - rank],
        samples=count,
        details=details,
    )


def _rank(count: int) -> int:
    """The largest k with P(at most k of ``count`` samples below the median) <= 2.5 %, or 0."""
    below, ways, rank = 0, 1, 0  # out of 2^count, and that exactly k are below
    for k in range(count // 2):
        below += ways
        if below * 40 > 1 << count:
            break
        rank = k
        ways = ways * (count - k) // (k + 1)
    return rank

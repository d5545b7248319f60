# SPDX-License-Identifier: Apache-2.0
"""The finals: the best of a search, its default and the vendor's library against each other.

Times of a search are picked for being low, so some of them are lucky; none of them is recorded.
In the finals inputs are new, everybody's result is checked whole, and contenders take turns in
random order under the same clocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tunegen.model import Contest, DeviceClass, Operation, Problem
from tunegen.runner import ratios, rounds
from tunegen.runner.contenders import VENDOR, Contender, bar, judge
from tunegen.runner.errand import Errand
from tunegen.runner.neighbours import worst_cases
from tunegen.runner.process import Worker
from tunegen.runner.protocol import Enter, Entered, Open, Opened, Policy, Prepare
from tunegen.runner.qualify import Finalist, Qualifier, Setup
from tunegen.runner.quarantine import Fault, Quarantine, blame
from tunegen.runner.station import ENTER_SECONDS, OPEN_SECONDS, Station, prepare_seconds

# Contenders of the search besides the default, and how much slower than the best of them one may
# have been: searches err by less.
FINALISTS = 5
CLOSE = 1.10

# How often those who turn out wrong are replaced by the next ones.
_BATCHES = 4

# Calls longer than this are judged by what they do to the power limit of the card.
SUSTAINED_FROM_US = 100.0

# The part of the time left that goes to burst rounds where sustained blocks follow.
_BURST_SHARE = 0.35

# Contenders of the search in sustained blocks, which are long.
_SUSTAINED_BEST = 2

# The least time in which neighbouring sizes are prepared and timed.
_NEIGHBOUR_SECONDS = 3.0

# The vendor's library may have to be read from a cold disk, gigabytes of it.
_VENDOR_ENTER_SECONDS = 120.0

Deciding = Literal["auto", "burst", "sustained", "warm"]


@dataclass(slots=True, kw_only=True)
class Finals:
    """The finals of one search, in the worker of ``station``.

    ``policy`` decides who wins; "auto" is sustained for calls over 100 us and burst below.
    ``seconds`` is what everything may take together. ``vendor`` is a worker that may load the
    vendor's library, already started, or ``no_vendor`` the reason why there is none.
    ``deterministic`` bars those whose results differ from run to run.
    """

    station: Station
    setup: Setup
    problem: Problem
    operation: Operation
    device: DeviceClass
    seed: int
    sets: int
    policy: Deciding = "auto"
    seconds: float = 15.0
    vendor: Worker | None = None
    no_vendor: str = ""
    deterministic: bool = False
    quarantine: Quarantine | None = None

    def __call__(self, ranked: Iterable[Finalist]) -> Contest:
        """The contest among ``ranked``, best first, with the default before them.

        Raises :class:`tunegen.errors.DeviceError` where no worker can be had any more.
        """
        return _Run(self, iter(ranked)).contest()


class _Run:
    """One contest, from the first check to the choice of the winner."""

    def __init__(self, finals: Finals, ranked: Iterator[Finalist]) -> None:
        self._f = finals
        self._ranked = ranked
        self._waiting: Finalist | None = None
        self._started = time.monotonic()
        self._contenders: list[Contender] = []
        self._no_vendor = finals.no_vendor
        self._vendor_pids: set[int] = set()
        self._shared = False
        self._notes: list[str] = []
        self._times: dict[Policy, dict[str, list[float]]] = {}

    def contest(self) -> Contest:
        vendor = self._send_vendor()
        try:
            self._qualify(vendor)
            self._enter()
            if vendor is not None:
                self._receive_vendor(vendor)
            self._notes += bar(self._contenders, self._f.problem, self._f.deterministic)
            self._burst()
            self._sustained()
            return self._judge()
        finally:
            if self._f.vendor is not None:
                self._f.vendor.kill()  # nothing of it is wanted any more

    @property
    def _left_s(self) -> float:
        return self._f.seconds - (time.monotonic() - self._started)

    def _able(self) -> list[Contender]:
        """Those without a fault, the vendor's library included."""
        return [contender for contender in self._contenders if contender.fault is None]

    # --- who takes part --------------------------------------------------------------------------

    def _prepare(self) -> Prepare:
        f = self._f
        return f.setup(f.problem, inputs="normal", seed=f.seed, sets=f.sets)

    def _send_vendor(self) -> Errand | None:
        """Have the vendor's library loaded while finalists are checked."""
        f = self._f
        if f.vendor is None:
            return None
        enter = Enter.vendor(VENDOR, f.operation, f.problem)
        prepare_s = prepare_seconds(f.operation.flops(f.problem))
        errand = Errand(
            f.vendor,
            (
                (Open(0), OPEN_SECONDS),
                (self._prepare(), prepare_s),
                (enter, _VENDOR_ENTER_SECONDS),
            ),
        )
        errand.advance()
        return errand

    def _qualify(self, vendor: Errand | None) -> None:
        """Check the best finalists, and others in the place of those that are wrong."""
        f = self._f
        qualifier = Qualifier(
            station=f.station, setup=f.setup, problem=f.problem, operation=f.operation,
            device=f.device, seed=f.seed, sets=f.sets, quarantine=f.quarantine,
            wait=vendor.advance if vendor else lambda: None,
        )  # fmt: skip
        for _ in range(_BATCHES):
            right_us = [c.finalist.trial_us for c in self._able() if c.finalist and not c.default]
            batch = list(self._next(FINALISTS - len(right_us), right_us))
            if not batch:
                break
            for finalist, found in zip(batch, qualifier.run(batch), strict=True):
                self._contenders.append(
                    Contender(
                        name=finalist.name,
                        asked=f.station,
                        description=f"{finalist.candidate.spec.name}: {finalist.candidate.config}",
                        finalist=finalist,
                        relative_error=found.relative_error,
                        deterministic=found.deterministic,
                        fault=Fault(found.kind, found.reason, False) if found.reason else None,
                    )
                )

    def _next(self, places: int, right_us: Sequence[float]) -> Iterator[Finalist]:
        """The next finalists, as long as they are close to the best; the default takes up no
        place. The first one that is not close waits for the next time."""
        best_us = min(right_us, default=None)
        while places > 0 and (finalist := self._waiting or next(self._ranked, None)) is not None:
            self._waiting = None
            if not finalist.default:
                best_us = finalist.trial_us if best_us is None else best_us
                if finalist.trial_us > best_us * CLOSE:
                    self._waiting = finalist
                    return
                places -= 1
            yield finalist

    def _enter(self) -> None:
        f = self._f
        for contender in self._able():
            finalist = contender.finalist
            assert finalist is not None
            executable = finalist.executable(f.problem, f.problem, f.device)
            answer = f.station.enter(Enter(finalist.name, executable), ENTER_SECONDS)
            if not isinstance(answer, Entered):
                contender.fault = blame(
                    answer, finalist.candidate, f.problem, executable.plan, f.quarantine
                )

    def _receive_vendor(self, errand: Errand) -> None:
        errand.finish()
        for answer in errand.answers:
            if isinstance(answer, Opened):
                self._vendor_pids.update(answer.nvml_pids)
            if isinstance(answer, Entered):
                self._contenders.append(
                    Contender(
                        name=VENDOR,
                        asked=errand.worker,
                        description=answer.description,
                        relative_error=answer.relative_error,
                    )
                )
        self._no_vendor = errand.failure

    # --- timing ----------------------------------------------------------------------------------

    def _burst(self) -> None:
        able = self._able()
        if not any(contender.finalist for contender in able):
            return
        policy: Policy = "warm" if self._f.policy == "warm" else "burst"
        longest_us = max(c.finalist.trial_us for c in able if c.finalist)
        share = _BURST_SHARE if self._is_sustained(longest_us) else 1.0
        left_s = self._left_s * share
        count, block_s = rounds.burst_rounds(left_s, len(able), longest_us)
        orders = ratios.shuffled([c.name for c in able], count, self._f.seed)
        self._play(policy, able, orders, block_s, time.monotonic() + left_s)

    def _is_sustained(self, us: float) -> bool:
        """Whether sustained blocks decide, for calls of so many microseconds."""
        if self._f.policy == "auto":
            return us > SUSTAINED_FROM_US
        return self._f.policy == "sustained"

    def _sustained(self) -> None:
        """Sustained blocks of the few that matter, where these decide; else, for ties, to see what
        energy they take."""
        times = self._eligible(self._burst_policy)
        if not times:
            return
        ranked = sorted(times, key=lambda name: self._figure_us(name, self._burst_policy))
        if self._is_sustained(self._figure_us(ranked[0], self._burst_policy)):
            chosen = {*ranked[:_SUSTAINED_BEST], VENDOR}
            chosen |= {c.name for c in self._contenders if c.default}
        else:
            tied = ratios.ties(times, self._f.seed)
            if len(tied) == 1 or any(c.default for c in self._contenders if c.name in tied):
                return  # nothing depends on it
            chosen = set(tied)
        playing = [c for c in self._able() if c.name in chosen]
        block_s = rounds.sustained_block(self._left_s, len(playing))
        if block_s is None:
            self._notes.append("no time was left for sustained blocks: burst rounds decided")
            return
        order = ratios.there_and_back([c.name for c in playing])
        self._play("sustained", playing, [order], block_s)

    def _play(
        self,
        policy: Policy,
        contenders: Sequence[Contender],
        orders: Sequence[Sequence[str]],
        block_s: float,
        until: float = math.inf,
    ) -> None:
        f = self._f
        by_name = {contender.name: contender for contender in contenders}
        asked = {name: contender.asked for name, contender in by_name.items()}
        played = rounds.play(asked, policy, orders, block_s, f.station.forget, until)
        for name, fault in played.faults.items():
            by_name[name].fault = fault
            finalist = by_name[name].finalist
            if finalist is None:
                self._no_vendor = fault.reason
            elif fault.harmful and f.quarantine is not None:
                f.quarantine.put(finalist.candidate, f.problem, finalist.plan, fault)
        self._shared |= played.shared(self._vendor_pids | f.station.own_pids)
        sustained = policy == "sustained"
        times = rounds.sustained_times(played) if sustained else rounds.burst_times(played)
        self._times[policy] = times
        found = rounds.figures(played, times, energy=sustained, outside=(VENDOR,), seed=f.seed)
        for name, figures in found.items():
            by_name[name].figures[policy] = figures

    @property
    def _burst_policy(self) -> Policy:
        return "warm" if self._f.policy == "warm" else "burst"

    def _figure_us(self, name: str, policy: Policy) -> float:
        return next(c for c in self._contenders if c.name == name).figures[policy].median_us

    def _eligible(self, policy: Policy) -> dict[str, list[float]]:
        """Times under a policy of those that may win, in the order of their trials."""
        times = self._times.get(policy, {})
        return {c.name: times[c.name] for c in self._contenders if c.may_win and c.name in times}

    # --- the winner ------------------------------------------------------------------------------

    def _judge(self) -> Contest:
        sustained, burst = self._eligible("sustained"), self._eligible(self._burst_policy)
        policy: Policy = self._burst_policy
        other: Policy = "sustained"
        if sustained and self._is_sustained(
            min(self._figure_us(name, self._burst_policy) for name in sustained)
        ):
            policy, other = other, policy
        flip = _flip(burst, sustained)
        contest = self._contest(policy, flip)
        return replace(contest, other=self._contest(other, flip)) if flip else contest

    def _contest(self, policy: Policy, flip: str) -> Contest:
        """The contest as one policy sees it."""
        f = self._f
        times = self._eligible(policy)
        choice = self._choose(times) if times else None
        return judge(
            self._contenders,
            choice,
            times={name: dict(found) for name, found in self._times.items()},
            policy=policy,
            problem=f.problem,
            no_vendor=self._no_vendor,
            flip=flip,
            shared=self._shared,
            notes=self._notes,
            seconds=time.monotonic() - self._started,
            seed=f.seed,
        )

    def _choose(self, times: Mapping[str, Sequence[float]]) -> ratios.Choice:
        f = self._f
        default = next((c.name for c in self._contenders if c.default), None)
        energy = {
            c.name: c.figures["sustained"].energy_mj
            for c in self._contenders
            if "sustained" in c.figures
        }
        known = {name: spent for name, spent in energy.items() if spent is not None}
        choice = ratios.choose(times, default=default, energy=known, seed=f.seed)
        if choice.rule != ratios.BY_ORDER or self._left_s < _NEIGHBOUR_SECONDS:
            return choice
        finalists = [c.finalist for c in self._contenders if c.name in choice.tied and c.finalist]
        worst = worst_cases(
            finalists, station=f.station, setup=f.setup, problem=f.problem,
            operation=f.operation, device=f.device, seed=f.seed,
        )  # fmt: skip
        return ratios.choose(times, default=default, energy=known, worst=worst, seed=f.seed)


def _flip(burst: Mapping[str, Sequence[float]], sustained: Mapping[str, Sequence[float]]) -> str:
    """What two policies disagree about, or the empty string."""
    if not burst or not sustained or not ratios.flips(burst, sustained):
        return ""
    both = {name: burst[name] for name in burst if name in sustained}
    return f"{ratios.leader(both)} is faster in bursts, {ratios.leader(sustained)} sustained"

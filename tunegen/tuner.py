# SPDX-License-Identifier: Apache-2.0
"""The loop: ask, render, compile, evaluate, tell, until the budget is spent.

Rendering and compiling run in a pool of threads ahead of the evaluation. How far ahead is fixed,
and evaluation is in the order of asking, so the same seed gives the same trials however many cores
there are and however long anything takes.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from tunegen.codegen import render
from tunegen.errors import CompileError, PlanError, UsageError
from tunegen.model import (
    Candidate,
    CompiledKernel,
    Compiler,
    DeviceClass,
    Evaluator,
    LaunchPlan,
    Outcome,
    OutcomeKind,
    Problem,
    Trial,
)

if TYPE_CHECKING:  # at run time this would load Optuna
    from tunegen.search import Contender, Proposal, Search

DEFAULT_TRIALS = 100

# Proposals under way at once. More of them keep more cores compiling, but each is chosen without
# the outcomes of the others.
LOOK_AHEAD = 8

StopReason = Literal["budget", "time", "exhausted", "interrupted"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How many trials, and for how many seconds at most; the default is tried in any case.

    Raises :class:`UsageError` for anything but a positive whole number and positive seconds.
    """

    trials: int = DEFAULT_TRIALS
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trials, Integral) or self.trials < 1:
            raise UsageError(f"trials={self.trials} is no budget: it is a whole number from 1 on")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"seconds={self.seconds} is no budget: it is a number above 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """A run so far: ``trials`` of ``total`` done, of each kind of outcome how many, the best time
    in microseconds (None before the first success), and the seconds since the start."""

    trials: int
    total: int
    counts: Mapping[OutcomeKind, int]
    best_us: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TuneRun:
    """What a run did. ``best`` is None where every trial failed, ``default`` where it was
    interrupted before the operation's default had an outcome.

    ``compiled`` and ``cache_hits`` count kernels, ``repeats`` trials whose kernels and launches
    were those of an earlier one. ``compile_seconds`` adds up over threads; for ``wait_seconds``
    the evaluator had nothing to do because nothing was compiled yet.
    """

    trials: tuple[Trial, ...]
    best: Trial | None
    default: Trial | None
    counts: Mapping[OutcomeKind, int]
    stop_reason: StopReason
    seconds: float
    compiled: int
    cache_hits: int
    repeats: int
    compile_seconds: float
    wait_seconds: float


def tune(
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    evaluator: Evaluator,
    compiler: Compiler,
    device: DeviceClass,
    search: Search,
    budget: Budget,
    threads: int | None = None,
    on_event: Callable[[Trial, Progress], None] | None = None,
) -> TuneRun:
    """Try configurations of ``contenders`` for a problem on a device class, best first known.

    ``search`` chooses among them; ``contenders[0]`` has the operation's default. ``compiler`` is
    used where the evaluator needs kernels, in as many ``threads`` as this process has cores unless
    said otherwise. ``on_event`` is called after every trial.

    The winner is the fastest trial, the first of equals; beside the operation's default only one
    whose whole interval is below the default's, lest noise wins.

    What a configuration does wrong is in its trial. Whatever is wrong with a template, the
    compiler or the evaluator itself is raised. Ctrl-C ends the run and keeps its trials.
    """
    build = _Builder(problem, device, compiler if evaluator.needs_kernels else None)
    log = _Log(contenders, budget)
    judge = _Judge(evaluator, problem)
    pool = ThreadPoolExecutor(threads or _cores(), thread_name_prefix="tunegen-compile")
    under_way: deque[tuple[Proposal, Future[_Built]]] = deque()
    asked = 0
    stop_reason: StopReason = "budget"
    try:
        while True:
            while asked < budget.trials and len(under_way) < LOOK_AHEAD:
                proposal = search.ask()
                if proposal is None:
                    stop_reason = "exhausted"
                    break
                asked += 1
                under_way.append((proposal, pool.submit(build, proposal)))
            if not under_way:
                break
            proposal, future = under_way.popleft()
            built = log.wait_for(future)
            if built is None:
                stop_reason = "time"
                break
            trial = judge.try_out(proposal, built)
            search.tell(proposal, trial.outcome)
            log.add(trial, built)
            if on_event is not None:
                on_event(trial, log.progress())
    except KeyboardInterrupt:
        stop_reason = "interrupted"
    finally:
        # A compilation that has started cannot be stopped, but nobody waits for it here.
        pool.shutdown(wait=False, cancel_futures=True)
    return log.run(stop_reason, judge.repeats)


def _cores() -> int:
    """The cores this process may use, which a container or taskset may have cut down."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class _Built:
    """A configuration ready to be tried, or the outcome that it has come to already."""

    plan: LaunchPlan | None = None
    kernels: tuple[CompiledKernel, ...] | None = None
    failure: Outcome | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Builder:
    """Proposal in, launch plan and kernels out; without a compiler the plan alone."""

    problem: Problem
    device: DeviceClass
    compiler: Compiler | None

    def __call__(self, proposal: Proposal) -> _Built:
        started = time.perf_counter()
        spec, config = proposal.contender.spec, proposal.config
        try:
            plan = spec.bound_plan(config, self.problem, self.device)
        except PlanError as error:
            return _Built(failure=Outcome("rejected", reason=str(error)))
        if self.compiler is None:
            return _Built(plan)
        kernels: list[CompiledKernel] = []
        failure = None
        try:
            for source in render(spec, config, self.problem, self.device.arch):
                kernels.append(self.compiler.compile(source, spec.target(self.device.arch)))
        except CompileError as error:
            failure = Outcome("compile_failed", reason=str(error))
        for kernel in kernels:
            if kernel.rejection and failure is None:
                failure = Outcome("rejected", reason=f"{kernel.name} {kernel.rejection}")
        return _Built(plan, tuple(kernels), failure, time.perf_counter() - started)


@dataclass(slots=True)
class _Judge:
    """Tries out what was built, and the same kernels and launches only once."""

    evaluator: Evaluator
    problem: Problem
    repeats: int = 0
    _known: dict[object, Outcome] = field(default_factory=dict)

    def try_out(self, proposal: Proposal, built: _Built) -> Trial:
        started = time.perf_counter()
        outcome = built.failure or self._outcome(proposal, built)
        return Trial(
            number=proposal.number,
            spec=proposal.contender.spec.name,
            config=proposal.config,
            outcome=outcome,
            origin=proposal.origin,
            seconds=built.seconds + time.perf_counter() - started,
        )

    def _outcome(self, proposal: Proposal, built: _Built) -> Outcome:
        candidate = Candidate(proposal.contender.spec, proposal.config, built.kernels)
        if built.kernels is None:
            return self.evaluator.evaluate(candidate, self.problem)
        # Digests, since a thousand cubins are hundreds of megabytes.
        cubins = tuple(hashlib.sha256(kernel.cubin).digest() for kernel in built.kernels)
        key = (cubins, built.plan)
        if key in self._known:
            self.repeats += 1
        else:
            self._known[key] = self.evaluator.evaluate(candidate, self.problem)
        return self._known[key]


class _Log:
    """The trials of a run with what they cost."""

    def __init__(self, contenders: Sequence[Contender], budget: Budget) -> None:
        self._started = time.perf_counter()
        self._seconds = budget.seconds
        self._total = min(budget.trials, sum(len(contender.table) for contender in contenders))
        self._first = contenders[0]
        self._trials: list[Trial] = []
        self._counts: Counter[OutcomeKind] = Counter()
        self._default: Trial | None = None
        self._best: Trial | None = None
        self._compiled = self._cache_hits = 0
        self._compile_seconds = self._wait_seconds = 0.0

    def wait_for(self, future: Future[_Built]) -> _Built | None:
        """What was built, or None where time runs out before. The first trial has no limit: a run
        cut short still says what the default does."""
        started = time.perf_counter()
        left = None
        if self._seconds is not None and self._trials:
            left = self._started + self._seconds - started
            if left <= 0:
                return None
        try:
            return future.result(left)
        except TimeoutError:
            return None
        finally:
            self._wait_seconds += time.perf_counter() - started

    def add(self, trial: Trial, built: _Built) -> None:
        self._trials.append(trial)
        self._counts[trial.outcome.kind] += 1
        for kernel in built.kernels or ():
            if kernel.from_cache:
                self._cache_hits += 1
            else:
                self._compiled += 1
                self._compile_seconds += kernel.seconds
        if trial.spec == self._first.spec.name and trial.config == self._first.default:
            self._default = trial
        if trial.outcome.ok and self._wins(trial):
            self._best = trial

    def _wins(self, trial: Trial) -> bool:
        if self._best is None:
            return True
        if self._default is not None and self._default.outcome.ok:
            _, high_us = _interval(trial.outcome)
            default_low_us, _ = _interval(self._default.outcome)
            if high_us >= default_low_us:
                return False
        return trial.outcome.median_us < self._best.outcome.median_us

    def progress(self) -> Progress:
        return Progress(
            trials=len(self._trials),
            total=self._total,
            counts=dict(self._counts),
            best_us=self._best.outcome.median_us if self._best else None,
            seconds=time.perf_counter() - self._started,
        )

    def run(self, stop_reason: StopReason, repeats: int) -> TuneRun:
        return TuneRun(
            trials=tuple(self._trials),
            best=self._best,
            default=self._default,
            counts=dict(self._counts),
            stop_reason=stop_reason,
            seconds=time.perf_counter() - self._started,
            compiled=self._compiled,
            cache_hits=self._cache_hits,
            repeats=repeats,
            compile_seconds=self._compile_seconds,
            wait_seconds=self._wait_seconds,
        )


def _interval(outcome: Outcome) -> tuple[float, float]:
    """The lowest and highest time in microseconds that a success stands for; without an interval
    both are its median."""
    measurement = outcome.measurement
    assert measurement is not None
    low, high = measurement.low_us, measurement.high_us
    return low or measurement.median_us, high or measurement.median_us

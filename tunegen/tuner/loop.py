# SPDX-License-Identifier: Apache-2.0
"""The loop itself.

Rendering and compiling run in a pool of threads ahead of the evaluation. How far ahead is fixed,
and evaluation is in the order of asking, so the same seed gives the same trials however many cores
there are and however long anything takes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tunegen.model import (
    Candidate,
    CompiledKernel,
    Compiler,
    Contest,
    DeviceClass,
    Evaluator,
    Outcome,
    Problem,
    Trial,
)
from tunegen.runner.qualify import Finalist
from tunegen.tuner.budget import Budget
from tunegen.tuner.building import Builder, Built
from tunegen.tuner.log import Log, Progress, StopReason, TuneRun, steady_us

if TYPE_CHECKING:  # at run time this would load Optuna
    from tunegen.search import Contender, Proposal


class Chooser(Protocol):
    """Which configuration next: :class:`tunegen.search.Search`, or what stands before one."""

    def tell_past(self, trials: Sequence[Trial]) -> None: ...
    def expected_gain(self) -> float | None: ...
    def ask(self) -> Proposal | None: ...
    def tell(self, proposal: Proposal, outcome: Outcome) -> None: ...


# Proposals under way at once. More of them keep more cores compiling, but each is chosen without
# the outcomes of the others.
LOOK_AHEAD = 8


def tune(
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    evaluator: Evaluator,
    compiler: Compiler,
    device: DeviceClass,
    search: Chooser,
    budget: Budget,
    threads: int | None = None,
    look_ahead: int = LOOK_AHEAD,
    past: Sequence[Trial] = (),
    keep: Callable[[Trial, tuple[CompiledKernel, ...]], None] | None = None,
    finals: Callable[[Iterable[Finalist]], Contest] | None = None,
    on_event: Callable[[Trial, Progress], None] | None = None,
) -> TuneRun:
    """Try configurations of ``contenders`` for a problem on a device class, best first known.

    ``search`` chooses among them; ``contenders[0]`` has the operation's default. ``compiler`` is
    used where the evaluator needs kernels, in as many ``threads`` as this process has cores unless
    said otherwise. ``look_ahead`` proposals are under way at once. ``on_event`` is called after
    every trial, and ``keep`` before it.

    ``past`` are trials of earlier runs: they count, and are not made again.

    The winner is that of the ``finals``, which are given the successes as they are asked for:
    the operation's default, then the fastest first. Without them it is the fastest trial, the
    first of equals; beside the operation's default only one whose whole interval is below the
    default's, lest noise wins.

    What a configuration does wrong is in its trial. Whatever is wrong with a template, the
    compiler or the evaluator itself is raised. Ctrl-C ends the run and keeps its trials; during
    the finals it keeps the search's times.
    """
    build = Builder(problem, device, compiler if evaluator.needs_kernels else None)
    log = Log(contenders, budget, past)
    if past:
        search.tell_past(past)
    judge = _Judge(evaluator, problem)
    stop_reason: StopReason = "budget"
    contest: Contest | None = None
    try:
        stop_reason = _search(
            search, build, judge, log, budget, threads or cores(), look_ahead, keep, on_event
        )
        if finals is not None and log.progress().best_us is not None:
            contest = finals(_finalists(log, contenders, build))
    except KeyboardInterrupt:
        stop_reason = "interrupted"
    return log.run(stop_reason, judge.repeats, contest)


def cores() -> int:
    """The cores this process may use, which a container or taskset may have cut down."""
    return len(os.sched_getaffinity(0))


def _search(
    search: Chooser,
    build: Builder,
    judge: _Judge,
    log: Log,
    budget: Budget,
    threads: int,
    look_ahead: int,
    keep: Callable[[Trial, tuple[CompiledKernel, ...]], None] | None,
    on_event: Callable[[Trial, Progress], None] | None,
) -> StopReason:
    """Make trials until something runs out; which is returned."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tunegen-compile")
    under_way: deque[tuple[Proposal, Future[Built]]] = deque()
    asked = len(log)
    stop_reason: StopReason = "budget"
    try:
        while True:
            enough, gain = False, None
            while asked < budget.trials and len(under_way) < look_ahead:
                # Asked for only where it may end the search: it costs as much as a proposal.
                gain = None if budget.least_gain is None else search.expected_gain()
                if enough := budget.is_enough(gain):
                    break
                proposal = search.ask()
                if proposal is None:
                    stop_reason = "exhausted"
                    break
                asked += 1
                task = pool.submit(build, proposal.contender.spec, proposal.config)
                under_way.append((proposal, task))
            if not under_way:
                if not enough:
                    return stop_reason
                log.expected_gain = gain
                return "no progress expected"
            proposal, future = under_way.popleft()
            built = log.wait_for(future)
            if built is None:
                return "time"
            trial = judge.try_out(proposal, built)
            search.tell(proposal, trial.outcome)
            log.add(trial, built)
            if keep is not None:
                keep(trial, built.kernels or ())
            if on_event is not None:
                on_event(trial, log.progress())
    finally:
        # A compilation that has started cannot be stopped, but nobody waits for it here.
        pool.shutdown(wait=False, cancel_futures=True)


def _finalists(log: Log, contenders: Sequence[Contender], build: Builder) -> Iterator[Finalist]:
    """The successes of the search, built again from the cache, each code only once."""
    specs = {contender.spec.name: contender.spec for contender in contenders}
    known = set()
    for trial in log.ranked():
        spec = specs[trial.spec]
        built = build(spec, trial.config)
        if built.failure is not None or built.plan is None or built.identity in known:
            continue
        known.add(built.identity)
        default = log.is_default(trial.spec, trial.config)
        yield Finalist(
            name="default" if default else f"trial {trial.number}",
            trial=trial.number,
            candidate=Candidate(spec, trial.config, built.kernels),
            plan=built.plan,
            trial_us=steady_us(trial.outcome),
            default=default,
        )


@dataclass(slots=True)
class _Judge:
    """Tries out what was built, and the same kernels and launches only once."""

    evaluator: Evaluator
    problem: Problem
    repeats: int = 0
    _known: dict[object, Outcome] = field(default_factory=dict)

    def try_out(self, proposal: Proposal, built: Built) -> Trial:
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

    def _outcome(self, proposal: Proposal, built: Built) -> Outcome:
        candidate = Candidate(proposal.contender.spec, proposal.config, built.kernels)
        if built.kernels is None:
            return self.evaluator.evaluate(candidate, self.problem)
        if built.identity in self._known:
            self.repeats += 1
        else:
            self._known[built.identity] = self.evaluator.evaluate(candidate, self.problem)
        return self._known[built.identity]

# SPDX-License-Identifier: Apache-2.0
"""The loop itself.

Rendering and compiling run in a pool of threads ahead of the evaluation. How far ahead is fixed,
and one evaluator is asked in the order of asking for proposals, so the same seed gives the same
trials however many cores there are and however long anything takes, as long as no other host takes
part. Of several evaluators each is given what is built first.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunegen.model import (
    Candidate,
    Compiler,
    Config,
    Contest,
    DeviceClass,
    Evaluator,
    Problem,
    Trial,
)
from tunegen.runner.qualify import Finalist
from tunegen.tuner.budget import Budget
from tunegen.tuner.building import Builder, Built
from tunegen.tuner.log import Log, Progress, StopReason, TuneRun, steady_us
from tunegen.tuner.sharing import Alone, Chooser, Desk, Keep, Together
from tunegen.tuner.trying import Evaluators

if TYPE_CHECKING:  # at run time these would load Optuna
    from tunegen.search import Contender, Proposal, Search
    from tunegen.store import Study


# Proposals under way at once. More of them keep more cores compiling, but each is chosen without
# the outcomes of the others.
LOOK_AHEAD = 8

# How often a host that waits for others looks whether they have ended.
_WAIT_SECONDS = 0.25


def tune(
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    evaluator: Evaluator,
    beside: Sequence[Evaluator] = (),
    compiler: Compiler,
    device: DeviceClass,
    search: Chooser,
    budget: Budget,
    threads: int | None = None,
    look_ahead: int = LOOK_AHEAD,
    past: Sequence[Trial] = (),
    keep: Keep | None = None,
    study: Study | None = None,
    finals: Callable[[Iterable[Finalist]], Contest] | None = None,
    on_event: Callable[[Trial, Progress], None] | None = None,
) -> TuneRun:
    """Try configurations of ``contenders`` for a problem on a device class, best first known.

    ``search`` chooses among them; ``contenders[0]`` has the operation's default. ``compiler`` is
    used where the evaluator needs kernels, in as many ``threads`` as this process has cores unless
    said otherwise. ``look_ahead`` proposals are under way at once for each evaluator.
    ``on_event`` is called after every trial, and ``keep`` before it.

    The evaluators ``beside`` the first are of the same device class, and their times comparable.
    All work at the same time, each asked from a thread of its own. Where one of them raises
    :class:`DeviceError` the search goes on without it.

    ``past`` are trials of earlier runs: they count, and are not made again. With a ``study``,
    which ``keep`` adds to and whose trials are all past, the search is made together with every
    host that does the same at that time. The budget is that of all together, nothing is tried
    twice, and whoever ends last plays the finals; ``left_to`` of the result says where that is
    another one. ``search`` must be a :class:`tunegen.search.Search` then.

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
    evaluators = Evaluators((evaluator, *beside), problem)
    stop_reason: StopReason = "interrupted"
    contest: Contest | None = None
    left_to = ""
    with ExitStack() as stack:
        try:
            desk: Desk = Alone(search, keep)
            if study is not None:
                desk = _join(stack, search, keep, study)
            searching = _Searching(
                desk, search, build, evaluators, log, budget, threads or cores(), look_ahead,
                on_event,
            )  # fmt: skip
            reason, left_to = searching.run()
            log.searched()
            if finals is not None and not left_to and log.progress().best_us is not None:
                contest = finals(_finalists(log, contenders, build))
            stop_reason = reason
        except KeyboardInterrupt:
            pass
    return log.run(stop_reason, evaluators.repeats, contest, left_to, evaluators.lost)


def _join(stack: ExitStack, search: Chooser, keep: Keep | None, study: Study) -> Together:
    assert keep is not None
    told: Search = search  # type: ignore[assignment]
    return Together(told, keep, study, stack.enter_context(study.join()))


def cores() -> int:
    """The cores this process may use, which a container or taskset may have cut down."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True)
class _Searching:
    """Trials are made until something runs out, and those of others are heard of."""

    desk: Desk
    search: Chooser
    build: Builder
    evaluators: Evaluators
    log: Log
    budget: Budget
    threads: int
    look_ahead: int
    on_event: Callable[[Trial, Progress], None] | None
    # What was asked for and is being built, and what was tried, until it is heard of.
    _asked: deque[tuple[Proposal, Future[Built]]] = field(default_factory=deque)
    _tried: dict[tuple[str, Config], Built] = field(default_factory=dict)
    _reason: StopReason = "budget"

    def run(self) -> tuple[StopReason, str]:
        """What ran out, and who goes on where that is another host."""
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="tunegen-compile")
        heard_all = False
        try:
            while True:
                self._hear()
                if self._reason != "time":
                    self._fill(pool)
                if self._under_way:
                    self._go_on()
                    continue
                ending, name = self.desk.finish()
                if ending == "else" or (ending == "finals" and heard_all):
                    return self._reason, name
                # Others may have reported until they left, and left something undone.
                heard_all = ending == "finals"
                if ending == "wait":
                    time.sleep(_WAIT_SECONDS)
        finally:
            # A compilation that has started cannot be stopped, but nobody waits for it here.
            pool.shutdown(wait=False, cancel_futures=True)
            self.evaluators.close()

    @property
    def _under_way(self) -> int:
        return len(self._asked) + self.evaluators.under_way

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        """Ask until enough is under way, or say why not."""
        while self._under_way < self.look_ahead * self.evaluators.count:
            if len(self.log) + self._under_way >= self.budget.trials:
                self._reason = "budget"
                return
            # Asked for only where it may end the search: it costs as much as a proposal.
            gain = None if self.budget.least_gain is None else self.search.expected_gain()
            self.log.expected_gain = gain
            if self.budget.is_enough(gain):
                self._reason = "no progress expected"
                return
            proposal = self.desk.next(len(self.log), self._under_way, self.budget.trials)
            if proposal == "again":
                self._hear()
            elif proposal == "full" or proposal == "exhausted":
                self._reason = "budget" if proposal == "full" else "exhausted"
                return
            else:
                task = pool.submit(self.build, proposal.contender.spec, proposal.config)
                self._asked.append((proposal, task))

    def _go_on(self) -> None:
        """Have tried what is built, and report what was tried."""
        self._hand_out()
        self._wait(self.log.left_s or None)
        tried = self.evaluators.collect()
        for attempt in tried:
            if attempt.trial is None:
                again: Future[Built] = Future()
                again.set_result(attempt.built)
                self._asked.appendleft((attempt.proposal, again))
        if not self.evaluators.alone:
            self._hand_out()  # nobody waits for what is done here with the outcomes of others
        for attempt in tried:
            if (trial := attempt.trial) is not None:
                self._tried[trial.spec, trial.config] = attempt.built
                self.desk.report(attempt.proposal, trial, attempt.built.kernels or ())
        if self._reason == "time" and not self._under_way:
            self.desk.release()

    def _hand_out(self) -> None:
        """Start on what is built, as far as somebody is idle and there is time."""
        if self.log.left_s == 0:
            self._reason = "time"
            self._asked.clear()
        while self.evaluators.idle and (ready := self._next_built()) is not None:
            self.evaluators.start(*ready)
            if self.evaluators.alone:
                break  # its outcome is told before the next is asked for

    def _next_built(self) -> tuple[Proposal, Built] | None:
        """What is built and can be tried."""
        for asked in self._next:
            proposal, future = asked
            if future.done() and not self.evaluators.is_trying(future.result()):
                self._asked.remove(asked)
                return proposal, future.result()
        return None

    @property
    def _next(self) -> list[tuple[Proposal, Future[Built]]]:
        """What may be tried next: for one evaluator alone what was asked for first."""
        return list(self._asked)[: 1 if self.evaluators.alone else None]

    def _wait(self, seconds: float | None) -> None:
        """Until something was tried, or was built that somebody idle can try."""
        if self.evaluators.has_tried:
            return
        awaited: list[Future[Any]] = [*self.evaluators.futures]
        if idle := self.evaluators.idle:
            # What is built and yet not being tried waits for the same code to be.
            building = [future for _, future in self._next if not future.done()]
            awaited += building
        started = time.perf_counter()
        wait(awaited, seconds, FIRST_COMPLETED)
        if idle and building:
            share = idle / self.evaluators.count
            self.log.waited(share * (time.perf_counter() - started))

    def _hear(self) -> None:
        for trial in self.desk.hear():
            self.log.add(trial, self._tried.pop((trial.spec, trial.config), None))
            if self.on_event is not None:
                self.on_event(trial, self.log.progress())


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

# SPDX-License-Identifier: Apache-2.0
"""What was built, tried out: by one evaluator, or by several at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunegen.errors import DeviceError
from tunegen.model import Candidate, Evaluator, Outcome, Problem, Trial
from tunegen.tuner.building import Built

if TYPE_CHECKING:  # at run time this would load Optuna
    from tunegen.search import Proposal


@dataclass(slots=True, eq=False)
class Attempt:
    """A proposal on its way to a trial. ``place`` is the evaluator that has it: none where it has
    an outcome without one."""

    proposal: Proposal
    built: Built
    place: int | None = None
    future: Future[Outcome] = field(default_factory=Future)
    started: float = field(default_factory=time.perf_counter)
    trial: Trial | None = None  # None as well where its evaluator was lost

    def end(self, outcome: Outcome) -> None:
        """Note what came of it."""
        self.trial = Trial(
            number=self.proposal.number,
            spec=self.proposal.contender.spec.name,
            config=self.proposal.config,
            outcome=outcome,
            origin=self.proposal.origin,
            seconds=self.built.seconds + time.perf_counter() - self.started,
        )


class Evaluators:
    """Tries out what was built, and the same kernels and launches only once.

    One evaluator is asked in this thread, and is done when :meth:`start` returns. Several have a
    thread each. One of those that loses its device is ``lost``, with the reason, and what it had
    is tried by another; but if the first one is, that is raised, since it plays the finals.
    """

    def __init__(self, evaluators: Sequence[Evaluator], problem: Problem) -> None:
        self._evaluators = evaluators
        self._problem = problem
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"tunegen-evaluator-{place}")
            for place in range(len(evaluators))
            if len(evaluators) > 1
        ]
        self._idle = list(range(len(evaluators)))
        self._known: dict[object, Outcome] = {}
        self._attempts: list[Attempt] = []
        self.repeats = 0
        self.lost: dict[int, str] = {}

    @property
    def alone(self) -> bool:
        """Whether there never was but one."""
        return len(self._evaluators) == 1

    @property
    def count(self) -> int:
        """How many work."""
        return len(self._evaluators) - len(self.lost)

    @property
    def idle(self) -> int:
        """How many of them have nothing to do."""
        return len(self._idle)

    @property
    def under_way(self) -> int:
        """How many proposals are being tried, or were and are not collected."""
        return len(self._attempts)

    @property
    def futures(self) -> list[Future[Outcome]]:
        """Done as soon as there is something to collect."""
        return [attempt.future for attempt in self._attempts]

    @property
    def has_tried(self) -> bool:
        """Whether there is something to collect."""
        return any(attempt.future.done() for attempt in self._attempts)

    def is_trying(self, built: Built) -> bool:
        """Whether the same kernels and launches are being tried now."""
        return bool(built.kernels) and any(
            built.identity == attempt.built.identity for attempt in self._attempts
        )

    def start(self, proposal: Proposal, built: Built) -> None:
        """Try it out, on the one that has been idle for longest."""
        attempt = Attempt(proposal, built)
        known = built.failure
        if known is None and built.kernels is not None and built.identity in self._known:
            known = self._known[built.identity]
            self.repeats += 1
        if known is not None:
            attempt.future.set_result(known)
        else:
            attempt.place = self._idle.pop(0)
            self._send(attempt, attempt.place)
        self._attempts.append(attempt)

    def _send(self, attempt: Attempt, place: int) -> None:
        candidate = Candidate(
            attempt.proposal.contender.spec, attempt.proposal.config, attempt.built.kernels
        )
        evaluator = self._evaluators[place]
        if self.alone:
            attempt.future.set_result(evaluator.evaluate(candidate, self._problem))
        else:
            thread = self._threads[place]
            attempt.future = thread.submit(evaluator.evaluate, candidate, self._problem)

    def collect(self) -> list[Attempt]:
        """What was tried, or was not since its evaluator was lost."""
        done = [attempt for attempt in self._attempts if attempt.future.done()]
        self._attempts = [attempt for attempt in self._attempts if attempt not in done]
        for attempt in done:
            self._end(attempt)
        return done

    def _end(self, attempt: Attempt) -> None:
        try:
            outcome = attempt.future.result()
        except DeviceError as error:
            if not attempt.place:
                raise
            self.lost[attempt.place] = str(error)
            return
        if attempt.place is not None:
            self._idle.append(attempt.place)
            if attempt.built.kernels is not None:
                self._known[attempt.built.identity] = outcome
        attempt.end(outcome)

    def close(self) -> None:
        """Wait until nothing is tried any more."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

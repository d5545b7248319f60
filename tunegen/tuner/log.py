# SPDX-License-Identifier: Apache-2.0
"""What a run has done: its trials, the best of them, and what they cost."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tunegen.model import Config, Contest, Outcome, OutcomeKind, Standing, Trial
from tunegen.tuner.budget import Budget
from tunegen.tuner.building import Built

if TYPE_CHECKING:  # at run time this would load Optuna
    from tunegen.search import Contender

StopReason = Literal["budget", "time", "exhausted", "no progress expected", "interrupted"]

# "Within 2 % of the winner" is where a search could have stopped.
_NEAR = 1.02


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

    With a ``contest``, ``best`` is its winner and the times of ``best`` and ``default`` are those
    of the contest; without, they are the search's. ``past`` of the trials are of earlier runs.

    ``compiled`` and ``cache_hits`` count kernels, ``repeats`` trials whose kernels and launches
    were those of an earlier one. ``compile_seconds`` adds up over threads; for ``wait_seconds``
    the evaluator had nothing to do because nothing was compiled yet. After ``near_best_seconds``
    the search had a configuration within 2 % of the winner, by the search's times.
    Of the ``seconds``, ``search_seconds`` went into the search. ``expected_gain`` is the share of
    the best time that all configurations left together were expected to save, where that ended
    the search; ``left_gain`` is the last such estimate where time ended it, None where there is
    none. ``elsewhere`` of the trials were made by other hosts meanwhile; ``left_to`` names the one
    that was left to play the finals. ``lost`` are the evaluators, counted from 0, without which
    the search went on, each with the reason.
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
    past: int = 0
    near_best_seconds: float | None = None
    contest: Contest | None = None
    expected_gain: float | None = None
    elsewhere: int = 0
    left_to: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)
    search_seconds: float = 0.0
    left_gain: float | None = None


class Log:
    """The trials of a run with what they cost. Those of the past cost nothing."""

    def __init__(
        self, contenders: Sequence[Contender], budget: Budget, past: Sequence[Trial]
    ) -> None:
        self._started = time.perf_counter()
        self._seconds = budget.seconds
        self._total = min(budget.trials, sum(len(contender.table) for contender in contenders))
        self._first = contenders[0]
        self._trials: list[Trial] = []
        self._reached: list[float] = []  # seconds after which each trial was known
        self._counts: Counter[OutcomeKind] = Counter()
        self._default: Trial | None = None
        self._best: Trial | None = None
        self._compiled = self._cache_hits = 0
        self._compile_seconds = self._wait_seconds = 0.0
        self._elsewhere = 0
        for trial in past:
            self._add(trial, 0.0)
        self._past = len(past)
        self.expected_gain: float | None = None  # as last estimated
        self._search_seconds: float | None = None

    def __len__(self) -> int:
        return len(self._trials)

    @property
    def total(self) -> int:
        """How many trials there will be at most."""
        return self._total

    def is_default(self, spec: str, config: Config) -> bool:
        """Whether it is the operation's default configuration."""
        return spec == self._first.spec.name and config == self._first.default

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, None for no limit. The first trial has none: a run cut short
        still says what the default does."""
        if self._seconds is None or not self._trials:
            return None
        return max(0.0, self._started + self._seconds - time.perf_counter())

    def waited(self, seconds: float) -> None:
        """So long an evaluator had nothing to do because nothing was compiled yet."""
        self._wait_seconds += seconds

    def searched(self) -> None:
        """The search has ended, and the finals begin."""
        self._search_seconds = time.perf_counter() - self._started

    def add(self, trial: Trial, built: Built | None) -> None:
        """A trial and what was built for it: None where that was another host's."""
        self._elsewhere += built is None
        for kernel in (built.kernels if built is not None else None) or ():
            if kernel.from_cache:
                self._cache_hits += 1
            else:
                self._compiled += 1
                self._compile_seconds += kernel.seconds
        self._add(trial, time.perf_counter() - self._started)

    def _add(self, trial: Trial, reached_s: float) -> None:
        self._trials.append(trial)
        self._reached.append(reached_s)
        self._counts[trial.outcome.kind] += 1
        if self.is_default(trial.spec, trial.config):
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
        return steady_us(trial.outcome) < steady_us(self._best.outcome)

    def progress(self) -> Progress:
        return Progress(
            trials=len(self._trials),
            total=self._total,
            counts=dict(self._counts),
            best_us=self._best.outcome.median_us if self._best else None,
            seconds=time.perf_counter() - self._started,
        )

    def ranked(self) -> Iterator[Trial]:
        """The successes: the operation's default, then the fastest first."""
        ok = [trial for trial in self._trials if trial.outcome.ok]
        default = [trial for trial in ok if self.is_default(trial.spec, trial.config)]
        rest = [trial for trial in ok if not self.is_default(trial.spec, trial.config)]
        yield from default[-1:]
        yield from sorted(rest, key=lambda trial: (steady_us(trial.outcome), trial.number))

    def run(
        self,
        stop_reason: StopReason,
        repeats: int,
        contest: Contest | None,
        left_to: str = "",
        lost: Mapping[int, str] | None = None,
    ) -> TuneRun:
        trials, best, default = tuple(self._trials), self._best, self._default
        if contest is not None:
            trials = tuple(_judged(trial, contest) for trial in trials)
            best = _timed(contest, contest.winner, trials)
            default = next((t for t in trials if default and t.number == default.number), None)
            if default is not None and default.outcome.ok:
                standing = contest.of_trial(default.number)
                default = _timed(contest, standing, trials) or default
        seconds = time.perf_counter() - self._started
        searched = self._search_seconds
        return TuneRun(
            trials=trials,
            best=best,
            default=default,
            counts=dict(Counter(trial.outcome.kind for trial in trials)),
            stop_reason=stop_reason,
            seconds=seconds,
            compiled=self._compiled,
            cache_hits=self._cache_hits,
            repeats=repeats,
            compile_seconds=self._compile_seconds,
            wait_seconds=self._wait_seconds,
            past=self._past,
            near_best_seconds=self._near_best(best),
            contest=contest,
            expected_gain=self.expected_gain if stop_reason == "no progress expected" else None,
            elsewhere=self._elsewhere,
            left_to=left_to,
            lost=lost or {},
            search_seconds=seconds if searched is None else searched,
            left_gain=self.expected_gain if stop_reason == "time" else None,
        )

    def _near_best(self, best: Trial | None) -> float | None:
        if best is None:
            return None
        found = next(trial for trial in self._trials if trial.number == best.number)
        limit_us = _NEAR * steady_us(found.outcome)
        return next(
            reached
            for trial, reached in zip(self._trials, self._reached, strict=True)
            if trial.outcome.ok and steady_us(trial.outcome) <= limit_us
        )


def seen_by(run: TuneRun, contest: Contest) -> TuneRun:
    """The run with the finals as another policy sees them, its winner and its times."""
    standing = contest.of_trial(run.default.number) if run.default else None
    default = _timed(contest, standing, run.trials)
    best = _timed(contest, contest.winner, run.trials)
    return dataclasses.replace(run, contest=contest, best=best, default=default)


def steady_us(outcome: Outcome) -> float:
    """The time of a success, freed of the drift that its evaluator saw."""
    assert outcome.measurement is not None
    return outcome.measurement.steady_us


def _interval(outcome: Outcome) -> tuple[float, float]:
    """The lowest and highest time in microseconds that a success stands for, freed of drift;
    without an interval both are its median."""
    measurement = outcome.measurement
    assert measurement is not None
    median_us = measurement.steady_us
    drift = measurement.median_us / median_us if median_us else 1.0
    return (measurement.low_us / drift or median_us, measurement.high_us / drift or median_us)


def _judged(trial: Trial, contest: Contest) -> Trial:
    """The trial, as a failure where the contest found it to be one."""
    standing = contest.of_trial(trial.number)
    if standing is None or not standing.failure:
        return trial
    outcome = Outcome(standing.failed_as, reason=standing.failure)
    return dataclasses.replace(trial, outcome=outcome)


def _timed(contest: Contest, standing: Standing | None, trials: Sequence[Trial]) -> Trial | None:
    """The trial behind a standing, with the contest's time; None where it has none."""
    measurement = contest.measurement(standing) if standing is not None else None
    if standing is None or measurement is None:
        return None
    trial = next(trial for trial in trials if trial.number == standing.trial)
    return dataclasses.replace(trial, outcome=Outcome("measured", measurement))

# SPDX-License-Identifier: Apache-2.0
"""How well searches search: the tuner on recorded spaces, over many seeds."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tunegen import perfmodel, replay, rival, search, tuner
from tunegen.errors import ToolkitError, UsageError, unknown
from tunegen.model import (
    Candidate,
    CompiledKernel,
    Config,
    Evidence,
    Measurement,
    Outcome,
    Problem,
    Trial,
)
from tunegen.replay import RecordedSpace

DEFAULT_SEEDS = 30
DEFAULT_EVALUATIONS = (25, 50, 100, 200)
_USUAL_SAMPLERS = ("portfolio", "tpe", "random")

# A run that has come this close to the optimum has arrived.
ARRIVED = 0.99


@dataclass(frozen=True, slots=True)
class SearchRun:
    """One search: after each number of evaluations the fraction of the optimum, that is the least
    recorded time over that of the configuration that the search took to be best; the mean
    milliseconds on a processor to choose a configuration and learn from its time; and how many
    evaluations it made."""

    fractions: tuple[float, ...]
    ms: float
    made: int


@dataclass(frozen=True, slots=True)
class SearchScore:
    """What a sampler reaches on a space, over all seeds: for each number of evaluations the mean
    fraction of the optimum and the standard error of that mean; the share of runs that came within
    1 % of the optimum by the last; the mean milliseconds on a processor of asking and telling; the
    mean number of evaluations made.

    ``space`` is empty for the mean over all spaces.
    """

    sampler: str
    space: str
    fractions: tuple[float, ...]
    errors: tuple[float, ...]
    arrived: float
    ms: float
    made: float


@dataclass(frozen=True, slots=True)
class SearchBench:
    """All scores, sampler by sampler, and under which conditions they were made."""

    scores: tuple[SearchScore, ...]
    means: tuple[SearchScore, ...]
    evaluations: tuple[int, ...]
    seeds: int
    noise: float
    look_ahead: int
    least_gain: float | None
    kernel_tuner: str | None


def bench_search(
    files: Sequence[Path | str],
    *,
    samplers: Sequence[str] | None = None,
    seeds: int = DEFAULT_SEEDS,
    evaluations: Sequence[int] = DEFAULT_EVALUATIONS,
    noise: float = 0.0,
    look_ahead: int = 1,
    least_gain: float | None = None,
    processes: int | None = None,
    on_event: Callable[[int, int], None] | None = None,
) -> SearchBench:
    """Replay recorded spaces through the tuner, with the seeds 0, 1 ... for every sampler.

    ``samplers`` are names of :data:`tunegen.search.SAMPLERS`, or ``kt:`` and the name of one of
    Kernel Tuner's strategies; by default the usual ones of both, as far as they are installed.
    With ``noise`` a search sees each time multiplied by a random factor, whose logarithm has that
    standard deviation; every seed has its own factors, the same for all samplers. ``on_event`` is
    called with the number of runs that are done and that of all. ``least_gain`` ends a search
    early, see :class:`tunegen.tuner.Budget`; Kernel Tuner has nothing like it.

    An evaluation is a configuration that was tried, whether it ran or failed.

    Raises :class:`UsageError` for names, files and numbers that are none, and
    :class:`ToolkitError` where a named sampler needs what is not installed.
    """
    names = _usual_samplers() if samplers is None else tuple(dict.fromkeys(samplers))
    at = tuple(evaluations)
    _check(files, names, seeds, at, noise, look_ahead)
    budget = tuner.Budget(at[-1], least_gain=least_gain)
    spaces = _labels(files)
    for path in spaces.values():
        _load(path)  # what is wrong with a file is said before anything is begun
    jobs = [
        _Job(name, space, path, seed, budget, at, noise, look_ahead)
        for name in names
        for space, path in spaces.items()
        for seed in range(seeds)
    ]
    done: dict[_Job, SearchRun] = {}
    for job, run in _run_all(jobs, min(processes or tuner.cores(), len(jobs))):
        done[job] = run
        if on_event is not None:
            on_event(len(done), len(jobs))
    runs: dict[tuple[str, str], list[SearchRun]] = {}
    for job in jobs:
        runs.setdefault((job.sampler, job.space), []).append(done[job])
    scores = [_score(*which, found) for which, found in runs.items()]
    return SearchBench(
        scores=tuple(scores),
        means=tuple(_mean([s for s in scores if s.sampler == name]) for name in names),
        evaluations=at,
        seeds=seeds,
        noise=noise,
        look_ahead=look_ahead,
        least_gain=least_gain,
        kernel_tuner=rival.installed_version(),
    )


def _usual_samplers() -> tuple[str, ...]:
    theirs = rival.USUAL if rival.installed_version() else ()
    return (*_USUAL_SAMPLERS, *(rival.PREFIX + name for name in theirs))


def _check(
    files: Sequence[Path | str],
    names: Sequence[str],
    seeds: int,
    evaluations: Sequence[int],
    noise: float,
    look_ahead: int,
) -> None:
    theirs = [rival.PREFIX + name for name in rival.STRATEGIES]
    for name in names:
        if name in theirs:
            if rival.installed_version() is None:
                raise ToolkitError(
                    f"{name} needs Kernel Tuner, not installed here",
                    hint="pip install kernel_tuner",
                )
        elif name in search.SAMPLERS:
            search.check_choice(name, 0)
        else:
            raise unknown("sampler", name, [*search.SAMPLERS, *theirs])
    if not files or not names:
        raise UsageError("there is nothing to compare: name a file and a sampler")
    if seeds < 1:
        raise UsageError(f"seeds={seeds}: it is a whole number from 1 on")
    if look_ahead < 1:
        raise UsageError(f"look_ahead={look_ahead}: it is a whole number from 1 on")
    if not evaluations or evaluations[0] < 1 or list(evaluations) != sorted(set(evaluations)):
        raise UsageError(
            f"evaluations={','.join(map(str, evaluations))}: they are whole numbers from 1 on, "
            "each larger than the one before"
        )
    if not (math.isfinite(noise) and noise >= 0):
        raise UsageError(f"noise={noise}: it is a number from 0 on")


def _labels(files: Sequence[Path | str]) -> dict[str, Path]:
    """Files by their names without endings; the whole path where two have the same."""
    paths = list(dict.fromkeys(Path(file) for file in files))
    short = [path.name.removesuffix(".gz").removesuffix(".json") for path in paths]
    return {
        name if short.count(name) == 1 else str(path): path
        for name, path in zip(short, paths, strict=True)
    }


# --- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    sampler: str
    space: str
    path: Path
    seed: int
    budget: tuner.Budget
    evaluations: tuple[int, ...]
    noise: float
    look_ahead: int


def _run_all(jobs: Sequence[_Job], processes: int) -> Iterator[tuple[_Job, SearchRun]]:
    """All of them in any order, in so many processes where that is more than one."""
    if processes == 1:
        yield from ((job, _run(job)) for job in jobs)
        return
    # Processes of their own, not forks: threads of the numerical libraries do not survive those.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _leave_interrupts_to_the_parent)
    try:
        futures = {pool.submit(_run, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.lru_cache(maxsize=16)
def _load(path: Path) -> tuple[RecordedSpace, search.Contender]:
    recorded = replay.load_space(path)
    return recorded, search.Contender(recorded.spec, recorded.space.enumerate(), recorded.default)


def _rival_space(path: Path) -> rival.RivalSpace:
    recorded, contender = _load(path)
    values = [parameter.values for parameter in recorded.space.parameters]
    rows = [tuple(config.values()) for config in contender.table]
    return rival.rival_space(recorded.space.names, values, rows)


def _run(job: _Job) -> SearchRun:
    recorded, contender = _load(job.path)
    seen = _Noisy(recorded, job.noise, job.seed)
    if job.sampler.startswith(rival.PREFIX):
        names = recorded.space.names
        rows, seconds = rival.explore(
            job.sampler.removeprefix(rival.PREFIX),
            _rival_space(job.path),
            lambda row: seen.time(Config(dict(zip(names, row, strict=True)))),
            seed=job.seed,
            evaluations=job.budget.trials,
        )
        configs = [Config(dict(zip(names, row, strict=True))) for row in rows]
    else:
        asking = _Timed(search.make_search(job.sampler, [contender], job.seed))
        run = tuner.tune(
            recorded.problem,
            [contender],
            evaluator=seen,
            compiler=_NoCompiler(),
            device=perfmodel.default_chip("sm_90"),  # a recording is of its own device
            search=asking,
            budget=job.budget,
            threads=1,
            look_ahead=job.look_ahead,
        )
        configs, seconds = [trial.config for trial in run.trials], asking.seconds
    ms = 1e3 * seconds / max(len(configs), 1)
    return SearchRun(_fractions(recorded, seen, configs, job.evaluations), ms, len(configs))


def _fractions(
    recorded: RecordedSpace, seen: _Noisy, configs: Sequence[Config], at: Sequence[int]
) -> tuple[float, ...]:
    """The optimum over what was taken to be best, after each number of evaluations."""
    best, chosen = math.inf, 0.0
    after = []
    for config in configs:
        took = seen.time(config)
        if took is not None and took < best:
            best = took
            true_us = recorded.outcomes[recorded.spec.name, config].median_us
            chosen = recorded.best_us / true_us
        after.append(chosen)
    return tuple(after[min(count, len(after)) - 1] if after else 0.0 for count in at)


class _Noisy:
    """Evaluator of a recorded space, whose times a search sees with noise."""

    needs_kernels = False
    evidence: Evidence = "measured"

    def __init__(self, recorded: RecordedSpace, noise: float, seed: int) -> None:
        self._replay = replay.ReplayEvaluator(recorded.outcomes)
        self._recorded, self._noise, self._seed = recorded, noise, seed

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        outcome = self._replay.evaluate(candidate, problem)
        if not outcome.ok or not self._noise:
            return outcome
        noisy_us = outcome.median_us * self._factor(candidate.config)
        return Outcome("measured", Measurement(noisy_us, replay.POLICY))

    def time(self, config: Config) -> float | None:
        """What a search sees of ``config``; None if it fails."""
        outcome = self.evaluate(Candidate(self._recorded.spec, config), self._recorded.problem)
        return outcome.median_us if outcome.ok else None

    def _factor(self, config: Config) -> float:
        rng = np.random.default_rng((self._seed, zlib.crc32(str(config).encode())))
        return math.exp(self._noise * rng.standard_normal())


class _NoCompiler:
    def compile(self, source: Any, target: str) -> CompiledKernel:
        raise TypeError("a recording is not compiled")


class _Timed:
    """A search that knows how long it has taken."""

    def __init__(self, asked: search.Search) -> None:
        self._search = asked
        self.seconds = 0.0

    def tell_past(self, trials: Sequence[Trial]) -> None:
        self._search.tell_past(trials)

    def expected_gain(self) -> float | None:
        with self._counted():
            return self._search.expected_gain()

    def ask(self) -> search.Proposal | None:
        with self._counted():
            return self._search.ask()

    def tell(self, proposal: search.Proposal, outcome: Outcome) -> None:
        with self._counted():
            self._search.tell(proposal, outcome)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds += time.process_time() - started


# --- scores --------------------------------------------------------------------------------------


def _score(sampler: str, space: str, runs: Sequence[SearchRun]) -> SearchScore:
    columns = list(zip(*(run.fractions for run in runs), strict=True))
    many = len(runs) > 1
    return SearchScore(
        sampler=sampler,
        space=space,
        fractions=tuple(map(statistics.fmean, columns)),
        errors=tuple(statistics.stdev(c) / math.sqrt(len(c)) if many else 0.0 for c in columns),
        arrived=statistics.fmean(run.fractions[-1] >= ARRIVED for run in runs),
        ms=statistics.fmean(run.ms for run in runs),
        made=statistics.fmean(run.made for run in runs),
    )


def _mean(scores: Sequence[SearchScore]) -> SearchScore:
    """Of one sampler over all spaces; its errors are those of independent means."""
    count = len(scores)
    errors = zip(*(score.errors for score in scores), strict=True)
    return SearchScore(
        sampler=scores[0].sampler,
        space="",
        fractions=tuple(map(statistics.fmean, zip(*(s.fractions for s in scores), strict=True))),
        errors=tuple(math.sqrt(sum(error**2 for error in column)) / count for column in errors),
        arrived=statistics.fmean(score.arrived for score in scores),
        ms=statistics.fmean(score.ms for score in scores),
        made=statistics.fmean(score.made for score in scores),
    )

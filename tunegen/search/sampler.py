# SPDX-License-Identifier: Apache-2.0
"""The search as a sampler of Optuna's, for studies of one's own."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from tunegen.errors import UsageError
from tunegen.model import Config
from tunegen.search.course import Course
from tunegen.search.opening import FirstPoint, Origin, opening
from tunegen.search.shadow import SPEC, key
from tunegen.search.strategies import Strategy
from tunegen.search.unseen import Choices, Place

# Where a trial says what it is going to be, before its parameters are suggested one by one.
_CLAIM = "tunegen:config"

# A trial that was pruned after it had reported something runs, but is slow.
_SLOW = 1e300


class Suggestion(NamedTuple):
    """A configuration to try, of the spec ``name``, and what it comes from."""

    name: str
    config: Config
    origin: Origin


@dataclass(slots=True)
class _Reading:
    """How far the trials of one study have been read into a course."""

    study: Study
    course: Course
    # Trials before this position are all finished and known.
    settled: int = 0
    # The highest number of a trial.
    last: int = -1
    # Those after it that are finished and known, by number.
    finished: set[int] = field(default_factory=set)
    claims: dict[int, tuple[Place, Origin]] = field(default_factory=dict)

    def reads(self, study: Study) -> bool:
        # A pruner may have wrapped the study, so its identity is that of its storage.
        mine = self.study
        return mine._storage is study._storage and mine._study_id == study._study_id


class ConfigSampler(BaseSampler):
    """Proposes valid configurations only, none of them twice in a study.

    With one spec the parameters of a study are those of its space, by name; with several they are
    "spec" and ``<spec>.<PARAMETER>``. All are categorical: :meth:`suggest` suggests them to a
    trial, or they are suggested one by one with the choices of :attr:`distributions`.

    Values are positive, times to be minimised or rates to be maximised. A trial that failed, was
    pruned before it reported anything, or has a value that is not a positive number, is a
    configuration that does not run. One that was pruned later is slow. Trials may be added to the
    study, enqueued, with all parameters or some, run at once in threads, and by processes that
    share the storage: what each is going to be stands in its system attributes, and is taken to be
    as fast as expected until its value is known. Once every configuration has been proposed, the
    study is stopped, and a further trial is pruned.

    What is proposed depends on the seed, the number of the trial, what is to be tried ``first``
    after the defaults, and the trials before it in the order in which they finished; never on
    time.
    """

    def __init__(
        self,
        contenders: Sequence[Choices],
        strategy: type[Strategy],
        seed: int | None,
        first: Sequence[FirstPoint] = (),
    ) -> None:
        self._contenders = tuple(contenders)
        self._strategy = strategy
        self._first = tuple(first)
        self._seed = _any_seed() if seed is None else seed
        self._positions = {c.name: position for position, c in enumerate(self._contenders)}
        self._distributions = self._all_distributions()
        self._relative = {n: d for n, d in self._distributions.items() if not d.single()}
        self._past: list[tuple[Place, float | None]] = []
        self._lock = threading.Lock()
        self._reading: _Reading | None = None
        self.first_number = 0  # what the first trial of a study counts as
        opening(self._contenders, 0, 0)  # says what is wrong with a default

    @property
    def distributions(self) -> Mapping[str, CategoricalDistribution]:
        """Of all parameters of a study; where there are several specs, a trial has one's only."""
        return self._distributions

    def remember(self, name: str, config: Mapping[str, int], time: float | None) -> bool:
        """What is known from elsewhere of a configuration of the spec ``name``: studies learn from
        its time, None for a failure, and do not propose it. False where it is not valid here.

        Raises ``ValueError`` once a study is under way.
        """
        if self._reading is not None:
            raise ValueError("what is known is told before the first proposal")
        position = self._positions.get(name)
        row = None if position is None else self._contenders[position].table.row(config)
        if position is None or row is None:
            return False
        self._past.append((Place(position, row), time))
        return True

    def suggest(self, trial: Trial) -> Suggestion:
        """Suggest all parameters to ``trial``.

        Raises :class:`optuna.TrialPruned` where every configuration has been proposed, and
        :class:`UsageError` where what the trial was enqueued with is none.
        """
        if not self._relative:  # Optuna asks for no parameter of one value
            self._claim(trial.study, trial.number, trial._trial_id, None)
        values: dict[str, Any] = {}

        def ask(name: str) -> Any:
            choices = self._distributions[name].choices
            values[name] = trial.suggest_categorical(name, choices)
            return values[name]

        several = len(self._contenders) > 1
        contender = self._contenders[self._positions[ask(SPEC)] if several else 0]
        for parameter in contender.table.space.parameters:
            ask(self._name(contender, parameter.name))
        place = self._place(values)
        if place is None:
            raise UsageError(f"trial {trial.number} is no valid configuration: {values}")
        claims = self._reading.claims if self._reading is not None else {}
        _, origin = claims.get(trial.number, (place, "sampler"))
        return Suggestion(contender.name, contender.table.config(place.row), origin)

    def parameters(self, name: str, config: Mapping[str, int]) -> dict[str, int | str] | None:
        """Those of a trial that is ``config`` of the spec ``name``; None where that is not valid
        here."""
        position = self._positions.get(name)
        row = None if position is None else self._contenders[position].table.row(config)
        if position is None or row is None:
            return None
        return self._values(Place(position, row))

    def left(self, study: Study) -> int:
        """How many configurations have not been proposed in ``study``."""
        with self._lock:
            return len(self._read(study, None).course.unseen)

    def expected_gain(self, study: Study) -> float | None:
        """The share of the best time that all configurations left in ``study`` together can be
        expected to save at most: the sum over all of what each one saves on average, counting 0
        where it is slower. None before there is a first guess, and of samplers without one."""
        with self._lock:
            reading = self._read(study, None)
            return reading.course.expected_gain(self.first_number + reading.last + 1)

    # --- as Optuna calls it ----------------------------------------------------------------------

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        # Of what has one value, Optuna asks nobody.
        return dict(self._relative)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        given = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        values = self._claim(study, trial.number, trial._trial_id, self._allowed(given))
        return {name: value for name, value in values.items() if name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:  # fmt: skip
        """A parameter that is none of ours, at random."""
        letters = list(param_name.encode())
        rng = np.random.default_rng((self._seed, trial.number, *letters))
        sampler = RandomSampler(seed=int(rng.integers(1 << 32)))
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState,
        values: Sequence[float] | None,
    ) -> None:  # fmt: skip
        """Stop the study where this was the last configuration."""
        with self._lock:
            reading = self._read(study, trial.number)
            if not reading.course.is_under_way(trial.number):  # it was chosen by its user
                self._start(reading, trial)
            exhausted = not reading.course.unseen
        if exhausted:
            with contextlib.suppress(RuntimeError):  # where nothing loops there is nothing to stop
                study.stop()

    def reseed_rng(self) -> None:
        self._seed = _any_seed()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    # --- trials and configurations ---------------------------------------------------------------

    def _all_distributions(self) -> dict[str, CategoricalDistribution]:
        found = {}
        if len(self._contenders) > 1:
            found[SPEC] = CategoricalDistribution(tuple(self._positions))
        for contender in self._contenders:
            for parameter in contender.table.space.parameters:
                name = self._name(contender, parameter.name)
                found[name] = CategoricalDistribution(parameter.values)
        return found

    def _name(self, contender: Choices, parameter: str) -> str:
        return key(contender, parameter) if len(self._contenders) > 1 else parameter

    def _values(self, place: Place) -> dict[str, int | str]:
        contender = self._contenders[place.contender]
        spec = {SPEC: contender.name} if len(self._contenders) > 1 else {}
        config = contender.table.config(place.row)
        return {**spec, **{self._name(contender, name): config[name] for name in config}}

    def _place(self, values: Mapping[str, Any]) -> Place | None:
        """What parameters of a trial stand for, or None where some are missing or not valid."""
        position = 0
        if len(self._contenders) > 1:
            found = self._positions.get(values.get(SPEC, ""))
            if found is None:
                return None
            position = found
        contender = self._contenders[position]
        config = {}
        for parameter in contender.table.space.parameters:
            only = parameter.values[0] if len(parameter.values) == 1 else None
            config[parameter.name] = values.get(self._name(contender, parameter.name), only)
        row = contender.table.row(config)  # None is in no space
        return None if row is None else Place(position, row)

    def _allowed(self, given: Mapping[str, Any]) -> list[NDArray[np.bool_]] | None:
        """The rows of each contender that agree with parameters that a trial has already; None
        for all."""
        fixed = {name: given[name] for name in given if name in self._relative}
        if not fixed:
            return None
        masks = []
        for contender in self._contenders:
            table = contender.table
            named = len(self._contenders) == 1 or fixed.get(SPEC) in (None, contender.name)
            mask = np.full(len(table), named)
            for parameter, column in zip(table.space.parameters, table.indices, strict=True):
                value = fixed.get(self._name(contender, parameter.name))
                if value is not None:
                    places = np.array([value == known for known in parameter.values])
                    mask &= places[column]
            masks.append(mask)
        return masks

    # --- reading a study -------------------------------------------------------------------------

    def _claim(
        self, study: Study, trial: int, trial_id: int, allowed: list[NDArray[np.bool_]] | None
    ) -> dict[str, int | str]:
        """Choose what a trial is to be, and say so in the study."""
        with self._lock:
            reading = self._read(study, trial)
            chosen = reading.course.choose(self.first_number + trial, allowed)
            if chosen is None:
                raise optuna.TrialPruned("every valid configuration has been proposed")
            reading.claims[trial] = chosen
            reading.course.start(trial, chosen[0])
            values = self._values(chosen[0])
            study._storage.set_trial_system_attr(trial_id, _CLAIM, values)
        return values

    def _read(self, study: Study, current: int | None) -> _Reading:
        """All that ``study`` knows but the trial ``current``, which is being dealt with."""
        self._raise_error_if_multi_objective(study)
        reading = self._reading
        if reading is None or not reading.reads(study):
            course = Course(self._contenders, self._strategy, self._seed, self._first)
            for place, time in self._past:
                course.know(place, time)
            reading = self._reading = _Reading(study, course)
        minimise = study.direction == StudyDirection.MINIMIZE
        trials = _unsettled(study, reading.settled)
        fresh = []
        for trial in trials:
            number = trial.number
            if number in reading.finished or number == current:
                continue
            if trial.state.is_finished():
                fresh.append(trial)
            elif not reading.course.is_under_way(number):
                self._start(reading, trial)
        fresh.sort(key=lambda trial: (trial.datetime_complete, trial.number))
        for trial in fresh:
            self._finish(reading, trial, _time(trial, minimise=minimise))
        self._settle(reading, trials)
        return reading

    def _start(self, reading: _Reading, trial: FrozenTrial) -> None:
        """Take note of a trial that waits, or that another process has begun."""
        attributes = trial.system_attrs
        given = {**attributes.get("fixed_params", {}), **attributes.get(_CLAIM, {})}
        place = self._place({**given, **trial.params})
        if place is not None:
            reading.course.start(trial.number, place)

    def _finish(self, reading: _Reading, trial: FrozenTrial, time: float | None) -> None:
        reading.finished.add(trial.number)
        reading.claims.pop(trial.number, None)
        if reading.course.is_under_way(trial.number):
            reading.course.finish(trial.number, time)
            return
        place = self._place({**trial.system_attrs.get(_CLAIM, {}), **trial.params})
        if place is not None:
            reading.course.know(place, time)

    def _settle(self, reading: _Reading, trials: Sequence[FrozenTrial]) -> None:
        for trial in trials:
            if trial.number != reading.settled or trial.number not in reading.finished:
                break
            reading.finished.remove(trial.number)
            reading.settled += 1
        reading.last = max(reading.last, trials[-1].number if trials else -1)


def _unsettled(study: Study, settled: int) -> list[FrozenTrial]:
    """The trials of ``study`` with numbers from ``settled`` on, in order."""
    storage = study._storage
    if type(study) is Study and isinstance(storage, InMemoryStorage):
        # One by one: a copy of the list of all takes milliseconds where there are many.
        found: list[FrozenTrial] = []
        with contextlib.suppress(KeyError):  # there is no more
            for number in itertools.count(settled):
                trial_id = storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
                found.append(storage.get_trial(trial_id))
        return found
    trials = study.get_trials(deepcopy=False)
    # A pruner may show only some of the trials at a time.
    first = bisect.bisect_left(trials, settled, key=lambda trial: trial.number)
    return trials[first:]


def _any_seed() -> int:
    return int(np.random.default_rng().integers(1 << 32))


def _time(trial: FrozenTrial, *, minimise: bool) -> float | None:
    """What came of a finished trial, as a time; None for a failure."""
    if trial.state == TrialState.PRUNED and trial.intermediate_values:
        return _SLOW
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None or not 0 < value < math.inf:
        return None
    return value if minimise else 1 / value

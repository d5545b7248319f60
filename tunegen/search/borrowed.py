# SPDX-License-Identifier: Apache-2.0
"""Optuna's other samplers, over valid configurations that have not been proposed.

They know neither constraints nor several specs. So they work on a study of their own, whose
parameters are "spec" and those of all specs side by side; what a sampler proposes there is mended
to the nearest configuration that may be proposed, and it learns of that one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, QMCSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tunegen.search.shadow import SPEC, key, quiet_study, tell
from tunegen.search.unseen import Choices, Place, Unseen

# A generation of 50, Optuna's own, would be a quarter of a common budget.
_GENERATION = 20


class Borrowed:
    """One of Optuna's samplers. Values are categories, or ``by_index`` their positions in order:
    for those that know numbers only.

    Such samplers keep what they need on the trials themselves. That is why every trial, also one
    that somebody else chose, is first proposed by the sampler and then made what it is.
    """

    model_points: ClassVar[int] = 0
    chance_points: ClassVar[int] = 0
    expected_gain: float | None = None
    by_index: ClassVar[bool] = False

    def __init__(self, contenders: Sequence[Choices], seed: int) -> None:
        self._contenders = contenders
        self._seed = seed
        self._distributions = self._space()
        self._bridge = _Bridge(self)
        self._study = quiet_study(self._bridge)
        self._trials: dict[int, optuna.Trial] = {}
        self._chosen: tuple[Place, optuna.Trial] | None = None

    def make(self, seed: int, search_seed: int) -> BaseSampler:
        """The sampler for one proposal; ``search_seed`` is the same for all of them."""
        raise NotImplementedError

    # --- as a strategy ---------------------------------------------------------------------------

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        self._abandon()
        place, trial = self._bridge.ask(lambda values: self._mended(values, unseen, rng))
        self._chosen = place, trial
        return place

    def known(self, place: Place, time: float | None) -> None:
        tell(self._study, self._begin(place), time)

    def started(self, number: int, place: Place) -> None:
        if self._chosen is not None and self._chosen[0] == place:
            self._trials[number] = self._chosen[1]
            self._chosen = None
        else:
            self._trials[number] = self._begin(place)

    def finished(self, number: int, time: float | None) -> None:
        tell(self._study, self._trials.pop(number), time)

    def _begin(self, place: Place) -> optuna.Trial:
        self._abandon()
        return self._bridge.ask(lambda values: place)[1]

    def _abandon(self) -> None:
        """What was chosen and never started."""
        if self._chosen is not None:
            self._study.tell(self._chosen[1], state=TrialState.FAIL)
            self._chosen = None

    # --- its parameters --------------------------------------------------------------------------

    def _space(self) -> dict[str, BaseDistribution]:
        sizes = {SPEC: len(self._contenders)}
        for contender in self._contenders:
            for parameter in contender.table.space.parameters:
                sizes[key(contender, parameter.name)] = len(parameter.values)
        if self.by_index:
            return {name: IntDistribution(0, n - 1) for name, n in sizes.items() if n > 1}
        return {name: CategoricalDistribution(range(n)) for name, n in sizes.items() if n > 1}

    def _mended(
        self, values: Mapping[str, int], unseen: Unseen, rng: np.random.Generator
    ) -> Place:
        position = unseen.not_exhausted(values.get(SPEC, 0))
        contender = self._contenders[position]
        names = contender.table.space.names
        indices = np.array([values.get(key(contender, name), 0) for name in names], np.int64)
        return unseen.nearest(position, indices, rng)

    def _values(self, place: Place, proposed: Mapping[str, int]) -> dict[str, int]:
        """``place`` by positions; parameters of other specs stay as they were ``proposed``."""
        contender = self._contenders[place.contender]
        indices = contender.table.indices[:, place.row].tolist()
        names = (key(contender, name) for name in contender.table.space.names)
        own = {SPEC: place.contender, **dict(zip(names, indices, strict=True))}
        return {name: own.get(name, proposed[name]) for name in self._distributions}


class _Bridge(BaseSampler):
    """Between the study and the sampler: lets it propose, and says what became of that."""

    def __init__(self, owner: Borrowed) -> None:
        self._owner = owner
        self._decide: Callable[[Mapping[str, int]], Place] | None = None
        self._decided: Place | None = None

    def ask(self, decide: Callable[[Mapping[str, int]], Place]) -> tuple[Place, optuna.Trial]:
        """A trial of the place that ``decide`` makes of what the sampler proposes."""
        self._decide = decide
        trial = self._owner._study.ask(self._owner._distributions)
        if self._decided is None:  # nothing to suggest: one configuration
            self._decided = decide({})
        place, self._decided = self._decided, None
        return place, trial

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._owner._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        assert self._decide is not None
        owner = self._owner
        seed = np.random.default_rng((owner._seed, trial.number)).integers(1 << 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = owner.make(int(seed), owner._seed)
        sampler.before_trial(study, trial)
        proposed = sampler.sample_relative(study, trial, search_space)
        proposed = {
            name: proposed[name]
            if name in proposed
            else sampler.sample_independent(study, trial, name, distribution)
            for name, distribution in search_space.items()
        }
        self._decided = self._decide(proposed)
        return owner._values(self._decided, proposed)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise TypeError(f"{param_name} is sampled together with the others")


class Gp(Borrowed):
    """Optuna's Gaussian process over categories."""

    def make(self, seed: int, search_seed: int) -> BaseSampler:
        return GPSampler(seed=seed, n_startup_trials=10, warn_independent_sampling=False)


class Nsga(Borrowed):
    """A genetic algorithm over categories, in generations of 20."""

    def make(self, seed: int, search_seed: int) -> BaseSampler:
        return NSGAIISampler(seed=seed, population_size=_GENERATION)


class Cmaes(Borrowed):
    """Covariance matrix adaptation over the positions of values."""

    by_index: ClassVar[bool] = True

    def make(self, seed: int, search_seed: int) -> BaseSampler:
        return CmaEsSampler(seed=seed, warn_independent_sampling=False)


class Qmc(Borrowed):
    """A scrambled Sobol sequence over categories."""

    def make(self, seed: int, search_seed: int) -> BaseSampler:
        return QMCSampler(seed=search_seed, scramble=True, warn_independent_sampling=False)

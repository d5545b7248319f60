# SPDX-License-Identifier: Apache-2.0
"""Ways of choosing. The only module of the search that knows Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from tunegen.model import Outcome
from tunegen.search.portfolio import PortfolioSampler
from tunegen.search.unseen import Contender, Place, Unseen

DEFAULT_SAMPLER = "portfolio"

# Points that the model chooses before the sampler does. NVIDIA reports that the best of 16
# configurations ranked by its matmul heuristics reach 96 % of an exhaustive search on H100.
_MODEL_POINTS = 16

# Proposals of the sampler that may break a constraint or repeat a trial before the last one is
# mended. On recorded spaces of 4,000 to 18,000 configurations one, two and four found equally good
# ones, and each costs as much as the first.
_PROBES = 2


class Sampler(Protocol):
    """A way of choosing. ``model_points`` says how many points the model chooses before it."""

    model_points: ClassVar[int]

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen) -> None: ...

    def known(self, place: Place, outcome: Outcome) -> None:
        """What came of ``place`` in an earlier run."""
        ...

    def choose(self, rng: np.random.Generator) -> Place:
        """An unseen configuration; called only while there is one. ``rng`` is this proposal's
        own."""
        ...

    def started(self, number: int, place: Place) -> None:
        """The proposal ``number``, whoever chose it, is ``place``; its outcome will follow."""
        ...

    def finished(self, number: int, outcome: Outcome) -> None:
        """What came of the proposal ``number``."""
        ...


class RandomSampler:
    """Every configuration with equal chances: what a search has to beat."""

    model_points: ClassVar[int] = 0

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen) -> None:
        self._unseen = unseen

    def known(self, place: Place, outcome: Outcome) -> None:
        pass

    def choose(self, rng: np.random.Generator) -> Place:
        return self._unseen.random(rng)

    def started(self, number: int, place: Place) -> None:
        pass

    def finished(self, number: int, outcome: Outcome) -> None:
        pass


class TpeSampler:
    """Optuna's tree-structured Parzen estimator over categorical parameters.

    Specs are searched together: which one is the parameter "spec", and each has its own under
    ``<spec>.<PARAMETER>``, with a joint distribution that only its own trials make up. Proposals
    under way are held against their neighbourhood until their outcome is known. Failures are
    pruned trials, which carry no value: they rank behind every success, whatever the direction.
    """

    model_points: ClassVar[int] = _MODEL_POINTS

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen) -> None:
        self._contenders = contenders
        self._unseen = unseen
        self._study = _quiet_study()
        self._trials: dict[int, int] = {}  # numbers of proposals to those of the study's trials
        self._which = {c.spec.name: position for position, c in enumerate(contenders)}
        # Parameters with one value say nothing and are left out.
        self._spec = _several({"spec": tuple(self._which)})
        self._parameters = [
            _several({_key(c, p.name): p.values for p in c.table.space.parameters})
            for c in contenders
        ]

    def choose(self, rng: np.random.Generator) -> Place:
        probe = self._study.ask()
        place = self._propose(self._study.get_trials(deepcopy=False)[probe.number], rng)
        # TPE does not look at failed trials: the one that counts is added by started().
        self._study.tell(probe, state=TrialState.FAIL)
        return place

    def _propose(self, trial: FrozenTrial, rng: np.random.Generator) -> Place:
        tpe = optuna.samplers.TPESampler(
            seed=int(rng.integers(1 << 32)),
            multivariate=True,
            constant_liar=True,
            n_startup_trials=0,
        )
        for _ in range(_PROBES):
            contender, config = self._suggest(tpe, trial)
            table = self._contenders[contender].table
            row = table.row(config)
            if row is not None and (place := Place(contender, row)) in self._unseen:
                return place
        parameters = table.space.parameters
        indices = np.array([p.values.index(config[p.name]) for p in parameters], dtype=np.int64)
        return self._unseen.nearest(contender, indices, rng)

    def _suggest(
        self, tpe: optuna.samplers.TPESampler, trial: FrozenTrial
    ) -> tuple[int, Mapping[str, int]]:
        """What TPE would try next: a contender that is not exhausted, and a configuration that
        may break constraints or repeat a trial."""
        spec = tpe.sample_relative(self._study, trial, self._spec)
        contender = self._which[spec["spec"]] if spec else 0
        if not self._unseen.left(contender):
            contender = max(range(len(self._contenders)), key=self._unseen.left)
        chosen = self._contenders[contender]
        values = tpe.sample_relative(self._study, trial, self._parameters[contender])
        return contender, {
            p.name: values.get(_key(chosen, p.name), p.values[0])
            for p in chosen.table.space.parameters
        }

    def known(self, place: Place, outcome: Outcome) -> None:
        if outcome.ok:
            self._add(place, TrialState.COMPLETE, outcome.median_us)
        else:
            self._add(place, TrialState.PRUNED)

    def started(self, number: int, place: Place) -> None:
        self._add(place, TrialState.RUNNING)
        self._trials[number] = len(self._study.get_trials(deepcopy=False)) - 1

    def _add(self, place: Place, state: TrialState, value: float | None = None) -> None:
        contender = self._contenders[place.contender]
        config = contender.table.config(place.row)
        distributions = {**self._spec, **self._parameters[place.contender]}
        values = {"spec": contender.spec.name, **{_key(contender, p): config[p] for p in config}}
        self._study.add_trial(
            create_trial(
                state=state,
                value=value,
                params={name: values[name] for name in distributions},
                distributions=distributions,
            )
        )

    def finished(self, number: int, outcome: Outcome) -> None:
        trial = self._trials.pop(number)
        if outcome.ok:
            self._study.tell(trial, outcome.median_us)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)


def _key(contender: Contender, parameter: str) -> str:
    return f"{contender.spec.name}.{parameter}"


def _several(choices: Mapping[str, Sequence[int | str]]) -> dict[str, BaseDistribution]:
    return {key: CategoricalDistribution(c) for key, c in choices.items() if len(c) > 1}


def _quiet_study() -> optuna.Study:
    """A study in memory that samples nothing itself; Optuna announces each one on stderr."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        sampler = optuna.samplers.RandomSampler()
        return optuna.create_study(direction="minimize", sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


SAMPLERS: Mapping[str, type[Sampler]] = {
    "portfolio": PortfolioSampler,
    "tpe": TpeSampler,
    "random": RandomSampler,
}

# SPDX-License-Identifier: Apache-2.0
"""Optuna's tree-structured Parzen estimator, over several specs at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from tunegen.search.shadow import SPEC, key, quiet_study, several, tell
from tunegen.search.unseen import Choices, Place, Unseen

# Points that the model chooses before the sampler does. NVIDIA reports that the best of 16
# configurations ranked by its matmul heuristics reach 96 % of an exhaustive search on H100.
_MODEL_POINTS = 16

# Proposals of the sampler that may break a constraint or repeat a trial before the last one is
# mended. On recorded spaces of 4,000 to 18,000 configurations one, two and four found equally good
# ones, and each costs as much as the first.
_PROBES = 2


class Tpe:
    """The estimator over categorical parameters.

    Specs are searched together: which one is the parameter "spec", and each has its own under
    ``<spec>.<PARAMETER>``, with a joint distribution that only its own trials make up. Proposals
    under way are held against their neighbourhood until their outcome is known. Failures are
    pruned trials, which carry no value: they rank behind every success.
    """

    model_points: ClassVar[int] = _MODEL_POINTS
    chance_points: ClassVar[int] = _MODEL_POINTS
    expected_gain: float | None = None

    def __init__(self, contenders: Sequence[Choices], seed: int) -> None:
        self._contenders = contenders
        self._study = quiet_study()
        self._trials: dict[int, int] = {}  # numbers of proposals to those of the study's trials
        self._which = {c.name: position for position, c in enumerate(contenders)}
        self._spec = several({SPEC: tuple(self._which)})
        self._parameters = [
            several({key(c, p.name): p.values for p in c.table.space.parameters})
            for c in contenders
        ]

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        probe = self._study.ask()
        trial = self._study.get_trials(deepcopy=False)[probe.number]
        place = self._propose(trial, unseen, rng)
        # TPE does not look at failed trials: the one that counts is added by started().
        self._study.tell(probe, state=TrialState.FAIL)
        return place

    def _propose(self, trial: FrozenTrial, unseen: Unseen, rng: np.random.Generator) -> Place:
        tpe = TPESampler(
            seed=int(rng.integers(1 << 32)),
            multivariate=True,
            constant_liar=True,
            n_startup_trials=0,
        )
        for _ in range(_PROBES):
            contender, config = self._suggest(tpe, trial, unseen)
            table = self._contenders[contender].table
            row = table.row(config)
            if row is not None and (place := Place(contender, row)) in unseen:
                return place
        parameters = table.space.parameters
        indices = np.array([p.values.index(config[p.name]) for p in parameters], dtype=np.int64)
        return unseen.nearest(contender, indices, rng)

    def _suggest(
        self, tpe: TPESampler, trial: FrozenTrial, unseen: Unseen
    ) -> tuple[int, Mapping[str, int]]:
        """What TPE would try next: a contender that is not exhausted, and a configuration that
        may break constraints or repeat a trial."""
        spec = tpe.sample_relative(self._study, trial, self._spec)
        contender = unseen.not_exhausted(self._which[spec[SPEC]] if spec else 0)
        chosen = self._contenders[contender]
        values = tpe.sample_relative(self._study, trial, self._parameters[contender])
        return contender, {
            p.name: values.get(key(chosen, p.name), p.values[0])
            for p in chosen.table.space.parameters
        }

    def known(self, place: Place, time: float | None) -> None:
        self._add(place, TrialState.PRUNED if time is None else TrialState.COMPLETE, time)

    def started(self, number: int, place: Place) -> None:
        self._add(place, TrialState.RUNNING)
        self._trials[number] = len(self._study.get_trials(deepcopy=False)) - 1

    def _add(self, place: Place, state: TrialState, time: float | None = None) -> None:
        contender = self._contenders[place.contender]
        config = contender.table.config(place.row)
        distributions = {**self._spec, **self._parameters[place.contender]}
        values = {SPEC: contender.name, **{key(contender, p): config[p] for p in config}}
        self._study.add_trial(
            create_trial(
                state=state,
                value=time,
                params={name: values[name] for name in distributions},
                distributions=distributions,
            )
        )

    def finished(self, number: int, time: float | None) -> None:
        tell(self._study, self._trials.pop(number), time)

# SPDX-License-Identifier: Apache-2.0
"""Studies in memory, on which Optuna's own samplers see what a search has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

from tunegen.search.unseen import Choices

# The parameter that says which contender, where there are several.
SPEC = "spec"


def quiet_study(sampler: BaseSampler | None = None) -> optuna.Study:
    """A study in memory that minimises; Optuna announces each one on stderr."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="minimize", sampler=sampler or RandomSampler())
    finally:
        optuna.logging.set_verbosity(verbosity)


def tell(study: optuna.Study, trial: optuna.Trial | int, time: float | None) -> None:
    """What came of a trial: a failure is pruned, and carries no value."""
    if time is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, time)


def key(contender: Choices, parameter: str) -> str:
    """The name of a contender's parameter beside those of others."""
    return f"{contender.name}.{parameter}"


def several(choices: Mapping[str, Sequence[int | str]]) -> dict[str, BaseDistribution]:
    """Categorical distributions; what has one value says nothing and is left out."""
    return {name: CategoricalDistribution(c) for name, c in choices.items() if len(c) > 1}

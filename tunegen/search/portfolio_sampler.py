# SPDX-License-Identifier: Apache-2.0
"""The default way of choosing, for studies of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunegen.errors import UsageError, unknown
from tunegen.model import Point, Space
from tunegen.search.portfolio import Portfolio
from tunegen.search.sampler import ConfigSampler
from tunegen.search.unseen import NamedSpace


class PortfolioSampler(ConfigSampler):
    """The sampler of ``tunegen tune``: a Gaussian process over categories and quantities, judging
    neighbours of the best, crossings of them, what a model ranks high, and chance.

    ``space`` is the space of one kernel, or several spaces by name. ``default`` is the
    configuration to try first, ``prior`` a model of the time written like a constraint: arithmetic
    on a point of the space (see :class:`tunegen.model.Point`); both by name where the spaces are.

    >>> import optuna
    >>> from tunegen import PortfolioSampler
    >>> from tunegen.model import Constraint, Space, parameters
    >>> space = Space(
    ...     parameters([("BLOCK", (32, 64, 128), ""), ("UNROLL", (1, 2, 4), "")]),
    ...     (Constraint("a block has at most 128 elements", lambda c: c.BLOCK * c.UNROLL <= 128),),
    ... )
    >>> sampler = PortfolioSampler(space, seed=0, default={"BLOCK": 32, "UNROLL": 1})
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(sampler=sampler)
    >>> def microseconds(trial):
    ...     config = sampler.suggest(trial).config
    ...     return 100 / config.BLOCK + 10 / config.UNROLL
    >>> study.optimize(microseconds, n_trials=20)  # ends when all six have been tried
    >>> len(study.trials), study.best_params
    (6, {'BLOCK': 32, 'UNROLL': 4})

    Raises :class:`UsageError` for a default that is no valid configuration and names that are
    none, :class:`NoValidConfig` for a space without any.
    """

    def __init__(
        self,
        space: Space | Mapping[str, Space],
        *,
        seed: int | None = None,
        default: Mapping[str, Any] | None = None,
        prior: Callable[[Point], Any] | Mapping[str, Callable[[Point], Any]] | None = None,
    ) -> None:
        if isinstance(space, Space):
            found = [_named("the space", space, default, prior)]
        else:
            defaults, priors = _by_name(default, space), _by_name(prior, space)
            found = [
                _named(name, each, defaults.get(name), priors.get(name))
                for name, each in space.items()
            ]
        super().__init__(found, Portfolio, seed)


def _named(name: str, space: Space, default: Any, prior: Any) -> NamedSpace:
    table = space.enumerate().require(name)
    prior_us = None
    if prior is not None:
        with np.errstate(all="ignore"):
            times = np.asarray(prior(table.columns()), dtype=np.float64)
        prior_us = np.broadcast_to(times, len(table))
    return NamedSpace(name, table, default, prior_us)


def _by_name(given: Any, spaces: Mapping[str, Space]) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError("where spaces have names, so have defaults and priors")
    for name in given:
        if name not in spaces:
            raise unknown("space", name, spaces)
    return given

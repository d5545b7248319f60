# SPDX-License-Identifier: Apache-2.0
"""Kernel Tuner's search strategies on the same recorded spaces, where Kernel Tuner is installed.

Its strategies run as they are, at their defaults; only the runner behind them is ours, so that
evaluations are counted alike for all: a configuration counts when it is first evaluated, whether
it runs or fails; what breaks a constraint and what is repeated does not count.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunegen.errors import ToolkitError, UsageError

PREFIX = "kt:"

# As they are named there. Those left out are made for several objectives, for starting points of
# one's own, or for packages that it does not bring along.
STRATEGIES = (
    "adaptive_tabu_greywolf", "hybrid_vndx", "genetic_algorithm", "dual_annealing",
    "simulated_annealing", "diff_evo", "greedy_ils", "greedy_mls", "pso", "firefly_algorithm",
    "basinhopping", "random_sample",
)  # fmt: skip

# Of those in a comparison unless others are named.
USUAL = ("adaptive_tabu_greywolf", "genetic_algorithm", "dual_annealing", "random_sample")

_FEWEST_ROWS = 50

Values = tuple[int, ...]


def installed_version() -> str | None:
    """The version of Kernel Tuner that is installed, None if there is none."""
    if importlib.util.find_spec("kernel_tuner") is None:
        return None
    return importlib.metadata.version("kernel_tuner")


@dataclass(frozen=True)
class RivalSpace:
    """A recorded space as Kernel Tuner's strategies see it, for one run: it remembers neighbours,
    in an order that was drawn."""

    names: tuple[str, ...]
    rows: tuple[Values, ...]
    space: Any = field(repr=False)


def rival_space(
    names: Sequence[str], values: Sequence[Values], rows: Sequence[Values]
) -> RivalSpace:
    """The space of ``names`` with the ``values`` of each and nothing but ``rows`` valid.

    Raises :class:`UsageError` for fewer rows than a population of its strategies has, and
    :class:`ToolkitError` where Kernel Tuner is not installed or not one we know.
    """
    if len(rows) < _FEWEST_ROWS:
        raise UsageError(
            f"Kernel Tuner's strategies need {_FEWEST_ROWS} configurations, not {len(rows)}"
        )
    if installed_version() is None:
        raise ToolkitError("Kernel Tuner is not installed here", hint="pip install kernel_tuner")
    try:
        from kernel_tuner.searchspace import Searchspace

        listed = {",".join(map(str, row)): dict(zip(names, row, strict=True)) for row in rows}
        tune_params = {n: list(known) for n, known in zip(names, values, strict=True)}
        cached = {"tune_params": tune_params, "cache": listed}
        made = Searchspace(None, None, None, from_cache=cached)
    except (ImportError, TypeError) as error:
        raise _unknown_version() from error
    return RivalSpace(tuple(names), tuple(rows), made)


def explore(
    strategy: str,
    space: RivalSpace,
    time_of: Callable[[Values], float | None],
    *,
    seed: int,
    evaluations: int,
) -> tuple[list[Values], float]:
    """What ``strategy`` evaluates, in order and each once, and its own seconds on
    a processor.

    ``time_of`` is the time of a row, None if it fails. Most strategies draw from the global
    generators of Python and NumPy, which are seeded here. It may end before ``evaluations``.

    Raises :class:`ToolkitError` where Kernel Tuner is not one we know.
    """
    try:
        from kernel_tuner.interface import Options, strategy_map
        from kernel_tuner.util import StopCriterionReached, TuningBudget

        chosen = strategy_map[strategy]
    except (ImportError, KeyError) as error:
        raise _unknown_version() from error
    random.seed(seed)
    np.random.seed(seed)  # the generator that they draw from
    runner = _Runner(space.names, time_of)
    options = Options(
        strategy_options=Options(max_fevals=evaluations),
        max_fevals=evaluations,
        budget=TuningBudget(None, min(evaluations, len(space.rows))),
        objective=["time"],
        objective_higher_is_better=[False],
        tune_params=space.space.tune_params,
        restrictions=[],
        restrictions_unmodified=[],
        cache={},
        verbose=False,
        simulation_mode=True,
        strategy=strategy,
    )
    started = time.process_time()
    with warnings.catch_warnings(), contextlib.suppress(StopCriterionReached):
        warnings.simplefilter("ignore")  # overflows of theirs are none of the user's business
        chosen.tune(space.space, runner, options)
    seconds = time.process_time() - started - runner.seconds
    return list(runner.evaluated), seconds


class _Runner:
    """What stands in for the GPU."""

    def __init__(self, names: Sequence[str], time_of: Callable[[Values], float | None]) -> None:
        from kernel_tuner.util import RuntimeFailedConfig

        self._names, self._time_of, self._failed = names, time_of, RuntimeFailedConfig
        self.evaluated: dict[Values, dict[str, Any]] = {}
        self.seconds = 0.0

    def add_strategy_time(self, seconds: float) -> None:
        pass

    def available_parallelism(self) -> int:
        return 1

    def run(self, asked: Sequence[Sequence[int]], options: Any) -> list[dict[str, Any] | None]:
        started = time.process_time()
        results: list[dict[str, Any] | None] = []
        for config in asked:
            if options.budget.is_done():
                results.append(None)
                continue
            row = tuple(int(value) for value in config)
            if row not in self.evaluated:
                options.budget.add_evaluations(1)
                self.evaluated[row] = self._result(row)
            results.append(dict(self.evaluated[row]))
        self.seconds += time.process_time() - started
        return results

    def _result(self, row: Values) -> dict[str, Any]:
        found: dict[str, Any] = dict(zip(self._names, row, strict=True))
        took = self._time_of(row)
        found["time"] = self._failed() if took is None else took
        if took is None:
            found["__error__"] = found["time"]
        return found


def _unknown_version() -> ToolkitError:
    return ToolkitError(
        f"Kernel Tuner {installed_version()} has other parts than 1.5",
        hint="pip install 'kernel_tuner>=1.5,<1.6'",
    )

# SPDX-License-Identifier: Apache-2.0
"""How finalists do on sizes next to the one that they were tuned for: what chooses among ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunegen.errors import UsageError
from tunegen.model import DeviceClass, EdgeProblem, Operation, Problem
from tunegen.runner import ratios, rounds
from tunegen.runner.protocol import Enter, Entered
from tunegen.runner.qualify import Finalist, Setup, fit
from tunegen.runner.station import ENTER_SECONDS, Station, prepare_seconds

# Every size is multiplied by these: dispatch uses a record up to a factor of two away.
SCALES = (0.75, 1.25)

_ROUNDS = 5
_BLOCK_SECONDS = 0.02


def neighbour(operation: Operation, problem: Problem, scale: float) -> Problem | None:
    """The problem with every size but the batch scaled, leading dimensions as they come; None
    where that is no problem of its class."""
    sizes = {
        name: size if name == operation.batch_axis else int(size * scale)
        for name, size in problem.sizes
    }
    growing = operation.growing_attributes(problem)
    special = {k: v for k, v in operation.special(problem).items() if k not in growing}
    try:
        return operation.problem(sizes, dtype=problem.dtype, layout=problem.layout, **special)
    except UsageError:
        return None


def worst_cases(
    finalists: Sequence[Finalist],
    *,
    station: Station,
    setup: Setup,
    problem: Problem,
    operation: Operation,
    device: DeviceClass,
    seed: int,
) -> dict[str, float]:
    """For each finalist the largest ratio of its time to the best one's, over the neighbouring
    sizes that all of them can do. What was prepared in the station is replaced."""
    limits = [
        limit for f in finalists for limit in f.candidate.spec.limits(f.candidate.config, problem)
    ]
    worst: dict[str, float] = {}
    for scale in SCALES:
        found = neighbour(operation, problem, scale)
        fitted = fit(operation, EdgeProblem(found), limits) if found else None
        if fitted is None:
            continue
        request = setup(fitted.problem, inputs="normal", seed=seed, sets=2, checked=False)
        station.prepare(request, prepare_seconds(operation.flops(fitted.problem)))
        entered: dict[str, rounds.Asked] = {}
        for finalist in finalists:
            executable = finalist.executable(problem, fitted.problem, device)
            answer = station.enter(Enter(finalist.name, executable), ENTER_SECONDS)
            if isinstance(answer, Entered):
                entered[finalist.name] = station
        orders = ratios.shuffled(list(entered), _ROUNDS, seed)
        played = rounds.play(entered, "burst", orders, _BLOCK_SECONDS, station.forget)
        medians = {name: float(np.median(us)) for name, us in rounds.burst_times(played).items()}
        for name, us in medians.items():
            worst[name] = max(worst.get(name, 1.0), us / min(medians.values()))
    return worst

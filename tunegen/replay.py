# SPDX-License-Identifier: Apache-2.0
"""Recorded trials in, the same outcomes out: the whole loop runs without a GPU."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.errors import UsageError
from tunegen.model import (
    Candidate,
    Config,
    Constraint,
    Evidence,
    KernelSpec,
    LaunchPlan,
    Measurement,
    Operation,
    Outcome,
    Parameter,
    Point,
    Problem,
    Space,
)

# Recorded spaces have one time per configuration: means of many runs, in whatever unit.
POLICY = "recorded"


class ReplayEvaluator:
    """Evaluator that looks up what was recorded of a spec's configuration; it compiles nothing.

    ``evidence`` is that of the records. A configuration without a record is a rejected one.
    """

    needs_kernels = False

    def __init__(
        self, outcomes: Mapping[tuple[str, Config], Outcome], evidence: Evidence = "measured"
    ) -> None:
        self._outcomes = outcomes
        self.evidence: Evidence = evidence

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        recorded = self._outcomes.get((candidate.spec.name, candidate.config))
        return recorded or Outcome("rejected", reason="nothing is recorded of this configuration")


@dataclass(frozen=True)
class RecordedSpace:
    """A search space of which every valid configuration was timed.

    ``spec`` stands for the kernel: it has the space and a default, and generates nothing.
    ``default`` is the configuration in the middle of the list, chosen without a look at its time.
    """

    spec: KernelSpec
    problem: Problem
    space: Space
    default: Config
    outcomes: Mapping[tuple[str, Config], Outcome]

    @property
    def best_us(self) -> float:
        """The least recorded time; comparable only with others of the same space."""
        return min(outcome.median_us for outcome in self.outcomes.values() if outcome.ok)


def load_space(path: Path) -> RecordedSpace:
    """Read a recorded space, plain or gzipped JSON.

    ``{"space": name, "kernel": name, "gpu": name, "params": {name: [integers]}, "rows":
    [[[value per parameter], time or null], ...]}``. A row that is missing breaks a constraint of
    the kernel, null means that it failed when it was compiled or run.

    Raises :class:`UsageError` for anything else.
    """
    document = _read(path)
    try:
        name, gpu = str(document["kernel"]), str(document["gpu"])
        values = {str(key): _values(known) for key, known in document["params"].items()}
        rows = [(tuple(map(_integer, row)), _time(time)) for row, time in document["rows"]]
        space = _space(values, [row for row, _ in rows])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no recorded space: {error!r}") from error
    configs = [Config(dict(zip(values, row, strict=True))) for row, _ in rows]
    outcomes = {
        (name, config): _outcome(time) for config, (_, time) in zip(configs, rows, strict=True)
    }
    table = space.enumerate()
    if not rows:
        raise UsageError(f"{path}: no configuration is recorded")
    if len(table) != len(rows):
        raise UsageError(f"{path}: {len(rows)} rows are {len(table)} different configurations")
    default = table.config(len(table) // 2)
    operation = _operation(name, f"{name} as recorded on {gpu}")
    return RecordedSpace(
        _spec(name, operation, space, default), operation.problem(), space, default, outcomes
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        document = json.loads(content)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is no recorded space: it is not an object")
    return document


def _values(known: Any) -> tuple[int, ...]:
    return tuple(sorted({_integer(value) for value in known}))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _outcome(time: float | None) -> Outcome:
    if time is None:
        return Outcome("launch_failed", reason="failed when it was compiled or run")
    return Outcome("measured", Measurement(time, POLICY))


def _space(values: Mapping[str, Sequence[int]], rows: Sequence[Sequence[int]]) -> Space:
    """The space with what is recorded as its only constraint. ``ValueError`` for a row outside."""
    positions = {name: {v: i for i, v in enumerate(known)} for name, known in values.items()}
    codes = np.zeros(len(rows), dtype=np.int64)
    for row, config in enumerate(rows):
        code = 0
        for (name, known), value in zip(positions.items(), config, strict=True):
            if value not in known:
                raise ValueError(f"{name}={value} is not among its values")
            code = code * len(known) + known[value]
        codes[row] = code
    codes.sort()

    def recorded(c: Point) -> NDArray[np.bool_]:
        asked = np.zeros(1, dtype=np.int64)
        for name, known in values.items():
            asked = asked * len(known) + np.searchsorted(known, getattr(c, name))
        return np.isin(asked, codes)

    parameters = tuple(Parameter(name, tuple(known), "") for name, known in values.items())
    return Space(parameters, (Constraint("the configuration was recorded", recorded),))


def _operation(name: str, summary: str) -> Operation:
    return Operation(
        name=name,
        summary=summary,
        axes=(),
        dtypes=("fp32",),
        default_sizes=(),
        arrays=lambda problem: (),
        reference=lambda problem, operands, scalars: {},
        flops=lambda problem: 0,
    )


def _spec(name: str, operation: Operation, space: Space, default: Config) -> KernelSpec:
    def no_work(*_: Any) -> Any:
        raise TypeError(f"{name} is a recording: how much work it is was not recorded")

    return KernelSpec(
        name=name,
        operation=operation,
        summary=operation.summary,
        space=lambda problem, device: space,
        default=lambda problem, device: default,
        kernels=lambda config, problem: (),
        plan=lambda config, problem, sizes: LaunchPlan(()),
        work=no_work,
        limits=lambda config, problem: (),
    )

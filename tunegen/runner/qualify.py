# SPDX-License-Identifier: Apache-2.0
"""Before the finals: only what is right everywhere may take part.

Every finalist computes its problem on normal and on small-integer inputs, and the edge problems of
its operation on integers, with the very cubins that would be shipped: a launch plan's formulas are
bound to other sizes, as dispatch does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tunegen.errors import PlanError, UsageError
from tunegen.model import (
    SM_COUNT,
    Candidate,
    DeviceClass,
    EdgeProblem,
    LaunchPlan,
    Limit,
    Operation,
    OutcomeKind,
    Problem,
    ceil_div,
)
from tunegen.runner.protocol import Executable, InputKind, Prepare, Verdict, Verify
from tunegen.runner.quarantine import Quarantine, blame
from tunegen.runner.station import Station, prepare_seconds

# Checking reads the whole result a few times; the rest is for a machine that is busy compiling.
VERIFY_SECONDS = 20.0

# Launches of a check, first launch and repetition, that may each take this multiple of the time
# that the finalist took in its trial.
_LAUNCHES = 100.0


class Setup(Protocol):
    """How to prepare a problem: with the check kernels and the expected results."""

    def __call__(
        self, problem: Problem, *, inputs: InputKind, seed: int, sets: int = 1,
        offsets: tuple[tuple[str, int], ...] = (), checked: bool = True,
    ) -> Prepare: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finalist:
    """A candidate for the finals: ``name`` sets it apart, ``trial_us`` is its time in the search.

    ``default`` marks the operation's default configuration.
    """

    name: str
    trial: int
    candidate: Candidate
    plan: LaunchPlan
    trial_us: float
    default: bool = False

    def executable(self, problem: Problem, bound_to: Problem, device: DeviceClass) -> Executable:
        """Its cubins, made for ``problem``, with the launches for another one of the same class.

        Raises :class:`PlanError` for a grid beyond CUDA's limits.
        """
        assert self.candidate.kernels is not None
        formulas = self.candidate.spec.symbolic_plan(self.candidate.config, problem)
        plan = formulas.bind({**bound_to.names, SM_COUNT: device.sm_count})
        return Executable(self.candidate.kernels, plan)


@dataclass(frozen=True, slots=True)
class Qualified:
    """What came of a finalist. ``reason`` is empty where it is right everywhere, else ``kind`` is
    the kind of outcome that its trial then has. The errors are those on normal inputs."""

    reason: str = ""
    kind: OutcomeKind = "wrong_result"
    relative_error: float | None = None
    deterministic: bool | None = None


def fit(operation: Operation, edge: EdgeProblem, limits: Sequence[Limit]) -> EdgeProblem | None:
    """The edge problem with its attributes rounded up to what ``limits`` demand, or None where
    they do not allow it at all: a size that is none of theirs.

    Operands that must be aligned stay where they are.
    """
    attributes = dict(edge.problem.attributes)
    for limit in limits:
        if limit.rule == "multiple_of" and limit.quantity in attributes:
            attributes[limit.quantity] = (
                ceil_div(attributes[limit.quantity], limit.value) * limit.value
            )
    problem = dataclasses.replace(edge.problem, attributes=tuple(sorted(attributes.items())))
    try:
        operation.check(problem)
    except UsageError:
        return None
    names = problem.names
    offsets = dict(edge.offsets)
    for limit in limits:
        if limit.quantity in names:
            if not limit.holds(names):
                return None
        elif limit.quantity in offsets and not limit.holds(offsets):
            offsets[limit.quantity] = 0
    return EdgeProblem(problem, tuple(offsets.items()))


@dataclass(slots=True)
class Qualifier:
    """Checks finalists in the worker of a station.

    ``wait`` is called between checks. What faults or hangs goes to the quarantine.
    """

    station: Station
    setup: Setup
    problem: Problem
    operation: Operation
    device: DeviceClass
    seed: int
    sets: int
    quarantine: Quarantine | None = None
    wait: Callable[[], None] = lambda: None

    def run(self, finalists: Sequence[Finalist]) -> list[Qualified]:
        """What came of each. Afterwards the problem is prepared, on normal inputs."""
        results = {finalist.name: Qualified() for finalist in finalists}

        def left() -> list[Finalist]:
            return [f for f in finalists if not results[f.name].reason]

        whole = EdgeProblem(self.problem)
        self._check(whole, "integers", left(), results)
        for edge in self.operation.edges(self.problem):
            for fitted, able in self._by_limits(edge, left()).items():
                self._check(fitted, "integers", able, results)
        self._check(whole, "normal", left(), results)
        return [results[finalist.name] for finalist in finalists]

    def _by_limits(
        self, edge: EdgeProblem, finalists: Sequence[Finalist]
    ) -> dict[EdgeProblem, list[Finalist]]:
        """The finalists by the form in which their limits allow the edge problem."""
        groups: dict[EdgeProblem, list[Finalist]] = {}
        for finalist in finalists:
            spec, config = finalist.candidate.spec, finalist.candidate.config
            fitted = fit(self.operation, edge, spec.limits(config, self.problem))
            if fitted is not None:
                groups.setdefault(fitted, []).append(finalist)
        return groups

    def _check(
        self,
        edge: EdgeProblem,
        inputs: InputKind,
        finalists: Sequence[Finalist],
        results: dict[str, Qualified],
    ) -> None:
        """Note for each finalist what is wrong with its result for one problem."""
        self.wait()
        last = inputs == "normal"
        request = self.setup(
            edge.problem, inputs=inputs, seed=self.seed, sets=self.sets if last else 1,
            offsets=edge.offsets,
        )  # fmt: skip
        self.station.prepare(request, prepare_seconds(self.operation.flops(edge.problem)))
        for finalist in finalists:
            results[finalist.name] = self._verify(finalist, edge.problem, inputs)
            self.wait()

    def _verify(self, finalist: Finalist, problem: Problem, inputs: InputKind) -> Qualified:
        try:
            executable = finalist.executable(self.problem, problem, self.device)
        except PlanError as error:
            return Qualified(f"{self._where(problem)}: {error}", "launch_failed")
        tolerance = finalist.candidate.spec.tolerance(problem)
        exact = inputs == "integers" and self.operation.exact(problem)
        request = Verify(executable, tolerance, exact=exact)
        limit_s = VERIFY_SECONDS + _LAUNCHES * finalist.trial_us / 1e6
        answer = self.station.ask(request, limit_s)
        if isinstance(answer, Verdict):
            if answer.reason:
                return Qualified(f"{self._where(problem)}, {inputs} inputs: {answer.reason}")
            return Qualified("", "wrong_result", answer.relative_error, answer.deterministic)
        fault = blame(answer, finalist.candidate, problem, executable.plan, self.quarantine)
        return Qualified(f"{self._where(problem)}: {fault.reason}", fault.kind)

    def _where(self, problem: Problem) -> str:
        if problem == self.problem:
            return "finals"
        words = (self.operation.text(problem), *self.operation.special_words(problem))
        return f"finals at {' '.join(words)}"

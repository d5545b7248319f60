# SPDX-License-Identifier: Apache-2.0
"""What came of a configuration. Failures are values with a reason, never infinities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tunegen.model.kernel import Candidate, CompiledKernel, KernelSource
from tunegen.model.problem import Problem
from tunegen.model.space import Config

OutcomeKind = Literal[
    "measured",  # timed on a GPU
    "predicted",  # timed by the performance model
    "rejected",  # not worth running: the compiler spilled or serialised it
    "compile_failed",
    "launch_failed",
    "wrong_result",
    "timed_out",
]
Evidence = Literal["measured", "predicted"]

SUCCESSES: tuple[OutcomeKind, ...] = ("measured", "predicted")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one call in microseconds, and how they were obtained.

    ``policy`` names the way of measuring; timings of different policies are never compared. A
    prediction has one sample, no spread, and the model's name as its policy.
    """

    median_us: float
    policy: str
    low_us: float = 0.0
    high_us: float = 0.0
    samples: int = 1
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steady_us(self) -> float:
        """The median, freed of the drift that its evaluator saw."""
        return self.median_us / float(self.details.get("drift", 1.0))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a candidate: a kind, and a measurement or the reason of the failure."""

    kind: OutcomeKind
    measurement: Measurement | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.kind in SUCCESSES

    @property
    def median_us(self) -> float:
        """The time of a success; asking a failure for it is a programming error."""
        assert self.measurement is not None, self.kind
        return self.measurement.median_us


@dataclass(frozen=True, slots=True)
class Trial:
    """One config of a spec with its outcome, numbered in the order in which it was chosen.

    ``origin`` says why it was tried: "default"; "record" or "study", where it was fast on another
    problem or device; "model" or "sampler".
    """

    number: int
    spec: str
    config: Config
    outcome: Outcome
    origin: str
    seconds: float = 0.0


class Compiler(Protocol):
    """Source in, image out. Implementations are safe to call from several threads at once."""

    def compile(self, source: KernelSource, target: str) -> CompiledKernel:
        """Compile for ``target`` (``sm_90``, ``sm_90a``).

        Raises :class:`tunegen.errors.CompileError` with the log when the source is refused and
        :class:`tunegen.errors.ToolkitError` when there is no compiler.
        """
        ...


class Evaluator(Protocol):
    """Candidate in, outcome out: the GPU, the performance model, or a replay of past trials."""

    @property
    def evidence(self) -> Evidence:
        """What its successes are worth."""
        ...

    @property
    def needs_kernels(self) -> bool:
        """Whether candidates must be compiled before they are evaluated."""
        ...

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """The outcome of one candidate. What the candidate does wrong is in the outcome; raises
        only what is wrong with the evaluator itself."""
        ...

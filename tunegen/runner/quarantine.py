# SPDX-License-Identifier: Apache-2.0
"""What a configuration that faulted, hung or killed its worker leaves behind: all that is needed
to run it again under a debugger."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegen.model import Candidate, KernelSource, LaunchPlan, OutcomeKind, Problem
from tunegen.runner.process import Lost
from tunegen.runner.protocol import Answer, Failed

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """What a candidate did instead of giving an answer. ``harmful``: it took the worker along."""

    kind: OutcomeKind
    reason: str
    harmful: bool

    @classmethod
    def of(cls, answer: Answer | Lost) -> Fault:
        """The fault behind an answer that is none of those asked for."""
        match answer:
            case Lost(kind="timed_out"):
                return cls("timed_out", str(answer), True)
            case Lost():
                return cls("launch_failed", str(answer), True)
            case Failed():
                return cls("launch_failed", answer.reason, answer.sticky)
            case _:
                return cls("launch_failed", f"it answered a {type(answer).__name__}", False)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A folder with one folder for each such configuration, named by what it launches.

    ``sources`` gives the generated sources of a candidate. ``telemetry`` says how the card is
    (clocks, temperature, reasons for throttling), as plain values.
    """

    folder: Path
    sources: Callable[[Candidate], Sequence[KernelSource]]
    telemetry: Callable[[], Mapping[str, Any]] = dict

    def put(self, candidate: Candidate, problem: Problem, plan: LaunchPlan, fault: Fault) -> str:
        """Keep a candidate; where it is kept, in words for the reason of its outcome.

        Whatever else fails, tuning goes on: a folder that cannot be written is said so.
        """
        where = (
            self.folder / f"{problem.operation}-{candidate.spec.name}-{digest(candidate, plan)}"
        )
        try:
            where.mkdir(parents=True, exist_ok=True)
            for source in self.sources(candidate):
                (where / f"{source.name}.cu").write_text(source.text)
            for kernel in candidate.kernels or ():
                (where / f"{kernel.name}.ptx").write_bytes(kernel.ptx)
                (where / f"{kernel.name}.cubin").write_bytes(kernel.cubin)
            case = self._case(candidate, problem, plan, fault)
            (where / "case.json").write_text(json.dumps(case, indent=2) + "\n")
        except OSError as failure:
            return f"it could not be kept in {where}: {failure}"
        return f"kept in {where}"

    def _case(
        self, candidate: Candidate, problem: Problem, plan: LaunchPlan, fault: Fault
    ) -> dict[str, Any]:
        kernels = candidate.kernels or ()
        return {
            "schema": SCHEMA,
            "outcome": fault.kind,
            "error": fault.reason,
            "operation": problem.operation,
            "spec": candidate.spec.name,
            "problem": {
                "sizes": dict(problem.sizes),
                "dtype": problem.dtype,
                "layout": problem.layout,
                "attributes": candidate.spec.operation.named(dict(problem.attributes)),
            },
            "config": dict(candidate.config),
            "plan": dataclasses.asdict(plan),
            "kernels": [
                {
                    "name": kernel.name,
                    "entry": kernel.entry,
                    "target": kernel.target,
                    "nvrtc": kernel.nvrtc,
                    "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
                    "resources": dataclasses.asdict(kernel.resources),
                }
                for kernel in kernels
            ],
            "telemetry": dict(self.telemetry()),
        }


def blame(
    answer: Answer | Lost,
    candidate: Candidate,
    problem: Problem,
    plan: LaunchPlan,
    quarantine: Quarantine | None,
) -> Fault:
    """The fault behind an answer; what is harmful is kept, and the reason says where."""
    fault = Fault.of(answer)
    if not fault.harmful or quarantine is None:
        return fault
    kept = quarantine.put(candidate, problem, plan, fault)
    return dataclasses.replace(fault, reason=f"{fault.reason}; {kept}")


def digest(candidate: Candidate, plan: LaunchPlan) -> str:
    """What tells one launched configuration from another, in 16 hexadecimal digits."""
    whole = hashlib.sha256(repr(plan).encode())
    for kernel in candidate.kernels or ():
        whole.update(hashlib.sha256(kernel.cubin).digest())
    return whole.hexdigest()[:16]

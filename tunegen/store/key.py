# SPDX-License-Identifier: Apache-2.0
"""What a study is named by."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tunegen.model import DeviceIdentity, Evidence, Operation, Problem, Space

# Digits of the digest in a name: enough that no two studies of one store ever share them.
_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyKey:
    """What two trials must have in common to be trials of one study.

    ``device`` is the class of the GPU that runs them. ``policy`` is the way of measuring,
    ``tolerance`` the largest error that counts as right (None where nothing is checked),
    ``toolkit`` the version of NVRTC ("" where nothing is compiled). ``spaces`` are those of the
    specs that take part, by the specs' names.
    """

    operation: Operation
    problem: Problem
    arch: str
    device: DeviceIdentity
    evidence: Evidence
    policy: str
    tolerance: float | None
    toolkit: str
    spaces: Mapping[str, Space]

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the space, as JSON has it: what makes trials comparable."""
        return {
            "operation": self.operation.name,
            "problem": self.operation.text(self.problem),
            "dtype": self.problem.dtype,
            "layout": self.problem.layout,
            "attributes": self.operation.named(dict(self.problem.attributes)),
            "arch": self.arch,
            "device": asdict(self.device),
            "evidence": self.evidence,
            "policy": self.policy,
            "tolerance": self.tolerance,
            "toolkit": self.toolkit,
        }

    @property
    def family(self) -> str:
        """Digest of the facts. Studies of one family differ in their space, and share trials."""
        return family_of(self.facts)

    @property
    def space(self) -> str:
        """Digest of the joint space of all specs."""
        return _digest({name: space.digest for name, space in self.spaces.items()})

    def name(self, generation: int) -> str:
        """``matmul-4096x4096x4096-fp32-nn-nvidia-h200-0123456789ab``, with ``-2`` and so on for
        the generations that ``--fresh`` begins."""
        return study_name(self.facts, self.space, generation)


def study_name(facts: Mapping[str, Any], space: str, generation: int) -> str:
    """The name of the study with these facts, that digest of its space and that generation."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"]["name"].lower()).strip("-")
    words = [
        facts["operation"], facts["problem"], facts["dtype"], facts["layout"], device,
        _digest([family_of(facts), space])[:_DIGITS],
    ]  # fmt: skip
    if generation > 1:
        words.append(str(generation))
    return "-".join(word for word in words if word)


def family_of(facts: Mapping[str, Any]) -> str:
    """Digest of the facts of a key."""
    return _digest(facts)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

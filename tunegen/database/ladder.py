# SPDX-License-Identifier: Apache-2.0
"""The look-up ladder: which record answers for a problem on a device, and by what right.

==========  =====================================================================================
exact       this device class, this problem
range       this device class, a problem whose range covers it
capability  the same compute capability, another device class
default     no record answers: the spec's default configuration does
==========  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from tunegen.database.checks import faults, instant
from tunegen.database.ranges import RANGE_FACTOR, Relation, relate
from tunegen.model import (
    SM_COUNT,
    DeviceClass,
    DeviceIdentity,
    Evidence,
    Limit,
    Operation,
    Problem,
    TuningRecord,
)

Rung = Literal["exact", "range", "capability", "default"]
_RUNGS: tuple[Rung, ...] = ("exact", "range", "capability")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that covers the problem but may not answer, and why."""

    record: TuningRecord
    why: str


@dataclass(frozen=True, slots=True)
class Match:
    """The answer of a look-up. ``record`` is None on the rung "default", and only there.

    ``reason`` says in one sentence by what right it answers; ``skipped`` lists the records that
    would have come before it, with the reason why they may not answer. ``layer`` is where the
    record is from, "user" or "shipped".
    """

    record: TuningRecord | None
    rung: Rung
    reason: str
    skipped: tuple[Skipped, ...] = ()
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and the layer that it was found in."""

    layer: str
    record: TuningRecord


@dataclass(frozen=True, slots=True)
class Question:
    """What is looked up. ``usable`` returns why a record cannot be used now, or "".

    Where ``policy`` or ``evidence`` are given, only records with these are in play.
    """

    operation: Operation
    problem: Problem
    device: DeviceClass
    usable: Callable[[TuningRecord], str]
    policy: str = ""
    evidence: Evidence | None = None

    def related(self, entries: Iterable[Entry]) -> list[tuple[Entry, Relation]]:
        """The entries in play whose problem is of the same class as the one asked for."""
        growing = self.operation.growing_attributes(self.problem)
        found = []
        for entry in entries:
            record = entry.record
            if self.policy not in ("", record.measurement.policy):
                continue
            if self.evidence not in (None, record.evidence):
                continue
            if relation := relate(self.operation, growing, record.problem, self.problem):
                found.append((entry, relation))
        return found


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An entry that covers the problem; the lowest ``rank`` of a rung is asked first."""

    entry: Entry
    rung: Rung
    rank: tuple[Any, ...]

    @property
    def record(self) -> TuningRecord:
        return self.entry.record


def climb(question: Question, entries: Sequence[Entry]) -> Match:
    """The answer from the records of the device's capability, in the order of their layers.

    On a rung, measured comes before predicted, then the nearest problem, then the lowest time.
    Times of different policies do not compare: where several are found, that of the newest record
    decides, which is how the user last chose to measure.
    """
    related = question.related(entries)
    candidates = [_candidate(question, *pair) for pair in related if pair[1].covers]
    skipped: list[Skipped] = []
    for rung in _RUNGS:
        on_rung = sorted((c for c in candidates if c.rung == rung), key=lambda c: c.rank)
        for _, equals in groupby(on_rung, key=lambda c: c.rank):
            usable = []
            for candidate in equals:
                if why := "; ".join(_objections(question, candidate.record)):
                    skipped.append(Skipped(candidate.record, why))
                else:
                    usable.append(candidate)
            if usable:
                return _answer(question, usable, skipped)
    reason = _why_default(question, related, len(entries), skipped)
    return Match(None, "default", reason, tuple(skipped))


def report_others(match: Match, question: Question, entries: Iterable[Entry]) -> Match:
    """A match on the rung "default", with the records of other capabilities that cover the
    problem listed among the skipped ones."""
    others = [entry.record for entry, relation in question.related(entries) if relation.covers]
    skipped = tuple(
        Skipped(record, "; ".join(_objections(question, record)) or "filed under the wrong arch")
        for record in others
    )
    reason = match.reason
    if others:
        reason += f"; {len(others)} filed under other capabilities do not count"
    return replace(match, reason=reason, skipped=match.skipped + skipped)


def describe(operation: Operation, problem: Problem) -> str:
    """A problem in the words of the command line: ``matmul fp32 nn 64x64x64 beta=1``."""
    special = operation.special_words(problem)
    words = (operation.name, problem.dtype, problem.layout, operation.text(problem), *special)
    return " ".join(word for word in words if word)


def _candidate(question: Question, entry: Entry, relation: Relation) -> _Candidate:
    record, here = entry.record, DeviceIdentity.of(question.device)
    rank = (record.evidence != "measured", relation.distance)
    if record.arch == question.device.arch and record.device == here:
        return _Candidate(entry, "exact" if relation.same else "range", rank)
    # Times of different devices do not compare: the one with the likest number of SMs is first.
    there = record.device
    away = abs(math.log2(max(1, there.sm_count) / max(1, here.sm_count)))
    device = (there.name, there.sm_count, there.l2_bytes, there.memory_clock_mhz,
              there.shared_bytes_per_block)  # fmt: skip
    return _Candidate(entry, "capability", (*rank, away, device))


def _objections(question: Question, record: TuningRecord) -> Iterator[str]:
    """Why a record that covers the problem may not answer. The costly question comes last, and
    only where nothing else speaks against the record."""
    if found := faults(record):
        yield from found
        return
    device, objected = question.device, False
    for why in (*_arch_objections(record, device), *_limit_objections(question, record)):
        objected = True
        yield why
    if not objected and (why := question.usable(record)):
        yield why


def _arch_objections(record: TuningRecord, device: DeviceClass) -> Iterator[str]:
    # Stricter than what a device would load: times of another capability say nothing here.
    if record.arch != device.arch:
        yield f"tuned and compiled for {record.target}, not for {device.arch}"
    for image in record.images:
        if image.shared_bytes > device.shared_bytes_per_block:
            yield (
                f"{image.name} needs {image.shared_bytes} bytes of shared memory per block, "
                f"{device.name} has {device.shared_bytes_per_block}"
            )


def _limit_objections(question: Question, record: TuningRecord) -> Iterator[str]:
    names = {**question.problem.names, SM_COUNT: question.device.sm_count}
    operands = {array.name for array in question.operation.arrays(question.problem)}
    for limit in record.limits:
        # Where an operand lies is not known before the launch, which checks that limit. A size of
        # the same name comes first: matmul has a batch B beside its operand B.
        if limit.quantity in operands and limit.quantity not in names:
            continue
        if not limit.holds(names):
            yield f"it needs {limit}, {_actual(limit, names)}"


def _actual(limit: Limit, names: dict[str, int]) -> str:
    if limit.quantity in names:
        return f"here it is {names[limit.quantity]}"
    return "which this problem does not have"


def _answer(question: Question, usable: list[_Candidate], skipped: list[Skipped]) -> Match:
    # The same winner in two layers: the first layer's is the one that counts.
    distinct: dict[Any, _Candidate] = {}
    for candidate in usable:
        distinct.setdefault(candidate.record.identity, candidate)
    newest = max(distinct.values(), key=lambda c: (_moment(c.record), c.record.identity))
    policy = newest.record.measurement.policy
    comparable = [c for c in distinct.values() if c.record.measurement.policy == policy]
    best = min(comparable, key=lambda c: (c.record.measurement.median_us, c.record.identity))
    reason = f"{best.record.evidence} {_right(question, best)}, policy {policy}"
    if others := len(distinct) - len(comparable):
        reason += f" ({others} under another policy not compared)"
    return Match(best.record, best.rung, reason, tuple(skipped), best.entry.layer)


def _moment(record: TuningRecord) -> float:
    moment = instant(record.created)
    assert moment is not None  # a record with faults is not usable
    return moment.timestamp()


def _right(question: Question, candidate: _Candidate) -> str:
    record = candidate.record
    tuned = describe(question.operation, record.problem)
    if candidate.rung == "exact":
        return f"on {record.device.name} for this problem"
    if candidate.rung == "range":
        return (
            f"on {record.device.name} for {tuned}, each size within a factor of {RANGE_FACTOR:g}"
        )
    here = DeviceIdentity.of(question.device)
    return (
        f"on another device of {record.arch} for {tuned}: {record.device.name}, "
        f"not {here.name} ({_differences(record.device, here)})"
    )


def _differences(there: DeviceIdentity, here: DeviceIdentity) -> str:
    names = ("sm_count", "shared_bytes_per_block", "l2_bytes", "memory_clock_mhz")
    pairs = ((name, getattr(there, name), getattr(here, name)) for name in names)
    text = ", ".join(f"{name} {left} for {right}" for name, left, right in pairs if left != right)
    return text or "else alike"


def _why_default(
    question: Question,
    related: list[tuple[Entry, Relation]],
    stored: int,
    skipped: list[Skipped],
) -> str:
    asked = describe(question.operation, question.problem)
    arch = question.device.arch
    if skipped:
        return f"no usable record covers {asked}: {len(skipped)} skipped, first: {skipped[0].why}"
    if related:
        entry, relation = min(related, key=lambda pair: pair[1].distance)
        nearest = question.operation.text(entry.record.problem)
        return (
            f"no record for {arch} covers {asked}: in the nearest, {nearest}, {relation}, "
            f"more than {RANGE_FACTOR:g}"
        )
    if stored:
        return f"none of {stored} records for {arch} is of the class of {asked}"
    return f"no record of {question.operation.name} for {arch}"

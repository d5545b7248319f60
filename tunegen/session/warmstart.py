# SPDX-License-Identifier: Apache-2.0
"""What a search tries first because it was fast elsewhere: on another problem, another device.

Winners of records and the fastest trials of other studies, all measured. How near they are is a
sum in doublings of a size: each size and its counterpart differ by |log2| of their ratio, and what
cannot be scaled counts as so many doublings (see :func:`distance`). Neither another operation, nor
another element size, nor another family of capabilities is near at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunegen import search
from tunegen.database import Database, describe, faults
from tunegen.errors import DatabaseError, UsageError
from tunegen.model import (
    ARCHS,
    DTYPE_BYTES,
    Config,
    DeviceIdentity,
    Operation,
    Problem,
    Trial,
    TuningRecord,
    capability,
)
from tunegen.session.resolve import Request
from tunegen.store import Study

# At most so many points over all specs, and one in so many trials: whatever is known, most of a
# search is what it would be without.
MOST_POINTS, _ONE_IN = 6, 4

# Parameters in which two of them differ at least: near ones would say the same twice. On recorded
# spaces, winners of a sibling GPU so far apart saved most of the way to 99 % of the optimum.
_APART = 3

# In doublings of a size: a layout changes which operand is read along its rows, a device how much
# work fills it; dtypes of one size differ in instructions alone; and each further attribute.
_OTHER_DEVICE, _OTHER_LAYOUT, _OTHER_DTYPE, _OTHER_ATTRIBUTE = 2.0, 2.0, 1.0, 1.0

# Studies that are looked into, and how many points of one are taken: of so many of its fastest
# trials, those within this factor of the fastest.
_STUDIES, _POINTS_EACH, _FASTEST, _NEAR = 8, 2, 32, 1.1


@dataclass(frozen=True, slots=True)
class KnownPoint:
    """A configuration that was fast elsewhere. ``origin`` is "record" or "study"; ``problem`` and
    ``device`` say where it was measured, ``distance`` how far that is in doublings of a size."""

    spec: str
    config: Config
    origin: search.Origin
    problem: str
    device: str
    distance: float

    @property
    def first(self) -> search.FirstPoint:
        return search.FirstPoint(self.spec, self.config, self.origin)


@dataclass(frozen=True, slots=True)
class _Known:
    """A point with what decides between several: the lowest ``rank`` comes first, ``own`` is of
    this very problem and device, ``study`` is where a trial is from."""

    point: KnownPoint
    rank: tuple[Any, ...]
    own: bool = False
    study: int | None = None


def warm_points(
    database: Database,
    wanted: Request,
    contenders: Sequence[search.Contender],
    trials: int,
    *,
    study: Study | None = None,
    past: Sequence[Trial] = (),
    on_note: Callable[[str], None] = lambda text: None,
) -> tuple[KnownPoint, ...]:
    """What a search of so many ``trials`` should try first, the nearest first: at most
    ``MOST_POINTS`` and a quarter of the trials, each valid here and no default. Parameters that
    their spec has got since have the values of before.

    What a record says of this very problem and device class is always among them. The others are
    taken by distance where they differ from all before them in three parameters (in all that the
    space has, where those are fewer); of two as near, records come before trials, and the one with
    the higher ratio to the vendor's library before the other.

    ``study`` is that of the tune, in whose storage others are looked for, ``past`` its trials: a
    winner that came of them is not news. The same records, studies and past give the same points.
    """
    found = [*_of_records(database, wanted, past, on_note)]
    if study is not None:
        found += _of_studies(study, wanted)
    return _choose(found, contenders, min(MOST_POINTS, trials // _ONE_IN))


def distance(wanted: Request, problem: Problem, device: DeviceIdentity) -> float | None:
    """How far a problem on a device class is from the one wanted; None where nothing can be said.

    |log2| of the ratio of every size, summed, and 2 for another device class, 2 for another
    layout, 1 for another dtype of the same size, 1 for each other attribute (beta, alignment,
    epilogue) that differs. Leading dimensions follow the sizes and do not count.
    """
    operation, asked = wanted.operation, wanted.problem
    there, here = dict(problem.sizes), dict(asked.sizes)
    if problem.operation != operation.name or there.keys() != here.keys():
        return None
    if problem.layout not in operation.layouts or problem.dtype not in operation.dtypes:
        return None
    if DTYPE_BYTES[problem.dtype] != asked.element_bytes:
        return None
    sizes = sum(abs(math.log2(max(1, there[name]) / max(1, here[name]))) for name in here)
    return (
        sizes
        + _OTHER_DEVICE * (device != DeviceIdentity.of(wanted.device))
        + _OTHER_LAYOUT * (problem.layout != asked.layout)
        + _OTHER_DTYPE * (problem.dtype != asked.dtype)
        + _OTHER_ATTRIBUTE * _differing_attributes(operation, problem, asked)
    )


def _differing_attributes(operation: Operation, left: Problem, right: Problem) -> int:
    growing = operation.growing_attributes(right)
    there, here = (dict(operation.complete(p).attributes) for p in (left, right))
    return sum(there.get(name) != here[name] for name in here if name not in growing)


def _of_records(
    database: Database,
    wanted: Request,
    past: Sequence[Trial],
    on_note: Callable[[str], None],
) -> Iterator[_Known]:
    # What the search itself found: a run that goes on would otherwise begin from another list.
    ours = {(trial.spec, trial.config) for trial in past if trial.origin != "record"}
    for record in _records(database, wanted, on_note):
        away = distance(wanted, record.problem, record.device)
        if away is None or record.evidence != "measured" or faults(record):
            continue
        same = _same(wanted, record.problem)
        own = same and record.device == DeviceIdentity.of(wanted.device)
        config = Config(record.config)
        if own and (record.spec, config) in ours:
            continue
        text = describe(wanted.operation, wanted.operation.complete(record.problem))
        point = KnownPoint(record.spec, config, "record", text, record.device.name, away)
        ratio = record.baseline_ratio or 0.0
        yield _Known(point, (not own, not same, away, 0, -ratio, record.identity), own=own)


def _records(
    database: Database, wanted: Request, on_note: Callable[[str], None]
) -> Iterator[TuningRecord]:
    """Those of the operation in the family of the device's capability."""
    for arch in ARCHS:
        if _family(arch) != _family(wanted.arch):
            continue
        try:
            found = [record for _, record in database.records(arch, wanted.operation.name)]
        except DatabaseError as error:
            on_note(f"no winner of {arch} is tried first: {error}")
            continue
        yield from found


def _family(arch: str) -> int:
    """8 for sm_80 to sm_89: capabilities whose kernels differ in sizes more than in kind."""
    return capability(arch) // 10


def _of_studies(study: Study, wanted: Request) -> Iterator[_Known]:
    here = DeviceIdentity.of(wanted.device)
    near: list[tuple[float, int, Problem, DeviceIdentity]] = []
    for study_id, facts in study.others().items():
        if facts["operation"] != wanted.operation.name or facts["evidence"] != "measured":
            continue
        if _family(facts["arch"]) != _family(wanted.arch):
            continue
        device = DeviceIdentity(**facts["device"])
        try:
            problem = wanted.operation.problem(
                facts["problem"] or None,  # of an operation without axes
                dtype=facts["dtype"],
                layout=facts["layout"],
                **facts["attributes"],
            )
        except UsageError:  # a problem that today's operation does not have
            continue
        away = distance(wanted, problem, device)
        # Its own earlier trials are either its past or, by --fresh, to be left alone.
        if away is not None and not (_same(wanted, problem) and device == here):
            near.append((away, study_id, problem, device))
    for away, study_id, problem, device in sorted(near, key=lambda each: each[:2])[:_STUDIES]:
        text = describe(wanted.operation, problem)
        fastest = study.fastest_of(study_id, _FASTEST)
        for nth, trial in enumerate(fastest, 1):
            if trial.outcome.median_us > _NEAR * fastest[0].outcome.median_us:
                break
            point = KnownPoint(trial.spec, trial.config, "study", text, device.name, away)
            rank = (True, not _same(wanted, problem), away, nth, 0.0, (str(study_id),))
            yield _Known(point, rank, study=study_id)


def _same(wanted: Request, problem: Problem) -> bool:
    complete = wanted.operation.complete
    parts = [
        (p.dtype, p.layout, dict(p.sizes), dict(p.attributes))
        for p in (complete(problem), complete(wanted.problem))
    ]
    return parts[0] == parts[1]


def _choose(
    known: Iterable[_Known], contenders: Sequence[search.Contender], most: int
) -> tuple[KnownPoint, ...]:
    by_spec = {contender.spec.name: contender for contender in contenders}
    taken: dict[str, list[int]] = {name: [] for name in by_spec}
    of_study = Counter[int]()
    chosen: list[KnownPoint] = []
    for each in sorted(known, key=lambda each: each.rank):
        if len(chosen) == most:
            break
        point = each.point
        contender = by_spec.get(point.spec)
        if contender is None or (each.study is not None and of_study[each.study] == _POINTS_EACH):
            continue
        table = contender.table
        row = table.row(table.space.completed(point.config))
        if row is None or row == table.row(contender.default):
            continue
        gaps = [_gap(contender, row, other) for other in taken[point.spec]]
        if min(gaps, default=_APART) >= (1 if each.own else _least_gap(contender)):
            taken[point.spec].append(row)
            chosen.append(replace(point, config=table.config(row)))
            if each.study is not None:
                of_study[each.study] += 1
    return tuple(chosen)


def _gap(contender: search.Contender, left: int, right: int) -> int:
    """In how many parameters two rows differ."""
    indices = contender.table.indices
    return int(np.count_nonzero(indices[:, left] != indices[:, right]))


def _least_gap(contender: search.Contender) -> int:
    free = sum(len(parameter.values) > 1 for parameter in contender.table.space.parameters)
    return min(_APART, free)

# SPDX-License-Identifier: Apache-2.0
"""The matrix products that records and contest are about, and what they must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _tree

from tunegen import kernels, session
from tunegen.errors import UsageError
from tunegen.model import Problem
from tunegen.session.shapes import read_shapes

FILE = _tree.ROOT / "tests" / "data" / "shapes.json"

# Those that are tuned in the other layouts as well.
OTHER_LAYOUTS = ("S4", "P2", "P3", "D1", "O2")

# What matters most first. "batched" is listed too, and only done where it is asked for.
GROUPS = ("prefill", "square", "mid-M", "decode", "odd", "skinny")

# A ratio is the time of a rival over ours: above 1, ours is faster. "Not clearly slower" allows
# for the spread of a measurement.
NOT_SLOWER_HIGH, NOT_SLOWER_MEDIAN = 1.0, 0.985

# Of results in fp16, and of other layouts, against bf16 nt.
FP16_MARGIN, LAYOUT_MARGIN = 0.02, 0.03

ERROR_FACTOR = 1.05

# More names than this are counted.
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Goal:
    """What some shapes must hold against a rival: the least geometric mean of their ratios,
    whether none may be clearly slower, and the least ratio of single ones."""

    shapes: tuple[str, ...]
    least: float
    none_slower: bool = True
    each: tuple[tuple[str, float], ...] = ()
    rival: str = "vendor"


_LINES = (
    Goal(("S4", "S5", "P1", "P2", "P3", "P5", "P6", "P9"), 1.015),
    Goal(("S1", "S2", "S3", "P8"), 1.12),
    Goal(("D1", "D3", "D4", "D6"), 1.12),
    Goal(("T1", "T2", "T3", "T5", "T6", "T7"), 1.15),
    Goal(("O1", "O2", "O4", "O5"), 2.0, none_slower=False, each=(("O2", 4.0),)),
    Goal(("K1", "K3"), 1.08),
)
_ALL = tuple(name for line in _LINES for name in line.shapes)
GOALS = (
    *_LINES,
    Goal(_ALL, 1.20, none_slower=False),
    Goal(_ALL, 1.14, none_slower=False, rival="cublaslt"),
)


@dataclass(frozen=True, slots=True)
class Named:
    """A problem of the list."""

    name: str
    group: str
    problem: Problem

    @property
    def key(self) -> str:
        """``S4 bf16 nt``"""
        return f"{self.name} {self.problem.dtype} {self.problem.layout}"


def wanted(
    *,
    dtype: str = "bf16",
    layout: str = "nt",
    groups: Sequence[str] = GROUPS,
    only: Sequence[str] = (),
    file: Path = FILE,
) -> list[Named]:
    """The problems asked for, group by group; ``only`` names single ones, of any group.

    Raises :class:`UsageError` for what the list does not have.
    """
    listed = read_shapes("matmul", file, dtype=dtype, layout=layout)
    operation = kernels.operation("matmul")
    known = {shape.name: shape.group for shape in listed}
    for what, asked, there in (
        ("group", groups, list(dict.fromkeys(known.values()))), ("shape", only, list(known)),
    ):  # fmt: skip
        if lacking := [word for word in asked if word not in there]:
            raise UsageError(f"no {what} {', '.join(lacking)}: there are {', '.join(there)}")
    if not only and layout != "nt":
        only = [name for name in OTHER_LAYOUTS if known[name] in groups]
    found = [
        Named(s.name, s.group, operation.problem(s.sizes, dtype=s.dtype, layout=s.layout))
        for s in listed
        if (s.name in only if only else s.group in groups)
    ]
    order = [*groups, *dict.fromkeys(known.values())]
    return sorted(found, key=lambda shape: order.index(shape.group))


def words(text: str) -> list[str]:
    """``S4,P2`` or ``S4 P2`` as a list."""
    return text.replace(",", " ").split()


# --- verdicts ------------------------------------------------------------------------------------

# Rows are as shape_contest.py writes them, by key.
Rows = Mapping[str, Mapping[str, Any]]


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio(rows: Rows, key: str, rival: str) -> Mapping[str, float] | None:
    """The ratio of a rival with its interval, None where there is none."""
    return rows.get(key, {}).get("rivals", {}).get(rival, {}).get("ratio")


def clearly_slower(found: Mapping[str, float]) -> bool:
    return found["high"] < NOT_SLOWER_HIGH or found["median"] < NOT_SLOWER_MEDIAN


@dataclass(frozen=True, slots=True)
class Judged:
    """A line of the verdict. ``passed`` is None where measurements are missing."""

    passed: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "PASS", False: "FAIL", None: "OPEN"}[self.passed]
        return f"{word} {self.text}"


def verdicts(rows: Rows) -> Iterator[Judged]:
    """Every line that the rows have something to say about."""
    for dtype, factor in (("bf16", 1.0), ("fp16", 1 - FP16_MARGIN)):
        for goal in GOALS:
            if judged := _goal(rows, goal, dtype, factor):
                yield judged
    yield from _layouts(rows)
    yield from _errors(rows)


def _goal(rows: Rows, goal: Goal, dtype: str, factor: float) -> Judged | None:
    suffix = f"{dtype} nt"
    found = {name: ratio(rows, f"{name} {suffix}", goal.rival) for name in goal.shapes}
    there = {name: value for name, value in found.items() if value is not None}
    if not there:
        return None
    least = goal.least * factor
    mean = geomean([value["median"] for value in there.values()])
    faults = [
        f"{name} is slower: {value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
        for name, value in there.items()
        if goal.none_slower and clearly_slower(value)
    ]
    faults += [
        f"{name} {there[name]['median']:.3f} < {single * factor:.3g}"
        for name, single in goal.each
        if name in there and there[name]["median"] < single * factor
    ]
    lacking = [name for name in goal.shapes if name not in there]
    names = "all" if goal.shapes == _ALL else " ".join(goal.shapes)
    text = f"{suffix} {names} against {RIVALS[goal.rival]}: geomean {mean:.3f} (>= {least:.3f})"
    text += "".join(f"; {fault}" for fault in faults)
    if lacking:
        text += f"; not measured: {_named(lacking)}"
    passed = mean >= least and not faults
    return Judged(False if faults else None if lacking else passed, text)


def _named(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} shapes"


def _layouts(rows: Rows) -> Iterator[Judged]:
    """The other layouts' ratios to cuBLAS against those of nt."""
    for layout in ("nn", "tn"):
        quotients = {}
        for name in OTHER_LAYOUTS:
            own = ratio(rows, f"{name} bf16 {layout}", "vendor")
            nt = ratio(rows, f"{name} bf16 nt", "vendor")
            if own and nt:
                quotients[name] = own["median"] / nt["median"]
        if not quotients:
            continue
        lacking = [name for name in OTHER_LAYOUTS if name not in quotients]
        worse = [name for name, value in quotients.items() if value < 1 - LAYOUT_MARGIN]
        each = " ".join(f"{name} {value:.3f}" for name, value in quotients.items())
        text = f"bf16 {layout} over nt's ratios (>= {1 - LAYOUT_MARGIN:.2f}): {each}"
        text += f"; not measured: {' '.join(lacking)}" if lacking else ""
        yield Judged(False if worse else None if lacking else True, text)


def _errors(rows: Rows) -> Iterator[Judged]:
    """Errors against fp64 over cuBLAS's."""
    found = {
        k: row["error_ratio"] for k, row in rows.items() if row.get("error_ratio") is not None
    }
    if not found:
        return
    worst = max(found, key=lambda key: found[key])
    faults = [f"{key} {value:.3f}" for key, value in found.items() if value > ERROR_FACTOR]
    lacking = [key for key in rows if key not in found]
    text = (
        f"error over cuBLAS's (<= {ERROR_FACTOR}): {len(found)} shapes, worst {worst} "
        f"{found[worst]:.3f}"
    )
    text += f"; above: {', '.join(faults)}" if faults else ""
    text += f"; not known: {', '.join(lacking)}" if lacking else ""
    yield Judged(False if faults else None if lacking else True, text)


RIVALS = {"vendor": "cuBLAS", "cublaslt": "the best of cublasLt", "triton": "Triton"}


def request(named: Named, device: Any) -> session.Request:
    """The tune of a problem on a device."""
    operation = kernels.operation("matmul")
    return session.Request(operation, named.problem, device, kernels.specs_of("matmul"))

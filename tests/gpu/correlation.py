# SPDX-License-Identifier: Apache-2.0
"""How well the performance model orders configurations: its times beside measured ones.

``python tests/gpu/correlation.py [--problem 'matmul 4096x4096x4096 fp32 nn'] [--configs 200]``
draws random valid configurations, has the GPU's worker check and time each as in a tune, and
prints Spearman's rank correlation of both levels of the model with the times. The figures go to
``correlation.json`` beside this file; ``--readme`` measures nothing and writes the table of that
file into the README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_card import Card, prepared
from acceptance_common import ROOT, environment

from tunegen import __version__, compiler, perfmodel
from tunegen.model import Candidate
from tunegen.runner.evaluator import try_seconds
from tunegen.runner.protocol import Tried, Try
from tunegen.runner.quarantine import Fault

FIGURES = Path(__file__).with_name("correlation.json")
README = ROOT / "README.md"
BEGIN, END = "<!-- correlation: begin -->", "<!-- correlation: end -->"

PROBLEMS = ("matmul 4096x4096x4096 fp32 nn",)
CONFIGS = 200
SEED = 0

# Enough of timing for an order: all but the slowest are timed so long, those that take more than
# ten times as long as the best are timed once or twice.
BUDGET_MS = 8.0
DROP = 10.0

# For each problem, so that a first run stays below a minute.
SECONDS = 55.0

AIMS = {"formula": 0.60, "compiled": 0.75}


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    if options.readme:
        write_readme(options.readme_file, json.loads(options.out.read_text()))
        return 0
    os.environ.update(environment())
    problems, about = [], {}
    for text in options.problem or PROBLEMS:
        found, about = measure(text, options.configs, options.seconds)
        problems.append(found)
        print(summary(found), flush=True)
        write(options.out, {**about, "problems": problems})
    print(table({**about, "problems": problems}), flush=True)
    reached = (correlations(p)[level] >= aim for p in problems for level, aim in AIMS.items())
    return 0 if all(reached) else 1


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--problem", action="append", metavar="'OP SIZES DTYPE [LAYOUT]'",
        help=f"may be repeated, as in --problem 'axpy 2^24 fp32'; by default {PROBLEMS[0]}",
    )  # fmt: skip
    parser.add_argument("--configs", type=int, default=CONFIGS, metavar="N")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each problem, at most")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="FILE")
    parser.add_argument("--readme", action="store_true", help="from --out into the README")
    parser.add_argument("--readme-file", type=Path, default=README, help=argparse.SUPPRESS)
    return parser.parse_args(words)


# --- measuring -----------------------------------------------------------------------------------


def measure(text: str, count: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random configurations of a problem with the model's times and the GPU's, and on what."""
    operation, sizes, dtype, *layout = text.split()
    started = time.monotonic()
    with prepared(operation, sizes, dtype=dtype, layout=layout[0] if layout else None) as card:
        found = _draw(card, count, started + seconds)
        about = {
            "device": card.device.name,
            "driver": card.opened.driver,
            "nvrtc": compiler.nvrtc_version(),
            "tunegen": __version__,
            "model": perfmodel.POLICY,
            "calibrated": card.calibrated,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        return {**found, "seconds": round(time.monotonic() - started, 1)}, about


def _draw(card: Card, count: int, until: float) -> dict[str, Any]:
    """Times of ``count`` configurations, in the order of a random draw of all valid ones."""
    table = card.spec.space(card.problem, card.device).enumerate()
    default = card.spec.default(card.problem, card.device)
    names = card.spec.space(card.problem, card.device).names
    points: list[list[Any]] = []
    kinds: dict[str, int] = {}
    trials = _Trials(card)
    # The default warms up driver and card, and says what is fast.
    _, first = next(iter(card.built([default])))
    if first.failure is None:
        trials.time(Candidate(card.spec, default, first.kernels))
    rows = np.random.default_rng(SEED).permutation(len(table))
    for config, built in card.built(table[int(row)] for row in rows):
        if len(points) >= count or time.monotonic() > until:
            break
        candidate = Candidate(card.spec, config, built.kernels)
        kind, us = (built.failure.kind, 0.0) if built.failure else trials.time(candidate)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind == "measured":
            points.append([*_predicted(card, candidate), us, *(config[name] for name in names)])
    return {
        "problem": card.text,
        "spec": card.spec.name,
        "seed": SEED,
        "valid": len(table),
        "outcomes": dict(sorted(kinds.items())),
        "columns": ["formula_us", "compiled_us", "measured_us", *names],
        "points": points,
    }


class _Trials:
    """Trials as a tune makes them, with less timing and for slower kernels."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._best_us: float | None = None

    def time(self, candidate: Candidate) -> tuple[str, float]:
        """The kind of outcome, and the microseconds of a success."""
        card = self._card
        request = Try(
            card.executable(candidate), card.spec.tolerance(card.problem), "burst",
            best_us=self._best_us, drop=DROP, budget_ms=BUDGET_MS,
        )  # fmt: skip
        answer = card.station.ask(request, try_seconds(self._best_us))
        if not isinstance(answer, Tried):
            return Fault.of(answer).kind, 0.0
        outcome = answer.outcome
        if not outcome.ok:
            return outcome.kind, 0.0
        self._best_us = min(outcome.median_us, self._best_us or outcome.median_us)
        return outcome.kind, round(outcome.median_us, 3)


def _predicted(card: Card, candidate: Candidate) -> tuple[float, float]:
    """Microseconds by formula alone, and with what the compiler says of the main kernel."""
    assert candidate.kernels is not None
    work = card.spec.work(candidate.config, card.problem, card.rated)
    main_kernel = candidate.kernels[0].resources
    return (
        round(perfmodel.predict_us(work, card.rated), 3),
        round(perfmodel.predict_us(work, card.rated, main_kernel), 3),
    )


def write(path: Path, figures: Mapping[str, Any]) -> None:
    """The figures as JSON, one configuration a line."""
    path.write_text("".join(_lines(figures)))


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    head = {key: value for key, value in figures.items() if key != "problems"}
    yield json.dumps(head, indent=1)[:-2] + ',\n "problems": ['
    for position, problem in enumerate(figures["problems"]):
        about = {key: value for key, value in problem.items() if key != "points"}
        points = ",\n".join(f"   {json.dumps(point)}" for point in problem["points"])
        yield ("," if position else "") + "\n  " + json.dumps(about)[:-1]
        yield f', "points": [\n{points}\n  ]}}'
    yield "\n ]\n}\n"


# --- what it comes to ----------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> np.ndarray:
    """The rank of each value, from 1; equal ones share the mean of theirs."""
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one of them does not vary at all."""
    a, b = ranks(one), ranks(other)
    if len(a) < 2 or not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def correlations(problem: Mapping[str, Any]) -> dict[str, float]:
    """Of both levels of the model, from the points."""
    measured = [point[2] for point in problem["points"]]
    return {
        level: spearman([point[column] for point in problem["points"]], measured)
        for column, level in enumerate(AIMS)
    }


def summary(problem: Mapping[str, Any]) -> str:
    found = correlations(problem)
    times = sorted(point[2] for point in problem["points"]) or [0.0]
    outcomes = ", ".join(f"{count} {kind}" for kind, count in problem["outcomes"].items())
    return (
        f"{problem['problem']}, {problem['spec']}: Spearman formula {found['formula']:.3f} "
        f"(aim {AIMS['formula']:.2f}), compiled {found['compiled']:.3f} "
        f"(aim {AIMS['compiled']:.2f}); {outcomes}, of {problem['valid']:,}; "
        f"{times[0]:.1f} to {times[-1]:.1f} us; {problem['seconds']:.1f} s"
    )


def table(figures: Mapping[str, Any]) -> str:
    """The table of the README."""
    rates = "its calibrated rates" if figures["calibrated"] else "the datasheet's rates"
    lines = [
        "| problem | configs | formula only | compiled | fastest to slowest |",
        "|---|---|---|---|---|",
    ]
    for problem in figures["problems"]:
        found = correlations(problem)
        times = [point[2] for point in problem["points"]]
        lines.append(
            f"| {problem['problem']}, {problem['spec']} | {len(times)} | {found['formula']:.3f} "
            f"| {found['compiled']:.3f} | {_us(min(times))} to {_us(max(times))} |"
        )
    day = figures["created"][:10]
    lines += [
        "",
        "Spearman's rank correlation of the model's times with measured ones, over random valid",
        f"configurations that compile without spills: {figures['device']}, driver "
        f"{figures['driver']},",
        f"NVRTC {figures['nvrtc']}, {figures['model']} with {rates}, {day}.",
        "`tests/gpu/correlation.py` measures it.",
    ]
    return "\n".join(lines)


def _us(us: float) -> str:
    return f"{us:.0f} us" if us < 1e4 else f"{us / 1e3:.0f} ms"


def block(figures: Mapping[str, Any]) -> str:
    """What stands in the README from marker to marker."""
    return f"{BEGIN}\n{table(figures)}\n{END}"


def write_readme(path: Path, figures: Mapping[str, Any]) -> None:
    """Put the table between the markers. Exits with a message where they are not there."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{path} needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    path.write_text(before + block(figures) + rest.split(END)[1])


if __name__ == "__main__":
    sys.exit(main())

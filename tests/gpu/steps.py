# SPDX-License-Identifier: Apache-2.0
"""What single parameters are worth, by the trials of studies.

::

    python tests/gpu/steps.py --storage sqlite:///studies.db --only 'matmul.*bf16' --spec wgmma

Pairs of configurations of one study are compared that differ in one parameter alone; the faster
one is within 25 % of the study's best, lest what matters to nobody counts. A gain is the geometric
mean, over pairs, of the time with the first value over that with the second: above 1 the second is
faster. Markdown is printed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import _tree  # noqa: F401 (makes tunegen importable)

from tunegen import session
from tunegen.model import Trial

NEAR = 1.25
FEWEST = 5


@dataclass(frozen=True, slots=True)
class Step:
    """Two values of a parameter of a spec."""

    spec: str
    parameter: str
    first: int
    second: int


def steps(trials: Sequence[Trial]) -> Iterator[tuple[Step, float]]:
    """Every pair of one study with the gain of its second value."""
    measured = [trial for trial in trials if trial.outcome.ok]
    best_us = min((trial.outcome.median_us for trial in measured), default=0.0)
    alike = defaultdict(list)
    for trial in measured:
        values = dict(trial.config)
        for name in values:
            others = tuple((key, values[key]) for key in values if key != name)
            alike[trial.spec, name, others].append((values[name], trial.outcome.median_us))
    for (spec, name, _), found in alike.items():
        for (first, first_us), (second, second_us) in itertools.combinations(sorted(found), 2):
            if first != second and min(first_us, second_us) <= NEAR * best_us:
                yield Step(spec, name, first, second), first_us / second_us


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    gains: dict[Step, list[tuple[float, str]]] = defaultdict(list)
    for storage in options.storage:
        for study in session.list_studies(storage)[0]:
            if re.search(options.only, study.name):
                trials = [stored.trial for stored in study.trials]
                for step, gain in steps(trials):
                    gains[step].append((gain, study.name))
    wanted = {
        step: found
        for step, found in gains.items()
        if len(found) >= options.fewest and options.spec in ("", step.spec)
    }
    print("| spec | parameter | from | to | pairs | studies | gain | least | most |")
    print("|---|---|---|---|---|---|---|---|---|")
    for step in sorted(wanted, key=lambda s: (s.spec, s.parameter, s.first, s.second)):
        found = wanted[step]
        values = [gain for gain, _ in found]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        studies = len({name for _, name in found})
        print(
            f"| {step.spec} | {step.parameter} | {step.first} | {step.second} | {len(values)} "
            f"| {studies} | {mean:.3f} | {min(values):.3f} | {max(values):.3f} |"
        )
    return 0 if wanted else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", action="append", required=True, metavar="URL")
    parser.add_argument("--only", default="", metavar="PATTERN", help="names of studies")
    parser.add_argument("--spec", default="", help="of one spec")
    parser.add_argument("--fewest", type=int, default=FEWEST, help="pairs that say something")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

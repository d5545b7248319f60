# SPDX-License-Identifier: Apache-2.0
"""Tune the matrix products of tests/data/shapes.json, each as ``tunegen tune`` would.

::

    python tests/gpu/shape_records.py --list
    python tests/gpu/shape_records.py --budget 560 --out details
    python tests/gpu/shape_records.py --groups prefill,decode --seconds-each 45
    python tests/gpu/shape_records.py --layout nn
    python tests/gpu/shape_records.py --dtype fp16 --only S4,P2
    python tests/gpu/shape_records.py --only P8 --policy burst

A shape whose record stands already in the folder of ``--db`` is left out: the same command goes on
where an earlier one ended. Groups are done in the order given. Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _shapes
import _tree
from _records import Overdue, write_json
from records import Case, Tuning, calibrated, noted

from tunegen import calibration, session
from tunegen.errors import TunegenError, UsageError

# At most for one tune: what a record of the list may take.
MOST_SECONDS = 60.0

# More than a search of that length can try: time decides.
_TRIALS = 2000


def line(named: _shapes.Named, result: session.TuneResult, seconds: float) -> str:
    """One tune in one line."""
    record, contest = result.record, result.run.contest
    us = record.measurement.median_us
    winner = contest.winner if contest else None
    vendor = "cuBLAS none"
    if winner is not None and winner.vendor is not None:
        found = winner.vendor
        vendor = f"cuBLAS {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    flip = f"; flips: {contest.flip}" if contest and contest.flip else ""
    return (
        f"{named.key:<11} {record.spec:<20} {us:>9.2f} us  {vendor:<28} "
        f"floor {result.floor.us / us:.3f} {result.floor.bound:<7} {record.measurement.policy:<9} "
        f"{seconds:>5.1f} s: {len(result.run.trials)} trials, {result.run.compiled} compiled{flip}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if not 0 < options.seconds_each <= MOST_SECONDS:
            raise UsageError(
                f"--seconds-each {options.seconds_each:g} is not within {MOST_SECONDS:g}"
            )
        wanted = _shapes.wanted(
            dtype=options.dtype, layout=options.layout, groups=options.groups, only=options.only
        )
        if options.list:
            print(*(f"{shape.key}, {shape.group}: {_sizes(shape)}" for shape in wanted), sep="\n")
            return 0
        return _run(options, wanted)
    except (TunegenError, Overdue) as error:
        print(f"error: {error}", flush=True)
        return 1


def _sizes(shape: _shapes.Named) -> str:
    return "x".join(str(size) for _, size in shape.problem.sizes)


def _run(options: argparse.Namespace, wanted: Sequence[_shapes.Named]) -> int:
    started = time.monotonic()
    gpu, ceilings = calibrated(options.db)
    calibration.save(ceilings, options.db / _tree.CALIBRATION)
    tuning = Tuning(
        gpu, options.db, options.seconds_each, options.seed, options.trials, options.again,
        options.policy,
    )  # fmt: skip
    cases = [(shape, Case(shape.problem, _TRIALS)) for shape in wanted]
    left = [(shape, case) for shape, case in cases if options.again or not tuning.stands(case)]
    print(f"{gpu.name}: {len(wanted) - len(left)} stand, {len(left)} to tune", flush=True)
    details: list[dict[str, Any]] = []
    failures = done = 0
    for shape, case in left:
        spent_s = time.monotonic() - started
        if options.budget is not None and spent_s + options.seconds_each > options.budget:
            print(f"stopped after {spent_s:.0f} s: {options.seconds_each:g} s are not left")
            break
        if _one(tuning, shape, case, details):
            done += 1
        else:
            failures += 1
        write_json(options.out, "shape_records.json", details)
    remain = len(left) - done - failures
    print(
        f"{done} tuned, {failures} failed, {remain} left; {time.monotonic() - started:.0f} s; "
        f"records {options.db}",
        flush=True,
    )
    return 1 if failures else 0


def _one(tuning: Tuning, shape: _shapes.Named, case: Case, details: list[dict[str, Any]]) -> bool:
    """Tune one and say what came of it; whether that is as it should be."""
    started = time.monotonic()
    try:
        result = tuning.tune(case)
    except (TunegenError, Overdue) as error:
        print(f"{shape.key:<11} failed: {error}", flush=True)
        details.append({"shape": shape.key, "failed": str(error)})
        return False
    except Exception:  # a fault in one must not cost the time of the others
        print(f"{shape.key:<11} failed:\n{traceback.format_exc(limit=-4)}", flush=True)
        details.append({"shape": shape.key, "failed": traceback.format_exc()})
        return False
    seconds = time.monotonic() - started
    print(line(shape, result, seconds), flush=True)
    return noted({"shape": shape.key, "wall_seconds": seconds}, result, details)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", type=Path, default=_tree.TUNED_DB, help="where records go")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--layout", choices=("nt", "nn", "tn", "tt"), default="nt")
    parser.add_argument(
        "--groups", type=_shapes.words, default=list(_shapes.GROUPS), metavar="A,B",
        help=f"in this order; without it {','.join(_shapes.GROUPS)}",
    )  # fmt: skip
    parser.add_argument(
        "--only", type=_shapes.words, default=[], metavar="S4,P2", help="single shapes"
    )
    parser.add_argument(
        "--policy", choices=("auto", "burst", "sustained"), default="auto",
        help="what decides who wins",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the shapes, tune nothing")
    parser.add_argument("--again", action="store_true", help="also those that stand, anew")
    parser.add_argument("--trials", type=int, help="at most so many configurations of a shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds-each", type=float, default=30.0, metavar="S", help="at most for one tune"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin no tune that might end after so long"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for details as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Tune the problems whose records are shipped, each as ``tunegen tune`` would.

::

    python tests/gpu/records.py --list
    python tests/gpu/records.py --budget 540 --out details
    python tests/gpu/records.py --db elsewhere --only 'matmul fp32 nn'

A problem whose record stands already, in the folder of ``--db`` or among the shipped ones, is
left out: the same command goes on where an earlier one ended. The GPU is calibrated first where it
never was, and the calibration is put beside the records. Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _tree
from _records import Overdue, deadline, is_final, title, wait_until_alone, whole, write_json

from tunegen import calibration, kernels, perfmodel, session
from tunegen.cli.tune_report import document
from tunegen.database import Database
from tunegen.errors import DeviceError, TunegenError, UsageError
from tunegen.model import Calibration, GpuInfo, Problem
from tunegen.runner.finals import SUSTAINED_FROM_US

MATMUL_SIZES = (
    "4096x4096x4096", "2048x2048x2048", "1024x1024x1024", "1000x1000x1000", "64x4096x4096",
)  # fmt: skip
VECTOR_SIZES = (2**28, 2**24, 2**20, 2**24 + 1)

# Seconds of the finals, where bursts decide and where sustained blocks do. Checks take one or two
# of them, the fifteen rounds that a contest needs four, and each sustained block a quarter at
# least.
BURST_FINALS_S, SUSTAINED_FINALS_S = 6.0, 10.0

# What a tune takes besides search and finals: starting worker and library, listing configurations.
_AROUND_S = 8.0

# A tune that hangs is given up after this multiple of what it may take, the first one later: the
# vendor's library may have to be read from a cold disk.
_PATIENCE = 2.0
_COLD_S = 60.0

# What one calibration may take; it takes a minute and a half on an H200.
_CALIBRATE_S = 180.0


@dataclass(frozen=True, slots=True)
class Case:
    """A problem to tune, and how many configurations of it to try."""

    problem: Problem
    trials: int

    @property
    def title(self) -> str:
        return title(self.problem)


def cases() -> Iterator[Case]:
    """Everything whose records are shipped, what matters most first."""
    matmul = kernels.operation("matmul")
    for layout in ("nn", "nt"):
        for size in MATMUL_SIZES:
            yield Case(matmul.problem(size, dtype="fp32", layout=layout), 60)
    yield Case(matmul.problem("2048x2048x2048", dtype="fp64", layout="nn"), 60)
    for elements in VECTOR_SIZES:
        for name in ("copy", "add", "axpy"):
            for dtype in ("fp32", "bf16"):
                yield Case(kernels.operation(name).problem((elements,), dtype=dtype), 80)


@dataclass(slots=True)
class Tuning:
    """Tunes cases on one GPU into one database."""

    gpu: GpuInfo
    db: Path
    seconds_each: float
    seed: int
    trials: int | None
    fresh: bool
    policy: str = "auto"
    _begun: int = 0

    def stands(self, case: Case) -> bool:
        """Whether a record of this GPU's kind answers for the case already."""
        found = Database(self.db).records(self.gpu.arch, case.problem.operation)
        return any(
            whole(record).problem == case.problem
            and record.device.name == self.gpu.name
            and self.policy in ("auto", record.measurement.policy)
            and is_final(record)
            and not record.measurement.details.get("shared")
            and not session.staleness(record)
            for _, record in found
        )

    def finals_s(self, case: Case) -> float:
        """Seconds of the finals, by which policy the least time of a call says will decide."""
        operation = kernels.operation(case.problem.operation)
        chips = {chip.name: chip for chip in perfmodel.CHIPS if chip.arch == self.gpu.arch}
        device = chips.get(self.gpu.name) or perfmodel.default_chip(self.gpu.arch)
        long = perfmodel.floor(operation, case.problem, device).us > SUSTAINED_FROM_US
        return min(SUSTAINED_FINALS_S if long else BURST_FINALS_S, self.seconds_each / 2)

    def tune(self, case: Case) -> session.TuneResult:
        problem, finals_s = case.problem, self.finals_s(case)
        operation = kernels.operation(problem.operation)
        wait_until_alone(self.gpu.index)
        self._begun += 1
        limit_s = _PATIENCE * self.seconds_each + (_COLD_S if self._begun == 1 else 0.0)
        with deadline(limit_s):
            return session.tune(
                operation.name,
                problem=dict(problem.sizes),
                dtype=problem.dtype,
                layout=problem.layout or None,
                attributes=operation.special(problem),
                trials=self.trials or case.trials,
                seconds=max(1.0, self.seconds_each - finals_s - _AROUND_S),
                seed=self.seed,
                evaluator="gpu",
                finals_seconds=finals_s,
                policy=self.policy,
                fresh=self.fresh,
                db=self.db,
                on_note=lambda text: print(f"  note: {text}", flush=True),
            )


def line(case: Case, result: session.TuneResult, seconds: float) -> str:
    """One tune in one line."""
    record, run = result.record, result.run
    us, winner = record.measurement.median_us, run.contest.winner if run.contest else None
    vendor = "vendor none"
    if winner is not None and winner.vendor is not None:
        found = winner.vendor
        vendor = f"vendor {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    elif record.baseline_ratio is not None:
        vendor = f"vendor {record.baseline_ratio:.3f}"
    finals_s = run.contest.seconds if run.contest else 0.0
    return (
        f"{case.title:<32} {us:>9.2f} us  {vendor:<29} "
        f"floor {result.floor.us / us:.3f} {result.floor.bound:<7} {record.measurement.policy:<9} "
        f"{seconds:>5.1f} s: {len(run.trials)} trials, {run.compiled} compiled, "
        f"{run.cache_hits} cached, finals {finals_s:.1f} s"
    )


def objections(result: session.TuneResult) -> list[str]:
    """What a record that is to be shipped must not be."""
    record, floor = result.record, result.floor
    found = []
    if not is_final(record):
        found.append("its finals were not played")
    us = record.measurement.median_us
    if us < floor.us * (1 - floor.spread):
        found.append(
            f"{us:.2f} us is below the floor of {floor.us:.2f} us by more than its spread of "
            f"{floor.spread:.1%}: one of them is wrong"
        )
    return found


def calibrated(db: Path) -> tuple[GpuInfo, Calibration]:
    """The GPU, and the calibration of its kind: the user's, or what stands beside records, or one
    that is made now. It is the user's then, whose floors are to be the same."""
    listing = session.list_gpus()
    if not listing.gpus:
        raise DeviceError(listing.found.reason, hint=listing.found.hint)
    first = listing.gpus[0]
    if first.calibration is not None:
        return first.gpu, first.calibration
    for folder in (db, _tree.TUNED_DB):
        for found in calibration.stored(folder / _tree.CALIBRATION):
            if (found.device.name, found.arch) == (first.gpu.name, first.gpu.arch):
                calibration.save(found)
                return first.gpu, found
    with deadline(_CALIBRATE_S):
        made = session.calibrate(device=first.gpu.index)
    for failure in made.failures:
        print(f"  not measured: {failure}", flush=True)
    print(f"calibrated in {made.seconds:.1f} s: {made.path}", flush=True)
    return first.gpu, made.calibration


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    wanted = [case for case in cases() if re.search(options.only, case.title)]
    if options.list:
        print(*(f"{case.title}, {case.trials} trials" for case in wanted), sep="\n")
        return 0
    if not wanted:
        print(f"no problem is called like {options.only!r}: --list shows them")
        return 1
    try:
        return _run(options, wanted)
    except (TunegenError, Overdue) as error:
        print(f"error: {error}", flush=True)
        return 1


def _run(options: argparse.Namespace, wanted: Sequence[Case]) -> int:
    started = time.monotonic()
    gpu, ceilings = calibrated(options.db)
    kept = calibration.save(ceilings, options.db / _tree.CALIBRATION)
    tuning = Tuning(
        gpu, options.db, options.seconds_each, options.seed, options.trials, options.again
    )
    left = [case for case in wanted if options.again or not tuning.stands(case)]
    print(f"{gpu.name}: {len(wanted) - len(left)} stand, {len(left)} to tune", flush=True)
    details: list[dict[str, Any]] = []
    failures = done = 0
    for case in left:
        spent_s = time.monotonic() - started
        if options.budget is not None and spent_s + options.seconds_each > options.budget:
            print(f"stopped after {spent_s:.0f} s: {options.seconds_each:g} s are not left")
            break
        if not _one(tuning, case, details):
            failures += 1
        else:
            done += 1
        write_json(options.out, "records.json", details)
    remain = len(left) - done - failures
    print(f"{done} tuned, {failures} failed, {remain} left; {time.monotonic() - started:.0f} s")
    print(f"records {options.db}, calibration {kept}", flush=True)
    return 1 if failures else 0


def _one(tuning: Tuning, case: Case, details: list[dict[str, Any]]) -> bool:
    """Tune one and say what came of it; whether that is as it should be."""
    try:
        return _tuned(tuning, case, details)
    except TunegenError as error:
        print(f"{case.title:<32} failed: {error}", flush=True)
        details.append({"case": case.title, "failed": str(error)})
    except Exception:  # a fault in one must not cost the time of the others
        print(f"{case.title:<32} failed:\n{traceback.format_exc(limit=-4)}", flush=True)
        details.append({"case": case.title, "failed": traceback.format_exc()})
    return False


def _tuned(tuning: Tuning, case: Case, details: list[dict[str, Any]]) -> bool:
    started = time.monotonic()
    result = tuning.tune(case)
    seconds = time.monotonic() - started
    print(line(case, result, seconds), flush=True)
    return noted({"case": case.title, "wall_seconds": seconds}, result, details)


def noted(
    entry: Mapping[str, Any], result: session.TuneResult, details: list[dict[str, Any]]
) -> bool:
    """Keep what came of a tune, under an entry that names it; whether it is as it should be."""
    details.append({**entry, **document(result)})
    if result.run.stop_reason == "interrupted":
        raise KeyboardInterrupt
    wrong = objections(result)
    for text in wrong:
        print(f"  {text}", flush=True)
    return not wrong


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", type=Path, default=_tree.TUNED_DB, help="where records go")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression")
    parser.add_argument("--list", action="store_true", help="name the problems, tune nothing")
    parser.add_argument("--again", action="store_true", help="also those that stand, anew")
    parser.add_argument("--trials", type=int, help="configurations to try, for every problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds-each", type=float, default=40.0, metavar="S", help="at most for one tune"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin no tune that might end after so long"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for records.json")
    options = parser.parse_args(arguments)
    if not options.seconds_each > 0:
        raise UsageError(f"--seconds-each {options.seconds_each} is no time")
    return options


if __name__ == "__main__":
    sys.exit(main())

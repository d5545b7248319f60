# SPDX-License-Identifier: Apache-2.0
"""What the tuner promises, shown on a GPU: each part prints one line with its figure.

``python tests/gpu/acceptance.py --out FOLDER [--only NAME,...] [--db FOLDER]``, from the tree.
Details go to ``FOLDER/acceptance.json`` and files beside it. The exit code is 0 where every part
passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acceptance_faulty
import acceptance_hundred
import acceptance_kills
import acceptance_records
import acceptance_seeds
import acceptance_subspace
import acceptance_two
from acceptance_common import ROOT, Setting, Verdict, environment, limit


@dataclass(frozen=True, slots=True)
class Part:
    """A part with the seconds that it may take, a line on what it shows, and how many GPUs it
    takes. One that takes more than one runs only where it is named."""

    run: Callable[[Setting], Verdict]
    seconds: float
    meaning: str
    gpus: int = 1


PARTS: Mapping[str, Part] = {
    "hundred": Part(
        acceptance_hundred.run, 300, "100 trials of 4096^3 and 2048^3: time, memory, ratio"
    ),
    "subspace": Part(
        acceptance_subspace.run, 340, "10 seeds in a part of a space measured to the last config"
    ),
    "seeds": Part(acceptance_seeds.run, 300, "winners of two seeds in one finals"),
    "faulty": Part(acceptance_faulty.run, 150, "six configs with and without faulty ones"),
    "kills": Part(acceptance_kills.run, 240, "kill -9 of parent and worker"),
    "two": Part(
        acceptance_two.run, 400, "trials per second on two GPUs beside one; by name only", gpus=2
    ),
    "floors": Part(acceptance_records.floors, 60, "no record below its floor"),
    "vectors": Part(acceptance_records.vectors, 60, "copy, add, axpy at 2^28 beside torch"),
}


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:<9} {part.meaning}; at most {part.seconds:.0f} s")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment())  # workers of this process import from the tree too
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="acceptance-") as work:
        setting = Setting(options.out.resolve(), Path(work), options.db, options.calibration, _say)
        for name in options.only:
            results.append(_part(name, setting))
            text = json.dumps(results, indent=1, default=str)
            (options.out / "acceptance.json").write_text(text + "\n")
    return 0 if all(result["passed"] for result in results) else 1


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if missing := [name for name in chosen if name not in PARTS]:
            raise argparse.ArgumentTypeError(f"no part {missing[0]}; there are {', '.join(PARTS)}")
        return chosen

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = [name for name, part in PARTS.items() if part.gpus == 1]
    parser.add_argument("--only", type=names, default=usual, metavar="NAME,...")
    parser.add_argument("--out", type=Path, default=Path("acceptance_out"), metavar="FOLDER")
    parser.add_argument(
        "--db", type=Path, default=ROOT / "tuned_db", metavar="FOLDER",
        help="records that floors and vectors look at; by default those that ship",
    )  # fmt: skip
    parser.add_argument("--calibration", type=Path, metavar="FOLDER", help="by default the user's")
    parser.add_argument("--list", action="store_true", help="name the parts, and do nothing")
    return parser.parse_args(words)


def _part(name: str, setting: Setting) -> dict[str, Any]:
    """Run a part. Whatever goes wrong with it is its failure, and the others follow."""
    part, started = PARTS[name], time.monotonic()
    trace = ""
    try:
        with limit(part.seconds):
            verdict = part.run(setting)
    except Exception as error:
        trace = traceback.format_exc()
        verdict = Verdict(False, f"{type(error).__name__}: {error}")
        print(trace, file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    _say(f"{'PASS' if verdict.passed else 'FAIL'} {name:<9} {seconds:6.1f} s  {verdict.figure}")
    return {
        "name": name,
        "passed": verdict.passed,
        "figure": verdict.figure,
        "seconds": seconds,
        "details": verdict.details,
        "trace": trace,
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

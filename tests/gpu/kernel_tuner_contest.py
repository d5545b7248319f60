# SPDX-License-Identifier: Apache-2.0
"""Kernel Tuner on the same template, space and card: whose winner is faster, and how long it took.

::

    python tests/gpu/kernel_tuner_contest.py --wheels FOLDER --budget 560 --out details
    python tests/gpu/kernel_tuner_contest.py --problems matmul_nt --trials 50 --again

For each problem ``tunegen tune`` runs as a user runs it, whole, with finals and record; then
Kernel Tuner with the same number of evaluations, as ``_kernel_tuner.py`` says. Both begin with
nothing compiled: caches of their own, the driver's included. Its seconds are those of its search
alone, without its imports and the list of valid configurations, which is made for it; ours are
those of the whole command. Then both winners and the default are compiled alike and take turns in
random order, in bursts of CUDA graphs on cold operands. The ratio is the time of Kernel Tuner's
winner over ours in the same round: its median, with the bootstrap interval of 95 %.

A problem passes where Kernel Tuner's winner is not faster than ours beyond the interval, and ours
took at most half the time. Where time runs out for Kernel Tuner, what it has found by then takes
part, and its seconds are those it had. Results go into ``kernel_tuner_contest.json`` in the folder
of ``--out``; a problem that is there with the same settings is not done again, save with
``--again``. ``--wheels`` is a folder with the wheels of Kernel Tuner and of what it needs, for a
machine where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _kernel_tuner import Job
from acceptance_card import burst_contest, prepared
from acceptance_common import (
    Setting,
    command,
    environment,
    gpus,
    limit,
    result_of,
    tune_words,
)

from tunegen import kernels
from tunegen.model import Config, DeviceClass, KernelSpec
from tunegen.runner import ratios

HERE = Path(__file__).resolve().parent
RESULTS = "kernel_tuner_contest.json"

# How Kernel Tuner is called; tests call what stands in for it.
RIVAL: Sequence[str] = (sys.executable, str(HERE / "_kernel_tuner.py"))

OURS, THEIRS, DEFAULT = "ours", "Kernel Tuner", "default"

# Its strategy that is best on recorded spaces.
STRATEGY = "adaptive_tabu_greywolf"

MOST_OF_THEIR_TIME = 0.5

# What a problem takes besides the two searches, about, and less than what nothing is begun.
CONTEST_SECONDS = 12.0
_AROUND_SECONDS = 45.0
_LEAST_SECONDS = 120.0

# How long it may go on after its limit, which it looks at between two evaluations.
_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the spec that both tune; ``kernel`` is the file of a spec made for this."""

    name: str
    operation: str
    sizes: str
    spec: str
    layout: str | None = None
    kernel: str | None = None
    dtype: str = "fp32"

    @property
    def kernel_path(self) -> str | None:
        return str(HERE / self.kernel) if self.kernel else None

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        own = (kernels.load(Path(self.kernel_path)),) if self.kernel_path else ()
        return (*own, *kernels.SPECS)

    @property
    def words(self) -> list[str]:
        """How a tune of it is asked for."""
        layout = ["--layout", self.layout] if self.layout else []
        return [
            self.operation, "--problem", self.sizes, "--dtype", self.dtype, *layout,
            "--spec", self.spec,
        ]  # fmt: skip

    def job(self, device: DeviceClass, settings: Settings, seconds: float) -> Job:
        operation = kernels.operation(self.operation, self.specs)
        layout = {"layout": self.layout} if self.layout else {}
        return Job(
            operation=self.operation,
            problem=operation.problem(self.sizes, dtype=self.dtype, **layout),
            device=device,
            spec=self.spec,
            kernel=self.kernel_path,
            strategy=settings.strategy,
            evaluations=settings.trials,
            seconds=seconds,
            seed=settings.seed,
        )


def _matmul(layout: str) -> Case:
    return Case(
        f"matmul_{layout}", "matmul", "4096x4096x4096", "simt48", layout, "kernel_tuner_simt.py"
    )


_AXPY = Case("axpy", "axpy", "2^26", "vector48", kernel="kernel_tuner_axpy.py")
CASES: Mapping[str, Case] = {case.name: case for case in (_matmul("nt"), _AXPY, _matmul("nn"))}
USUAL = ("axpy", "matmul_nt")


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes two results comparable; ``tune`` are words added to the command of ours."""

    trials: int
    seed: int
    strategy: str
    tune: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: its winner, seconds, and how many configurations it evaluated."""

    config: Config
    us: float
    seconds: float
    evaluations: int
    details: Mapping[str, Any]


class Failure(Exception):
    """A problem without a result."""


# --- the two searches ----------------------------------------------------------------------------


def cold(setting: Setting, name: str) -> dict[str, str]:
    """Variables that send every cache to a folder which is not there yet."""
    home = setting.work / f"{name}_home"
    folders = {
        "XDG_CACHE_HOME": home / "cache",
        "XDG_DATA_HOME": home / "data",
        "CUDA_CACHE_PATH": home / "driver",  # NVRTC's too, where there is a driver
    }
    if any(folder.exists() for folder in folders.values()):
        raise Failure(f"{home} is not empty: nothing would be cold")
    return {name: str(folder) for name, folder in folders.items()}


def ours(case: Case, settings: Settings, setting: Setting) -> Found:
    name = f"{case.name}_ours"
    words = tune_words(
        setting, name, *case.words, "--trials", str(settings.trials), "--seed",
        str(settings.seed), *settings.tune,
    )  # fmt: skip
    kernel = ["--kernel", case.kernel_path] if case.kernel_path else []
    done = command([*kernel, *words], **cold(setting, name))
    result = result_of(done)
    record = result["record"]
    return Found(
        config=Config(record["config"]),
        us=record["measurement"]["median_us"],
        seconds=done.seconds,
        evaluations=sum(result["trials"]["counts"].values()),
        details={
            "counts": result["trials"]["counts"],
            "spent_s": result["seconds"],
            "valid": result["valid_configs"],
            "default_us": record["default_us"],
        },
    )


def theirs(
    case: Case, settings: Settings, setting: Setting, device: DeviceClass, seconds: float,
    packages: Path | None,
) -> Found:  # fmt: skip
    """What Kernel Tuner finds in a process of its own, in at most so many seconds."""
    name = f"{case.name}_theirs"
    folder = setting.work / name
    folder.mkdir()
    job, result = folder / "job", folder / "result.json"
    job.write_bytes(pickle.dumps(case.job(device, settings, seconds)))
    log = setting.out / f"{name}.log"
    with log.open("w") as output:
        try:
            subprocess.run(
                [*RIVAL, str(job), str(result), *([str(packages)] if packages else [])],
                stdout=output, stderr=subprocess.STDOUT, check=True,
                env=environment(**cold(setting, name)),
                timeout=seconds + _AROUND_SECONDS + _GRACE_SECONDS,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise Failure(f"Kernel Tuner: {error}; see {log}") from error
    document = json.loads(result.read_text())
    return of_theirs(document)


def of_theirs(document: Mapping[str, Any]) -> Found:
    """Raises :class:`Failure` where nothing could be timed."""
    best = document["best"]
    if best is None:
        raise Failure(f"Kernel Tuner timed nothing: {document['error'] or 'all failed'}")
    return Found(
        Config(best["config"]), best["us"], document["seconds"], document["evaluations"],
        {name: document[name] for name in document if name != "best"},
    )  # fmt: skip


def unpacked(wheels: Path, folder: Path) -> Path:
    """The packages of a folder of wheels, to import from."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Failure(f"no wheels in {wheels}")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


# --- the contest ---------------------------------------------------------------------------------


def contest(case: Case, found: Mapping[str, Found], default: Config) -> dict[str, list[float]]:
    """The times of both winners and the default; those that are the same config share theirs."""
    configs = {name: one.config for name, one in found.items()} | {DEFAULT: default}
    names: dict[Config, str] = {}
    for name, config in configs.items():
        names.setdefault(config, name)
    longest_us = [max(one.us for one in found.values())]
    with prepared(
        case.operation, case.sizes, dtype=case.dtype, layout=case.layout, spec=case.spec,
        specs=case.specs,
    ) as card:  # fmt: skip
        played = {name: config for config, name in names.items()}
        times, faults = burst_contest(card, played, longest_us, CONTEST_SECONDS)
    for name in (OURS, THEIRS):
        if names[configs[name]] in faults:
            raise Failure(f"{name} fell out: {faults[names[configs[name]]]}")
    return {n: times[names[c]] for n, c in configs.items() if names[c] in times}


def judge(
    case: Case, settings: Settings, found: Mapping[str, Found],
    times: Mapping[str, Sequence[float]],
) -> dict[str, Any]:  # fmt: skip
    """The row of a problem, with the verdict in words."""
    own, other = found[OURS], found[THEIRS]
    ratio = ratios.ratio(times[THEIRS], times[OURS])
    share = own.seconds / other.seconds
    as_good, as_fast = ratio.high >= 1.0, share <= MOST_OF_THEIR_TIME
    cut = other.evaluations < settings.trials
    figure = (
        f"winner {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times as fast as Kernel "
        f"Tuner's (>= 1), in {own.seconds:.1f} s of its {other.seconds:.1f}: {share:.2f} "
        f"(<= {MOST_OF_THEIR_TIME}); {own.evaluations} and {other.evaluations} configurations"
    )
    if own.config == other.config:
        figure += "; the same winner"
    if cut:
        reason = other.details.get("error") or "its time was up, or it repeated itself"
        figure += f"; Kernel Tuner ended early: {reason}"
    if DEFAULT in times:
        gained = ratios.ratio(times[DEFAULT], times[OURS])
        figure += f"; the default {gained.median:.3f}"
    return {
        "problem": case.name,
        "settings": asdict(settings),
        "finished": True,
        "passed": as_good and as_fast,
        "as_good": as_good,
        "as_fast": as_fast,
        "figure": figure,
        "ratio": asdict(ratio),
        "share": share,
        "found": {name: {**asdict(f), "config": dict(f.config)} for name, f in found.items()},
        "times_us": {name: list(values) for name, values in times.items()},
    }


# --- one after the other -------------------------------------------------------------------------


def play(
    case: Case, settings: Settings, setting: Setting, left: float, packages: Path | None
) -> dict[str, Any]:
    """A problem from beginning to end, in about as many seconds as are ``left``."""
    until = time.monotonic() + left
    device = device_of_gpu()
    mine = ours(case, settings, setting)
    setting.say(f"  {case.name}: ours {mine.us:.2f} us after {mine.seconds:.1f} s: {mine.config}")
    seconds = until - time.monotonic() - _AROUND_SECONDS - CONTEST_SECONDS
    if seconds <= 0:
        raise Failure("no time was left for Kernel Tuner")
    other = theirs(case, settings, setting, device, seconds, packages)
    setting.say(
        f"  {case.name}: Kernel Tuner {other.us:.2f} us after {other.seconds:.1f} s, of which "
        f"compiling {other.details['compiling_s']:.1f} and timing "
        f"{other.details['timing_s']:.1f}: {other.config}"
    )
    found = {OURS: mine, THEIRS: other}
    job = case.job(device, settings, 0.0)
    default = job.load().default(job.problem, device)
    return judge(case, settings, found, contest(case, found, default))


def device_of_gpu() -> DeviceClass:
    gpu = gpus.choose_gpu("gpu")
    assert gpu is not None
    with gpus.station(gpu) as station:
        return gpus.device_class(station.open())


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment())  # workers of this process import from the tree too
    settings = Settings(options.trials, options.seed, options.strategy, tuple(options.tune))
    results = _Results(options.out / RESULTS)
    with tempfile.TemporaryDirectory(prefix="kernel-tuner-") as work:
        packages = unpacked(options.wheels, Path(work, "packages")) if options.wheels else None
        if packages is None and importlib.util.find_spec("kernel_tuner") is None:
            print("Kernel Tuner is not installed; --wheels FOLDER brings it", file=sys.stderr)
            return 2
        setting = Setting(options.out.resolve(), Path(work), Path(work), None, _say)
        passed = True
        for name in options.problems:
            row = None if options.again else results.find(name, settings)
            if row is None:
                left = options.budget - (time.monotonic() - started)
                row = _row(CASES[name], settings, setting, left, packages)
                results.add(row)
            _say(f"{'PASS' if row['passed'] else 'FAIL'} {name:<9} {row['figure']}")
            passed &= row["passed"]
    return 0 if passed else 1


def _row(
    case: Case, settings: Settings, setting: Setting, left: float, packages: Path | None
) -> dict[str, Any]:
    """Whatever goes wrong with a problem is its failure, and the others follow."""
    failed = {"problem": case.name, "settings": asdict(settings), "passed": False,
              "finished": False}  # fmt: skip
    if left < _LEAST_SECONDS:
        return {**failed, "figure": f"not begun with {left:.0f} s left"}
    try:
        with limit(left + _AROUND_SECONDS):
            return play(case, settings, setting, left, packages)
    except Exception as error:
        traceback.print_exc()
        return {**failed, "figure": f"{type(error).__name__}: {error}"}


class _Results:
    """The file of results: the last row of each problem and settings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            self._rows = json.loads(path.read_text())

    def find(self, problem: str, settings: Settings) -> dict[str, Any] | None:
        wanted = problem, json.loads(json.dumps(asdict(settings)))
        for row in self._rows:
            if (row["problem"], row["settings"]) == wanted and row["finished"]:
                return row
        return None

    def add(self, row: dict[str, Any]) -> None:
        row = json.loads(json.dumps(row))
        same = row["problem"], row["settings"]
        self._rows = [r for r in self._rows if (r["problem"], r["settings"]) != same]
        self._rows.append(row)
        self._path.write_text(json.dumps(self._rows, indent=1) + "\n")


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if missing := [name for name in chosen if name not in CASES]:
            raise argparse.ArgumentTypeError(
                f"no problem {missing[0]}; there are {', '.join(CASES)}"
            )
        return chosen

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=names, default=list(USUAL), metavar="NAME,...")
    parser.add_argument("--trials", type=int, default=100, help="evaluations of each; 100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default=STRATEGY, help=f"Kernel Tuner's; {STRATEGY}")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all; 560")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("kernel_tuner_out"), metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument(
        "--tune", type=str.split, default=[], metavar="WORDS",
        help="more words for tunegen tune, as in --tune '--least-gain 0.002'",
    )  # fmt: skip
    return parser.parse_args(words)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

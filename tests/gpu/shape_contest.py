# SPDX-License-Identifier: Apache-2.0
"""The recorded matrix products against cuBLAS, the best of cublasLt, and Triton, in one run.

::

    python tests/gpu/shape_contest.py --budget 560 --out details
    python tests/gpu/shape_contest.py --groups prefill,decode --seconds-each 8
    python tests/gpu/shape_contest.py --sustained S5,P2,P9
    python tests/gpu/shape_contest.py --dtype fp16
    python tests/gpu/shape_contest.py --verdict
    python tests/gpu/shape_contest.py --readme

Ours is the winner of the record, built anew: of the one for bursts where there are two, and in
sustained blocks of the other. cuBLAS is called through torch, as the finals call
it; of the algorithms that cublasLt offers with 64 MiB of workspace, and of a list of Triton's
configurations, the best by the same timer takes part. Ours runs in one process, the rivals in
another one, on operands with the same values: sets of them in turns, three times the L2 in all.
All take turns in random order, in bursts of CUDA graphs. A ratio is the time of a rival over ours
in the same round: its median, with the bootstrap interval of 95 %.

Results go into ``shapes.json`` in the folder of ``--out``, beside those of the file of ``--json``;
a shape that is there with the same winner is not measured again. ``--readme`` writes the table of
that file between the marks in the README, ``--verdict`` prints what it says of every goal.

Exit code 1 where a shape could not be measured or a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _rival_cublaslt
import _rival_triton
import _shapes
import _tree
import numpy as np
from _records import Overdue, deadline, is_final, only, wait_until_alone, write_json
from readme_table import README, in_us, markdown, replaced
from verify_records import build_of

from tunegen import calibration, compiler, kernels, perfmodel, session
from tunegen.errors import TunegenError, UsageError
from tunegen.model import DeviceClass, GpuInfo, TuningRecord
from tunegen.runner import ratios, rounds
from tunegen.runner.contenders import VENDOR
from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import PRELOAD, Block, Enter, Entered, Executable, Timed, Tried, Try
from tunegen.runner.quarantine import Fault
from tunegen.runner.station import ENTER_SECONDS, Station, prepare_seconds
from tunegen.session import gpu as gpus
from tunegen.session.devices import measuring_gpu
from tunegen.session.records import find_exact
from tunegen.session.setups import ProblemSetup, rotation
from tunegen.tuner.loop import cores

BEGIN, END = "<!-- shapes: begin -->", "<!-- shapes: end -->"
JSON = Path(__file__).with_name("shapes.json")

# How the process of the rivals is started; tests start another one.
RIVALS: Sequence[str] = (sys.executable, str(Path(__file__).with_name("_rivals.py")))

OURS, CUBLASLT, TRITON = "ours", "cublaslt", "triton"

# Inputs that neither a search nor its finals have seen.
_SEED = 2000

# Time for each algorithm and configuration, of which the best takes part.
_CHOOSING_S = 0.02
_CHOOSING_DROP = 1.2

# A library's result is not ours to judge, but what is further off is none.
_NONSENSE = 0.05

# The vendor's library may have to be read from a cold disk.
_VENDOR_SECONDS = 120.0
_TRY_SECONDS = 20.0

# What one shape may take besides its rounds before it is given up.
_PATIENCE_S = 90.0

# What a shape takes besides its rounds, about.
_AROUND_S = 10.0

# All kernels of Triton; they take half a second to two seconds each.
_COMPILE_S = 150.0

_SUSTAINED_BLOCK_S = rounds.SUSTAINED_SECONDS


@dataclass(slots=True)
class Rival:
    """What is known of one; ``failure`` says why it does not take part."""

    description: str = ""
    relative_error: float | None = None
    failure: str = ""
    choosing_us: dict[str, float | str] = field(default_factory=dict)


class TritonKernels:
    """Triton's kernels for all shapes, compiled in processes of their own."""

    def __init__(self, shapes: Sequence[_shapes.Named], arch: str, pool: Executor | None) -> None:
        self.failure = _rival_triton.missing()
        self._futures: dict[_rival_triton.Source, Future[_rival_triton.Compiled]] = {}
        if self.failure or pool is None:
            return
        for shape in shapes:
            for config in _rival_triton.configs(shape.problem):
                source = _rival_triton.source(config, shape.problem, arch)
                if source not in self._futures:
                    self._futures[source] = pool.submit(_rival_triton.compile, source)

    def wait(self) -> str:
        """Wait until all are compiled; what came of it."""
        if self.failure:
            return self.failure
        started = time.monotonic()
        done, late = wait_for(self._futures.values(), _COMPILE_S)
        for future in late:
            future.cancel()
        failed = sum(future.exception() is not None for future in done)
        return (
            f"Triton: {len(done) - failed} kernels compiled, {failed} failed, {len(late)} late; "
            f"waited {time.monotonic() - started:.0f} s"
        )

    def executables(
        self, shape: _shapes.Named, device: DeviceClass
    ) -> Iterator[tuple[_rival_triton.TritonConfig, Executable | str]]:
        """Each configuration of a shape with its executable, or the reason why it has none."""
        for config in _rival_triton.configs(shape.problem):
            future = self._futures.get(_rival_triton.source(config, shape.problem, device.arch))
            try:
                if future is None or not future.done():
                    yield config, "it was not compiled in time"
                    continue
                compiled = future.result()
                if compiled.shared_bytes > device.shared_bytes_per_block:
                    yield config, f"it needs {compiled.shared_bytes} bytes of shared memory"
                    continue
                yield config, _rival_triton.executable(config, compiled, shape.problem, device)
            except Exception as error:  # whatever Triton raises, or its process did
                yield config, f"{type(error).__name__}: {str(error).strip()[:200]}"


@dataclass(slots=True)
class Contest:
    """Plays the shapes one after the other, on one GPU."""

    card: Station
    rivals: Station
    device: DeviceClass
    free_bytes: int
    seconds: float
    sustained: Sequence[str]
    triton: TritonKernels
    nvrtc: compiler.NvrtcCompiler

    def play(
        self, shape: _shapes.Named, record: TuningRecord, long: TuningRecord
    ) -> tuple[dict[str, Any], Any]:
        """The row of a shape, and the times of each round: of a record in bursts, and of one in
        sustained blocks if it takes part in any."""
        build = build_of(record, self.device)
        operation, problem = build.request.operation, shape.problem
        sets = rotation(operation, problem, self.device.l2_bytes, self.free_bytes)
        setup = ProblemSetup(operation, self.device, self.nvrtc)
        prepare = setup(problem, inputs="normal", seed=_SEED, sets=sets)
        seconds = prepare_seconds(operation.flops(problem))
        self.card.prepare(prepare, seconds)
        ours = self._ours(build)
        rivals = self._rivals(shape, prepare, seconds, build.spec.tolerance(problem))
        able = {OURS: self.card} | {
            name: self.rivals for name, rival in rivals.items() if not rival.failure
        }
        played, times = self._burst(record, able, rivals)
        row = self._row(shape, record, ours, rivals, played, times)
        row["sets"] = sets
        choosing = {name: rival.choosing_us for name, rival in rivals.items()}
        details: dict[str, Any] = {"burst_us": times, "choosing_us": choosing}
        if shape.name in self.sustained:
            if (long.spec, long.config) != (record.spec, record.config):
                self._ours(build_of(long, self.device))
            row["sustained"], details["sustained_us"] = self._sustained(able)
            row["sustained_config"] = long.config
        return row, details

    # --- who takes part --------------------------------------------------------------------------

    def _ours(self, build: session.Build) -> Rival:
        """Have ours enter, in the place of one that has.

        Raises :class:`Failure` where it cannot.
        """
        enter = Enter(OURS, Executable(build.kernels, build.plan))
        ours = self._entered(self.card, enter, ENTER_SECONDS)
        if ours.failure:
            raise Failure(f"ours: {ours.failure}")
        return ours

    def _entered(self, station: Station, enter: Enter, seconds: float) -> Rival:
        answer = station.enter(enter, seconds)
        if not isinstance(answer, Entered):
            return Rival(failure=Fault.of(answer).reason)
        return Rival(answer.description, answer.relative_error)

    def _rivals(
        self, shape: _shapes.Named, prepare: Any, seconds: float, tolerance: float
    ) -> dict[str, Rival]:
        """Have them enter, each the best of its kind. A fault of one is not the others'."""
        rivals: dict[str, Rival] = {}
        enters: dict[str, Callable[[], Rival]] = {
            VENDOR: lambda: self._vendor(shape),
            CUBLASLT: lambda: self._cublaslt(shape),
            TRITON: lambda: self._triton(shape, tolerance),
        }
        try:
            self.rivals.prepare(prepare, seconds)
        except TunegenError as error:
            return {name: Rival(failure=str(error)) for name in enters}
        for name, enter in enters.items():
            try:
                rivals[name] = enter()
            except TunegenError as error:
                rivals[name] = Rival(failure=str(error))
            except Overdue:
                raise
            except Exception:  # of this script's own
                rivals[name] = Rival(failure=traceback.format_exc(limit=-3))
        return rivals

    def _vendor(self, shape: _shapes.Named) -> Rival:
        enter = Enter.vendor(VENDOR, kernels.operation("matmul"), shape.problem)
        return self._entered(self.rivals, enter, _VENDOR_SECONDS)

    def _cublaslt(self, shape: _shapes.Named) -> Rival:
        """The best of the algorithms that cublasLt offers."""
        found: dict[int, tuple[float, Rival]] = {}
        choosing: dict[str, float | str] = {}

        def enter(number: int) -> Rival:
            request = Enter(CUBLASLT, None, f"{CUBLASLT} {number}", shape.problem.layout)
            return self._entered(self.rivals, request, ENTER_SECONDS)

        for number in range(_rival_cublaslt.ASKED):
            rival = enter(number)
            if not rival.failure and not (rival.relative_error or 0.0) < _NONSENSE:
                rival.failure = f"its error is {rival.relative_error}"
            if rival.failure:
                choosing[str(number)] = rival.failure
                continue
            answer = self.rivals.ask(Block(CUBLASLT, "burst", _CHOOSING_S), _TRY_SECONDS)
            if not isinstance(answer, Timed):
                choosing[str(number)] = Fault.of(answer).reason
                self.rivals.forget(CUBLASLT)
                if isinstance(answer, Lost):
                    break
                continue
            us = float(np.median(answer.samples_us))
            choosing[str(number)], found[number] = us, (us, rival)
        if not found:
            first = next(iter(choosing.values()), "nothing was offered")
            return Rival(failure=str(first), choosing_us=choosing)
        best = min(found, key=lambda number: found[number][0])
        rival = enter(best)  # the last one that entered has its name
        rival.choosing_us = choosing
        return rival

    def _triton(self, shape: _shapes.Named, tolerance: float) -> Rival:
        """The best of the configurations of Triton."""
        if self.triton.failure:
            return Rival(failure=self.triton.failure)
        best: tuple[float, _rival_triton.TritonConfig, Executable] | None = None
        choosing: dict[str, float | str] = {}
        for config, executable in self.triton.executables(shape, self.device):
            if isinstance(executable, str):
                choosing[str(config)] = executable
                continue
            request = Try(
                executable, tolerance, "burst", best_us=best[0] if best else None,
                drop=_CHOOSING_DROP, budget_ms=_CHOOSING_S * 1e3,
            )  # fmt: skip
            answer = self.rivals.ask(request, _TRY_SECONDS)
            if not isinstance(answer, Tried):
                choosing[str(config)] = Fault.of(answer).reason
                if isinstance(answer, Lost):
                    break  # each that hangs costs seconds
                continue
            if not answer.outcome.ok:
                choosing[str(config)] = answer.outcome.reason
                continue
            us = answer.outcome.median_us
            choosing[str(config)] = us
            if best is None or us < best[0]:
                best = (us, config, executable)
        if best is None:
            first = next(iter(choosing.values()), "no configuration takes this problem")
            return Rival(failure=str(first), choosing_us=choosing)
        rival = self._entered(self.rivals, Enter(TRITON, best[2]), ENTER_SECONDS)
        rival.description, rival.choosing_us = f"Triton {best[1]}", choosing
        return rival

    # --- timing ----------------------------------------------------------------------------------

    def _burst(
        self, record: TuningRecord, able: Mapping[str, Station], rivals: Mapping[str, Rival]
    ) -> tuple[rounds.Played, dict[str, list[float]]]:
        chosen = [u for r in rivals.values() for u in r.choosing_us.values() if _is_time(u)]
        recorded_us = record.measurement.median_us * max(1.0, record.baseline_ratio or 1.0)
        longest_us = max(recorded_us, min(chosen, default=0.0))
        count, block_s = rounds.burst_rounds(self.seconds, len(able), longest_us)
        orders = ratios.shuffled(list(able), count, _SEED)
        until = time.monotonic() + self.seconds
        played = rounds.play(
            able, "burst", orders, block_s, lambda name: able[name].forget(name), until
        )
        return played, rounds.burst_times(played)

    def _sustained(self, able: Mapping[str, Station]) -> tuple[dict[str, Any], Any]:
        """Long blocks there and back: what the power limit makes of each."""
        order = ratios.there_and_back(list(able))
        played = rounds.play(
            able, "sustained", [order], _SUSTAINED_BLOCK_S, lambda name: able[name].forget(name)
        )
        times = rounds.sustained_times(played)
        figures = rounds.figures(played, times, energy=True)
        row = {
            name: {
                "us": figures[name].median_us,
                "ratio": asdict(ratios.ratio(own, times[OURS])) if OURS in times else None,
                "energy_mj": figures[name].energy_mj,
            }
            for name, own in times.items()
        }
        return row, times

    def _row(
        self,
        shape: _shapes.Named,
        record: TuningRecord,
        ours: Rival,
        rivals: Mapping[str, Rival],
        played: rounds.Played,
        times: Mapping[str, Sequence[float]],
    ) -> dict[str, Any]:
        if OURS not in times:
            raise Failure(f"ours: {played.faults[OURS].reason}")
        if played.shared(self.card.own_pids | self.rivals.own_pids):
            raise Failure("others used the card meanwhile: its times say nothing")
        us = ratios.estimate(times[OURS])
        operation = kernels.operation("matmul")
        ceilings = calibration.find(self.device)
        floor = perfmodel.floor(operation, shape.problem, self.device, ceilings)
        told = {}
        for name, rival in rivals.items():
            fault = played.faults.get(name)
            failure = rival.failure or (fault.reason if fault else "")
            own = times.get(name)
            told[name] = {
                "description": rival.description,
                "us": float(np.median(own)) if own else None,
                "ratio": asdict(ratios.ratio(own, times[OURS])) if own else None,
                "relative_error": rival.relative_error,
                "failure": failure,
            }
        theirs = rivals[VENDOR].relative_error
        return {
            "name": shape.name,
            "group": shape.group,
            "sizes": dict(shape.problem.sizes),
            "dtype": shape.problem.dtype,
            "layout": shape.problem.layout,
            "spec": record.spec,
            "config": record.config,
            "us": asdict(us),
            "rounds": len(times[OURS]),
            "recorded_us": record.measurement.median_us,
            "recorded_policy": record.measurement.policy,
            "flops": floor.flops,
            "floor_us": floor.us,
            "bound": floor.bound,
            "relative_error": ours.relative_error,
            "error_ratio": _error_ratio(ours.relative_error, theirs),
            "rivals": told,
        }


class Failure(TunegenError):
    """A shape could not be measured."""


def _is_time(value: float | str) -> bool:
    return isinstance(value, float)


def _error_ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over the vendor's; 1 where neither has an error."""
    if ours is None or theirs is None:
        return None
    if theirs == 0:
        return 1.0 if ours == 0 else None
    return ours / theirs if math.isfinite(ours / theirs) else None


# --- what is printed -----------------------------------------------------------------------------

HEADER = (
    f"{'shape':<11} {'spec':<20} {'us':>9} {'cuBLAS, 95 %':<21} {'Lt best':>7} {'Triton':>7} "
    f"{'floor':>6} {'error':>6} {'s':>5}"
)


def line(key: str, row: Mapping[str, Any], seconds: float) -> str:
    cublas = _shapes.ratio({key: row}, key, VENDOR)
    interval = (
        f"{cublas['median']:.3f} [{cublas['low']:.3f}, {cublas['high']:.3f}]" if cublas else "-"
    )
    error = row["error_ratio"]
    return (
        f"{key:<11} {row['spec']:<20} {row['us']['median']:>9.2f} {interval:<21} "
        f"{_median(row, CUBLASLT):>7} {_median(row, TRITON):>7} "
        f"{row['floor_us'] / row['us']['median']:>6.3f} "
        f"{'-' if error is None else f'{error:.3f}':>6} {seconds:>5.1f}"
    )


def _median(row: Mapping[str, Any], rival: str) -> str:
    return _told(row["rivals"].get(rival, {}).get("ratio"))


def _told(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.3f}" if ratio else "-"


def grouped(rows: _shapes.Rows) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    """Rows by dtype, layout and group, in the order of the list."""
    order = [shape.name for shape in _shapes.wanted(groups=[*_shapes.GROUPS, "batched"])]
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    kinds = [("bf16", "nt"), ("fp16", "nt")]
    kinds += [
        kind for row in rows.values() if (kind := (row["dtype"], row["layout"])) not in kinds
    ]
    for dtype, layout in dict.fromkeys(kinds):
        of_kind = [r for r in rows.values() if (r["dtype"], r["layout"]) == (dtype, layout)]
        for row in sorted(of_kind, key=lambda row: order.index(row["name"])):
            found.setdefault((dtype, layout, row["group"]), []).append(row)
    return found


def geomeans(rows: Sequence[Mapping[str, Any]], rival: str) -> str:
    values = [r["rivals"][rival]["ratio"]["median"] for r in rows
              if r["rivals"].get(rival, {}).get("ratio")]  # fmt: skip
    return f"{_shapes.geomean(values):.3f}" if values else "-"


def _share(rows: Sequence[Mapping[str, Any]]) -> float:
    return _shapes.geomean([row["floor_us"] / row["us"]["median"] for row in rows])


def print_summary(rows: _shapes.Rows) -> bool:
    """Geometric means by group, and a line for every goal; whether none is missed."""
    print(f"{'geomean':<24} {'shapes':>6} {'cuBLAS':>7} {'Lt best':>7} {'Triton':>7} {'floor':>6}")
    for (dtype, layout, group), found in grouped(rows).items():
        print(
            f"{dtype} {layout} {group:<16} {len(found):>6} {geomeans(found, VENDOR):>7} "
            f"{geomeans(found, CUBLASLT):>7} {geomeans(found, TRITON):>7} {_share(found):>6.3f}"
        )
    judged = list(_shapes.verdicts(rows))
    print(*judged, sep="\n", flush=True)
    return not any(verdict.passed is False for verdict in judged)


# --- the README's table --------------------------------------------------------------------------

COLUMNS = (
    ("shape", "<"), ("M x N x K", "<"), ("time, us", ">"), ("TFLOP/s", ">"), ("cuBLAS", ">"),
    ("95 %", ">"), ("cublasLt", ">"), ("Triton", ">"), ("floor", ">"), ("bound by", "<"),
    ("spec", "<"),
)  # fmt: skip
LONG_COLUMNS = (
    ("shape", "<"), ("time, us", ">"), ("mJ", ">"), ("cuBLAS", ">"), ("mJ", ">"),
    ("cublasLt", ">"), ("mJ", ">"), ("Triton", ">"), ("mJ", ">"),
)  # fmt: skip


def table(document: Mapping[str, Any]) -> str:
    """Results as Markdown: a table for each dtype and layout, nothing where there are none."""
    rows, about = document["rows"], document["about"]
    kinds: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for (dtype, layout, group), found in grouped(rows).items():
        lines = kinds.setdefault((dtype, layout), [])
        lines += [_cells(row) for row in found]
        means = (geomeans(found, rival) for rival in (CUBLASLT, TRITON))
        lines.append((f"**{group}**", "", "", "", f"**{geomeans(found, VENDOR)}**", "", *means,
                      f"{_share(found):.2f}", "", ""))  # fmt: skip
    if not kinds:
        return ""
    text = (
        f"{about['device']}, driver {about['driver']}, {about['cublas']}, {about['triton']}. "
        "`cuBLAS`, `cublasLt` (the best of the algorithms that it offers) and `Triton` (the best "
        "of a list of configurations) are their times over ours in the same rounds: above 1 ours "
        "is faster. `floor` is the share of the time that no kernel can do without. Bold lines "
        "are geometric means."
    )
    tables = [
        f"{dtype}, {layout}:\n\n{markdown(lines, COLUMNS)}"
        for (dtype, layout), lines in kinds.items()
    ]
    if long := [_long_cells(key, row) for key, row in rows.items() if row.get("sustained")]:
        tables.append(
            f"In sustained blocks of {_SUSTAINED_BLOCK_S:g} s there and back, with the energy of "
            "a call:\n\n" + markdown(long, LONG_COLUMNS)
        )
    return "\n\n".join((text, *tables))


def _long_cells(key: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    long = row["sustained"]
    cells = [key, in_us(long[OURS]["us"]), _energy(long[OURS])]
    for rival in (VENDOR, CUBLASLT, TRITON):
        found = long.get(rival)
        cells += [_told(found["ratio"] if found else None), _energy(found)]
    return tuple(cells)


def _energy(found: Mapping[str, Any] | None) -> str:
    spent = found["energy_mj"] if found else None
    return "-" if spent is None else f"{spent:.0f}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    us = row["us"]["median"]
    cublas = row["rivals"].get(VENDOR, {}).get("ratio")
    batch, *sizes = row["sizes"].values()
    return (
        row["name"],
        "x".join(map(str, sizes if batch == 1 else (batch, *sizes))),
        in_us(us),
        f"{row['flops'] / us / 1e6:.1f}",
        _told(cublas),
        f"{cublas['low']:.3f} to {cublas['high']:.3f}" if cublas else "",
        _median(row, CUBLASLT),
        _median(row, TRITON),
        f"{row['floor_us'] / us:.2f}",
        row["bound"],
        row["spec"],
    )


def with_table(readme: str, document: Mapping[str, Any]) -> str:
    """A README with the table of these results between its marks.

    Raises :class:`UsageError` where it has no such marks.
    """
    return replaced(readme, table(document), BEGIN, END)


# --- running -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.readme or options.verdict:
            document = _read(options.json)
            if options.readme:
                options.readme_file.write_text(
                    with_table(options.readme_file.read_text(), document)
                )
                return 0
            return 0 if print_summary(document["rows"]) else 1
        shapes = _shapes.wanted(
            dtype=options.dtype, layout=options.layout, groups=options.groups, only=options.only
        )
        return _run(options, shapes)
    except (TunegenError, Overdue, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1


def _read(file: Path) -> dict[str, Any]:
    """What earlier runs found; raises :class:`UsageError` where it is none of it."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict) or not {"about", "rows"} <= set(document):
        raise UsageError(f"{file} holds no results of this script")
    return document


def compile_pool() -> Executor:
    """Where Triton's kernels are compiled: it takes processes, for Python's lock."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max(1, min(16, cores())), mp_context=context)


def rivals_station(gpu: GpuInfo) -> Station:
    environment = {**gpus.environment(gpu), PRELOAD: "torch"}
    return Station(lambda: Worker(RIVALS, environment))


def _run(options: argparse.Namespace, shapes: Sequence[_shapes.Named]) -> int:
    started = time.monotonic()
    document = _read(options.json) if options.json.exists() else {"about": {}, "rows": {}}
    rows: dict[str, Any] = document["rows"]
    wait_until_alone(options.device)
    gpu = measuring_gpu(options.device)
    with ExitStack() as undo:
        card = undo.enter_context(gpus.station(gpu))
        opened = card.open()
        device = gpus.device_class(opened)
        recorded = _recorded(options, shapes, device, "burst")
        long = _recorded(options, shapes, device, "sustained")
        lacking = [shape.key for shape in shapes if shape.key not in recorded]
        left = [
            shape for shape in shapes
            if (record := recorded.get(shape.key))
            and (options.again or not _stands(rows.get(shape.key), record))
        ]  # fmt: skip
        print(
            f"{gpu.name}, driver {opened.driver}: {len(left)} to measure, "
            f"{len(recorded) - len(left)} stand, {len(lacking)} have no record"
            + (f": {', '.join(lacking)}" if lacking else ""),
            flush=True,
        )
        if not left:
            return _finished(options, document, bool(lacking))
        pool = None
        if not _rival_triton.missing():
            pool = compile_pool()
            undo.callback(pool.shutdown, wait=False, cancel_futures=True)
        triton = TritonKernels(left, device.arch, pool)
        rivals = undo.enter_context(rivals_station(gpu))
        try:
            rivals.open()  # loading torch takes seconds, in which Triton compiles
        except TunegenError as error:
            print(f"no rivals: {error}", flush=True)
        print(triton.wait(), flush=True)
        contest = Contest(
            card, rivals, device, opened.free_bytes, options.seconds_each, options.sustained,
            triton, compiler.NvrtcCompiler(compiler.KernelCache()),
        )  # fmt: skip
        print(HEADER, flush=True)
        failures, details = 0, {}
        for shape in left:
            spent_s = time.monotonic() - started
            if options.budget is not None and spent_s + _expected_s(options) > options.budget:
                print(f"stopped after {spent_s:.0f} s", flush=True)
                break
            found = _one(contest, shape, recorded[shape.key], long[shape.key])
            if found is None:
                failures += 1
                continue
            rows[shape.key], details[shape.key] = found
            document["about"] = _about(gpu, opened.driver, rows)
            write_json(options.out, "shapes.json", document)
            write_json(options.out, "shape_contest_times.json", details)
    print(f"{len(left)} to measure, {failures} failed; {time.monotonic() - started:.0f} s")
    return _finished(options, document, bool(failures or lacking))


def _expected_s(options: argparse.Namespace) -> float:
    """Seconds of a shape: rounds, and about as many to prepare it and to choose the rivals."""
    return options.seconds_each + _AROUND_S


def _finished(options: argparse.Namespace, document: Mapping[str, Any], failed: bool) -> int:
    write_json(options.out, "shapes.json", document)
    return 0 if print_summary(document["rows"]) and not failed else 1


def _recorded(
    options: argparse.Namespace, shapes: Sequence[_shapes.Named], device: DeviceClass, policy: str
) -> dict[str, TuningRecord]:
    """The records that answer for the shapes, as far as they do: those of a policy first."""
    database = only(options.db)
    found = {}
    for shape in shapes:
        wanted = _shapes.request(shape, device)
        record = find_exact(database, wanted, policy) or find_exact(database, wanted)
        if record is not None and is_final(record):
            found[shape.key] = record
    return found


def _stands(row: Mapping[str, Any] | None, record: TuningRecord) -> bool:
    """Whether the winner has been measured already, and against cuBLAS."""
    if row is None or not row["rivals"].get(VENDOR, {}).get("ratio"):
        return False
    return (row["spec"], row["config"]) == (record.spec, record.config)


def _one(
    contest: Contest, shape: _shapes.Named, record: TuningRecord, long: TuningRecord
) -> tuple[dict[str, Any], Any] | None:
    """Measure one and say what came of it; None where that failed."""
    started = time.monotonic()
    limit_s = _PATIENCE_S + 2 * contest.seconds
    limit_s += 16 * _SUSTAINED_BLOCK_S if shape.name in contest.sustained else 0.0
    try:
        with deadline(limit_s):
            row, details = contest.play(shape, record, long)
    except (TunegenError, Overdue) as error:
        print(f"{shape.key:<11} failed: {error}", flush=True)
    except Exception:  # a fault in one must not keep the others from being measured
        print(f"{shape.key:<11} failed:\n{traceback.format_exc(limit=-4)}", flush=True)
    else:
        row["seconds"] = time.monotonic() - started
        print(line(shape.key, row, row["seconds"]), flush=True)
        for name, rival in row["rivals"].items():
            if rival["failure"]:
                reason = " ".join(rival["failure"].split())[:160]
                print(f"  without {_shapes.RIVALS[name]}: {reason}", flush=True)
        return row, details
    # Either may be in the middle of something; each begins anew where it is asked again.
    for station in (contest.card, contest.rivals):
        station.close()
    return None


def _about(gpu: GpuInfo, driver: str, rows: Mapping[str, Any]) -> dict[str, str]:
    """What the results were measured with."""
    last = [row["rivals"].get(VENDOR, {}).get("description", "") for row in rows.values()]
    return {
        "device": gpu.name,
        "driver": driver,
        "cublas": next((text for text in reversed(last) if text), "no cuBLAS"),
        "triton": _rival_triton.version(),
        "nvrtc": compiler.nvrtc_version(),
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", type=Path, default=_tree.TUNED_DB, help="where records are")
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
        "--sustained", type=_shapes.words, default=[], metavar="S5,P2",
        help="shapes that are timed in sustained blocks as well",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="also those that stand, anew")
    parser.add_argument("--device", type=int, metavar="INDEX", help="which GPU")
    parser.add_argument(
        "--seconds-each", type=float, default=5.0, metavar="S", help="for the rounds of a shape"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin nothing that might end after so long"
    )
    parser.add_argument("--json", type=Path, default=JSON, help="the results so far")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for results as JSON")
    parser.add_argument("--verdict", action="store_true", help="measure nothing, judge --json")
    parser.add_argument("--readme", action="store_true", help="measure nothing, write the table")
    parser.add_argument("--readme-file", type=Path, default=README, help="where it is written")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

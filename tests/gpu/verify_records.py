# SPDX-License-Identifier: Apache-2.0
"""Check every shipped record of the GPU that is here: is it right, and as fast as it says?

::

    python tests/gpu/verify_records.py
    python tests/gpu/verify_records.py --db elsewhere --only axpy --seconds-each 5 --out details

Each winner is built again from the templates and checked as in the finals: the whole result on
normal and on small-integer inputs, poison and guard bands, a second run bit by bit, and the edge
problems of its operation. Then it is timed against the vendor's library in turns, under the policy
of its record. One worker and one process with the library serve all records.

Exit code 1 where a record is wrong, stale, or slower than it says. It is that where the time of
the vendor's library over ours, with its whole 95 % interval, is more than 5 % below the recorded
one; where the library is another one or none, where our time is more than 5 % above the recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _tree
from _records import (
    Overdue,
    deadline,
    is_final,
    only,
    size,
    title,
    wait_until_alone,
    whole,
    write_json,
)

from tunegen import compiler, kernels, session
from tunegen.errors import TunegenError
from tunegen.model import Config, DeviceClass, DeviceIdentity, GpuInfo, TuningRecord
from tunegen.runner import ratios, rounds
from tunegen.runner.contenders import VENDOR
from tunegen.runner.errand import Errand
from tunegen.runner.process import Worker
from tunegen.runner.protocol import Enter, Entered, Open, Opened, Prepare, Request
from tunegen.runner.qualify import Finalist, Qualifier
from tunegen.runner.quarantine import Fault
from tunegen.runner.station import ENTER_SECONDS, OPEN_SECONDS, Station, prepare_seconds
from tunegen.session import gpu as gpus
from tunegen.session.devices import measuring_gpu
from tunegen.session.recording import images
from tunegen.session.setups import ProblemSetup, rotation

# How much slower than recorded is too slow. Cards of one kind, and the same card on another day,
# differ by some percent.
MARGIN = 0.05

OURS = "ours"

# Inputs that neither a search nor its finals have seen.
_SEED = 1000

_VENDOR_SECONDS = 120.0

# What one record may take before it is given up.
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a record. ``faults`` are the reasons why it does not hold; ``right`` is None
    where it was not run. ``cubin`` says whether the same machine code was built: "yes", "code"
    (another file around the same code) or "no"."""

    faults: tuple[str, ...] = ()
    stale: bool = False
    right: bool | None = None
    us: ratios.Estimate | None = None
    ratio: ratios.Estimate | None = None
    relative_error: float | None = None
    cubin: str = ""
    library: str = ""
    no_library: str = ""
    seconds: float = 0.0


class Library:
    """The vendor's library in a process of its own, which is kept from record to record."""

    def __init__(self, gpu: GpuInfo) -> None:
        self._gpu = gpu
        self._worker: Worker | None = None
        self.missing = ""
        self.own_pids: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._worker, self.missing = gpus.vendor_worker(self._gpu)
        self._opened = False

    def send(self, record: TuningRecord, prepare: Prepare, prepare_s: float) -> Errand | None:
        """Have it prepare a record's problem, while something else is done."""
        if self._worker is not None and not self._worker.alive:
            self._worker.kill()
            self._start()
        if self._worker is None:
            return None
        operation = kernels.operation(record.operation)
        enter = Enter.vendor(VENDOR, operation, record.problem)
        asked: list[tuple[Request, float]] = [(prepare, prepare_s), (enter, _VENDOR_SECONDS)]
        errand = Errand(
            self._worker, [*([] if self._opened else [(Open(0), OPEN_SECONDS)]), *asked]
        )
        errand.advance()
        return errand

    def receive(self, errand: Errand) -> str:
        """Wait until it is ready; how the library is called, or the empty string."""
        errand.finish()
        described = ""
        for answer in errand.answers:
            if isinstance(answer, Opened):
                self._opened = True
                self.own_pids.update(answer.nvml_pids)
            if isinstance(answer, Entered):
                described = answer.description
        return described

    def close(self) -> None:
        """End it; the next record starts another one."""
        if self._worker is not None:
            self._worker.kill()


@dataclass(slots=True)
class Checking:
    """Checks records, one after the other, on one GPU."""

    card: Station
    library: Library
    device: DeviceClass
    free_bytes: int
    seconds: float
    nvrtc: compiler.NvrtcCompiler

    def check(self, record: TuningRecord, built: session.Build) -> Found:
        cubin, faults = compared(record, built)
        operation = built.request.operation
        sets = rotation(operation, record.problem, self.device.l2_bytes, self.free_bytes)
        setup = ProblemSetup(operation, self.device, self.nvrtc)
        prepare = setup(record.problem, inputs="normal", seed=_SEED, sets=sets)
        prepare_s = prepare_seconds(operation.flops(record.problem))
        errand = self.library.send(record, prepare, prepare_s)
        qualifier = Qualifier(
            station=self.card, setup=setup, problem=record.problem, operation=operation,
            device=self.device, seed=_SEED, sets=sets,
            wait=errand.advance if errand else lambda: None,
        )  # fmt: skip
        finalist = Finalist(
            OURS, 0, built.candidate, built.plan, trial_us=record.measurement.median_us
        )
        (qualified,) = qualifier.run([finalist])
        library = self.library.receive(errand) if errand else ""
        found = Found(
            tuple(faults), right=not qualified.reason, cubin=cubin, library=library,
            relative_error=qualified.relative_error,
            no_library=errand.failure if errand else self.library.missing,
        )  # fmt: skip
        if qualified.reason:
            return dataclasses.replace(found, faults=(*found.faults, qualified.reason))
        if record.deterministic and not qualified.deterministic:
            faults.append("its result differs from run to run, and was recorded as deterministic")
        return self._timed(record, finalist, errand, dataclasses.replace(found, faults=(*faults,)))

    def _timed(
        self, record: TuningRecord, finalist: Finalist, errand: Errand | None, found: Found
    ) -> Found:
        executable = finalist.executable(record.problem, record.problem, self.device)
        answer = self.card.enter(Enter(OURS, executable), ENTER_SECONDS)
        if not isinstance(answer, Entered):
            reason = Fault.of(answer).reason
            return dataclasses.replace(found, faults=(*found.faults, f"timing: {reason}"))
        asked: dict[str, rounds.Asked] = {OURS: self.card}
        if errand is not None and found.library:
            asked[VENDOR] = errand.worker
        played, times = self._played(record, asked)
        faults = [f"timing {name}: {fault.reason}" for name, fault in played.faults.items()]
        if played.shared(self.library.own_pids | self.card.own_pids):
            faults.append("others used the card meanwhile: its times say nothing")
        if OURS not in times:
            return dataclasses.replace(found, faults=(*found.faults, *faults))
        us = ratios.estimate(times[OURS])
        ratio = ratios.ratio(times[VENDOR], times[OURS]) if VENDOR in times else None
        faults += slower(record, us, ratio, found.library)
        return dataclasses.replace(found, us=us, ratio=ratio, faults=(*found.faults, *faults))

    def _played(
        self, record: TuningRecord, asked: Mapping[str, rounds.Asked]
    ) -> tuple[rounds.Played, dict[str, list[float]]]:
        """Blocks in turns, as the finals play them under the policy of the record."""
        m = record.measurement
        if m.policy == "sustained":
            block_s = rounds.sustained_block(self.seconds, len(asked)) or self.seconds
            order = ratios.there_and_back(list(asked))
            played = rounds.play(asked, "sustained", [order], block_s, self.card.forget)
            return played, rounds.sustained_times(played)
        longest_us = m.median_us * max(1.0, record.baseline_ratio or 1.0)
        count, block_s = rounds.burst_rounds(self.seconds, len(asked), longest_us)
        orders = ratios.shuffled(list(asked), count, _SEED)
        until = time.monotonic() + self.seconds
        policy: Any = m.policy
        played = rounds.play(asked, policy, orders, block_s, self.card.forget, until)
        return played, rounds.burst_times(played)


def compared(record: TuningRecord, built: session.Build) -> tuple[str, list[str]]:
    """Whether a build gave the machine code of the record, and what is wrong where it did not."""
    made = images(built)
    if [image.cubin_sha256 for image in made] == [i.cubin_sha256 for i in record.images]:
        return "yes", []
    codes = [image.code_sha256 for image in made]
    if all(codes) and codes == [image.code_sha256 for image in record.images]:
        return "code", []
    nvrtc = built.kernels[0].nvrtc
    if nvrtc == record.nvrtc:
        return "no", [f"NVRTC {nvrtc} makes other code of it than it did"]
    return "no", []


def slower(
    record: TuningRecord, us: ratios.Estimate, ratio: ratios.Estimate | None, library: str
) -> list[str]:
    """The reason why a record does not hold because of its time, if there is one."""
    then = record.baseline_ratio
    if ratio is not None and then is not None and library == record.baseline:
        if ratio.high < then * (1 - MARGIN):
            return [
                f"{library} takes {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of its "
                f"time, {then:.3f} was recorded"
            ]
        return []
    recorded_us = record.measurement.median_us
    if us.low > recorded_us * (1 + MARGIN):
        return [
            f"it takes {us.median:.2f} us [{us.low:.2f}, {us.high:.2f}], "
            f"{recorded_us:.2f} us were recorded"
        ]
    return []


HEADER = (
    f"{'operation':<9} {'problem':<15} {'dtype':<5} {'layout':<6} {'recorded us':>11} "
    f"{'now us':>9} {'ratio then':>10} {'now, 95 %':>21} {'right':>5} {'cubin':>6} "
    f"{'policy':<9} {'s':>4}"
)


def line(record: TuningRecord, found: Found) -> str:
    p = record.problem
    now = f"{found.us.median:.2f}" if found.us else ""
    then = f"{record.baseline_ratio:.3f}" if record.baseline_ratio is not None else ""
    ratio = (
        f"{found.ratio.median:.3f} [{found.ratio.low:.3f}, {found.ratio.high:.3f}]"
        if found.ratio else ""
    )  # fmt: skip
    right = "stale" if found.stale else {True: "yes", False: "NO", None: ""}[found.right]
    return (
        f"{p.operation:<9} {size(p):<15} {p.dtype:<5} {p.layout:<6} "
        f"{record.measurement.median_us:>11.2f} {now:>9} {then:>10} {ratio:>21} {right:>5} "
        f"{found.cubin:>6} {record.measurement.policy:<9} {found.seconds:>4.1f}"
        + ("  FAILED" if found.faults else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        return _run(options)
    except TunegenError as error:
        print(f"error: {error}", flush=True)
        return 1


def _run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    stored = [whole(r) for _, r in only(options.db).records() if r.evidence == "measured"]
    wanted = [record for record in stored if re.search(options.only, title(record.problem))]
    wait_until_alone(options.device)
    gpu = measuring_gpu(options.device)
    with ExitStack() as undo:
        library = Library(gpu)
        undo.callback(library.close)
        card = undo.enter_context(gpus.station(gpu))
        opened = card.open()
        device = gpus.device_class(opened)
        here = [
            r for r in wanted if (r.arch, r.device) == (device.arch, DeviceIdentity.of(device))
        ]
        print(
            f"{gpu.name}, driver {opened.driver}: {len(here)} of {len(stored)} measured records "
            f"in {options.db}"
        )
        if not here:
            return 1
        nvrtc = compiler.NvrtcCompiler(compiler.KernelCache())
        checking = Checking(card, library, device, opened.free_bytes, options.seconds_each, nvrtc)
        pool = undo.enter_context(ThreadPoolExecutor(thread_name_prefix="tunegen-compile"))
        builds = [pool.submit(build_of, record, device) for record in here]
        print(HEADER, flush=True)
        results = []
        for record, build in zip(here, builds, strict=True):
            found = _one(checking, record, build)
            print(line(record, found), flush=True)
            results.append((record, found))
            write_json(options.out, "verify_records.json", _details(results))
    return _summary(results, time.monotonic() - started)


def build_of(record: TuningRecord, device: DeviceClass) -> session.Build:
    """The winner of a record, built anew."""
    specs = kernels.specs_of(record.operation, only=record.spec)
    operation = kernels.operation(record.operation)
    request = session.Request(operation, record.problem, device, specs)
    names = specs[0].space(record.problem, device).names
    config = Config({name: record.config[name] for name in names})
    return session.build(request, specs[0], config, target=record.target)


def _one(checking: Checking, record: TuningRecord, build: Future[session.Build]) -> Found:
    started = time.monotonic()
    stale = session.staleness(record) or session.legality(record)
    if stale:
        build.cancel()
        return Found((stale,), stale=True)
    if not is_final(record):
        return Found(("its finals were not played, so its time is that of a search",))
    try:
        with deadline(_PATIENCE_S):
            found = checking.check(record, build.result())
    except (TunegenError, Overdue) as error:
        checking.library.close()  # it may be in the middle of something
        found = Found((str(error),))
    except Exception:  # a fault in one must not keep the others from being checked
        checking.library.close()
        found = Found((traceback.format_exc(limit=-4),))
    return dataclasses.replace(found, seconds=time.monotonic() - started)


def _summary(results: Sequence[tuple[TuningRecord, Found]], seconds: float) -> int:
    failed = [(record, found) for record, found in results if found.faults]
    for record, found in failed:
        for fault in found.faults:
            print(f"{title(record.problem)}: {fault}")
    for reason in dict.fromkeys(found.no_library for _, found in results if found.no_library):
        print(f"no vendor's library: {reason}")
    us = [f.us.median / r.measurement.median_us for r, f in results if f.us]
    drift = f"; times now are {_mean(us):.3f} of the recorded ones" if us else ""
    print(
        f"{len(results)} records: {sum(bool(f.right) for _, f in results)} right, "
        f"{sum(f.stale for _, f in results)} stale, {len(failed)} failed{drift}; {seconds:.0f} s",
        flush=True,
    )
    return 1 if failed else 0


def _mean(values: Sequence[float]) -> float:
    """The geometric one, since these are ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _details(results: Sequence[tuple[TuningRecord, Found]]) -> list[dict[str, Any]]:
    return [
        {
            "record": title(record.problem),
            "spec": record.spec,
            "config": record.config,
            "policy": record.measurement.policy,
            "recorded_us": record.measurement.median_us,
            "recorded_ratio": record.baseline_ratio,
            "found": found,
        }
        for record, found in results
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", type=Path, default=_tree.TUNED_DB, help="the records to check")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression")
    parser.add_argument("--device", type=int, metavar="INDEX", help="which GPU")
    parser.add_argument(
        "--seconds-each", type=float, default=2.0, metavar="S", help="for timing one record"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for details as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

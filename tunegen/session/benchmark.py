# SPDX-License-Identifier: Apache-2.0
"""An operation's journey, each step measured apart: to the device, the kernel, and back.

Beside it stand the same operation by other kernels, by the vendor's library, and by NumPy on the
CPU, and the floor. No step overlaps another one here, as a program could have them do.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunegen import calibration, compiler, kernels, perfmodel
from tunegen.database import Database
from tunegen.errors import UsageError
from tunegen.model import ARCHS, Config, Figure, GpuInfo, KernelSpec
from tunegen.runner import rounds
from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import (
    Answer,
    Enter,
    Entered,
    Executable,
    Failed,
    Open,
    Opened,
    Policy,
    Prepare,
    Transfer,
    Transferred,
)
from tunegen.runner.quarantine import Fault
from tunegen.runner.station import ENTER_SECONDS, OPEN_SECONDS, Station, prepare_seconds
from tunegen.session.building import build
from tunegen.session.cpu import CpuRun, run_on_cpu
from tunegen.session.devices import measuring_gpu
from tunegen.session.gpu import device_class, station, vendor_worker
from tunegen.session.records import find
from tunegen.session.resolve import Request, complete_config, request
from tunegen.session.setups import ProblemSetup, rotation

POLICY: Policy = "burst"
VENDOR = "vendor"

# Seconds of timing for all contenders of one problem, and for NumPy.
DEFAULT_SECONDS = 3.0
_CPU_SECONDS = 1.0

# Data is moved at one rate from some megabytes on: more than this is not moved, but told at it.
MOST_MOVED_BYTES = 1 << 28
_MOVES = 10

_FIRST_BLOCK_SECONDS = 0.01
_TRANSFER_SECONDS = 60.0
_VENDOR_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute the operation on the device.

    ``name`` is "tuned", "default", "naive" or "vendor"; ``description`` the configuration with
    where it is from, or the library. ``us`` is None where it failed, for the ``failure``.
    """

    name: str
    description: str
    us: Figure | None = None
    relative_error: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """Bringing ``bytes`` to the device or back. ``moved_bytes`` were moved to measure it: where
    they are fewer, the time is scaled to all of them."""

    direction: Literal["to device", "to host"]
    pinned: bool
    bytes: int
    moved_bytes: int
    us: Figure | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The journey of one problem. The first of ``contenders`` is what tunegen would run."""

    request: Request
    gpu: GpuInfo
    policy: str
    contenders: tuple[Contender, ...]
    moves: tuple[Move, ...]
    cpu: CpuRun
    floor: perfmodel.Floor
    calibrated: bool
    notes: tuple[str, ...]

    @property
    def kernel_us(self) -> float | None:
        """The time of what tunegen would run, None where it failed."""
        us = self.contenders[0].us
        return None if us is None else us.median

    @property
    def cpu_us(self) -> float | None:
        samples = self.cpu.samples_us
        return statistics.median(samples) if samples else None

    def journey_us(self, *, pinned: bool) -> float | None:
        """There, the kernel, and back, one after the other; None where a step failed."""
        steps = [move.us for move in self.moves if move.pinned == pinned]
        if self.kernel_us is None or not all(steps):
            return None
        return self.kernel_us + sum(us.median for us in steps if us is not None)


def bench(
    operation: str,
    problems: Sequence[str | Sequence[int] | Mapping[str, int] | None] = (None,),
    *,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    device: int | None = None,
    shared: bool = False,
    vendor: bool = True,
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Iterator[BenchResult]:
    """Measure the journey of an operation for each problem, on one GPU.

    Raises :class:`tunegen.errors.UsageError` for names and values that do not exist and for empty
    problems, :class:`tunegen.errors.DeviceError` where there is no GPU, or others use it, unless
    ``shared``, or where it has no room for the operands.
    """
    if not seconds > 0:
        raise UsageError(f"seconds={seconds} is no budget: it is a number above 0")

    def ask(arch: str) -> list[Request]:
        return [
            request(
                operation, arch=arch, problem=problem, dtype=dtype, layout=layout,
                attributes=attributes, spec=spec, specs=specs,
            )
            for problem in problems
        ]  # fmt: skip

    for asked in ask(ARCHS[0]):  # what is wrong whatever the arch is said before a GPU is sought
        if not _bytes(asked, "out", "inout"):
            text = asked.operation.text(asked.problem)
            raise UsageError(f"{operation} {text} writes nothing: there is nothing to time")
    gpu = measuring_gpu(device, shared=shared)
    wanted = ask(gpu.arch)
    kept = compiler.KernelCache(Path(cache) if cache else None)
    with ExitStack() as undo:
        library, no_vendor = vendor_worker(gpu) if vendor else (None, "it was not asked for")
        if library is not None:
            undo.callback(library.close)
        card = undo.enter_context(station(gpu))
        opened = card.open()
        device_found = device_class(opened)
        if library is not None and (reason := _refusal(library, Open(0), OPEN_SECONDS, Opened)):
            library, no_vendor = None, reason
        for asked in wanted:
            run = _Run(
                dataclasses.replace(asked, device=device_found), gpu, card, library, no_vendor,
                opened, kept, seconds, seed,
            )  # fmt: skip
            yield run.result(Database(Path(db) if db else None))


@dataclass(slots=True)
class _Run:
    """The measuring of one problem."""

    request: Request
    gpu: GpuInfo
    card: Station
    library: Worker | None
    no_vendor: str
    opened: Opened
    cache: compiler.KernelCache
    seconds: float
    seed: int

    def result(self, database: Database) -> BenchResult:
        wanted = self.request
        prepare = self._prepare()
        limit_s = prepare_seconds(wanted.operation.flops(wanted.problem))
        self.card.prepare(prepare, limit_s)
        contenders = self._times(prepare, limit_s, choices(wanted, database))
        moves = tuple(
            self._move(direction, pinned)
            for direction in ("to device", "to host")
            for pinned in (False, True)
        )
        found = calibration.find(wanted.device)
        return BenchResult(
            request=wanted,
            gpu=self.gpu,
            policy=POLICY,
            contenders=contenders,
            moves=moves,
            cpu=run_on_cpu(wanted.operation, wanted.problem, _CPU_SECONDS, self.seed),
            floor=perfmodel.floor(wanted.operation, wanted.problem, wanted.device, found),
            calibrated=found is not None,
            notes=(f"no vendor's library: {self.no_vendor}",) if self.no_vendor else (),
        )

    def _prepare(self) -> Prepare:
        wanted = self.request
        nvrtc = compiler.NvrtcCompiler(self.cache)
        setup = ProblemSetup(wanted.operation, wanted.device, nvrtc)
        sets = rotation(
            wanted.operation, wanted.problem, wanted.device.l2_bytes, self.opened.free_bytes
        )
        return setup(wanted.problem, inputs="normal", seed=self.seed, sets=sets)

    def _times(
        self, prepare: Prepare, prepare_s: float, chosen: Sequence[Choice]
    ) -> tuple[Contender, ...]:
        """Enter everybody, then time those that could in turns."""
        contenders: dict[str, Contender] = {}
        asked: dict[str, rounds.Asked] = {}
        for choice in chosen:
            built = build(self.request, choice.spec, choice.config, cache=self.cache)
            executable = Executable(built.kernels, built.plan)
            answer = self.card.enter(Enter(choice.name, executable), ENTER_SECONDS)
            entered = _entered(choice.name, choice.description, answer)
            contenders[choice.name] = _exact(entered, choice.spec.tolerance(self.request.problem))
            asked[choice.name] = self.card
        if self.library is not None:
            contenders[VENDOR] = self._enter_vendor(prepare, prepare_s)
            asked[VENDOR] = self.library
        able = {name: asked[name] for name, c in contenders.items() if not c.failure}
        played = self._play(able)
        for name, times in rounds.burst_times(played).items():
            figure = Figure(statistics.median(times), min(times), max(times), len(times))
            contenders[name] = dataclasses.replace(contenders[name], us=figure)
        for name, fault in played.faults.items():
            contenders[name] = dataclasses.replace(contenders[name], failure=fault.reason)
        return tuple(contenders.values())

    def _enter_vendor(self, prepare: Prepare, prepare_s: float) -> Contender:
        assert self.library is not None
        wanted = self.request
        answer = self.library.ask(prepare, prepare_s)
        if not isinstance(answer, Failed | Lost):
            enter = Enter.vendor(VENDOR, wanted.operation, wanted.problem)
            answer = self.library.ask(enter, _VENDOR_SECONDS)
        return _entered(VENDOR, "", answer)

    def _play(self, able: Mapping[str, rounds.Asked]) -> rounds.Played:
        """A first block of each says how many rounds there can be."""
        first = rounds.play(able, POLICY, [list(able)], _FIRST_BLOCK_SECONDS, self.card.forget)
        times = rounds.burst_times(first)
        if not times:
            return first
        longest_us = max(own[0] for own in times.values())
        count, block_s = rounds.burst_rounds(self.seconds, len(times), longest_us)
        rng = random.Random(self.seed)
        orders = [rng.sample(list(times), len(times)) for _ in range(count)]
        left = {name: able[name] for name in times}
        played = rounds.play(left, POLICY, orders, block_s, self.card.forget)
        played.faults.update(first.faults)
        return played

    def _move(self, direction: Literal["to device", "to host"], pinned: bool) -> Move:
        roles = ("in", "inout") if direction == "to device" else ("out", "inout")
        wanted_bytes = _bytes(self.request, *roles)
        moved = min(wanted_bytes, MOST_MOVED_BYTES)
        nothing = Figure(0.0, 0.0, 0.0, 0)
        if not moved:
            return Move(direction, pinned, 0, 0, nothing)
        transfer = Transfer(moved, direction == "to device", pinned, _MOVES)
        answer = self.card.ask(transfer, _TRANSFER_SECONDS)
        if not isinstance(answer, Transferred):
            reason = Fault.of(answer).reason
            return Move(direction, pinned, wanted_bytes, moved, None, reason)
        samples = [us * wanted_bytes / moved for us in answer.samples_us]
        figure = Figure(statistics.median(samples), min(samples), max(samples), len(samples))
        return Move(direction, pinned, wanted_bytes, moved, figure)


def _entered(name: str, description: str, answer: Answer | Lost) -> Contender:
    if isinstance(answer, Entered):
        described = description or answer.description
        return Contender(name, described, relative_error=answer.relative_error)
    return Contender(name, description, failure=Fault.of(answer).reason)


def _exact(contender: Contender, tolerance: float) -> Contender:
    """The contender, which fails where its result is wrong: its time would mean nothing."""
    error = contender.relative_error
    if error is None or error <= tolerance:
        return contender
    return dataclasses.replace(
        contender,
        failure=f"wrong result: the relative RMS error is {error:.3g}, at most {tolerance:.3g} "
        "was expected",
    )


def _refusal(worker: Worker, asked: Open, timeout_s: float, wanted: type[Opened]) -> str:
    """Why a worker did not do what it was asked for, or the empty string."""
    answer = worker.ask(asked, timeout_s)
    return "" if isinstance(answer, wanted) else Fault.of(answer).reason


def _bytes(wanted: Request, *roles: str) -> int:
    arrays = wanted.operation.arrays(wanted.problem)
    return sum(array.bytes for array in arrays if array.role in roles)


# --- what is compared ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to time, and what it is."""

    name: str
    spec: KernelSpec
    config: Config
    description: str


def choices(wanted: Request, database: Database) -> tuple[Choice, ...]:
    """The recorded winner where there is one, the operation's default, and the naive spec; what
    is the same configuration only once, under its first name."""
    default = wanted.spec()
    found: list[Choice] = []

    def add(name: str, spec: KernelSpec, config: Config, origin: str) -> None:
        if all((choice.spec, choice.config) != (spec, config) for choice in found):
            found.append(Choice(name, spec, config, f"{spec.name}, {origin}: {config}"))

    match = find(database, wanted)
    record = match.record
    chosen = next((s for s in wanted.specs if record and s.name == record.spec), None)
    if record is not None and chosen is not None:
        config = complete_config(chosen, wanted, Config(record.config), {})
        add("tuned", chosen, config, f"{record.evidence} record ({match.rung})")
    add("default", default, default.default(wanted.problem, wanted.device), "its default")
    for spec in wanted.specs:
        if spec.name == "naive" and not spec.refuses(wanted.problem, wanted.device):
            add("naive", spec, spec.default(wanted.problem, wanted.device), "the baseline")
    return tuple(found)

# SPDX-License-Identifier: Apache-2.0
"""Measuring what a GPU really does, and keeping it for its device class."""

from __future__ import annotations

import datetime
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tunegen import __version__, calibration, codegen, compiler
from tunegen.errors import DeviceError
from tunegen.kernels import calibrate as probes
from tunegen.kernels.checks import DEFINITIONS
from tunegen.model import (
    Calibration,
    CompiledKernel,
    Compiler,
    DeviceClass,
    DeviceIdentity,
    Figure,
    KernelDefinition,
    StreamPoint,
    Telemetry,
)
from tunegen.runner import rounds
from tunegen.runner.finals import SUSTAINED_FROM_US
from tunegen.runner.protocol import Enter, Entered, Executable, Failed, Policy, Prepare
from tunegen.runner.station import ENTER_SECONDS, Station, prepare_seconds
from tunegen.session.devices import measuring_gpu
from tunegen.session.gpu import device_class, station

# Calls go from one set of operands to the next, at boost clocks: what a ceiling is. Streams that
# take so long that finals would time them in sustained blocks are timed so as well: on an H200
# copies of 2 GB were half a percent faster back to back than with rests.
POLICY: Policy = "burst"

# Repeats of the contenders that are close to the best after a first block, and how close that is.
REPEATS = 7
_CLOSE = 1.05

# Seconds of device time in which one contender is timed once.
_BLOCK_SECONDS = 0.01

# How many of the contenders that are close have sustained blocks, and the seconds of one.
_SUSTAINED_CONTENDERS, _SUSTAINED_BLOCK_SECONDS = 3, 0.3

# The part of the free memory that operands may take: guard bands and originals come on top.
_MEMORY_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Line:
    """A figure as it is shown. ``of_datasheet`` is its share of what the device class states,
    None where that states nothing."""

    name: str
    unit: str
    figure: Figure
    of_datasheet: float | None = None


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """A calibration, the file it went to, and its figures beside those of the datasheet.
    ``failures`` are the probes that gave nothing, with the reason."""

    calibration: Calibration
    device: DeviceClass
    path: Path
    lines: tuple[Line, ...]
    failures: tuple[str, ...]
    seconds: float


def calibrate(
    *,
    device: int | None = None,
    shared: bool = False,
    folder: Path | str | None = None,
    cache: Path | str | None = None,
    on_probe: Callable[[str, int, int], None] | None = None,
) -> CalibrationResult:
    """Measure the GPU with index ``device`` (as nvidia-smi counts; the first one by default) and
    keep the result for its device class, in ``folder`` or the user's data directory.

    ``on_probe`` is told what is measured next, its number, and how many there are.

    Raises :class:`DeviceError` where there is no GPU, or others use it, unless ``shared``.
    """
    started = time.perf_counter()
    gpu = measuring_gpu(device, shared=shared)
    nvrtc = compiler.NvrtcCompiler(compiler.KernelCache(Path(cache) if cache else None))
    with station(gpu) as card:
        opened = card.open()
        known = device_class(opened)
        measured = measure(card, known, opened.free_bytes, nvrtc, on_probe)
    others = {pid for state in measured.telemetry for pid in state.other_pids}
    if others - set(opened.nvml_pids) and not shared:
        raise DeviceError(
            f"another process computed on GPU {gpu.index} ({gpu.name}) meanwhile",
            hint="--shared keeps the figures all the same",
        )
    found = evaluate(measured, known, opened.driver)
    return CalibrationResult(
        calibration=found,
        device=known,
        path=calibration.save(found, Path(folder) if folder else None),
        lines=lines(found, known),
        failures=tuple(measured.failures),
        seconds=time.perf_counter() - started,
    )


# --- measuring -----------------------------------------------------------------------------------

Times = Mapping[str, Sequence[float]]


@dataclass(slots=True)
class Measured:
    """Every probe with the microseconds of a call, by contender, one for each repeat; what the
    card was like meanwhile; and the probes that gave nothing, with the reason. ``nvrtc`` is the
    compiler's version."""

    nvrtc: str
    times: list[tuple[probes.Probe, Times]] = field(default_factory=list)
    telemetry: list[Telemetry] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def measure(
    card: Station,
    device: DeviceClass,
    free_bytes: int,
    nvrtc: Compiler,
    on_probe: Callable[[str, int, int], None] | None = None,
    seed: int = 0,
) -> Measured:
    """Run every probe on the device that ``card`` has opened.

    Contenders that fail fall out. Raises :class:`DeviceError` where no worker can be had any more.
    """
    planned = list(probes.every(device, int(free_bytes * _MEMORY_SHARE)))
    kernels = _compile(planned, device.arch, nvrtc)
    checks = tuple(kernels[_key(definition)] for definition in DEFINITIONS)
    rng = random.Random(seed)
    measured = Measured(checks[0].nvrtc)
    for number, probe in enumerate(planned):
        if on_probe is not None:
            on_probe(label(probe), number, len(planned))
        request = Prepare(probe.arrays, probe.scalars, seed + number, probe.sets, checks)
        card.prepare(request, prepare_seconds(0))
        executables = {
            contender.name: Executable(
                tuple(kernels[_key(definition)] for definition in contender.definitions),
                contender.plan,
            )
            for contender in probe.contenders
        }
        _contest(card, probe, executables, rng, measured)
    return measured


def _contest(
    card: Station,
    probe: probes.Probe,
    executables: Mapping[str, Executable],
    rng: random.Random,
    measured: Measured,
) -> None:
    """Time all contenders once, and those that are close in every repeat."""
    entered, reasons = [], []
    for name, executable in executables.items():
        answer = card.enter(Enter(name, executable), ENTER_SECONDS)
        if isinstance(answer, Entered):
            entered.append(name)
        else:
            reasons.append(answer.reason if isinstance(answer, Failed) else str(answer))
    policy: Policy = "warm" if probe.name == "l2_read" else POLICY
    asked = dict.fromkeys(entered, card)
    first = rounds.play(asked, policy, [entered], _BLOCK_SECONDS, card.forget)
    times = {name: own[0] for name, own in rounds.burst_times(first).items()}
    limit_us = _CLOSE * min(times.values(), default=0.0)
    close = [name for name, us in times.items() if probe.kind == "launch" or us <= limit_us]
    orders = [rng.sample(close, len(close)) for _ in range(REPEATS)]
    asked = dict.fromkeys(close, card)
    played = rounds.play(asked, policy, orders, _BLOCK_SECONDS, card.forget)
    found = rounds.burst_times(played)
    if found:
        parts = [played]
        if probe.kind == "stream" and _fastest(found)[1] > SUSTAINED_FROM_US:
            parts.append(_sustained(card, found))
            for name, own in rounds.sustained_times(parts[-1]).items():
                found[f"{name} sustained"] = own
        measured.times.append((probe, found))
        measured.telemetry += [
            block.after for part in parts for own in part.blocks.values() for block in own
        ]
        return
    reasons += [fault.reason for part in (first, played) for fault in part.faults.values()]
    measured.failures.append(f"{label(probe)}: {'; '.join(dict.fromkeys(reasons))}")


def _sustained(card: Station, found: Times) -> rounds.Played:
    """Blocks of the fastest contenders, there and back."""
    names = sorted(found, key=lambda name: statistics.median(found[name]))[:_SUSTAINED_CONTENDERS]
    orders = [names, names[::-1]]
    asked = dict.fromkeys(names, card)
    return rounds.play(asked, "sustained", orders, _SUSTAINED_BLOCK_SECONDS, card.forget)


def _fastest(times: Times) -> tuple[str, float]:
    """The contender with the lowest median, and that."""
    medians = {name: statistics.median(own) for name, own in times.items()}
    name = min(medians, key=medians.__getitem__)
    return name, medians[name]


def label(probe: probes.Probe) -> str:
    """``copy 2147 MB``, ``fp32``."""
    return f"{probe.name} {probe.amount / 1e6:.0f} MB" if probe.kind == "stream" else probe.name


def _compile(
    planned: Sequence[probes.Probe], arch: str, nvrtc: Compiler
) -> dict[str, CompiledKernel]:
    """Every kernel that is needed, by :func:`_key`, on all cores."""
    definitions = [d for probe in planned for c in probe.contenders for d in c.definitions]
    wanted = {_key(definition): definition for definition in (*definitions, *DEFINITIONS)}

    def build(definition: KernelDefinition) -> CompiledKernel:
        return nvrtc.compile(codegen.render_definition(definition, arch), arch)

    with ThreadPoolExecutor(thread_name_prefix="tunegen-compile") as pool:
        return dict(zip(wanted, pool.map(build, wanted.values()), strict=True))


def _key(definition: KernelDefinition) -> str:
    return f"{definition.template} {sorted({**definition.types, **definition.constants}.items())}"


# --- evaluating ----------------------------------------------------------------------------------


def evaluate(measured: Measured, device: DeviceClass, driver: str) -> Calibration:
    """The figures of what was measured.

    Raises :class:`DeviceError` where launches could not be timed: what else is known then?
    """
    launch, dependent = _launches(measured)
    streams: dict[str, list[StreamPoint]] = {}
    memories: dict[str, Figure] = {}
    peaks: dict[str, Figure] = {}
    for probe, times in measured.times:
        if probe.kind == "launch":
            continue
        us = _best(times, tried=len(probe.contenders))
        match probe.kind:
            case "stream":
                streams.setdefault(probe.name, []).append(StreamPoint(int(probe.amount), us))
            case "memory":
                memories[probe.name] = us.rate(probe.amount / 1e3, launch.median)
            case "peak":
                peaks[probe.name] = us.rate(probe.amount / 1e6, launch.median)
    states = measured.telemetry
    clocks = [t.sm_clock_mhz for t in states if t.sm_clock_mhz is not None]
    return Calibration(
        arch=device.arch,
        device=DeviceIdentity.of(device),
        streams={
            name: tuple(sorted(points, key=lambda point: point.bytes))
            for name, points in streams.items()
        },
        l2_read_gbps=memories.get("l2_read"),
        shared_read_gbps=memories.get("shared_read"),
        peak_tflops=peaks,
        launch_us=launch,
        dependent_launch_us=dependent,
        policy=POLICY,
        driver=driver,
        nvrtc=measured.nvrtc,
        tunegen=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        sm_clock_mhz=(min(clocks), max(clocks)) if clocks else None,
        memory_clock_mhz=max((t.memory_clock_mhz or 0 for t in states), default=0) or None,
        power_w=max((t.power_w or 0.0 for t in states), default=0.0) or None,
        temperature_c=max((t.temperature_c or 0 for t in states), default=0) or None,
        throttle=tuple(sorted({reason for t in states for reason in t.throttle})),
    )


def _best(times: Times, tried: int) -> Figure:
    """The times of the contender with the lowest median."""
    name, _ = _fastest(times)
    return _figure(times[name], name, tried)


def _figure(values: Sequence[float], config: str = "", tried: int = 1) -> Figure:
    return Figure(statistics.median(values), min(values), max(values), len(values), config, tried)


def _launches(measured: Measured) -> tuple[Figure, Figure]:
    """Microseconds of a launch, and what one more of the same call adds."""
    found = next((times for probe, times in measured.times if probe.kind == "launch"), {})
    if len(found) < 2:
        raise DeviceError(f"launches could not be timed: {'; '.join(measured.failures)}")
    more = [
        (chain - once) / (probes.CHAIN_LAUNCHES - 1)
        for once, chain in zip(found["once"], found["chain"], strict=False)
    ]
    if min(more) <= 0:
        raise DeviceError(f"{probes.CHAIN_LAUNCHES} launches took no longer than one")
    return _figure(found["once"]), _figure(more)


def lines(found: Calibration, device: DeviceClass) -> tuple[Line, ...]:
    """The figures in the order in which they are shown, streams at their largest size."""
    clock = device.sm_count * device.clock_mhz
    stated = {
        "fp32": 2 * device.fp32_per_clock * clock / 1e6,
        "fp64": 2 * device.fp64_per_clock * clock / 1e6,
    }

    def line(name: str, unit: str, figure: Figure, datasheet: float = 0.0) -> Line:
        return Line(name, unit, figure, figure.median / datasheet if datasheet else None)

    rows = [
        line(f"device memory, {name}", "GB/s", points[-1].gbps, device.memory_gbps)
        for name, points in found.streams.items()
        if points
    ]
    if found.l2_read_gbps is not None:
        rows.append(line("L2, read", "GB/s", found.l2_read_gbps, device.l2_gbps))
    if found.shared_read_gbps is not None:
        stated_shared = probes.SHARED_BYTES_PER_CLOCK * clock / 1e3
        rows.append(line("shared memory, read", "GB/s", found.shared_read_gbps, stated_shared))
    rows += [
        line(f"multiply-add, {name.replace('_', ' ')}", "TFLOP/s", figure, stated.get(name, 0.0))
        for name, figure in found.peak_tflops.items()
    ]
    rows.append(line("launch", "us", found.launch_us))
    rows.append(line("launch, each further one", "us", found.dependent_launch_us))
    return tuple(rows)

# SPDX-License-Identifier: Apache-2.0
"""Measuring what a GPU really does, and keeping it for its device class."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunegen import __version__, calibration, compiler
from tunegen.errors import DeviceError
from tunegen.kernels import calibrate as probes
from tunegen.model import Calibration, DeviceClass, DeviceIdentity, Figure, StreamPoint
from tunegen.session.devices import measuring_gpu
from tunegen.session.gpu import device_class, station
from tunegen.session.probing import POLICY, Measured, Outcome, fastest, measure


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
    fresh: bool = False,
    folder: Path | str | None = None,
    cache: Path | str | None = None,
    on_probe: Callable[[str, int, int], None] | None = None,
) -> CalibrationResult:
    """Measure the GPU with index ``device`` (as nvidia-smi counts; the first one by default) and
    keep the result for its device class, in ``folder`` or the user's data directory: joined with
    earlier runs under the same driver, or in their place where ``fresh`` is asked for.

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
    kept = None if fresh else calibration.find(known, Path(folder) if folder else None)
    if kept is not None and kept.driver == found.driver:
        found = found.joined(kept)
    return CalibrationResult(
        calibration=found,
        device=known,
        path=calibration.save(found, Path(folder) if folder else None),
        lines=lines(found, known),
        failures=tuple(measured.failures),
        seconds=time.perf_counter() - started,
    )


# --- evaluating ----------------------------------------------------------------------------------


def evaluate(measured: Measured, device: DeviceClass, driver: str) -> Calibration:
    """The figures of what was measured.

    Raises :class:`DeviceError` where launches could not be timed: what else is known then?
    """
    launch, dependent = _launches(measured)
    streams: dict[str, list[StreamPoint]] = {}
    memories: dict[str, Figure] = {}
    peaks: dict[str, Figure] = {}
    for outcome in measured.outcomes:
        probe = outcome.probe
        if probe.kind == "launch":
            continue
        us = _best(outcome)
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


def _best(outcome: Outcome) -> Figure:
    """The times of the contender with the lowest median."""
    name = fastest(outcome.times)
    return _figure(outcome.times[name], name, outcome.tried)


def _figure(values: Sequence[float], config: str = "", tried: int = 1) -> Figure:
    return Figure(statistics.median(values), min(values), max(values), len(values), config, tried)


def _launches(measured: Measured) -> tuple[Figure, Figure]:
    """Microseconds of a launch, and what one more of the same call adds."""
    found = next((o.times for o in measured.outcomes if o.probe.kind == "launch"), {})
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

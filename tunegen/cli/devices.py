# SPDX-License-Identifier: Apache-2.0
"""tunegen devices and tunegen calibrate: which GPUs are here, and what they really do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    console,
    device_options,
    json_option,
    pass_settings,
    print_json,
    print_labelled,
    print_table,
    table,
)

if TYPE_CHECKING:
    from tunegen.model import Figure, StreamPoint
    from tunegen.session import CalibrationResult

DEVICES_EPILOG = """\b
Examples:
  tunegen devices
  tunegen devices --json
"""

CALIBRATE_EPILOG = """\b
Examples:
  tunegen calibrate
  tunegen calibrate --device 1
  tunegen calibrate --json
"""


@click.command(epilog=DEVICES_EPILOG)
@json_option
@pass_settings
def devices(settings: Settings, as_json: bool) -> None:
    """List the GPUs that programs started here may use.

    With no GPU the list is empty, and what was found instead is said on stderr.
    """
    from tunegen import session

    listing = session.list_gpus()
    found = listing.found
    if not listing.gpus:
        hint = f" ({found.hint})" if found.hint else ""
        settings.note(f"{found.reason}{hint}")
    if found.hidden:
        settings.note(f"CUDA_VISIBLE_DEVICES hides {found.hidden} more")
    if as_json:
        print_json(
            {
                "driver": found.driver,
                "driver_cuda": found.driver_cuda,
                "hidden": found.hidden,
                "devices": [
                    {
                        "index": item.gpu.index,
                        "name": item.gpu.name,
                        "arch": item.gpu.arch,
                        "uuid": item.gpu.uuid,
                        "memory_bytes": item.gpu.memory_bytes,
                        "free_bytes": item.gpu.free_bytes,
                        "mig": item.gpu.mig,
                        "slices": item.gpu.slices,
                        "other_processes": item.gpu.other_processes,
                        "calibrated": item.calibration.created if item.calibration else None,
                    }
                    for item in listing.gpus
                ],
            }
        )
        return
    if not listing.gpus:
        return
    rows = table("", ">", "device class", "arch", "memory free", "in use by", "calibrated")
    for item in listing.gpus:
        gpu = item.gpu
        memory = f"{gpu.free_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB"
        calibrated = item.calibration.created if item.calibration else "no: tunegen calibrate"
        rows.add_row(str(gpu.index), gpu.name, gpu.arch, memory, _users(gpu), calibrated)
    print_table(rows)
    print_labelled("driver", f"{found.driver}, for CUDA up to {found.driver_cuda}")


def _users(gpu: Any) -> str:
    if gpu.mig:
        return f"MIG, {len(gpu.slices)} slices"
    if not gpu.other_processes:
        return "nobody"
    return f"{gpu.other_processes} processes" if gpu.other_processes > 1 else "1 process"


@click.command(epilog=CALIBRATE_EPILOG)
@device_options
@click.option("--fresh", is_flag=True, help="Forget earlier runs, whose figures are joined else.")
@json_option
@pass_settings
def calibrate(
    settings: Settings, device: int | None, shared: bool, fresh: bool, as_json: bool
) -> None:
    """Measure what a GPU really does, and keep it for its device class.

    Bandwidths of device memory by size, L2 and shared memory, peak rates of multiply-adds, and
    the cost of a launch, each with its spread over repeats. A stream of device memory is that of
    the best kernel that a search finds, and is repeated at the end, elsewhere in memory. Runs
    under one driver are joined: the fastest counts, and the spread is over all. Floors and
    predictions use them.
    """
    from tunegen import session

    with _progress(settings, as_json) as on_probe:
        result = session.calibrate(device=device, shared=shared, fresh=fresh, on_probe=on_probe)
    for failure in result.failures:
        settings.note(f"not measured: {failure}")
    if as_json:
        print_json(
            {
                "path": result.path,
                "seconds": result.seconds,
                "failures": result.failures,
                "calibration": result.calibration,
                "figures": result.lines,
            }
        )
        return
    _print(result)


@contextmanager
def _progress(settings: Settings, as_json: bool) -> Iterator[Any]:
    """A line that says what is being measured, on a terminal."""
    screen = console(stderr=True)
    if settings.quiet or as_json or not screen.is_terminal:
        yield None
        return
    with screen.status("compiling") as status:
        yield lambda name, number, total: status.update(f"{number + 1}/{total}  {name}")


def _print(result: CalibrationResult) -> None:
    found = result.calibration
    rows = table(
        f"{found.device.name} ({found.arch}), {found.policy}",
        "", ">measured", ">spread", ">of the datasheet", "by",
    )  # fmt: skip
    for line in result.lines:
        figure = line.figure
        share = f"{line.of_datasheet:.1%}" if line.of_datasheet is not None else ""
        value = figure.median
        measured = f"{value:,.0f} {line.unit}" if value >= 1000 else f"{value:.3g} {line.unit}"
        rows.add_row(line.name, measured, f"{figure.spread:.1%}", share, _by(figure))
    print_table(rows)
    click.echo()
    streams = found.streams
    sizes = sorted({point.bytes for points in streams.values() for point in points})
    rows = table(
        "GB/s by bytes moved, launch included, and spread",
        ">bytes", *(f">{name}" for name in streams),
    )  # fmt: skip
    for size in sizes:
        rows.add_row(f"{size:,}", *(_at(points, size) for points in streams.values()))
    print_table(rows)
    clocks = found.sm_clock_mhz
    if clocks is not None:
        reasons = ", ".join(found.throttle) or "none"
        print_labelled(
            "card",
            f"SM clock {clocks[0]} to {clocks[1]} MHz, memory {found.memory_clock_mhz} MHz, at "
            f"most {found.power_w or 0:.0f} W and {found.temperature_c} C; throttled: {reasons}",
        )
    print_labelled(
        "with",
        f"driver {found.driver}, NVRTC {found.nvrtc}, {found.created}, in {result.seconds:.1f} s",
    )
    if found.runs > 1:
        print_labelled("runs", f"{found.runs}, joined: the fastest of each, the spread over all")
    print_labelled("stored", str(result.path))


def _at(points: Sequence[StreamPoint], size: int) -> str:
    found = next((point for point in points if point.bytes == size), None)
    return f"{found.gbps.median:.0f}, {found.us.spread:.1%}" if found is not None else ""


def _by(figure: Figure) -> str:
    best = f", best of {figure.tried}" if figure.tried > 1 else ""
    return f"{figure.config or 'an empty kernel'}{best}"

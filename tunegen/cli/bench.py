# SPDX-License-Identifier: Apache-2.0
"""tunegen bench: an operation's journey, step by step, and what it is worth against a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    db_option,
    duration,
    json_option,
    pass_settings,
    print_json,
    print_labelled,
    print_table,
    problem_options,
    table,
)

if TYPE_CHECKING:
    from tunegen.session import BenchResult

EPILOG = """\b
Examples:
  tunegen bench matmul --problem 4096x4096x4096
  tunegen bench axpy --dtype bf16 --problem 2^10 --problem 2^20 --problem 2^28
  tunegen bench matmul --problem 1000x1000x1000 --no-vendor --json
"""


@click.command(epilog=EPILOG)
@click.argument("operation")
@problem_options(several=True, here=True)
@click.option(
    "--seconds", type=float, default=3.0, show_default=True, help="Of timing kernels, per problem."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random operands.")
@click.option(
    "--no-vendor", is_flag=True, help="Without the vendor's library, which comes through torch."
)
@db_option
@json_option
@pass_settings
def bench(
    settings: Settings,
    /,
    operation: str,
    problems: tuple[str, ...],
    as_json: bool,
    no_vendor: bool,
    **options: Any,
) -> None:
    """Measure the journey of OPERATION on a GPU: there, the kernel, and back.

    The tuned kernel is timed beside the default, the naive one and the vendor's library, and the
    whole journey beside NumPy on the CPU. The floor is what no kernel can beat.
    """
    from tunegen import session

    results = []
    said: set[str] = set()
    measured = session.bench(
        operation, problems or (None,), vendor=not no_vendor, specs=settings.specs(), **options
    )
    for result in measured:
        results.append(result)
        notes = dict.fromkeys(result.notes)
        if not result.calibrated:
            notes["the floor is the datasheet's: tunegen calibrate measures this GPU's"] = None
        for note in notes:
            if note not in said:
                settings.note(note)
        said |= set(notes)
        if not as_json:
            _print(result)
    if as_json:
        print_json({"results": [_document(result) for result in results]})


def _print(result: BenchResult) -> None:
    wanted = result.request
    rows = table(
        f"{wanted.operation.name} {wanted.operation.label(wanted.problem)} "
        f"on GPU {result.gpu.index}, {wanted.device.name}, {result.policy}",
        "", ">time", ">spread", ">rate", "",
    )  # fmt: skip
    for move in result.moves:
        memory = "pinned" if move.pinned else "pageable"
        name = f"{move.direction}, {memory}"
        if move.us is None:
            rows.add_row(name, "failed", "", "", move.failure)
        elif move.bytes:
            scaled = "" if move.moved_bytes == move.bytes else f", timed on {move.moved_bytes:,}"
            rate = f"{move.bytes / move.us.median / 1e3:.3g} GB/s"
            row = (name, duration(move.us.median), f"{move.us.spread:.1%}", rate)
            rows.add_row(*row, f"{move.bytes:,} bytes{scaled}")
    for contender in result.contenders:
        if contender.us is None:
            rows.add_row(contender.name, "failed", "", "", contender.failure)
            continue
        us = contender.us
        share = f"{result.floor.us / us.median:.0%} of the floor's rate, "
        rows.add_row(
            contender.name, duration(us.median), f"{us.spread:.1%}", _rate(result, us.median),
            share + contender.description,
        )  # fmt: skip
    floor = result.floor
    rows.add_row(
        "floor", duration(floor.us), f"{floor.spread:.1%}" if result.calibrated else "",
        _rate(result, floor.us), f"bound by {floor.bound}, rates of the {floor.ceilings}",
    )  # fmt: skip
    cpu_us = result.cpu_us
    if cpu_us is None:
        rows.add_row("CPU", "not timed", "", "", result.cpu.refusal)
    else:
        rows.add_row("CPU", duration(cpu_us), "", _rate(result, cpu_us), result.cpu.how)
    print_table(rows)
    for line in verdict(result):
        print_labelled("journey", line)


def _rate(result: BenchResult, us: float) -> str:
    """TFLOP/s where arithmetic binds the floor, GB/s elsewhere."""
    if result.floor.bound == "compute":
        return f"{result.floor.flops / us / 1e6:.3g} TFLOP/s"
    return f"{result.floor.bytes / us / 1e3:.4g} GB/s"


def verdict(result: BenchResult) -> list[str]:
    """What the figures say: the whole journey, and who wins it."""
    lines = []
    cpu_us = result.cpu_us
    ways: Sequence[tuple[str, float | None]] = (
        ("pageable memory", result.journey_us(pinned=False)),
        ("pinned memory", result.journey_us(pinned=True)),
        ("data on the device", result.kernel_us),
    )
    for name, us in ways:
        if us is None:
            continue
        text = f"{name}: {duration(us)}"
        if cpu_us is not None:
            text += f", {_against(us, cpu_us)}"
        lines.append(text)
    return lines


def _against(gpu_us: float, cpu_us: float) -> str:
    if gpu_us < cpu_us:
        return f"{cpu_us / gpu_us:.3g} times as fast as the CPU"
    return f"the CPU wins, {gpu_us / cpu_us:.3g} times as fast"


def _document(result: BenchResult) -> dict[str, Any]:
    wanted = result.request
    cpu_us = result.cpu_us
    journeys = {
        "pageable": result.journey_us(pinned=False),
        "pinned": result.journey_us(pinned=True),
        "on_device": result.kernel_us,
    }
    return {
        "operation": wanted.operation.name,
        "problem": wanted.operation.text(wanted.problem),
        "dtype": wanted.problem.dtype,
        "layout": wanted.problem.layout,
        "attributes": wanted.operation.named(dict(wanted.problem.attributes)),
        "device": wanted.device,
        "policy": result.policy,
        "moves": result.moves,
        "contenders": result.contenders,
        "floor": result.floor,
        "cpu": {**_fields(result.cpu), "median_us": cpu_us},
        "journey_us": journeys,
        "cpu_wins": {
            name: None if us is None or cpu_us is None else cpu_us < us
            for name, us in journeys.items()
        },
        "notes": result.notes,
    }


def _fields(value: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

# SPDX-License-Identifier: Apache-2.0
"""Write the table of measured records in the README, or check that it is what the database says.

::

    python tests/gpu/readme_table.py
    python tests/gpu/readme_table.py --check

What stands between the two marks is replaced; nothing else is touched. No GPU is needed. Floors
are computed from the calibration that stands beside the records, or else from the datasheet. Exit
code 1 where the README has no such marks, or with ``--check`` where it differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import _tree
from _records import is_final, only, size, whole

from tunegen import calibration, kernels, perfmodel, session
from tunegen.database import Database
from tunegen.errors import TunegenError, UsageError
from tunegen.model import Calibration, DeviceClass, DeviceIdentity, TuningRecord
from tunegen.session.records import device_of, find_exact

README = _tree.ROOT / "README.md"
BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"

# Names and how they are aligned.
COLUMNS = (
    ("operation", "<"), ("problem", ">"), ("dtype", "<"), ("layout", "<"), ("time, us", ">"),
    ("rate", ">"), ("ratio", ">"), ("95 %", ">"), ("floor", ">"), ("bound by", "<"),
    ("policy", "<"),
)  # fmt: skip


def table(folder: Path) -> str:
    """The records of a database folder as Markdown: a table for each device, nothing where there
    are none."""
    found = list(answers(only(folder)))
    ceilings = calibration.stored(folder / _tree.CALIBRATION)
    devices = dict.fromkeys((record.arch, record.device) for record in found)
    return "\n\n".join(
        _of_device(
            [record for record in found if (record.arch, record.device) == key],
            next((c for c in ceilings if (c.arch, c.device) == key), None),
        )
        for key in devices
    )


def answers(database: Database) -> Iterator[TuningRecord]:
    """The record that answers for each device and problem, in the order of the kernels."""
    measured = [record for _, record in database.records() if is_final(record)]
    for record in sorted(measured, key=_order):
        operation, today = kernels.operation(record.operation), whole(record)
        request = session.Request(
            operation, today.problem, _device(record), kernels.specs_of(record.operation)
        )
        if find_exact(database, request) == record:
            yield today


def _device(record: TuningRecord) -> DeviceClass:
    """The device class that was measured, to the last byte of its L2."""
    known = device_of(record)
    identity = {f.name: getattr(record.device, f.name) for f in dataclasses.fields(DeviceIdentity)}
    return dataclasses.replace(known, **identity)


def _order(record: TuningRecord) -> tuple[object, ...]:
    names = [spec.operation.name for spec in kernels.SPECS]
    operation, problem = kernels.operation(record.operation), record.problem
    return (
        record.arch, record.device.name, names.index(operation.name),
        operation.dtypes.index(problem.dtype), problem.layout, problem.sizes, problem.attributes,
    )  # fmt: skip


def _of_device(records: Sequence[TuningRecord], ceilings: Calibration | None) -> str:
    device = records[0].device.name
    text = (
        f"{device} ({records[0].arch}), {_listed('driver', (r.driver for r in records))}, "
        f"{_listed('NVRTC', (r.nvrtc for r in records))}. `ratio` is the time of the vendor's "
        "library over ours in the same rounds, with its 95 % interval: above 1 ours is faster. "
        "`floor` is the share of the time that no kernel can do without, "
        + ("by this card's calibration" if ceilings else "by the datasheet")
        + "."
    )
    if libraries := _libraries(records):
        text += f" The library: {libraries}."
    return f"{text}\n\n{markdown([_row(record, ceilings) for record in records])}"


def _row(record: TuningRecord, ceilings: Calibration | None) -> tuple[str, ...]:
    operation, problem = kernels.operation(record.operation), record.problem
    us = record.measurement.median_us
    floor = perfmodel.floor(operation, problem, _device(record), ceilings)
    rate = (
        f"{floor.flops / us / 1e6:.1f} TFLOP/s" if floor.bound == "compute"
        else f"{floor.bytes / us / 1e3:.0f} GB/s"
    )  # fmt: skip
    vendor = record.measurement.details.get("vendor", {})
    interval = f"{vendor['low']:.3f} to {vendor['high']:.3f}" if "low" in vendor else ""
    ratio = f"{record.baseline_ratio:.3f}" if record.baseline_ratio is not None else "none"
    special = "".join(f" {k}={v}" for k, v in operation.special(problem).items())
    return (
        operation.name, size(problem) + special, problem.dtype, problem.layout, in_us(us), rate,
        ratio, interval, f"{floor.us / us:.2f}", floor.bound, record.measurement.policy,
    )  # fmt: skip


def in_us(us: float) -> str:
    """Four figures, as far as there are so many."""
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _libraries(records: Iterable[TuningRecord]) -> str:
    """``cuBLAS 13.1.0 through torch 2.11.0 (matmul); torch 2.11.0 (copy, add)``."""
    operations: dict[str, dict[str, None]] = {}
    for record in records:
        if record.baseline:
            operations.setdefault(record.baseline, {})[record.operation] = None
    return "; ".join(f"{name} ({', '.join(of)})" for name, of in operations.items())


def _listed(word: str, values: Iterable[str]) -> str:
    return f"{word} {', '.join(sorted({value for value in values if value}))}"


def markdown(rows: Sequence[Sequence[str]], columns: Sequence[tuple[str, str]] = COLUMNS) -> str:
    """A table with its columns aligned; ``columns`` are their names, and "<" or ">"."""
    cells = [[name for name, _ in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [
        "-" * (width - 1) + ":" if side == ">" else "-" * width
        for (_, side), width in zip(columns, widths, strict=True)
    ]
    aligned = [
        [
            f"{cell:{side}{width}}"
            for cell, (_, side), width in zip(row, columns, widths, strict=True)
        ]
        for row in cells
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:]))


def replaced(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """A README with other content between the marks.

    Raises :class:`UsageError` where it has not exactly one pair of them.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UsageError(f"it has not one {begin} with one {end} after it")
    before, _, rest = text.partition(begin)
    lines = "\n".join(part for part in (begin, content, end) if part)
    return f"{before}{lines}{rest.partition(end)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    parser.add_argument("--db", type=Path, default=_tree.TUNED_DB, help="the records to show")
    parser.add_argument("--readme", type=Path, default=README, help="the file to write")
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text()
        wanted = replaced(text, table(options.db))
    except (TunegenError, OSError) as error:
        print(f"error: {options.readme}: {error}")
        return 1
    if options.check:
        same = wanted == text
        print(f"{options.readme} {'is' if same else 'is not'} what {options.db} says")
        return 0 if same else 1
    if wanted != text:
        options.readme.write_text(wanted)
    print(f"{options.readme} {'written' if wanted != text else 'is as it should be'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

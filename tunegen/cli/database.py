# SPDX-License-Identifier: Apache-2.0
"""tunegen db: what has been tuned, whether it is still true, and where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    console,
    db_option,
    duration,
    json_option,
    pass_settings,
    print_json,
    problem_options,
    table,
)

if TYPE_CHECKING:
    from tunegen.database import Database
    from tunegen.model import TuningRecord

EPILOG = """\b
Examples:
  tunegen db list --arch sm_90
  tunegen db show matmul --arch sm_90 --problem 4096x4096x4096
  tunegen db check
  tunegen db where
  tunegen db merge other_db/ --db my_db/
"""


@click.group(epilog=EPILOG)
def db() -> None:
    """List, show, check and merge tuning records."""


def _open(folder: str | None) -> Database:
    from tunegen.database import Database

    return Database(Path(folder) if folder else None)


@db.command("list")
@click.argument("operation", required=False)
@click.option("--arch", help="Only records for this capability.")
@db_option
@json_option
@pass_settings
def list_records(
    settings: Settings, /, operation: str | None, arch: str | None, db: str | None, as_json: bool
) -> None:
    """List records: problem, device, evidence, time, and the time of the default."""
    from tunegen import kernels
    from tunegen.model import check_arch

    operations = kernels.operations(settings.specs())
    if operation is not None:
        kernels.operation(operation, settings.specs())
    if arch is not None:
        check_arch(arch)
    found = list(_open(db).records(arch, operation))
    if as_json:
        print_json([{"layer": layer, **_document(record)} for layer, record in found])
        return
    rows = table(
        "", "operation", "problem", "dtype", "layout", "device", "evidence", "time", "default",
        "spec", "layer",
    )  # fmt: skip
    for layer, record in found:
        known = operations.get(record.operation)
        sizes = (
            known.text(record.problem)
            if known
            else "x".join(str(n) for _, n in record.problem.sizes)
        )
        rows.add_row(
            record.operation, sizes, record.problem.dtype, record.problem.layout,
            f"{record.device.name} ({record.arch})", record.evidence,
            duration(record.measurement.median_us),
            duration(record.default_us) if record.default_us is not None else "failed",
            record.spec, layer,
        )  # fmt: skip
    console().print(rows)
    settings.note(f"{len(found)} records")


@db.command()
@click.argument("operation")
@problem_options()
@db_option
@json_option
@pass_settings
def show(
    settings: Settings, /, operation: str, db: str | None, as_json: bool, **options: Any
) -> int:
    """Show the record that answers for a problem, by what right, and all that it says."""
    from tunegen import session

    wanted = session.request(operation, specs=settings.specs(), **options)
    match = session.find(_open(db), wanted)
    if as_json:
        print_json(
            {
                "rung": match.rung,
                "reason": match.reason,
                "layer": match.layer,
                "record": _document(match.record) if match.record else None,
                "skipped": [
                    {"why": skipped.why, "record": _document(skipped.record)}
                    for skipped in match.skipped
                ],
            }
        )
        return 0
    screen = console()
    screen.print(f"rung       {match.rung}", soft_wrap=True)
    screen.print(f"because    {match.reason}", soft_wrap=True)
    for skipped in match.skipped:
        screen.print(f"skipped    {skipped.record.spec}: {skipped.why}", soft_wrap=True)
    if match.record is not None:
        for name, value in _document(match.record).items():
            screen.print(f"{name:<16} {value}", soft_wrap=True, markup=False)
    return 0


@db.command()
@db_option
@json_option
@pass_settings
def check(settings: Settings, db: str | None, as_json: bool) -> int:
    """Look for malformed files and for records that are illegal or stale; exit code 3 for any."""
    from tunegen import session

    findings = session.check(_open(db), settings.specs())
    if as_json:
        print_json(
            [
                {
                    "layer": finding.layer,
                    "path": finding.path,
                    "kind": finding.kind,
                    "reason": finding.reason,
                    "record": _document(finding.record) if finding.record else None,
                }
                for finding in findings
            ]
        )
    else:
        for finding in findings:
            record = finding.record
            which = f" {record.spec} {dict(record.problem.sizes)}" if record else ""
            click.echo(f"{finding.kind}: {finding.path}{which}: {finding.reason}")
        settings.note(f"{len(findings)} findings" if findings else "nothing wrong")
    return 3 if findings else 0


@db.command()
@db_option
@json_option
@pass_settings
def where(settings: Settings, db: str | None, as_json: bool) -> None:
    """Say which files are read, in which order; only the first folder is ever written."""
    locations = _open(db).where()
    if as_json:
        print_json(locations)
        return
    for location in locations:
        state = f"{location.records} records" if location.exists else "not there yet"
        click.echo(f"{location.layer}: {location.path} ({state})")
        for path in location.files:
            click.echo(f"  {path}")
        for reason in location.unreadable:
            click.echo(f"  unreadable: {reason}")


@db.command()
@click.argument("folder", type=click.Path(file_okay=False))
@db_option
@json_option
@pass_settings
def merge(settings: Settings, folder: str, db: str | None, as_json: bool) -> None:
    """Merge the records of another database FOLDER into the user's, or into --db.

    Of two records of the same winner the newer stays; a prediction never replaces a measurement.
    """
    report = _open(db).merge(Path(folder))
    if as_json:
        print_json(report)
        return
    left = f", {report.left_out} predictions left out" if report.left_out else ""
    click.echo(f"{report.added} added, {report.replaced} replaced, {report.kept} kept{left}")


def _document(record: TuningRecord) -> dict[str, Any]:
    from tunegen.database import document

    return document(record)

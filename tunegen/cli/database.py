# SPDX-License-Identifier: Apache-2.0
"""tunegen db: what has been tuned, whether it is still true, and where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Folder,
    Settings,
    console,
    counted,
    db_option,
    duration,
    examples,
    json_option,
    pass_settings,
    print_json,
    print_table,
    problem_options,
    table,
)

if TYPE_CHECKING:
    from tunegen.database import Database
    from tunegen.model import Operation, Problem, TuningRecord
    from tunegen.session import Restamping

EPILOG = """\b
Examples:
  tunegen db list --arch sm_90
  tunegen db show matmul --arch sm_90 --problem 4096x4096x4096
  tunegen db check
  tunegen db restamp
  tunegen db where
  tunegen db merge other_db/ --db my_db/
"""


@click.group(epilog=EPILOG)
def db() -> None:
    """List, show, check, re-stamp and merge tuning records."""


def _open(folder: str | None) -> Database:
    from tunegen.database import Database

    return Database(Path(folder) if folder else None)


@db.command(
    "list", epilog=examples("tunegen db list", "tunegen db list matmul --arch sm_90 --json")
)
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
    rows = table("", "kernel", "problem", "device", "evidence", ">time", ">default", "layer")
    for layer, record in found:
        rows.add_row(
            f"{record.operation} {record.spec}",
            _words(record.problem, operations.get(record.operation)),
            f"{record.device.name} ({record.arch})",
            record.evidence,
            duration(record.measurement.median_us),
            duration(record.default_us) if record.default_us is not None else "failed",
            layer,
        )
    if found:
        print_table(rows)
    settings.note(counted(len(found), "record"))


@db.command(
    epilog=examples(
        "tunegen db show matmul --arch sm_90 --problem 4096x4096x4096",
        "tunegen db show axpy --arch sm_90 --problem 2^24 --dtype bf16 --json",
    )
)
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


@db.command(epilog=examples("tunegen db check", "tunegen db check --db my_db/"))
@db_option
@json_option
@pass_settings
def check(settings: Settings, db: str | None, as_json: bool) -> int:
    """Look for malformed files and for records that are illegal or stale; exit code 3 for any."""
    from tunegen import kernels, session

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
        operations = kernels.operations(settings.specs())
        for finding in findings:
            which = ""
            if record := finding.record:
                words = _words(record.problem, operations.get(record.operation))
                which = f": {record.operation} {record.spec} {words}"
            click.echo(f"{finding.kind}: {finding.path}{which}: {finding.reason}")
        settings.note(counted(len(findings), "finding") if findings else "nothing wrong")
    return 3 if findings else 0


@db.command(
    epilog=examples(
        "tunegen db restamp", "tunegen db restamp matmul axpy", "tunegen db restamp --db tuned_db/"
    )
)
@click.argument("operations", nargs=-1)
@db_option
@json_option
@pass_settings
def restamp(settings: Settings, operations: tuple[str, ...], db: str | None, as_json: bool) -> int:
    """Give stale records whose code is as it was measured the digest of today's source.

    Compiles the kernels of each stale record of the folder, for OPERATIONS or for all, and writes
    nothing but that digest. Needs the NVRTC of the record. Exit code 3 if any record stays stale.
    """
    from tunegen import kernels, session

    specs = settings.specs()
    known = kernels.operations(specs)
    done, left = [], 0
    for result in session.restamp(operations, db=db, specs=specs):
        done.append(result)
        left += not result.restamped
        if not as_json:
            click.echo(_restamping(result, known.get(result.record.operation)))
    folder = _open(db).user_folder
    if as_json:
        print_json(
            {
                "folder": folder,
                "restamped": len(done) - left,
                "stale": left,
                "records": [
                    {
                        "restamped": result.restamped,
                        "reason": result.reason,
                        "hint": result.hint,
                        "record": _document(result.record),
                    }
                    for result in done
                ],
            }
        )
    else:
        counts = f"{len(done) - left:,} re-stamped, {left:,} still stale"
        settings.note(f"{counts if done else 'no stale records'} in {folder}")
    return 3 if left else 0


def _restamping(result: Restamping, operation: Operation | None) -> str:
    record = result.record
    which = f"{record.operation} {record.spec} {_words(record.problem, operation)}"
    state = "re-stamped" if result.restamped else "stale"
    hint = f" ({result.hint})" if result.hint else ""
    return f"{state}: {which} on {record.device.name} ({record.arch}): {result.reason}{hint}"


@db.command(epilog=examples("tunegen db where", "tunegen db where --db my_db/"))
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
        exists = location.exists or location.unreadable
        state = counted(location.records, "record") if exists else "not there yet"
        click.echo(f"{location.layer}: {location.path} ({state})")
        for path in location.files:
            click.echo(f"  {path}")
        for reason in location.unreadable:
            click.echo(f"  unreadable: {reason}")


@db.command(
    epilog=examples("tunegen db merge other_db/", "tunegen db merge other_db/ --db my_db/")
)
@click.argument("folder", type=Folder())
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


def _words(problem: Problem, operation: Operation | None) -> str:
    if operation is not None:
        return operation.label(problem)
    # Of a kernel file that was not named.
    sizes = "x".join(str(n) for _, n in problem.sizes)
    special = (f"{name}={value}" for name, value in problem.attributes)
    return " ".join(filter(None, (sizes, problem.dtype, problem.layout, *special)))


def _document(record: TuningRecord) -> dict[str, Any]:
    from tunegen.database import document

    return document(record)

# SPDX-License-Identifier: Apache-2.0
"""tunegen study: which trials are kept, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    counted,
    duration,
    examples,
    json_option,
    pass_settings,
    print_json,
    print_labelled,
    print_table,
    storage_option,
    table,
)

if TYPE_CHECKING:
    from tunegen.store import StoredTrial, StudyInfo

EPILOG = """\b
Examples:
  tunegen study list
  tunegen study show matmul-4096x4096x4096-fp32-nn
  tunegen study show copy-268435456-fp32 --json
  tunegen study list --storage sqlite:///shared/studies.db
  tunegen study export studies.json.gz
  tunegen study import studies.json.gz --storage postgresql+psycopg://tuner@db/studies
"""


@click.group(epilog=EPILOG)
def study() -> None:
    """List and carry studies: the trials that were run on GPUs, kept so that a tune can go on.

    A study is one problem on one kind of GPU, measured in one way. A tune of the same problem
    goes on from its trials; `tune --fresh` begins a new generation and leaves them where they are.
    """


@study.command(
    "list",
    epilog=examples(
        "tunegen study list", "tunegen study list --storage sqlite:///shared/studies.db"
    ),
)
@storage_option
@json_option
@pass_settings
def list_studies(settings: Settings, storage: str | None, as_json: bool) -> None:
    """List studies: how many trials, how many failed, the best time, and when."""
    from tunegen import session

    found, warnings = session.list_studies(storage)
    for warning in warnings:
        settings.note(warning)
    if as_json:
        print_json([_summary(info) for info in found])
        return
    rows = table("", "study", "arch", "evidence", ">trials", ">failed", ">best", "updated", "")
    for info in found:
        failed = sum(not stored.trial.outcome.ok for stored in info.trials)
        rows.add_row(
            info.name, info.facts["arch"], info.facts["evidence"], str(len(info.trials)),
            str(failed), _best_time(info), info.updated, "" if info.current else _SET_ASIDE,
        )  # fmt: skip
    if found:
        print_table(rows)
    settings.note("1 study" if len(found) == 1 else f"{len(found)} studies")


@study.command(
    epilog=examples(
        "tunegen study show matmul-4096x4096x4096-fp32-nn",
        "tunegen study show copy-268435456-fp32 --json",
    )
)
@click.argument("name")
@storage_option
@json_option
@pass_settings
def show(settings: Settings, name: str, storage: str | None, as_json: bool) -> None:
    """Show the study NAME, or the one whose name begins so; --json gives all of its trials."""
    from tunegen import session

    info, warnings = session.find_study(name, storage)
    for warning in warnings:
        settings.note(warning)
    if as_json:
        print_json({**_summary(info), "list": [_document(stored) for stored in info.trials]})
        return
    for key, value in _lines(info).items():
        print_labelled(key, value)


@study.command(
    "export",
    epilog=examples(
        "tunegen study export studies.json.gz",
        "tunegen study export one.json matmul-4096x4096x4096-fp32-nn",
    ),
)
@click.argument("file", type=click.Path())
@click.argument("names", nargs=-1, metavar="[NAME]...")
@storage_option
@json_option
@pass_settings
def export_studies(
    settings: Settings, file: str, names: tuple[str, ...], storage: str | None, as_json: bool
) -> None:
    """Write studies with all of their trials to FILE, gzipped if it ends in .gz.

    All studies, or those of these NAMEs, or whose names begin so. `study import` takes the file
    into another storage.
    """
    from tunegen import session

    studies, warnings = session.export_studies(file, names, storage)
    for warning in warnings:
        settings.note(warning)
    for carried in studies:
        if carried.unreadable:
            settings.note(f"{carried.unreadable} trials of {carried.name} cannot be read")
    if as_json:
        print_json([{"name": s.name, "trials": len(s.trials), "unreadable": s.unreadable}
                    for s in studies])  # fmt: skip
        return
    trials = sum(len(carried.trials) for carried in studies)
    many = "1 study" if len(studies) == 1 else f"{len(studies):,} studies"
    click.echo(f"{many} and {counted(trials, 'trial')} in {file}")


@study.command(
    "import",
    epilog=examples(
        "tunegen study import studies.json.gz",
        "tunegen study import studies.json.gz copy-268435456-fp32 "
        "--storage sqlite:///shared/studies.db",
    ),
)
@click.argument("file", type=click.Path())
@click.argument("names", nargs=-1, metavar="[NAME]...")
@storage_option
@json_option
@pass_settings
def import_studies(
    settings: Settings, file: str, names: tuple[str, ...], storage: str | None, as_json: bool
) -> None:
    """Add the studies in FILE, or those of these NAMEs, to a storage.

    Where a study is there already, it gets the trials that it lacks; nothing is lost or doubled,
    and the same again adds nothing. Of a problem the newest generation is the one in use, wherever
    it is from.
    """
    from tunegen import session

    received = session.import_studies(file, names, storage)
    if as_json:
        print_json(received)
        return
    for study in received:
        aside = "" if study.current else f" ({_SET_ASIDE})"
        click.echo(f"{study.name}: {study.added} trials added, {study.known} known{aside}")


_SET_ASIDE = "set aside by --fresh"


def _summary(info: StudyInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        **info.facts,
        "current": info.current,
        "updated": info.updated,
        "trials": len(info.trials),
        "unreadable": info.unreadable,
        "counts": info.counts,
        "best": _document(info.best) if info.best else None,
    }


def _document(stored: StoredTrial) -> dict[str, Any]:
    trial = stored.trial
    measurement = trial.outcome.measurement
    timed: Mapping[str, Any] = {}
    if measurement is not None:
        timed = {
            "median_us": measurement.median_us,
            "low_us": measurement.low_us,
            "high_us": measurement.high_us,
            "samples": measurement.samples,
        }
    return {
        "number": trial.number,
        "spec": trial.spec,
        "config": trial.config,
        "outcome": trial.outcome.kind,
        "reason": trial.outcome.reason,
        **timed,
        "origin": trial.origin,
        "seconds": trial.seconds,
        "finished": stored.finished,
        "digests": stored.digests,
        "cubins": stored.cubins,
    }


def _best_time(info: StudyInfo) -> str:
    return duration(info.best.trial.outcome.median_us) if info.best else "none"


def _lines(info: StudyInfo) -> dict[str, str]:
    facts, device = info.facts, info.facts["device"]
    attributes = " ".join(f"{name}={value}" for name, value in facts["attributes"].items())
    problem = (facts["operation"], facts["problem"], facts["dtype"], facts["layout"], attributes)
    tolerance = "" if facts["tolerance"] is None else f", tolerance {facts['tolerance']:g}"
    toolkit = f", NVRTC {facts['toolkit']}" if facts["toolkit"] else ""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(info.counts.items()))
    best = info.best
    lines = {
        "study": info.name + ("" if info.current else f" ({_SET_ASIDE})"),
        "problem": " ".join(word for word in problem if word),
        "device": f"{device['name']} ({facts['arch']}, {device['sm_count']} multiprocessors)",
        "judged": f"{facts['evidence']}, policy {facts['policy']}{tolerance}{toolkit}",
        "space": facts["space"],
        "created": facts["created"],
        "updated": info.updated,
        "trials": f"{len(info.trials)}: {counts}" if counts else "none",
    }
    if info.unreadable:
        lines["damaged"] = f"{info.unreadable} trials cannot be read"
    if best is not None:
        trial = best.trial
        lines["best"] = (
            f"{duration(trial.outcome.median_us)}, trial {trial.number}: "
            f"{trial.spec}: {trial.config}"
        )
    return lines

# SPDX-License-Identifier: Apache-2.0
"""What a tune found, for people and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import counted, duration, print_labelled, print_table, table
from tunegen.cli.tune import Attempt, counts, left
from tunegen.database import document as record_document

if TYPE_CHECKING:
    from rich.table import Table

    from tunegen import tuner
    from tunegen.model import Contest, Standing
    from tunegen.session import TuneResult


def report(result: TuneResult) -> None:
    """Print a table of winner, default, vendor's library and floor, and where everything went."""
    run, record = result.run, result.record
    if result.known is not None:
        _print_known(result)
    print_table(_rows(result))
    if run.contest is not None:
        for label, text in _remarks(run.contest):
            print_labelled(label, text)
    print_labelled(
        "trials",
        f"{counts(run.counts)}; stopped: {_stop(run)}; {run.seconds:.1f} s, "
        f"{run.compiled} kernels compiled, {run.cache_hits} from the cache"
        + (f"; {run.past} from earlier runs" if run.past else "")
        + (f"; {run.elsewhere} by other hosts" if run.elsewhere else ""),
    )
    if result.begun_from:
        print_labelled("begun from", _begun_from(result))
    if record.evidence == "measured":
        print_labelled("seconds", _seconds(result))
    where = str(result.path or "as it stands in the database")
    if result.path is None and "unfinished" in record.measurement.details:
        where = "none: a measured one with finals stands in the database"
    if run.left_to:
        where = f"none here: {run.left_to} plays the finals"
    print_labelled("record", where)
    print_labelled("again", record.command)


def _begun_from(result: TuneResult) -> str:
    """How many winners from elsewhere were tried first, the nearest, and what came of it."""
    points = result.begun_from
    kinds = Counter(point.origin for point in points)
    where = dict.fromkeys(f"{point.problem} on {point.device}" for point in points)
    found = []
    if records := kinds["record"]:
        found.append(counted(records, "record"))
    if trials := kinds["study"]:
        found.append(f"{counted(trials, 'trial')} of other studies")
    text = f"{', '.join(found)}: {'; '.join(where)}"
    if result.winner.origin in kinds:
        text += "; the winner is one of them"
    return text


def _print_known(result: TuneResult) -> None:
    """What a GPU measured before, where the model stands in for one now."""
    assert result.known is not None
    record = result.known.record
    assert record is not None
    baseline = ""
    if record.baseline_ratio is not None:
        baseline = f", {record.baseline_ratio:.3f} of the speed of {record.baseline}"
    config = " ".join(f"{name}={value}" for name, value in record.config.items())
    us = duration(record.measurement.median_us)
    print_labelled("measured", f"{us}{baseline}: {result.known.reason}")
    print_labelled("", f"{record.spec}: {config}")
    click.echo()


def _stop(run: tuner.TuneRun) -> str:
    if run.left_gain is not None:
        return f"{run.stop_reason}, {left(run.left_gain)}"
    if run.expected_gain is None:
        return run.stop_reason
    return f"{run.stop_reason}, of {run.expected_gain:.2%} at most"


def _problem(result: TuneResult) -> str:
    return result.request.operation.label(result.request.problem)


def _rows(result: TuneResult) -> Table:
    wanted, record, run = result.request, result.record, result.run
    rows = table(
        f"{wanted.operation.name} {_problem(result)} "
        f"on {record.device.name} ({record.arch}), {record.evidence}, "
        f"policy {record.measurement.policy}",
        "", ">time", ">95 %", ">of winner", ">rate", "config",
    )  # fmt: skip
    best_us = record.measurement.median_us
    config = " ".join(f"{name}={value}" for name, value in record.config.items())

    def row(name: str, us: float, what: str, spread: str = "", ratio: str = "") -> None:
        share = ratio or (f"{us / best_us:.3f}" if best_us else "")
        rows.add_row(name, duration(us), spread, share, rate(result, us), what)

    m = record.measurement
    row("winner", best_us, f"{record.spec}: {config}", _interval(m.low_us, m.high_us))
    default = run.default
    if default is not None and default.outcome.ok:
        measured = default.outcome.measurement
        assert measured is not None
        same = measured.policy == m.policy
        row(
            "default", measured.median_us, f"{default.spec}: {default.config}",
            _interval(measured.low_us, measured.high_us),
            _ratio_to_winner(run.contest, default.number) if same else "another policy",
        )  # fmt: skip
    elif default is not None:
        rows.add_row("default", default.outcome.kind, "", "", "", default.outcome.reason)
    _vendor_row(result, row, rows)
    row("floor", result.floor.us, f"bound by {result.floor.bound} ({result.floor.ceilings})")
    return rows


def _vendor_row(result: TuneResult, row: Any, rows: Table) -> None:
    contest, record = result.run.contest, result.record
    if contest is None:
        return
    vendor = contest.standing("vendor")
    figures = vendor.figures.get(record.measurement.policy) if vendor else None
    if vendor is None or figures is None:
        reason = contest.no_vendor or (vendor.failure if vendor else "")
        rows.add_row("vendor", "none", "", "", "", reason)
        return
    ratio = ""
    if contest.winner is not None and contest.winner.vendor is not None:
        found = contest.winner.vendor
        ratio = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    spread = _interval(figures.low_us, figures.high_us)
    row("vendor", figures.median_us, vendor.description, spread, ratio)


def _ratio_to_winner(contest: Contest | None, trial: int) -> str:
    """With its interval, where the winner led; otherwise medians must do."""
    standing = contest.of_trial(trial) if contest else None
    if contest is None or contest.winner is None or standing is None:
        return ""
    ours, its = _figures(contest.winner, contest), _figures(standing, contest)
    if ours is None or its is None or ours.ratio != 1 or standing == contest.winner:
        return ""
    return f"{its.ratio:.3f} [{its.ratio_low:.3f}, {its.ratio_high:.3f}]"


def _figures(standing: Standing, contest: Contest) -> Any:
    return standing.figures.get(contest.policy)


def _interval(low_us: float, high_us: float) -> str:
    return f"{duration(low_us)} to {duration(high_us)}" if low_us and high_us else ""


def _remarks(contest: Contest) -> list[tuple[str, str]]:
    """What a table does not hold, with its label: ties, flips, who was left out and why."""
    found = []
    if len(contest.tied) > 1:
        found.append(("tie", f"{', '.join(contest.tied)}; {contest.rule}"))
    if contest.flip:
        found.append(("flip", contest.flip))
    for standing in contest.standings:
        if why := standing.failure or standing.barred:
            found.append(("left out", f"{standing.name}: {why}"))
    found += [("note", note) for note in contest.notes]
    if contest.shared:
        found.append(("note", "others used the card meanwhile"))
    winner = contest.winner
    if winner is not None and winner.relative_error is not None:
        repeat = "the same bits" if winner.deterministic else "other bits"
        limit = f" of {contest.tolerance:.2g} allowed" if contest.tolerance is not None else ""
        error = f"relative error {winner.relative_error:.2g}{limit}"
        found.append(("checked", f"{error}; {repeat} twice"))
        figures = _figures(winner, contest)
        if figures is not None:
            found.append(("card", _card(figures)))
    return found


def _card(figures: Any) -> str:
    """The card while the winner ran."""
    after = figures.after
    words = [
        f"{after.sm_clock_mhz} MHz" if after.sm_clock_mhz is not None else "",
        f"{after.power_w:.0f} W" if after.power_w is not None else "",
        f"{after.temperature_c} C" if after.temperature_c is not None else "",
        f"{figures.energy_mj:.3g} mJ a call" if figures.energy_mj is not None else "",
        *figures.throttle,
    ]
    return ", ".join(word for word in words if word) or "it says nothing of itself"


def _seconds(result: TuneResult) -> str:
    run, spent = result.run, result.spent
    parts = [
        f"compiling {run.compile_seconds:.1f} (all threads)",
        f"verifying {spent.verifying:.1f}",
        f"timing {spent.timing:.1f}",
        f"waiting for the compiler {run.wait_seconds:.1f}",
    ]
    if spent.restarting or spent.lost:
        parts.append(f"lost workers {spent.restarting + spent.lost:.1f}")
    if run.contest is not None:
        parts.append(f"finals {run.contest.seconds:.1f}")
    text = ", ".join(parts)
    if run.near_best_seconds is not None:
        text += f"; within 2 % of the winner after {run.near_best_seconds:.1f}"
    return text


def rate(result: TuneResult, us: float) -> str:
    """TFLOP/s where arithmetic binds the floor, GB/s where memory does."""
    if us <= 0:
        return ""
    if result.floor.bound == "compute":
        return f"{result.floor.flops / us / 1e6:.1f} TFLOP/s"
    return f"{result.floor.bytes / us / 1e3:.0f} GB/s"


def document(result: TuneResult) -> dict[str, Any]:
    """A result as JSON."""
    run = result.run
    known = result.known.record if result.known else None
    return {
        "operation": result.request.operation.name,
        "problem": result.request.operation.text(result.request.problem),
        "attributes": result.request.operation.named(dict(result.request.problem.attributes)),
        "record": record_document(result.record),
        "path": result.path,
        "floor": result.floor,
        "known": record_document(known) if known else None,
        "valid_configs": result.valid_configs,
        "begun_from": result.begun_from,
        "trials": {
            "counts": run.counts,
            "origins": Counter(trial.origin for trial in run.trials),
            "winner_origin": result.winner.origin,
            "stop_reason": run.stop_reason,
            "expected_gain": run.expected_gain,
            "left_gain": run.left_gain,
            "seconds": run.seconds,
            "search_seconds": run.search_seconds,
            "compiled": run.compiled,
            "cache_hits": run.cache_hits,
            "past": run.past,
            "elsewhere": run.elsewhere,
            "left_to": run.left_to or None,
        },
        "seconds": {
            "compiling": run.compile_seconds,
            "waiting": run.wait_seconds,
            "verifying": result.spent.verifying,
            "timing": result.spent.timing,
            "restarting": result.spent.restarting,
            "lost": result.spent.lost,
            "finals": run.contest.seconds if run.contest else 0.0,
            "near_best": run.near_best_seconds,
        },
        "default": run.default,
        "contest": run.contest,
        "command": result.record.command,
    }


# --- several problems ----------------------------------------------------------------------------


def vendor_ratio(result: TuneResult) -> Mapping[str, float] | None:
    """The time of the vendor's library over the winner's, ``ratio``, with ``low`` and ``high`` of
    its interval; None where the record has none."""
    found = result.record.measurement.details.get("vendor")
    return {key: found[key] for key in ("ratio", "low", "high")} if found else None


def floor_share(result: TuneResult) -> float:
    """The floor over the winner's time."""
    return result.floor.us / result.record.measurement.median_us


def _ratio_cells(result: TuneResult) -> tuple[str, str]:
    """The ratio to the vendor's library and its interval, or why there is none."""
    found = vendor_ratio(result)
    if found is not None:
        return f"{found['ratio']:.3f}", f"{found['low']:.3f} to {found['high']:.3f}"
    if result.record.evidence == "predicted":
        return "predicted", ""
    return "no finals" if "unfinished" in result.record.measurement.details else "no vendor", ""


def summary(result: TuneResult) -> str:
    """A result in one line, for progress."""
    ratio, interval = _ratio_cells(result)
    words = [
        duration(result.record.measurement.median_us),
        f"vendor/ours {ratio} ({interval})" if interval else ratio,
        f"{floor_share(result):.0%} of the floor's rate",
        f"{len(result.run.trials)} trials in {result.run.seconds:.1f} s",
    ]
    return ", ".join(words)


def by_group(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    """Groups in the order of their first problems."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.shape.group, []).append(attempt)
    return groups


def mean_ratio(attempts: Sequence[Attempt]) -> tuple[float, int] | None:
    """The geometric mean of the ratios to the vendor's library, and of how many; None of none."""
    found = [vendor_ratio(attempt.result) for attempt in attempts if attempt.result is not None]
    ratios = [ratio["ratio"] for ratio in found if ratio is not None]
    return (statistics.geometric_mean(ratios), len(ratios)) if ratios else None


def report_shapes(operation: str, attempts: Sequence[Attempt]) -> None:
    """Print one table of all problems by group, with the means of their ratios."""
    from rich.markup import escape

    records = [attempt.result.record for attempt in attempts if attempt.result is not None]
    devices = dict.fromkeys(f"{record.device.name} ({record.arch})" for record in records)
    rows = table(
        f"{operation} on {', '.join(devices)}" if devices else operation,
        "group", "name", "problem", ">time", ">vendor/ours", ">95 %", ">of floor", "spec",
    )  # fmt: skip

    def mean_row(group: str, found: tuple[float, int] | None) -> None:
        if found is not None:
            mean, count = found
            rows.add_row(group, "", f"geometric mean of {count}", "", f"{mean:.3f}")

    for group, members in by_group(attempts).items():
        for attempt in members:
            names = escape(group), escape(attempt.shape.name)
            result = attempt.result
            if result is None:
                shape = attempt.shape
                words = filter(None, (shape.text, shape.dtype, shape.layout))
                rows.add_row(*names, " ".join(words), "failed")
                continue
            rows.add_row(
                *names, _problem(result), duration(result.record.measurement.median_us),
                *_ratio_cells(result), f"{floor_share(result):.0%}", result.record.spec,
            )  # fmt: skip
        mean_row(escape(group), mean_ratio(members))
    mean_row("all", mean_ratio(attempts))
    print_table(rows)


def documents(attempts: Sequence[Attempt], *, listed: bool) -> dict[str, Any]:
    """All of a call as one JSON document; ``listed`` for problems of a file, with their groups."""

    def naming(attempt: Attempt) -> dict[str, str]:
        return {"name": attempt.shape.name, "group": attempt.shape.group} if listed else {}

    found: dict[str, Any] = {
        "results": [
            {
                **naming(attempt),
                **document(attempt.result),
                "vendor_ratio": vendor_ratio(attempt.result),
                "floor_share": floor_share(attempt.result),
            }
            for attempt in attempts
            if attempt.result is not None
        ],
        "failures": [
            {**naming(attempt), "problem": attempt.shape.text, "reason": attempt.failure}
            for attempt in attempts
            if attempt.failure
        ],
    }
    if listed:
        groups = by_group(attempts)
        found["geometric_means"] = {
            "groups": {group: _mean(members) for group, members in groups.items()},
            "all": _mean(attempts),
        }
    return found


def _mean(attempts: Sequence[Attempt]) -> dict[str, float] | None:
    found = mean_ratio(attempts)
    return None if found is None else {"vendor_ratio": found[0], "problems": found[1]}

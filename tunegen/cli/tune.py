# SPDX-License-Identifier: Apache-2.0
"""tunegen tune: search, show progress, report the winner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    from tunegen import tuner
    from tunegen.model import Trial
    from tunegen.session import TuneResult

EPILOG = """\b
Examples:
  tunegen tune matmul --arch sm_90
  tunegen tune matmul --arch sm_90 --problem 4096x4096x4096 --layout nt --dtype bf16
  tunegen tune axpy --arch sm_80 --problem 2^24 --problem 2^28 --trials 40
  tunegen tune matmul --arch sm_90 --seconds 20 --json
"""


@click.command(epilog=EPILOG)
@click.argument("operation")
@problem_options(several=True)
@click.option("--trials", type=int, default=100, show_default=True, help="Configurations to try.")
@click.option("--seconds", type=float, help="Stop after this long, if trials are left.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same trials.")
@click.option("--sampler", help="Which configuration next: tpe or random.")
@click.option(
    "--evaluator",
    default="auto",
    show_default=True,
    help="gpu, model (no GPU needed, predicts), or auto: the GPU where there is one.",
)
@db_option
@json_option
@pass_settings
def tune(
    settings: Settings,
    /,
    operation: str,
    problems: tuple[str, ...],
    db: str | None,
    as_json: bool,
    sampler: str | None,
    **options: Any,
) -> int:
    """Search the configurations of OPERATION and record the winner.

    Without a GPU the performance model stands in for it: times are predicted, the record says so
    and goes to the user's database only.
    """
    from tunegen import session

    if sampler is not None:
        options["sampler"] = sampler
    results = []
    for problem in problems or (None,):
        with _progress(settings, options["trials"], as_json) as on_event:
            result = session.tune(
                operation,
                problem=problem,
                db=db,
                specs=settings.specs(),
                on_event=on_event,
                **options,
            )
        results.append(result)
        if result.record.evidence == "predicted":
            settings.note(
                f"predicted: no GPU ran these kernels; times are the model's for "
                f"{result.record.device.name}"
            )
        if not as_json:
            _print(result)
        if result.run.stop_reason == "interrupted":
            break
    if as_json:
        print_json({"results": [_document(result) for result in results]})
    return 130 if results[-1].run.stop_reason == "interrupted" else 0


@contextmanager
def _progress(settings: Settings, trials: int, as_json: bool) -> Iterator[Any]:
    """A progress bar on a terminal; nothing elsewhere."""
    screen = console(stderr=True)
    if settings.quiet or not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("compiling", total=trials)

        def on_event(trial: Trial, progress: tuner.Progress) -> None:
            best = duration(progress.best_us) if progress.best_us is not None else "none yet"
            bar.update(task, completed=progress.trials, total=progress.total,
                       description=f"best {best}  {_counts(progress.counts)}")  # fmt: skip

        yield on_event


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _print(result: TuneResult) -> None:
    wanted, record, run = result.request, result.record, result.run
    problem = wanted.operation.text(wanted.problem)
    layout = f" {wanted.problem.layout}" if wanted.problem.layout else ""
    rows = table(
        f"{wanted.operation.name} {problem} {wanted.problem.dtype}{layout} "
        f"on {record.device.name} ({record.arch}), {record.evidence}",
        "", "time", "rate", "config",
    )  # fmt: skip

    def row(name: str, us: float, what: str) -> None:
        rows.add_row(name, duration(us), rate(result, us), what)

    row("winner", record.measurement.median_us, f"{record.spec}: {result.winner.config}")
    default = run.default
    if default is not None and default.outcome.ok:
        row("default", default.outcome.median_us, f"{default.spec}: {default.config}")
    elif default is not None:
        rows.add_row("default", default.outcome.kind, "", default.outcome.reason)
    row("floor", result.floor.us, f"bound by {result.floor.bound}")
    screen = console()
    screen.print(rows)
    screen.print(
        f"trials     {_counts(run.counts)}; stopped: {run.stop_reason}; "
        f"{run.seconds:.1f} s, {run.compiled} kernels compiled, {run.cache_hits} from the cache",
        soft_wrap=True,
    )
    screen.print(f"record     {result.path}", soft_wrap=True)
    screen.print(f"again      {record.command}", soft_wrap=True)


def rate(result: TuneResult, us: float) -> str:
    """TFLOP/s where arithmetic binds the floor, GB/s where memory does."""
    if us <= 0:
        return ""
    if result.floor.bound == "compute":
        return f"{result.floor.flops / us / 1e6:.1f} TFLOP/s"
    return f"{result.floor.bytes / us / 1e3:.0f} GB/s"


def _document(result: TuneResult) -> dict[str, Any]:
    from tunegen.database import document

    run = result.run
    return {
        "operation": result.request.operation.name,
        "problem": result.request.operation.text(result.request.problem),
        "record": document(result.record),
        "path": result.path,
        "floor": result.floor,
        "valid_configs": result.valid_configs,
        "trials": {
            "counts": run.counts,
            "stop_reason": run.stop_reason,
            "seconds": run.seconds,
            "compiled": run.compiled,
            "cache_hits": run.cache_hits,
        },
        "default": run.default,
        "command": result.record.command,
    }

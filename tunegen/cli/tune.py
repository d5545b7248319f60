# SPDX-License-Identifier: Apache-2.0
"""tunegen tune: search, show progress, report the winner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    storage_option,
)

if TYPE_CHECKING:
    from tunegen import tuner
    from tunegen.model import Trial

EPILOG = """\b
Examples:
  tunegen tune matmul --arch sm_90
  tunegen tune matmul --problem 4096x4096x4096 --layout nt --dtype bf16 --evaluator gpu
  tunegen tune axpy --arch sm_80 --problem 2^24 --problem 2^28 --trials 40
  tunegen tune matmul --device 1 --policy sustained --finals-seconds 30 --fresh
  tunegen tune matmul --arch sm_90 --seconds 20 --json
"""

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]

# What only means something on a GPU.
_GPU_OPTIONS: tuple[_Option, ...] = (
    click.option("--device", type=int, metavar="INDEX", help="Which GPU, as nvidia-smi counts."),
    click.option(
        "--shared", is_flag=True, help="Measure also on a GPU that others use; the record says so."
    ),
    click.option(
        "--policy",
        default="auto",
        show_default=True,
        help="What decides the finals: burst, sustained, warm, or auto by the length of a call.",
    ),
    click.option(
        "--finals-seconds",
        type=float,
        default=15.0,
        show_default=True,
        help="How long the finals may take.",
    ),
    click.option(
        "--deterministic", is_flag=True, help="Only kernels that give the same bits every time."
    ),
    click.option(
        "--fresh", is_flag=True, help="Begin anew instead of going on with the trials kept."
    ),
    storage_option,
)


def _gpu_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_GPU_OPTIONS):
        command = option(command)
    return command


@click.command(epilog=EPILOG)
@click.argument("operation")
@problem_options(several=True)
@click.option("--trials", type=int, help="Configurations to try; 100 on a GPU, 60 by the model.")
@click.option("--seconds", type=float, help="Stop searching after this long, if trials are left.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same trials.")
@click.option("--sampler", help="Which configuration next: tpe or random.")
@click.option(
    "--evaluator",
    default="auto",
    show_default=True,
    help="gpu, model (no GPU needed, predicts), or auto: the GPU where there is one.",
)
@_gpu_options
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

    On a GPU, the best are verified and timed against the default and the vendor's library before
    one is recorded. Without a GPU the performance model stands in for it: times are predicted, the
    record says so and goes to the user's database only.
    """
    from tunegen import session
    from tunegen.cli.tune_report import document, report

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
                on_note=settings.note,
                **options,
            )
        results.append(result)
        if result.record.evidence == "predicted":
            settings.note(
                f"predicted: no GPU ran these kernels; times are the model's for "
                f"{result.record.device.name}"
            )
        if not as_json:
            report(result)
        if result.run.stop_reason == "interrupted":
            break
    if as_json:
        print_json({"results": [document(result) for result in results]})
    return 130 if results[-1].run.stop_reason == "interrupted" else 0


@contextmanager
def _progress(settings: Settings, trials: int | None, as_json: bool) -> Iterator[Any]:
    """A progress bar on a terminal; nothing elsewhere."""
    screen = console(stderr=True)
    if settings.quiet or not screen.is_terminal:
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("compiling", total=trials)

        def on_event(trial: Trial, progress: tuner.Progress) -> None:
            best = duration(progress.best_us) if progress.best_us is not None else "none yet"
            done = progress.trials == progress.total
            bar.update(task, completed=progress.trials, total=progress.total,
                       description=f"best {best}  {counts(progress.counts)}"
                                   + ("  finals" if done else ""))  # fmt: skip

        yield on_event


def counts(kinds: Mapping[Any, int]) -> str:
    """``3 measured, 1 timed_out``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

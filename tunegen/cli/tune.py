# SPDX-License-Identifier: Apache-2.0
"""tunegen tune: search, show progress, report the winners."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    console,
    db_option,
    duration,
    json_option,
    least_gain_option,
    pass_settings,
    print_json,
    problem_options,
    storage_option,
)
from tunegen.errors import TunegenError, UsageError

if TYPE_CHECKING:
    from tunegen import tuner
    from tunegen.model import Trial
    from tunegen.session import Shape, TuneResult

EPILOG = """\b
Examples:
  tunegen tune matmul --arch sm_90
  tunegen tune matmul --problem 4096x4096x4096 --layout nt --dtype bf16 --evaluator gpu
  tunegen tune axpy --arch sm_80 --problem 2^24 --problem 2^28 --trials 40
  tunegen tune matmul --device 1 --policy sustained --finals-seconds 30 --fresh
  tunegen tune matmul --device 0,1 --trials 200
  tunegen tune matmul --shapes shapes.json --seconds 40
  tunegen tune matmul --arch sm_90 --seconds 20 --json
"""

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]

# What only means something on a GPU.
_GPU_OPTIONS: tuple[_Option, ...] = (
    click.option(
        "--device",
        metavar="INDEX,...",
        help="Which GPU, as nvidia-smi counts: without it the first. Several of one kind, as in "
        "0,1, or all search together; the first of them plays the finals.",
    ),
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
    click.option(
        "--study",
        metavar="NAME",
        help="The name that the study must have, or how it begins: another problem or another "
        "kind of GPU is refused.",
    ),
)


def _gpu_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_GPU_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Attempt:
    """A problem that was to be tuned, and its result or why it has none."""

    shape: Shape
    result: TuneResult | None = None
    failure: str = ""

    @property
    def interrupted(self) -> bool:
        return self.result is not None and self.result.run.stop_reason == "interrupted"


@click.command(epilog=EPILOG)
@click.argument("operation")
@problem_options(several=True)
@click.option(
    "--shapes",
    "shapes_file",
    type=click.Path(),
    metavar="FILE",
    help="The problems that a JSON file lists for OPERATION, and a table by group at the end.",
)
@click.option("--trials", type=int, help="Configurations to try; 100 on a GPU, 60 by the model.")
@click.option("--seconds", type=float, help="Stop searching after this long, if trials are left.")
@least_gain_option
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Same seed, same trials on one GPU."
)
@click.option(
    "--cold", is_flag=True, help="Do not try first what was fast on other problems and devices."
)
@click.option(
    "--sampler",
    help="Which configuration next: portfolio, the default; tpe, random, bruteforce, nsga, gp, "
    "cmaes or qmc, Optuna's.",
)
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
    shapes_file: str | None,
    as_json: bool,
    cold: bool,
    sampler: str | None,
    **options: Any,
) -> int:
    """Search the configurations of OPERATION and record the winner.

    On a GPU, the best are verified and timed against the default and the vendor's library before
    one is recorded. Without a GPU the performance model stands in for it: times are predicted, the
    record says so and goes to the user's database only.

    First come the defaults, then up to six winners of other problems and devices, from the
    database and from studies, as far as they are valid here; --cold leaves those out.

    Several problems are tuned one after the other, each with --trials and --seconds of its own.
    One that fails does not stop the others; the exit code is 1 then.
    """
    from tunegen import session
    from tunegen.cli import tune_report

    if shapes_file is not None and problems:
        raise UsageError("--shapes and --problem exclude each other", hint="add it to the file")
    if sampler is not None:
        options["sampler"] = sampler
    options["warm"] = not cold
    words = {name: options.pop(name) for name in ("dtype", "layout")}
    options["specs"] = settings.specs()
    how = {**words, "attributes": options["attributes"], "specs": options["specs"]}
    listed = shapes_file is not None
    if shapes_file is not None:
        shapes = session.read_shapes(operation, shapes_file, **how)
    else:
        shapes = session.name_shapes(operation, problems, **how)
    attempts: list[Attempt] = []
    try:
        for attempt in _attempts(settings, operation, shapes, options, listed=listed):
            attempts.append(attempt)
            if attempt.result is not None and not listed and not as_json:
                tune_report.report(attempt.result)
        interrupted = attempts[-1].interrupted
    except KeyboardInterrupt:
        if not attempts:
            raise
        interrupted = True
    if as_json:
        print_json(tune_report.documents(attempts, listed=listed))
    elif listed:
        tune_report.report_shapes(operation, attempts)
    if interrupted:
        if len(shapes) > 1:
            settings.note(f"interrupted; {len(attempts)} of {len(shapes)} problems are above")
        return 130
    return 1 if any(attempt.failure for attempt in attempts) else 0


def _attempts(
    settings: Settings,
    operation: str,
    shapes: Sequence[Shape],
    options: Mapping[str, Any],
    *,
    listed: bool,
) -> Iterator[Attempt]:
    """Tune one after the other. Ctrl-C in one that has a best so far ends with that."""
    from tunegen import session
    from tunegen.cli.tune_report import summary

    told = ""
    for number, shape in enumerate(shapes, 1):
        if listed:
            settings.note(f"[{number}/{len(shapes)}] {shape.name} {shape.text}")
        try:
            with _progress(settings, options["trials"], shape.name) as on_event:
                result = session.tune(
                    operation,
                    problem=shape.sizes,
                    dtype=shape.dtype,
                    layout=shape.layout,
                    on_event=on_event,
                    on_note=settings.note,
                    **options,
                )
        except UsageError:
            raise
        except TunegenError as error:
            if len(shapes) == 1 and not listed:
                raise
            if settings.verbose:
                traceback.print_exc()
            click.echo(f"tunegen: {shape.name}: {' '.join(str(error).split())}", err=True)
            yield Attempt(shape, failure=str(error))
            continue
        if result.record.evidence == "predicted" and told != result.record.device.name:
            told = result.record.device.name
            settings.note(f"predicted: no GPU ran these kernels; times are the model's for {told}")
        if listed:
            settings.note(f"{shape.name}: {summary(result)}")
        attempt = Attempt(shape, result)
        yield attempt
        if attempt.interrupted:
            return


@contextmanager
def _progress(settings: Settings, trials: int | None, name: str) -> Iterator[Any]:
    """A progress bar on a terminal; nothing elsewhere."""
    screen = console(stderr=True)
    if settings.quiet or not screen.is_terminal:
        yield None
        return
    from rich.markup import escape
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
        title = f"{escape(name)}  " if name else ""
        task = bar.add_task(f"{title}compiling", total=trials)

        def on_event(trial: Trial, progress: tuner.Progress) -> None:
            best = duration(progress.best_us) if progress.best_us is not None else "none yet"
            done = progress.trials == progress.total
            bar.update(task, completed=progress.trials, total=progress.total,
                       description=f"{title}best {best}  {counts(progress.counts)}"
                                   + ("  finals" if done else ""))  # fmt: skip

        yield on_event


def counts(kinds: Mapping[Any, int]) -> str:
    """``3 measured, 1 timed_out``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

# SPDX-License-Identifier: Apache-2.0
"""tunegen tune: search, show progress, report the winners."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
  tunegen tune matmul --shapes shapes.json --seconds 40 --least-gain 0.002
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
    """A problem that was to be tuned, and its result or why it has none; both where it failed to
    go on from its result."""

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
    One that fails does not stop the others; the exit code is 1 then. With both --seconds and
    --least-gain, what some leave of their seconds is not lost: when all are through, those that
    time cut short go on with it, the one with the most to gain first, for 10 s or more and at most
    --seconds at a time. Without either of the two, none goes on.
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
        for place, attempt in _Tuning(settings, operation, shapes, options, listed).attempts():
            attempts[place : place + 1] = [attempt]
            if attempt.result is not None and not (attempt.failure or listed or as_json):
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


@dataclass(slots=True)
class _Tuning:
    """Problems that are tuned in one go; ``listed`` where a file names them."""

    settings: Settings
    operation: str
    shapes: Sequence[Shape]
    options: Mapping[str, Any]
    listed: bool
    _told: str = ""

    def attempts(self) -> Iterator[tuple[int, Attempt]]:
        """Each with its place: one after the other, then again those that go on with the seconds
        that others have left. Ctrl-C in one that has a best so far ends with that."""
        from tunegen import session, tuner

        budget = tuner.Budget(
            seconds=self.options["seconds"], least_gain=self.options["least_gain"]
        )
        spare = session.Spare(budget)
        made: list[Attempt] = []
        for place, shape in enumerate(self.shapes):
            if self.listed:
                count = f"[{place + 1}/{len(self.shapes)}]"
                self.settings.note(f"{count} {shape.name} {shape.text}")
            made.append(self._tune(shape))
            yield place, made[place]
            if made[place].interrupted:
                return
            if (result := made[place].result) is not None:
                spare.ended(place, result.run, budget.seconds)
        while (going := spare.take()) is not None:
            place = going.place
            name = made[place].shape.name
            self.settings.note(f"{name} goes on for {going.seconds:.0f} s: {left(going.gain)}")
            made[place] = self._go_on(made[place], going.seconds)
            yield place, made[place]
            if made[place].failure:
                spare.dropped(place)
            elif (result := made[place].result) is not None:
                spare.ended(place, result.run, going.seconds)
            if made[place].interrupted:
                raise KeyboardInterrupt

    def _go_on(self, attempt: Attempt, seconds: float) -> Attempt:
        """What a problem comes to in so many seconds more. What was found before stands where it
        fails, or where Ctrl-C ends it before there is a new record."""
        again = self._tune(attempt.shape, seconds=seconds, after=attempt.result)
        if again.result is None:
            return replace(attempt, failure=again.failure)
        if again.interrupted and again.result.path is None:
            raise KeyboardInterrupt
        return again

    def _tune(self, shape: Shape, **more: Any) -> Attempt:
        from tunegen import session
        from tunegen.cli.tune_report import summary

        settings = self.settings
        try:
            with _progress(settings, self.options["trials"], shape.name) as on_event:
                result = session.tune(
                    self.operation,
                    problem=shape.sizes,
                    dtype=shape.dtype,
                    layout=shape.layout,
                    on_event=on_event,
                    on_note=settings.note,
                    **{**self.options, **more},
                )
        except UsageError:
            raise
        except TunegenError as error:
            if len(self.shapes) == 1 and not self.listed:
                raise
            if settings.verbose:
                traceback.print_exc()
            click.echo(f"tunegen: {shape.name}: {' '.join(str(error).split())}", err=True)
            return Attempt(shape, failure=str(error))
        device = result.record.device.name
        if result.record.evidence == "predicted" and self._told != device:
            self._told = device
            settings.note(
                f"predicted: no GPU ran these kernels; times are the model's for {device}"
            )
        if self.listed:
            settings.note(f"{shape.name}: {summary(result)}")
        return Attempt(shape, result)


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


def left(gain: float | None) -> str:
    """What a search that time ended may have left."""
    # All configurations left together can promise more than there is.
    if gain is None or gain > 0.99:
        return "how much may be left is not known"
    return f"up to {100 * gain:.2g} % may be left"

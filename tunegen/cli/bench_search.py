# SPDX-License-Identifier: Apache-2.0
"""tunegen bench-search: how well samplers search, on recorded spaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    console,
    counted,
    json_option,
    least_gain_option,
    pass_settings,
    print_json,
    print_table,
    table,
)
from tunegen.errors import UsageError

if TYPE_CHECKING:
    from tunegen.session import SearchBench, SearchScore

EPILOG = """\b
Examples:
  tunegen bench-search conv_A100.json.gz gemm_3090.json.gz
  tunegen bench-search spaces/*.json.gz --samplers portfolio,tpe,kt:adaptive_tabu_greywolf
  tunegen bench-search pnpoly_3060.json.gz --seeds 10 --evaluations 50,100 --noise 0.02 --json
"""


@click.command("bench-search", epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option(
    "--samplers",
    metavar="NAMES",
    help="Separated by commas: names of --sampler, and kt:STRATEGY for Kernel Tuner's; by default "
    "the usual ones of those that are installed.",
)
@click.option("--seeds", type=int, default=30, show_default=True, help="Runs of each sampler.")
@click.option(
    "--evaluations",
    default="25,50,100,200",
    show_default=True,
    metavar="NUMBERS",
    help="After how many configurations to look; the last ends a run.",
)
@click.option(
    "--noise",
    type=float,
    default=0.0,
    show_default=True,
    help="Relative noise of the times that a search sees, as in 0.02.",
)
@click.option(
    "--look-ahead",
    type=int,
    default=1,
    show_default=True,
    help="Configurations under way at once; tune has 8, to keep compilers busy.",
)
@least_gain_option
@json_option
@pass_settings
def bench_search(
    settings: Settings,
    /,
    files: tuple[str, ...],
    samplers: str | None,
    evaluations: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay recorded spaces, every configuration of which was timed, through the tuner.

    The table says what fraction of the optimum is found after so many configurations, mean and
    standard error over seeds; how many runs come within 1 % of it; and the processor time
    to choose one and learn from it. A configuration that fails counts like any other.
    """
    from tunegen import session

    with _progress(settings) as on_event:
        result = session.bench_search(
            files,
            samplers=None if samplers is None else _words(samplers),
            evaluations=_numbers(evaluations),
            on_event=on_event,
            **options,
        )
    if as_json:
        print_json(result)
    else:
        _print(result)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise UsageError(f"--evaluations {text!r}: write numbers, as in 25,50,100") from None


@contextmanager
def _progress(settings: Settings) -> Iterator[Any]:
    screen = console(stderr=True)
    if settings.quiet or not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(result: SearchBench) -> None:
    words = [counted(result.seeds, "seed"), f"{result.look_ahead} at a time"]
    if result.noise:
        words.append(f"noise {result.noise:g}")
    if result.least_gain is not None:
        words.append(f"least gain {result.least_gain:g}")
    if any(score.sampler.startswith("kt:") for score in result.scores):
        words.append(f"kt: is Kernel Tuner {result.kernel_tuner}")
    rows = table(
        f"fraction of the optimum after so many evaluations ({', '.join(words)})",
        "space", "sampler", *(f">{count}" for count in result.evaluations), ">made", ">within 1 %",
        ">ms",
    )  # fmt: skip

    def add(label: str, score: SearchScore) -> None:
        cells = zip(score.fractions, score.errors, strict=True)
        rows.add_row(
            label, score.sampler, *(f"{mean:.3f} ±{error:.3f}" for mean, error in cells),
            f"{score.made:.0f}", f"{score.arrived:.0%}", f"{score.ms:.1f}",
        )  # fmt: skip

    spaces = dict.fromkeys(score.space for score in result.scores)
    for space in spaces:
        for score in result.scores:
            if score.space == space:
                add(space, score)
    if len(spaces) > 1:
        for score in result.means:
            add(f"mean of {len(spaces)}", score)
    print_table(rows)

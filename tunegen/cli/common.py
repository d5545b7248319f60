# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, the problem they describe, and how results are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tunegen.errors import UsageError

if TYPE_CHECKING:  # rich and the specs load slowly: --help must not wait for them
    from rich.console import Console
    from rich.table import Table

    from tunegen.model import KernelSpec

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Settings:
    """The options before the command."""

    quiet: bool = False
    verbose: bool = False
    kernel_files: tuple[str, ...] = ()

    def specs(self) -> tuple[KernelSpec, ...]:
        """The shipped specs, after those of ``--kernel`` files."""
        from tunegen import kernels

        return (*(kernels.load(Path(file)) for file in self.kernel_files), *kernels.SPECS)

    def note(self, text: str) -> None:
        """One line on stderr, unless quiet."""
        if not self.quiet:
            click.echo(text, err=True)


pass_settings = click.make_pass_decorator(Settings, ensure=True)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)


class Folder(click.Path):
    """A folder, there or not. An empty name is an unset variable in a script, not this folder."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


db_option = click.option(
    "--db",
    type=Folder(),
    help="Database folder to use instead of the one in the user's data directory.",
)

least_gain_option = click.option(
    "--least-gain",
    type=float,
    metavar="SHARE",
    help="Stop also where all configurations that are left together can be expected to save less "
    "than this share of the best time, as in 0.002.",
)

storage_option = click.option(
    "--storage",
    metavar="URL",
    help="Where trials are kept, as in sqlite:///path/to/studies.db; the default is a file in the "
    "user's data directory.",
)


def device_options(function: F) -> F:
    """The options that say on which GPU something is measured."""
    device = click.option(
        "--device", type=int, metavar="INDEX", help="Which GPU, as nvidia-smi counts; the first."
    )
    shared = click.option("--shared", is_flag=True, help="Also on a GPU that others use.")
    return device(shared(function))


def problem_options(
    *, several: bool = False, archs: bool = False, here: bool = False
) -> Callable[[F], F]:
    """The options that say what is to be computed and for which GPU.

    ``several`` lets --problem be repeated, ``archs`` lets --arch; ``here`` is for what runs on a
    GPU of this machine, see :func:`device_options`.
    """
    arch_help = "Compute capability: sm_75 to sm_121."
    devices: list[Callable[[Any], Any]]
    if here:
        devices = [device_options]
    elif archs:
        devices = [
            click.option(
                "--arch",
                "archs",
                multiple=True,
                required=True,
                help=f"{arch_help} May be repeated.",
            )
        ]
    else:
        devices = [
            click.option("--arch", help=arch_help),
            click.option("--chip", help="A kind of GPU of that arch, as in --chip 'NVIDIA A100'."),
        ]
    options = [
        *devices,
        click.option(
            "--problem",
            "problems" if several else "problem",
            multiple=several,
            help="Sizes: MxNxK or BxMxNxK for matmul, N for vectors; 2^24 is a number."
            + (" May be repeated." if several else ""),
        ),
        click.option(
            "--dtype",
            help="fp32, fp64, fp16 or bf16. Without it fp32, for matmul bf16 where the arch "
            "multiplies that on tensor cores.",
        ),
        click.option("--layout", help="matmul: nn, nt, tn or tt (A then B, t stored transposed)."),
        click.option(
            "--attribute",
            "attributes",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_attributes,
            help="matmul: lda, ldb, ldc, beta (0 or 1), align, bias (0 or 1), activation (none, "
            "relu, gelu or silu), output (fp32, fp16 or bf16). May be repeated.",
        ),
        click.option("--spec", help="Only this kernel spec of the operation."),
    ]

    def decorate(function: F) -> F:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), function)

    return decorate


param_option = click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, parameter, values: _pairs(context, parameter, values),
    help="Fix a parameter, as in --param BLOCK_M=128. May be repeated.",
)


def _pairs(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    pairs = {}
    for text in values:
        name, _, number = text.partition("=")
        try:
            pairs[name.strip()] = int(number)
        except ValueError:
            raise UsageError(
                f"{parameter.opts[0]} {text!r}: write NAME=VALUE with a whole number"
            ) from None
    return pairs


def _attributes(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, int | str]:
    """Numbers, and the names of what an attribute chooses, which the operation knows."""
    pairs: dict[str, int | str] = {}
    for text in values:
        name, _, value = (part.strip() for part in text.partition("="))
        if name in ("sizes", "dtype", "layout"):
            raise UsageError(f"{parameter.opts[0]} {text!r}: that has an option of its own")
        if not value:
            raise UsageError(f"{parameter.opts[0]} {text!r}: write NAME=VALUE")
        pairs[name] = value
        with contextlib.suppress(ValueError):
            pairs[name] = int(value)
    return pairs


def console(*, stderr: bool = False) -> Console:
    """A rich console; plain text where the stream is no terminal or NO_COLOR is set."""
    from rich.console import Console

    class PassingOn(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program, as if it had failed
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width: wide enough that no cell of ours is cut or folded.
    return PassingOn(file=stream, highlight=False, width=None if stream.isatty() else 200)


def table(title: str, *columns: str) -> Table:
    """An empty table. A column named ``">time"`` holds numbers, which stand to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        title=title or None, title_justify="left", title_style="", box=SIMPLE_HEAD,
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    for column in columns:
        number = column.startswith(">")
        made.add_column(
            column.removeprefix(">"), justify="right" if number else "left", no_wrap=number
        )
    return made


# Words up to this length are never cut, on however narrow a terminal; longer ones are paths.
_WORD = 20


def print_table(rows: Table) -> None:
    """Print a table on stdout: cells wrap between words, nothing is cut."""
    for column in rows.columns:
        words = (word for text in (column.header, *column.cells) for word in str(text).split())
        column.overflow = "fold"
        column.min_width = min(max(map(len, words), default=1), _WORD)
    screen = console()
    with screen.capture() as captured:
        screen.print(rows, crop=False)
    lines = (line.rstrip() for line in captured.get().strip("\n").splitlines())
    click.echo("\n".join(lines), color=True)


def print_labelled(label: str, text: str) -> None:
    """A label and what it is of; on a terminal, what does not fit goes on beneath it."""
    label = f"{label:<11}"
    screen = console()
    if screen.is_terminal:
        text = textwrap.fill(
            text, max(screen.width - len(label), 20), break_long_words=False,
            break_on_hyphens=False,
        ).replace("\n", "\n" + " " * len(label))  # fmt: skip
    click.echo(label + text)


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\n  ".join(("\b\nExample:" if len(lines) == 1 else "\b\nExamples:", *lines))


def counted(number: int, what: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def print_json(document: Any) -> None:
    """One JSON document on stdout: dataclasses as objects, never NaN."""
    click.echo(json.dumps(document, default=_plain, indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def duration(us: float) -> str:
    """A time in the unit that reads best: 3.21 us, 45.6 ms."""
    if us < 1e3:
        return f"{us:.3g} us" if us < 100 else f"{us:.0f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"

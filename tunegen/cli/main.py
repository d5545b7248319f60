# SPDX-License-Identifier: Apache-2.0
"""The command group, and how errors leave the program: one line on stderr, and a code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from tunegen import __version__
from tunegen.cli import (
    admin,
    bench,
    bench_search,
    database,
    devices,
    export,
    inspect,
    kernels,
    study,
    tune,
)
from tunegen.cli.common import Settings
from tunegen.errors import CompileError, TunegenError

EPILOG = """\b
Examples:
  tunegen tune matmul --arch sm_90
  tunegen kernels matmul
  tunegen inspect matmul --arch sm_90 --emit ptx
  tunegen export matmul --arch sm_80 --arch sm_90 --out kernels/
"""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tunegen")
@click.option("-q", "--quiet", is_flag=True, help="Only results and errors.")
@click.option("-v", "--verbose", is_flag=True, help="More on stderr: compiler logs, tracebacks.")
@click.option(
    "--kernel",
    "kernel_files",
    multiple=True,
    type=click.Path(),
    help="A kernel file of your own (Python with a SPEC); its template lies beside it.",
)
@click.pass_context
def cli(context: click.Context, quiet: bool, verbose: bool, kernel_files: tuple[str, ...]) -> None:
    """Generate, tune, inspect and ship CUDA kernels. No nvcc; most commands need no GPU."""
    context.obj = Settings(quiet=quiet, verbose=verbose, kernel_files=kernel_files)


for command in (
    tune.tune,
    kernels.kernels,
    database.db,
    study.study,
    inspect.inspect,
    export.export,
    bench.bench,
    bench_search.bench_search,
    devices.devices,
    devices.calibrate,
    admin.doctor,
    admin.cache,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned, errors are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "-v" in words or "--verbose" in words
    _open_missing_streams()
    try:
        code = cli.main(words, prog_name="tunegen", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        where = f" (see {context.command_path} --help)" if context else ""
        return _fail(f"{error.format_message()}{where}", 2)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader, "head" say, has seen enough
        _give_up(sys.stdout)
        return 0
    except TunegenError as error:
        if verbose:
            if isinstance(error, CompileError):
                click.echo(error.log, err=True)
            import traceback

            traceback.print_exc()
        return _fail(str(error), error.exit_code)
    except OSError as error:  # stdout on a full disk; what else may fail has an error of its own
        if verbose:
            import traceback

            traceback.print_exc()
        _give_up(sys.stdout)
        where = f"{error.filename}: " if error.filename else "the output cannot be written: "
        return _fail(f"{where}{error.strerror or error}", 1)


def _open_missing_streams() -> None:
    """Python has None for a stream that the caller closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _give_up(stream: TextIO) -> None:
    """Let go what is left of the output, lest Python complains of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# What the caller wrote is part of many messages, and may be anything.
_LONGEST_MESSAGE = 1500


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        line = f"{line[:half]} [...] {line[-half:]}"
    with contextlib.suppress(OSError):
        click.echo(f"tunegen: {line}", err=True)
    return code

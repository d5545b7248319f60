# SPDX-License-Identifier: Apache-2.0
"""The command group, and how errors leave the program: one line on stderr, and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from tunegen import __version__
from tunegen.cli import admin, database, export, inspect, kernels, tune
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
    inspect.inspect,
    export.export,
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
        return _fail(f"{' '.join(error.format_message().split())}{where}", 2)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader, "head" say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TunegenError as error:
        if verbose:
            if isinstance(error, CompileError):
                click.echo(error.log, err=True)
            import traceback

            traceback.print_exc()
        return _fail(" ".join(str(error).split()), error.exit_code)


def _fail(message: str, code: int) -> int:
    click.echo(f"tunegen: {message}", err=True)
    return code

# SPDX-License-Identifier: Apache-2.0
"""tunegen export: a folder of kernels for other projects."""

from __future__ import annotations

from typing import Any

import click

from tunegen.cli.common import (
    Folder,
    Settings,
    db_option,
    json_option,
    pass_settings,
    problem_options,
)

EPILOG = """\b
Examples:
  tunegen export matmul --arch sm_80 --arch sm_90 --out kernels/
  tunegen export matmul add axpy --arch sm_90 --out kernels/ --db my_db/
  tunegen export matmul --arch sm_90 --problem 64x4096x4096 --dtype fp64 --out kernels/
"""


@click.command(epilog=EPILOG)
@click.argument("operations", nargs=-1, required=True)
@problem_options(archs=True)
@click.option("--out", required=True, type=Folder(), help="Folder to write.")
@db_option
@json_option
@pass_settings
def export(
    settings: Settings, /, operations: tuple[str, ...], out: str, as_json: bool, **options: Any
) -> None:
    """Write the recorded kernels of OPERATIONS for other projects to ship.

    Per kernel the CUDA source, a cubin for each arch, PTX for newer devices, and a manifest with
    launch plan, limits and checksums. Where nothing is recorded, the spec's default goes in,
    marked "default, unmeasured". The same input gives the same bytes.
    """
    from tunegen import bundle, session

    manifest = session.export(operations, out=out, specs=settings.specs(), **options)
    if as_json:
        click.echo(bundle.encode(manifest).decode(), nl=False)
        return
    for entry in manifest.entries:
        click.echo(f"{out}/{entry.name}")
        for image in entry.images:
            config = f"config {image.provenance}"
            click.echo(f"  {image.target:<11}{config}; {image.status}{_driver(image.min_driver)}")
        if entry.ptx is not None:
            target = f"PTX {entry.ptx.target}"
            click.echo(f"  {target:<11}ISA {entry.ptx.isa}{_driver(entry.ptx.min_driver)}")


def _driver(branch: str) -> str:
    return f"; driver {branch} or newer" if branch else ""

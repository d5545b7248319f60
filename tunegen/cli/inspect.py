# SPDX-License-Identifier: Apache-2.0
"""tunegen inspect: generated code, laid open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tunegen.cli.common import (
    Settings,
    db_option,
    duration,
    json_option,
    param_option,
    pass_settings,
    print_json,
    print_labelled,
    print_table,
    problem_options,
    table,
)

if TYPE_CHECKING:
    from tunegen.session import Inspection
    from tunegen.session.inspection import KernelResources

EPILOG = """\b
Examples:
  tunegen inspect matmul --arch sm_90 --emit cuda
  tunegen inspect matmul --arch sm_90 --problem 4096x4096x4096 --param BLOCK_M=128 --emit ptx
  tunegen inspect axpy --arch sm_120 --dtype bf16 --emit sass
  tunegen inspect matmul --arch sm_80 --emit resources
"""


@click.command(epilog=EPILOG)
@click.argument("operation")
@problem_options()
@param_option
@click.option(
    "--emit",
    default="ptx",
    show_default=True,
    help="cuda, ptx or sass (each under its CUDA lines), or resources.",
)
@db_option
@json_option
@pass_settings
def inspect(
    settings: Settings, /, operation: str, as_json: bool, emit: str, **options: Any
) -> None:
    """Show what is generated for OPERATION: CUDA, PTX, SASS, or registers and occupancy.

    The recorded winner for the problem is shown where there is one, else the spec's default. Any
    arch can be asked for; no GPU is needed.
    """
    from tunegen import session

    found = session.inspect(operation, emit=emit, specs=settings.specs(), **options)
    if emit != "resources":
        settings.note(f"{found.build.spec.name}: {found.build.config}")
    settings.note(f"config from: {found.origin}; code: {found.code}")
    if as_json:
        print_json(_document(found))
    elif emit == "resources":
        _print_resources(found)
    else:
        for _, text in found.texts:
            click.echo(text.rstrip("\n"))


def _print_resources(found: Inspection) -> None:
    build, prediction = found.build, found.prediction
    names = (item.kernel.name for item in found.resources)
    rows = table(
        f"{build.spec.operation.name} {build.spec.name} for {build.target}, "
        f"NVRTC {build.kernels[0].nvrtc}",
        "",
        *(f">{name}" for name in names),
    )
    columns = [_facts(item) for item in found.resources]
    for name in columns[0]:
        rows.add_row(name, *(column[name] for column in columns))
    print_table(rows)
    click.echo()
    for kernel in build.kernels:
        if kernel.rejection:
            print_labelled("rejected", f"{kernel.name}: {kernel.rejection}")
    parts = ", ".join(f"{name} {duration(us)}" for name, us in prediction.parts.items())
    print_labelled("config", str(build.config))
    print_labelled(
        "predicted",
        f"{duration(prediction.time_us)} on {build.request.device.name}, "
        f"bound by {prediction.bound}, {prediction.waves:.2f} waves",
    )
    print_labelled("parts", parts)


def _facts(item: KernelResources) -> dict[str, str]:
    used = item.kernel.resources
    return {
        "registers": str(used.registers),
        "spills, stored+loaded": f"{used.spill_store_bytes}+{used.spill_load_bytes} B",
        "stack": f"{used.stack_bytes} B",
        "shared memory": f"{item.shared_bytes:,} B",
        "threads": str(item.threads),
        "blocks per SM": str(item.occupancy.blocks_per_sm),
        "occupancy": f"{item.occupancy.fraction:.0%}",
        "limited by": item.occupancy.limiter,
        "cubin": f"{len(item.kernel.cubin):,} B",
    }


def _document(found: Inspection) -> dict[str, Any]:
    build = found.build
    return {
        "operation": build.spec.operation.name,
        "spec": build.spec.name,
        "config": build.config,
        "origin": found.origin,
        "code": found.code,
        "target": build.target,
        "nvrtc": build.kernels[0].nvrtc,
        "texts": dict(found.texts),
        "plan": build.plan,
        "limits": build.limits,
        "kernels": [
            {
                "name": item.kernel.name,
                "entry": item.kernel.entry,
                "resources": item.kernel.resources,
                "shared_bytes": item.shared_bytes,
                "threads": item.threads,
                "occupancy": item.occupancy,
                "warnings": item.kernel.warnings,
                "rejection": item.kernel.rejection,
                "cubin_bytes": len(item.kernel.cubin),
            }
            for item in found.resources
        ],
        "prediction": found.prediction,
    }

# SPDX-License-Identifier: Apache-2.0
"""tunegen kernels: what there is to tune."""

from __future__ import annotations

from typing import Any

import click

from tunegen.cli.common import (
    Settings,
    json_option,
    pass_settings,
    print_json,
    print_table,
    problem_options,
    table,
)
from tunegen.errors import UsageError

EPILOG = """\b
Examples:
  tunegen kernels
  tunegen kernels matmul
  tunegen kernels matmul --arch sm_80 --problem 4095x4097x4099 --dtype fp64
"""


@click.command(epilog=EPILOG)
@click.argument("operation", required=False)
@problem_options()
@json_option
@pass_settings
def kernels(
    settings: Settings, /, operation: str | None, as_json: bool, arch: str | None, **options: Any
) -> None:
    """List operations and specs; with OPERATION, its parameters and constraints.

    For each constraint: how many configurations it removes for the problem, given those above it.
    """
    if operation is None:
        if arch is not None or any(options.values()):
            raise UsageError("these options are about an operation", hint="name it first")
        _list(settings, as_json)
        return
    from tunegen import session

    wanted = session.request(operation, arch=arch or "sm_90", specs=settings.specs(), **options)
    listings = session.describe(wanted)
    if as_json:
        print_json([_document(listing) for listing in listings])
        return
    label = wanted.operation.label(wanted.problem)
    click.echo(f"{wanted.operation.name}: {wanted.operation.summary}")
    click.echo(f"for {label} on {wanted.device.name} ({wanted.arch})\n")
    for listing in listings:
        click.echo(f"spec {listing.spec.name}: {listing.spec.summary}\n")
        if listing.refusal:
            click.echo(f"it does not take this problem: {listing.refusal}\n")
            continue
        rows = table("", "parameter", "values", ">default", "meaning")
        for parameter in listing.parameters:
            default = listing.default[parameter.name] if listing.default else ""
            values = " ".join(map(str, parameter.values))
            rows.add_row(parameter.name, values, str(default), parameter.meaning)
        print_table(rows)
        click.echo()
        rows = table("", ">removes", "constraint")
        for reason, count in listing.removed:
            rows.add_row(f"{count:,}", reason)
        print_table(rows)
        click.echo(f"\n{listing.valid:,} of {listing.cartesian:,} configurations are valid\n")


def _list(settings: Settings, as_json: bool) -> None:
    from tunegen import session

    overview = session.overview(settings.specs())
    if as_json:
        print_json(
            [
                {
                    "operation": name,
                    "summary": specs[0].operation.summary,
                    "dtypes": specs[0].operation.dtypes,
                    "layouts": [layout for layout in specs[0].operation.layouts if layout],
                    "choices": specs[0].operation.choices,
                    "specs": {spec.name: spec.summary for spec in specs},
                }
                for name, specs in overview.items()
            ]
        )
        return
    rows = table("", "operation", "computes", "spec", "", "dtypes", "layouts")
    for name, specs in overview.items():
        operation = specs[0].operation
        for position, spec in enumerate(specs):
            head = (name, operation.summary) if position == 0 else ("", "")
            tail = (" ".join(operation.dtypes), " ".join(operation.layouts))
            rows.add_row(*head, spec.name, spec.summary, *(tail if position == 0 else ("", "")))
    print_table(rows)


def _document(listing: Any) -> dict[str, Any]:
    return {
        "spec": listing.spec.name,
        "summary": listing.spec.summary,
        "refusal": listing.refusal,
        "parameters": listing.parameters,
        "default": listing.default,
        "configurations": listing.cartesian,
        "valid": listing.valid,
        "constraints": [{"reason": reason, "removed": count} for reason, count in listing.removed],
    }

# SPDX-License-Identifier: Apache-2.0
"""tunegen doctor and tunegen cache: the installation and what it keeps on disk."""

from __future__ import annotations

import click

from tunegen.cli.common import (
    Settings,
    counted,
    examples,
    json_option,
    pass_settings,
    print_json,
    print_table,
    table,
)

DOCTOR_EPILOG = """\b
Examples:
  tunegen doctor
  tunegen doctor --json
"""

CACHE_EPILOG = """\b
Examples:
  tunegen cache show
  tunegen cache clear
"""


@click.command(epilog=DOCTOR_EPILOG)
@json_option
@pass_settings
def doctor(settings: Settings, as_json: bool) -> int:
    """Say what is installed, what fits together, what is missing and what mends it.

    Exit code 1 where something that every command needs is missing or does not fit. No GPU is
    worth a warning: tuning predicts, everything else works.
    """
    from tunegen import session

    checks = session.examine()
    if as_json:
        print_json(checks)
    else:
        rows = table("", "", "what", "found", "needed", "mend it with")
        for check in checks:
            rows.add_row(check.status, check.name, check.found, check.needed, check.fix)
        print_table(rows)
        remarks = [check for check in checks if check.detail and check.status != "ok"]
        if remarks:
            click.echo()
        for check in remarks:
            click.echo(f"{check.name}: {check.detail}")
    return 1 if any(check.failed for check in checks) else 0


@click.group(epilog=CACHE_EPILOG)
def cache() -> None:
    """Show or clear the cache of compiled kernels."""


@cache.command(epilog=examples("tunegen cache show", "tunegen cache show --json"))
@json_option
@pass_settings
def show(settings: Settings, as_json: bool) -> None:
    """Where the cache is, how many kernels it holds, and their size."""
    from tunegen import session

    _report(session.cache_report(), as_json)


@cache.command(epilog=examples("tunegen cache clear", "tunegen cache clear --json"))
@json_option
@pass_settings
def clear(settings: Settings, as_json: bool) -> None:
    """Remove every compiled kernel; the next tune compiles again."""
    from tunegen import session

    report = session.clear_cache()
    settings.note("removed:")
    _report(report, as_json)


def _report(report: object, as_json: bool) -> None:
    from tunegen.compiler import CacheReport

    assert isinstance(report, CacheReport)
    if as_json:
        print_json(report)
        return
    damaged = f", {report.damaged} of them damaged" if report.damaged else ""
    kernels = counted(report.kernels, "kernel")
    click.echo(f"{report.folder}: {kernels}, {report.bytes:,} bytes{damaged}")

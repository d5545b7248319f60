# SPDX-License-Identifier: Apache-2.0
"""Questions to the database that need more than the database: is a record still true?"""

from __future__ import annotations

from collections.abc import Sequence

from tunegen import codegen, compiler, kernels
from tunegen.database import Database, Finding, Match
from tunegen.errors import UsageError
from tunegen.model import Config, DeviceClass, Evidence, KernelSpec, TuningRecord
from tunegen.perfmodel import CHIPS, default_chip
from tunegen.session.resolve import Request


def find(database: Database, wanted: Request) -> Match:
    """The best record for a request that is not stale, with the rung that answered.

    Whatever a GPU measured comes before any prediction, even one for this very problem.
    """
    measured = _lookup(database, wanted, "measured")
    return measured if measured.record is not None else _lookup(database, wanted, None)


def find_exact(database: Database, wanted: Request, policy: str = "") -> TuningRecord | None:
    """The record of this very problem and device class, of one policy if that is given: a measured
    one, else a predicted one."""
    kinds: tuple[Evidence, ...] = ("measured", "predicted")
    for evidence in kinds:
        match = _lookup(database, wanted, evidence, policy)
        if match.rung == "exact":
            return match.record
    return None


def _lookup(
    database: Database, wanted: Request, evidence: Evidence | None, policy: str = ""
) -> Match:
    def usable(record: TuningRecord) -> str:
        return staleness(record, wanted.specs)

    return database.lookup(
        wanted.operation, wanted.problem, wanted.device, usable=usable, evidence=evidence,
        policy=policy,
    )  # fmt: skip


def staleness(record: TuningRecord, specs: Sequence[KernelSpec] = kernels.SPECS) -> str:
    """Why a record no longer describes what tunegen generates, or the empty string."""
    spec = _spec_of(record, specs)
    if spec is None:
        return f"stale: there is no spec {record.spec} of {record.operation} any more"
    problem = spec.operation.complete(record.problem)
    names = spec.space(problem, device_of(record)).names
    if set(names) != set(record.config):
        return f"stale: the parameters of {record.spec} have changed"
    config = Config({name: record.config[name] for name in names})
    sources = codegen.render(spec, config, problem, record.arch)
    digests = [compiler.identity(source, record.target) for source in sources]
    if digests != [image.source_digest for image in record.images]:
        return "stale: the template has changed since it was recorded"
    return ""


def legality(record: TuningRecord, specs: Sequence[KernelSpec] = kernels.SPECS) -> str:
    """Why a record's configuration cannot run on its own device class, or the empty string."""
    spec = _spec_of(record, specs)
    if spec is None:
        return f"there is no spec {record.spec} of {record.operation}; --kernel FILE adds one"
    device, problem = device_of(record), spec.operation.complete(record.problem)
    if refusal := spec.refuses(problem, device):
        return refusal
    space = spec.space(problem, device)
    try:
        config = space.config(record.config)
    except UsageError as error:
        return str(error)
    return "; ".join(space.violated(config))


def device_of(record: TuningRecord) -> DeviceClass:
    """The device class that a record names, or its arch's default where the name is new."""
    for chip in CHIPS:
        if chip.name == record.device.name and chip.arch == record.arch:
            return chip
    return default_chip(record.arch)


def _spec_of(record: TuningRecord, specs: Sequence[KernelSpec]) -> KernelSpec | None:
    return next(
        (s for s in specs if s.name == record.spec and s.operation.name == record.operation), None
    )


def check(database: Database, specs: Sequence[KernelSpec] = kernels.SPECS) -> list[Finding]:
    """Everything wrong with a database: malformed files, illegal and stale records."""
    return database.check(
        illegal=lambda record: legality(record, specs),
        stale=lambda record: staleness(record, specs).removeprefix("stale: "),
    )

# SPDX-License-Identifier: Apache-2.0
"""Records in, a folder out that other projects can ship."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunegen import __version__, compiler, disasm, kernels
from tunegen.bundle import BundleEntry, BundleImage, Manifest, write_bundle
from tunegen.bundle.manifest import Provenance, Status
from tunegen.database import Database
from tunegen.errors import UsageError
from tunegen.model import Config, KernelSpec, TuningRecord, capability, check_arch
from tunegen.session.building import Build, build
from tunegen.session.records import find_exact
from tunegen.session.resolve import Request, request


@dataclass(frozen=True, slots=True)
class _Choice:
    """A configuration to ship for one arch, and the record that speaks for it."""

    wanted: Request
    spec: KernelSpec
    config: Config
    record: TuningRecord | None

    @property
    def key(self) -> tuple[object, ...]:
        """Choices with the same key are one entry with an image per arch."""
        return (self.wanted.operation.name, self.wanted.problem, self.spec.name, self.config)


def export(
    operations: Sequence[str],
    *,
    archs: Sequence[str],
    out: Path | str,
    problem: str | Sequence[int] | Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Manifest:
    """Write kernels for every arch into ``out``; see :func:`tunegen.bundle.write_bundle`.

    Without a problem, dtype or layout every recorded problem of the operation is exported, and
    where an arch has no record, the spec's default for the operation's default problem. With one
    of them, that problem alone.

    Raises :class:`tunegen.errors.BundleError` where ``out`` holds something else.
    """
    if not operations:
        raise UsageError("name at least one operation", hint="tunegen kernels lists them")
    if not archs:
        raise UsageError("name at least one --arch")
    database = Database(Path(db) if db else None)
    asked = {"problem": problem, "dtype": dtype, "layout": layout, "attributes": attributes}
    grouped: dict[tuple[object, ...], list[_Choice]] = {}
    for operation in dict.fromkeys(operations):
        for arch in sorted(set(map(check_arch, archs)), key=capability):
            base = request(operation, arch=arch, spec=spec, specs=specs, **asked)  # type: ignore[arg-type]
            for choice in _choices(database, base, every=not any(asked.values())):
                grouped.setdefault(choice.key, []).append(choice)
    kernel_cache = compiler.KernelCache(Path(cache) if cache else None)
    entries = [_entry(choices, kernel_cache) for choices in grouped.values()]
    return write_bundle(out, entries, tunegen_version=__version__)


def _choices(database: Database, base: Request, *, every: bool) -> Iterator[_Choice]:
    """What to ship on one arch: a choice per recorded problem, or for the problem asked for."""
    problems = [base.problem]
    if every:
        names = {spec.name for spec in base.specs}
        recorded = {
            base.operation.complete(record.problem): None
            for _, record in database.records(base.arch, base.operation.name)
            if record.spec in names
        }
        problems = list(recorded) or problems
    for problem in problems:
        wanted = replace(base, problem=problem)
        if record := find_exact(database, wanted):
            spec = next(s for s in base.specs if s.name == record.spec)
            config = spec.space(problem, wanted.device).config(record.config)
            yield _Choice(wanted, spec, config, record)
        else:
            spec = wanted.spec()
            yield _Choice(wanted, spec, spec.default(problem, wanted.device), None)


def _entry(choices: list[_Choice], cache: compiler.KernelCache) -> BundleEntry:
    lowest = choices[0]
    built = [build(choice.wanted, choice.spec, choice.config, cache=cache) for choice in choices]
    floor = () if lowest.spec.suffix else built[0].kernels
    return BundleEntry(
        spec=lowest.spec,
        problem=lowest.wanted.problem,
        config=lowest.config,
        sources=built[0].sources,
        images=tuple(
            BundleImage(made.kernels, _provenance(choice.record), _status(made, choice.record),
                        choice.record)
            for choice, made in zip(choices, built, strict=True)
        ),
        floor=floor,
    )  # fmt: skip


def _provenance(record: TuningRecord | None) -> Provenance:
    return record.evidence if record is not None else "default, unmeasured"


def _status(built: Build, record: TuningRecord | None) -> Status:
    if record is None:
        return "built"
    cubins = [kernel.cubin for kernel in built.kernels]
    if [hashlib.sha256(cubin).hexdigest() for cubin in cubins] == [
        image.cubin_sha256 for image in record.images
    ]:
        return "verified"
    codes = [disasm.code_digest(cubin) for cubin in cubins]
    equal = codes == [image.code_sha256 for image in record.images]
    return "rebuilt, code equal" if equal else "rebuilt, code differs"

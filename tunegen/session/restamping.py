# SPDX-License-Identifier: Apache-2.0
"""A record whose source was rewritten and whose code was not: the new source's digest in it.

What was measured is machine code. Where today's source gives the same code under the same NVRTC,
every figure of the record is still true, and a measurement need not be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunegen import compiler, kernels
from tunegen.database import Database, faults
from tunegen.errors import CompileError, PlanError
from tunegen.model import KernelImage, KernelSpec, Limit, TuningRecord
from tunegen.session.building import Build, build
from tunegen.session.recording import images
from tunegen.session.records import device_of, legality, staleness
from tunegen.session.resolve import Request


@dataclass(frozen=True, slots=True)
class Restamping:
    """What became of a stale record. ``record`` is as it stands in the database now.

    ``reason`` says why it is right again, or why it stays stale; ``hint`` is then the command to
    try next.
    """

    record: TuningRecord
    restamped: bool
    reason: str
    hint: str = ""


def restamp(
    operations: Sequence[str] = (),
    *,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Iterator[Restamping]:
    """Compile the kernels of every stale record of ``db``, and put the new source digests into
    those whose code is as it was; yields each one when it is done with, and is on disk.

    Source digests change, and a configuration is completed by parameters that came later and say
    what they were before. Code counts as the same where ``code_sha256`` of every image is:
    machine code, constants, and memory that is laid out in advance. Its cubin may be another one,
    since the names of functions stand in it too; ``cubin_sha256`` stays that of the cubin that
    ran. Where no ``code_sha256`` was recorded, the cubin must be the same. Registers, spilled
    bytes, shared memory and limits must be as recorded as well.

    A record stays stale where its NVRTC is not the one that is here, where its configuration is
    no longer legal, or where it is a prediction, which is made again in seconds.

    Without ``operations`` it is all of them. What is shipped beside the folder is not touched.
    Raises :class:`tunegen.errors.UsageError` for an unknown operation, :class:`DatabaseError`
    where a file cannot be read or written, :class:`ToolkitError` where there is no NVRTC.
    """
    known = tuple(specs)
    database = Database(Path(db) if db else None)
    wanted = {kernels.operation(name, known).name for name in operations}
    kernel_cache = compiler.KernelCache(Path(cache) if cache else None)
    (written, _), *_ = database.layers
    for layer, record in list(database.records()):
        asked = layer == written and (not wanted or record.operation in wanted)
        # What cannot be true answers nobody, and is for tunegen db check to name.
        if asked and not faults(record) and staleness(record, known):
            yield _restamp(database, record, known, kernel_cache)


def _restamp(
    database: Database,
    record: TuningRecord,
    specs: tuple[KernelSpec, ...],
    cache: compiler.KernelCache,
) -> Restamping:
    again = record.command
    if record.evidence == "predicted":
        return Restamping(record, False, "a prediction is made again, not re-stamped", again)
    completed = _completed(record, specs)
    if objection := legality(completed, specs):
        return Restamping(record, False, objection, again)
    here = compiler.nvrtc_version()
    if record.nvrtc != here:
        reason = f"comparing its code needs NVRTC {record.nvrtc}, this is {here}"
        pip = f"pip install 'nvidia-cuda-nvrtc=={record.nvrtc}'"
        return Restamping(record, False, reason, pip)
    database.ensure_writable(record.arch, record.operation)
    try:
        built = _build(completed, specs, cache)
    except (CompileError, PlanError) as error:
        return Restamping(record, False, error.message, again)
    today = images(built)
    if objection := _changed(record, built, today):
        return Restamping(record, False, objection, again)
    stamped = replace(
        completed,
        images=tuple(
            replace(image, source_digest=now.source_digest)
            for image, now in zip(record.images, today, strict=True)
        ),
    )
    if not database.amend(record, stamped):
        reason = "it does not stand in its file any more, where another process writes as well"
        return Restamping(record, False, reason, "tunegen db check")
    same = [image.cubin_sha256 for image in today] == [i.cubin_sha256 for i in record.images]
    return Restamping(stamped, True, "the very same cubin" if same else "the same code")


def _completed(record: TuningRecord, specs: tuple[KernelSpec, ...]) -> TuningRecord:
    """With the parameters that its spec has got since."""
    for spec in specs:
        if (spec.operation.name, spec.name) == (record.operation, record.spec):
            space = spec.space(spec.operation.complete(record.problem), device_of(record))
            return replace(record, config=space.completed(record.config))
    return record


def _build(
    record: TuningRecord, specs: tuple[KernelSpec, ...], cache: compiler.KernelCache
) -> Build:
    (spec,) = kernels.specs_of(record.operation, specs, only=record.spec)
    problem = spec.operation.complete(record.problem)
    wanted = Request(spec.operation, problem, device_of(record), (spec,))
    config = spec.space(problem, wanted.device).config(record.config)
    return build(wanted, spec, config, cache=cache)


def _changed(record: TuningRecord, built: Build, today: Sequence[KernelImage]) -> str:
    """What is not as it was measured, or the empty string."""
    if built.target != record.target:
        return f"it is compiled for {built.target} today, and was for {record.target}"
    before = [image.name for image in record.images]
    now = [image.name for image in today]
    if before != now:
        return f"it launches {', '.join(now)} today, and did {', '.join(before)}"
    for old, new in zip(record.images, today, strict=True):
        if not _same_code(old, new):
            return f"the code of {new.name} is not what was measured"
        for fact in ("registers", "spill_bytes", "shared_bytes"):
            was, is_now = getattr(old, fact), getattr(new, fact)
            if was != is_now:
                return f"{new.name} has {is_now} {fact} today, and had {was}"
    return _changed_limits(record, built.limits)


def _same_code(old: KernelImage, new: KernelImage) -> bool:
    if not old.code_sha256:
        return old.cubin_sha256 == new.cubin_sha256
    return old.code_sha256 == new.code_sha256


def _changed_limits(record: TuningRecord, today: Sequence[Limit]) -> str:
    # A record without finals holds for its very sizes only, which is no limit of the spec.
    own = {Limit(name, "equal", size) for name, size in record.problem.sizes}
    recorded = set(record.limits)
    if added := [limit for limit in today if limit not in recorded]:
        return f"it holds only where {' and '.join(map(str, added))} now, which it does not say"
    if gone := [limit for limit in record.limits if limit not in {*today, *own}]:
        return f"it is limited to {' and '.join(map(str, gone))}, and its spec no longer is"
    return ""

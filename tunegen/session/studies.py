# SPDX-License-Identifier: Apache-2.0
"""Durable studies: which of the trials stored may be used today, and which studies there are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunegen import codegen, compiler, store
from tunegen.errors import UsageError, unknown
from tunegen.model import Config, DeviceIdentity, Evaluator, KernelSpec, Trial
from tunegen.search import Contender
from tunegen.session.resolve import Request
from tunegen.store import Carried, Received, Study, StudyInfo, StudyKey


def check_storage(url: str | None) -> None:
    """Raise :class:`UsageError` for a URL that cannot mean a storage."""
    if url is not None:
        # SQLAlchemy takes longer to load than all the rest, and most commands name no storage.
        from tunegen.store.connection import parse

        parse(url)


def open_study(
    wanted: Request,
    contenders: Sequence[Contender],
    evaluator: Evaluator,
    *,
    policy: str,
    tolerance: float | None = None,
    storage: str | None = None,
    fresh: bool = False,
    named: str | None = None,
) -> Study:
    """The study of a request, whose device must be the one that runs the trials. Where it is
    ``named``, it must be the one of that name, or whose name begins so.

    Its trials are those whose configuration is still valid and whose sources are still generated
    as they were, which takes about a millisecond each to find out. Raises as
    :meth:`tunegen.store.Study.open` does, and :class:`UsageError` where another study was named.
    """
    rows = {contender.spec.name: contender for contender in contenders}

    def usable(trial: Trial, digests: Mapping[str, str]) -> bool:
        contender = rows.get(trial.spec)
        if contender is None or contender.table.row(trial.config) is None:
            return False
        return digests == source_digests(wanted, contender.spec, trial.config)

    key = StudyKey(
        operation=wanted.operation,
        problem=wanted.problem,
        arch=wanted.arch,
        device=DeviceIdentity.of(wanted.device),
        evidence=evaluator.evidence,
        policy=policy,
        tolerance=tolerance,
        toolkit=compiler.nvrtc_version() if evaluator.needs_kernels else "",
        spaces={contender.spec.name: contender.table.space for contender in contenders},
    )
    if named is not None:
        _check_name(key, named)
    return Study.open(storage, key, usable=usable, fresh=fresh)


def _check_name(key: StudyKey, named: str) -> None:
    name = key.name(1)
    if not name.startswith(named) and not re.fullmatch(rf"{re.escape(name)}-[1-9]\d*", named):
        raise UsageError(
            f"study {named!r} is not that of this problem on {key.device.name} ({name})",
            hint="without --study that one is used",
        )


def source_digests(wanted: Request, spec: KernelSpec, config: Config) -> dict[str, str]:
    """Digest of the source of every kernel of a configuration, as records keep it."""
    target = spec.target(wanted.arch)
    sources = codegen.render(spec, config, wanted.problem, wanted.arch)
    return {source.name: compiler.identity(source, target) for source in sources}


def list_studies(storage: str | None = None) -> tuple[tuple[StudyInfo, ...], tuple[str, ...]]:
    """Every study of a storage, and what was wrong with the storage, one line each."""
    return store.list_studies(storage)


def find_study(name: str, storage: str | None = None) -> tuple[StudyInfo, tuple[str, ...]]:
    """The study of that name, or the only one whose name begins so, and what was wrong with the
    storage. Raises :class:`UsageError` where there is none or several."""
    studies, warnings = store.list_studies(storage)
    (chosen,) = _choose([name], [info.name for info in studies], "tunegen study list")
    return next(info for info in studies if info.name == chosen), warnings


def export_studies(
    file: Path | str, names: Sequence[str] = (), storage: str | None = None
) -> tuple[tuple[Carried, ...], tuple[str, ...]]:
    """Write the studies of these names, or those whose names begin so, to ``file``; all without
    names. Gzipped where it ends in ".gz"; a file that is there is replaced.

    Returns what was written, and what was wrong with the storage. Raises :class:`UsageError`
    where there is no such study, none at all, or a database at ``file``; then nothing is written.
    """
    studies, warnings = store.collect(
        storage, lambda known: _choose(names, known, "tunegen study list")
    )
    if not studies:
        raise UsageError("there are no studies to export", hint="tunegen study list")
    store.write(studies, Path(file))
    return studies, warnings


def import_studies(
    file: Path | str, names: Sequence[str] = (), storage: str | None = None
) -> tuple[Received, ...]:
    """Add the trials of the studies in ``file`` to those of a storage, as
    :func:`tunegen.store.receive` says; ``names`` as in :func:`export_studies`.

    Raises :class:`UsageError` for a file that is damaged or not one of studies, and for a study
    that it does not have; then nothing is written.
    """
    studies = store.read_file(Path(file))
    known = [study.name for study in studies]
    chosen = _choose(names, known, f"it has {', '.join(known)}" if known else "it has none")
    return store.receive(storage, [study for study in studies if study.name in chosen])


def _choose(names: Sequence[str], known: Sequence[str], hint: str) -> list[str]:
    """Of the ``known`` names those that are named, or that alone begin so; all if none is."""
    chosen = []
    for name in names:
        found = [name] if name in known else [k for k in known if k.startswith(name)]
        if not found:
            raise unknown("study", name, known, hint=hint)
        if len(found) > 1:
            raise UsageError(f"{len(found)} studies begin with {name!r}: {', '.join(found)}")
        chosen += found
    return chosen if names else list(known)

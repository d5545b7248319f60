# SPDX-License-Identifier: Apache-2.0
"""Durable studies: which of the trials stored may be used today, and which studies there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunegen import codegen, compiler, store
from tunegen.errors import UsageError, unknown
from tunegen.model import Config, DeviceIdentity, Evaluator, KernelSpec, Trial
from tunegen.search import Contender
from tunegen.session.resolve import Request
from tunegen.store import Study, StudyInfo, StudyKey


def open_study(
    wanted: Request,
    contenders: Sequence[Contender],
    evaluator: Evaluator,
    *,
    policy: str,
    tolerance: float | None = None,
    storage: str | None = None,
    fresh: bool = False,
) -> Study:
    """The study of a request, whose device must be the one that runs the trials.

    Its trials are those whose configuration is still valid and whose sources are still generated
    as they were, which takes about a millisecond each to find out. Raises as
    :meth:`tunegen.store.Study.open` does.
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
    return Study.open(storage, key, usable=usable, fresh=fresh)


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
    found = [info for info in studies if info.name == name]
    found = found or [info for info in studies if info.name.startswith(name)]
    if not found:
        raise unknown("study", name, [info.name for info in studies], hint="tunegen study list")
    if len(found) > 1:
        names = ", ".join(info.name for info in found)
        raise UsageError(f"{len(found)} studies begin with {name!r}: {names}")
    return found[0], warnings

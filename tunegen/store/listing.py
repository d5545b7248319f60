# SPDX-License-Identifier: Apache-2.0
"""Studies as they are listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunegen.model import OutcomeKind
from tunegen.store.form import StoredTrial
from tunegen.store.reading import newest_of, read, studies_of

if TYPE_CHECKING:
    from tunegen.store.connection import Connection


@dataclass(frozen=True, slots=True)
class StudyInfo:
    """A study as it is listed.

    ``facts`` are those of :class:`StudyKey`, with the digest of the ``space``, the ``family`` and
    ``generation``, and when it was ``created``. ``current`` says whether a tune uses it today:
    studies before a ``--fresh`` are kept, but not used. ``trials`` are all of its own trials, in
    the order in which they were added; ``unreadable`` counts those that are damaged.
    """

    name: str
    facts: Mapping[str, Any]
    current: bool
    trials: tuple[StoredTrial, ...]
    unreadable: int

    @property
    def counts(self) -> Mapping[OutcomeKind, int]:
        """How many trials came to which outcome."""
        return Counter(stored.trial.outcome.kind for stored in self.trials)

    @property
    def best(self) -> StoredTrial | None:
        """The fastest trial; None where none succeeded."""
        return min(
            (stored for stored in self.trials if stored.trial.outcome.ok),
            key=lambda stored: stored.trial.outcome.median_us,
            default=None,
        )

    @property
    def updated(self) -> str:
        """When the last trial finished, or the study was created."""
        return max((stored.finished for stored in self.trials), default=self.facts["created"])


def list_studies(url: str | None) -> tuple[tuple[StudyInfo, ...], tuple[str, ...]]:
    """Every study of a storage in the order of creation, and what was wrong with the storage.

    Raises as :meth:`Study.open` does, and :class:`DatabaseError` where there is no such file;
    nothing is created.
    """
    from tunegen.store.connection import connect

    connection = connect(url, create=False)
    if connection is None:
        return (), ()
    try:
        return tuple(_describe(connection)), connection.warnings
    finally:
        connection.close()


def _describe(connection: Connection) -> Iterator[StudyInfo]:
    rows = studies_of(connection)
    newest = newest_of(rows)
    found: dict[int, list[StoredTrial | None]] = {row.study_id: [] for row in rows}
    for study_id, stored in read(connection, list(found)):
        found[study_id].append(stored)
    for row in rows:
        trials = tuple(stored for stored in found[row.study_id] if stored is not None)
        yield StudyInfo(
            name=row.name,
            facts=row.facts,
            current=row.facts["generation"] == newest[row.facts["family"]],
            trials=tuple(
                replace(stored, trial=replace(stored.trial, number=number))
                for number, stored in enumerate(trials)
            ),
            unreadable=len(found[row.study_id]) - len(trials),
        )

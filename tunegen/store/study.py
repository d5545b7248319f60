# SPDX-License-Identifier: Apache-2.0
"""Studies and their trials."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from tunegen.errors import unknown
from tunegen.model import OutcomeKind, Space, Trial
from tunegen.store.form import StoredTrial, decode, encode
from tunegen.store.key import StudyKey
from tunegen.store.salvage import FACTS_KEY, TRIAL_KEY

if TYPE_CHECKING:
    from tunegen.store.connection import Connection

_STUDIES = """
SELECT studies.study_id, studies.study_name, study_user_attributes.value_json
FROM studies JOIN study_user_attributes ON study_user_attributes.study_id = studies.study_id
WHERE study_user_attributes.key = :key
ORDER BY studies.study_id
"""

# A trial is one row of JSON here. Optuna's own reading makes an object of every parameter of every
# trial: 7 s of processor time for 10,000 trials of 17 parameters, ten times what this takes.
_TRIALS = """
SELECT trials.study_id, trial_user_attributes.value_json
FROM trials JOIN trial_user_attributes ON trial_user_attributes.trial_id = trials.trial_id
WHERE trial_user_attributes.key = :key AND trials.study_id IN :studies
ORDER BY trials.trial_id
"""


# The fastest of a study are found by their values; only theirs are decoded.
_FASTEST = """
SELECT trial_user_attributes.value_json
FROM trials
JOIN trial_values ON trial_values.trial_id = trials.trial_id
JOIN trial_user_attributes ON trial_user_attributes.trial_id = trials.trial_id
WHERE trial_user_attributes.key = :key AND trials.study_id = :study
ORDER BY trial_values.value, trials.trial_id
LIMIT :most
"""


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


class Study:
    """The trials of a problem on a device class, on disk.

    ``name`` is what ``tunegen study show`` takes. Several processes may add to one study at once.
    """

    def __init__(
        self,
        connection: Connection,
        key: StudyKey,
        usable: Callable[[Trial, Mapping[str, str]], bool],
        fresh: bool,
    ) -> None:
        self._connection = connection
        self._usable = usable
        self._family = key.family
        known = [row.facts for row in _studies(connection) if row.facts["family"] == key.family]
        generations = [facts["generation"] for facts in known]
        self._generation = max(generations, default=1) + (fresh and bool(generations))
        self.name = key.name(self._generation)
        with connection.failures(), _quiet():
            self._study = optuna.create_study(
                storage=connection.storage, study_name=self.name, load_if_exists=True
            )
            if FACTS_KEY not in self._study.user_attrs:
                facts = {
                    **key.facts,
                    "family": key.family,
                    "space": key.space,
                    "generation": self._generation,
                    "created": _now(),
                }
                self._study.set_user_attr(FACTS_KEY, facts)
        self._spaces = dict(sorted(key.spaces.items()))
        self._distributions = {spec: self._choices(spec) for spec in self._spaces}

    @classmethod
    def open(
        cls,
        url: str | None,
        key: StudyKey,
        *,
        usable: Callable[[Trial, Mapping[str, str]], bool] = lambda trial, digests: True,
        fresh: bool = False,
    ) -> Study:
        """Open the study of ``key``, and create it where there is none.

        ``url`` is an SQLAlchemy URL, None the file in the user's data directory. ``usable`` is
        given a stored trial with the digests of its sources, and says whether they are those of
        today and the configuration is valid. ``fresh`` begins a new generation: earlier trials
        stay where they are, but neither this run nor a later one uses them.

        Raises :class:`UsageError` for a malformed URL, :class:`DatabaseError` where the storage
        cannot be reached.
        """
        # SQLAlchemy takes longer to load than all the rest, and most commands store nothing.
        from tunegen.store.connection import connect

        connection = connect(url, create=True)
        assert connection is not None  # it is created
        try:
            return cls(connection, key, usable, fresh)
        except BaseException:
            connection.close()
            raise

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the storage and what became of it, one line each."""
        unreadable = self._stored().count(None)
        if not unreadable:
            return self._connection.warnings
        lost = f"{unreadable} trials of {self.name} cannot be read and are left out"
        return (*self._connection.warnings, lost)

    def trials(self) -> tuple[Trial, ...]:
        """The usable trials of the study and its family, those of other processes included, in
        the order in which they were added and numbered in it from 0."""
        usable = (
            stored.trial
            for stored in self._stored()
            if stored is not None and self._usable(stored.trial, stored.digests)
        )
        return tuple(replace(trial, number=number) for number, trial in enumerate(usable))

    def _stored(self) -> list[StoredTrial | None]:
        """What the studies of the family hold, in the order in which it was added."""
        studies = [
            row.study_id
            for row in _studies(self._connection)
            if (row.facts["family"], row.facts["generation"]) == (self._family, self._generation)
        ]
        return [stored for _, stored in _read(self._connection, studies)]

    def add(
        self, trial: Trial, digests: Mapping[str, str], cubins: Mapping[str, str] | None = None
    ) -> None:
        """Store a finished trial; it is on disk when this returns.

        ``digests`` are those of its sources by kernel (:func:`tunegen.compiler.identity`),
        ``cubins`` the SHA-256 of what was compiled from them. Its number is not stored: it is the
        study's to give, since others may add to it too (see :meth:`trials`).

        Raises :class:`UsageError` for a configuration outside the study's space and
        :class:`DatabaseError` where it cannot be written.
        """
        space = self._spaces.get(trial.spec)
        if space is None:
            raise unknown("spec of the study", trial.spec, self._spaces)
        config = space.config(trial.config)
        values = {"spec": trial.spec, **{_key(trial.spec, name): config[name] for name in config}}
        distributions = self._distributions[trial.spec]
        ok = trial.outcome.ok
        stored = StoredTrial(trial, digests, cubins or {}, _now())
        with self._connection.failures():
            self._study.add_trial(
                create_trial(
                    # A failure is pruned, as in the search: it has no value and ranks last.
                    state=TrialState.COMPLETE if ok else TrialState.PRUNED,
                    value=trial.outcome.median_us if ok else None,
                    params={name: values[name] for name in distributions},
                    distributions=distributions,
                    user_attrs={TRIAL_KEY: encode(stored)},
                )
            )

    def others(self) -> dict[int, Mapping[str, Any]]:
        """The facts of the studies of other families that tunes use today, by their ids in the
        storage, in the order of creation."""
        rows = _studies(self._connection)
        newest = _newest(rows)
        return {
            row.study_id: row.facts
            for row in rows
            if row.facts["family"] != self._family
            and row.facts["generation"] == newest[row.facts["family"]]
        }

    def fastest_of(self, study_id: int, most: int) -> tuple[Trial, ...]:
        """The fastest successes of one of the :meth:`others`, at most so many, the fastest first.
        Whether their sources are still those of today is not looked at."""
        rows = self._connection.rows(_FASTEST, key=TRIAL_KEY, study=study_id, most=most)
        found = (decode(text) for (text,) in rows)
        return tuple(stored.trial for stored in found if stored is not None)

    def close(self) -> None:
        """Let go of the storage; nothing is left to be written."""
        self._connection.close()

    def __enter__(self) -> Study:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _choices(self, spec: str) -> dict[str, BaseDistribution]:
        """What there is to choose in a spec; a parameter with one value is no choice."""
        space: Space = self._spaces[spec]
        choices: dict[str, tuple[int, ...] | tuple[str, ...]] = {
            "spec": tuple(self._spaces),
            **{_key(spec, parameter.name): parameter.values for parameter in space.parameters},
        }
        return {name: CategoricalDistribution(c) for name, c in choices.items() if len(c) > 1}


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
    rows = _studies(connection)
    newest = _newest(rows)
    found: dict[int, list[StoredTrial | None]] = {row.study_id: [] for row in rows}
    for study_id, stored in _read(connection, list(found)):
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


@dataclass(frozen=True, slots=True)
class _Row:
    study_id: int
    name: str
    facts: Mapping[str, Any]


def _newest(rows: Iterable[_Row]) -> Mapping[str, int]:
    """The generation of each family that is used today."""
    newest = Counter[str]()
    for row in rows:
        family = row.facts["family"]
        newest[family] = max(newest[family], row.facts["generation"])
    return newest


def _studies(connection: Connection) -> list[_Row]:
    """The studies that are ours, in the order of creation."""
    rows = connection.rows(_STUDIES, key=FACTS_KEY)
    return [_Row(study_id, name, json.loads(facts)) for study_id, name, facts in rows]


def _read(
    connection: Connection, studies: Iterable[int]
) -> Iterator[tuple[int, StoredTrial | None]]:
    """Every trial of some studies with the study's id; None for one that is damaged."""
    rows = connection.rows(_TRIALS, key=TRIAL_KEY, studies=list(studies))
    for study_id, text in rows:
        yield study_id, decode(text)


def _key(spec: str, parameter: str) -> str:
    return f"{spec}.{parameter}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna announces each study on stderr."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)

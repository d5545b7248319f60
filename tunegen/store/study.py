# SPDX-License-Identifier: Apache-2.0
"""Studies and their trials."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from tunegen.errors import unknown
from tunegen.model import Space, Trial
from tunegen.store.form import StoredTrial, decode, encode
from tunegen.store.key import StudyKey
from tunegen.store.reading import Text, newest_of, studies_of, texts
from tunegen.store.salvage import FACTS_KEY, TRIAL_KEY

if TYPE_CHECKING:
    from tunegen.store.connection import Connection
    from tunegen.store.hosts import Hosts

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
        known = [row.facts for row in studies_of(connection) if row.facts["family"] == key.family]
        generations = [facts["generation"] for facts in known]
        self._generation = max(generations, default=1) + (fresh and bool(generations))
        self.name = key.name(self._generation)
        facts = {
            **key.facts,
            "family": key.family,
            "space": key.space,
            "generation": self._generation,
            "created": _now(),
        }
        self._study_id = begin(connection, self.name, facts)
        self._hosts: Hosts | None = None
        # The last trial that was read, and how many usable ones there are up to it.
        self.last_id, self._known = -1, 0
        self._spaces = dict(sorted(key.spaces.items()))
        self._choices = _choices_of(self._spaces)

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
        unreadable = sum(decode(each.text) is None for each in self._texts())
        if not unreadable:
            return self._connection.warnings
        lost = f"{unreadable} trials of {self.name} cannot be read and are left out"
        return (*self._connection.warnings, lost)

    def trials(self) -> tuple[Trial, ...]:
        """The usable trials of the study and its family, those of other processes included, in
        the order in which they were added and numbered in it from 0."""
        found = self._texts()
        mine = (each.trial_id for each in found if each.study_id == self._study_id)
        self.last_id, self._known = max(mine, default=-1), 0
        return self._numbered(found)

    def news(self) -> tuple[Trial, ...]:
        """The usable trials that were added since this or :meth:`trials` was called last, by
        whomever; numbered on. Those of other studies of the family are left to the next run."""
        found = texts(self._connection, [self._study_id], self.last_id)
        if found:
            self.last_id = found[-1].trial_id
        return self._numbered(found)

    def _numbered(self, found: Iterable[Text]) -> tuple[Trial, ...]:
        trials = []
        for each in found:
            stored = decode(each.text)
            if stored is not None and self._usable(stored.trial, stored.digests):
                trials.append(replace(stored.trial, number=self._known))
                self._known += 1
        return tuple(trials)

    def _texts(self) -> list[Text]:
        """What the studies of the family hold, in the order in which it was added."""
        studies = [
            row.study_id
            for row in studies_of(self._connection)
            if (row.facts["family"], row.facts["generation"]) == (self._family, self._generation)
        ]
        return texts(self._connection, studies)

    def join(self) -> Hosts:
        """Work on the study together with all others that do. What this host claims is settled by
        :meth:`add`."""
        from tunegen.store.hosts import Hosts

        self._hosts = Hosts(self._connection, self._study_id)
        return self._hosts

    def add(
        self, trial: Trial, digests: Mapping[str, str], cubins: Mapping[str, str] | None = None
    ) -> bool:
        """Store a finished trial; it is on disk when this returns. False where it was claimed, and
        another host has taken the claim over: then it is not stored, but that host's will be.

        ``digests`` are those of its sources by kernel (:func:`tunegen.compiler.identity`),
        ``cubins`` the SHA-256 of what was compiled from them. Its number is not stored: it is the
        study's to give, since others may add to it too (see :meth:`trials`).

        Raises :class:`UsageError` for a configuration outside the study's space and
        :class:`DatabaseError` where it cannot be written.
        """
        space = self._spaces.get(trial.spec)
        if space is None:
            raise unknown("spec of the study", trial.spec, self._spaces)
        trial = replace(trial, config=space.config(trial.config))
        stored = StoredTrial(trial, digests, cubins or {}, _now())
        hosts = self._hosts
        if hosts is None or not hosts.holds(trial.spec, trial.config):
            add_trial(self._connection, self._study_id, stored, self._choices)
            return True
        from tunegen.store.hosts import ClaimLost

        try:
            with hosts.settling(trial.spec, trial.config):
                add_trial(self._connection, self._study_id, stored, self._choices)
        except ClaimLost:
            return False
        return True

    def others(self) -> dict[int, Mapping[str, Any]]:
        """The facts of the studies of other families that tunes use today, by their ids in the
        storage, in the order of creation."""
        rows = studies_of(self._connection)
        newest = newest_of(rows)
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


# Every parameter that is one to choose with its values: "spec" where there are several, and those
# of each spec. A parameter with one value is no choice.
Choices = Mapping[str, tuple[int | str, ...]]


def _choices_of(spaces: Mapping[str, Space]) -> Choices:
    choices: dict[str, tuple[int | str, ...]] = {_SPEC: tuple(spaces)}
    for spec, space in spaces.items():
        choices.update({_key(spec, p.name): p.values for p in space.parameters})
    return {name: values for name, values in choices.items() if len(values) > 1}


def check_choices(trial: Trial, choices: Choices, which: str) -> None:
    """Raise ``ValueError`` where the configuration of a trial, called ``which``, is not one that
    its study offers."""
    for name, value in _chosen(trial, choices).items():
        if value not in choices[name]:
            raise ValueError(f"{which} has {name}={value!r}, which is no choice")


def _chosen(trial: Trial, choices: Choices) -> dict[str, int | str]:
    """What was chosen where there was a choice."""
    values: dict[str, int | str] = {_SPEC: trial.spec}
    values.update({_key(trial.spec, name): value for name, value in trial.config.items()})
    return {name: value for name, value in values.items() if name in choices}


def begin(connection: Connection, name: str, facts: Mapping[str, Any]) -> int:
    """The storage's id of the study of that name, which is created with these facts where there is
    none."""
    with connection.failures(), _quiet():
        study = optuna.create_study(
            storage=connection.storage, study_name=name, load_if_exists=True
        )
        if FACTS_KEY not in study.user_attrs:
            study.set_user_attr(FACTS_KEY, dict(facts))
        return connection.storage.get_study_id_from_name(name)


def add_trial(
    connection: Connection, study_id: int, stored: StoredTrial, choices: Choices
) -> None:
    """Store a trial in one transaction."""
    outcome = stored.trial.outcome
    params = _chosen(stored.trial, choices)
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(choices[name]) for name in params
    }
    content = encode(stored)
    with connection.failures():
        connection.storage.create_new_trial(
            study_id,
            create_trial(
                # A failure is pruned, as in the search: it has no value and ranks last.
                state=TrialState.COMPLETE if outcome.ok else TrialState.PRUNED,
                value=outcome.median_us if outcome.ok else None,
                params=params,
                distributions=distributions,
                user_attrs={TRIAL_KEY: content},
            ),
        )


_SPEC = "spec"


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

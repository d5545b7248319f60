# SPDX-License-Identifier: Apache-2.0
"""Studies in a file, to be carried from one storage to another.

``{"tunegen": "studies", "form": 1, "studies": [{"name", "facts", "choices", "trials"}]}``, as JSON
or gzipped. ``facts`` are those that :class:`tunegen.store.StudyInfo` lists; ``choices`` the values
of every parameter that was one to choose; ``trials`` are kept as :mod:`tunegen.store.form` stores
them, each with its checksum, in the order in which they finished.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegen.errors import DatabaseError, UsageError
from tunegen.store import sqlite
from tunegen.store.form import FORM, StoredTrial, decode, parse
from tunegen.store.key import family_of, study_name
from tunegen.store.reading import Row, newest_of, studies_of, texts
from tunegen.store.study import Choices, add_trial, begin, check_choices

if TYPE_CHECKING:
    from tunegen.store.connection import Connection

KIND = "studies"
FILE_FORM = 1

# What a study has besides the facts of its key.
_OWN_FACTS = ("family", "space", "generation", "created")

_PARAMETERS = """
SELECT DISTINCT trial_params.param_name, trial_params.distribution_json
FROM trials JOIN trial_params ON trial_params.trial_id = trials.trial_id
WHERE trials.study_id = :study
ORDER BY trial_params.param_name
"""


@dataclass(frozen=True, slots=True)
class Carried:
    """A study on its way, with the text of its trials. ``unreadable`` trials stay behind."""

    name: str
    facts: Mapping[str, Any]
    choices: Choices
    trials: tuple[str, ...]
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """What an import did to a study: so many trials ``added``, so many there already, and whether
    a tune uses it today."""

    name: str
    added: int
    known: int
    current: bool


# --- out of a storage ----------------------------------------------------------------------------


def collect(
    url: str | None, choose: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[tuple[Carried, ...], tuple[str, ...]]:
    """Of the studies of a storage those whose names ``choose`` returns, in the order of creation,
    and what was wrong with the storage. Raises as :func:`tunegen.store.list_studies` does."""
    from tunegen.store.connection import connect

    connection = connect(url, create=False)
    if connection is None:
        choose(())
        return (), ()
    try:
        rows = studies_of(connection)
        chosen = set(choose([row.name for row in rows]))
        found = tuple(_collect(connection, row) for row in rows if row.name in chosen)
        return found, connection.warnings
    finally:
        connection.close()


def _collect(connection: Connection, row: Row) -> Carried:
    stored = [found.text for found in texts(connection, [row.study_id])]
    sound = tuple(text for text in stored if decode(text) is not None)
    found = connection.rows(_PARAMETERS, study=row.study_id)
    choices = {name: tuple(json.loads(text)["attributes"]["choices"]) for name, text in found}
    return Carried(row.name, row.facts, choices, sound, len(stored) - len(sound))


def write(studies: Sequence[Carried], path: Path) -> None:
    """Write ``studies`` to a file, gzipped where its name ends in ".gz"; a file that is there is
    replaced all at once. Raises :class:`DatabaseError` where it cannot be written, and
    :class:`UsageError` where a database is there: it may be the very one that these are from."""
    _check_target(path)
    document = {
        "tunegen": KIND,
        "form": FILE_FORM,
        "studies": [
            {
                "name": study.name,
                "facts": study.facts,
                "choices": study.choices,
                "trials": [json.loads(text) for text in study.trials],
            }
            for study in studies
        ],
    }
    content = json.dumps(document, indent=1).encode() + b"\n"
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # the same studies, the same bytes
    try:
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(handle)
            os.chmod(new, 0o666 & ~_umask())
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise DatabaseError(f"{path} cannot be written: {error.strerror}") from error


def _check_target(path: Path) -> None:
    try:
        in_the_way = sqlite.is_database(path)
    except OSError:
        return  # nobody may read it: whether it can be replaced shows when that is tried
    if in_the_way:
        raise UsageError(f"{path} is a database, and stays as it is", hint="name another file")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- out of a file -------------------------------------------------------------------------------


def read_file(path: Path) -> tuple[Carried, ...]:
    """The studies of a file, every word of it checked.

    Raises :class:`UsageError` for a file that is none, that is damaged, or that a later release
    wrote.
    """
    document = _json(path)
    if not isinstance(document, dict) or document.get("tunegen") != KIND:
        raise UsageError(f"{path} holds no studies", hint="tunegen study export writes such files")
    if document.get("form") != FILE_FORM:
        raise UsageError(f"{path} is of form {document.get('form')!r}, this release reads "
                         f"form {FILE_FORM}")  # fmt: skip
    try:
        studies = tuple(_study(content) for content in document["studies"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is damaged: {reason}") from error
    names = Counter(study.name for study in studies)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"{path} is damaged: it has {twice[0]} twice")
    return studies


def _json(path: Path) -> Any:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return json.loads(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, zlib.error, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error


def _study(content: Mapping[str, Any]) -> Carried:
    name, facts = str(content["name"]), content["facts"]
    generation, space = facts["generation"], facts["space"]
    if type(generation) is not int or generation < 1:
        raise ValueError(f"{name} is of generation {generation!r}")
    if not isinstance(facts["created"], str):
        raise ValueError(f"{name} was created {facts['created']!r}")
    keyed = {key: value for key, value in facts.items() if key not in _OWN_FACTS}
    if facts["family"] != family_of(keyed) or name != study_name(keyed, space, generation):
        raise ValueError(f"the facts of {name} are those of another study")
    choices = {str(key): _values(values) for key, values in content["choices"].items()}
    trials = tuple(json.dumps(trial) for trial in content["trials"])
    for number, text in enumerate(trials):
        _check_trial(text, choices, f"trial {number} of {name}")
    return Carried(name, facts, choices, trials)


def _values(values: Any) -> tuple[int | str, ...]:
    if not isinstance(values, list) or not all(type(v) in (int, str) for v in values):
        raise ValueError(f"{values!r} are no choices")
    return tuple(values)


def _check_trial(text: str, choices: Choices, which: str) -> None:
    content = parse(text)
    if content is None:
        raise ValueError(f"{which} is not what its checksum says")
    if content["form"] != FORM:
        raise ValueError(f"{which} is of form {content['form']!r}, this release reads form {FORM}")
    stored = decode(text)
    assert stored is not None  # it has been parsed, and is of this form
    check_choices(stored.trial, choices, which)


# --- into a storage ------------------------------------------------------------------------------


def receive(url: str | None, studies: Sequence[Carried]) -> tuple[Received, ...]:
    """Add the trials of ``studies`` to those of the same names in a storage, which are created
    where there are none.

    A trial is known by all that is stored of it, so the same file again adds nothing, and what
    finished at another moment or took another time is another trial. One that is in the file more
    often than in the storage is added as often as it lacks. What is there stays as it is. A kill
    on the way leaves whole trials, and the same again adds the rest.

    Raises as :meth:`tunegen.store.Study.open` does, and :class:`DatabaseError` where a study of
    the storage has other choices; then nothing is written.
    """
    from tunegen.store.connection import connect

    connection = connect(url, create=True)
    assert connection is not None  # it is created
    try:
        there = {row.name: row for row in studies_of(connection)}
        for study in studies:
            _check_fit(connection, study, there.get(study.name))
        added = {study.name: _receive(connection, study) for study in studies}
        rows = studies_of(connection)
        newest = newest_of(rows)
        current = {row.name for row in rows
                   if row.facts["generation"] == newest[row.facts["family"]]}  # fmt: skip
    finally:
        connection.close()
    return tuple(
        Received(s.name, added[s.name], len(s.trials) - added[s.name], s.name in current)
        for s in studies
    )


def _check_fit(connection: Connection, study: Carried, there: Row | None) -> None:
    if there is None:
        return
    here = _collect(connection, there).choices
    for name in here.keys() & study.choices.keys():
        if here[name] != study.choices[name]:
            raise DatabaseError(
                f"{study.name} has other values of {name} in the storage than in the file"
            )


def _receive(connection: Connection, study: Carried) -> int:
    study_id = begin(connection, study.name, study.facts)
    known = Counter(_identity(found.text) for found in texts(connection, [study_id]))
    missing = list(_missing(study.trials, known))
    for stored in missing:
        add_trial(connection, study_id, stored, study.choices)
    return len(missing)


def _missing(trials: Sequence[str], known: Counter[str]) -> Iterator[StoredTrial]:
    for text in trials:
        identity = _identity(text)
        if known[identity]:
            known[identity] -= 1
            continue
        stored = decode(text)
        assert stored is not None  # it was checked when the file was read
        yield stored


def _identity(text: str) -> str:
    """Equal for the same trial, however its JSON was laid out; that of a damaged one is none."""
    content = parse(text)
    return "" if content is None else json.dumps(content, sort_keys=True)

# SPDX-License-Identifier: Apache-2.0
"""From a URL to Optuna's storage: what may be wrong on the way is one line each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage

from tunegen.errors import DatabaseError, ToolkitError, UsageError, unknown
from tunegen.store import sqlite

# A server that is not there is given up after this long.
_CONNECT_SECONDS = 10

# Any number that no other program is likely to lock: "tunegen" in ASCII.
_LOCK_KEY = int.from_bytes(b"tunegen")

_FORMS = "write sqlite:///path/to/studies.db or postgresql+psycopg://user@host/database"


@dataclass(frozen=True, slots=True)
class Connection:
    """An open storage. ``place`` is its path or URL, without a password; ``warnings`` says what
    had to be mended in it."""

    storage: RDBStorage
    place: str
    warnings: tuple[str, ...] = ()

    def rows(self, statement: str, **values: str | int | list[int]) -> list[tuple[Any, ...]]:
        """What a statement selects with ``values`` for its ``:names``; lists are for ``IN``."""
        lists: list[sqlalchemy.BindParameter[Any]] = [
            sqlalchemy.bindparam(name, expanding=True)
            for name, value in values.items()
            if isinstance(value, list)
        ]
        with self.failures(), self.storage.engine.connect() as connection:
            found = connection.execute(sqlalchemy.text(statement).bindparams(*lists), values)
            return [tuple(row) for row in found]

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise what fails inside as a :class:`DatabaseError` that names the place."""
        with _failures(self.place):
            yield

    def close(self) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()


def connect(url: str | None, *, create: bool) -> Connection | None:
    """Open the storage at ``url``; None stands for :func:`tunegen.store.sqlite.default_path`.

    Without ``create`` nothing is written, and None is returned where nothing is stored yet.

    Raises :class:`UsageError` for a URL that cannot mean a storage and a file that is none,
    :class:`ToolkitError` where its driver is not installed, :class:`DatabaseError` where it
    cannot be reached.
    """
    if url is None:
        return _connect_file(sqlite.default_path(), create=create, is_default=True)
    place = parse(url)
    if place.get_backend_name() == "sqlite":
        path = Path(str(place.database)).expanduser().resolve()
        return _connect_file(path, create=create, is_default=False)
    name = place.render_as_string()
    with _failures(name):
        storage = _connect_server(place, create)
        return Connection(storage, name) if storage is not None else None


def _connect_file(path: Path, *, create: bool, is_default: bool) -> Connection | None:
    with _failures(str(path)):
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a study file")
        return _write_file(path, is_default) if create else _read_file(path, is_default)


def _connect_server(place: sqlalchemy.URL, create: bool) -> RDBStorage | None:
    options = {"connect_args": {"connect_timeout": _CONNECT_SECONDS}, "pool_pre_ping": True}
    with _driver_of(place):
        engine = sqlalchemy.create_engine(place, poolclass=sqlalchemy.NullPool, **options)
    # One process at a time makes the tables; the lock ends with its connection.
    with engine.connect() as connection:
        if not create and not sqlalchemy.inspect(connection).has_table("studies"):
            return None
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        return _storage(place, options)


def _write_file(path: Path, is_default: bool) -> Connection:
    if is_default:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif sqlite.examine(path) == "other":  # before so much as a lock file is made beside it
        raise sqlite.not_a_study_file(path)
    with sqlite.opening(path):
        warnings = sqlite.mend(path, ours=is_default)
        if not path.exists():
            sqlite.create(path, lambda new: _file_storage(new).close())
        return _file_storage(path, warnings)


def _read_file(path: Path, is_default: bool) -> Connection | None:
    state = sqlite.examine(path)
    if state == "absent" and not is_default:
        raise DatabaseError(f"there is no study file {path}")
    if state == "other":
        raise sqlite.not_a_study_file(path)
    if state == "damaged":
        raise DatabaseError(
            f"{path} is damaged", hint="the next tune that uses it saves what can be read"
        )
    return _file_storage(path) if state == "sound" else None


def _file_storage(path: Path, warnings: tuple[str, ...] = ()) -> Connection:
    options = {"creator": functools.partial(sqlite.connect, path)}
    place = sqlalchemy.URL.create("sqlite", database=str(path))
    return Connection(_storage(place, options), str(path), warnings)


def parse(url: str) -> sqlalchemy.URL:
    """What a URL names. Raises :class:`UsageError` where it cannot mean a storage; whether that is
    there is not looked at."""
    try:
        place = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise UsageError(f"malformed storage {url!r}", hint=_FORMS) from error
    backend = place.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise unknown("storage", backend, ("sqlite", "postgresql"), hint=_FORMS)
    if backend == "sqlite":
        if place.host or place.query or place.database in (None, "", ":memory:"):
            raise UsageError(f"storage {url!r} names no file", hint=_FORMS)
    elif not place.database:
        raise UsageError(f"storage {url!r} names no database", hint=_FORMS)
    return place


def _storage(place: sqlalchemy.URL, options: dict[str, Any]) -> RDBStorage:
    # Optuna fills a template into the URL: braces of its own are doubled.
    text = place.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    try:
        return RDBStorage(text, engine_kwargs=options)
    except RuntimeError as error:  # its tables are those of another Optuna
        raise DatabaseError(f"{place.render_as_string()} cannot be used: {error}") from error


@contextmanager
def _driver_of(place: sqlalchemy.URL) -> Iterator[None]:
    try:
        yield
    except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
        raise ToolkitError(
            f"no driver for {place.drivername} is installed", hint="pip install 'tunegen[pg]'"
        ) from error


@contextmanager
def _failures(place: str) -> Iterator[None]:
    try:
        yield
    except (
        optuna.exceptions.StorageInternalError,
        sqlalchemy.exc.SQLAlchemyError,
        OSError,
    ) as error:
        raise DatabaseError(f"study storage {place} cannot be used: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The database's own words; what SQLAlchemy and Optuna say around them names no cause."""
    if isinstance(error, optuna.exceptions.StorageInternalError) and error.__cause__:
        error = error.__cause__
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None:
        error = error.orig
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())

# SPDX-License-Identifier: Apache-2.0
"""The SQLite file: connected to so that nothing reported is lost, and mended where it is damaged.

A write-ahead log with a synchronous commit: a process killed at any moment leaves whole
transactions, and those that were committed survive a crash of the machine too, which a faulting
driver can cause. That costs one fsync a trial, about a millisecond on a local disk.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import platformdirs

from tunegen.errors import DatabaseError, UsageError
from tunegen.store.salvage import STUDY_TABLES, beside, lossy, salvage, set_aside

# How long a writer waits for the others; each of them holds the lock for milliseconds.
_BUSY_SECONDS = 60.0

_MAGIC = b"SQLite format 3\0"

State = Literal["absent", "empty", "sound", "damaged", "other"]


def default_path() -> Path:
    """``~/.local/share/tunegen/studies.db``, or as ``XDG_DATA_HOME`` says."""
    return Path(platformdirs.user_data_dir("tunegen")) / "studies.db"


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the file, which is made where there is none."""
    # SQLAlchemy's pool hands connections from thread to thread, one at a time.
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
    connection.text_factory = lossy
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """The only process that opens the file inside: tables are made once, damage is mended once.

    The lock is the kernel's: a killed process holds none.
    """
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_database(path: Path) -> bool:
    """Whether there is a file that SQLite wrote, sound or not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def examine(path: Path) -> State:
    """What is at ``path``. Nothing is changed, whatever it is."""
    if not path.exists():
        return "absent"
    if not path.stat().st_size:
        return "empty"
    if not is_database(path):
        return "other"
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
            connection.text_factory = lossy
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in names}
    except UnicodeDecodeError:  # Python's, for what SQLite quotes of a damaged page
        return "damaged"
    except sqlite3.DatabaseError as error:
        kind = error.sqlite_errorcode & 0xFF  # the rest of the code is details
        if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return "damaged"
        raise OSError(str(error)) from error
    # Pages are written whole, so that a part of one at the end means that the rest is gone.
    if result != "ok" or path.stat().st_size % page_bytes:
        return "damaged"
    if not tables:
        return "empty"
    return "sound" if tables >= STUDY_TABLES else "other"


def mend(path: Path, *, ours: bool) -> tuple[str, ...]:
    """Leave a sound study file at ``path`` or none, and say what was done, one line each.

    What can be read of a damaged study file is copied, the file itself is kept under another name.
    Where that is nothing, it is set aside all the same if the place is ``ours``. Anywhere else it
    may be somebody's, and is not touched: :class:`UsageError`, or :class:`DatabaseError` where it
    is an SQLite file.
    """
    state = examine(path)
    if state in ("absent", "sound"):
        return ()
    if state == "empty":
        path.unlink()
        return (f"{path} was empty: studies start anew",)
    aside = _free_name(path)
    saved = salvage(path, aside) if state == "damaged" else None
    if saved is not None:
        lost = f", {saved.lost} lost" if saved.lost else ""
        return (f"{path} was damaged and is now {aside}: {saved.kept} trials kept{lost}",)
    if not ours and state == "damaged":
        raise DatabaseError(f"{path} is damaged beyond reading", hint="move it away")
    if not ours:
        raise not_a_study_file(path)
    set_aside(path, aside)
    return (f"nothing can be read of {path}, now {aside}: studies start anew",)


def create(path: Path, fill: Callable[[Path], None]) -> None:
    """A file that ``fill`` makes, at ``path`` all at once: a kill leaves no half of its tables."""
    new = beside(path, ".new")
    for leftover in (new, beside(new, "-wal"), beside(new, "-shm"), beside(path, "-wal")):
        leftover.unlink(missing_ok=True)
    fill(new)
    os.replace(new, path)


def not_a_study_file(path: Path) -> UsageError:
    return UsageError(f"{path} is no study file, and stays as it is", hint="name another file")


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside

# SPDX-License-Identifier: Apache-2.0
"""Changing one file so that neither other writers nor a kill at any moment loses a record.

Lock, re-read, change, temporary file, fsync, rename, fsync of the folder. The lock is the
kernel's (``flock``): a killed process holds none. Readers take no lock, since a rename is atomic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from tunegen.errors import DatabaseError

# A writer holds the lock for milliseconds; a minute means that something else is wrong.
LOCK_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.005


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """The only writer of ``path`` inside; its folder is made where it is missing.

    Raises :class:`DatabaseError` where the file cannot be locked, or not be written inside.
    """
    try:
        _make_folder(path.parent)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire(timeout=LOCK_TIMEOUT_SECONDS, poll_interval=_POLL_SECONDS)
        try:
            _remove_leftovers(path)
            yield
        finally:
            lock.release()
    except filelock.Timeout as error:
        raise DatabaseError(
            f"{path} has been locked by another process for {LOCK_TIMEOUT_SECONDS:.0f} s",
            hint=f"fuser {error.lock_file} names it",
        ) from error
    except OSError as error:
        raise DatabaseError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="--db DIR names another folder",
        ) from error


def replace(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of what ``path`` holds; to be called inside ``exclusive``.

    It is on disk when this returns; a kill before that leaves the old content or the new. A file
    that holds it already is left alone.
    """
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    # Temporary files are made under the lock only, so what is found now is of a killed writer.
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

# SPDX-License-Identifier: Apache-2.0
"""What can still be read of a damaged SQLite file, copied into a sound one.

SQLite keeps no checksums of its pages. A page that is not what it should be stops a scan of its
table, so each table is read from both ends; a page that was cut off reads as zeros, which leaves
rows whose JSON has no end. Both kinds of row are dropped, and a trial that lost its outcome with
them. Indices are made anew.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegen.store.form import parse

# What tells a study file from other databases.
STUDY_TABLES = frozenset({"studies", "trials", "trial_user_attributes"})

# The user attributes that say what a study is a study of, and hold the whole of a trial.
FACTS_KEY = "tunegen"
TRIAL_KEY = "trial"


@dataclass(frozen=True, slots=True)
class Salvaged:
    """How many trials of a damaged file were kept and how many are known to be lost."""

    kept: int
    lost: int


def salvage(path: Path, aside: Path) -> Salvaged | None:
    """Put what can be read of the study file ``path`` in its place, and itself at ``aside``.

    None where nothing of a study file can be read; then everything stays as it is.
    """
    copy = beside(path, ".salvage")
    copy.unlink(missing_ok=True)
    saved = _copy(path, copy)
    if saved is None:
        copy.unlink(missing_ok=True)
        return None
    os.link(path, aside)  # so that at every moment there is a file at the path
    _move_log(path, aside)
    os.replace(copy, path)
    return saved


def set_aside(path: Path, aside: Path) -> None:
    """Move a file that is in the way, whatever it is."""
    _move_log(path, aside)
    os.replace(path, aside)


def _move_log(path: Path, aside: Path) -> None:
    """Beside a new database, an old log would be taken for its own."""
    beside(path, "-shm").unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        os.replace(beside(path, "-wal"), beside(aside, "-wal"))


def beside(path: Path, suffix: str) -> Path:
    """The file that SQLite or we keep next to another: ``studies.db-wal``."""
    return path.with_name(path.name + suffix)


def _copy(damaged: Path, target: Path) -> Salvaged | None:
    """None where not even the list of the tables can be read, or they are not those of studies."""
    with closing(sqlite3.connect(damaged)) as old, closing(sqlite3.connect(target)) as new:
        old.text_factory = lossy
        try:
            # Without this, a file that is shorter than it says is refused as a whole.
            old.execute("PRAGMA writable_schema=ON")
            schema = old.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
                " ORDER BY type DESC"  # tables, then indices
            ).fetchall()
            if not {name for _, name, _ in schema} >= STUDY_TABLES:
                return None
            for kind, name, statement in schema:
                new.execute(statement)
                if kind == "table":
                    _copy_table(old, new, name)
            saved = _drop_torn(new)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return None
        new.commit()
    return saved


def lossy(text: bytes) -> str:
    """Text that may be damaged: the checksum of a trial finds that out, not the decoder."""
    return text.decode(errors="replace")


def _copy_table(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    rows = dict(_readable(old, table, "ASC"))
    rows.update(_readable(old, table, "DESC"))
    for row in rows.values():
        places = ", ".join("?" for _ in row)
        new.execute(f'INSERT OR IGNORE INTO "{table}" VALUES ({places})', row)


def _readable(
    old: sqlite3.Connection, table: str, order: str
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Rows by their row ids, up to the first page that cannot be read."""
    with suppress(sqlite3.DatabaseError, UnicodeDecodeError):
        for row_id, *row in old.execute(
            f'SELECT rowid, * FROM "{table}" NOT INDEXED ORDER BY rowid {order}'
        ):
            yield row_id, tuple(row)


def _drop_torn(new: sqlite3.Connection) -> Salvaged:
    """Drop rows of which a part is missing, and trials of ours without an outcome."""
    (before,) = new.execute("SELECT count(*) FROM trials").fetchone()
    new.create_function("whole", 2, _is_whole, deterministic=True)
    for table, key, column in (
        ("study_user_attributes", "key", "value_json"),
        ("trial_user_attributes", "key", "value_json"),
        ("trial_system_attributes", "key", "value_json"),
        ("trial_params", "param_name", "distribution_json"),
    ):
        new.execute(f"DELETE FROM {table} WHERE NOT whole({key}, {column})")
    new.execute(
        """
        DELETE FROM trials WHERE
            study_id NOT IN (SELECT study_id FROM studies)
            OR study_id IN (SELECT study_id FROM study_user_attributes WHERE key = ?)
            AND trial_id NOT IN (SELECT trial_id FROM trial_user_attributes WHERE key = ?)
        """,
        (FACTS_KEY, TRIAL_KEY),
    )
    for table in ("params", "values", "user_attributes", "system_attributes"):
        orphan = "trial_id NOT IN (SELECT trial_id FROM trials)"
        new.execute(f"DELETE FROM trial_{table} WHERE {orphan}")
    for table in ("directions", "user_attributes", "system_attributes"):
        orphan = "study_id NOT IN (SELECT study_id FROM studies)"
        new.execute(f"DELETE FROM study_{table} WHERE {orphan}")
    new.execute(
        """
        INSERT INTO study_directions (study_id, objective, direction)
        SELECT study_id, 0, 'MINIMIZE' FROM studies
        WHERE study_id NOT IN (SELECT study_id FROM study_directions)
        """
    )
    # Optuna numbers a new trial by how many there are before it.
    new.execute(
        """
        UPDATE trials SET number = place FROM (
            SELECT trial_id AS id,
                row_number() OVER (PARTITION BY study_id ORDER BY trial_id) - 1 AS place
            FROM trials
        ) WHERE trial_id = id
        """
    )
    (kept,) = new.execute("SELECT count(*) FROM trials").fetchone()
    return Salvaged(kept, before - kept)


def _is_whole(key: Any, text: Any) -> bool:
    if key == TRIAL_KEY:
        return parse(str(text)) is not None
    try:
        json.loads(str(text))
    except ValueError:
        return False
    return True

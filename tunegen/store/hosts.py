# SPDX-License-Identifier: Apache-2.0
"""The hosts that work on one study at once: who is there, and who tries what.

A configuration is claimed before it is built, one row for each. The claim goes in the transaction
that stores the trial, so that what is reported is reported once, whatever is killed and whenever.
Each host writes every few seconds that it is alive; the claims of one that no longer does are
anybody's. Both tables stand beside Optuna's, which knows nothing of them.

Changes are made one host at a time, under a lock on the row of the study that Optuna takes too
when it numbers a trial. Clocks are compared with themselves only: all times are the storage's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import sqlalchemy
from sqlalchemy import event, text

from tunegen.errors import DatabaseError
from tunegen.model import Config
from tunegen.store.connection import Connection
from tunegen.store.salvage import TRIAL_KEY

# How often a host says that it is alive, and after which silence its claims are anybody's. A
# compiler that keeps every core busy, or a server that is restarted, takes less long than that.
BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0

# "mine" from now on; "taken" by another host that is alive; "late", since a trial was stored
# meanwhile that this host has not read; "full", since the whole budget is made or claimed.
Verdict = Literal["mine", "taken", "late", "full"]

# What is left to do for a host that has nothing more to try: the "finals"; to "wait" until it is
# known whether others are alive; nothing, where somebody "else" goes on and will play the finals.
Ending = Literal["finals", "wait", "else"]

_TABLES = (
    """
    CREATE TABLE IF NOT EXISTS tunegen_hosts (
        host VARCHAR(200) NOT NULL PRIMARY KEY,
        study_id INTEGER NOT NULL,
        name VARCHAR(300) NOT NULL,
        state VARCHAR(16) NOT NULL,
        beat DOUBLE PRECISION NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS tunegen_claims (
        study_id INTEGER NOT NULL,
        what TEXT NOT NULL,
        host VARCHAR(200) NOT NULL,
        PRIMARY KEY (study_id, what)
    )
    """,
)

# Seconds since 1970 by the storage's clock, while a transaction goes on too.
_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())",
}

# Any number but that which guards the making of Optuna's tables.
_TABLES_LOCK = int.from_bytes(b"tunegen2"[1:])

_LOCK = "UPDATE studies SET study_name = study_name WHERE study_id = :study"

_BEAT = """
INSERT INTO tunegen_hosts (host, study_id, name, state, beat)
VALUES (:host, :study, :name, :state, {clock})
ON CONFLICT (host) DO UPDATE SET beat = excluded.beat
"""

_HOSTS = """
SELECT host, name, state, beat, {clock} FROM tunegen_hosts
WHERE study_id = :study AND host <> :host ORDER BY host
"""

_NEW_TRIALS = """
SELECT count(*)
FROM trials JOIN trial_user_attributes ON trial_user_attributes.trial_id = trials.trial_id
WHERE study_id = :study AND trials.trial_id > :after AND key = :key
"""


@dataclass(frozen=True, slots=True)
class _Other:
    host: str
    name: str
    state: str
    beat: float
    alive: bool


class Hosts:
    """What one host, which is this object, and the others do for a study.

    Use it as a context: at the end its claims are free again. Two objects are two hosts, though
    of one process; each has a thread that says that it is alive.
    """

    def __init__(self, connection: Connection, study_id: int) -> None:
        self._connection = connection
        self._engine = connection.storage.engine
        clock = _CLOCKS[self._engine.dialect.name]
        self._beat_statement = text(_BEAT.format(clock=clock))
        self._hosts_statement = text(_HOSTS.format(clock=clock))
        self._clock_statement = text(f"SELECT {clock}")
        self.name = f"{socket.gethostname()} (process {os.getpid()})"
        self._me = {"study": study_id, "host": f"{_process(os.getpid())}:{uuid.uuid4().hex[:8]}"}
        self._state = "searching"
        self._ended: float | None = None
        self._held: set[str] = set()
        with connection.failures(), self._engine.begin() as transaction:
            if self._engine.dialect.name == "postgresql":
                lock = text("SELECT pg_advisory_xact_lock(:key)")
                transaction.execute(lock, {"key": _TABLES_LOCK})
            for statement in _TABLES:
                transaction.execute(text(statement))
        with self._turn() as transaction:
            self._forget_the_dead(transaction)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_beating, name="tunegen-beat", daemon=True
        )
        self._thread.start()

    # --- claims ----------------------------------------------------------------------------------

    def claims(self) -> Mapping[tuple[str, Config], bool]:
        """What the others have claimed, and whether the host that did is alive."""
        with self._connection.failures(), self._engine.connect() as connection:
            alive = {other.host: other.alive for other in self._others(connection)}
            rows = connection.execute(
                text("SELECT what, host FROM tunegen_claims WHERE study_id = :study"
                     " AND host <> :host ORDER BY what"), self._me
            )  # fmt: skip
            return {_config(what): alive.get(host, False) for what, host in rows}

    def claim(
        self, spec: str, config: Config, *, after: int, known: int, limit: int | None
    ) -> Verdict:
        """Claim a configuration, or take over the claim of a host that is dead.

        ``after`` is the storage's id of the last trial that this host has read, ``known`` how many
        trials it counts; with all claims they are at most ``limit``. Those of the dead do not
        count: they come to nothing, and there may be more of them than a small budget allows.
        """
        what = _what(spec, config)
        named = {**self._me, "what": what}
        with self._turn() as transaction:
            unread = {**self._me, "after": after, "key": TRIAL_KEY}
            if transaction.execute(text(_NEW_TRIALS), unread).scalar_one():
                return "late"
            rows = transaction.execute(
                text("SELECT what, host FROM tunegen_claims WHERE study_id = :study"), self._me
            )
            holders = {claimed: host for claimed, host in rows}
            holder = holders.pop(what, None)
            others = {other.host for other in self._others(transaction) if other.alive}
            alive = {*others, self._me["host"]}
            if limit is not None and known + sum(h in alive for h in holders.values()) >= limit:
                return "full"
            if holder is None:
                statement = "INSERT INTO tunegen_claims VALUES (:study, :what, :host)"
            elif holder in others:
                return "taken"
            else:
                statement = (
                    "UPDATE tunegen_claims SET host = :host"
                    " WHERE study_id = :study AND what = :what"
                )
            transaction.execute(text(statement), named)
        self._held.add(what)
        self._ended = None
        return "mine"

    def holds(self, spec: str, config: Config) -> bool:
        """Whether this host has claimed it, as far as it knows."""
        return _what(spec, config) in self._held

    @contextmanager
    def settling(self, spec: str, config: Config) -> Iterator[None]:
        """Let the claim go in the transaction that the storage makes inside.

        Raises :class:`ClaimLost`, and nothing is stored, where another host has taken it over.
        """
        what = _what(spec, config)
        session = self._connection.storage.scoped_session()

        def settle(session: sqlalchemy.orm.Session) -> None:
            gone = session.execute(
                text("DELETE FROM tunegen_claims"
                     " WHERE study_id = :study AND what = :what AND host = :host RETURNING what"),
                {**self._me, "what": what},
            ).all()  # fmt: skip
            if not gone:
                raise ClaimLost(what)

        event.listen(session, "before_commit", settle)
        try:
            yield
        finally:
            event.remove(session, "before_commit", settle)
            self._held.discard(what)

    def release(self) -> None:
        """Give all claims back."""
        with self._turn() as transaction:
            self._release(transaction)
        self._held.clear()

    # --- coming and going ------------------------------------------------------------------------

    def finish(self, *, contributed: bool) -> tuple[Ending, str]:
        """What is left to do for this host, which has nothing more to try; and who goes on, where
        that is another one. ``contributed`` says whether it has stored trials.

        A host leaves the finals to one that it has seen alive since it ended, so that the last one
        plays them. One that comes while they are played, and has added nothing, leaves as well.
        """
        with self._turn() as transaction:
            if self._ended is None:
                self._ended = float(transaction.execute(self._clock_statement).scalar_one())
            others = [other for other in self._others(transaction) if other.alive]
            searching = [other for other in others if other.state == "searching"]
            playing = [other for other in others if other.state == "finals"]
            going_on = [other for other in searching if other.beat > self._ended]
            if not searching and not contributed:
                going_on = playing
            if going_on:
                self._enter(transaction, "done")
                return "else", going_on[0].name
            if searching or playing:
                return "wait", ""
            # What the dead had begun, and no budget was left for, will not be made.
            transaction.execute(
                text("DELETE FROM tunegen_claims WHERE study_id = :study"), self._me
            )
            self._enter(transaction, "finals")
            return "finals", ""

    def close(self) -> None:
        """Leave; what was claimed is free."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(DatabaseError), self._turn() as transaction:
            # A storage that is gone finds out by itself that this host is silent.
            self._release(transaction)
            transaction.execute(text("DELETE FROM tunegen_hosts WHERE host = :host"), self._me)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- rows ------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction while no other host is in one of these, or stores a trial."""
        with self._connection.failures(), self._engine.begin() as transaction:
            # First of all a statement that writes: SQLite cannot turn a reader into a writer.
            transaction.execute(text(_LOCK), self._me)
            self._beat(transaction)
            yield transaction

    def _beat(self, transaction: sqlalchemy.Connection) -> None:
        values = {**self._me, "name": self.name, "state": self._state}
        transaction.execute(self._beat_statement, values)

    def _keep_beating(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            # If the storage cannot be reached, the next trial will say so.
            with (
                contextlib.suppress(DatabaseError),
                self._connection.failures(),
                self._engine.begin() as transaction,
            ):
                self._beat(transaction)

    def _enter(self, transaction: sqlalchemy.Connection, state: str) -> None:
        self._state = state
        statement = text("UPDATE tunegen_hosts SET state = :state WHERE host = :host")
        transaction.execute(statement, {**self._me, "state": state})

    def _others(self, connection: sqlalchemy.Connection) -> list[_Other]:
        rows = connection.execute(self._hosts_statement, self._me)
        return [
            _Other(host, name, state, beat, now - beat < SILENT_SECONDS and not _is_gone(host))
            for host, name, state, beat, now in ((*row[:3], float(row[3]), float(row[4]))
                                                 for row in rows)
        ]  # fmt: skip

    def _forget_the_dead(self, transaction: sqlalchemy.Connection) -> None:
        """Those of which no claim is left."""
        for other in self._others(transaction):
            if not other.alive:
                transaction.execute(
                    text("DELETE FROM tunegen_hosts WHERE host = :host AND NOT EXISTS"
                         " (SELECT 1 FROM tunegen_claims WHERE host = :host)"),
                    {"host": other.host},
                )  # fmt: skip

    def _release(self, transaction: sqlalchemy.Connection) -> None:
        transaction.execute(text("DELETE FROM tunegen_claims WHERE host = :host"), self._me)


class ClaimLost(Exception):
    """This host was silent for so long that another one has taken its claim over."""


def _what(spec: str, config: Config) -> str:
    return json.dumps([spec, dict(config)])


def _config(what: str) -> tuple[str, Config]:
    spec, values = json.loads(what)
    return spec, Config(values)


# --- processes of this machine -------------------------------------------------------------------


def _is_gone(host: str) -> bool:
    """Whether it is known to be dead, since it was a process of this machine."""
    machine, number, started, _ = host.split(":")
    return machine == _machine() and _started(int(number)) != started


def _process(number: int) -> str:
    return f"{_machine()}:{number}:{_started(number)}"


def _started(number: int) -> str:
    """When a process began, in ticks since the machine did; "" where there is none of it."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *fields = status.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]  # field 22 of all, which are counted from 1


@functools.cache
def _machine() -> str:
    """What no other machine has, nor another container of this one, whose processes have other
    numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    numbers = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {boot} {numbers}".encode()).hexdigest()[:16]

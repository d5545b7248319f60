# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server of the tests' own: in a temporary folder, on loopback, gone with them."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PASSWORD = "a:b/c@{d} e%"


def folder_of_programs() -> Path | None:
    """Where initdb is: on the path, or where Debian puts the newest."""
    found = shutil.which("initdb")
    debian = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: len(path))
    return Path(found or debian[-1]).parent if found or debian else None


def missing() -> str:
    """Why there can be no server here, or the empty string."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed (pip install '.[pg]')"
    if folder_of_programs() is None:
        return "PostgreSQL is not installed (apt-get install postgresql)"
    if os.getuid() == 0 and _user() is None:
        return "PostgreSQL refuses to run as root, and there is no user postgres or nobody"
    return ""


def _user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class Server:
    """A server on a port of its own. ``url`` of a database names user and password."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = folder_of_programs()
        self._user = _user() if os.getuid() == 0 else None
        self.port = _free_port()
        self._made = 0
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        if self._user is not None:
            os.chown(secret, self._user.pw_uid, self._user.pw_gid)
        self._run(
            "initdb", "-D", folder / "data", "-U", "tuner", "-A", "scram-sha-256",
            "--pwfile", secret, "-E", "UTF8", "--locale=C", "--no-sync",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self.port} -k {self._folder} -c fsync=off"
        self._run("pg_ctl", "-D", self._folder / "data", "-w", "-o", options,
                  "-l", self._folder / "log", "start")  # fmt: skip

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._folder / "data", "-w", "-m", "immediate", "stop")

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        self._made += 1
        name = f"studies{self._made}"
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="tuner", password=PASSWORD, dbname="postgres",
            autocommit=True,
        ) as connection:  # fmt: skip
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, database: str, password: str = PASSWORD) -> str:
        from urllib.parse import quote

        secret = quote(password, safe="")
        return f"postgresql+psycopg://tuner:{secret}@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *words: object) -> None:
        assert self._programs is not None
        options = {}
        if self._user is not None:
            options = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        # A file, not a pipe: the server inherits it and keeps it open.
        with (self._folder / "output").open("w") as output:
            done = subprocess.run(
                [self._programs / program, *map(str, words)],
                stdout=output, stderr=output, cwd=self._folder, check=False, **options,
            )  # fmt: skip
        assert done.returncode == 0, (self._folder / "output").read_text()


@contextlib.contextmanager
def server() -> Iterator[Server]:
    # pytest's own temporary folders are closed to other users, and too long for a socket's path.
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:
        running = Server(Path(name))
        try:
            yield running
        finally:
            running.stop()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

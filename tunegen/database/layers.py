# SPDX-License-Identifier: Apache-2.0
"""The database: the user's folder first, then the shipped one. Only the user's is ever written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from tunegen import resources
from tunegen.database import files, form
from tunegen.database.checks import Finding, FindingKind, faults, instant
from tunegen.database.ladder import Entry, Match, Question, climb, report_others
from tunegen.errors import DatabaseError, UsageError
from tunegen.model import DeviceClass, Evidence, Operation, Problem, TuningRecord

_PACKAGE = Path(resources.__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Location:
    """One layer of a database: its folder, whether that exists, and what it holds.

    ``unreadable`` says what is wrong with the files that are not counted.
    """

    layer: str
    path: Path
    exists: bool
    records: int
    files: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did: records that were new, that replaced an older one, that were no newer.

    ``left_out`` counts predictions that were not merged into shipped records.
    """

    added: int
    replaced: int
    kept: int
    left_out: int = 0


class Database:
    """Tuning records in ``<folder>/<capability>/<operation>.json``, in layers.

    ``user_folder`` is read first, and is the only one that is written; the default is the user's
    data directory. ``shipped`` is what comes with tunegen. Several threads and processes may use
    the same folder at once: each write merges into what is there by then.

    >>> database = Database(Path("my_db"))                              # doctest: +SKIP
    >>> for layer, record in database.records(arch="sm_90"):            # doctest: +SKIP
    ...     print(layer, record.operation, record.measurement.median_us)
    """

    def __init__(self, user_folder: Path | None = None, shipped: Path | None = None) -> None:
        self.user_folder = default_folder() if user_folder is None else user_folder
        self.shipped = resources.data_dir("tuned_db") if shipped is None else shipped
        # os.path, since Path raises for a place that may not be looked into.
        if os.path.exists(self.user_folder) and not os.path.isdir(self.user_folder):
            raise UsageError(f"{self.user_folder} is a file; a database is a folder")
        self._decoded: dict[Path, tuple[bytes, list[TuningRecord]]] = {}

    @property
    def layers(self) -> tuple[tuple[str, Path], ...]:
        """Name and folder of each layer, in the order in which they are read."""
        if self._ships:
            return (("shipped", self.shipped),)
        return (("user", self.user_folder), ("shipped", self.shipped))

    def where(self) -> list[Location]:
        """The layers in order, with what they hold."""
        locations = []
        for layer, folder in self.layers:
            count, paths, unreadable = 0, [], []
            try:
                paths = list(_paths(folder))
            except DatabaseError as error:
                unreadable.append(str(error))
            for path in paths:
                try:
                    count += len(self._read(path))
                except DatabaseError as error:
                    unreadable.append(str(error))
            exists = os.path.isdir(folder)
            locations.append(
                Location(layer, folder, exists, count, tuple(paths), tuple(unreadable))
            )
        return locations

    def records(
        self, arch: str | None = None, operation: str | None = None
    ) -> Iterator[tuple[str, TuningRecord]]:
        """Every record with its layer, in the order of layers, capabilities and operations.

        Raises :class:`DatabaseError` at a file that cannot be read.
        """
        for layer, folder in self.layers:
            for path in _paths(folder, arch, operation):
                for record in self._read(path):
                    yield layer, record

    def ensure_writable(self, arch: str, operation: str) -> None:
        """Raise now what :meth:`put` would raise after the work that goes into a record: the file
        cannot be locked, read or written."""
        self._refuse_package()
        path = self.user_folder / arch / f"{operation}.json"
        with files.exclusive(path):
            self._stored(path)

    def put(self, record: TuningRecord) -> Path:
        """Add a record to the user's layer; it replaces one with the same identity.

        It is on disk when this returns. Raises :class:`DatabaseError` for a record that cannot be
        true, for a prediction among shipped records, and where the file cannot be read or written.
        """
        record = self._admit(record)
        path = self._path(record)
        with files.exclusive(path):
            stored = self._stored(path)
            stored[record.identity] = record
            files.replace(path, form.encode(stored.values()))
        return path

    def amend(self, old: TuningRecord, new: TuningRecord) -> bool:
        """Put ``new`` in the place of ``old``, of the same problem, in the user's layer. What else
        has its identity stays: it is the same winner, as found since.

        False where ``old`` does not stand there as it is, since another process has written.
        Raises as :meth:`put` does.
        """
        new = self._admit(new)
        path = self._path(new)
        with files.exclusive(path):
            stored = self._stored(path)
            if stored.get(old.identity) != old:
                return False
            del stored[old.identity]
            stored.setdefault(new.identity, new)
            files.replace(path, form.encode(stored.values()))
        return True

    def merge(self, folder: Path) -> MergeReport:
        """Add the records of another database folder to the user's layer.

        Of two records with the same identity the one created later stays. All of ``folder`` is
        read before anything is written. Raises as :meth:`put` does.
        """
        if not os.path.isdir(folder):
            raise UsageError(f"no database folder {folder}")
        incoming: dict[Path, list[TuningRecord]] = {}
        added = replaced = kept = left_out = 0
        for source in _paths(folder):
            for record in self._read(source):
                if self._ships and record.evidence == "predicted":
                    left_out += 1
                    continue
                record = self._admit(record)
                incoming.setdefault(self._path(record), []).append(record)
        for path, records in sorted(incoming.items()):
            with files.exclusive(path):
                stored = self._stored(path)
                for record in records:
                    mine = stored.get(record.identity)
                    if mine is not None and _moment(mine) >= _moment(record):
                        kept += 1
                        continue
                    added += mine is None
                    replaced += mine is not None
                    stored[record.identity] = record
                files.replace(path, form.encode(stored.values()))
        return MergeReport(added, replaced, kept, left_out)

    def lookup(
        self,
        operation: Operation,
        problem: Problem,
        device: DeviceClass,
        *,
        usable: Callable[[TuningRecord], str],
        policy: str = "",
        evidence: Evidence | None = None,
    ) -> Match:
        """The record that answers for a problem on a device, and the rung it stands on.

        ``usable`` returns why a record cannot be used now (its sources are generated differently
        today), or "". ``policy`` and ``evidence`` restrict the look-up to such records. The rungs
        and the order on each are those of :mod:`tunegen.database.ladder`; the limits of a record
        are checked against the problem and the device before it answers, but for those on the
        addresses of operands, which only the launch knows.

        Raises :class:`DatabaseError` where a file for the device's capability cannot be read.
        """
        question = Question(operation, problem, device, usable, policy, evidence)
        own, others, unreadable = [], [], []
        for layer, folder in self.layers:
            for path in _paths(folder, device.arch, operation.name):
                own += [Entry(layer, record) for record in self._read(path)]
        match = climb(question, own)
        if match.record is not None:
            return match
        for layer, folder in self.layers:
            for path in _paths(folder, operation=operation.name):
                if path.parent.name == device.arch:
                    continue
                try:
                    others += [Entry(layer, record) for record in self._read(path)]
                except DatabaseError:  # no answer could come from there
                    unreadable.append(f"; {path} cannot be read")
        match = report_others(match, question, others)
        return replace(match, reason=match.reason + "".join(unreadable))

    def check(
        self, *, illegal: Callable[[TuningRecord], str], stale: Callable[[TuningRecord], str]
    ) -> list[Finding]:
        """Everything that is wrong with the files and records of all layers.

        ``illegal`` returns why a record names something that does not exist or breaks a
        constraint, or ""; ``stale`` why its kernels are not what is generated today. It is only
        asked about records that are legal.
        """
        findings: list[Finding] = []
        for layer, folder in self.layers:
            try:
                for path in _paths(folder):
                    findings += self._check_file(layer, path, illegal, stale)
            except DatabaseError as error:
                findings.append(Finding(layer, folder, "malformed", str(error)))
        return findings

    def _check_file(
        self,
        layer: str,
        path: Path,
        illegal: Callable[[TuningRecord], str],
        stale: Callable[[TuningRecord], str],
    ) -> Iterator[Finding]:
        try:
            records = self._read(path)
        except DatabaseError as error:
            yield Finding(layer, path, "malformed", str(error))
            return
        unique = {record.identity: record for record in records}
        if form.encode(unique.values()) != self._decoded[path][0]:
            reason = "these are not the bytes that tunegen would write"
            yield Finding(layer, path, "not canonical", reason)
        for record in records:
            for kind, reason in _wrong(layer, path, record, illegal, stale):
                yield Finding(layer, path, kind, reason, record)

    @property
    def _ships(self) -> bool:
        """Whether what is written here is what will be shipped."""
        return self.user_folder.resolve() == self.shipped.resolve()

    def _path(self, record: TuningRecord) -> Path:
        return self.user_folder / record.arch / f"{record.operation}.json"

    def _admit(self, record: TuningRecord) -> TuningRecord:
        """``record`` as it will be stored; raises :class:`DatabaseError` if it must not be."""
        self._refuse_package()
        record = form.settle(record)
        if found := faults(record):
            raise DatabaseError(
                f"a record of {record.operation} is impossible: {'; '.join(found)}"
            )
        if record.evidence == "predicted" and self._ships:
            raise DatabaseError(
                f"{self.user_folder} holds what is shipped: measured records only",
                hint="--db DIR names another folder",
            )
        return record

    def _refuse_package(self) -> None:
        if self.user_folder.resolve().is_relative_to(_PACKAGE):
            raise DatabaseError(
                f"{self.user_folder} belongs to the installed package, which is never written",
                hint="--db DIR names another folder",
            )

    def _stored(self, path: Path) -> dict[Any, TuningRecord]:
        return {record.identity: record for record in self._read(path)}

    def _read(self, path: Path) -> list[TuningRecord]:
        """The records of a file, none where there is no file; decoded again only when it changed.

        The bytes tell that: a time stamp does not, when two writes fall in one tick of its clock.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DatabaseError(f"{path} cannot be read: {error.strerror or error}") from error
        known = self._decoded.get(path)
        if known is None or known[0] != content:
            known = self._decoded[path] = (content, form.decode(content, path))
        return known[1]


def default_folder() -> Path:
    """``~/.local/share/tunegen/tuned_db``, or as ``XDG_DATA_HOME`` says."""
    return Path(platformdirs.user_data_dir("tunegen")) / "tuned_db"


def _paths(folder: Path, arch: str | None = None, operation: str | None = None) -> Iterator[Path]:
    """The files of a layer by ascending capability, then by operation.

    Raises :class:`DatabaseError` for a folder that is there and cannot be read.
    """
    places = (
        place
        for place in _entries(folder)
        if place.name.startswith("sm_") and arch in (None, place.name)
    )
    for place in sorted(places, key=lambda place: (len(place.name), place.name)):
        for path in sorted(_entries(place)):
            named = path.suffix == ".json" and not path.name.startswith(".")
            if named and operation in (None, path.stem):
                yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DatabaseError(f"{folder} cannot be read: {error.strerror or error}") from error


def _moment(record: TuningRecord) -> float:
    moment = instant(record.created)
    return moment.timestamp() if moment else 0.0


def _wrong(
    layer: str,
    path: Path,
    record: TuningRecord,
    illegal: Callable[[TuningRecord], str],
    stale: Callable[[TuningRecord], str],
) -> Iterator[tuple[FindingKind, str]]:
    impossible = faults(record)
    for reason in impossible:
        yield "impossible", reason
    if (record.arch, record.operation) != (path.parent.name, path.stem):
        yield "misplaced", f"a record of {record.operation} for {record.arch}"
    if layer == "shipped" and record.evidence == "predicted":
        yield "misplaced", "predicted, and only measured records are shipped"
    if impossible:
        return
    if reason := illegal(record):
        yield "illegal", reason
    elif reason := stale(record):
        yield "stale", reason

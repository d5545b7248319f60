# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a tune's parent and of its worker at random moments: nothing that was reported is
lost, the next run goes on, and so does the tune whose worker was killed."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from acceptance_child import identity
from acceptance_common import ROOT, Setting, Verdict, card_is_free, environment, storage
from acceptance_processes import children, is_gone, worker_of

from tunegen import session

CHILD = (sys.executable, str(Path(__file__).with_name("acceptance_child.py")))

# fp64, since its space is the smallest: half of a run's start is to enumerate it.
PROBLEM = {"operation": "matmul", "problem": "512x512x512", "dtype": "fp64", "spec": "simt"}
FINALS_SECONDS = 6.0
ENDLESS = 100_000

# Pairs of kills while searching, the worker's and then the parent's, and so many of the parent at
# its start; one of each kind during finals come on top.
PAIRS = 8
STARTS = 2

# Seconds within which the moment of a kill is drawn: after the first trial of a run or the trial
# that shows that it goes on; after the start of a process; after the worker is there for finals.
SEARCH_MOMENT = 1.2
START_MOMENT = 4.0
FINALS_MOMENT = 5.0

# A run's start, a worker's replacement, and whatever else may take long.
PATIENCE_SECONDS = 60.0
# Trials after a worker was killed that show that the tune goes on.
MORE = 2


class Broken(Exception):
    """Something that must hold did not."""


class Tune:
    """A tune in a process of its own, with the lines that it has written so far."""

    def __init__(self, **options: Any) -> None:
        text = json.dumps({**PROBLEM, "finals_seconds": FINALS_SECONDS, **options})
        self.process = subprocess.Popen(
            [*CHILD, text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment(),
        )  # fmt: skip
        self.reported: list[dict[str, Any]] = []
        self.done: dict[str, Any] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = False
        self._printed: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Tune:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._printed += self.process.stderr

    def next_line(self, seconds: float) -> bool:
        """Take one more line; False at the end. Raises :class:`Broken` where none comes."""
        if self._ended:
            return False
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise Broken(f"no trial within {seconds:.0f} s") from None
        if line is None:
            self._ended = True
            return False
        found = json.loads(line)
        if "done" in found:
            self.done = found
        else:
            self.reported.append(found)
        return True

    def wait_for(self, trials: int) -> None:
        """Wait until so many trials are reported."""
        while len(self.reported) < trials:
            if not self.next_line(PATIENCE_SECONDS):
                raise Broken(f"the tune ended by itself: {self.last_words()}")

    def catch_up(self) -> None:
        """Take the lines that are there."""
        while not self._lines.empty() and self.next_line(PATIENCE_SECONDS):
            pass

    def rest(self) -> None:
        """Take every line until the process has ended."""
        while self.next_line(PATIENCE_SECONDS):
            pass
        self.process.wait(PATIENCE_SECONDS)

    def last_words(self) -> str:
        self.process.wait(PATIENCE_SECONDS)
        self._readers[1].join(1.0)
        return f"exit {self.process.returncode}: {' | '.join(self._printed[-3:]).strip()}"

    def worker(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Its worker, as soon as it has one."""
        deadline = time.monotonic() + seconds
        while (pid := worker_of(self.process.pid)) is None:
            if self.process.poll() is not None:
                raise Broken(f"the tune ended by itself: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Broken("the tune has no worker")
            time.sleep(0.01)
        return pid

    def kill(self) -> None:
        """kill -9 of the parent; returns when it and all that it started have ended."""
        with_it = children(self.process.pid)
        self.process.kill()
        self.process.wait()
        self.rest()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(is_gone(pid) for pid in with_it):
            if time.monotonic() > deadline:
                raise Broken(f"workers {with_it} outlive their parent")
            time.sleep(0.01)
        for reader, stream in zip(
            self._readers, (self.process.stdout, self.process.stderr), strict=True
        ):
            reader.join()
            if stream is not None:
                stream.close()


@dataclass(slots=True)
class Log:
    """All that was reported, and what was done when."""

    storage: str
    reported: list[list[Any]] = field(default_factory=list)
    parents: int = 0
    workers: int = 0
    moments: list[str] = field(default_factory=list)

    def stored(self) -> list[list[Any]]:
        """What the store holds."""
        studies, warnings = session.list_studies(self.storage)
        if warnings:
            raise Broken(f"the store warns: {'; '.join(warnings)}")
        return [
            json.loads(json.dumps(identity(stored.trial)))
            for study in studies
            for stored in study.trials
        ]

    def check(self, tune: Tune, before: int) -> int:
        """Hold a run against the store, which had so many trials before; how many it has now."""
        self.reported += [line["trial"] for line in tune.reported]
        stored = self.stored()
        lost = [trial for trial in self.reported if trial not in stored]
        if lost:
            raise Broken(f"{len(lost)} reported trials are lost, the first {lost[0]}")
        configs = {json.dumps(trial[:2]) for trial in stored}
        if len(configs) < len(stored):
            raise Broken(f"{len(stored) - len(configs)} configurations were tried twice")
        numbers = [line["number"] for line in tune.reported]
        if numbers != list(range(before, before + len(numbers))):
            raise Broken(f"{before} trials were stored, and the next run counts {numbers[:3]}...")
        if len(stored) < before + len(numbers):
            raise Broken(f"{before} trials and {len(numbers)} more are {len(stored)} in the store")
        return len(stored)


def run(setting: Setting) -> Verdict:
    log = Log(storage(setting, "kills"))
    options = {"storage": log.storage, "db": str(setting.out / "kills_db")}
    dice = random.Random(3)
    kept, error = 0, ""
    try:
        for step in _steps():
            if not card_is_free():
                raise Broken("NVML shows processes on the card that was to be free")
            kept = step(log, options, dice, kept)
    except Broken as broken:
        error = str(broken)
    if not card_is_free():
        error = error or "processes are left on the card"
    kills = log.parents + log.workers
    figure = (
        f"{kills} kills ({log.parents} of the parent, {log.workers} of the worker), "
        f"{len(log.reported)} trials reported, {kept} stored"
    )
    ending = error or "none lost, none twice, every run went on"
    return Verdict(not error, f"{figure}: {ending}", {"moments": log.moments, "stored": kept})


Step = Callable[[Log, dict[str, Any], random.Random, int], int]


def _steps() -> Iterator[Step]:
    for number in range(PAIRS):
        # Every third time the parent does not live to see its worker replaced.
        yield _pair_in_haste if number % 3 == 2 else _pair
        if number < STARTS:
            yield _at_start
    yield _parent_in_finals
    yield _worker_in_finals


def _pair(
    log: Log, options: dict[str, Any], dice: random.Random, before: int, haste: bool = False
) -> int:
    with Tune(**options, trials=ENDLESS) as tune:
        tune.wait_for(1)
        _pause(log, "worker, searching", SEARCH_MOMENT, dice)
        os.kill(tune.worker(), signal.SIGKILL)
        log.workers += 1
        if not haste:
            tune.catch_up()
            tune.wait_for(len(tune.reported) + MORE)
        _pause(log, "parent, searching", SEARCH_MOMENT, dice)
        if tune.process.poll() is not None:
            raise Broken(f"the tune ended by itself: {tune.last_words()}")
        tune.kill()
        log.parents += 1
        return log.check(tune, before)


def _pair_in_haste(log: Log, options: dict[str, Any], dice: random.Random, before: int) -> int:
    return _pair(log, options, dice, before, haste=True)


def _at_start(log: Log, options: dict[str, Any], dice: random.Random, before: int) -> int:
    with Tune(**options, trials=ENDLESS) as tune:
        _pause(log, "parent, at its start", START_MOMENT, dice)
        tune.kill()
        log.parents += 1
        return log.check(tune, before)


def _parent_in_finals(log: Log, options: dict[str, Any], dice: random.Random, before: int) -> int:
    """No trials are left to make, so that finals begin at once."""
    with Tune(**options, trials=1) as tune:
        tune.worker()
        _pause(log, "parent, in finals", FINALS_MOMENT, dice)
        tune.kill()
        log.parents += 1
        return log.check(tune, before)


def _worker_in_finals(log: Log, options: dict[str, Any], dice: random.Random, before: int) -> int:
    """The run that goes on to its end: some trials more, and finals that lose their worker."""
    with Tune(**options, trials=before + MORE) as tune:
        tune.wait_for(MORE)
        _pause(log, "worker, in finals", FINALS_MOMENT / 2, dice)
        if tune.process.poll() is None:
            os.kill(tune.worker(), signal.SIGKILL)
            log.workers += 1
        tune.rest()
        if tune.process.returncode or tune.done is None:
            raise Broken(f"the last run: {tune.last_words()}")
        if tune.done != {"done": before + MORE, "finals": True}:
            raise Broken(f"the last run ended with {tune.done}, of {before + MORE} trials")
        return log.check(tune, before)


def _pause(log: Log, what: str, most_seconds: float, dice: random.Random) -> None:
    seconds = dice.uniform(0, most_seconds)
    log.moments.append(f"{what}, after {seconds:.2f} s")
    time.sleep(seconds)

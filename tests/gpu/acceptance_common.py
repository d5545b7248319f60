# SPDX-License-Identifier: Apache-2.0
"""What the parts of the acceptance share: verdicts, time limits, tunes by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _alarm import within

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tunegen.session import gpu as gpus  # noqa: E402 (the tree comes before what is installed)

# How tunegen is called; tests call it on a GPU that is none.
TUNEGEN: Sequence[str] = (sys.executable, "-m", "tunegen")

# A process that was killed is gone when its context is, which takes the driver a moment.
_FREE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    """``out`` is where details go, ``work`` a folder for what is thrown away; ``db`` has the
    records to look at, and ``calibration`` the calibrations (None: the user's)."""

    out: Path
    work: Path
    db: Path
    calibration: Path | None = None
    say: Callable[[str], None] = field(default=lambda text: None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a part, in a line of words; ``details`` are for the file."""

    passed: bool
    figure: str
    details: Mapping[str, Any] = field(default_factory=dict)


class OutOfTime(Exception):
    """A part took longer than it may."""


def limit(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise :class:`OutOfTime` in this block after so many seconds; main thread only."""
    return within(seconds, OutOfTime(f"out of time after {seconds:.0f} s"))


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the tree to import from."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **more}


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


def command(
    words: Sequence[str],
    *,
    watch: Callable[[int], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **more: str,
) -> Done:
    """Run ``tunegen`` with these words to its end; ``watch`` is told its process number, ``more``
    is added to its environment. Whatever is raised meanwhile ends it."""
    started = time.perf_counter()
    with subprocess.Popen(
        [*TUNEGEN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=environment(**more),
    ) as process:  # fmt: skip
        try:
            with watch(process.pid):
                out, err = process.communicate()
        except BaseException:
            process.kill()  # its workers end with it
            raise
    return Done(process.returncode, out, err, time.perf_counter() - started)


class TuneFailed(Exception):
    """A tune did not exit with 0."""


def result_of(done: Done) -> dict[str, Any]:
    """The one result of ``tune --json``. Raises :class:`TuneFailed` where there is none."""
    if done.code:
        last = done.err.strip().splitlines()[-3:]
        raise TuneFailed(f"tunegen exited with {done.code}: {' | '.join(last)}")
    (result,) = json.loads(done.out)["results"]
    return result


def storage(setting: Setting, name: str) -> str:
    """Where a tune keeps its trials."""
    return f"sqlite:///{setting.work / name}.db"


def tune_words(setting: Setting, name: str, *words: str, cold: bool = True) -> list[str]:
    """A fresh tune on the GPU with a store and a database of its own. A ``cold`` one tries no
    winner of elsewhere first: it is the search that is judged."""
    return [
        "tune", *words, "--evaluator", "gpu", "--fresh", *(("--cold",) if cold else ()), "--json",
        "--storage", storage(setting, name), "--db", str(setting.out / f"{name}_db"),
    ]  # fmt: skip


def keep(setting: Setting, name: str, document: Any) -> None:
    """Write details to a file of their own."""
    (setting.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def card_is_free(seconds: float = _FREE_SECONDS) -> bool:
    """Whether NVML shows no process on the first GPU within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        devices = gpus.find_gpus().devices
        if devices and not devices[0].other_processes:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)

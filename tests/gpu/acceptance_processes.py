# SPDX-License-Identifier: Apache-2.0
"""A tune's processes as /proc shows them: which they are, and the memory that they take."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Literal

from acceptance_common import ROOT as ROOT  # puts the tree first in the path

from tunegen.runner.protocol import PRELOAD

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_SECONDS = 0.05

Kind = Literal["starting", "worker", "vendor"]


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # The name in parentheses may hold anything; behind it stand state and parent.
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(folder.name))
    return sorted(found)


def kind_of(pid: int, parent: int) -> Kind:
    """What a child of a tune is: the process that loads the vendor's library, or the worker."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not words or words == Path(f"/proc/{parent}/cmdline").read_bytes():
            return "starting"  # between fork and exec
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return "starting"
    preloads = any(variable.startswith(f"{PRELOAD}=".encode()) for variable in variables)
    return "vendor" if preloads else "worker"


def worker_of(parent: int) -> int | None:
    """The worker that launches kernels for a tune, if it has one now."""
    workers = [pid for pid in children(parent) if kind_of(pid, parent) == "worker"]
    return workers[-1] if workers else None


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def resident_bytes(pid: int) -> int:
    """The memory of a process, 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class Memory:
    """The resident memory of a tune while the block runs, sampled 20 times a second.

    ``together_bytes`` is the peak of parent and workers together, pages that they share counted
    twice; the others are peaks of each by itself. The process that loads the vendor's library is
    apart.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.together_bytes = self.parent_bytes = self.worker_bytes = self.vendor_bytes = 0
        self.samples = 0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            parent, of = resident_bytes(self._pid), {"starting": 0, "worker": 0, "vendor": 0}
            for pid in children(self._pid):
                of[kind_of(pid, self._pid)] += resident_bytes(pid)
            self.together_bytes = max(self.together_bytes, parent + of["worker"])
            self.parent_bytes = max(self.parent_bytes, parent)
            self.worker_bytes = max(self.worker_bytes, of["worker"])
            self.vendor_bytes = max(self.vendor_bytes, of["vendor"])
            self.samples += 1
            if self._ended.wait(_SAMPLE_SECONDS):
                return

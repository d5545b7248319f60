# SPDX-License-Identifier: Apache-2.0
"""What the scripts about records share: how problems are written, which records stand, and a
limit for what must not take for ever."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import _tree  # noqa: F401 (makes tunegen importable)
from _alarm import within

from tunegen import kernels, session
from tunegen.database import Database
from tunegen.model import Problem, TuningRecord

# A process that has ended is listed on the card for a moment.
_ALONE_S = 10.0


class Overdue(Exception):
    """Something took longer than it may."""


def deadline(seconds: float) -> AbstractContextManager[None]:
    """Raises :class:`Overdue` in what is inside after so long. For the main thread."""
    return within(seconds, Overdue(f"it took more than {seconds:g} s"))


def wait_until_alone(index: int | None = None) -> None:
    """Wait until processes that have ended are listed on a card no more. What stays there is not
    waited for: whoever measures will refuse."""
    until = time.monotonic() + _ALONE_S
    while time.monotonic() < until:
        gpus = [item.gpu for item in session.list_gpus().gpus if index in (None, item.gpu.index)]
        if not any(gpu.other_processes for gpu in gpus):
            return
        time.sleep(0.25)


def only(folder: Path) -> Database:
    """The database of that folder alone, without what is shipped."""
    return Database(folder, shipped=folder)


def whole(record: TuningRecord) -> TuningRecord:
    """A record with every attribute that its operation has by now."""
    problem = kernels.operation(record.operation).complete(record.problem)
    return dataclasses.replace(record, problem=problem)


def is_final(record: TuningRecord) -> bool:
    """Whether a GPU measured it, and its finals were played."""
    return record.evidence == "measured" and "unfinished" not in record.measurement.details


def size(problem: Problem) -> str:
    """``4096x4096x4096``, ``2^24``, ``2^24+1``."""
    text = kernels.operation(problem.operation).text(problem)
    if not text.isdecimal():
        return text
    power = int(text).bit_length() - 1
    more = int(text) - (1 << power)
    if power < 10 or more > 1:
        return text
    return f"2^{power}" + (f"+{more}" if more else "")


def title(problem: Problem) -> str:
    """``matmul fp32 nn 4096x4096x4096``."""
    operation = kernels.operation(problem.operation)
    special = (f"{name}={value}" for name, value in operation.special(problem).items())
    words = (problem.operation, problem.dtype, problem.layout, size(problem), *special)
    return " ".join(word for word in words if word)


def write_json(folder: Path | None, name: str, content: object) -> None:
    """Details for a machine to read, where a folder was given."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, default=_plain, indent=1)
    (folder / name).write_text(text + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)  # whatever it is, the rest must be kept

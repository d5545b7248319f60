# SPDX-License-Identifier: Apache-2.0
"""The parent's end: one child process that does the launching, and that may die at any moment."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from tunegen.errors import DeviceError
from tunegen.runner.protocol import HEADER, Answer, Close, Request, pack

COMMAND = (sys.executable, "-m", "tunegen.runner.worker")

# An answer holds times and sentences, never operands: a longer one is no answer but noise.
_ANSWER_BYTES = 1 << 26

# A process that closed its pipe is about to end: so long it may take to say with which code.
_EXIT_SECONDS = 1.0

# Giving back a context takes the driver some 0.3 s, and with many gigabytes longer.
_CLOSE_SECONDS = 5.0

# The driver ends a hanging kernel before the process is gone; it takes seconds on some cards.
_KILL_SECONDS = 60.0

_QUOTED_BYTES, _QUOTED_LINES = 8192, 12

# What pickle.loads raises for bytes that are no pickle of ours; its documentation lists the first
# six as examples and promises no end.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, ValueError,
    KeyError, TypeError, MemoryError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came, and the worker that owed it is gone.

    "died": it ended by itself; "timed_out": it was killed after waiting in vain; "garbled": it
    wrote what is no answer, and was killed. ``printed`` holds its last lines.
    """

    kind: Literal["died", "timed_out", "garbled"]
    reason: str
    printed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason}: {self.printed[-1]}" if self.printed else self.reason


class Worker:
    """A child process that answers one request at a time. It is started at once.

    ``command`` is given the numbers of the file descriptors to read requests from and to write
    answers to, and of this process. It runs in a session of its own, so that Ctrl-C in a terminal
    reaches only the parent. ``environment`` is added to this process's own.

    Raises :class:`DeviceError` where the command cannot be started.
    """

    def __init__(
        self, command: Sequence[str] = COMMAND, environment: Mapping[str, str] | None = None
    ) -> None:
        requests_out, self._requests = os.pipe()
        self._answers, answers_in = os.pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._loss: Lost | None = None
        self._timeout_s = self._due = 0.0
        try:
            self._process = subprocess.Popen(
                [*command, str(requests_out), str(answers_in), str(os.getpid())],
                pass_fds=(requests_out, answers_in),
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._release()
            raise DeviceError(f"the worker process cannot be started: {error}") from error
        finally:
            os.close(requests_out)
            os.close(answers_in)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._loss is None and self._process.poll() is None

    def ask(self, request: Request, timeout_s: float) -> Answer | Lost:
        """The answer to a request. Where none comes, the process is gone when this returns."""
        self.post(request, timeout_s)
        answer = self.take()
        assert answer is not None
        return answer

    def post(self, request: Request, timeout_s: float) -> None:
        """Ask, and do not wait for the answer; :meth:`take` gives it. One request at a time."""
        if self._loss is not None:
            return
        self._timeout_s, self._due = timeout_s, time.monotonic() + timeout_s
        with self._losing():
            if _ready(self._answers, select.POLLIN, deadline=0.0) and os.read(self._answers, 1):
                raise ValueError("it wrote without being asked")
            self._write(pack(request), self._due)

    def take(self, *, wait: bool = True) -> Answer | Lost | None:
        """The answer to what was posted; without ``wait``, None where there is none yet."""
        if self._loss is None and not wait:
            early = time.monotonic() < self._due
            if early and not _ready(self._answers, select.POLLIN, deadline=0.0):
                return None
        answer: Any = None
        with self._losing():
            if self._loss is None:
                (size,) = HEADER.unpack(self._read(HEADER.size, self._due))
                if size > _ANSWER_BYTES:
                    raise ValueError(f"it announced an answer of {size:,} bytes")
                answer = _unpickled(self._read(size, self._due))
        return self._loss or cast(Answer, answer)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Note a failure to talk to the process, and end it."""
        try:
            yield
        except TimeoutError:
            self._lose("timed_out", f"no answer within {self._timeout_s:.1f} s")
        except (BrokenPipeError, EOFError):
            self._lose("died", "it closed its pipe")
        except ValueError as error:
            self._lose("garbled", str(error))
        except BaseException:  # Ctrl-C: what is under way would answer the next request
            self.kill()
            raise

    def close(self) -> None:
        """End the process: politely, then not."""
        try:
            if self._loss is None:
                with suppress(OSError):  # timed out included
                    self._write(pack(Close()), time.monotonic() + 1.0)
                os.close(self._requests)
                self._requests = -1
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSE_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and everything that it started. Nothing is left when this returns.

        Raises :class:`DeviceError` where the operating system cannot end it.
        """
        if self._loss is None:
            self._loss = Lost("died", f"worker {self.pid}: it was ended")
        if self._requests < 0 and self._answers < 0:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(
                f"worker process {self.pid} does not end {_KILL_SECONDS:g} s after SIGKILL",
                hint="the driver hangs: see dmesg for Xid errors",
            ) from error
        finally:
            self._release()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lose(self, kind: Literal["died", "timed_out", "garbled"], reason: str) -> None:
        if kind == "died":
            with suppress(subprocess.TimeoutExpired):
                reason = _ending(self._process.wait(_EXIT_SECONDS))
        self._loss = Lost(kind, f"worker {self.pid}: {reason}", self._last_lines())
        self.kill()

    def _last_lines(self) -> tuple[str, ...]:
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - _QUOTED_BYTES))
        text = self._printed.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return tuple(lines[-_QUOTED_LINES:])

    def _write(self, content: bytes, deadline: float) -> None:
        left = memoryview(content)
        while left:
            _wait(self._requests, select.POLLOUT, deadline)
            with suppress(BlockingIOError):  # less room than poll's promise of one byte may mean
                left = left[os.write(self._requests, left) :]

    def _read(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            _wait(self._answers, select.POLLIN, deadline)
            part = os.read(self._answers, min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _release(self) -> None:
        for descriptor in (self._requests, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._answers = -1
        self._printed.close()


# How a worker is started; tests start others.
Start = Callable[[], Worker]


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    """Whether a descriptor is ready before ``deadline`` (of the monotonic clock; 0: now)."""
    poller = select.poll()
    poller.register(descriptor, event)
    left_ms = max(0.0, deadline - time.monotonic()) * 1e3
    return bool(poller.poll(left_ms))


def _unpickled(content: bytes) -> Answer:
    """The answer in a frame; ``ValueError`` where there is none."""
    try:
        answer = pickle.loads(content)
    except _UNPICKLING_ERRORS as error:
        raise ValueError(f"it wrote no answer ({type(error).__name__})") from error
    if not isinstance(answer, Answer):
        raise ValueError(f"it answered a {type(answer).__name__}")
    return answer


def _wait(descriptor: int, event: int, deadline: float) -> None:
    if not _ready(descriptor, event, deadline):
        raise TimeoutError


def _ending(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"

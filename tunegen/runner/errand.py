# SPDX-License-Identifier: Apache-2.0
"""Requests to a worker that are served while the parent does something else."""

from __future__ import annotations

from collections.abc import Sequence

from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import Answer, Failed, Request


class Errand:
    """Posts requests, each with the seconds it may take, one after the other.

    Call :meth:`advance` now and then, and :meth:`finish` for the end. The first failure ends it.
    """

    def __init__(self, worker: Worker, requests: Sequence[tuple[Request, float]]) -> None:
        self.worker = worker
        self._left = list(requests)
        self._under_way = False
        self.answers: list[Answer] = []
        self.failure = ""

    def advance(self) -> None:
        """Take the answer that is there, if there is one, and post the next request."""
        self._step(wait=False)

    def finish(self) -> None:
        """Wait until everything has been answered, or something failed."""
        while self._step(wait=True):
            pass

    def _step(self, *, wait: bool) -> bool:
        if self.failure:
            return False
        if self._under_way:
            answer = self.worker.take(wait=wait)
            if answer is None:
                return True
            self._under_way = False
            if isinstance(answer, Lost | Failed):
                self.failure = answer.reason if isinstance(answer, Failed) else str(answer)
                return False
            self.answers.append(answer)
        if not self._left:
            return False
        self.worker.post(*self._left.pop(0))
        self._under_way = True
        return True

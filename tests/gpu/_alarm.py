# SPDX-License-Identifier: Apache-2.0
"""A limit for what must not take for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float, error: Exception) -> Iterator[None]:
    """Raise ``error`` in what is inside after so long. For the main thread."""

    def ring(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

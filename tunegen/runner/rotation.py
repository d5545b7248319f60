# SPDX-License-Identifier: Apache-2.0
"""Launches in turns over the sets of operands, in pieces long enough to be timed.

Events around one short launch would time mostly the gap before it. So many calls make up an
interval, each on another set, recorded as a CUDA graph; intervals follow one another without the
host waiting between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tunegen.device import Gpu, Mark
from tunegen.errors import DeviceError
from tunegen.runner.operands import Operands

# A graph of more launches takes longer to make than it saves.
_MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Interval:
    """So many calls between two marks of the stream."""

    start: Mark
    end: Mark
    calls: int

    def us(self) -> float:
        """Microseconds per call, once the stream is past the end."""
        return self.end.since_us(self.start) / self.calls


class Run:
    """Intervals that are on the stream. ``calls`` are all of its launches, those that led in
    included."""

    def __init__(self, marks: Sequence[Mark], intervals: Sequence[Interval], calls: int) -> None:
        self._marks = marks
        self._intervals = intervals
        self.calls = calls

    def collect(self) -> tuple[list[float], float]:
        """Wait for the end: the time per call of each interval, and that from the first mark to
        the last, in microseconds. Raises what the kernels did wrong."""
        try:
            self._marks[-1].wait()
            whole = self._marks[-1].since_us(self._marks[0])
            return [interval.us() for interval in self._intervals], whole
        finally:
            for mark in self._marks:
                mark.close()


class Rotation:
    """Calls of ``launch``, which takes the number of a set, in intervals of about ``calls``.

    ``one_set`` keeps to the first set. What changes its operands in place is applied to the first
    sets, once to each, and before every interval all sets are restored, those first ones first: so
    they are the longest out of the cache. Its intervals have no more calls than there are sets.
    ``direct`` launches anew every time instead of replaying graphs, as is done for single calls.

    Raises :class:`DeviceError` where calls in place are to keep to one set.
    """

    def __init__(
        self,
        gpu: Gpu,
        operands: Operands,
        launch: Callable[[int], None],
        calls: int,
        *,
        one_set: bool = False,
        direct: bool = False,
    ) -> None:
        self._gpu = gpu
        self._operands = operands
        self._in_place = operands.in_place
        if self._in_place and one_set:
            raise DeviceError(
                "a call that works in place cannot be timed warm: it would be applied to its own "
                "results", hint="--policy burst",
            )  # fmt: skip
        sets = range(1 if one_set else len(operands.sets))
        calls = min(calls, _MOST_CALLS)
        self._windows = [sets[:calls]] if self._in_place else windows(sets, calls)
        self._turn = 0
        with ExitStack() as undo:
            self._play = [self._player(window, launch, direct, undo) for window in self._windows]
            if self._in_place:
                self._restore = self._player(sets, operands.restore, False, undo)
            self._undo = undo.pop_all()

    @property
    def calls(self) -> int:
        """Calls of the longest interval."""
        return max(map(len, self._windows))

    @property
    def can_grow(self) -> bool:
        """Whether intervals may have more calls than they have."""
        return not self._in_place and self.calls < _MOST_CALLS

    def close(self) -> None:
        self._undo.close()

    def _player(
        self, window: Sequence[int], launch: Callable[[int], None], direct: bool, undo: ExitStack
    ) -> Callable[[], None]:
        def play() -> None:
            for index in window:
                launch(index)

        if direct or len(window) == 1:
            return play
        graph = self._gpu.graph(play)
        undo.callback(graph.close)
        return graph.launch

    def enqueue(self, count: int, *, lead_in: bool) -> Run:
        """Put ``count`` intervals on the stream.

        ``lead_in`` puts one more before them that is not timed: an idle device would start the
        clock while the host is still launching. Calls in place have their operands' restoring for
        that.
        """
        marks: list[Mark] = []
        intervals: list[Interval] = []
        calls = 0
        if lead_in and not self._in_place:
            calls += self._next()
        marks.append(self._gpu.mark())
        for _ in range(count):
            if self._in_place:
                self._restore()
                marks.append(self._gpu.mark())
            start = marks[-1]
            played = self._next()
            marks.append(self._gpu.mark())
            intervals.append(Interval(start, marks[-1], played))
            calls += played
        return Run(marks, intervals, calls)

    def _next(self) -> int:
        self._play[self._turn]()
        played = len(self._windows[self._turn])
        self._turn = (self._turn + 1) % len(self._windows)
        return played


def windows(sets: Sequence[int], calls: int) -> list[Sequence[int]]:
    """The sets that the calls of each interval take, about ``calls`` of them, in turns. Together
    the windows go round all sets, each as often as the others.

    >>> windows([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3], [4]]
    >>> windows([0, 1], 3)
    [[0, 1, 0, 1]]
    """
    if calls >= len(sets):
        return [list(sets) * math.ceil(calls / len(sets))]
    count = math.ceil(len(sets) / calls)
    size = math.ceil(len(sets) / count)
    return [sets[start : start + size] for start in range(0, len(sets), size)]

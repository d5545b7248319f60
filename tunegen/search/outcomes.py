# SPDX-License-Identifier: Apache-2.0
"""What a surrogate needs of the outcomes so far, kept so that the next one costs the same however
many there are."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tunegen.search.moves import Rows
from tunegen.search.surrogate import Floats

# Outcomes that the surrogate of a contender knows: half of them the fastest, half the latest. Of
# so many outcomes in all that the search is a long one, so many for all contenders together, lest
# a proposal takes longer the more there are of either.
_MOST_POINTS = 300
_MANY, _MOST_OF_MANY, _LEAST_OF_MANY = 1000, 200, 50


def most_points(known: int, contenders: int) -> int:
    """How many outcomes each surrogate is given where so many are known of all contenders."""
    if known <= _MANY:
        return _MOST_POINTS
    return max(_MOST_OF_MANY // contenders, _LEAST_OF_MANY)


# Log times are measured from the best one. Only the order among the fast matters, so slow ones
# count as if they were at this quantile of all, or at this distance.
_SLOW_QUANTILE, _SLOWEST, _LEAST_SLOW = 0.6, 1.0, 0.15


@dataclass(frozen=True, slots=True)
class Slow:
    """The log times between which differences count."""

    best: float
    most: float


class Times:
    """The log times of all successes, in order."""

    def __init__(self) -> None:
        self._ordered: Floats = np.zeros(0)
        self._new: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered) + len(self._new)

    def add(self, log: float) -> None:
        self._new.append(log)

    def slow(self) -> Slow:
        """Without a success, nothing is slow."""
        if not len(self):
            return Slow(0.0, 0.0)
        if self._new:
            new = np.sort(np.array(self._new))
            self._ordered = np.insert(self._ordered, np.searchsorted(self._ordered, new), new)
            self._new = []
        best = float(self._ordered[0])
        beyond = quantile(self._ordered, _SLOW_QUANTILE) - best
        return Slow(best, best + min(max(beyond, _LEAST_SLOW), _SLOWEST))


class _Success(NamedTuple):
    log: float
    number: int  # in the order in which they became known
    row: int


class History:
    """The outcomes of one contender, in the order in which they became known."""

    def __init__(self) -> None:
        self._successes = 0
        self._fastest: list[_Success] = []  # the fastest first, the first of equals
        self._recent: deque[_Success] = deque(maxlen=_MOST_POINTS)
        self._latest: deque[tuple[int, bool]] = deque(maxlen=_MOST_POINTS)

    def add(self, row: int, log: float | None) -> None:
        """The log of the time of ``row``, None where it failed."""
        self._latest.append((row, log is None))
        if log is None:
            return
        success = _Success(log, self._successes, row)
        self._successes += 1
        self._recent.append(success)
        bisect.insort(self._fastest, success)
        del self._fastest[_MOST_POINTS // 2 :]

    def telling(self, slow: Slow, most: int) -> tuple[Rows, Floats]:
        """At most so many successes, the fastest and the latest, with their log times above the
        best."""
        found = list(self._recent)
        if self._successes > most:
            together = {*self._fastest[: most // 2], *found[-(most // 2) :]}
            found = sorted(together, key=lambda success: success.number)
        rows = np.array([success.row for success in found], dtype=np.int64)
        logs = np.array([success.log for success in found], dtype=np.float64)
        return rows, np.minimum(logs, slow.most) - slow.best

    def latest(self, most: int) -> tuple[Rows, Floats]:
        """At most so many outcomes, the latest: 1 where they are failures, 0 where not."""
        latest = list(self._latest)[-most:]
        rows = np.array([row for row, _ in latest], dtype=np.int64)
        return rows, np.array([failed for _, failed in latest], dtype=np.float64)


def quantile(ordered: NDArray[np.float64], share: float) -> float:
    """What ``numpy.quantile`` gives, to the last bit, without looking at all values."""
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    weight = place - below
    left, right = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    if weight < 0.5:
        return left + (right - left) * weight
    return right - (right - left) * (1 - weight)

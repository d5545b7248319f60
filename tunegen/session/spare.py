# SPDX-License-Identifier: Apache-2.0
"""Who goes on with the search seconds that other problems of a list have left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tunegen import tuner

# Going on opens the GPU again, tells the search its past and plays the finals again: some 20 s at
# the usual 15 s of finals. Fewer seconds of search than half of that are not worth it.
LEAST_SLICE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The problem at ``place`` of a list, whose search time has ended after so many ``trials``.
    ``gain`` is the share of the best time that all configurations left together are expected to
    save, None where that is not known."""

    place: int
    gain: float | None
    trials: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The problem at ``place`` goes on for ``seconds``, since it may gain ``gain``."""

    place: int
    seconds: float
    gain: float | None


def next_slice(
    unfinished: Collection[Unfinished], spare_s: float, budget: tuner.Budget
) -> Slice | None:
    """Who goes on for how long, where there are ``spare_s`` seconds and each problem has the same
    ``budget``; None where nobody does.

    That is the one with the largest gain: for the ``budget.seconds`` again, or what there is, but
    not for less than ``LEAST_SLICE_SECONDS``. Who is expected to gain less than the
    ``budget.least_gain`` does not go on. An unknown gain counts as the largest, as it does for the
    end of a search; of equals the one with the fewest trials is first.
    """
    if budget.seconds is None or budget.least_gain is None:
        return None
    seconds = min(spare_s, budget.seconds)
    able = [each for each in unfinished if not budget.is_enough(each.gain)]
    if seconds < LEAST_SLICE_SECONDS or not able:
        return None
    first = min(able, key=_urgency)
    return Slice(first.place, seconds, first.gain)


def _urgency(each: Unfinished) -> tuple[float, int, int]:
    gain = float("inf") if each.gain is None else each.gain
    return -gain, each.trials, each.place


@dataclass(slots=True)
class Spare:
    """The seconds that are left of a list whose problems each have the same ``budget``."""

    budget: tuner.Budget
    seconds: float = 0.0
    _unfinished: dict[int, Unfinished] = field(default_factory=dict)

    def ended(self, place: int, run: tuner.TuneRun, seconds: float | None) -> None:
        """The search of the problem at ``place``, which had so many ``seconds``."""
        self.dropped(place)
        if run.stop_reason == "time":
            self._unfinished[place] = Unfinished(place, run.left_gain, len(run.trials))
        elif seconds is not None:
            self.seconds += max(0.0, seconds - run.search_seconds)

    def dropped(self, place: int) -> None:
        """The problem at ``place`` does not go on."""
        self._unfinished.pop(place, None)

    def take(self) -> Slice | None:
        """Who goes on now. These seconds are no longer spare."""
        found = next_slice(self._unfinished.values(), self.seconds, self.budget)
        if found is not None:
            self.seconds -= found.seconds
        return found

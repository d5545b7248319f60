# SPDX-License-Identifier: Apache-2.0
"""Who won a contest, and how sure that is: medians, bootstrap intervals, ties.

All of it is a function of the times and a seed. Times are paired: the n-th of every contender was
taken in the same round, under the same clocks and temperature, so a ratio within a round says more
than a ratio of two medians.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95

# Resamples for an interval. Its ends then vary by about a hundredth of its width with the seed.
_DRAWS = 4000

# Energies closer than this are equal: NVML's counter moves in steps of tens of milliseconds, some
# percent of a short block.
ENERGY_MARGIN = 0.01

# Two policies disagree about the winner where it costs more than this to believe the other one.
FLIP_MARGIN = 0.02

# The rules by which ties are broken, in their order.
BY_DEFAULT = "the default does not lose to noise"
BY_ENERGY = "least energy per call"
BY_WORST_CASE = "best worst case on neighbouring sizes"
BY_ORDER = "first in the order of trials"

Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ``values`` and its percentile bootstrap interval. One value has no spread."""
    sample = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    drawn: NDArray[np.float64] = np.median(
        sample[rng.integers(len(sample), size=(_DRAWS, len(sample)))], axis=1
    )
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.median(sample)), float(low), float(high))


def ratio(times: Sequence[float], of: Sequence[float], seed: int = 0) -> Estimate:
    """How many times as long ``times`` are as ``of``, round by round."""
    pairs = min(len(times), len(of))
    return estimate(np.asarray(times[:pairs]) / np.asarray(of[:pairs]), seed)


def leader(times: Times) -> str:
    """The contender with the lowest median; the first one of equals."""
    return min(times, key=lambda name: float(np.median(times[name])))


def ties(times: Times, seed: int = 0) -> tuple[str, ...]:
    """The leader, and whoever's ratio to it has an interval that reaches 1; in given order."""
    first = leader(times)
    return tuple(
        name for name in times if name == first or ratio(times[name], times[first], seed).low <= 1
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner, those it tied with (itself included), and the rule that chose among them."""

    winner: str
    tied: tuple[str, ...]
    rule: str


def choose(
    times: Times,
    *,
    default: str | None = None,
    energy: Mapping[str, float] | None = None,
    worst: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Choice:
    """The winner by its time; among ties by a stable rule.

    The default does not lose to what only ties with it. Then the lower energy per call counts,
    then the better worst case on neighbouring sizes (``worst``, times over the best contender's),
    each where all tied ones have it; then the order of ``times``.
    """
    tied = ties(times, seed)
    if len(tied) == 1:
        return Choice(tied[0], tied, "")
    if default in tied:
        return Choice(str(default), tied, BY_DEFAULT)
    left = tied
    for figures, rule in (
        (energy, BY_ENERGY),
        (worst, BY_WORST_CASE),
    ):
        if figures is None or not all(name in figures for name in tied):
            continue
        least = min(figures[name] for name in left)
        left = tuple(name for name in left if figures[name] <= least * (1 + ENERGY_MARGIN))
        if len(left) == 1:
            return Choice(left[0], tied, rule)
    return Choice(left[0], tied, BY_ORDER)


def flips(one: Times, other: Times) -> bool:
    """Whether two policies name different winners and one of them loses by more than 2 %.

    Only contenders that were timed under both count.
    """
    both = [name for name in one if name in other]
    if not both:
        return False
    first = leader({name: one[name] for name in both})
    second = leader({name: other[name] for name in both})
    lost = max(ratio(one[second], one[first]).median, ratio(other[first], other[second]).median)
    return first != second and lost > 1 + FLIP_MARGIN


def shuffled(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """A random order of the contenders for each round."""
    rng = np.random.default_rng(seed)
    return [[names[i] for i in rng.permutation(len(names))] for _ in range(rounds)]


def there_and_back(names: Sequence[str]) -> list[str]:
    """ABBA: what drifts steadily harms no one."""
    return [*names, *reversed(names)]


def pieces(samples: Sequence[float], count: int) -> list[float]:
    """The medians of ``count`` consecutive parts of a block, or the samples where they are few."""
    parts = np.array_split(np.asarray(samples, dtype=np.float64), min(count, len(samples)))
    return [float(np.median(part)) for part in parts]

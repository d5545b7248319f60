# SPDX-License-Identifier: Apache-2.0
"""The search's own way of choosing: candidates of several kinds, judged by a surrogate.

Candidates are what lies around the best configurations, crossings of them, what the performance
model ranks high, and random ones. Of each the surrogate of the times says by how much it can be
expected to be faster than the best; the chance that it runs at all counts as a factor. The
winner's surroundings are searched on, as long as something better turns up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tunegen.search.moves import Moves, Rows
from tunegen.search.outcomes import History, Slow, Times, most_points
from tunegen.search.surrogate import (
    FEW,
    Encoding,
    Floats,
    Points,
    Scales,
    Surrogate,
    log_expected_improvement,
    normal_below,
)
from tunegen.search.unseen import Choices, Place, Unseen

# Points that the model chooses, or chance without one, before the surrogate does. On recorded
# spaces, without a model, ten were as good from fifty trials on, and worse before.
_MODEL_POINTS, _CHANCE_POINTS = 10, 6

# The model's log times count up to this distance from its best one.
_SLOWEST_BY_MODEL = 1.5

# The surrogate's scales are learned anew each time that there are so many times more outcomes, and
# no more after the last time: by then they hardly change, and a long past is told faster.
_FIRST_LEARNING, _GROWTH, _LAST_LEARNING = 6, 1.25, 1000
_FEWEST_TO_LEARN = 4

# A configuration fails where the process through failures (1) and successes (0) is above one half,
# which is blurred a little. Even a certain failure is given some chance to run.
_HALFWAY, _BLUR, _LEAST_CHANCE = 0.5, 0.05, 1e-9
# What may fail is avoided more than it is worth by chance alone: where nothing better is in sight
# among what runs, failures, of which nothing is known but that, would promise most.
_AVERSION = 2.0

# Outcomes before the surrogate is asked whether it is worth going on: with fewer it is too sure.
# On recorded spaces it ended searches after 24 that were 3 % away.
_FEWEST_TO_END = 50

# Where candidates come from, and how many of each kind.
_PARENTS, _LEAPS = 6, 60
_CROSSED, _CROSSINGS = 12, 100
_BEST_BY_MODEL, _GOOD_BY_MODEL, _RANDOM = 150, 150, 300
_GOOD_POWER = 4  # of a random number: how much the model's good ones are preferred

# Rounds in which the candidates best by the surrogate are left for better ones around them.
_CLIMBS, _CLIMBERS, _CLIMB_LEAPS = 3, 4, 20

# Without a model, only what lies this far below the best log time counts as an improvement. Near
# the best there is always a little to be expected, and a search that counts it makes its trials
# there: on recorded spaces it stalled for tens of them at 0 and 0.02, and came to the last percent
# later at 0.2. While outcomes are few the best is far from the optimum, and so much more is asked
# for: 0.2 was a little ahead at 25 and at 50 trials. A model knows where else to look.
_WORTHWHILE, _WORTHWHILE_OF_FEW = 0.1, 0.2

# One proposal in so many is bolder: it takes the surrogate to be that much less sure.
_BOLD_EVERY, _BOLDNESS = 4, 1.5


class _Region:
    """A contender with its outcomes and its surrogate's scales."""

    def __init__(self, contender: Choices) -> None:
        self._table = contender.table
        self._encoding = Encoding([len(p.values) for p in contender.table.space.parameters])
        self.history = History()
        self.times, self.failures = Scales(self._encoding), Scales(self._encoding)
        self._model: Floats | None = None
        self.by_model: Rows = np.zeros(0, dtype=np.int64)
        prior_us = contender.prior_us
        if prior_us is not None and np.isfinite(prior_us).any():
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.nan_to_num(np.log(prior_us), nan=np.inf, posinf=np.inf)
            self._model = np.minimum(logs - logs.min(), _SLOWEST_BY_MODEL)
            self.by_model = np.argsort(logs, kind="stable")

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @functools.cached_property
    def moves(self) -> Moves:
        return Moves(self._table)

    def points(self, rows: Rows) -> Points:
        model = np.zeros(len(rows)) if self._model is None else self._model[rows]
        return Points(self._encoding(self._table.indices[:, rows]), model)

    def learn(self, slow: Slow, most: int) -> None:
        """The scales, from the outcomes so far."""
        kept, values = self.history.telling(slow, most)
        if len(kept) >= _FEWEST_TO_LEARN:
            self.times.learn(self.points(kept), values - values.mean())
        kept, failed = self.history.latest(most)
        if failed.any() and len(kept) >= _FEWEST_TO_LEARN:
            self.failures.learn(self.points(kept).without_model(), failed)


class Portfolio:
    """A Gaussian process for each spec, and the spec that promises most."""

    model_points: ClassVar[int] = _MODEL_POINTS
    chance_points: ClassVar[int] = _CHANCE_POINTS

    def __init__(self, contenders: Sequence[Choices], seed: int) -> None:
        self._regions = [_Region(contender) for contender in contenders]
        self._known, self._times = 0, Times()
        self._under_way: dict[int, Place] = {}
        self._next_learning = _FIRST_LEARNING
        self.expected_gain: float | None = None

    def known(self, place: Place, time: float | None) -> None:
        log = None if time is None else math.log(time)
        self._regions[place.contender].history.add(place.row, log)
        if log is not None:
            self._times.add(log)
        self._known += 1
        # Scales depend on the outcomes and their order alone, not on when proposals are made.
        if self._known == self._next_learning <= _LAST_LEARNING:
            self._learn()
            self._next_learning = math.ceil(self._next_learning * _GROWTH)

    def started(self, number: int, place: Place) -> None:
        self._under_way[number] = place

    def finished(self, number: int, time: float | None) -> None:
        self.known(self._under_way.pop(number), time)

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        slow = self._times.slow()
        bold = self._known % _BOLD_EVERY == _BOLD_EVERY - 1
        best: tuple[float, Place] | None = None
        gain = 0.0
        for position, region in enumerate(self._regions):
            if not unseen.left(position):
                continue
            waiting = [p.row for p in self._under_way.values() if p.contender == position]
            judge = _Judge(region, np.array(waiting, dtype=np.int64), slow, self._most_points)
            candidates = _Candidates(position, region, unseen, judge.fastest, rng)
            value, row = candidates.best(judge, _BOLDNESS if bold else 1.0)
            if best is None or value > best[0]:
                best = value, Place(position, row)
            gain += candidates.expected_gain(judge)
        assert best is not None
        telling = len(self._times) > 0 and self._known >= _FEWEST_TO_END
        self.expected_gain = gain if telling else None
        return best[1]

    @property
    def _most_points(self) -> int:
        return most_points(self._known, len(self._regions))

    def _learn(self) -> None:
        if len(self._times):
            slow = self._times.slow()
            for region in self._regions:
                region.learn(slow, self._most_points)


class _Judge:
    """What is thought of a contender's configurations for one proposal."""

    def __init__(self, region: _Region, waiting: Rows, slow: Slow, most: int) -> None:
        """``waiting`` are the rows under way, which count as if they took what is expected of
        them; at most so many outcomes are looked at."""
        self._region = region
        kept, values = region.history.telling(slow, most)
        # Without a success it is taken to be neither fast nor slow.
        self._mean = float(values.mean()) if len(values) else (slow.most - slow.best) / 2
        points, values = region.points(kept), values - self._mean
        self._surrogate = Surrogate(region.times, points, values)
        latest, failed = region.history.latest(most)
        worthwhile = _WORTHWHILE_OF_FEW if len(latest) < FEW else _WORTHWHILE
        self._worthwhile = 0.0 if region.has_model else worthwhile
        self._failures: Surrogate | None = None
        if failed.any():
            tried = region.points(latest).without_model()
            self._failures = Surrogate(region.failures, tried, failed)
        self._best = float(np.min(values, initial=-self._mean))
        if len(waiting):
            pending = region.points(waiting)
            expected, _ = self._surrogate.predict(pending)
            kept, values = np.concatenate([kept, waiting]), np.concatenate([values, expected])
            self._surrogate = Surrogate(region.times, points + pending, values)
        self.fastest: Rows = kept[np.argsort(values, kind="stable")]
        self.gains: dict[int, float] = {}  # what is expected of each row, without boldness

    def __call__(self, rows: Rows, boldness: float) -> Floats:
        """The log of the improvement expected of each row."""
        points = self._region.points(rows)
        mean, deviation = self._surrogate.predict(points)
        plain = log_expected_improvement(self._best, mean, deviation)
        value = log_expected_improvement(self._best - self._worthwhile, mean, boldness * deviation)
        if self._failures is not None:
            failure, unsure = self._failures.predict(points.without_model())
            chance = normal_below((_HALFWAY - failure) / (unsure + _BLUR))
            averse = _AVERSION * np.log(np.maximum(chance, _LEAST_CHANCE))
            plain, value = plain + averse, value + averse
        self.gains.update(zip(rows.tolist(), np.exp(plain).tolist(), strict=True))
        # Equals are equal on every machine: the first of them is taken.
        return np.round(value, 6)


class _Candidates:
    """Unseen configurations of one contender that may be worth a trial."""

    def __init__(
        self, contender: int, region: _Region, unseen: Unseen, fastest: Rows,
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self._contender, self._region, self._unseen = contender, region, unseen
        self._fastest, self._rng = fastest, rng
        self._sampled = unseen.sample(contender, _RANDOM, rng)

    def best(self, judge: _Judge, boldness: float) -> tuple[float, int]:
        """The one of highest value, with that value."""
        rows = self._first()
        values = judge(rows, boldness)
        known, best = rows, (float(values.max()), int(rows[np.argmax(values)]))
        for _ in range(_CLIMBS):
            climbers = rows[np.argsort(-values, kind="stable")[:_CLIMBERS]]
            rows = np.setdiff1d(self._around(climbers, _CLIMB_LEAPS), known, assume_unique=True)
            if not len(rows):
                break
            values = judge(rows, boldness)
            if values.max() <= best[0]:
                break
            known, best = (
                np.union1d(known, rows),
                (float(values.max()), int(rows[np.argmax(values)])),
            )
        return best

    def expected_gain(self, judge: _Judge) -> float:
        """What all unseen ones together can be expected to gain at most: the sum of what is
        expected of each, where those that were not judged are like the random ones."""
        usual = float(np.mean([judge.gains[row] for row in self._sampled.tolist()]))
        others = self._unseen.left(self._contender) - len(judge.gains)
        return sum(judge.gains.values()) + others * usual

    def _around(self, rows: Rows, leaps: int) -> Rows:
        moves = self._region.moves
        return self._unseen.among(
            self._contender,
            np.concatenate([moves.steps(rows), moves.leaps(rows, leaps, self._rng)]),
        )

    def _first(self) -> Rows:
        rng, by_model = self._rng, self._region.by_model
        found = [self._sampled]
        if len(self._fastest):
            found.append(self._around(self._fastest[:_PARENTS], _LEAPS))
            found.append(self._region.moves.crossings(self._fastest[:_CROSSED], _CROSSINGS, rng))
        if len(by_model):
            found.append(by_model[:_BEST_BY_MODEL])
            ranks = rng.random(_GOOD_BY_MODEL) ** _GOOD_POWER * len(by_model)
            found.append(by_model[ranks.astype(np.int64)])
        return self._unseen.among(self._contender, np.concatenate(found))

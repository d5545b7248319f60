# SPDX-License-Identifier: Apache-2.0
"""A search in its course: what is known, what is under way, what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tunegen.search.opening import FirstPoint, Origin, opening
from tunegen.search.strategies import Strategy
from tunegen.search.unseen import Choices, Place, Unseen


class Course:
    """The opening, then whatever the strategy chooses; nothing twice."""

    def __init__(
        self,
        contenders: Sequence[Choices],
        strategy: type[Strategy],
        seed: int,
        first: Sequence[FirstPoint] = (),
    ) -> None:
        self.unseen = Unseen(contenders)
        self._strategy = strategy(contenders, seed)
        guided = any(contender.prior_us is not None for contender in contenders)
        points = strategy.model_points if guided else strategy.chance_points
        self._opening = opening(contenders, points, seed, first)
        self._point: tuple[Place, Origin] | None = None
        self._seed = seed
        self._under_way: set[int] = set()
        self._foreseen: tuple[int, Place] | None = None

    def know(self, place: Place, time: float | None) -> None:
        """What came of ``place``, which was no trial of this course."""
        self._take(place)
        self._strategy.known(place, time)

    def choose(
        self, number: int, allowed: Sequence[NDArray[np.bool_]] | None
    ) -> tuple[Place, Origin] | None:
        """What the trial ``number`` is to be: one of the rows ``allowed``, any if None. None
        where none of them is left."""
        unseen = self.unseen if allowed is None else self.unseen.only(allowed)
        if not unseen:
            return None
        if allowed is not None:
            return self._strategy.choose(unseen, self._rng(number)), "sampler"
        if (point := self._next_point()) is not None:
            return point
        if self._foreseen is None or self._foreseen[0] != number:
            self._foresee(number)
        assert self._foreseen is not None
        return self._foreseen[1], "sampler"

    def expected_gain(self, number: int) -> float | None:
        """The share of the best time that all configurations left together can be expected to save
        at most, when ``number`` is the next trial. None while the opening lasts, and of strategies
        that do not say."""
        if not self.unseen or self._next_point() is not None:
            return None
        self._foresee(number)
        return self._strategy.expected_gain

    def start(self, number: int, place: Place) -> None:
        """The trial ``number`` is ``place``, whoever chose it."""
        self._take(place)
        self._strategy.started(number, place)
        self._under_way.add(number)

    def is_under_way(self, number: int) -> bool:
        return number in self._under_way

    def finish(self, number: int, time: float | None) -> None:
        """What came of a trial that is under way."""
        self._foreseen = None
        self._under_way.remove(number)
        self._strategy.finished(number, time)

    def _take(self, place: Place) -> None:
        self._foreseen = None
        if place in self.unseen:  # two runs at once may have tried the same
            self.unseen.take(place)

    def _next_point(self) -> tuple[Place, Origin] | None:
        """Of the opening, as long as it lasts."""
        while self._point is None or self._point[0] not in self.unseen:
            self._point = next(self._opening, None)
            if self._point is None:
                return None
        return self._point

    def _foresee(self, number: int) -> None:
        self._foreseen = number, self._strategy.choose(self.unseen, self._rng(number))

    def _rng(self, number: int) -> np.random.Generator:
        # A generator of its own: what a proposal is does not depend on how often this process
        # has drawn before it.
        return np.random.default_rng((self._seed, number))

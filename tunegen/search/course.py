# SPDX-License-Identifier: Apache-2.0
"""A search in its course: what is known, what is under way, what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tunegen.search.opening import Origin, opening
from tunegen.search.strategies import Strategy
from tunegen.search.unseen import Choices, Place, Unseen


class Course:
    """The opening, then whatever the strategy chooses; nothing twice."""

    def __init__(self, contenders: Sequence[Choices], strategy: type[Strategy], seed: int) -> None:
        self.unseen = Unseen(contenders)
        self._strategy = strategy(contenders, seed)
        self._opening = opening(contenders, strategy.model_points, seed)
        self._seed = seed
        self._under_way: set[int] = set()

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
        if allowed is None:
            for place, origin in self._opening:
                if place in unseen:
                    return place, origin
        # A generator of its own: what a proposal is does not depend on how often this process
        # has drawn before it.
        rng = np.random.default_rng((self._seed, number))
        return self._strategy.choose(unseen, rng), "sampler"

    def start(self, number: int, place: Place) -> None:
        """The trial ``number`` is ``place``, whoever chose it."""
        self._take(place)
        self._strategy.started(number, place)
        self._under_way.add(number)

    def is_under_way(self, number: int) -> bool:
        return number in self._under_way

    def finish(self, number: int, time: float | None) -> None:
        """What came of a trial that is under way."""
        self._under_way.remove(number)
        self._strategy.finished(number, time)

    def _take(self, place: Place) -> None:
        if place in self.unseen:  # two runs at once may have tried the same
            self.unseen.take(place)

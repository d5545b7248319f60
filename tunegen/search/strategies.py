# SPDX-License-Identifier: Apache-2.0
"""What a way of choosing is, and the simplest two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from tunegen.search.unseen import Choices, Place, Unseen


class Strategy(Protocol):
    """A way of choosing among the configurations of ``contenders``.

    Times are positive, the lower the better, in any unit; a failure's is None. ``model_points``
    says how many points the model chooses before it, and ``chance_points`` how many chance does
    where there is no model. ``expected_gain`` belongs to what was chosen
    last: the share of the best time that all configurations left together can be expected to save
    at most, None where a strategy does not say.
    """

    model_points: ClassVar[int]
    chance_points: ClassVar[int]
    expected_gain: float | None

    def __init__(self, contenders: Sequence[Choices], seed: int) -> None: ...

    def known(self, place: Place, time: float | None) -> None:
        """What came of ``place``, proposed by whomever."""
        ...

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        """One of ``unseen``, of which there is at least one. ``rng`` is this proposal's own."""
        ...

    def started(self, number: int, place: Place) -> None:
        """The proposal ``number``, whoever chose it, is ``place``; its time will follow."""
        ...

    def finished(self, number: int, time: float | None) -> None:
        """What came of the proposal ``number``."""
        ...


class Forgetful:
    """A strategy that learns nothing."""

    model_points: ClassVar[int] = 0
    chance_points: ClassVar[int] = 0
    expected_gain: float | None = None

    def __init__(self, contenders: Sequence[Choices], seed: int) -> None:
        pass

    def known(self, place: Place, time: float | None) -> None:
        pass

    def started(self, number: int, place: Place) -> None:
        pass

    def finished(self, number: int, time: float | None) -> None:
        pass


class Chance(Forgetful):
    """Every configuration with equal chances: what a search has to beat."""

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        return unseen.random(rng)


class InOrder(Forgetful):
    """Every configuration in the order of the space, for those who want all of them."""

    def choose(self, unseen: Unseen, rng: np.random.Generator) -> Place:
        return unseen.first()

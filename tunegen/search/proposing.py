# SPDX-License-Identifier: Apache-2.0
"""The search itself: defaults, what is known from elsewhere, the points of the model, then the
sampler's choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tunegen.errors import NoValidConfig, UsageError, unknown
from tunegen.model import Config, Outcome, Trial
from tunegen.search.samplers import SAMPLERS, Sampler
from tunegen.search.unseen import Contender, Place, Unseen, differing

# Parameters in which those points differ from one another: neighbours of the best one would all
# share its fault where the model is wrong.
_APART = 3

Origin = Literal["default", "record", "study", "model", "sampler"]


@dataclass(frozen=True, slots=True)
class FirstPoint:
    """A configuration to try before the model's, of the spec of that name."""

    spec: str
    config: Config
    origin: Origin


@dataclass(frozen=True, eq=False)
class Proposal:
    """A configuration to try, numbered in the order of asking: from 0, or on from the past."""

    number: int
    contender: Contender
    config: Config
    origin: Origin


def make_search(
    name: str, contenders: Sequence[Contender], seed: int, first: Sequence[FirstPoint] = ()
) -> Search:
    """The search by the sampler ``name`` over all configurations of all ``contenders``.

    ``seed`` is a number of 32 bits. What ``first`` lists comes right after the defaults, in that
    order; what of it is not valid here is passed over.

    Raises :class:`UsageError` for an unknown name and another seed, :class:`NoValidConfig` where
    there is no contender or one has no configurations.
    """
    check_choice(name, seed)
    return Search(contenders, SAMPLERS[name], seed, first)


def check_choice(name: str, seed: int) -> None:
    """Raise :class:`UsageError` for a name of no sampler, or a seed of more than 32 bits."""
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed {seed} is not between 0 and 2^32 - 1")


class Search:
    """Proposes configurations and learns from their outcomes; the first contender's default is
    the operation's and comes first."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        sampler: type[Sampler],
        seed: int,
        first: Sequence[FirstPoint] = (),
    ) -> None:
        if not contenders:
            raise NoValidConfig("no spec to choose a configuration from")
        self._contenders = tuple(contenders)
        self._defaults = [
            Place(position, _default_row(contender))
            for position, contender in enumerate(contenders)
        ]
        self._seed = seed
        self._unseen = Unseen(self._contenders)
        self._sampler = sampler(self._contenders, self._unseen)
        self._opening = itertools.chain(
            ((place, "default") for place in self._defaults),
            [
                (place, point.origin)
                for point in first
                if (place := self._place(point.spec, point.config)) is not None
            ],
            itertools.islice(self._points_apart(), sampler.model_points),
        )
        self._next_number = 0
        self._begun = False
        self._under_way: set[int] = set()

    def tell_past(self, trials: Iterable[Trial]) -> None:
        """What came of earlier runs, in the order in which it became known.

        None of it is proposed again, the sampler learns from all of it, and numbers go on after
        the highest. A trial of no contender, or of a configuration that is not valid here, is
        passed over. The same past gives the same proposals.

        Raises ``ValueError`` after the first proposal.
        """
        if self._begun:
            raise ValueError("the past is told before the first proposal")
        for trial in trials:
            place = self._place(trial.spec, trial.config)
            if place is None:
                continue
            if place in self._unseen:  # two runs at once may have tried the same
                self._unseen.take(place)
            self._sampler.known(place, trial.outcome)
            self._next_number = max(self._next_number, trial.number + 1)

    def _place(self, spec: str, config: Config) -> Place | None:
        """Where a configuration is; None where no contender has it."""
        for position, contender in enumerate(self._contenders):
            if contender.spec.name == spec:
                row = contender.table.row(config)
                return None if row is None else Place(position, row)
        return None

    def ask(self) -> Proposal | None:
        """The next configuration, or None once every one has been proposed."""
        if not self._unseen:
            return None
        number = self._next_number
        place, origin = self._choose(number)
        self._unseen.take(place)
        contender = self._contenders[place.contender]
        proposal = Proposal(number, contender, contender.table.config(place.row), origin)
        self._sampler.started(number, place)
        self._under_way.add(number)
        self._next_number += 1
        self._begun = True
        return proposal

    def _choose(self, number: int) -> tuple[Place, Origin]:
        for place, origin in self._opening:
            if place in self._unseen:
                return place, origin
        # A generator of its own: what a proposal is does not depend on how often this process
        # has drawn before it.
        return self._sampler.choose(np.random.default_rng((self._seed, number))), "sampler"

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """What came of a proposal. The order of telling is free, but part of what decides.

        Raises ``ValueError`` for a proposal that is not under way.
        """
        if proposal.number not in self._under_way:
            raise ValueError(f"proposal {proposal.number} is not under way")
        self._under_way.remove(proposal.number)
        self._sampler.finished(proposal.number, outcome)

    def _points_apart(self) -> Iterator[tuple[Place, Origin]]:
        """The best points by the model, or random ones without it, apart from one another and
        from the defaults. Contenders take turns, since the model errs least within one spec."""
        rng = np.random.default_rng(self._seed)
        ranks = [
            rng.random(len(contender.table))
            if contender.prior_us is None
            else np.nan_to_num(contender.prior_us, nan=np.inf, posinf=np.inf)
            for contender in self._contenders
        ]
        gaps = [
            differing(contender.table, contender.table.indices[:, place.row])
            for contender, place in zip(self._contenders, self._defaults, strict=True)
        ]
        taking_turns = list(range(len(self._contenders)))
        while taking_turns:
            for position in tuple(taking_turns):
                row = _best_apart(ranks[position], gaps[position])
                if row is None:
                    taking_turns.remove(position)
                    continue
                contender = self._contenders[position]
                gap = differing(contender.table, contender.table.indices[:, row])
                np.minimum(gaps[position], gap, out=gaps[position])
                yield Place(position, row), "sampler" if contender.prior_us is None else "model"


def _default_row(contender: Contender) -> int:
    """Raises :class:`UsageError` where the default breaks a constraint: an error of the spec."""
    row = contender.table.require(contender.spec.name).row(contender.default)
    if row is None:
        reasons = "; ".join(contender.table.space.violated(contender.default))
        raise UsageError(
            f"the default of {contender.spec.name} is no valid configuration: "
            f"{contender.default}: {reasons or 'its values are not in the space'}"
        )
    return row


def _best_apart(rank: NDArray[np.float64], gaps: NDArray[np.uint8]) -> int | None:
    """The row of least ``rank`` as far as possible from those chosen; None where no row is left
    whose rank is finite."""
    for apart in range(_APART, 0, -1):
        candidates = np.where(gaps >= apart, rank, np.inf)
        row = int(np.argmin(candidates))
        if np.isfinite(candidates[row]):
            return row
    return None

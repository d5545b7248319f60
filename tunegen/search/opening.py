# SPDX-License-Identifier: Apache-2.0
"""What is tried before there is anything to learn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tunegen.errors import UsageError
from tunegen.model import Config
from tunegen.search.unseen import Choices, Place, differing

# Parameters in which those points differ from one another: neighbours of the best one would all
# share its fault where the model is wrong.
_APART = 3

# Times that the model puts so close, in parts of one, are those of one configuration to it: what
# they differ in it does not see, and many of them would be of one tile.
_ALIKE = 1e-3

# How many times slower than the best one by the model the best of a contender may be.
_BEHIND = 1.5

Origin = Literal["default", "record", "study", "model", "sampler"]


@dataclass(frozen=True, slots=True)
class FirstPoint:
    """A configuration to try before the model's, of the spec of that name."""

    spec: str
    config: Config
    origin: Origin


def opening(
    contenders: Sequence[Choices], points: int, seed: int, first: Sequence[FirstPoint] = ()
) -> Iterator[tuple[Place, Origin]]:
    """The defaults, what is ``first``, then so many points of the model, which are the same
    whatever is first. Of ``first`` what is not valid is passed over.

    Raises :class:`UsageError` for a default that breaks a constraint: an error of the spec.
    """
    defaults = [
        Place(position, _default_row(contender))
        for position, contender in enumerate(contenders)
        if contender.default is not None
    ]
    return itertools.chain(
        ((place, "default") for place in defaults),
        _places(contenders, first),
        itertools.islice(_points_apart(contenders, defaults, seed), points),
    )


def _places(
    contenders: Sequence[Choices], first: Sequence[FirstPoint]
) -> Iterator[tuple[Place, Origin]]:
    positions = {contender.name: position for position, contender in enumerate(contenders)}
    for point in first:
        position = positions.get(point.spec)
        if position is None:
            continue
        row = contenders[position].table.row(point.config)
        if row is not None:
            yield Place(position, row), point.origin


def _points_apart(
    contenders: Sequence[Choices], defaults: Sequence[Place], seed: int
) -> Iterator[tuple[Place, Origin]]:
    """The best points by the model, or random ones without it, apart from one another and from
    the defaults. Contenders take turns, since the model errs least within one spec; those that
    it puts behind have their defaults only."""
    rng = np.random.default_rng(seed)
    ranks = [
        rng.random(len(contender.table))
        if contender.prior_us is None
        else np.nan_to_num(contender.prior_us, nan=np.inf, posinf=np.inf)
        for contender in contenders
    ]
    gaps = [np.full(len(c.table), np.iinfo(np.uint8).max, np.uint8) for c in contenders]
    alike = [np.zeros(len(c.table), dtype=np.bool_) for c in contenders]

    def keep_from(place: Place) -> None:
        position, table = place.contender, contenders[place.contender].table
        gap = differing(table, table.indices[:, place.row])
        np.minimum(gaps[position], gap, out=gaps[position])

    def keep_from_like(place: Place) -> None:
        rank = ranks[place.contender]
        near = np.abs(rank - rank[place.row]) <= _ALIKE * rank[place.row]
        np.logical_or(alike[place.contender], near, out=alike[place.contender])

    for place in defaults:
        keep_from(place)
    limit = _BEHIND * min(
        (rank.min() for rank, c in zip(ranks, contenders, strict=True) if c.prior_us is not None),
        default=np.inf,
    )
    taking_turns = [
        position
        for position, contender in enumerate(contenders)
        if contender.prior_us is None or ranks[position].min() <= limit
    ]
    while taking_turns:
        for position in tuple(taking_turns):
            without = contenders[position].prior_us is None
            row = _best_apart(ranks[position], gaps[position], alike[position])
            if row is None:
                taking_turns.remove(position)
                continue
            keep_from(Place(position, row))
            if not without:
                keep_from_like(Place(position, row))
            yield Place(position, row), "sampler" if without else "model"


def _default_row(contender: Choices) -> int:
    assert contender.default is not None
    row = contender.table.row(contender.default)
    if row is None:
        config = contender.table.space.config(contender.default)
        reasons = "; ".join(contender.table.space.violated(config))
        raise UsageError(
            f"the default of {contender.name} is no valid configuration: {config}: {reasons}"
        )
    return row


def _best_apart(
    rank: NDArray[np.float64], gaps: NDArray[np.uint8], alike: NDArray[np.bool_]
) -> int | None:
    """The row of least ``rank`` as far as possible from those chosen, and not ``alike`` as long as
    there are others; None where no row is left whose rank is finite."""
    for apart, like in ((_APART, False), *((apart, True) for apart in range(_APART, 0, -1))):
        allowed = gaps >= apart
        candidates = np.where(allowed if like else allowed & ~alike, rank, np.inf)
        row = int(np.argmin(candidates))
        if np.isfinite(candidates[row]):
            return row
    return None

# SPDX-License-Identifier: Apache-2.0
"""What there is to choose from, and what of it has not been proposed yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tunegen.model import Config, ConfigTable, KernelSpec


class Choices(Protocol):
    """All valid configurations of one spec.

    ``prior_us`` is the model's time of every row of ``table``, infinite where it cannot run;
    without a model it is None. ``default`` is tried first, where there is one.
    """

    @property
    def name(self) -> str: ...
    @property
    def table(self) -> ConfigTable: ...
    @property
    def default(self) -> Mapping[str, int] | None: ...
    @property
    def prior_us(self) -> NDArray[np.float64] | None: ...


@dataclass(frozen=True, eq=False)
class Contender:
    """A kernel spec that takes part in a search, with its :class:`Choices`."""

    spec: KernelSpec
    table: ConfigTable
    default: Config
    prior_us: NDArray[np.float64] | None = None

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, eq=False)
class NamedSpace:
    """:class:`Choices` of something that is no kernel spec."""

    name: str
    table: ConfigTable
    default: Mapping[str, int] | None = None
    prior_us: NDArray[np.float64] | None = None


class Place(NamedTuple):
    """A configuration by position: which contender, which row of its table."""

    contender: int
    row: int


class Unseen:
    """The configurations that have not been proposed yet."""

    def __init__(self, contenders: Sequence[Choices]) -> None:
        self._contenders = contenders
        self._seen = [np.zeros(len(contender.table), dtype=bool) for contender in contenders]
        self._left = [len(contender.table) for contender in contenders]

    def only(self, allowed: Sequence[NDArray[np.bool_]]) -> Unseen:
        """Those of them that are in ``allowed``, a mask of the rows of each contender."""
        part = Unseen(self._contenders)
        part._seen = [seen | ~mask for seen, mask in zip(self._seen, allowed, strict=True)]
        part._left = [int(np.count_nonzero(~seen)) for seen in part._seen]
        return part

    def __len__(self) -> int:
        return sum(self._left)

    def __contains__(self, place: Place) -> bool:
        return not self._seen[place.contender][place.row]

    def left(self, contender: int) -> int:
        """How many configurations of one contender there are."""
        return self._left[contender]

    def not_exhausted(self, contender: int) -> int:
        """The contender itself, or the one with most left where it has none."""
        if self._left[contender]:
            return contender
        return max(range(len(self._left)), key=self.left)

    def take(self, place: Place) -> None:
        """Count ``place`` as seen; it must not have been."""
        assert place in self
        self._seen[place.contender][place.row] = True
        self._left[place.contender] -= 1

    def first(self) -> Place:
        """The first of them in the order of the contenders and their tables."""
        return self._nth(0)

    def random(self, rng: np.random.Generator) -> Place:
        """Any of them with equal chances."""
        return self._nth(int(rng.integers(len(self))))

    def _nth(self, nth: int) -> Place:
        for contender, left in enumerate(self._left):
            if nth < left:
                return Place(contender, int(np.flatnonzero(~self._seen[contender])[nth]))
            nth -= left
        raise IndexError("every configuration has been seen")

    def among(self, contender: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``rows`` that have not been proposed, in order and once each."""
        rows = np.unique(rows)
        return rows[~self._seen[contender][rows]]

    def sample(self, contender: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Up to ``count`` rows at random, at least one where there is one."""
        rows = self.among(contender, rng.integers(len(self._seen[contender]), size=count))
        if len(rows):
            return rows
        left = np.flatnonzero(~self._seen[contender])
        return rng.permutation(left)[:count]

    def nearest(
        self, contender: int, indices: NDArray[np.int64], rng: np.random.Generator
    ) -> Place:
        """The one closest to ``indices`` (a position in the values of each parameter, valid or
        not): fewest parameters changed, then fewest steps, then fastest by the model."""
        seen = self._seen[contender]
        table = self._contenders[contender].table
        changed = differing(table, indices)
        changed[seen] = np.iinfo(changed.dtype).max
        rows = np.flatnonzero(changed == changed.min())
        steps = np.abs(table.indices[:, rows].astype(np.int64) - indices[:, None]).sum(axis=0)
        rows = rows[steps == steps.min()]
        prior_us = self._contenders[contender].prior_us
        if prior_us is None:
            return Place(contender, int(rng.choice(rows)))
        return Place(contender, int(rows[np.argmin(prior_us[rows])]))


def differing(table: ConfigTable, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """In how many parameters each row of ``table`` differs from a point: (rows,)."""
    count = np.zeros(len(table), dtype=np.uint8)
    for column, index in zip(table.indices, indices, strict=True):
        count += column != column.dtype.type(index)
    return count

# SPDX-License-Identifier: Apache-2.0
"""Moves through a space: from configurations to valid ones nearby."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tunegen.model import ConfigTable

Rows = NDArray[np.int64]

# Parameters that a leap changes: constraints tie some together, so that two or three must change
# for one step.
_LEAST_CHANGED, _MOST_CHANGED = 2, 4


class Moves:
    """Valid configurations reached from others, all by their rows in a table.

    What is asked for and not valid is left out; a row may be returned more than once.
    """

    def __init__(self, table: ConfigTable) -> None:
        self._indices = table.indices
        self._sizes = [len(parameter.values) for parameter in table.space.parameters]
        self._free = [position for position, size in enumerate(self._sizes) if size > 1]
        # Rows are found by a sum of random numbers, one for each value: it wraps around, so that
        # no space is too large, and what is found is compared.
        rng = np.random.default_rng(0)
        self._codes = [rng.integers(1 << 64, size=size, dtype=np.uint64) for size in self._sizes]
        sums = self._sums(self._indices)
        self._order = np.argsort(sums, kind="stable")
        self._sorted = sums[self._order]

    def steps(self, rows: Rows) -> Rows:
        """One parameter changed, in every way."""
        start = self._indices[:, rows]
        reached = []
        for position in self._free:
            for value in range(self._sizes[position]):
                step = start.copy()
                step[position] = value
                reached.append(step)
        return self._find(np.concatenate(reached, axis=1)) if reached else rows[:0]

    def leaps(self, rows: Rows, each: int, rng: np.random.Generator) -> Rows:
        """``each`` times from each row, a few parameters changed at random."""
        indices = np.repeat(self._indices[:, rows], each, axis=1)
        count = indices.shape[1]
        changed = rng.integers(_LEAST_CHANGED, _MOST_CHANGED + 1, count)
        ranks = rng.random((len(self._free), count)).argsort(axis=0).argsort(axis=0)
        for position, rank in zip(self._free, ranks, strict=True):
            values = rng.integers(self._sizes[position], size=count)
            indices[position] = np.where(rank < changed, values, indices[position])
        return self._find(indices)

    def crossings(self, rows: Rows, count: int, rng: np.random.Generator) -> Rows:
        """``count`` times two of the rows, each parameter of either."""
        left, right = (self._indices[:, rng.choice(rows, count)] for _ in range(2))
        return self._find(np.where(rng.random(left.shape) < 0.5, left, right))

    def _sums(self, indices: NDArray[np.integer]) -> NDArray[np.uint64]:
        sums = np.zeros(indices.shape[1], dtype=np.uint64)
        for codes, column in zip(self._codes, indices, strict=True):
            sums += codes[column]
        return sums

    def _find(self, indices: NDArray[np.integer]) -> Rows:
        """The rows of those that are valid."""
        places = np.searchsorted(self._sorted, self._sums(indices))
        rows = self._order[np.minimum(places, len(self._order) - 1)]
        found: Rows = rows[(self._indices[:, rows] == indices).all(axis=0)]
        return found

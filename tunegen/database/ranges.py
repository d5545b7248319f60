# SPDX-License-Identifier: Apache-2.0
"""How far a record's problem is from the one asked for, and whether its range covers that.

The range is stated, not guessed from what happens to be nearest: the same dtype, layout and class
attributes (beta, alignment), and each size and stride within ``RANGE_FACTOR`` of the record's.
What was tuned on squares says nothing about eight rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tunegen.model import Operation, Problem

# Up to twice or half of each size: the same tile then cuts the work into a like number of blocks.
# At four times fewer, most of a device can be idle, which calls for another configuration.
RANGE_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Relation:
    """A record's problem beside the one asked for, both of one class.

    ``sizes`` and ``strides`` give the factor between the two by name, always 1 or more; infinite
    where just one of the two is 0.
    """

    same: bool
    sizes: Mapping[str, float]
    strides: Mapping[str, float]

    @property
    def covers(self) -> bool:
        factors = (*self.sizes.values(), *self.strides.values())
        return all(factor <= RANGE_FACTOR for factor in factors)

    @property
    def distance(self) -> tuple[float, float]:
        """The sum of log2 of the factors of the sizes, then that of the strides."""
        return (
            sum(math.log2(factor) for factor in self.sizes.values()),
            sum(math.log2(factor) for factor in self.strides.values()),
        )

    def __str__(self) -> str:
        name, factor = max({**self.strides, **self.sizes}.items(), key=lambda item: item[1])
        if math.isinf(factor):
            return f"one of the two has {name}=0"
        return f"{name} differs by a factor of {factor:.3g}"


def relate(
    operation: Operation, growing: frozenset[str], tuned: Problem, asked: Problem
) -> Relation | None:
    """How ``tuned`` relates to ``asked``; None where they differ in more than sizes and strides.

    ``growing`` are the :meth:`Operation.growing_attributes` of ``asked``.
    """
    kinds = [
        (p.operation, p.dtype, p.layout, {name for name, _ in p.sizes}) for p in (tuned, asked)
    ]
    if kinds[0] != kinds[1]:
        return None
    there, here = _attributes(operation, tuned), _attributes(operation, asked)
    if there.keys() != here.keys():
        return None
    if any(there[name] != here[name] for name in here if name not in growing):
        return None
    tuned_sizes, asked_sizes = dict(tuned.sizes), dict(asked.sizes)
    return Relation(
        same=tuned_sizes == asked_sizes and there == here,
        sizes={name: _factor(tuned_sizes[name], asked_sizes[name]) for name in asked_sizes},
        strides={name: _factor(there[name], here[name]) for name in sorted(growing)},
    )


def _attributes(operation: Operation, problem: Problem) -> dict[str, int]:
    # A record from before an operation had some attribute stands for that attribute's default.
    defaults = operation.attributes(dict(problem.sizes), problem.dtype, problem.layout)
    return {**defaults, **dict(problem.attributes)}


def _factor(left: int, right: int) -> float:
    if left == right:
        return 1.0
    if min(left, right) <= 0:
        return math.inf
    return max(left, right) / min(left, right)

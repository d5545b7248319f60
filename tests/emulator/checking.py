# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel computes what its operation says, element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from emulator.call import Case, run
from emulator.numbers import UNDERFLOW, UNIT_ROUNDOFF, load, store
from tunegen.model import ACCUMULATOR, KernelSpec, Problem

Inputs = tuple[dict[str, np.ndarray], dict[str, float]]


def inputs(spec: KernelSpec, problem: Problem, seed: int, *, integers: bool = False) -> Inputs:
    """Operands that a call reads, as stored, and scalars: normal numbers, or -1, 0 and 1 with
    whole scalars, whose sums are exact in any order."""
    random = np.random.default_rng(seed)
    operands = {}
    for array in spec.operation.arrays(problem):
        if array.role == "out":
            continue
        if integers:
            values = random.integers(-1, 2, array.shape).astype(np.float64)
        else:
            values = random.standard_normal(array.shape)
        operands[array.name] = store(values, array.dtype)
    choices = (-2.0, 3.0) if integers else (-1.5, 0.75)
    names = [name for name, _ in spec.operation.scalars]
    return operands, {name: float(random.choice(choices)) for name in names}


def check(
    case: Case,
    seed: int = 0,
    *,
    integers: bool = False,
    residues: Mapping[str, int] | None = None,
) -> None:
    """Run one call on drawn inputs and hold every element against the operation's reference.

    An element may be off by its own rounding plus ``4 u sqrt(K)`` times what the reference gives
    for the magnitudes of all inputs, u being the accumulator's unit roundoff and K the
    multiply-adds per element: rounding errors of a sum add up like a random walk. Integer inputs
    must come out exact. Raises :class:`emulator.call.WrongKernel`.
    """
    operation, problem = case.spec.operation, case.problem
    operands, scalars = inputs(case.spec, problem, seed, integers=integers)
    found = run(case, operands, scalars, residues=residues, seed=seed)
    wide = {name: load(values, case.arrays[name].dtype) for name, values in operands.items()}
    expected = operation.reference(problem, wide, scalars)
    magnitudes = operation.reference(
        problem,
        {name: np.abs(values) for name, values in wide.items()},
        {name: abs(value) for name, value in scalars.items()},
    )
    for name, stored in found.items():
        dtype = case.arrays[name].dtype
        actual, wanted = load(stored, dtype), expected[name]
        if integers:
            wanted = load(store(wanted, dtype), dtype)
            allowed = np.zeros(wanted.shape)
        else:
            terms = max(1.0, operation.flops(problem) / 2 / max(1, wanted.size))
            growth = 4 * UNIT_ROUNDOFF[ACCUMULATOR[dtype]] * math.sqrt(terms)
            allowed = UNIT_ROUNDOFF[dtype] * np.abs(wanted) + growth * magnitudes[name]
            allowed += UNDERFLOW[dtype]
        bad = np.argwhere(~(np.abs(actual - wanted) <= allowed))  # NaN is bad
        if len(bad):
            first = tuple(map(int, bad[0]))
            raise case.wrong(
                "wrong_value",
                f"{len(bad)} of {wanted.size} elements of {name} are wrong, the first at {first}: "
                f"{actual[first]!r} instead of {wanted[first]!r}",
            )

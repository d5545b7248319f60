# SPDX-License-Identifier: Apache-2.0
"""From the operands of a call to the sizes of its problem.

An operand's shape and strides are formulas. One that is a name alone (``K``, ``lda``) gives that
name its value, every other one is checked against what comes out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunegen.errors import PlanError, UsageError, unknown
from tunegen.model import Operand, evaluate
from tunegen.runtime.arrays import View, dense_strides
from tunegen.runtime.program import ALIGN, Program


def resolve(program: Program, views: Sequence[View], given: Mapping[str, int]) -> dict[str, int]:
    """Every size and attribute of a call but the alignment, which hangs on the addresses.

    Sizes come from ``given`` and from the shapes of the operands, leading dimensions from the
    strides or, where there are none, from the rows being adjacent. Raises :class:`UsageError` for
    what is missing, contradictory or no row-major array, and :class:`PlanError` for what the
    program was not made for.
    """
    found = _Names(program, _checked(program, given))
    arrays = [
        None if view.shape is None else _oriented(program, operand, view)
        for operand, view in zip(program.operands, views, strict=True)
    ]
    for operand, array in zip(program.operands, arrays, strict=True):
        if array is not None:
            for formula, extent in zip(operand.shape, array.shape, strict=True):
                found.match(operand, formula, extent, array)
    found.complete()
    multiples = {
        limit.quantity: limit.value for limit in program.limits if limit.rule == "multiple_of"
    }
    for operand, array in zip(program.operands, arrays, strict=True):
        extents = found.extents(operand, array)
        _match_strides(found, operand, extents, array, multiples)
    return found.values


@dataclass(frozen=True, slots=True)
class _Array:
    """An operand's axes in the order of its formulas; ``transposed`` where they were swapped."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    transposed: bool = False


@dataclass(slots=True)
class _Names:
    """The names known so far, and which operand each is from."""

    program: Program
    values: dict[str, int]
    origin: dict[str, str] = field(default_factory=dict)

    def match(
        self, operand: Operand, formula: int | str, extent: int, array: _Array | None
    ) -> None:
        """Take or compare an extent; formulas that are not one name wait for :meth:`extents`."""
        if not isinstance(formula, str) or formula not in self.program.problem:
            return
        known = self.values.setdefault(formula, extent)
        source = self.origin.setdefault(formula, operand.name)
        if known != extent:
            other = f"{known} in {source}" if source != operand.name else f"given as {known}"
            raise UsageError(
                f"{formula} is {extent} in {operand.name} and {other}",
                hint=_stored(operand, array),
            )

    def complete(self) -> None:
        """Fill in what no operand can tell; sizes that are missing are an error."""
        problem, variable = self.program.problem, self.program.variable
        if self.program.batch_axis:
            self.values.setdefault(self.program.batch_axis, 1)
        self.values.update(
            {name: value for name, value in problem.items() if name not in {*variable, ALIGN}}
        )
        leading = {f for operand in self.program.operands for f in operand.strides}
        missing = sorted(variable - leading - self.values.keys())
        if missing:
            raise UsageError(
                f"{', '.join(missing)} cannot be told from addresses alone",
                hint=f"sizes={{{', '.join(f'{name!r}: ...' for name in missing)}}}",
            )

    def extents(self, operand: Operand, array: _Array | None) -> tuple[int, ...]:
        """The operand's shape; raises :class:`UsageError` where the array has another."""
        extents = tuple(evaluate(formula, self.values) for formula in operand.shape)
        if array is not None and array.shape != extents:
            raise UsageError(
                f"{operand.name} has shape {array.shape}, {extents} is needed",
                hint=_stored(operand, array),
            )
        return extents


def _checked(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """The sizes that the caller gave, as numbers."""
    values = {}
    for name, value in given.items():
        if name not in program.problem or name == ALIGN:
            raise unknown(f"size of {program.name}", name, sorted(set(program.problem) - {ALIGN}))
        try:
            values[name] = operator.index(value)
        except TypeError as error:
            raise UsageError(f"{name}={value!r} is no whole number") from error
        if values[name] < 0:
            raise UsageError(f"{name} is {value}, sizes are 0 or more")
        made_for = program.problem[name]
        if name not in program.variable and values[name] != made_for:
            raise PlanError(f"{program.name} was made for {name}={made_for}, not {value}")
    return values


def _oriented(program: Program, operand: Operand, view: View) -> _Array:
    """The array with its axes in the operand's order.

    A batch of one may be left out. A transposed view of what is stored, as in ``weight.T`` for
    an operand that is stored as ``weight``, is turned back where its shape says which it is.
    """
    assert view.shape is not None and view.strides is not None  # noqa: PT018
    shape, strides, axes = view.shape, view.strides, len(operand.shape)
    if len(shape) == axes - 1 and operand.shape[0] == program.batch_axis:
        shape, strides = (1, *shape), (0, *strides)
    if len(shape) != axes:
        raise UsageError(
            f"{operand.name} has shape {tuple(view.shape)}", hint=_stored(operand, None)
        )
    if 0 in shape:
        return _Array(tuple(shape), dense_strides(shape))
    if operand.strides[-1] != 1 or shape[-1] == 1 or strides[-1] == 1:
        return _Array(tuple(shape), tuple(strides))
    if axes < 2 or not (strides[-2] == 1 or shape[-2] == 1):
        raise UsageError(
            f"{operand.name} has strides {tuple(view.strides)}: the elements of a row are not "
            "adjacent",
            hint="give a contiguous copy",
        )
    if shape[-1] == shape[-2]:
        raise UsageError(
            f"{operand.name} is square and transposed in memory, which can mean two things",
            hint=f"transpose it back: {_stored(operand, None)}",
        )
    return _Array(
        (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2]), True
    )


def _match_strides(
    found: _Names,
    operand: Operand,
    extents: tuple[int, ...],
    array: _Array | None,
    multiples: Mapping[str, int],
) -> None:
    """Take or compare the strides of an operand, from the innermost axis outwards."""
    dense = 1
    for axis in reversed(range(len(extents))):
        formula, extent = operand.strides[axis], extents[axis]
        crossed = extent > 1 and 0 not in extents
        if isinstance(formula, str) and formula in found.program.problem:
            stride = _leading(axis, extents, array, dense, multiples.get(formula, 1))
            found.values.setdefault(formula, stride)
        expected = evaluate(formula, found.values)
        if crossed and array is not None and array.strides[axis] != expected:
            raise UsageError(
                f"{operand.name} has stride {array.strides[axis]} along {operand.shape[axis]}, "
                f"{expected} is needed",
                hint=_stored(operand, array),
            )
        if crossed and expected < dense:
            raise UsageError(
                f"{operand.name} has stride {expected} along {operand.shape[axis]}, less than "
                f"the {dense} elements that it steps over"
            )
        dense = max(1, extent) * expected


def _leading(
    axis: int, extents: tuple[int, ...], array: _Array | None, dense: int, multiple: int
) -> int:
    """A leading dimension: the stride of the first axis from ``axis`` outwards that is crossed.

    Where none is, any will do, and what satisfies the program's limits is taken.
    """
    outwards = [i for i in range(axis, -1, -1) if extents[i] > 1]
    if 0 in extents or not outwards:
        return -(-dense // multiple) * multiple
    return dense if array is None else array.strides[outwards[0]]


def _stored(operand: Operand, array: _Array | None) -> str:
    axes = ", ".join(map(str, operand.shape))
    also = "; it was taken for a transposed view" if array is not None and array.transposed else ""
    return f"{operand.name} is stored row by row as ({axes}){also}"

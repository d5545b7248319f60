# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on sizes that are not known yet.

A launch plan is written once, as plain arithmetic. Given numbers it yields numbers; given
:class:`Expr` symbols it yields the formulas that a bundle's manifest hands to other programs, so
that one shipped kernel serves every problem it covers.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np

# CPython 3.11 counts the depth of a syntax tree for all threads together, and raises SystemError
# where another one parses before it is through: the collector may let that one run.
_PARSING = threading.Lock()


class Expr:
    """An integer formula over named sizes. ``str`` gives C, which is valid Python but for ``/``.

    All sizes are non-negative, so C's division and Python's ``//`` agree. ``min(a, b)`` and
    ``max(a, b)`` are Python's; C has to be given them.

    >>> str(ceil_div(Expr("M"), 128) * Expr("N"))
    '(M + 127) / 128 * N'
    """

    __slots__ = ("_precedence", "text")

    def __init__(self, text: str, precedence: int = 3) -> None:
        self.text = text
        self._precedence = precedence  # 1 sum, 2 product, 3 atom or call

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def _binary(self, sign: str, left: Expr | int, right: Expr | int, level: int) -> Expr:
        def wrap(side: Expr | int, minimum: int) -> str:
            if isinstance(side, Expr) and side._precedence < minimum:
                return f"({side.text})"
            return str(side)

        # The right operand binds tighter: a - (b - c) and a / (b * c) keep their brackets.
        return Expr(f"{wrap(left, level)} {sign} {wrap(right, level + 1)}", level)

    def __add__(self, other: Expr | int) -> Expr:
        return self if _is(other, 0) else self._binary("+", self, other, 1)

    def __radd__(self, other: Expr | int) -> Expr:
        return self if _is(other, 0) else self._binary("+", other, self, 1)

    def __sub__(self, other: Expr | int) -> Expr:
        return self if _is(other, 0) else self._binary("-", self, other, 1)

    def __rsub__(self, other: Expr | int) -> Expr:
        return self._binary("-", other, self, 1)

    def __mul__(self, other: Expr | int) -> Expr:
        return self if _is(other, 1) else self._binary("*", self, other, 2)

    def __rmul__(self, other: Expr | int) -> Expr:
        return self if _is(other, 1) else self._binary("*", other, self, 2)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return self if _is(other, 1) else self._binary("/", self, other, 2)

    def __rfloordiv__(self, other: Expr | int) -> Expr:
        return self._binary("/", other, self, 2)

    def __mod__(self, other: Expr | int) -> Expr:
        return self._binary("%", self, other, 2)


def _is(value: Expr | int, number: int) -> bool:
    return not isinstance(value, Expr) and value == number


def ceil_div(numerator: Any, denominator: Any) -> Any:
    """``numerator / denominator`` rounded up, for numbers, NumPy columns and :class:`Expr`."""
    if isinstance(denominator, int) and denominator == 1:
        return numerator
    return (numerator + (denominator - 1)) // denominator


def minimum(left: Any, right: Any) -> Any:
    """The smaller one, for numbers, NumPy columns and :class:`Expr`."""
    return _choose("min", np.minimum, min, left, right)


def maximum(left: Any, right: Any) -> Any:
    """The larger one, for numbers, NumPy columns and :class:`Expr`."""
    return _choose("max", np.maximum, max, left, right)


def _choose(name: str, columns: Any, scalars: Any, left: Any, right: Any) -> Any:
    if isinstance(left, Expr) or isinstance(right, Expr):
        return Expr(f"{name}({left}, {right})")
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return columns(left, right)
    return scalars(left, right)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {"min": min, "max": max}


@overload
def evaluate(formula: int, sizes: Mapping[str, int]) -> int: ...
@overload
def evaluate(formula: str, sizes: Mapping[str, int]) -> int: ...
def evaluate(formula: int | str, sizes: Mapping[str, int]) -> int:
    """The value of a formula written by ``str(Expr)`` for the given sizes.

    Raises ``KeyError`` for a size that is not given, ``ValueError`` for text that is no formula.
    """
    if isinstance(formula, int):
        return formula

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                return -number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](value(left), value(right))
        raise ValueError(f"not a size formula: {formula!r}")

    try:
        with _PARSING:
            tree = ast.parse(formula, mode="eval")
        return value(tree.body)
    except SyntaxError as error:
        raise ValueError(f"not a size formula: {formula!r}") from error


def formula(value: int | Expr) -> int | str:
    """A number as it is, an :class:`Expr` as text: what launches and arguments store."""
    return str(value) if isinstance(value, Expr) else int(value)

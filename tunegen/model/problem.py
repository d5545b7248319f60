# SPDX-License-Identifier: Apache-2.0
"""What is to be computed: dtypes, arrays, operations and problems."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunegen.errors import UsageError, unknown
from tunegen.model.expr import Expr, formula

# Bytes per element. The names are the ones used everywhere: CLI, Python, JSON and CUDA.
DTYPE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}

# Unit roundoff: the largest relative error of rounding to nearest.
ROUNDOFF: dict[str, float] = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}

# Arithmetic is done in this type: 16-bit inputs accumulate in fp32.
ACCUMULATOR: dict[str, str] = {"fp64": "fp64", "fp32": "fp32", "fp16": "fp32", "bf16": "fp32"}


@dataclass(frozen=True, slots=True)
class Array:
    """One operand: row-major logical ``shape`` with element ``strides`` in device memory.

    ``role`` says what a call does to it: "in" reads, "out" writes every element without reading,
    "inout" reads and writes.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    role: Literal["in", "out", "inout"]

    @property
    def elements(self) -> int:
        """Elements from the first to the last one, gaps between rows included; 0 when empty."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of an operation for whatever sizes: ``shape`` and ``strides``, in elements, are
    numbers or formulas over the problem's sizes and attributes."""

    name: str
    dtype: str
    role: Literal["in", "out", "inout"]
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]


@dataclass(frozen=True)
class Problem:
    """One problem of an operation: sizes, dtype, layout and the operation's further attributes.

    Made by :meth:`Operation.problem`, which checks it and fills in every default. Sizes and
    attributes are read by name: ``problem.M``, ``problem.lda``.
    """

    operation: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    layout: str = ""
    attributes: tuple[tuple[str, int], ...] = ()

    def __getattr__(self, name: str) -> int:
        # While a problem is unpickled it has no fields yet: asking for them would come here again.
        fields = vars(self)
        named: tuple[tuple[str, int], ...]
        named = (*fields.get("sizes", ()), *fields.get("attributes", ()))
        for key, value in named:
            if key == name:
                return value
        raise AttributeError(f"{fields.get('operation')} has no size or attribute {name!r}")

    @property
    def names(self) -> dict[str, int]:
        """Sizes and attributes together, as a launch plan's formulas see them."""
        return dict(self.sizes + self.attributes)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class EdgeProblem:
    """A problem at which kernels tend to go wrong. ``offsets`` shifts operands from an aligned
    address, in bytes."""

    problem: Problem
    offsets: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Operation:
    """What a kernel computes, apart from how.

    ``axes`` name the sizes in the order in which a problem is written (``4096x4096x4096``);
    ``batch_axis`` may stand before them. ``attributes`` computes further values that a problem
    fixes (leading dimensions, whether C is read), with their defaults; one with the name of a
    scalar says whether that factor may be other than 0. ``check`` raises :class:`UsageError` for
    a combination that has no meaning. ``arrays`` lists the operands of a problem in the order in
    which kernels take them, in plain arithmetic over sizes and leading dimensions, so that
    symbols give formulas; ``scalars`` the run-time factors with their defaults. ``reference``
    computes the outputs in fp64 with NumPy. ``flops`` counts arithmetic, ``terms`` how many
    products an output is the sum of; ``exact`` says whether small integers give results without
    any rounding but the last. ``edge_problems`` are small ones of the same class as a given
    problem (dtype, layout, whether C is read) that the same kernel must get right; see
    :meth:`edges`.

    ``choices`` names the values of attributes that are one of a few things. People write and read
    the names; a problem holds the position of the name, and so do records, which is why a new
    name goes to the end.
    """

    name: str
    summary: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    default_sizes: tuple[int, ...]
    arrays: Callable[[Problem], tuple[Array, ...]]
    reference: Callable[[Problem, Mapping[str, Any], Mapping[str, float]], dict[str, Any]]
    flops: Callable[[Problem], int]
    layouts: tuple[str, ...] = ("",)
    batch_axis: str = ""
    scalars: tuple[tuple[str, float], ...] = ()
    attributes: Callable[[Mapping[str, int], str, str], dict[str, int]] = field(
        default=lambda sizes, dtype, layout: {}
    )
    check: Callable[[Problem], None] = field(default=lambda problem: None)
    terms: Callable[[Problem], int] = field(default=lambda problem: 1)
    exact: Callable[[Problem], bool] = field(default=lambda problem: True)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    edge_problems: Callable[[Problem], tuple[EdgeProblem, ...]] | None = None

    def problem(
        self,
        sizes: str | tuple[int, ...] | Mapping[str, int] | None = None,
        *,
        dtype: str | None = None,
        layout: str | None = None,
        **attributes: int | str,
    ) -> Problem:
        """A checked problem; ``sizes`` as text (``4096x4096x4096``, ``2^24``), numbers or by name,
        attributes as numbers or by the names of their ``choices``.

        Raises :class:`UsageError` with the nearest valid names.
        """
        named = self._sizes(self.default_sizes if sizes is None else sizes)
        dtype = self.dtypes[0] if dtype is None else dtype
        if dtype not in self.dtypes:
            raise unknown(f"dtype for {self.name}", dtype, self.dtypes)
        layout = self.layouts[0] if layout is None else layout
        if layout not in self.layouts:
            if self.layouts == ("",):
                raise UsageError(f"{self.name} has no layout, so {layout!r} means nothing")
            raise unknown(f"layout for {self.name}", layout, self.layouts)
        values = self.attributes(named, dtype, layout)
        for name, value in attributes.items():
            if name not in values:
                raise unknown(f"attribute of {self.name}", name, values)
            values[name] = self._attribute(name, value)
        problem = Problem(
            self.name, tuple(named.items()), dtype, layout, tuple(sorted(values.items()))
        )
        self.check(problem)
        self._refuse_beyond_64_bits(problem)
        return problem

    def text(self, problem: Problem) -> str:
        """The sizes as they are written on the command line: ``4096x4096x4096``."""
        sizes = dict(problem.sizes)
        batch = sizes.get(self.batch_axis, 1)
        # In the operation's order, not the problem's: a file may give the sizes in any order.
        numbers = [sizes[axis] for axis in self.axes]
        return "x".join(map(str, numbers if batch == 1 else [batch, *numbers]))

    def special(self, problem: Problem) -> dict[str, int]:
        """The attributes that are not at their default."""
        defaults = self.attributes(dict(problem.sizes), problem.dtype, problem.layout)
        return {key: value for key, value in problem.attributes if defaults.get(key) != value}

    def named(self, attributes: Mapping[str, int]) -> dict[str, int | str]:
        """Attributes as people read them: choices by their names."""
        return {
            key: names[value] if 0 <= value < len(names := self.choices.get(key, ())) else value
            for key, value in attributes.items()
        }

    def label(self, problem: Problem) -> str:
        """A problem for people: ``4096x4096x4096 bf16 nt activation=gelu``."""
        words = (self.text(problem), problem.dtype, problem.layout, *self.special_words(problem))
        return " ".join(filter(None, words))

    def special_words(self, problem: Problem) -> tuple[str, ...]:
        """The attributes that are not at their default, as they are written on the command line:
        ``beta=1``, ``activation=gelu``."""
        return tuple(f"{key}={value}" for key, value in self.named(self.special(problem)).items())

    def complete(self, problem: Problem) -> Problem:
        """The problem with the attributes that it lacks at their defaults: a record may be older
        than an attribute."""
        defaults = self.attributes(dict(problem.sizes), problem.dtype, problem.layout)
        attributes = {**defaults, **dict(problem.attributes)}
        return replace(problem, attributes=tuple(sorted(attributes.items())))

    def edges(self, problem: Problem) -> tuple[EdgeProblem, ...]:
        """The edge problems of a problem's class. Where the operation lists none, a few odd sizes,
        and 1 along each axis."""
        if self.edge_problems is not None:
            return self.edge_problems(problem)
        odd = tuple(37 + 4 * position for position in range(len(self.axes)))
        flat = ((*odd[:axis], 1, *odd[axis + 1 :]) for axis in range(len(odd)))
        shapes = dict.fromkeys((odd, *flat, tuple(8 * size + 3 for size in odd)))
        special = self.special(problem)
        found = []
        for shape in shapes:
            with contextlib.suppress(UsageError):  # an attribute that these sizes do not allow
                found.append(
                    EdgeProblem(
                        self.problem(shape, dtype=problem.dtype, layout=problem.layout, **special)
                    )
                )
        return tuple(found)

    def growing_attributes(self, problem: Problem) -> frozenset[str]:
        """The attributes whose default grows with the sizes: leading dimensions, not beta."""
        sizes = dict(problem.sizes)
        larger = {name: 2 * size + 2 for name, size in sizes.items()}
        here = self.attributes(sizes, problem.dtype, problem.layout)
        there = self.attributes(larger, problem.dtype, problem.layout)
        return frozenset(name for name in here if here[name] != there[name])

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """The arrays of every problem that differs from this one in sizes and leading dimensions
        only."""
        growing = self.growing_attributes(problem)
        sizes: Any = tuple((name, Expr(name)) for name, _ in problem.sizes)
        attributes: Any = tuple(
            (name, Expr(name) if name in growing else value) for name, value in problem.attributes
        )
        symbolic = Problem(self.name, sizes, problem.dtype, problem.layout, attributes)
        return tuple(
            Operand(
                array.name, array.dtype, array.role,
                tuple(map(formula, array.shape)), tuple(map(formula, array.strides)),
            )
            for array in self.arrays(symbolic)
        )  # fmt: skip

    def bytes(self, problem: Problem) -> int:
        """Least traffic in bytes: every input read and every output written once; none where
        every output is empty."""
        traffic = 0
        arrays = self.arrays(problem)
        if not any(array.elements for array in arrays if array.role != "in"):
            return 0
        for array in arrays:
            passes = 2 if array.role == "inout" else 1
            traffic += passes * math.prod(array.shape) * DTYPE_BYTES[array.dtype]
        return traffic

    def _attribute(self, name: str, value: int | str) -> int:
        names = self.choices.get(name)
        if names is None:
            return _whole(value, name)
        if isinstance(value, str):
            if value not in names:
                raise unknown(name, value, names)
            return names.index(value)
        position = _whole(value, name)
        if not 0 <= position < len(names):
            raise UsageError(f"{name} is one of {', '.join(names)}, not number {position}")
        return position

    def _refuse_beyond_64_bits(self, problem: Problem) -> None:
        """Kernels take sizes and strides as 64-bit integers and add them up to addresses."""
        for name, value in problem.names.items():
            if value >= _SIZE_LIMIT:
                raise UsageError(f"{name}={value} is 2^62 or more")
        for array in self.arrays(problem):
            if array.bytes >= _BYTES_LIMIT:
                raise UsageError(
                    f"{array.name} of {self.name} takes {array.bytes} bytes, addresses end at 2^63"
                )

    def _sizes(self, sizes: str | tuple[int, ...] | Mapping[str, int]) -> dict[str, int]:
        if isinstance(sizes, Mapping):
            known = (self.batch_axis, *self.axes) if self.batch_axis else self.axes
            for name in sizes:
                if name not in known:
                    raise unknown(f"size of {self.name}", name, known)
            missing = [axis for axis in self.axes if axis not in sizes]
            if missing:
                raise UsageError(f"{self.name} needs the sizes {', '.join(missing)}")
            numbers = [_whole(sizes[axis]) for axis in self.axes]
            batch = _whole(sizes.get(self.batch_axis, 1)) if self.batch_axis else 1
        else:
            numbers = parse_sizes(sizes) if isinstance(sizes, str) else [*map(_whole, sizes)]
            batch = 1
            if self.batch_axis and len(numbers) == len(self.axes) + 1:
                batch = numbers.pop(0)
            if len(numbers) != len(self.axes):
                form = "x".join(self.axes)
                also = f" or {self.batch_axis}x{form}" if self.batch_axis else ""
                raise UsageError(
                    f"a problem of {self.name} is written {form}{also}, not {sizes!r}"
                )
        for number in (*numbers, batch):
            if number < 0:
                raise UsageError(f"sizes of {self.name} are 0 or more, not {number}")
        named = dict(zip(self.axes, numbers, strict=True))
        return {self.batch_axis: batch, **named} if self.batch_axis else named


# Byte counts of what is smaller fit 64 bits.
_SIZE_LIMIT = 1 << 62
_BYTES_LIMIT = 1 << 63


def _whole(value: Any, name: str = "size") -> int:
    try:
        return operator.index(value)  # NumPy's integers too
    except TypeError:
        raise UsageError(f"{name} {value!r} is not a whole number") from None


_NUMBER = re.compile(r"(\d{1,18})(?:\^(\d{1,2}))?", re.ASCII)


def parse_sizes(text: str) -> list[int]:
    """``4096x4096x4096``, ``2^24`` or ``2^20x3`` as numbers.

    Raises :class:`UsageError` for anything else and for sizes of 2^62 and more.
    """
    numbers = []
    for part in text.strip().lower().split("x"):
        match = _NUMBER.fullmatch(part.strip())
        if not match:
            raise UsageError(
                f"malformed problem {text!r}: write sizes as 4096x4096x4096 or 2^24, 0 or more"
            )
        base, exponent = int(match[1]), int(match[2] or 1)
        number = base**exponent
        if number >= _SIZE_LIMIT:
            raise UsageError(f"size {part} in {text!r} is 2^62 or more")
        numbers.append(number)
    return numbers

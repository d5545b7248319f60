# SPDX-License-Identifier: Apache-2.0
"""Search spaces: parameters and constraints in, every valid configuration out.

Predicates and derived quantities are written once, as arithmetic on a :class:`Point`, with ``&``
and ``|`` instead of ``and`` and ``or``. A point is one :class:`Config`, or the columns of a
million of them: the same line prunes a space and explains why one configuration is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tunegen.errors import NoValidConfig, UsageError, unknown

# Rows held at once while a space is enumerated: bounds the memory of an unpruned prefix. Small
# enough that the columns of one predicate stay in the cache.
_CHUNK_ROWS = 1 << 18


class Point(Protocol):
    """Parameter values by name: integers of one configuration, or columns of many."""

    def __getattr__(self, name: str) -> Any: ...


class Config(Mapping[str, int]):
    """One point of a space: parameter names to integers, in the order of the space. Hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no parameter {name}; there are {list(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._values == other._values

    def __repr__(self) -> str:
        return f"Config({self})"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._values.items())


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with its legal values, ascending, and one line on what it does.

    ``before`` is the value that configurations had before there was this parameter, or None where
    they would have been other ones: with it, what was recorded then can be completed.
    """

    name: str
    values: tuple[int, ...]
    meaning: str
    before: int | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A reason and a predicate. The reason is a sentence that says what must hold.

    ``structural`` constraints follow from the parameters alone and stand in the template a second
    time, as a ``static_assert`` with the same sentence. The others depend on the problem or the
    device.
    """

    reason: str
    holds: Callable[[Point], Any]
    structural: bool = True


class _Recorder:
    """A point that notes which parameters a predicate reads."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = values
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        # A column of one: whatever a predicate does with real columns works on it too.
        return np.array([self._values[name]], dtype=np.int64)


class Columns:
    """A point that stands for many configurations: one integer column per parameter."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, NDArray[np.int64]]) -> None:
        self._columns = columns

    def __getattr__(self, name: str) -> NDArray[np.int64]:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._columns[name]
        except KeyError:
            raise AttributeError(f"no parameter {name}; there are {list(self._columns)}") from None


class _LazyColumns(Columns):
    """Columns looked up from value indices when they are read, and kept."""

    __slots__ = ("_source",)

    def __init__(self, source: Mapping[str, tuple[NDArray[np.int64], NDArray[Any]]]) -> None:
        super().__init__({})
        self._source = source

    def __getattr__(self, name: str) -> NDArray[np.int64]:
        if name.startswith("_"):
            raise AttributeError(name)
        columns: dict[str, NDArray[np.int64]] = self._columns  # type: ignore[assignment]
        if name not in columns:
            if name not in self._source:
                raise AttributeError(f"no parameter {name}; there are {list(self._source)}")
            values, indices = self._source[name]
            columns[name] = values[indices]
        return columns[name]


def _holds(constraint: Constraint, point: Point) -> Any:
    # Columns have no short circuit: "zero, or a divisor of" divides by zero too, and drops it.
    with np.errstate(all="ignore"):
        return constraint.holds(point)


@dataclass(frozen=True)
class Space:
    """Parameters and the constraints between them, for one spec, problem and device.

    The last parameters vary fastest. Put parameters that constraints tie together next to each
    other: a constraint prunes as soon as the last parameter it reads is bound.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def cartesian_size(self) -> int:
        """How many configurations there are before any constraint."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    @functools.cached_property
    def digest(self) -> str:
        """Identity of the space: parameters, values and the reasons of its constraints."""
        content = [[p.name, list(p.values)] for p in self.parameters]
        reasons = sorted(constraint.reason for constraint in self.constraints)
        return hashlib.sha256(json.dumps([content, reasons]).encode()).hexdigest()

    def completed(self, values: Mapping[str, int]) -> dict[str, int]:
        """``values`` with those of parameters that came later, as far as it is known what they
        were before; see :attr:`Parameter.before`."""
        later = {p.name: p.before for p in self.parameters if p.before is not None}
        return {**later, **values}

    def config(self, values: Mapping[str, int]) -> Config:
        """``values`` as a configuration in the order of the space.

        Raises :class:`UsageError` for unknown or missing parameters and values outside the space;
        constraints are not looked at (see :meth:`violated`).
        """
        for name in values:
            if name not in self.names:
                raise unknown("parameter", name, self.names)
        for parameter in self.parameters:
            if parameter.name not in values:
                raise UsageError(f"no value for parameter {parameter.name}")
            if values[parameter.name] not in parameter.values:
                listed = ", ".join(map(str, parameter.values))
                raise UsageError(
                    f"{parameter.name}={values[parameter.name]} is not in the space: "
                    f"its values are {listed}"
                )
        return Config({name: int(values[name]) for name in self.names})

    def violated(self, config: Config) -> tuple[str, ...]:
        """The reasons of the constraints that ``config`` breaks; empty for a valid one."""
        # Divided by zero, a scalar does what a column does, and takes two thirds of its time.
        scalars: dict[str, Any] = {name: np.int64(value) for name, value in config.items()}
        point = Columns(scalars)
        return tuple(
            constraint.reason
            for constraint in self.constraints
            if not np.all(_holds(constraint, point))
        )

    def enumerate(self) -> ConfigTable:
        """Every valid configuration, in lexicographic order of the parameters' values.

        Each constraint is applied as soon as the parameters it reads are bound, on columns; no
        more than a bounded number of rows is ever expanded at once.
        """
        schedule = self._schedule()
        values = [np.array(parameter.values, dtype=np.int64) for parameter in self.parameters]
        removed = [0] * len(self.constraints)
        below = [1] * (len(values) + 1)  # configurations under one prefix of each length
        for depth in reversed(range(len(values))):
            below[depth] = below[depth + 1] * len(values[depth])
        dtype = np.uint8 if max(map(len, values), default=0) <= 256 else np.uint32
        finished: list[NDArray[Any]] = []

        def check(table: NDArray[Any], depth: int) -> NDArray[Any]:
            for position in schedule[depth]:
                if not table.shape[1]:
                    break
                point = _LazyColumns({self.names[i]: (values[i], table[i]) for i in range(depth)})
                holds = _holds(self.constraints[position], point)
                keep = np.broadcast_to(np.asarray(holds, dtype=bool), table.shape[1:])
                dropped = table.shape[1] - int(np.count_nonzero(keep))
                if dropped:
                    removed[position] += dropped * below[depth]
                    table = table[:, keep]
            return table

        pending = [check(np.zeros((0, 1), dtype=dtype), 0)]
        while pending:
            table = pending.pop()
            depth, rows = table.shape
            if not rows:
                continue
            if depth == len(values):
                finished.append(table)
                continue
            choices = len(values[depth])
            if rows > 1 and rows * choices > _CHUNK_ROWS:
                # Halves, the first on top of the stack: order is kept and memory is bounded.
                pending += [table[:, rows // 2 :], table[:, : rows // 2]]
                continue
            wider = np.empty((depth + 1, rows * choices), dtype=dtype)
            wider[:depth] = np.repeat(table, choices, axis=1)
            wider[depth] = np.tile(np.arange(choices, dtype=dtype), rows)
            pending.append(check(wider, depth + 1))
        table = (
            np.concatenate(finished, axis=1)
            if finished
            else np.zeros((len(values), 0), dtype=dtype)
        )
        counts = tuple(
            (constraint.reason, count)
            for constraint, count in zip(self.constraints, removed, strict=True)
        )
        return ConfigTable(self, table, counts)

    def _schedule(self) -> list[list[int]]:
        """For each prefix length, the constraints whose parameters are then all bound."""
        first = {parameter.name: parameter.values[0] for parameter in self.parameters}
        schedule: list[list[int]] = [[] for _ in range(len(self.parameters) + 1)]
        for position, constraint in enumerate(self.constraints):
            recorder = _Recorder(first)
            _holds(constraint, recorder)
            depth = max((self.names.index(name) + 1 for name in recorder.names), default=0)
            schedule[depth].append(position)
        return schedule


class ConfigTable(Sequence[Config]):
    """All valid configurations of a space, compactly: one byte per parameter and configuration.

    ``removed`` gives each constraint's reason with the number of configurations it removed, in the
    order in which constraints apply; together with the valid ones they make up the whole space.
    """

    def __init__(
        self, space: Space, indices: NDArray[Any], removed: tuple[tuple[str, int], ...]
    ) -> None:
        self.space = space
        self.indices = indices  # (parameters, configurations), positions in Parameter.values
        self.removed = removed

    def __len__(self) -> int:
        return int(self.indices.shape[1])

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self.config(position) for position in range(*row.indices(len(self)))]
        return self.config(row)

    def config(self, row: int) -> Config:
        """The configuration in ``row``; negative rows count from the end."""
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        column = self.indices[:, row]
        return Config(
            {
                parameter.name: parameter.values[int(index)]
                for parameter, index in zip(self.space.parameters, column, strict=True)
            }
        )

    def columns(self, rows: slice | NDArray[Any] = slice(None)) -> Columns:
        """The values of the given rows as 64-bit columns, each made when it is first read."""
        part = self.indices[:, rows]
        return _LazyColumns(
            {
                parameter.name: (np.array(parameter.values, dtype=np.int64), part[position])
                for position, parameter in enumerate(self.space.parameters)
            }
        )

    def row(self, config: Mapping[str, int]) -> int | None:
        """The row of ``config``, or None where it is not a valid configuration."""
        if len(config) != len(self.space.parameters):
            return None
        first, last = 0, len(self)
        for parameter, column in zip(self.space.parameters, self.indices, strict=True):
            try:
                index = parameter.values.index(config[parameter.name])
            except (KeyError, ValueError):
                return None
            # The rows that agree so far lie together and are sorted by the next parameter.
            agreeing = column[first:last]
            index = column.dtype.type(index)  # of another type, the whole column is converted
            last = first + int(np.searchsorted(agreeing, index, side="right"))
            first += int(np.searchsorted(agreeing, index, side="left"))
        return first if first < last else None

    def require(self, what: str) -> ConfigTable:
        """Itself; raises :class:`NoValidConfig`, with the constraints to blame, where empty."""
        if len(self):
            return self
        blame = sorted((item for item in self.removed if item[1]), key=lambda item: -item[1])
        reasons = "; ".join(f"'{reason}' removed {count:,}" for reason, count in blame[:4])
        raise NoValidConfig(
            f"no valid configuration of {what} among {self.space.cartesian_size:,}: {reasons}"
        )


def parameters(
    rows: Iterable[tuple[str, Iterable[int], str] | tuple[str, Iterable[int], str, int]],
) -> tuple[Parameter, ...]:
    """Parameters from rows of (name, values, meaning), or (name, values, meaning, before)."""
    return tuple(Parameter(name, tuple(values), *rest) for name, values, *rest in rows)

# SPDX-License-Identifier: Apache-2.0
"""What there is to measure, and how: a probe with its contenders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunegen.model import (
    Argument,
    Array,
    Config,
    KernelDefinition,
    Launch,
    LaunchPlan,
    Space,
)

# By how much operands are shifted to lie elsewhere: aligned as before, and no power of two.
_SHIFT_BYTES = 5 << 12


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work of a probe, bound to its sizes. ``config`` is its place among the
    choices that the probe has, None where it has none."""

    name: str
    definitions: tuple[KernelDefinition, ...]
    plan: LaunchPlan
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class Choices:
    """The configurations that a probe may try, and what binds one to its sizes."""

    space: Space
    bind: Callable[[Config], Contender]

    def contenders(self, configs: Iterable[Config]) -> tuple[Contender, ...]:
        """Those that are valid, each once."""
        valid = (config for config in configs if not self.space.violated(config))
        return tuple(self.bind(config) for config in dict.fromkeys(valid))

    def around(self, config: Config) -> tuple[Contender, ...]:
        """All that differ from ``config`` in one parameter."""
        return self.contenders(
            Config({**config, parameter.name: value})
            for parameter in self.space.parameters
            for value in parameter.values
            if value != config[parameter.name]
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to measure.

    A call of any contender moves ``amount`` bytes, or for a "peak" does so many operations. In a
    "launch" nothing is moved, and contenders do not compete: each has a figure of its own.
    Calls go round ``sets`` of the operands, each shifted by its bytes in ``offsets``. Where there
    are ``choices``, the contenders are no more than where to begin.
    """

    name: str
    kind: Literal["stream", "memory", "peak", "launch"]
    amount: float
    arrays: tuple[Array, ...]
    contenders: tuple[Contender, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    sets: int = 1
    choices: Choices | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of device memory that its operands take."""
        return self.sets * sum(array.bytes for array in self.arrays)

    def elsewhere(self) -> Probe:
        """The same work on operands that lie elsewhere: with a set more, and each shifted by
        another number of pages of 4 KiB.

        So the allocation has another size, for which the driver need not find the place of the
        first one, and every operand another distance from its beginning and from the others.
        """
        offsets = {
            array.name: _SHIFT_BYTES * (position + 1) for position, array in enumerate(self.arrays)
        }
        return dataclasses.replace(self, sets=self.sets + 1, offsets=offsets)


def operand(name: str, elements: int, role: str, dtype: str = "fp32") -> Array:
    return Array(name, (elements,), (1,), dtype, "in" if role == "in" else "out")


def contender_of(
    kernel: str,
    constants: Mapping[str, int],
    types: Mapping[str, str],
    blocks: int,
    arguments: tuple[Argument, ...],
) -> Contender:
    name = f"calibrate_{kernel}"
    definition = KernelDefinition(name, f"calibrate/{kernel}.cu.jinja", types, constants)
    threads = constants.get("THREADS", 32)
    launch = Launch(name, (blocks, 1, 1), (threads, 1, 1), arguments)
    words = [*(f"{key}={value}" for key, value in constants.items()), f"blocks={blocks}"]
    return Contender(" ".join(words), (definition,), LaunchPlan((launch,)))

# SPDX-License-Identifier: Apache-2.0
"""What is launched: images as the driver loads them, and how to call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tunegen.model import LaunchPlan, Limit, Operand

# The attribute that says what the addresses of all operands are a multiple of, in bytes. It is the
# one that is not given but seen.
ALIGN = "align"

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Image:
    """One kernel of a plan: a cubin or PTX, and the entry point in it."""

    kernel: str
    entry: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a process needs to call one tuned operation.

    ``plan``, ``operands`` and ``limits`` are formulas and rules over the sizes and attributes of
    ``problem``, which gives the values it was made for; those that are not :attr:`variable` hold
    for every call. ``batch_axis`` is the size that is 1 where it is not given, or empty.
    ``source`` says what the images are and why these, ``needs`` what the driver has to be.
    """

    name: str
    operands: tuple[Operand, ...]
    scalars: tuple[str, ...]
    problem: Mapping[str, int]
    limits: tuple[Limit, ...]
    plan: LaunchPlan
    images: tuple[Image, ...]
    batch_axis: str = ""
    source: str = ""
    needs: str = ""

    @property
    def variable(self) -> frozenset[str]:
        """The sizes and attributes that may differ from call to call: those that shapes and
        strides of operands hang on."""
        formulas = (str(f) for o in self.operands for f in (*o.shape, *o.strides))
        named = {name for formula in formulas for name in _NAME.findall(formula)}
        return frozenset(named & self.problem.keys())

    def on_address(self, limit: Limit) -> bool:
        """Whether a limit is one on addresses. A size of the same name comes first: matmul has a
        batch B beside its operand B."""
        names = {operand.name for operand in self.operands} - set(self.problem)
        return limit.quantity == ALIGN or limit.quantity in names

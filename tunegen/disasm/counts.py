# SPDX-License-Identifier: Apache-2.0
"""What a kernel's instructions say about it: counts, loops, and what must not be in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tunegen.disasm.flow import natural_loops
from tunegen.disasm.ptx import parse_ptx
from tunegen.disasm.sass import Function, parse_sass

TENSOR = frozenset(
    {
        "HMMA", "DMMA", "IMMA", "BMMA", "QMMA", "OMMA",
        "HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA",
    }
)  # fmt: skip
ARITHMETIC = TENSOR | {
    "FFMA", "FFMA2", "FADD", "FADD2", "FMUL", "FMUL2", "DFMA", "DADD", "DMUL",
    "HFMA2", "HADD2", "HMUL2",
}  # fmt: skip
_RESULTS = ARITHMETIC | {"ST", "STG", "STS", "STSM", "RED", "REDG", "ATOM", "ATOMG", "ATOMS"}

# What an inner loop must be free of, and why. One fence a k-step took a wgmma kernel on an H200
# from 1.0 to 0.75 of cuBLAS, about 1,000 cycles each, and looked like a bandwidth limit.
FORBIDDEN = {
    "MEMBAR": "a memory fence waits until all earlier traffic is visible",
    "ERRBAR": "an error barrier comes with a fence and waits for it",
    "CCTL": "cache control throws away what L1 holds",
    "LDL": "a local-memory load: a spilled register or an array that is not in registers",
    "STL": "a local-memory store: a spilled register or an array that is not in registers",
}


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, named by its label or first offset, with the instructions in it by kind.

    ``depth`` is 1 for an outermost loop. An ``inner`` one computes or stores in its own right:
    loops that only wait (for a barrier, a semaphore) or only issue copies do not make the loop
    around them an outer one.
    """

    label: str
    depth: int
    inner: bool
    counts: Mapping[str, int]

    @property
    def arithmetic(self) -> int:
        """Floating-point and tensor instructions in one pass."""
        return sum(count for kind, count in self.counts.items() if kind in ARITHMETIC)

    @property
    def tensor(self) -> int:
        """Those of the tensor cores."""
        return sum(count for kind, count in self.counts.items() if kind in TENSOR)


@dataclass(frozen=True, slots=True)
class Facts:
    """Instruction counts of all kernels in a listing, and of their loops, outer ones first.

    Kinds are SASS opcodes without modifiers (``FFMA``, ``HMMA``, ``BAR``); loads and stores carry
    their width in bits per thread (``LDG.128``, ``STS.32``, ``LDGSTS.128``).
    """

    level: Literal["sass", "ptx"]
    counts: Mapping[str, int]
    loops: tuple[Loop, ...]

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())

    @property
    def inner_loops(self) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if loop.inner)

    @property
    def hottest(self) -> Loop | None:
        """The inner loop with the most arithmetic in one pass, of the tensor cores where they do
        any; None in straight code."""
        return max(
            self.inner_loops,
            key=lambda loop: (loop.tensor, loop.arithmetic, loop.depth),
            default=None,
        )


def facts(sass: str = "", ptx: str = "") -> Facts:
    """Counts from SASS, or from PTX where there is no SASS.

    PTX instructions are counted under the SASS names they usually become. That level shows
    neither register spills nor the fences that ptxas puts in for release and acquire.
    """
    functions = parse_sass(sass) if sass else parse_ptx(ptx)
    counts: Counter[str] = Counter()
    loops: list[Loop] = []
    for function in functions:
        counts.update(instruction.kind for instruction in function.code)
        loops += _loops(function)
    return Facts("sass" if sass else "ptx", _by_kind(counts), tuple(loops))


def _loops(function: Function) -> Iterable[Loop]:
    regions = natural_loops(function.code)
    counts = {
        region: Counter(function.code[index].kind for index in region.body) for region in regions
    }
    working = [region for region in regions if any(kind in _RESULTS for kind in counts[region])]
    for region in regions:
        within = [other for other in (working or regions) if other.body < region.body]
        yield Loop(
            label=function.names.get(region.header, f"instruction {region.header}"),
            depth=1 + sum(region.body < other.body for other in regions),
            inner=not within and (region in working or not working),
            counts=_by_kind(counts[region]),
        )


def _by_kind(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def lint(found: Facts) -> list[str]:
    """What stands in an inner loop and must not: one sentence per kind and loop, else empty."""
    complaints = []
    for loop in found.inner_loops:
        for base, reason in FORBIDDEN.items():
            count = sum(n for kind, n in loop.counts.items() if kind.split(".")[0] == base)
            if count:
                complaints.append(f"{count} {base} in the inner loop at {loop.label}: {reason}")
    return complaints

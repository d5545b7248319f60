# SPDX-License-Identifier: Apache-2.0
"""Loops of a control-flow graph.

A branch to a lower address is not always a loop: compilers put slow paths at the end of a kernel
and jump back from there. So loops are natural loops: a branch back to a block that dominates it,
with every block on a path between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its kind, and the instructions that may run after it, by index."""

    kind: str
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """The instructions of one loop, by index; ``header`` is the first one to run."""

    header: int
    body: frozenset[int] = field(repr=False)


def natural_loops(code: Sequence[Instruction]) -> tuple[Region, ...]:
    """The loops that can be reached from instruction 0, outer ones before those inside them."""
    blocks = _blocks(code)
    block_of = {index: number for number, block in enumerate(blocks) for index in block}
    successors = [
        sorted({block_of[target] for target in code[block[-1]].successors}) for block in blocks
    ]
    order = _reverse_postorder(successors)
    predecessors: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for target in successors[node]:
            predecessors[target].append(node)
    dominator = _dominators(order, predecessors)
    bodies: dict[int, set[int]] = {}
    for node in order:
        for header in successors[node]:
            if _dominates(header, node, dominator):
                bodies.setdefault(header, {header}).update(_reaching(node, header, predecessors))
    loops = [
        Region(blocks[header][0], frozenset(i for block in body for i in blocks[block]))
        for header, body in bodies.items()
    ]
    return tuple(sorted(loops, key=lambda loop: (-len(loop.body), loop.header)))


def _blocks(code: Sequence[Instruction]) -> list[range]:
    """Straight runs of instructions, in address order."""
    starts = {0}
    for index, instruction in enumerate(code):
        if instruction.successors != (index + 1,):
            starts.update((index + 1, *instruction.successors))
    edges = sorted(start for start in starts if start < len(code))
    return [range(first, last) for first, last in zip(edges, [*edges[1:], len(code)], strict=True)]


def _reverse_postorder(successors: Sequence[Sequence[int]]) -> list[int]:
    if not successors:
        return []
    finished: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        node, pending = stack[-1]
        target = next((t for t in pending if t not in seen), None)
        if target is None:
            finished.append(node)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(successors[target])))
    return finished[::-1]


def _dominators(order: Sequence[int], predecessors: dict[int, list[int]]) -> dict[int, int]:
    """The immediate dominator of each node (Cooper, Harvey and Kennedy, "A Simple, Fast Dominance
    Algorithm", 2001)."""
    place = {node: position for position, node in enumerate(order)}
    dominator = {order[0]: order[0]} if order else {}

    def common(left: int, right: int) -> int:
        while left != right:
            if place[left] < place[right]:
                left, right = right, left
            left = dominator[left]
        return left

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [p for p in predecessors[node] if p in dominator]
            best = known[0]
            for other in known[1:]:
                best = common(best, other)
            if dominator.get(node) != best:
                dominator[node] = best
                changed = True
    return dominator


def _dominates(candidate: int, node: int, dominator: dict[int, int]) -> bool:
    while node != candidate and dominator[node] != node:
        node = dominator[node]
    return node == candidate


def _reaching(node: int, header: int, predecessors: dict[int, list[int]]) -> set[int]:
    """The nodes that reach ``node`` without passing through ``header``, and itself."""
    found = {node, header}
    stack = [node] if node != header else []
    while stack:
        for previous in predecessors[stack.pop()]:
            if previous not in found:
                found.add(previous)
                stack.append(previous)
    return found

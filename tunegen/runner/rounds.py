# SPDX-License-Identifier: Apache-2.0
"""Timing several contenders against each other, in turns, each in the process that it lives in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tunegen.model import Figures
from tunegen.runner import ratios
from tunegen.runner.process import Lost
from tunegen.runner.protocol import Answer, Block, Policy, Request, Timed
from tunegen.runner.quarantine import Fault

# Rounds of a burst contest: below 15 a bootstrap interval of the median is coarse, beyond 30 it
# hardly narrows. Blocks are long enough for some dozen intervals, and for three calls.
_LEAST_ROUNDS, _MOST_ROUNDS = 15, 30
_BLOCK_SECONDS, _SHORT_BLOCK_SECONDS = 0.02, 0.01
_CALLS = 3

# In bursts the card rests as long as it works. A request on its way, a warm-up launch or two and
# what NVML is asked before and after come on top.
_BURST_WALL = 2.0
_BETWEEN_SECONDS = 0.02

# A sustained block: power and clocks need seconds to settle. Below a quarter of a second it would
# show the state in which the one before left the card.
SUSTAINED_SECONDS = 2.0
_LEAST_SUSTAINED_SECONDS = 0.25

# The part of a sustained block that still shows the contender before, and the pieces that the
# rest is compared by.
_SETTLING = 0.25
_PIECES = 10

# What a block may take beyond its time: loading, warming up, and a busy machine.
_PATIENCE_SECONDS = 20.0


class Asked(Protocol):
    """A worker, or a station that has one."""

    def ask(self, request: Request, timeout_s: float) -> Answer | Lost: ...


def burst_rounds(left_s: float, contenders: int, longest_us: float) -> tuple[int, float]:
    """How many rounds and how long a block, for about ``left_s`` seconds in all."""
    least_s = _CALLS * longest_us / 1e6
    for block_s in (max(_BLOCK_SECONDS, least_s), max(_SHORT_BLOCK_SECONDS, least_s)):
        rounds = int(left_s / (contenders * (_BURST_WALL * block_s + _BETWEEN_SECONDS)))
        if rounds >= _LEAST_ROUNDS:
            return min(rounds, _MOST_ROUNDS), block_s
    return _LEAST_ROUNDS, block_s


def sustained_block(left_s: float, contenders: int) -> float | None:
    """How long a sustained block of each contender, there and back, for ``left_s`` seconds; None
    where that is too short to say anything."""
    block_s = min(SUSTAINED_SECONDS, left_s / (2 * contenders) - _BETWEEN_SECONDS)
    return block_s if block_s >= _LEAST_SUSTAINED_SECONDS else None


@dataclass(slots=True)
class Played:
    """The blocks of a contest by contender, as many for each; ``faults`` of those who fell out."""

    blocks: dict[str, list[Timed]]
    faults: dict[str, Fault] = field(default_factory=dict)

    def shared(self, own_pids: Collection[int]) -> bool:
        """Whether processes that are none of ours were on the card."""
        return any(
            set(telemetry.other_pids) - set(own_pids)
            for blocks in self.blocks.values()
            for block in blocks
            for telemetry in (block.before, block.after)
        )


def play(
    contenders: Mapping[str, Asked],
    policy: Policy,
    orders: Sequence[Sequence[str]],
    block_s: float,
    fell_out: Callable[[str], None] = lambda name: None,
    until: float = math.inf,
) -> Played:
    """Time blocks of the contenders in the given orders.

    One that fails falls out, with its blocks, and the others go on; ``fell_out`` is told at once.
    After ``until``, of the monotonic clock, no more orders are begun than a contest needs.
    """
    played = Played({name: [] for name in contenders})
    for done, order in enumerate(orders):
        if done >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        for name in order:
            if name in played.faults:
                continue
            answer = contenders[name].ask(
                Block(name, policy, block_s), _PATIENCE_SECONDS + 3 * block_s
            )
            if isinstance(answer, Timed) and _are_times(answer.samples_us):
                played.blocks[name].append(answer)
                continue
            played.faults[name] = (
                Fault("launch_failed", "a block gave no times", False)
                if isinstance(answer, Timed)
                else Fault.of(answer)
            )
            del played.blocks[name]
            fell_out(name)
    return played


def _are_times(samples: Sequence[float]) -> bool:
    return bool(samples) and all(math.isfinite(us) and us > 0 for us in samples)


def burst_times(played: Played) -> dict[str, list[float]]:
    """One time in microseconds for each contender and round."""
    return {
        name: [float(np.median(block.samples_us)) for block in blocks]
        for name, blocks in played.blocks.items()
    }


def sustained_times(played: Played) -> dict[str, list[float]]:
    """Times of corresponding pieces of the contenders' blocks, the settled part of each."""
    settled = {
        name: [block.samples_us[int(len(block.samples_us) * _SETTLING) :] for block in blocks]
        for name, blocks in played.blocks.items()
    }
    count = min([_PIECES, *(len(part) for parts in settled.values() for part in parts)])
    return {
        name: [piece for part in parts for piece in ratios.pieces(part, count)]
        for name, parts in settled.items()
    }


def figures(
    played: Played,
    times: Mapping[str, Sequence[float]],
    *,
    energy: bool,
    outside: Collection[str] = (),
    seed: int = 0,
) -> dict[str, Figures]:
    """What there is to say about each; ``energy`` where blocks are long enough for it. Those
    ``outside`` are compared with the leader too, but none of them is it."""
    inside = {name: own for name, own in times.items() if name not in outside}
    if not times:
        return {}
    first = ratios.leader(inside or times)
    found = {}
    for name, own in times.items():
        median = ratios.estimate(own, seed)
        ratio = ratios.ratio(own, times[first], seed)
        blocks = played.blocks[name]
        seen = [state for block in blocks for state in (block.before, block.after)]
        found[name] = Figures(
            median_us=median.median,
            low_us=median.low,
            high_us=median.high,
            rounds=len(own),
            ratio=ratio.median,
            ratio_low=ratio.low,
            ratio_high=ratio.high,
            energy_mj=energy_per_call(blocks) if energy else None,
            before=blocks[0].before,
            after=blocks[-1].after,
            throttle=tuple(sorted({reason for state in seen for reason in state.throttle})),
        )
    return found


def energy_per_call(blocks: Sequence[Timed]) -> float | None:
    """Millijoules a call by the card's counter, None where it has none or did not move."""
    spent, calls = 0, 0
    for block in blocks:
        if block.before.energy_mj is None or block.after.energy_mj is None:
            return None
        spent += block.after.energy_mj - block.before.energy_mj
        calls += block.calls
    return spent / calls if spent > 0 and calls else None

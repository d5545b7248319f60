# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a tune measures on, one or several of a class: opened, prepared, comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tunegen.errors import DeviceError
from tunegen.model import Candidate, GpuInfo, Problem
from tunegen.runner.evaluator import GpuEvaluator, Spent
from tunegen.runner.protocol import Opened, Prepare
from tunegen.runner.station import Station
from tunegen.session import gpu as gpus

_Got = TypeVar("_Got")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU with its worker, and what that opened."""

    gpu: GpuInfo
    station: Station
    opened: Opened


def open_cards(chosen: Sequence[GpuInfo], stations: Sequence[Station]) -> tuple[Card, ...]:
    """Open all of them at the same time.

    Raises :class:`DeviceError` where one cannot be opened, :class:`UsageError` where they are not
    of one device class.
    """
    opened = _on_each(chosen, [station.open for station in stations])
    gpus.check_class(chosen, [gpus.device_class(one) for one in opened])
    return tuple(Card(*one) for one in zip(chosen, stations, opened, strict=True))


def prepare(cards: Sequence[Card], request: Prepare, timeout_s: float) -> None:
    """Have the same problem ready on all of them."""
    work = [lambda card=card: card.station.prepare(request, timeout_s) for card in cards]
    _on_each([card.gpu for card in cards], work)


def align(
    cards: Sequence[Card], judges: Sequence[GpuEvaluator], candidate: Candidate, problem: Problem
) -> None:
    """Let times be those of the first GPU, whichever one takes them.

    All try the same candidate, the first that they try at all. A GPU on which it fails is taken to
    be as fast as the first.
    """
    work = [lambda judge=judge: judge.evaluate(candidate, problem) for judge in judges]
    first, *others = _on_each([card.gpu for card in cards], work)
    for judge, outcome in zip(judges[1:], others, strict=True):
        if first.ok and first.measurement is not None and outcome.ok:
            judge.align(first.measurement.steady_us)


def together(judges: Sequence[GpuEvaluator]) -> Spent:
    """Where the seconds of all went."""
    spent = [judge.spent for judge in judges]
    return Spent(
        verifying=sum(one.verifying for one in spent),
        timing=sum(one.timing for one in spent),
        restarting=sum(one.restarting for one in spent),
        lost=sum(one.lost for one in spent),
    )


def _on_each(chosen: Sequence[GpuInfo], work: Sequence[Callable[[], _Got]]) -> list[_Got]:
    """What comes of work on each GPU, all at the same time. An error says of which one it is."""
    if len(work) == 1:
        return [work[0]()]
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(one) for one in work]
    found = []
    for gpu, future in zip(chosen, futures, strict=True):
        try:
            found.append(future.result())
        except DeviceError as error:
            which = f"GPU {gpu.index} ({gpu.name})"
            raise DeviceError(f"{which}: {error.message}", hint=error.hint) from error
    return found

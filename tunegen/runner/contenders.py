# SPDX-License-Identifier: Apache-2.0
"""What the finals know of each contender, who may win, and the contest as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunegen.model import Contest, Figures, Problem, Standing, VendorRatio
from tunegen.runner import ratios, rounds
from tunegen.runner.protocol import Policy
from tunegen.runner.qualify import Finalist
from tunegen.runner.quarantine import Fault

VENDOR = "vendor"

# A result may be this much less exact than that of the vendor's library.
VENDOR_ERROR = 1.5


@dataclass(slots=True, kw_only=True)
class Contender:
    """What is known of a contender so far; the vendor's library is no ``finalist``.

    ``asked`` is the process that it lives in. ``barred`` says why it may not win although its
    result is right.
    """

    name: str
    asked: rounds.Asked
    description: str
    finalist: Finalist | None = None
    relative_error: float | None = None
    deterministic: bool | None = None
    figures: dict[str, Figures] = field(default_factory=dict)
    fault: Fault | None = None
    barred: str = ""

    @property
    def default(self) -> bool:
        return self.finalist is not None and self.finalist.default

    @property
    def may_win(self) -> bool:
        return self.finalist is not None and self.fault is None and not self.barred


def bar(contenders: Sequence[Contender], problem: Problem, deterministic: bool) -> list[str]:
    """Bar those that may not win; what a reader should know about it is returned.

    Where the vendor's library takes part, a result may be 1.5 times less exact than its. If none
    is that exact, what the specs promise must do.
    """
    able = [c for c in contenders if c.finalist is not None and c.fault is None]
    for contender in able:
        if deterministic and not contender.deterministic:
            contender.barred = "its result differs from run to run"
    vendor = next((c for c in contenders if c.name == VENDOR), None)
    left = [contender for contender in able if not contender.barred]
    if vendor is None or vendor.relative_error is None or not left:
        return []
    limit = VENDOR_ERROR * vendor.relative_error
    words = f"{VENDOR_ERROR:g} times that of {vendor.description} ({vendor.relative_error:.2g})"
    inexact = [c for c in left if c.relative_error is None or c.relative_error > limit]
    if len(inexact) == len(left):
        tolerance = max(c.finalist.candidate.spec.tolerance(problem) for c in left if c.finalist)
        return [f"no result has an error below {words}; the tolerance is {tolerance:.2g}"]
    for contender in inexact:
        contender.barred = f"its error of {contender.relative_error:.2g} is more than {words}"
    return []


def judge(
    contenders: Sequence[Contender],
    choice: ratios.Choice | None,
    *,
    times: Mapping[Policy, Mapping[str, Sequence[float]]],
    policy: Policy,
    problem: Problem,
    no_vendor: str,
    flip: str,
    shared: bool,
    notes: Sequence[str],
    seconds: float,
    seed: int,
) -> Contest:
    """The contest with everybody's standing; without a ``choice`` there is no winner."""
    deciding = times.get(policy, {})
    standings = tuple(_standing(contender, deciding, seed) for contender in contenders)
    winner = next((s for s in standings if choice and s.name == choice.winner), None)
    spec = next(
        (c.finalist.candidate.spec for c in contenders
         if winner and c.name == winner.name and c.finalist),
        None,
    )  # fmt: skip
    return Contest(
        standings=standings,
        winner=winner,
        policy=policy,
        tied=choice.tied if choice else (),
        rule=choice.rule if choice else "",
        tolerance=spec.tolerance(problem) if spec else None,
        no_vendor=no_vendor,
        flip=flip,
        shared=shared,
        notes=tuple(notes),
        seconds=seconds,
    )


def _standing(
    contender: Contender, deciding: Mapping[str, Sequence[float]], seed: int
) -> Standing:
    vendor = None
    if contender.finalist and VENDOR in deciding and contender.name in deciding:
        found = ratios.ratio(deciding[VENDOR], deciding[contender.name], seed)
        vendor = VendorRatio(found.median, found.low, found.high)
    fault = contender.fault
    return Standing(
        name=contender.name,
        trial=contender.finalist.trial if contender.finalist else None,
        description=contender.description,
        relative_error=contender.relative_error,
        deterministic=contender.deterministic,
        figures=contender.figures,
        vendor=vendor,
        barred=contender.barred,
        failure=fault.reason if fault else "",
        failed_as=fault.kind if fault else "launch_failed",
    )

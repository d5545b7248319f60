# SPDX-License-Identifier: Apache-2.0
"""What the finals found: who took part, how fast each was under which policy, who won and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunegen.model.gpu import Telemetry
from tunegen.model.outcome import Measurement, OutcomeKind


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of one contender under one policy, over ``rounds`` that all contenders shared.

    ``low_us`` and ``high_us`` bound the median with 95 % confidence. ``ratio`` is its time over
    that of the best of ours in the same round, the median over rounds with its interval.
    ``energy_mj`` is the card's energy per call, None where a block was too short to tell.
    ``before`` and ``after`` are the card around the contender's first and last block, ``throttle``
    every reason for throttling that was seen.
    """

    median_us: float
    low_us: float
    high_us: float
    rounds: int
    ratio: float
    ratio_low: float
    ratio_high: float
    energy_mj: float | None = None
    before: Telemetry = field(default_factory=Telemetry)
    after: Telemetry = field(default_factory=Telemetry)
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VendorRatio:
    """The time of the vendor's library over ours in the same round: above 1 ours is faster."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One contender. ``trial`` is the number of its trial, None for the vendor's library.

    ``barred`` says why it could not win although it was right: less exact than the vendor's
    library, say. ``failure`` says why it was not timed to the end, with ``failed_as`` as the kind
    of outcome that its trial then has.
    """

    name: str
    trial: int | None
    description: str = ""
    relative_error: float | None = None
    deterministic: bool | None = None
    figures: Mapping[str, Figures] = field(default_factory=dict)
    vendor: VendorRatio | None = None
    barred: str = ""
    failure: str = ""
    failed_as: OutcomeKind = "launch_failed"


@dataclass(frozen=True, slots=True)
class Contest:
    """The finals. ``winner`` is None where nobody was right, or fast at all.

    ``policy`` is the one that decided. ``tied`` are the contenders whose times do not differ from
    the winner's, itself included, and ``rule`` what then chose among them. ``tolerance`` is the
    largest relative RMS error that was let through. ``no_vendor`` says why the vendor's library
    did not take part, ``flip`` which winners the policies disagree about, ``notes`` what else a
    reader should know. ``shared`` means that others used the card meanwhile. Where the policies
    disagree, ``other`` is the contest as the one sees it that did not decide.
    """

    standings: tuple[Standing, ...]
    winner: Standing | None
    policy: str
    tied: tuple[str, ...] = ()
    rule: str = ""
    tolerance: float | None = None
    no_vendor: str = ""
    flip: str = ""
    shared: bool = False
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    other: Contest | None = None

    def measurement(self, standing: Standing) -> Measurement | None:
        """A contender's time under the policy that decided, with everything else that is known
        of it as plain values; None where it has none."""
        figures = standing.figures.get(self.policy)
        if figures is None:
            return None
        details: dict[str, Any] = {
            policy: _plain(found) for policy, found in standing.figures.items()
        }
        if len(self.tied) > 1 and standing.name in self.tied:
            details["tied_with"] = [name for name in self.tied if name != standing.name]
            details["tie_broken_by"] = self.rule
        if standing.vendor is not None:
            vendor = next(s for s in self.standings if s.trial is None)
            details["vendor"] = {
                **dataclasses.asdict(standing.vendor),
                "name": vendor.description,
                "relative_error": vendor.relative_error,
            }
        details |= {"flip": self.flip} if self.flip else {}
        details |= {"shared": True} if self.shared else {}
        details |= {"notes": list(self.notes)} if self.notes else {}
        return Measurement(
            median_us=figures.median_us,
            policy=self.policy,
            low_us=figures.low_us,
            high_us=figures.high_us,
            samples=figures.rounds,
            details=details,
        )

    def standing(self, name: str) -> Standing | None:
        """The contender of that name."""
        return next((s for s in self.standings if s.name == name), None)

    def of_trial(self, number: int) -> Standing | None:
        """The contender that stands for a trial."""
        return next((s for s in self.standings if s.trial == number), None)


def _plain(figures: Figures) -> dict[str, Any]:
    """Figures as JSON has them, without what was not told."""
    found = dataclasses.asdict(figures)
    for moment in ("before", "after"):
        found[moment] = {key: value for key, value in found[moment].items() if value is not None}
        del found[moment]["other_pids"]
        del found[moment]["throttle"]  # that of all blocks stands beside
    return {key: value for key, value in found.items() if value is not None}

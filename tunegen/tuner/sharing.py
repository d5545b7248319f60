# SPDX-License-Identifier: Apache-2.0
"""Where proposals come from and trials go to: a search of one's own, or one that several hosts
make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tunegen.model import CompiledKernel, Config, Outcome, Trial

if TYPE_CHECKING:  # at run time these would load Optuna
    from tunegen.search import Proposal, Search
    from tunegen.store import Study
    from tunegen.store.hosts import Ending, Hosts

# What keeps a trial; False where it may not be kept, since its claim was lost.
Keep = Callable[[Trial, tuple[CompiledKernel, ...]], bool | None]

# Why there is no proposal: the budget is used, nothing is left to try, or something happened
# meanwhile that is to be heard first.
Nothing = Literal["full", "exhausted", "again"]


class Chooser(Protocol):
    """Which configuration next: :class:`tunegen.search.Search`, or what stands before one."""

    def tell_past(self, trials: Sequence[Trial]) -> None: ...
    def expected_gain(self) -> float | None: ...
    def ask(self) -> Proposal | None: ...
    def tell(self, proposal: Proposal, outcome: Outcome) -> None: ...


class Desk(Protocol):
    """What the loop knows of those who search."""

    def next(self, known: int, under_way: int, limit: int) -> Proposal | Nothing:
        """A proposal, where ``known`` trials have been heard of, so many are ``under_way`` here,
        and there may be ``limit``."""

    def report(
        self, proposal: Proposal, trial: Trial, kernels: tuple[CompiledKernel, ...]
    ) -> None:
        """What came of a proposal."""

    def hear(self) -> Sequence[Trial]:
        """What has been reported since the last time, by anybody, in the order in which it was."""

    def release(self) -> None:
        """Let go of the proposals that are not reported and will not be."""

    def finish(self) -> tuple[Ending, str]:
        """What is left to do, and who does it where that is somebody else."""


@dataclass(slots=True)
class Alone:
    """A search of one's own."""

    search: Chooser
    keep: Keep | None
    _reported: list[Trial] = field(default_factory=list)

    def next(self, known: int, under_way: int, limit: int) -> Proposal | Nothing:
        if known + under_way >= limit:
            return "full"
        return self.search.ask() or "exhausted"

    def report(
        self, proposal: Proposal, trial: Trial, kernels: tuple[CompiledKernel, ...]
    ) -> None:
        self.search.tell(proposal, trial.outcome)
        self._reported.append(trial)
        if self.keep is not None:
            self.keep(trial, kernels)

    def hear(self) -> Sequence[Trial]:
        heard, self._reported = self._reported, []
        return heard

    def release(self) -> None:
        """Nobody else could have made them."""

    def finish(self) -> tuple[Ending, str]:
        return "finals", ""


@dataclass(slots=True)
class Together:
    """One of the ``hosts`` of a study, with a search of its own that is told what the others do.

    What another has begun and will not end, since it died or gave it back, comes before anything
    new.
    """

    search: Search
    keep: Keep
    study: Study
    hosts: Hosts
    # What others try that are alive.
    _elsewhere: set[tuple[str, Config]] = field(default_factory=set)
    _contributed: bool = False

    def next(self, known: int, under_way: int, limit: int) -> Proposal | Nothing:
        orphan = next((k for k in self.search.elsewhere if k not in self._elsewhere), None)
        if known + under_way + len(self._elsewhere) >= limit:
            return "full"  # so that nothing is asked for that would be given back
        proposal = self.search.adopt(*orphan) if orphan else self.search.ask()
        if proposal is None:
            return "exhausted"
        spec = proposal.contender.name
        verdict = self.hosts.claim(
            spec, proposal.config, after=self.study.last_id, known=known, limit=limit
        )
        if verdict == "mine":
            return proposal
        self.search.give(proposal)
        return "full" if verdict == "full" else "again"

    def report(
        self, proposal: Proposal, trial: Trial, kernels: tuple[CompiledKernel, ...]
    ) -> None:
        self.search.tell(proposal, trial.outcome)
        if self.keep(trial, kernels) is not False:
            self._contributed = True

    def hear(self) -> Sequence[Trial]:
        # Claims first: what is reported between the two readings is not taken for given up.
        claims = self.hosts.claims()
        news = self.study.news()
        self._elsewhere = {key for key, alive in claims.items() if alive}
        for spec, config in claims:
            self.search.begin_elsewhere(spec, config)
        for trial in news:
            self.search.end_elsewhere(trial)
        return news

    def release(self) -> None:
        self.hosts.release()

    def finish(self) -> tuple[Ending, str]:
        return self.hosts.finish(contributed=self._contributed)

# SPDX-License-Identifier: Apache-2.0
"""The search itself: a study in memory, and the sampler that says what comes next in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunegen.errors import NoValidConfig
from tunegen.model import Config, Outcome, Trial
from tunegen.search.opening import FirstPoint, Origin
from tunegen.search.sampler import ConfigSampler
from tunegen.search.samplers import SAMPLERS, check_choice
from tunegen.search.shadow import quiet_study, tell
from tunegen.search.strategies import Strategy
from tunegen.search.unseen import Contender


@dataclass(frozen=True, eq=False)
class Proposal:
    """A configuration to try, numbered in the order of asking: from 0, or on from the past."""

    number: int
    contender: Contender
    config: Config
    origin: Origin


def make_search(
    name: str, contenders: Sequence[Contender], seed: int, first: Sequence[FirstPoint] = ()
) -> Search:
    """The search by the sampler ``name`` over all configurations of all ``contenders``.

    ``seed`` is a number of 32 bits. What ``first`` lists comes right after the defaults, in that
    order; what of it is not valid here is passed over.

    Raises :class:`UsageError` for an unknown name and another
    seed, :class:`ToolkitError` for a sampler that cannot be used here, :class:`NoValidConfig`
    where there is no contender or one has no configurations.
    """
    check_choice(name, seed)
    return Search(contenders, SAMPLERS[name], seed, first)


class Search:
    """Proposes configurations and learns from their outcomes; the first contender's default is
    the operation's and comes first."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        strategy: type[Strategy],
        seed: int,
        first: Sequence[FirstPoint] = (),
    ) -> None:
        if not contenders:
            raise NoValidConfig("no spec to choose a configuration from")
        for contender in contenders:
            contender.table.require(contender.name)
        self._contenders = {contender.name: contender for contender in contenders}
        self._sampler = ConfigSampler(contenders, strategy, seed, first)
        self._study = quiet_study(self._sampler)
        self._first_number = 0
        self._begun = False
        self._under_way: set[int] = set()

    def tell_past(self, trials: Iterable[Trial]) -> None:
        """What came of earlier runs, in the order in which it became known.

        None of it is proposed again, the sampler learns from all of it, and numbers go on after
        the highest. A trial of no contender, or of a configuration that is not valid here, is
        passed over. The same past gives the same proposals.

        Raises ``ValueError`` after the first proposal.
        """
        if self._begun:
            raise ValueError("the past is told before the first proposal")
        for trial in trials:
            if self._sampler.remember(trial.spec, trial.config, _time(trial.outcome)):
                self._first_number = max(self._first_number, trial.number + 1)
        self._sampler.first_number = self._first_number

    def expected_gain(self) -> float | None:
        """The share of the best time that all configurations left together can be expected to save
        at most; None where the sampler does not say, or not yet."""
        return self._sampler.expected_gain(self._study)

    def ask(self) -> Proposal | None:
        """The next configuration, or None once every one has been proposed."""
        if not self._sampler.left(self._study):
            return None
        trial = self._study.ask()
        name, config, origin = self._sampler.suggest(trial)
        number = self._first_number + trial.number
        self._under_way.add(number)
        self._begun = True
        return Proposal(number, self._contenders[name], config, origin)

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """What came of a proposal. The order of telling is free, but part of what decides.

        Raises ``ValueError`` for a proposal that is not under way.
        """
        if proposal.number not in self._under_way:
            raise ValueError(f"proposal {proposal.number} is not under way")
        self._under_way.remove(proposal.number)
        tell(self._study, proposal.number - self._first_number, _time(outcome))


def _time(outcome: Outcome) -> float | None:
    return outcome.median_us if outcome.ok else None

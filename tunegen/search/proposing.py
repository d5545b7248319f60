# SPDX-License-Identifier: Apache-2.0
"""The search itself: a study in memory, and the sampler that says what comes next in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optuna.distributions import BaseDistribution
from optuna.trial import TrialState, create_trial

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

    Raises :class:`UsageError` for an unknown name and another seed, :class:`ToolkitError` for a
    sampler that cannot be used here, :class:`NoValidConfig` where there is no contender or one has
    no configurations.
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
        # What is known in any way, and the trials of what others try.
        self._known: set[tuple[str, Config]] = set()
        self._elsewhere: dict[tuple[str, Config], int] = {}

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
                self._known.add((trial.spec, trial.config))
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
        self._known.add((name, config))
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

    # --- what others try -------------------------------------------------------------------------

    @property
    def elsewhere(self) -> tuple[tuple[str, Config], ...]:
        """What others try, by spec and configuration, in the order in which it became known. It is
        not proposed, and taken to be as fast as expected until its outcome is told."""
        return tuple(self._elsewhere)

    def begin_elsewhere(self, spec: str, config: Config) -> None:
        """Another one tries this. What is known, or not valid here, is passed over."""
        if (spec, config) not in self._known:
            number = self._add(spec, config, TrialState.RUNNING, None)
            if number is not None:
                self._elsewhere[spec, config] = number

    def end_elsewhere(self, trial: Trial) -> None:
        """What came of a trial of another one, whether or not its beginning was told."""
        key = trial.spec, trial.config
        time = _time(trial.outcome)
        if key in self._elsewhere:
            tell(self._study, self._elsewhere.pop(key), time)
        elif key not in self._known:
            self._add(*key, TrialState.PRUNED if time is None else TrialState.COMPLETE, time)

    def give(self, proposal: Proposal) -> None:
        """Another one has begun with a proposal that is under way."""
        self._under_way.remove(proposal.number)
        key = proposal.contender.name, proposal.config
        self._elsewhere[key] = proposal.number - self._first_number

    def adopt(self, spec: str, config: Config) -> Proposal:
        """What another one had begun is now a proposal under way. It must be :attr:`elsewhere`."""
        number = self._first_number + self._elsewhere.pop((spec, config))
        contender = self._contenders[spec]
        self._under_way.add(number)
        origin: Origin = "default" if config == contender.default else "sampler"
        return Proposal(number, contender, config, origin)

    def _add(self, spec: str, config: Config, state: TrialState, time: float | None) -> int | None:
        """The number of a trial that is added to the study, or None where it is not valid here."""
        params = self._sampler.parameters(spec, config)
        if params is None:
            return None
        distributions: dict[str, BaseDistribution] = {
            name: self._sampler.distributions[name] for name in params
        }
        self._study.add_trial(
            create_trial(state=state, value=time, params=params, distributions=distributions)
        )
        self._known.add((spec, config))
        self._begun = True
        return self._study.get_trials(deepcopy=False)[-1].number


def _time(outcome: Outcome) -> float | None:
    """What the search takes for a success, in microseconds; None for a failure."""
    if not outcome.ok or outcome.measurement is None:
        return None
    return outcome.measurement.steady_us

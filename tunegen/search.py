# SPDX-License-Identifier: Apache-2.0
"""Which configuration next. The only module that knows Optuna.

A search proposes valid configurations only, none of them twice, until there is none left. It
starts with the default of every spec and the points that the performance model ranks highest;
then a sampler chooses. What is proposed depends on the seed and on the order of asking and
telling, never on time, so a caller that asks a fixed number of proposals ahead gets the same
trials on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from tunegen.errors import NoValidConfig, UsageError, unknown
from tunegen.model import Config, ConfigTable, KernelSpec, Outcome

DEFAULT_SAMPLER = "tpe"

# Points that the model chooses before the sampler does. NVIDIA reports that the best of 16
# configurations ranked by its matmul heuristics reach 96 % of an exhaustive search on H100.
_MODEL_POINTS = 16

# Parameters in which those points differ from one another: neighbours of the best one would all
# share its fault where the model is wrong.
_APART = 3

# Proposals of the sampler that may break a constraint or repeat a trial before the last one is
# mended. On recorded spaces of 4,000 to 18,000 configurations one, two and four found equally good
# ones, and each costs as much as the first.
_PROBES = 2

Origin = Literal["default", "model", "sampler"]


@dataclass(frozen=True, eq=False)
class Contender:
    """A spec that takes part in a search, with all its valid configurations.

    ``prior_us`` is the model's time of every row of ``table``, infinite where it cannot run;
    without a model it is None.
    """

    spec: KernelSpec
    table: ConfigTable
    default: Config
    prior_us: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False)
class Proposal:
    """A configuration to try. Numbers count from 0 in the order of asking."""

    number: int
    contender: Contender
    config: Config
    origin: Origin


class Place(NamedTuple):
    """A configuration by position: which contender, which row of its table."""

    contender: int
    row: int


class Unseen:
    """The configurations that have not been proposed yet."""

    def __init__(self, contenders: Sequence[Contender], rng: np.random.Generator) -> None:
        self._contenders = contenders
        self._rng = rng
        self._seen = [np.zeros(len(contender.table), dtype=bool) for contender in contenders]
        self._left = [len(contender.table) for contender in contenders]

    def __len__(self) -> int:
        return sum(self._left)

    def __contains__(self, place: Place) -> bool:
        return not self._seen[place.contender][place.row]

    def left(self, contender: int) -> int:
        """How many configurations of one contender there are."""
        return self._left[contender]

    def take(self, place: Place) -> None:
        """Count ``place`` as seen; it must not have been."""
        assert place in self
        self._seen[place.contender][place.row] = True
        self._left[place.contender] -= 1

    def random(self) -> Place:
        """Any of them with equal chances."""
        nth = int(self._rng.integers(len(self)))
        for contender, left in enumerate(self._left):
            if nth < left:
                return Place(contender, int(np.flatnonzero(~self._seen[contender])[nth]))
            nth -= left
        raise IndexError("every configuration has been seen")

    def nearest(self, contender: int, indices: NDArray[np.int64]) -> Place:
        """The one closest to ``indices`` (a position in the values of each parameter, valid or
        not): fewest parameters changed, then fewest steps, then fastest by the model."""
        seen = self._seen[contender]
        table = self._contenders[contender].table
        changed = differing(table, indices)
        changed[seen] = np.iinfo(changed.dtype).max
        rows = np.flatnonzero(changed == changed.min())
        steps = np.abs(table.indices[:, rows].astype(np.int64) - indices[:, None]).sum(axis=0)
        rows = rows[steps == steps.min()]
        prior_us = self._contenders[contender].prior_us
        if prior_us is None:
            return Place(contender, int(self._rng.choice(rows)))
        return Place(contender, int(rows[np.argmin(prior_us[rows])]))


def differing(table: ConfigTable, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """In how many parameters each row of ``table`` differs from a point: (rows,)."""
    count = np.zeros(len(table), dtype=np.uint8)
    for column, index in zip(table.indices, indices, strict=True):
        count += column != column.dtype.type(index)
    return count


class Sampler(Protocol):
    """A way of choosing. ``model_points`` says how many points the model chooses before it."""

    model_points: ClassVar[int]

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen, seed: int) -> None: ...

    def choose(self) -> Place:
        """An unseen configuration; called only while there is one."""
        ...

    def started(self, number: int, place: Place) -> None:
        """The proposal ``number``, whoever chose it, is ``place``; its outcome will follow."""
        ...

    def finished(self, number: int, outcome: Outcome) -> None:
        """What came of the proposal ``number``."""
        ...


class RandomSampler:
    """Every configuration with equal chances: what a search has to beat."""

    model_points: ClassVar[int] = 0

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen, seed: int) -> None:
        self._unseen = unseen

    def choose(self) -> Place:
        return self._unseen.random()

    def started(self, number: int, place: Place) -> None:
        pass

    def finished(self, number: int, outcome: Outcome) -> None:
        pass


class TpeSampler:
    """Optuna's tree-structured Parzen estimator over categorical parameters.

    Specs are searched together: which one is the parameter "spec", and each has its own under
    ``<spec>.<PARAMETER>``, with a joint distribution that only its own trials make up. Proposals
    under way are held against their neighbourhood until their outcome is known. Failures are
    pruned trials, which carry no value: they rank behind every success, whatever the direction.
    """

    model_points: ClassVar[int] = _MODEL_POINTS

    def __init__(self, contenders: Sequence[Contender], unseen: Unseen, seed: int) -> None:
        self._contenders = contenders
        self._unseen = unseen
        self._sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=0
        )
        self._study = _quiet_study(self._sampler)
        self._trials: dict[int, int] = {}  # numbers of proposals to those of the study's trials
        self._which = {c.spec.name: position for position, c in enumerate(contenders)}
        # Parameters with one value say nothing and are left out.
        self._spec = _several({"spec": tuple(self._which)})
        self._parameters = [
            _several({_key(c, p.name): p.values for p in c.table.space.parameters})
            for c in contenders
        ]

    def choose(self) -> Place:
        probe = self._study.ask()
        place = self._propose(self._study.get_trials(deepcopy=False)[probe.number])
        # TPE does not look at failed trials: the one that counts is added by started().
        self._study.tell(probe, state=TrialState.FAIL)
        return place

    def _propose(self, trial: FrozenTrial) -> Place:
        for _ in range(_PROBES):
            contender, config = self._suggest(trial)
            table = self._contenders[contender].table
            row = table.row(config)
            if row is not None and (place := Place(contender, row)) in self._unseen:
                return place
        parameters = table.space.parameters
        indices = np.array([p.values.index(config[p.name]) for p in parameters], dtype=np.int64)
        return self._unseen.nearest(contender, indices)

    def _suggest(self, trial: FrozenTrial) -> tuple[int, Mapping[str, int]]:
        """What TPE would try next: a contender that is not exhausted, and a configuration that
        may break constraints or repeat a trial."""
        spec = self._sampler.sample_relative(self._study, trial, self._spec)
        contender = self._which[spec["spec"]] if spec else 0
        if not self._unseen.left(contender):
            contender = max(range(len(self._contenders)), key=self._unseen.left)
        chosen = self._contenders[contender]
        values = self._sampler.sample_relative(self._study, trial, self._parameters[contender])
        return contender, {
            p.name: values.get(_key(chosen, p.name), p.values[0])
            for p in chosen.table.space.parameters
        }

    def started(self, number: int, place: Place) -> None:
        contender = self._contenders[place.contender]
        config = contender.table.config(place.row)
        distributions = {**self._spec, **self._parameters[place.contender]}
        values = {"spec": contender.spec.name, **{_key(contender, p): config[p] for p in config}}
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params={name: values[name] for name in distributions},
                distributions=distributions,
            )
        )
        self._trials[number] = len(self._study.get_trials(deepcopy=False)) - 1

    def finished(self, number: int, outcome: Outcome) -> None:
        trial = self._trials.pop(number)
        if outcome.ok:
            self._study.tell(trial, outcome.median_us)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)


def _key(contender: Contender, parameter: str) -> str:
    return f"{contender.spec.name}.{parameter}"


def _several(choices: Mapping[str, Sequence[int | str]]) -> dict[str, BaseDistribution]:
    return {key: CategoricalDistribution(c) for key, c in choices.items() if len(c) > 1}


def _quiet_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A study in memory; Optuna announces each one on stderr."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="minimize", sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


SAMPLERS: Mapping[str, type[Sampler]] = {"tpe": TpeSampler, "random": RandomSampler}


def make_search(name: str, contenders: Sequence[Contender], seed: int) -> Search:
    """The search by the sampler ``name`` over all configurations of all ``contenders``.

    ``seed`` is a number of 32 bits. Raises :class:`UsageError` for an unknown name and another
    seed, :class:`NoValidConfig` where there is no contender or one has no configurations.
    """
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed {seed} is not between 0 and 2^32 - 1")
    return Search(contenders, SAMPLERS[name], seed)


class Search:
    """Proposes configurations and learns from their outcomes; the first contender's default is
    the operation's and comes first."""

    def __init__(self, contenders: Sequence[Contender], sampler: type[Sampler], seed: int) -> None:
        if not contenders:
            raise NoValidConfig("no spec to choose a configuration from")
        self._contenders = tuple(contenders)
        self._defaults = [
            Place(position, _default_row(contender))
            for position, contender in enumerate(contenders)
        ]
        self._rng = np.random.default_rng(seed)
        self._unseen = Unseen(self._contenders, self._rng)
        self._sampler = sampler(self._contenders, self._unseen, seed)
        self._opening = itertools.chain(
            ((place, "default") for place in self._defaults),
            itertools.islice(self._points_apart(), sampler.model_points),
        )
        self._asked = 0
        self._under_way: set[int] = set()

    def ask(self) -> Proposal | None:
        """The next configuration, or None once every one has been proposed."""
        if not self._unseen:
            return None
        opening = next(self._opening, None)
        place, origin = opening if opening is not None else (self._sampler.choose(), "sampler")
        self._unseen.take(place)
        contender = self._contenders[place.contender]
        proposal = Proposal(self._asked, contender, contender.table.config(place.row), origin)
        self._sampler.started(proposal.number, place)
        self._under_way.add(proposal.number)
        self._asked += 1
        return proposal

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """What came of a proposal. The order of telling is free, but part of what decides.

        Raises ``ValueError`` for a proposal that is not under way.
        """
        if proposal.number not in self._under_way:
            raise ValueError(f"proposal {proposal.number} is not under way")
        self._under_way.remove(proposal.number)
        self._sampler.finished(proposal.number, outcome)

    def _points_apart(self) -> Iterator[tuple[Place, Origin]]:
        """The best points by the model, or random ones without it, apart from one another and
        from the defaults. Contenders take turns, since the model errs least within one spec."""
        ranks = [
            self._rng.random(len(contender.table))
            if contender.prior_us is None
            else np.nan_to_num(contender.prior_us, nan=np.inf, posinf=np.inf)
            for contender in self._contenders
        ]
        gaps = [
            differing(contender.table, contender.table.indices[:, place.row])
            for contender, place in zip(self._contenders, self._defaults, strict=True)
        ]
        taking_turns = list(range(len(self._contenders)))
        while taking_turns:
            for position in tuple(taking_turns):
                row = _best_apart(ranks[position], gaps[position])
                if row is None:
                    taking_turns.remove(position)
                    continue
                contender = self._contenders[position]
                gap = differing(contender.table, contender.table.indices[:, row])
                np.minimum(gaps[position], gap, out=gaps[position])
                yield Place(position, row), "sampler" if contender.prior_us is None else "model"


def _default_row(contender: Contender) -> int:
    """Raises :class:`UsageError` where the default breaks a constraint: an error of the spec."""
    row = contender.table.require(contender.spec.name).row(contender.default)
    if row is None:
        reasons = "; ".join(contender.table.space.violated(contender.default))
        raise UsageError(
            f"the default of {contender.spec.name} is no valid configuration: "
            f"{contender.default}: {reasons or 'its values are not in the space'}"
        )
    return row


def _best_apart(rank: NDArray[np.float64], gaps: NDArray[np.uint8]) -> int | None:
    """The row of least ``rank`` as far as possible from those chosen; None where no row is left
    whose rank is finite."""
    for apart in range(_APART, 0, -1):
        candidates = np.where(gaps >= apart, rank, np.inf)
        row = int(np.argmin(candidates))
        if np.isfinite(candidates[row]):
            return row
    return None

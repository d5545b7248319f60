# SPDX-License-Identifier: Apache-2.0
"""The search as a sampler in Optuna studies of one's own."""

from __future__ import annotations

import pickle
import threading

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
from test_search import SAMPLERS, bowl, contender, grid, run, weights
from tiers import usual

import tunegen
from tunegen.errors import NoValidConfig, UsageError
from tunegen.model import Config, Constraint, Space, parameters
from tunegen.search import ConfigSampler, PortfolioSampler, make_search

SPACE = grid(4, 4, Constraint("bounded", lambda c: c.P0 + c.P1 <= 4))
TABLE = SPACE.enumerate()
SIZE = len(TABLE)

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture(autouse=True)
def quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def time_of(config):
    """Least at 1, 2, 1, 2."""
    return 1.0 + sum((value - 1 - i % 2) ** 2 for i, value in enumerate(config.values()))


def study_of(sampler, **options):
    return optuna.create_study(sampler=sampler, **options)


def objective(trial):
    """As any user writes one, knowing of names and values only."""
    values = {p.name: trial.suggest_categorical(p.name, p.values) for p in SPACE.parameters}
    return time_of(values)


def configs(study, *states):
    return [
        Config(trial.params)
        for trial in study.get_trials(deepcopy=False, states=states or None)
        if trial.params
    ]


def test_it_is_a_sampler_that_users_find():
    assert tunegen.PortfolioSampler is PortfolioSampler
    assert issubclass(PortfolioSampler, BaseSampler)


def test_a_study_tries_every_valid_configuration_once_and_stops():
    study = study_of(PortfolioSampler(SPACE, seed=1))
    study.optimize(objective, n_trials=10 * SIZE)
    tried = configs(study, TrialState.COMPLETE)
    assert len(tried) == len(study.trials) == SIZE
    assert set(tried) == set(TABLE)
    assert study.best_value == min(time_of(config) for config in TABLE)


def test_past_the_last_configuration_a_trial_is_pruned():
    sampler = PortfolioSampler(grid(2, 2), seed=0)
    study = study_of(sampler)
    trials = [study.ask(sampler.distributions) for _ in range(4)]
    with pytest.raises(optuna.TrialPruned, match="every valid configuration"):
        study.ask(sampler.distributions)
    assert len({tuple(trial.params.items()) for trial in trials}) == 4
    study.tell(trials[0], 1.0)  # nothing to stop, nothing raised


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_product_and_a_study_propose_the_same(sampler):
    """One code path: `tunegen tune` asks this class."""
    both = [contender("a", grid(4, 4), prior=weights), contender("b", grid(3, 5))]
    proposals = run(make_search(sampler, both, 5), bowl, 60)
    made = ConfigSampler(both, SAMPLERS[sampler], 5)
    study = study_of(made)
    study.optimize(lambda trial: time_of(made.suggest(trial).config), n_trials=60)
    assert [
        Config({n.split(".")[1]: v for n, v in trial.params.items() if n != "spec"})
        for trial in study.trials
    ] == [proposal.config for proposal in proposals]
    assert [t.params["spec"] for t in study.trials] == [p.contender.name for p in proposals]


def test_suggesting_by_hand_and_all_at_once_is_the_same():
    made = PortfolioSampler(SPACE, seed=3)
    by_hand, at_once = study_of(PortfolioSampler(SPACE, seed=3)), study_of(made)
    by_hand.optimize(objective, n_trials=40)
    at_once.optimize(lambda trial: time_of(made.suggest(trial).config), n_trials=40)
    assert configs(by_hand) == configs(at_once)
    other = study_of(PortfolioSampler(SPACE, seed=4))
    other.optimize(objective, n_trials=40)
    assert configs(other) != configs(by_hand)


def test_it_finds_the_best_sooner_than_chance():
    space = grid(5, 6, Constraint("odd", lambda c: (c.P0 + c.P3) % 2 == 1))
    found = {}
    for name in ("portfolio", "random"):
        bests = []
        for seed in range(3):
            made = ConfigSampler([contender("one", space)], SAMPLERS[name], seed)
            study = study_of(made)
            study.optimize(lambda trial: time_of(made.suggest(trial).config), n_trials=60)  # noqa: B023
            bests.append(study.best_value)
        found[name] = sum(bests)
    assert found["portfolio"] < 0.7 * found["random"]


def test_rates_are_maximised():
    """A rate is one over a time: the same configurations either way."""
    slow, fast = (
        study_of(PortfolioSampler(SPACE, seed=0)),
        study_of(PortfolioSampler(SPACE, seed=0), direction="maximize"),
    )
    slow.optimize(objective, n_trials=50)
    fast.optimize(lambda trial: 1 / objective(trial), n_trials=50)
    assert configs(slow) == configs(fast)
    assert fast.best_value == pytest.approx(1 / slow.best_value)


def test_several_objectives_are_refused():
    study = study_of(PortfolioSampler(SPACE), directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="multi-objective"):
        study.optimize(objective, n_trials=1)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize(
    "failing", ["pruned", "raised", "nan", "inf", "zero"], ids=lambda how: f"by {how}"
)
def test_failures_rank_last_in_both_directions(direction, failing):
    """Half of the space fails, and the sampler turns away from it."""
    space = grid(4, 6)

    def outcome(trial):
        value = time_of(sampler.suggest(trial).config)
        if trial.params["P0"] >= 2:
            if failing == "pruned":
                raise optuna.TrialPruned
            if failing == "raised":
                raise RuntimeError
            return {"nan": float("nan"), "inf": float("inf"), "zero": 0.0}[failing]
        return value if direction == "minimize" else 1 / value

    sampler = PortfolioSampler(space, seed=0)
    study = study_of(sampler, direction=direction)
    study.optimize(outcome, n_trials=60, catch=(RuntimeError,))
    late = [trial.params["P0"] < 2 for trial in study.trials[25:]]
    assert sum(late) >= 0.8 * len(late)
    assert study.best_trial.params["P0"] < 2 or failing in ("zero", "inf")  # Optuna's own ranking


def test_what_was_pruned_after_it_reported_is_slow_and_no_failure():
    """It neither wins, however little it reported, nor makes its neighbours look broken."""

    def outcome(trial):
        value = objective(trial)
        trial.report(1e-9, step=0)
        if value > 4:
            raise optuna.TrialPruned
        return value

    study = study_of(PortfolioSampler(SPACE, seed=0))
    study.optimize(outcome, n_trials=60)
    assert study.best_value == 1.0


@pytest.mark.parametrize("sampler", ["portfolio", "tpe", "random"])
def test_threads_never_meet(sampler):
    made = ConfigSampler([contender("one", SPACE)], SAMPLERS[sampler], 0)
    study = study_of(made)
    lock, alive = threading.Barrier(2, timeout=20), []

    def outcome(trial):
        if trial.number < 40:
            lock.wait()  # two at once, always
        alive.append(made.suggest(trial).config)
        return time_of(alive[-1])

    study.optimize(outcome, n_trials=60, n_jobs=2)
    assert len(alive) == len(set(alive)) == 60


def test_many_may_be_asked_before_any_is_told():
    sampler = PortfolioSampler(grid(4, 6), seed=0)
    study = study_of(sampler)
    study.optimize(lambda trial: time_of(sampler.suggest(trial).config), n_trials=30)
    asked = [Config(study.ask(sampler.distributions).params) for _ in range(8)]
    assert len(set(asked)) == 8
    assert not set(asked) & set(configs(study, TrialState.COMPLETE))


@pytest.mark.parametrize("stop", usual([3, 20, 41], "20"))
def test_a_stored_study_goes_on_as_if_it_had_never_stopped(tmp_path, stop):
    whole = study_of(PortfolioSampler(SPACE, seed=2))
    whole.optimize(objective, n_trials=60)
    url = f"sqlite:///{tmp_path}/study.db"
    first = study_of(PortfolioSampler(SPACE, seed=2), storage=RDBStorage(url), study_name="s")
    first.optimize(objective, n_trials=stop)
    again = optuna.load_study(
        study_name="s", storage=RDBStorage(url), sampler=PortfolioSampler(SPACE, seed=2)
    )
    again.optimize(objective, n_trials=60 - stop)
    assert configs(again) == configs(whole)


def test_processes_that_share_a_storage_see_what_each_is_about_to_try(tmp_path):
    """Before a parameter has been suggested, and whatever has not finished."""
    url = f"sqlite:///{tmp_path}/study.db"
    storages = [RDBStorage(url), RDBStorage(url)]
    samplers = [PortfolioSampler(grid(2, 3), seed=seed) for seed in (0, 0)]
    study_of(samplers[0], storage=storages[0], study_name="s")
    studies = [
        optuna.load_study(study_name="s", storage=storage, sampler=sampler)
        for storage, sampler in zip(storages, samplers, strict=True)
    ]
    open_trials = []
    for turn in range(8):
        trial = studies[turn % 2].ask()
        trial.suggest_categorical("P0", (0, 1))  # the others are still to come
        open_trials.append((turn, trial))
    for turn, trial in open_trials:
        samplers[turn % 2].suggest(trial)
    assert len(set(configs(studies[0]))) == 8
    for sampler, study in zip(samplers, studies, strict=True):
        assert sampler.left(study) == 0


def test_trials_added_from_elsewhere_count():
    """They are not proposed again, and what they say is learned."""
    source = study_of(PortfolioSampler(SPACE, seed=9))
    source.optimize(objective, n_trials=100)
    target = study_of(PortfolioSampler(SPACE, seed=0))
    target.add_trials(source.trials)
    target.optimize(objective, n_trials=SIZE)
    assert len(target.trials) == SIZE
    assert len(set(configs(target))) == SIZE


def test_what_is_no_configuration_is_passed_over():
    sampler = PortfolioSampler(SPACE, seed=0)
    study = study_of(sampler)
    names = SPACE.names
    distributions = {name: CategoricalDistribution(range(4)) for name in names}
    study.add_trial(
        create_trial(params=dict.fromkeys(names, 3), distributions=distributions, value=0.001)
    )
    study.add_trial(create_trial(params={}, distributions={}, value=0.001))
    study.add_trial(
        create_trial(
            params={"P0": 1}, distributions={"P0": distributions["P0"]}, state=TrialState.FAIL
        )
    )
    study.optimize(objective, n_trials=SIZE + 5)
    assert set(configs(study)[2:]) == set(TABLE)


def test_enqueued_trials_come_first_and_count():
    sampler = PortfolioSampler(SPACE, seed=0)
    study = study_of(sampler)
    study.enqueue_trial({"P0": 1, "P1": 1, "P2": 2, "P3": 3})
    study.enqueue_trial({"P1": 3})
    study.optimize(objective, n_trials=SIZE + 5)
    assert configs(study)[0] == Config({"P0": 1, "P1": 1, "P2": 2, "P3": 3})
    assert configs(study)[1].P1 == 3
    assert len(configs(study)) == len(set(configs(study))) == SIZE


def test_enqueued_parameters_are_kept_until_none_is_left():
    sampler = PortfolioSampler(SPACE, seed=0)
    study = study_of(sampler)
    fitting = [config for config in TABLE if config.P0 == 3 and config.P3 == 1]
    for _ in range(len(fitting) + 2):
        study.enqueue_trial({"P0": 3, "P3": 1})
    study.optimize(objective, n_trials=len(fitting) + 2)
    assert set(configs(study, TrialState.COMPLETE)) == set(fitting)
    assert [t.state for t in study.trials].count(TrialState.PRUNED) == 2


def test_what_is_enqueued_and_invalid_is_named():
    sampler = PortfolioSampler(SPACE, seed=0)
    study = study_of(sampler)
    study.enqueue_trial(dict.fromkeys(SPACE.names, 3))
    with pytest.raises(UsageError, match="trial 0 is no valid configuration"):
        study.optimize(lambda trial: time_of(sampler.suggest(trial).config), n_trials=1)


def test_parameters_of_ones_own_are_sampled_beside_ours():
    study = study_of(PortfolioSampler(SPACE, seed=0))

    def outcome(trial):
        return objective(trial) + abs(trial.suggest_float("other", 0, 1))

    study.optimize(outcome, n_trials=20)
    again = study_of(PortfolioSampler(SPACE, seed=0))
    again.optimize(outcome, n_trials=20)
    values = [trial.params["other"] for trial in study.trials]
    assert len(set(values)) == 20
    assert values == [trial.params["other"] for trial in again.trials]


def test_one_sampler_serves_one_study_after_another():
    sampler = PortfolioSampler(SPACE, seed=0)
    studies = [study_of(sampler) for _ in range(2)]
    for study in studies:
        study.optimize(objective, n_trials=30)
    assert configs(studies[0]) == configs(studies[1])


def test_a_pruner_that_splits_a_study_is_no_obstacle():
    """It shows a sampler one bracket of the trials at a time."""
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9)
    study = study_of(PortfolioSampler(SPACE, seed=0), pruner=pruner)

    def outcome(trial):
        value = objective(trial)
        trial.report(value, step=1)
        if trial.should_prune():
            raise optuna.TrialPruned
        return value

    study.optimize(outcome, n_trials=60)
    assert len(set(configs(study))) == 60


def test_defaults_and_models_come_first():
    space = {"a": grid(3, 4), "b": grid(3, 5)}
    default = {"b": {f"P{i}": 2 for i in range(5)}}
    sampler = PortfolioSampler(
        space, seed=0, default=default, prior={"a": lambda c: 1 + c.P0 + 4 * c.P1}
    )
    study = study_of(sampler)
    found = [sampler.suggest(study.ask()) for _ in range(4)]
    assert found[0] == ("b", Config(default["b"]), "default")
    assert found[1].origin == "model"
    assert found[1].name == "a"
    assert (found[1].config.P0, found[1].config.P1) == (0, 0)


def test_one_configuration():
    sampler = PortfolioSampler(grid(1, 3), seed=0)
    study = study_of(sampler)
    study.optimize(lambda trial: time_of(sampler.suggest(trial).config), n_trials=5)
    assert len(study.trials) == 1
    by_hand = study_of(PortfolioSampler(grid(1, 3), seed=0))
    by_hand.optimize(
        lambda trial: trial.suggest_categorical("P0", (0,)) + trial.suggest_categorical("P1", (0,))
        + trial.suggest_categorical("P2", (0,)) + 1.0, n_trials=5,
    )  # fmt: skip
    assert len(by_hand.trials) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"default": {"P0": 3, "P1": 3, "P2": 0, "P3": 0}}, UsageError, "bounded"),
        ({"default": {"P0": 9, "P1": 0, "P2": 0, "P3": 0}}, UsageError, "P0=9 is not in the"),
        ({"default": {"P0": 0}}, UsageError, "no value for parameter P1"),
        ({"space": {"a": SPACE}, "default": {"b": {}}}, UsageError, "unknown space 'b'"),
        ({"space": {"a": SPACE}, "prior": lambda c: 1.0}, UsageError, "have names"),
        ({"space": grid(2, 2, Constraint("never", lambda c: c.P0 > 5))}, NoValidConfig, "never"),
    ],
)
def test_what_cannot_be_searched_is_said_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        PortfolioSampler(**{"space": SPACE, **arguments})


def test_reseeding_changes_what_follows():
    """As Optuna does in each of several processes."""
    made = [PortfolioSampler(SPACE, seed=0) for _ in range(2)]
    made[1].reseed_rng()
    studies = [study_of(sampler) for sampler in made]
    for study in studies:
        study.optimize(objective, n_trials=30)
    assert configs(studies[0]) != configs(studies[1])


def test_it_can_be_pickled():
    """Where the space can: constraints as lambdas cannot."""
    space = Space(parameters((f"P{i}", range(4), "") for i in range(4)))
    sampler = PortfolioSampler(space, seed=0)
    study = study_of(sampler)
    study.optimize(objective, n_trials=20)
    study.sampler = pickle.loads(pickle.dumps(sampler))
    study.optimize(objective, n_trials=20)
    whole = study_of(PortfolioSampler(space, seed=0))
    whole.optimize(objective, n_trials=40)
    assert configs(study) == configs(whole)

# SPDX-License-Identifier: Apache-2.0
"""The loop, with a compiler that only counts and an evaluator that reads times off a config."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegen import kernels, perfmodel
from tunegen.compiler import KernelCache, NvrtcCompiler
from tunegen.errors import CompileError, PlanError, TemplateError, ToolkitError, UsageError
from tunegen.model import (
    CompiledKernel,
    Config,
    Contest,
    Figures,
    Measurement,
    Outcome,
    Resources,
    Space,
    Standing,
    parameters,
)
from tunegen.search import Contender, make_search
from tunegen.tuner import LOOK_AHEAD, Budget, seen_by, tune

DATA = Path(__file__).parent / "data" / "added_kernel"
DEVICE = perfmodel.default_chip("sm_90")
SCALE = kernels.load(DATA / "scale.py")
PROBLEM = SCALE.operation.problem("2^20")


class FakeCompiler:
    """Hands out kernels that are nothing but a cubin. Thread-safe, as compilers are."""

    def __init__(self, cubin=lambda source: source.digest.encode(), before=lambda source: None,
                 rejection=lambda source: ""):  # fmt: skip
        self.cubin, self.before, self.rejection = cubin, before, rejection
        self.started = []
        self._lock = threading.Lock()

    def compile(self, source, target):
        with self._lock:
            self.started.append(source.digest)
        self.before(source)
        return CompiledKernel(
            name=source.name, entry=source.entry, target=target, ptx=b"", cubin=self.cubin(source),
            resources=Resources(32, 0, 0, 0, 0), warnings="", rejection=self.rejection(source),
            nvrtc="13.0", seconds=0.25, from_cache=False,
        )  # fmt: skip


class NoCompiler:
    def compile(self, source, target):
        raise AssertionError("nothing is to be compiled")


def total_us(config):
    """A time that no two configs of the scale kernel share."""
    return 100.0 + 7.3 * config.THREADS / config.ELEMENTS + 0.1 * config.THREADS - config.UNROLL


class FakeEvaluator:
    evidence = "measured"

    def __init__(self, time_us=total_us, needs_kernels=True):
        self.time_us = time_us
        self.needs_kernels = needs_kernels
        self.tried = []

    def evaluate(self, candidate, problem):
        assert (candidate.kernels is not None) == self.needs_kernels
        self.tried.append(candidate.config)
        found = self.time_us(candidate.config)
        return found if isinstance(found, Outcome) else took(found)


def took(us, low=0.0, high=0.0):
    return Outcome("measured", Measurement(us, "fake", low, high))


def contender(spec=SCALE):
    return Contender(spec, spec.space(PROBLEM, DEVICE).enumerate(), spec.default(PROBLEM, DEVICE))


def with_space(*rows):
    """The scale kernel over other values; the default is the first config."""
    space = Space(parameters(rows))
    return dataclasses.replace(
        SCALE,
        space=lambda problem, device: space,
        default=lambda problem, device: Config({p.name: p.values[0] for p in space.parameters}),
    )


def run(trials=20, *, spec=SCALE, seconds=None, least_gain=None, compiler=None, evaluator=None,
        seed=0, sampler="tpe", **options):  # fmt: skip
    contenders = [contender(spec)]
    return tune(
        PROBLEM,
        contenders,
        evaluator=evaluator or FakeEvaluator(),
        compiler=compiler or FakeCompiler(),
        device=DEVICE,
        search=make_search(sampler, contenders, seed),
        budget=Budget(trials, seconds, least_gain),
        **options,
    )


def story(result):
    """What a run comes to, apart from how long it took."""
    return [(t.number, t.spec, t.config, t.outcome, t.origin) for t in result.trials]


# --- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [0, -1, float("nan"), 2.5, "3"])
def test_trials_that_are_no_budget(trials):
    with pytest.raises(UsageError, match=f"trials={trials} is no budget") as caught:
        Budget(trials)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_no_budget(seconds):
    with pytest.raises(UsageError, match=f"seconds={seconds} is no budget") as caught:
        Budget(10, seconds)
    assert caught.value.exit_code == 2


def test_budget_spent():
    result = run(12)
    assert result.stop_reason == "budget"
    assert [trial.number for trial in result.trials] == list(range(12))
    assert len({trial.config for trial in result.trials}) == 12


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_space_smaller_than_the_budget_is_exhausted(sampler):
    result = run(1000, sampler=sampler)
    table = contender().table
    assert result.stop_reason == "exhausted"
    assert len(result.trials) == len(table)
    assert {trial.config for trial in result.trials} == set(table)
    assert result.best.config == min(table, key=total_us)


def test_a_space_as_large_as_the_budget():
    assert run(len(contender().table)).stop_reason == "budget"


def test_one_value_per_parameter():
    spec = with_space(("THREADS", (64,), ""), ("ELEMENTS", (2,), ""), ("UNROLL", (1,), ""))
    result = run(100, spec=spec)
    assert result.stop_reason == "exhausted"
    assert [trial.config for trial in result.trials] == [spec.default(PROBLEM, DEVICE)]
    assert result.best == result.default == result.trials[0]


def test_time_runs_out():
    slow = FakeCompiler(before=lambda source: time.sleep(0.05))
    result = run(60, seconds=0.3, compiler=slow, threads=2)
    assert result.stop_reason == "time"
    assert 1 <= len(result.trials) < 60
    assert result.seconds < 5


def test_the_default_is_tried_however_short_the_time():
    slow = FakeCompiler(before=lambda source: time.sleep(0.2))
    result = run(60, seconds=1e-9, compiler=slow)
    assert result.stop_reason == "time"
    assert [trial.origin for trial in result.trials] == ["default"]
    assert result.best == result.default == result.trials[0]


# --- the winner ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([1.0, 2.0, 2.5, None]), min_size=3, max_size=3))
def test_a_short_search_is_no_worse_than_none(times):
    """The default comes first, and equals do not displace it."""
    left = iter(times)

    def next_time(config):
        us = next(left)
        return Outcome("timed_out", reason="test") if us is None else took(us)

    result = run(3, evaluator=FakeEvaluator(next_time), threads=1)
    assert result.trials[0] == result.default
    assert result.default.config == SCALE.default(PROBLEM, DEVICE)
    known = [us for us in times if us is not None]
    if not known:
        assert result.best is None
    else:
        assert result.best.number == times.index(min(known))


@pytest.mark.parametrize(
    ("default", "others", "wins"),
    [
        (took(10.0, 9.5, 10.5), took(9.0, 8.8, 9.4), 1),
        (took(10.0, 9.5, 10.5), took(9.0, 8.8, 9.6), 0),  # the intervals overlap
        (took(10.0, 9.5, 10.5), took(9.4), 1),
        (took(10.0), took(9.0, 8.0, 10.0), 0),
        (Outcome("launch_failed", reason="test"), took(9.0, 8.8, 9.6), 1),
    ],
)
def test_the_default_does_not_lose_to_noise(default, others, wins):
    first = SCALE.default(PROBLEM, DEVICE)
    judge = FakeEvaluator(lambda config: default if config == first else others)
    assert run(5, evaluator=judge).best.number == wins


def test_every_trial_fails():
    judge = FakeEvaluator(lambda config: Outcome("wrong_result", reason="test"))
    result = run(5, evaluator=judge)
    assert result.best is None
    assert result.counts == {"wrong_result": 5}
    assert result.default == result.trials[0]


# --- what happens on the way ---------------------------------------------------------------------


def test_a_refused_source_is_a_trial_and_the_rest_is_tuned():
    def refuse(source):
        if "ELEMENTS = 4," in source.text:
            raise CompileError("scale.cu(12): error: identifier is undefined", log="the whole log")

    judge = FakeEvaluator()
    result = run(1000, compiler=FakeCompiler(before=refuse), evaluator=judge)
    failed = {t.config for t in result.trials if t.outcome.kind == "compile_failed"}
    assert failed == {config for config in contender().table if config.ELEMENTS == 4}
    assert {t.outcome.reason for t in result.trials if t.config in failed} == {
        "scale.cu(12): error: identifier is undefined"
    }
    assert set(judge.tried) == set(contender().table) - failed
    assert result.best.config == min(judge.tried, key=total_us)
    assert not result.default.outcome.ok


def test_what_the_compiler_rejects_is_not_run():
    compiler = FakeCompiler(rejection=lambda s: "spills" if "THREADS = 1024," in s.text else "")
    judge = FakeEvaluator()
    result = run(1000, compiler=compiler, evaluator=judge)
    rejected = [t for t in result.trials if t.outcome.kind == "rejected"]
    assert {t.config for t in rejected} == {c for c in contender().table if c.THREADS == 1024}
    assert {t.outcome.reason for t in rejected} == {"scale spills"}
    assert all(config.THREADS != 1024 for config in judge.tried)


def test_what_cannot_be_launched_is_not_compiled():
    def plan(config, problem, sizes):
        if config.THREADS < 128:
            raise PlanError("too many blocks in x")
        return SCALE.plan(config, problem, sizes)

    compiler = FakeCompiler()
    result = run(1000, spec=dataclasses.replace(SCALE, plan=plan), compiler=compiler)
    rejected = [t for t in result.trials if t.outcome.kind == "rejected"]
    assert {t.config for t in rejected} == {c for c in contender().table if c.THREADS < 128}
    assert {t.outcome.reason for t in rejected} == {"too many blocks in x"}
    assert len(compiler.started) == len(result.trials) - len(rejected)


def test_the_same_code_is_tried_once():
    """UNROLL makes no difference to this compiler, ELEMENTS and THREADS to the launch only."""
    compiler = FakeCompiler(cubin=lambda source: b"the same for all")
    judge = FakeEvaluator(lambda config: 1.0 + config.THREADS)
    result = run(1000, compiler=compiler, evaluator=judge)
    table = contender().table
    launches = {str(SCALE.bound_plan(config, PROBLEM, DEVICE)) for config in table}
    assert len(judge.tried) == len(launches) < len(table)
    assert len(result.trials) == len(table)
    assert result.repeats == len(table) - len(launches)
    assert all(t.outcome == took(1.0 + t.config.THREADS) for t in result.trials)
    assert result.compiled == len(table)


def test_nothing_is_compiled_for_an_evaluator_that_needs_no_kernels():
    judge = FakeEvaluator(needs_kernels=False)
    result = run(30, compiler=NoCompiler(), evaluator=judge)
    assert len(judge.tried) == 30
    assert result.compiled == result.cache_hits == 0


def test_what_is_wrong_with_the_tools_is_raised():
    def broken(source):
        raise ToolkitError("no NVRTC")

    with pytest.raises(ToolkitError, match="no NVRTC"):
        run(compiler=FakeCompiler(before=broken))
    missing = lambda c, p: (dataclasses.replace(SCALE.kernels(c, p)[0], template="no.cu.jinja"),)  # noqa: E731
    with pytest.raises(TemplateError, match=r"template no\.cu\.jinja of scale is missing"):
        run(spec=dataclasses.replace(SCALE, kernels=missing))


def test_events_tell_how_far_it_is():
    seen = []
    result = run(25, on_event=lambda trial, progress: seen.append((trial, progress)))
    assert tuple(trial for trial, _ in seen) == result.trials
    for done, (_, progress) in enumerate(seen, 1):
        assert progress.trials == done == sum(progress.counts.values())
        assert progress.total == 25
        assert progress.best_us == min(t.outcome.median_us for t in result.trials[:done])
    assert [p.seconds for _, p in seen] == sorted(p.seconds for _, p in seen)
    assert seen[-1][1].counts == result.counts
    few = []
    run(1000, on_event=lambda trial, progress: few.append(progress.total))
    assert set(few) == {len(contender().table)}


# --- earlier runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_run_goes_on_where_another_stopped(sampler):
    kept = []
    first = run(12, sampler=sampler, keep=lambda trial, kernels: kept.append((trial, kernels)))
    assert [trial for trial, _ in kept] == list(first.trials)
    assert all(kernel.cubin for _, kernels in kept for kernel in kernels)
    second = run(30, sampler=sampler, past=first.trials, keep=lambda trial, _: kept.append(trial))
    assert second.trials[:12] == first.trials
    assert second.past == 12
    assert kept[12:] == list(second.trials[12:]), "what is known is not kept again"
    assert [trial.number for trial in second.trials] == list(range(30))
    assert len({trial.config for trial in second.trials}) == 30
    assert second.compiled == 18
    assert second.default == first.default
    assert second.best == min(second.trials, key=lambda trial: trial.outcome.median_us)


def test_the_past_counts_and_may_be_all_there_is():
    past = run(12).trials
    judge = FakeEvaluator()
    again = run(12, past=past, evaluator=judge)
    assert judge.tried == []
    assert (again.stop_reason, again.trials, again.past) == ("budget", past, 12)
    assert run(5, past=past, evaluator=judge).trials == past
    assert again.near_best_seconds == 0


def test_the_past_may_exhaust_a_space():
    past = run(1000).trials
    again = run(2000, past=past, evaluator=FakeEvaluator(lambda config: pytest.fail("tried")))
    assert again.stop_reason == "exhausted"
    assert again.trials == past


# --- no progress expected ------------------------------------------------------------------------

WIDE = with_space(
    ("THREADS", range(32, 1025, 32), ""), ("ELEMENTS", (1, 2, 4, 8), ""), ("UNROLL", (1, 2, 4), "")
)


def search_wide(**options):
    options = {"trials": 200, "sampler": "portfolio", **options}
    return run(options.pop("trials"), spec=WIDE, **options)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan"), float("inf")])
def test_shares_that_are_none(share):
    with pytest.raises(UsageError, match=f"least_gain={share} is no share") as caught:
        Budget(10, least_gain=share)
    assert caught.value.exit_code == 2


def test_a_search_ends_where_nothing_is_expected():
    """On a landscape without surprises, close to the best and long before the budget is spent."""
    result = search_wide(least_gain=0.001)
    assert result.stop_reason == "no progress expected"
    assert 0 <= result.expected_gain < 0.001
    assert 50 <= len(result.trials) < 150
    best = min(total_us(config) for config in contender(WIDE).table)
    assert result.best.outcome.median_us <= 1.01 * best


def rugged_us(config):
    return total_us(config) * (1 + 0.3 * (zlib.crc32(str(config).encode()) % 97) / 97)


def test_the_less_gain_counts_the_longer_it_goes_on():
    made = [
        len(search_wide(least_gain=share, evaluator=FakeEvaluator(rugged_us)).trials)
        for share in (0.5, 1e-4, 1e-12)
    ]
    assert made == sorted(made)
    assert made[0] < made[2]


def test_the_rule_changes_no_proposal():
    long, short = search_wide(trials=100), search_wide(least_gain=0.005, look_ahead=1)
    assert story(short) == story(search_wide(trials=100, look_ahead=1))[: len(short.trials)]
    assert long.expected_gain is long.left_gain is short.left_gain is None
    assert long.stop_reason == "budget"


def test_what_is_under_way_counts_before_a_search_ends():
    """Nothing asked for is thrown away, and what is learned of it may go against the end."""
    result = search_wide(least_gain=0.9, look_ahead=8)
    assert result.stop_reason == "no progress expected"
    assert [trial.number for trial in result.trials] == list(range(50 + 7)), "and 7 under way"


def test_a_search_that_goes_on_after_all_did_not_end_for_want_of_progress():
    contenders = [contender(WIDE)]
    asked = make_search("random", contenders, 0)
    answers = itertools.chain([1.0] * 10, [0.0], itertools.repeat(1.0))
    asked.expected_gain = lambda: next(answers)  # once, with others under way, nothing is expected
    result = tune(
        PROBLEM, contenders, evaluator=FakeEvaluator(), compiler=FakeCompiler(), device=DEVICE,
        search=asked, budget=Budget(30, least_gain=0.5),
    )  # fmt: skip
    assert next(answers) == 1.0
    assert len(result.trials) == 30
    assert (result.stop_reason, result.expected_gain) == ("budget", None)


def test_asking_again_after_the_end_does_nothing():
    for ahead in (1, 8):
        past = search_wide(least_gain=0.005, look_ahead=ahead).trials
        again = search_wide(
            least_gain=0.005, past=past, look_ahead=ahead,
            evaluator=FakeEvaluator(lambda config: pytest.fail("tried")),
        )  # fmt: skip
        assert again.stop_reason == "no progress expected"
        assert again.trials == past


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sampler_that_does_not_say_is_not_cut_short(sampler):
    assert run(30, sampler=sampler, least_gain=0.9).stop_reason == "budget"


def test_failures_alone_are_no_reason_to_end():
    judge = FakeEvaluator(lambda config: Outcome("rejected", reason="test"))
    result = search_wide(trials=40, least_gain=0.9, evaluator=judge)
    assert (result.stop_reason, result.expected_gain) == ("budget", None)


@pytest.fixture
def clock(monkeypatch):
    """The seconds on the clock of a run, which stands until somebody turns it on."""
    now = [0.0]
    standing = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("tunegen.tuner.log.time", standing)
    return now


@pytest.mark.parametrize("known", [True, False])
def test_what_may_be_left_when_time_ends_a_search(known, clock):
    """Whatever was last estimated, though it is no reason to end."""
    contenders = [contender(WIDE)]
    asked = make_search("random", contenders, 0)
    told, tried = [], []

    def estimate():
        told.append(1.0 / (1 + len(told)) if known else None)
        return told[-1]

    def last_us(config):
        tried.append(config)
        clock[0] = 100.0 * (len(tried) >= 20)
        return total_us(config)

    def finals(ranked):
        clock[0] += 50.0
        return contest(list(ranked), {})

    asked.expected_gain = estimate
    result = tune(
        PROBLEM, contenders, evaluator=FakeEvaluator(last_us), compiler=FakeCompiler(),
        device=DEVICE, search=asked, budget=Budget(90, 100, 1e-3), finals=finals,
    )  # fmt: skip
    assert (result.stop_reason, result.expected_gain, len(result.trials)) == ("time", None, 20)
    assert result.left_gain == told[-1]
    assert len(told) >= 20
    assert (result.search_seconds, result.seconds) == (100.0, 150.0)


# --- drift, and how soon the best was near -------------------------------------------------------


def test_times_are_compared_free_of_drift():
    """The card slows down by half on the way: what comes later is no worse for it."""
    seen = []

    def slowing(config):
        seen.append(config)
        drift = 1.0 if len(seen) < 10 else 1.5
        return Outcome("measured", Measurement(total_us(config) * drift, "fake",
                                               details={"drift": drift}))  # fmt: skip

    result = run(1000, evaluator=FakeEvaluator(slowing))
    assert result.best.config == min(contender().table, key=total_us)


def test_when_the_search_could_have_stopped():
    """Within 2 % of the winner by the search's times, in the order in which they became known."""
    took_s = []

    def paced(config):
        time.sleep(0.01)
        return total_us(config)

    result = run(
        30, evaluator=FakeEvaluator(paced), on_event=lambda trial, p: took_s.append(p.seconds)
    )
    limit = 1.02 * result.best.outcome.median_us
    first = next(n for n, t in enumerate(result.trials) if t.outcome.median_us <= limit)
    before = took_s[first - 1] if first else 0.0
    assert before <= result.near_best_seconds <= took_s[first]


# --- finals --------------------------------------------------------------------------------------


def figures(us):
    return Figures(us, us * 0.99, us * 1.01, 20, 1.0, 1.0, 1.0)


def contest(finalists, times, failures=()):
    """A contest with the given times by trial; the lowest wins."""
    standings = tuple(
        Standing(
            f.name,
            f.trial,
            figures={"burst": figures(times[f.trial])} if f.trial in times else {},
            failure="wrong at the edges" if f.trial in failures else "",
            failed_as="wrong_result",
        )
        for f in finalists
    )
    timed = [s for s in standings if s.figures]
    winner = min(timed, key=lambda s: s.figures["burst"].median_us, default=None)
    return Contest(standings, winner, "burst", (), "", 1e-6)


def test_finals_get_the_default_then_the_fastest():
    seen = []

    def finals(ranked):
        seen.extend(ranked)
        return contest(seen, {})

    result = run(25, finals=finals)
    assert seen[0].default
    assert seen[0].candidate.config == SCALE.default(PROBLEM, DEVICE)
    assert [f.trial_us for f in seen[1:]] == sorted(f.trial_us for f in seen[1:])
    assert len(seen) == 25
    assert all(f.candidate.kernels and f.plan.launches for f in seen)
    assert [f.name for f in seen[1:]] == [f"trial {f.trial}" for f in seen[1:]]
    assert result.best is None, "nobody won"
    assert result.contest.standings


def test_finals_get_the_same_code_once():
    compiler = FakeCompiler(cubin=lambda source: b"the same for all")
    seen = []

    def finals(ranked):
        seen.extend(ranked)
        return contest(seen, {})

    run(1000, compiler=compiler, finals=finals)
    plans = [str(f.plan) for f in seen]
    assert len(plans) == len(set(plans)) < len(contender().table)


def test_the_winner_of_the_finals_is_the_winner_with_its_time():
    def finals(ranked):
        taken = list(itertools.islice(ranked, 4))
        times = {f.trial: 50.0 + n for n, f in enumerate(reversed(taken))}
        return contest(taken, times)

    result = run(25, finals=finals)
    plain = run(25)
    ranked = sorted(plain.trials[1:], key=lambda trial: trial.outcome.median_us)
    assert result.best.number == ranked[2].number
    assert result.best.outcome.median_us == 50.0
    assert result.best.outcome.measurement.policy == "burst"
    assert result.default.outcome.median_us == 53.0
    assert story(result) == story(plain), "the trials keep the search's times"


def test_a_run_as_another_policy_sees_its_finals():
    def finals(ranked):
        default, *others = itertools.islice(ranked, 3)
        seen = contest([default, *others], {default.trial: 9.0, **{f.trial: 8.0 for f in others}})
        first, *rest = seen.standings
        slower = [
            dataclasses.replace(s, figures={**s.figures, "sustained": figures(10.0 + n)})
            for n, s in enumerate(rest)
        ]
        both = dataclasses.replace(seen, standings=(first, *slower), winner=slower[1])
        other = dataclasses.replace(both, policy="sustained", winner=slower[0])
        return dataclasses.replace(both, other=other)

    result = run(25, finals=finals)
    seen = seen_by(result, result.contest.other)
    times = [(t.outcome.measurement.policy, t.outcome.median_us) for t in (result.best, seen.best)]
    assert times == [("burst", 8.0), ("sustained", 10.0)]
    assert seen.best.number == result.contest.other.winner.trial != result.best.number
    assert result.default.outcome.median_us == 9.0
    assert seen.default is None, "it has no time under that policy"
    assert (seen.contest, seen.trials) == (result.contest.other, result.trials)


def test_who_fails_in_the_finals_is_a_failed_trial():
    def finals(ranked):
        taken = list(itertools.islice(ranked, 4))
        return contest(taken, {taken[0].trial: 60.0, taken[3].trial: 50.0},
                       failures=(taken[1].trial, taken[2].trial))  # fmt: skip

    result = run(25, finals=finals)
    assert result.counts == {"measured": 23, "wrong_result": 2}
    failed = [trial for trial in result.trials if not trial.outcome.ok]
    assert {trial.outcome.reason for trial in failed} == {"wrong at the edges"}
    assert result.best not in failed


def test_a_search_without_success_has_no_finals():
    judge = FakeEvaluator(lambda config: Outcome("wrong_result", reason="test"))
    result = run(5, evaluator=judge, finals=lambda ranked: pytest.fail("played"))
    assert result.best is None


def test_finals_that_are_interrupted_leave_the_search_as_it_was():
    def finals(ranked):
        next(iter(ranked))
        raise KeyboardInterrupt

    result = run(25, finals=finals)
    assert result.stop_reason == "interrupted"
    assert result.contest is None
    plain = run(25)
    assert story(result) == story(plain)
    assert result.best.number == plain.best.number


def test_an_interrupted_search_has_no_finals():
    result = run(40, evaluator=interrupting(after=5), finals=lambda ranked: pytest.fail("played"))
    assert (result.stop_reason, result.contest) == ("interrupted", None)


# --- threads -------------------------------------------------------------------------------------


def test_two_compile_at_the_same_time():
    """Each waits for another one to be under way, and gives up where none comes."""
    together = threading.Barrier(2)
    compiler = FakeCompiler(before=lambda source: together.wait(timeout=20))
    result = run(8, compiler=compiler, threads=2)
    assert result.counts == {"measured": 8}
    assert result.compiled == 8
    assert result.compile_seconds == pytest.approx(8 * 0.25)


def test_threads_default_to_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    together = threading.Barrier(3)
    run(6, compiler=FakeCompiler(before=lambda source: together.wait(timeout=20)))


def test_compiling_runs_ahead_but_no_further_than_said():
    compiler, gaps = FakeCompiler(), []

    class Watching(FakeEvaluator):
        def evaluate(self, candidate, problem):
            time.sleep(0.01)
            gaps.append(len(compiler.started) - len(self.tried))
            return super().evaluate(candidate, problem)

    run(40, compiler=compiler, evaluator=Watching())
    assert 1 < max(gaps) <= LOOK_AHEAD


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_neither_threads_nor_delays_decide(sampler):
    def hesitate(source, dice):
        time.sleep(dice.random() * 0.02)

    runs = []
    for threads, dice in ((1, random.Random(1)), (2, random.Random(2)), (7, random.Random(3))):
        compiler = FakeCompiler(before=lambda source, dice=dice: hesitate(source, dice))
        runs.append(story(run(40, compiler=compiler, threads=threads, sampler=sampler)))
    assert runs[0] == runs[1] == runs[2]
    assert story(run(40, sampler=sampler, seed=1)) != runs[0]


# --- interruption --------------------------------------------------------------------------------


def interrupting(after):
    def time_us(config, tried=[]):  # noqa: B006 (counts the calls)
        tried.append(config)
        if len(tried) > after:
            raise KeyboardInterrupt
        return total_us(config)

    return FakeEvaluator(time_us)


def test_an_interrupted_run_keeps_its_trials():
    result = run(40, evaluator=interrupting(after=5))
    assert result.stop_reason == "interrupted"
    assert story(result) == story(run(40))[:5]
    assert result.best == min(result.trials, key=lambda trial: trial.outcome.median_us)


def test_interrupted_before_anything_is_known():
    result = run(40, evaluator=interrupting(after=0))
    assert result.stop_reason == "interrupted"
    assert (result.trials, result.best, result.default) == ((), None, None)


def test_a_signal_ends_the_wait_for_a_compilation():
    released = threading.Event()

    def interrupt(source):
        os.kill(os.getpid(), signal.SIGINT)
        assert released.wait(timeout=20)

    try:
        result = run(40, compiler=FakeCompiler(before=interrupt), threads=1)
    finally:
        released.set()
    assert result.stop_reason == "interrupted"
    assert result.trials == ()


def test_an_interrupted_run_does_not_wait_for_compilations():
    released, entered = threading.Event(), threading.Semaphore(0)

    def block(source):
        # The first that is evaluated is among the first two, in whichever order they started.
        if source.digest not in compiler.started[:2]:
            entered.release()
            assert released.wait(timeout=20)

    compiler = FakeCompiler(before=block)

    class Interrupted(FakeEvaluator):
        def evaluate(self, candidate, problem):
            assert entered.acquire(timeout=20)
            raise KeyboardInterrupt

    try:
        result = run(40, compiler=compiler, evaluator=Interrupted(), threads=2)
        assert not released.is_set()
        assert result.stop_reason == "interrupted"
    finally:
        released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tunegen-compile"):
            thread.join(timeout=20)
    assert len(compiler.started) <= 4, "what had not started was cancelled"


# --- memory, and imports -------------------------------------------------------------------------


def test_a_long_run_keeps_no_images():
    """A megabyte per cubin: 200 trials would be 200 of them."""
    spec = with_space(
        ("THREADS", tuple(range(1, 201)), ""), ("ELEMENTS", (1,), ""), ("UNROLL", (1,), "")
    )
    compiler = FakeCompiler(cubin=lambda source: source.digest.encode().ljust(1 << 20))
    tracemalloc.start()
    try:
        result = run(200, spec=spec, compiler=compiler, sampler="random")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(result.trials) == 200
    assert peak < (LOOK_AHEAD + 8) << 20


def test_the_loop_alone_does_not_load_optuna():
    probe = "import sys, tunegen.tuner; assert 'optuna' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=DATA.parents[2])


# --- with NVRTC ----------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_another_value_leaves_earlier_kernels_in_the_cache(tmp_path):
    compiler = NvrtcCompiler(KernelCache(tmp_path))
    rest = (("ELEMENTS", (2,), ""), ("UNROLL", (1, 2), ""))
    before = run(100, spec=with_space(("THREADS", (64,), ""), *rest), compiler=compiler)
    assert (before.compiled, before.cache_hits) == (2, 0)
    assert before.compile_seconds > 0
    after = run(100, spec=with_space(("THREADS", (64, 96), ""), *rest), compiler=compiler)
    assert (after.compiled, after.cache_hits) == (2, 2)
    again = run(100, spec=with_space(("THREADS", (64, 96), ""), *rest), compiler=compiler)
    assert (again.compiled, again.cache_hits) == (0, 4)
    assert again.compile_seconds == 0


@pytest.mark.nvrtc
def test_another_template_uses_nothing_stale(tmp_path):
    compiler = NvrtcCompiler(KernelCache(tmp_path / "cache"))
    shutil.copytree(DATA, tmp_path / "kernel")
    template = tmp_path / "kernel" / "scale.cu.jinja"
    spec = dataclasses.replace(
        with_space(("THREADS", (64,), ""), ("ELEMENTS", (1,), ""), ("UNROLL", (1,), "")),
        template_root=tmp_path / "kernel",
    )
    assert run(1, spec=spec, compiler=compiler).compiled == 1
    text = template.read_text()
    for change, counts in (
        (("y = a * x:", "y = a times x:"), (0, 1)),  # a reworded comment
        (("a * x[at]", "a * x[at] + 1"), (1, 0)),
    ):
        assert change[0] in text
        template.write_text(text.replace(*change))
        kernels_of_run = run(1, spec=spec, compiler=compiler)
        assert (kernels_of_run.compiled, kernels_of_run.cache_hits) == counts


@pytest.mark.nvrtc
def test_a_kernel_is_one_template_and_one_short_file(tmp_path):
    for name in ("scale.py", "scale.cu.jinja"):
        shutil.copy(DATA / name, tmp_path)
        assert len((tmp_path / name).read_text().splitlines()) < 80
    spec = kernels.load(tmp_path / "scale.py")
    assert spec.template_root == tmp_path
    problem = spec.operation.problem()
    table = spec.space(problem, DEVICE).enumerate()
    prior = perfmodel.rank(spec, problem, DEVICE, table)
    contenders = [Contender(spec, table, spec.default(problem, DEVICE), prior)]
    result = tune(
        problem,
        contenders,
        evaluator=perfmodel.ModelEvaluator(DEVICE),
        compiler=NvrtcCompiler(KernelCache(tmp_path / "cache")),
        device=DEVICE,
        search=make_search("tpe", contenders, 0),
        budget=Budget(20),
    )
    assert result.counts == {"predicted": 20}
    assert result.compiled == 20
    assert result.best.outcome.median_us <= result.default.outcome.median_us
    floor = perfmodel.floor(spec.operation, problem, DEVICE)
    assert floor.us <= result.best.outcome.median_us < 10 * floor.us

# SPDX-License-Identifier: Apache-2.0
"""The loop, with a compiler that only counts and an evaluator that reads times off a config."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
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
    Measurement,
    Outcome,
    Resources,
    Space,
    parameters,
)
from tunegen.search import Contender, make_search
from tunegen.tuner import LOOK_AHEAD, Budget, tune

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


def run(trials=20, *, spec=SCALE, seconds=None, compiler=None, evaluator=None, seed=0,
        sampler="tpe", **options):  # fmt: skip
    contenders = [contender(spec)]
    return tune(
        PROBLEM,
        contenders,
        evaluator=evaluator or FakeEvaluator(),
        compiler=compiler or FakeCompiler(),
        device=DEVICE,
        search=make_search(sampler, contenders, seed),
        budget=Budget(trials, seconds),
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
        if len(compiler.started) > 1:
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
    assert len(compiler.started) <= 3, "what had not started was cancelled"


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

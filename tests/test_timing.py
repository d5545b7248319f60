# SPDX-License-Identifier: Apache-2.0
"""Times: long enough to be read, on operands out of the cache, and spent on what is close."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_gpu import FakeMonitor
from hypothesis import given
from hypothesis import strategies as st
from problems import Doubling

from tunegen.errors import DeviceError
from tunegen.runner import timing
from tunegen.runner.loaded import Loaded
from tunegen.runner.protocol import Block, Enter, Prepared, Try
from tunegen.runner.rotation import Rotation, windows
from tunegen.runner.timing import LEAST_INTERVAL_US, REGIMES, Stopwatch, summary


@pytest.fixture(autouse=True)
def rests(monkeypatch):
    """The seconds that were rested."""
    slept = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    return slept


class Bench:
    """A kernel on a device whose host takes its time, and the sets that its launches worked on."""

    def __init__(self, us=10.0, *, sets=4, in_place=False, host_us=15.0):
        self.problem = Doubling(in_place=in_place, sets=sets)
        assert isinstance(self.problem.prepare(), Prepared)
        self.gpu, self.operands = self.problem.gpu, self.problem.worker._operands
        self.order = []
        self.by_address = {
            placed.address: index
            for index, one in enumerate(self.operands.sets)
            for placed in one.values()
        }

        def run(memory, values):
            self.problem.double(memory, values)
            self.order.append(self.by_address[values["x"]])

        self.kernel = self.problem.kernel(run, us)
        self.loaded = Loaded(self.gpu, self.operands, self.kernel)
        self.gpu._host_us = host_us

    def stopwatch(self, **options):
        return Stopwatch(self.gpu, self.operands, self.loaded.launch, **options)

    def race(self, policy="burst", best_us=None, drop=1.5, budget_ms=40.0):
        return self.stopwatch().race(policy, best_us=best_us, drop=drop, budget_ms=budget_ms)

    def block(self, policy, seconds):
        return self.stopwatch().block(policy, seconds, FakeMonitor(self.gpu))


# --- windows -------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 5000))
def test_windows_go_round_all_sets_evenly(sets, calls):
    found = windows(range(sets), calls)
    visits = [index for window in found for index in window]
    assert visits == list(range(sets)) * (len(visits) // sets)
    longest = max(map(len, found))
    assert calls / 2 <= longest < calls + sets
    assert min(map(len, found)) > 0


def test_a_call_comes_back_to_a_set_only_after_all_others():
    for us in (10.0, 300.0, 3000.0):
        bench = Bench(us, sets=7)
        bench.race(budget_ms=max(20.0, us / 20))
        last = {}
        run_in_turns = bench.order[20:]  # after the glances
        for position, index in enumerate(run_in_turns):
            if index in last:
                assert position - last[index] == 7
            last[index] = position
        assert set(last) == set(range(7))


def test_warm_calls_keep_to_one_set():
    bench = Bench(10.0, sets=7)
    measurement = bench.race("warm")
    assert measurement.policy == "warm"
    assert measurement.median_us == 10
    assert set(bench.order[20:]) == {0}


# --- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [0.7, 2.0, 9.0, 99.0, 450.0, 2700.0])
@pytest.mark.parametrize("host_us", [0.0, 15.0, 60.0])
def test_the_host_does_not_slow_what_is_timed(us, host_us):
    bench = Bench(us, host_us=host_us)
    measurement = bench.race()
    # A mark costs the host as much as a launch, but the device is busy meanwhile.
    assert measurement.median_us == pytest.approx(us, rel=1e-3)
    assert measurement.low_us == pytest.approx(us, rel=1e-3)
    assert measurement.details["interval_us"] >= LEAST_INTERVAL_US
    assert measurement.details["calls_per_interval"] == math.ceil(
        measurement.details["calls_per_interval"]
    )


@pytest.mark.parametrize("policy", ["burst", "sustained", "warm"])
def test_blocks_last_as_long_as_asked(policy, rests):
    bench = Bench(25.0)
    before_ns = bench.gpu.ns
    timed = bench.block(policy, 0.5)
    assert timed.seconds == pytest.approx(0.5, rel=0.1)
    assert (bench.gpu.ns - before_ns) / 1e9 == pytest.approx(0.5, rel=0.15)
    assert np.median(timed.samples_us) == pytest.approx(25, rel=1e-3)
    assert timed.calls == pytest.approx(0.5e6 / 25, rel=0.15)
    interval_us = 0.5e6 / len(timed.samples_us)
    assert interval_us == pytest.approx(REGIMES[policy].interval_us, rel=0.2)
    rested = sum(rests)
    assert rested == pytest.approx(0.5, rel=0.1) if REGIMES[policy].rests else rested == 0


def test_a_short_block_still_has_samples():
    timed = Bench(2700.0).block("burst", 0.001)
    assert len(timed.samples_us) == 3


def test_a_sustained_block_never_waits_for_the_host():
    bench = Bench(100.0, host_us=50.0)
    timed = bench.block("sustained", 1.0)
    assert np.ptp(timed.samples_us) < 0.5
    # Graphs of many calls, launched one behind the other.
    assert len(timed.samples_us) == 50


def test_energy_covers_all_calls_of_a_block():
    bench = Bench(50.0)
    timed = bench.block("sustained", 0.4)
    spent_mj = timed.after.energy_mj - timed.before.energy_mj
    assert spent_mj / timed.calls == pytest.approx(50 * 0.5, rel=0.02)
    assert timed.after.power_w == 500


def test_a_long_call_is_not_recorded():
    bench = Bench(3000.0)
    bench.race()
    assert bench.gpu.graphs == 0
    stopwatch = Bench(30.0).stopwatch()
    rotation = stopwatch._pace(500.0, REGIMES["burst"]).rotation
    assert rotation.calls > 1
    assert rotation._gpu.graphs > 0
    stopwatch.close()
    assert rotation._gpu.graphs == 0


def test_direct_calls_are_never_recorded():
    bench = Bench(100.0, host_us=5.0)
    timed = bench.stopwatch(direct=True).block("burst", 0.05, FakeMonitor(bench.gpu))
    assert np.median(timed.samples_us) == pytest.approx(100, rel=1e-3)
    assert bench.gpu.graphs == 0


def test_in_place_intervals_are_as_long_as_the_sets_allow():
    bench = Bench(10.0, sets=6, in_place=True, host_us=1.0)
    measurement = bench.race()
    assert measurement.details["calls_per_interval"] == 6
    assert measurement.details["interval_us"] == pytest.approx(60, rel=0.05)
    assert measurement.median_us == pytest.approx(10, rel=0.05)


def test_in_place_calls_are_timed_on_sets_that_were_restored_first():
    """What was written last is in the cache."""
    bench = Bench(300.0, sets=6, in_place=True)
    bench.gpu.copy_us = 20.0
    restored = []
    restore = bench.operands.restore
    bench.operands.restore = lambda index: (restored.append(index), restore(index))
    rotation = bench.stopwatch()._pace(700.0, REGIMES["burst"]).rotation
    assert rotation.calls == 3
    assert restored[-6:] == [0, 1, 2, 3, 4, 5]
    bench.order.clear()
    graphs = bench.gpu.graphs
    run = rotation.enqueue(4, lead_in=True)
    assert bench.order == [0, 1, 2] * 4
    samples, whole_us = run.collect()
    assert samples == [300.0] * 4
    assert whole_us > 3600
    assert bench.gpu.graphs == graphs == 2  # restoring is launched as a whole, too


@pytest.mark.parametrize("host_us", [0.0, 15.0])
def test_restoring_hides_what_the_host_takes(host_us):
    bench = Bench(10.0, sets=40, in_place=True, host_us=host_us)
    bench.gpu.copy_us = 2.0
    assert bench.race().median_us == pytest.approx(10, rel=1e-3)


def test_in_place_calls_cannot_keep_to_one_set():
    bench = Bench(in_place=True)
    with pytest.raises(DeviceError, match="in place"):
        Rotation(bench.gpu, bench.operands, bench.loaded.launch, 1, one_set=True)


# --- races ---------------------------------------------------------------------------------------


def test_what_is_far_behind_is_dropped_after_a_few_launches():
    for us, most in ((10_000.0, 2), (700.0, 5)):
        bench = Bench(us)
        measurement = bench.race(best_us=100.0)
        assert measurement.details["raced_out"] is True
        assert measurement.median_us == pytest.approx(us, rel=0.1)
        assert len(bench.order) <= most


def test_short_calls_are_not_dropped_for_what_the_host_takes():
    measurement = Bench(2.7, host_us=30.0).race(best_us=2.5)
    assert "raced_out" not in measurement.details
    assert measurement.median_us == pytest.approx(2.7, rel=1e-3)
    measurement = Bench(5.0, host_us=30.0).race(best_us=2.5)
    assert measurement.details["raced_out"] is True
    assert measurement.samples == 1
    assert measurement.median_us == pytest.approx(5, rel=1e-2)


def test_what_is_not_close_gets_a_quarter_of_the_time():
    device_us = {}
    for us in (100.0, 110.0, 114.0, 140.0):
        bench = Bench(us)
        before_ns = bench.gpu.ns
        measurement = bench.race(best_us=100.0)
        device_us[us] = (bench.gpu.ns - before_ns) / 1e3
        assert measurement.details.get("raced_out", False) == (us > 112.5)
    for near in (100.0, 110.0):
        assert 40e3 < device_us[near] < 55e3
    for far in (114.0, 140.0):
        assert 8e3 < device_us[far] < 20e3


@pytest.mark.parametrize("policy", ["burst", "sustained", "warm"])
def test_the_budget_is_kept(policy, rests):
    bench = Bench(20.0)
    before_ns = bench.gpu.ns
    measurement = bench.race(policy, budget_ms=24.0)
    assert (bench.gpu.ns - before_ns) / 1e6 == pytest.approx(24, rel=0.35)
    assert measurement.samples >= 8
    assert sum(rests) == pytest.approx(0.024 if REGIMES[policy].rests else 0, rel=0.35)


def test_the_first_of_all_is_never_dropped():
    measurement = Bench(80_000.0).race(best_us=None)
    assert "raced_out" not in measurement.details
    assert measurement.samples == 3


def test_a_trial_says_what_it_timed():
    bench = Bench(20.0)
    answer = bench.problem.worker.handle(Try(bench.kernel, 1e-6, "burst"))
    details = answer.outcome.measurement.details
    assert details["interval_us"] == pytest.approx(500, rel=0.2)
    assert details["calls_per_interval"] == pytest.approx(25, rel=0.2)


def test_a_contest_reuses_its_graphs():
    bench = Bench(20.0)
    worker = bench.problem.worker
    worker.handle(Enter("a", bench.kernel))
    worker.handle(Block("a", "burst", 0.02))
    graphs = bench.gpu.graphs
    for _ in range(3):
        worker.handle(Block("a", "burst", 0.02))
    assert bench.gpu.graphs == graphs > 0


# --- intervals of the median ---------------------------------------------------------------------


def test_few_samples_have_no_interval_but_their_range():
    found = summary([3.0, 1.0, 2.0], "burst", {"a": 1})
    assert (found.median_us, found.low_us, found.high_us, found.samples) == (2.0, 1.0, 3.0, 3)
    assert found.details == {"a": 1}
    assert found.policy == "burst"


@pytest.mark.parametrize("count", [6, 10, 25, 80])
def test_intervals_hold_the_true_median_19_times_in_20(count):
    random = np.random.default_rng(0)
    trials, hits, hits_within = 3000, 0, 0
    for _ in range(trials):
        samples = sorted(np.exp(random.standard_normal(count)))
        found = summary(samples, "burst", {})
        hits += found.low_us <= 1.0 <= found.high_us
        # The interval between the next samples inside of it.
        low, high = samples.index(found.low_us) + 1, samples.index(found.high_us) - 1
        hits_within += samples[low] <= 1.0 <= samples[high]
    assert hits / trials >= 0.94
    assert hits_within / trials <= 0.955


def test_an_interval_of_many_samples_is_narrow_and_quick():
    found = summary(list(range(1, 20_002)), "burst", {})
    assert found.median_us == 10_001
    assert found.high_us - found.median_us == found.median_us - found.low_us
    # 1.96 standard deviations of a binomial distribution with p = 1/2.
    assert found.high_us - found.median_us == pytest.approx(0.98 * math.sqrt(20_001), rel=0.02)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=200))
def test_the_interval_holds_the_median(samples):
    found = summary(samples, "burst", {})
    assert min(samples) <= found.low_us <= found.median_us <= found.high_us <= max(samples)


@pytest.mark.parametrize("samples", [[0.0], [0.0, 1.0, 2.0], [-1.0, 3.0]])
def test_a_time_of_zero_is_never_kept(samples):
    with pytest.raises(DeviceError, match="0 us"):
        summary(samples, "burst", {})

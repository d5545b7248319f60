# SPDX-License-Identifier: Apache-2.0
"""Search seconds that some problems of a list leave, and who goes on with them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunegen import session
from tunegen.session import Slice, Spare
from tunegen.session.spare import LEAST_SLICE_SECONDS, Unfinished, next_slice
from tunegen.tuner import Budget, TuneRun

LEAST = LEAST_SLICE_SECONDS
gains = st.none() | st.floats(0, 3)
seconds = st.floats(0.001, 300)
problems = st.lists(st.tuples(gains, st.integers(1, 99)), max_size=6).map(
    lambda found: [Unfinished(place, *each) for place, each in enumerate(found)]
)
budgets = st.builds(
    Budget, st.just(100), st.none() | seconds, st.none() | st.floats(1e-9, 0.5, exclude_min=True)
)


def size(gain):
    return math.inf if gain is None else gain


@given(problems, st.floats(0, 1000), budgets)
def test_one_slice(unfinished, spare_s, budget):
    found = next_slice(unfinished, spare_s, budget)
    able = [each for each in unfinished if size(each.gain) >= (budget.least_gain or math.inf)]
    most_s = min(spare_s, budget.seconds or 0.0)
    if budget.least_gain is None or not able or most_s < LEAST:
        assert found is None
    else:
        assert found is not None
        assert found.seconds == most_s
        assert size(found.gain) == max(size(each.gain) for each in able)
        assert unfinished[found.place].gain == found.gain


def test_of_equals_the_one_with_the_fewest_trials():
    budget = Budget(100, 30.0, 0.01)
    unfinished = [Unfinished(0, None, 40), Unfinished(1, None, 20), Unfinished(2, 0.5, 10)]
    assert next_slice(unfinished, 50.0, budget) == Slice(1, 30.0, None)


def ended(reason, search_seconds=0.0, gain=None, trials=1):
    return TuneRun(
        trials=(None,) * trials, best=None, default=None, counts={}, stop_reason=reason,
        seconds=search_seconds + 15, compiled=0, cache_hits=0, repeats=0, compile_seconds=0.0,
        wait_seconds=0.0, search_seconds=search_seconds, left_gain=gain,
    )  # fmt: skip


EARLY = ("budget", "exhausted", "no progress expected")


@given(
    st.lists(st.tuples(st.sampled_from(("time", *EARLY)), gains, st.floats(0, 60)), max_size=6),
    st.lists(st.tuples(st.sampled_from(("time", "failed", *EARLY)), gains, st.floats(0, 1.2))),
)
def test_a_whole_list(first, then):
    """Never more than was left, and no end but that nobody can go on."""
    budget = Budget(100, 40.0, 0.01)
    spare = Spare(budget)
    for place, (reason, gain, took_s) in enumerate(first):
        spare.ended(place, ended(reason, took_s, gain), 40.0)
    there_s = sum(max(0.0, 40.0 - took_s) for reason, _, took_s in first if reason != "time")
    able = {p: gain for p, (reason, gain, _) in enumerate(first) if reason == "time"}
    assert spare.seconds == pytest.approx(there_s)
    used_s = 0.0
    for reason, gain, share in then:
        if (found := spare.take()) is None:
            assert spare.seconds < LEAST or all(size(gain) < 0.01 for gain in able.values())
            break
        assert found.place in able
        if reason == "failed":
            spare.dropped(found.place)
        else:
            spare.ended(found.place, ended(reason, share * found.seconds, gain), found.seconds)
        full = reason in ("time", "failed")
        used_s += found.seconds if full else min(1.0, share) * found.seconds
        del able[found.place]
        if reason == "time":
            able[found.place] = gain
        assert used_s + spare.seconds == pytest.approx(there_s)
        assert spare.seconds >= 0


@pytest.mark.nvrtc
def test_the_model_goes_on_from_a_result(tmp_path):
    """With the very trials that it would have made without a break."""
    words = {"arch": "sm_90", "problem": "4096", "evaluator": "model", "trials": 6}
    whole = session.tune("axpy", **words, db=tmp_path / "whole")
    words["db"] = tmp_path / "db"
    first = session.tune("axpy", **words, seconds=1e-9, fresh=True)
    assert (first.run.stop_reason, len(first.run.trials)) == ("time", 1)
    again = session.tune("axpy", **words, seconds=600, fresh=True, after=first)
    assert (again.run.past, again.run.stop_reason) == (1, "budget")
    assert len({(t.spec, t.config) for t in again.run.trials}) == 6
    assert again.run.trials[:1] == first.run.trials
    assert again.seconds == pytest.approx(600)
    assert again.record.measurement.median_us <= first.record.measurement.median_us
    assert {t.config for t in whole.run.trials} == {t.config for t in again.run.trials}

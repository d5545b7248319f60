# SPDX-License-Identifier: Apache-2.0
"""What the surrogate is given of the outcomes: kept one by one, the same as looked up in all."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegen.search.outcomes import History, Times, most_points, quantile

LOGS = st.floats(-20, 20, allow_nan=False) | st.sampled_from([0.0, 0.25, 1.0])  # some are equal


@given(st.lists(LOGS, min_size=1, max_size=40), st.floats(0, 1))
def test_a_quantile_is_that_of_numpy_to_the_last_bit(values, share):
    assert quantile(np.sort(values), share) == float(np.quantile(values, share))


@given(st.lists(LOGS, min_size=1, max_size=60), st.data())
def test_what_is_slow_does_not_depend_on_when_it_is_asked(values, data):
    asked, once = Times(), Times()
    for value in values:
        asked.add(value)
        once.add(value)
        if data.draw(st.booleans()):
            asked.slow()
    assert len(asked) == len(values)
    assert asked.slow() == once.slow()
    slow = once.slow()
    assert slow.best == min(values)
    beyond = np.quantile(values, 0.6) - slow.best
    assert math.isclose(slow.most - slow.best, min(max(beyond, 0.15), 1.0), rel_tol=1e-9)


def test_without_a_success_nothing_is_slow():
    assert Times().slow() == Times().slow()
    assert Times().slow().most == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 700), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([300, 200, 66]),
)  # fmt: skip
def test_the_fastest_and_the_latest_are_kept(count, seed, failing, most):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(10_000)[:count]
    logs = np.round(rng.normal(size=count), 1)  # many are equal: the first of them counts
    failed = rng.random(count) < failing
    history, times = History(), Times()
    for row, log, fails in zip(rows.tolist(), logs.tolist(), failed.tolist(), strict=True):
        history.add(row, None if fails else log)
        if not fails:
            times.add(log)
    slow = times.slow()

    own, taken = rows[~failed], logs[~failed]
    if len(own) > most:
        fastest = np.argsort(taken, kind="stable")[: most // 2]
        kept = np.union1d(fastest, np.arange(len(own) - most // 2, len(own)))
        own, taken = own[kept], taken[kept]
    found, values = history.telling(slow, most)
    np.testing.assert_array_equal(found, own)
    np.testing.assert_array_equal(values, np.minimum(taken, slow.most) - slow.best)
    assert len(found) <= most

    latest, failures = history.latest(most)
    np.testing.assert_array_equal(latest, rows[-most:])
    np.testing.assert_array_equal(failures, failed[-most:].astype(float))


def test_a_long_search_looks_at_fewer_the_more_contenders_there_are():
    assert {most_points(known, 3) for known in (0, 300, 1000)} == {300}
    assert most_points(1001, 1) == 200
    assert [most_points(10**5, count) * count for count in (1, 2, 4)] == [200] * 3
    assert most_points(10**5, 100) >= 10

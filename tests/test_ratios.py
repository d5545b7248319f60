# SPDX-License-Identifier: Apache-2.0
"""Who won and how sure that is, on samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tunegen.runner import ratios
from tunegen.runner.ratios import choose, estimate, flips, leader, pieces, ratio, shuffled, ties

times = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40)


def drawn(truth_us, rounds=25, noise=0.01, common=0.0, seed=0):
    """Times of contenders round by round: each has a truth and noise of its own, and all share
    what happens to the card, a random walk of ``common`` a round."""
    rng = np.random.default_rng(seed)
    card = np.exp(np.cumsum(rng.normal(0, common, rounds)))
    return {
        name: list(us * card * np.exp(rng.normal(0, noise, rounds)))
        for name, us in truth_us.items()
    }


# --- intervals -----------------------------------------------------------------------------------


@given(times)
def test_an_interval_holds_its_median_and_lies_within_the_sample(values):
    found = estimate(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found == estimate(values), "the same values, the same interval"


@given(times, st.floats(1e-3, 1e3))
def test_intervals_scale(values, factor):
    one, other = estimate(values), estimate([factor * value for value in values])
    for field in ("median", "low", "high"):
        assert getattr(other, field) == pytest.approx(factor * getattr(one, field))


@pytest.mark.parametrize("noise", ["normal", "skewed"])
def test_an_interval_covers_the_truth_nineteen_times_in_twenty(noise):
    """Of 250 samples; a bootstrap of 25 values is a little too sure of itself."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(250):
        spread = rng.normal(0, 1, 25) if noise == "normal" else np.exp(rng.normal(0, 1, 25)) - 1
        found = estimate(100 + spread)
        covered += found.low <= 100 <= found.high
    assert 0.90 < covered / 250 < 0.985


def test_ratios_within_rounds_see_through_what_all_share():
    """The card wanders by tens of percent, one contender is 2 % slower than the other."""
    found = drawn({"a": 100.0, "b": 102.0}, noise=0.002, common=0.05)
    assert max(found["a"]) > 1.1 * min(found["a"])
    b = ratio(found["b"], found["a"])
    assert b.low > 1.015
    assert b.high < 1.025
    assert b.low < b.median < b.high


@given(times)
def test_a_ratio_to_oneself_is_one(values):
    found = ratio(values, values)
    assert (found.low, found.median, found.high) == (1, 1, 1)


# --- ties and choices ----------------------------------------------------------------------------


def test_the_truly_fastest_wins_alone():
    found = drawn({"slow": 103.0, "fast": 100.0, "slower": 110.0})
    assert ties(found) == ("fast",)
    assert choose(found) == ratios.Choice("fast", ("fast",), "")


def test_equals_tie_most_of_the_time():
    tied = [len(ties(drawn({"a": 100.0, "b": 100.0}, seed=seed))) for seed in range(120)]
    # The leader is picked for leading, so that a one-sided 2.5 % becomes 5 %.
    assert 0.85 < np.mean(np.array(tied) == 2) <= 1


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.permutations(["a", "b", "c", "d"]))
def test_a_choice_does_not_hang_on_the_order_of_contenders(seed, order):
    found = drawn({"a": 100.0, "b": 100.3, "c": 104.0, "d": 100.1}, seed=seed)
    energy = {"a": 5.0, "b": 4.0, "c": 1.0, "d": 6.0}
    shuffle = {name: found[name] for name in order}
    assert set(ties(found)) == set(ties(shuffle))
    chosen = choose(found, energy=energy)
    assert chosen.winner in chosen.tied
    if chosen.rule == ratios.BY_ENERGY:
        assert choose(shuffle, energy=energy).winner == chosen.winner


def tied(*names):
    return {name: [100.0, 101.0, 99.0] for name in names}


def test_the_default_does_not_lose_to_what_only_ties_with_it():
    choice = choose(tied("a", "b", "standard"), default="standard", energy={"a": 1.0})
    assert choice == ratios.Choice("standard", ("a", "b", "standard"), ratios.BY_DEFAULT)
    faster = drawn({"a": 95.0, "standard": 100.0})
    assert choose(faster, default="standard").winner == "a"


def test_ties_are_broken_by_energy_then_by_neighbours_then_by_order():
    energy = {"a": 5.0, "b": 4.0, "c": 4.02}
    assert choose(tied("a", "b", "c")).rule == ratios.BY_ORDER
    assert choose(tied("a", "b", "c")).winner == "a"
    by_energy = choose(tied("a", "b"), energy=energy)
    assert (by_energy.winner, by_energy.rule) == ("b", ratios.BY_ENERGY)
    # b and c take the same energy, as far as can be told.
    assert choose(tied("a", "b", "c"), energy=energy).rule == ratios.BY_ORDER
    worst = {"a": 1.0, "b": 1.2, "c": 1.1}
    by_worst = choose(tied("a", "b", "c"), energy=energy, worst=worst)
    assert (by_worst.winner, by_worst.rule) == ("c", ratios.BY_WORST_CASE)
    # What is not known of all is not asked.
    assert choose(tied("a", "b"), energy={"b": 1.0}).winner == "a"


# --- flips ---------------------------------------------------------------------------------------


def test_policies_that_disagree_by_more_than_two_percent():
    burst = drawn({"a": 100.0, "b": 103.0}, noise=1e-4)
    assert flips(burst, drawn({"a": 105.0, "b": 100.0}, noise=1e-4))
    assert not flips(burst, drawn({"a": 100.0, "b": 101.0}, noise=1e-4))
    near = drawn({"a": 100.0, "b": 101.0}, noise=1e-4)
    assert not flips(near, drawn({"a": 101.0, "b": 100.0}, noise=1e-4))
    assert flips(near, drawn({"a": 104.0, "b": 100.0}, noise=1e-4))
    assert not flips(burst, {})
    # Only who was timed under both can flip.
    assert not flips({**burst, "c": [50.0] * 25}, drawn({"a": 100.0, "b": 120.0}))


# --- orders and pieces ---------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1000))
def test_each_round_has_every_contender_once(count, rounds, seed):
    names = [f"contender {n}" for n in range(count)]
    orders = shuffled(names, rounds, seed)
    assert len(orders) == rounds
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders == shuffled(names, rounds, seed)


def test_orders_are_random():
    first = [order[0] for order in shuffled(["a", "b", "c"], 300, 0)]
    assert all(70 < first.count(name) < 130 for name in "abc")


def test_there_and_back_cancels_a_steady_drift():
    order = ratios.there_and_back(["a", "b", "c"])
    places = {name: [i for i, other in enumerate(order) if other == name] for name in "abc"}
    assert {sum(found) for found in places.values()} == {5}


@given(times, st.integers(1, 12))
def test_pieces_are_medians_of_all_of_a_block_in_order(samples, count):
    found = pieces(samples, count)
    assert len(found) == min(count, len(samples))
    assert min(samples) <= min(found)
    assert max(found) <= max(samples)
    if count >= len(samples):
        assert found == samples


@given(st.dictionaries(st.text(min_size=1), times, min_size=1))
def test_the_leader_has_the_lowest_median(found):
    assume(found)
    assert np.median(found[leader(found)]) == min(np.median(own) for own in found.values())

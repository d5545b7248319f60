# SPDX-License-Identifier: Apache-2.0
"""What the search's own sampler is made of: the surrogate, its criterion, and moves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegen.model import Constraint, Space, parameters
from tunegen.search.moves import Moves
from tunegen.search.surrogate import (
    FEW,
    Encoding,
    Points,
    Scales,
    Surrogate,
    likeness,
    log_expected_improvement,
)

SIZES = (4, 1, 2, 6)


def grid(sizes, *constraints):
    return Space(parameters((f"P{i}", range(n), "") for i, n in enumerate(sizes)), constraints)


def drawn(count, seed=0, sizes=SIZES):
    """Distinct random configurations, by index: (parameters, count)."""
    every = np.array(list(itertools.product(*map(range, sizes)))).T
    return every[:, np.random.default_rng(seed).permutation(every.shape[1])[:count]]


def data(count, seed=0):
    """Points of a smooth landscape of which one parameter, the last, decides most."""
    encoding = Encoding(SIZES)
    indices = drawn(count, seed)
    values = 0.1 * (indices[0] - 1) ** 2 + 0.3 * np.abs(indices[3] - 2) + 0.05 * indices[2]
    model = np.random.default_rng(seed).random(count)
    return encoding, Points(encoding(indices), model), values - values.mean()


# --- the encoding --------------------------------------------------------------------------------


def test_distances_add_up_over_parameters():
    encoding = Encoding(SIZES)
    assert (encoding.categories, encoding.quantities) == (3, 2)
    indices = drawn(48)
    columns = encoding(indices)
    squares = (columns[:, None] - columns[None]) ** 2
    for group in range(5):
        own = encoding.group == group
        found = (squares[:, :, own] * encoding.share[own]).sum(axis=2)
        row = indices[[0, 2, 3, 0, 3][group]].astype(float)
        apart = np.abs(row[:, None] - row)
        expected = apart > 0 if group < 3 else apart / apart.max()
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_parameters_of_one_value_are_no_columns():
    assert Encoding((1, 1))(np.zeros((2, 3), dtype=np.uint8)).shape == (3, 0)


# --- the process ---------------------------------------------------------------------------------


def density(scales, points, values):
    """The log of what the scales climb, up to a constant, straight from the definition."""
    root = np.sqrt(scales.weights)
    covariance = scales.variance * likeness(points.columns * root, points.columns * root)
    covariance += 1.0 + 0.25 * np.outer(points.model, points.model)
    covariance += scales.noise * np.eye(len(values))
    rest = values - 0.7 * points.model
    _, determinant = np.linalg.slogdet(covariance)
    pull = ((scales._logs - scales._believed) / scales._spread) ** 2
    return -0.5 * (rest @ np.linalg.solve(covariance, rest) + determinant + pull.sum())


def test_slopes_are_those_of_the_density():
    encoding, points, values = data(20)
    scales = Scales(encoding)
    start = scales._logs + np.linspace(-0.5, 0.5, len(scales._logs))
    scales._logs = start
    found = scales._slopes(points, values)
    for position in range(len(start)):
        sides = []
        for step in (1e-5, -1e-5):
            scales._logs = start.copy()
            scales._logs[position] += step
            sides.append(density(scales, points, values))
        assert found[position] == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4, abs=1e-6)


def test_learning_makes_the_data_likelier_and_tells_parameters_apart():
    encoding, points, values = data(40)
    scales = Scales(encoding)
    before = density(scales, points, values)
    for _ in range(5):
        scales.learn(points, values)
    assert density(scales, points, values) > before + 3
    added = np.bincount(encoding.group, scales.weights)
    assert np.argmax(added[:3]) == 2 or np.argmax(added[3:]) == 1


def test_few_outcomes_are_taken_to_come_from_a_smoother_space():
    """Once they are no longer few, categories are believed to be farther apart, the range of a
    quantity to be shorter, and both to be what they are however many outcomes follow."""
    encoding = Encoding(SIZES)
    widths = []
    for count in (5, FEW - 1, FEW, 48):
        scales = Scales(encoding)
        scales.learn(Points(encoding(drawn(count)), np.zeros(count)), np.zeros(count))
        believed = np.exp(scales._believed)
        widths.append((believed[:3].sum(), believed[3:5].sum()))
    assert widths[0] == widths[1]
    assert widths[2] == widths[3]
    assert widths[0][0] < widths[2][0]
    assert widths[0][1] > widths[2][1]


def test_what_is_known_is_predicted_and_the_rest_is_unsure():
    encoding, points, values = data(48)
    scales = Scales(encoding)
    known = Points(points.columns[:24], points.model[:24])
    scales.learn(known, values[:24])
    mean, deviation = Surrogate(scales, known, values[:24]).predict(points)
    np.testing.assert_allclose(mean[:24], values[:24], atol=0.1)
    assert deviation[:24].max() < deviation[24:].min()
    error = np.abs(mean[24:] - values[24:])
    assert error.mean() < 0.5 * np.abs(values[24:]).mean()
    assert np.mean(error < 2.5 * deviation[24:]) > 0.9


def test_without_data_the_model_is_believed():
    encoding, points, _ = data(10)
    none = Points(points.columns[:0], points.model[:0])
    mean, deviation = Surrogate(Scales(encoding), none, np.zeros(0)).predict(points)
    assert (np.argsort(mean) == np.argsort(points.model)).all()
    assert deviation.min() > 0.5


# --- the criterion -------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [3.0, 0.5, 0.0, -0.5, -3.0, -4.9, -5.1, -8.0])
@pytest.mark.parametrize("deviation", [0.01, 2.0])
def test_expected_improvement_is_the_integral(gap, deviation):
    """Of how far a normal variable lies below the best, over where it does."""
    best = 1.0
    mean = best - gap * deviation
    below = best - deviation * np.linspace(0, 12, 200_001)
    weight = np.exp(-(((below - mean) / deviation) ** 2) / 2) / math.sqrt(2 * math.pi)
    integral = np.trapezoid((best - below) * weight, -below / deviation)
    (found,) = log_expected_improvement(best, np.array([mean]), np.array([deviation]))
    assert found == pytest.approx(math.log(integral), abs=0.12 if gap < -5 else 1e-3)


def test_farther_from_the_best_is_worse_at_any_distance():
    means = np.linspace(0.0, 60.0, 2000)
    values = log_expected_improvement(0.0, means, np.ones(2000))
    assert np.isfinite(values).all()
    assert (np.diff(values) < 0).all()


# --- moves ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    bound=st.integers(0, 8),
    seed=st.integers(0, 100),
)
def test_moves_reach_valid_configurations_and_steps_all_neighbours(sizes, bound, seed):
    names = [f"P{i}" for i in range(len(sizes))]
    small = Constraint("small", lambda c: sum(getattr(c, name) for name in names) <= bound)
    table = grid(sizes, small).enumerate()
    moves, rng = Moves(table), np.random.default_rng(seed)
    rows = rng.integers(len(table), size=min(3, len(table)))
    changed = (table.indices[:, rows][:, :, None] != table.indices[:, None]).sum(axis=0)
    near = set(np.flatnonzero((changed == 1).any(axis=0)))
    assert near <= set(moves.steps(rows)) <= near | set(rows)
    leaps = moves.leaps(rows, 10, rng)
    assert ((leaps >= 0) & (leaps < len(table))).all()
    assert (changed[:, leaps].min(axis=0) <= 4).all()
    for row in moves.crossings(rows, 20, rng):
        parents = table.indices[:, rows]
        assert (parents == table.indices[:, row][:, None]).any(axis=1).all()


def test_leaps_change_several_parameters_at_once():
    """Where two are tied together, no step leads anywhere."""
    table = grid((8, 8, 3), Constraint("tied", lambda c: c.P0 == c.P1)).enumerate()
    moves, row = Moves(table), np.array([table.row({"P0": 2, "P1": 2, "P2": 0})])
    assert len({int(table.indices[0, r]) for r in moves.steps(row)}) == 1
    reached = moves.leaps(row, 400, np.random.default_rng(0))
    assert len({int(table.indices[0, r]) for r in reached}) >= 5

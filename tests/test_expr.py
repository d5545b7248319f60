# SPDX-License-Identifier: Apache-2.0
"""Size formulas: written once, the same number from Python, from a manifest and from columns."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunegen.model import Expr, ceil_div, evaluate, formula, maximum, minimum

SIZES = ("M", "N", "K")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": minimum,
    "max": maximum,
    "ceil_div": ceil_div,
}

# A tree is a size's name, a number, or (operation, tree, tree).
trees = st.recursive(
    st.sampled_from(SIZES) | st.integers(0, 40),
    lambda below: st.tuples(st.sampled_from(sorted(OPERATIONS)), below, below),
    max_leaves=8,  # products of sizes up to 60 stay within the 64 bits of a column
)
sizes = st.fixed_dictionaries({name: st.integers(1, 60) for name in SIZES})


def build(tree, names):
    if isinstance(tree, tuple):
        name, left, right = tree
        return OPERATIONS[name](build(left, names), build(right, names))
    return names[tree] if isinstance(tree, str) else tree


@given(trees, sizes)
def test_text_means_what_the_arithmetic_means(tree, values):
    try:
        expected = build(tree, values)
        text = formula(build(tree, {name: Expr(name) for name in SIZES}))
    except (ZeroDivisionError, TypeError):  # TypeError: number % Expr is not offered
        assume(False)
    assert evaluate(text, values) == expected
    # The same by the rules of C, whose division of non-negative numbers is Python's //.
    assert eval(str(text).replace("/", "//"), {"min": min, "max": max}, dict(values)) == expected


@given(trees, st.lists(sizes, min_size=1, max_size=5))
def test_columns_give_the_numbers_of_each_row(tree, rows):
    try:
        expected = [build(tree, row) for row in rows]
        columns = {name: np.array([row[name] for row in rows]) for name in SIZES}
        with np.errstate(divide="raise"):
            actual = np.broadcast_to(build(tree, columns), len(rows))
    except (ZeroDivisionError, FloatingPointError):
        assume(False)
    assert actual.tolist() == expected


def test_brackets_only_where_they_are_needed():
    m, n, k = map(Expr, SIZES)
    assert str(ceil_div(m, 128) * n) == "(M + 127) / 128 * N"
    assert str(m - (n - k)) == "M - (N - K)"
    assert str(m - n - k) == "M - N - K"
    assert str(m // (n * k)) == "M / (N * K)"
    assert str(m * n + k) == "M * N + K"
    assert str(minimum(m + n, 3) * 2) == "min(M + N, 3) * 2"


def test_neutral_numbers_vanish():
    m = Expr("M")
    for same in (m + 0, 0 + m, m - 0, m * 1, 1 * m, m // 1, ceil_div(m, 1)):
        assert str(same) == "M"


def test_negative_numbers():
    text = str(Expr("M") + -1)
    assert evaluate(text, {"M": 5}) == 4
    assert evaluate("-3", {}) == -3


def test_numbers_stay_numbers():
    assert ceil_div(10, 4) == 3
    assert (minimum(2, 3), maximum(2, 3)) == (2, 3)
    assert formula(7) == 7
    assert evaluate(7, {}) == 7


@pytest.mark.parametrize(
    "text",
    ["", "M +", "M ** 2", "1.5", "M.real", "f(M, 1)", "min(M)", "min(M, 1, 2)", "[M]",
     "M if 1 else 2", "-M", "~1", "__import__('os')", "'M'", "M; N", "M\0"],
)  # fmt: skip
def test_anything_but_a_formula_is_refused(text):
    with pytest.raises(ValueError, match=r"formula|null"):
        evaluate(text, {"M": 1, "N": 2})


def test_a_size_that_is_not_given():
    with pytest.raises(KeyError, match="N"):
        evaluate("M + N", {"M": 1})


@pytest.fixture
def restless():
    """The collector runs all the time, and each time lets other threads run."""

    def linger(phase, info):
        for _ in range(50):
            pass

    usual, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(linger)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*usual)
    gc.callbacks.remove(linger)


def test_threads_may_evaluate_at_once(restless):
    def often(number):
        return {
            evaluate("min(((A + 1) * B / 3) - 2, A) * 2", {"A": 5, "B": 7}) for _ in range(1500)
        }

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(often, range(4))) == {10}

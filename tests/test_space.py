# SPDX-License-Identifier: Apache-2.0
"""Search spaces: what is enumerated, what is said to be removed, and how fast."""

from __future__ import annotations

import itertools
import operator
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegen.errors import NoValidConfig, UsageError
from tunegen.model import Config, Constraint, Parameter, Space, parameters

# A machine that is busy otherwise is no reason to fail.
relaxed = settings(deadline=None)

NAMES = tuple("ABCDE")


@st.composite
def constraints(draw, names):
    """A predicate over one to three parameters, as a kernel would write it."""
    read = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    bound = draw(st.integers(-2, 40))
    compare = draw(st.sampled_from([operator.le, operator.ge, operator.ne]))
    combine = draw(st.sampled_from(["sum", "product", "divides", "either", "constant"]))

    def holds(c):
        columns = [getattr(c, name) for name in read]
        match combine:
            case "sum":
                return compare(sum(columns), bound)
            case "product":
                return compare(columns[0] * columns[-1], bound)
            case "divides":
                return (columns[0] == 0) | (columns[-1] % columns[0] == 0)
            case "either":
                return (columns[0] <= bound) | (columns[-1] >= bound)
            case "constant":
                return bound >= 0

    return Constraint(f"{combine} of {read} and {bound}", holds)


@st.composite
def spaces(draw):
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    values = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted)
    rows = tuple(Parameter(name, tuple(draw(values)), "") for name in names)
    return Space(rows, tuple(draw(st.lists(constraints(names), max_size=4))))


def brute_force(space: Space) -> list[Config]:
    """The cartesian product in order, filtered one configuration at a time."""
    points = itertools.product(*(parameter.values for parameter in space.parameters))
    configs = [Config(dict(zip(space.names, point, strict=True))) for point in points]
    return [config for config in configs if not space.violated(config)]


@relaxed
@given(spaces())
def test_enumeration_is_the_filtered_product(space):
    assert list(space.enumerate()) == brute_force(space)


@relaxed
@given(spaces(), st.integers(1, 7))
def test_enumeration_in_small_chunks_is_the_same(space, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunegen.model.space._CHUNK_ROWS", rows)
        in_chunks = space.enumerate()
    whole = space.enumerate()
    assert np.array_equal(in_chunks.indices, whole.indices)
    assert in_chunks.removed == whole.removed


@relaxed
@given(spaces())
def test_removed_and_valid_make_up_the_whole_space(space):
    table = space.enumerate()
    assert [reason for reason, _ in table.removed] == [c.reason for c in space.constraints]
    assert sum(count for _, count in table.removed) + len(table) == space.cartesian_size


@relaxed
@given(spaces())
def test_a_constraint_alone_removes_what_breaks_it(space):
    for constraint in space.constraints:
        alone = Space(space.parameters, (constraint,))
        ((_, removed),) = alone.enumerate().removed
        assert removed == space.cartesian_size - len(brute_force(alone))


@relaxed
@given(spaces())
def test_rows_and_configs_are_inverse(space):
    table = space.enumerate()
    for row, config in enumerate(table):
        assert table.row(config) == row
        assert table.row(Config(dict(reversed(list(config.items()))))) == row
    valid = set(table)
    for point in itertools.product(*(parameter.values for parameter in space.parameters)):
        config = Config(dict(zip(space.names, point, strict=True)))
        assert (table.row(config) is None) == (config not in valid)


@relaxed
@given(spaces())
def test_columns_are_the_configs_values(space):
    table = space.enumerate()
    columns = table.columns()
    for name in space.names:
        assert getattr(columns, name).dtype == np.int64
        assert list(getattr(columns, name)) == [config[name] for config in table]
    few = np.arange(len(table))[::2]
    assert list(getattr(table.columns(few), space.names[0])) == [
        config[space.names[0]] for config in table[::2]
    ]


SMALL = Space(
    parameters((("A", (1, 2, 4), ""), ("B", (0, 3), ""))),
    (Constraint("A is below B", lambda c: c.A < c.B),),
)


def test_what_is_no_configuration_has_no_row():
    table = SMALL.enumerate()
    assert [dict(config) for config in table] == [{"A": 1, "B": 3}, {"A": 2, "B": 3}]
    assert table.row({"A": 1}) is None
    assert table.row({"A": 3, "B": 3}) is None
    assert table.row({"A": 4, "B": 3}) is None
    assert table.row({"A": 1, "B": 3, "C": 1}) is None
    assert table[-1] == table[1]
    with pytest.raises(IndexError):
        table[2]


def test_a_config_keeps_the_order_of_the_space():
    config = SMALL.config({"B": 3, "A": 2})
    assert str(config) == "A=2 B=3"
    assert config == Config({"B": 3, "A": 2})
    assert hash(config) == hash(Config({"B": 3, "A": 2}))
    assert (config.A, config.B) == (2, 3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"A": 1, "B": 3, "BB": 1}, "unknown parameter 'BB': did you mean B"),
        ({"A": 1}, "no value for parameter B"),
        ({"A": 1, "B": 2}, "B=2 is not in the space: its values are 0, 3"),
    ],
)
def test_a_config_of_unknown_values_is_refused(values, words):
    with pytest.raises(UsageError, match=words):
        SMALL.config(values)


def test_violated_names_the_reasons():
    assert SMALL.violated(Config({"A": 4, "B": 3})) == ("A is below B",)
    assert SMALL.violated(Config({"A": 1, "B": 3})) == ()


def test_an_empty_space_says_which_constraint_removed_how_many():
    space = Space(SMALL.parameters, (*SMALL.constraints, Constraint("A is 4", lambda c: c.A == 4)))
    table = space.enumerate()
    assert len(table) == 0
    with pytest.raises(NoValidConfig, match=r"6: 'A is 4' removed 4; 'A is below B' removed 2"):
        table.require("this problem")


def test_dividing_by_zero_is_left_to_the_constraint():
    """Columns know no short circuit: warnings are errors here, and no value may raise one."""
    guarded = Constraint("B is 0 or divides 6", lambda c: (c.B == 0) | (6 % c.B == 0))
    space = Space(SMALL.parameters, (guarded,))
    assert len(space.enumerate()) == space.cartesian_size
    assert space.violated(Config({"A": 1, "B": 0})) == ()


def test_the_digest_tells_spaces_apart():
    wider = Space(parameters((("A", (1, 2, 4, 8), ""), ("B", (0, 3), ""))), SMALL.constraints)
    free = Space(SMALL.parameters)
    assert len({SMALL.digest, wider.digest, free.digest}) == 3
    assert SMALL.digest == Space(SMALL.parameters, SMALL.constraints).digest


# --- large spaces --------------------------------------------------------------------------------


def cpu_seconds(action):
    """Result and processor time: a machine that is busy otherwise is no reason to fail."""
    started = time.process_time()
    result = action()
    return result, time.process_time() - started


def test_a_million_configurations():
    space = Space(
        parameters((f"P{i}", range(1, 7), "") for i in range(8)),
        (Constraint("a product", lambda c: c.P0 * c.P1 <= 24),),
    )
    tracemalloc.start()
    try:
        table, seconds = cpu_seconds(space.enumerate)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 32 * 6**6 >= 10**6
    assert seconds < 5
    assert peak < 8 * table.indices.nbytes
    rows = np.random.default_rng(0).integers(len(table), size=200)
    _, seconds = cpu_seconds(lambda: [table.row(table.config(row)) for row in rows])
    assert [table.row(table.config(row)) for row in rows] == list(rows)
    assert seconds < 0.2


def tiled_space() -> Space:
    """A matmul's space: 9 * 10^8 combinations, of which constraints leave some million."""
    rows = (
        ("BLOCK_M", (16, 32, 64, 128, 256), ""),
        ("BLOCK_N", (16, 32, 64, 128, 256), ""),
        ("THREAD_M", (1, 2, 4, 8, 16), ""),
        ("THREAD_N", (1, 2, 4, 8, 16), ""),
        ("WARP_M", (16, 32, 64, 128), ""),
        ("WARP_N", (16, 32, 64, 128), ""),
        ("BLOCK_K", (4, 8, 16, 32, 64), ""),
        ("VECTOR_WIDTH", (1, 2, 4), ""),
        ("BUFFERS", (0, 1, 2, 3, 4), ""),
        ("PADDING", (0, 4, 8), ""),
        ("UNROLL", (1, 2, 4, 8), ""),
        ("MIN_BLOCKS", (1, 2, 3, 4), ""),
        ("RASTER", (1, 2, 4, 8, 16), ""),
        ("SPLIT_K", (1, 2, 4, 8, 16), ""),
    )

    def lanes(c):
        return c.WARP_M // c.THREAD_M * (c.WARP_N // c.THREAD_N)

    def threads(c):
        return c.BLOCK_M // c.THREAD_M * (c.BLOCK_N // c.THREAD_N)

    def elements(c):
        return c.BLOCK_K * (c.BLOCK_M + c.BLOCK_N)

    return Space(
        parameters(rows),
        (
            Constraint("32 lanes", lambda c: lanes(c) == 32),
            Constraint("warps divide M", lambda c: c.BLOCK_M % c.WARP_M == 0),
            Constraint("warps divide N", lambda c: c.BLOCK_N % c.WARP_N == 0),
            Constraint("a block's threads", lambda c: (threads(c) >= 64) & (threads(c) <= 512)),
            Constraint("shared memory", lambda c: c.BUFFERS * elements(c) * 4 <= 49152),
            Constraint("vectors", lambda c: elements(c) % (threads(c) * c.VECTOR_WIDTH) == 0),
            Constraint("padding", lambda c: (c.PADDING == 0) | (c.BUFFERS > 0)),
            Constraint("unrolling", lambda c: c.UNROLL * 4 <= c.BLOCK_K),
            Constraint("rasters", lambda c: (c.RASTER == 1) | (c.SPLIT_K <= 2)),
        ),
    )


@pytest.mark.parametrize(
    "space",
    [
        tiled_space(),
        Space(
            parameters((f"P{i}", range(8), "") for i in range(10)),
            tuple(
                Constraint(f"chain {i}", lambda c, i=i: (
                    (getattr(c, f"P{i}") + getattr(c, f"P{i + 1}")) % 5 == 0
                ))
                for i in range(9)
            ),
        ),
    ],
    ids=["tiled", "chain"],
)  # fmt: skip
def test_a_thousand_million_combinations(space):
    assert space.cartesian_size > 8e8
    table, seconds = cpu_seconds(space.enumerate)
    assert seconds < 5
    assert sum(count for _, count in table.removed) + len(table) == space.cartesian_size
    for config in table[:: max(1, len(table) // 50)]:
        assert not space.violated(config)


def test_more_combinations_than_64_bits_count():
    """2^80 of them, with a constraint per parameter but the first."""
    space = Space(
        parameters((f"P{i}", range(16), "") for i in range(20)),
        tuple(
            Constraint(f"P{i} follows", lambda c, i=i: (
                getattr(c, f"P{i}") == (getattr(c, f"P{i - 1}") * 3 + 1) % 16
            ))
            for i in range(1, 20)
        ),
    )  # fmt: skip
    table = space.enumerate()
    assert space.cartesian_size == 2**80
    assert len(table) == 16
    assert sum(count for _, count in table.removed) + 16 == 2**80
    assert [table.row(config) for config in table] == list(range(16))
    assert table.row(Config({**table[0], "P19": (table[0].P19 + 1) % 16})) is None

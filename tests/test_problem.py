# SPDX-License-Identifier: Apache-2.0
"""Problems: what a user may write, what is refused, and in which words."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunegen.errors import UsageError
from tunegen.kernels import SPECS, operation, operations
from tunegen.model import parse_sizes

OPERATIONS = tuple(operations().values())
matmul = operation("matmul")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4096x4096x4096", [4096, 4096, 4096]),
        ("2^24", [1 << 24]),
        ("2^20x3", [1 << 20, 3]),
        (" 1 X 2 x 0 ", [1, 2, 0]),
        ("0^0", [1]),
        ("10^3", [1000]),
        ("0x10", [0, 10]),  # two sizes, not a hexadecimal number
    ],
)
def test_sizes(text, numbers):
    assert parse_sizes(text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", "x", "4096x", "x4096", "4096xx4096", "-1", "4096x-1x4096", "1.5", "1e9", "nan", "inf",
     "4096*4096", "2^", "^2", "2^-1", "2^2^2", "0b1", "2^62", "4611686018427387904", "9" * 40,
     "\u0661\u0662", "\u00b2"],
)  # fmt: skip
def test_malformed_sizes(text):
    with pytest.raises(UsageError) as caught:
        parse_sizes(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_gives_sizes_or_a_usage_error(text):
    try:
        numbers = parse_sizes(text)
    except UsageError:
        return
    assert all(0 <= number < 1 << 62 for number in numbers)


@given(st.data())
def test_a_problem_is_read_back_from_its_own_words(data):
    """Text, dtype, layout and special attributes say everything: they give an equal problem."""
    chosen = data.draw(st.sampled_from(OPERATIONS))
    count = len(chosen.axes) + (data.draw(st.booleans()) if chosen.batch_axis else 0)
    numbers = tuple(data.draw(st.integers(0, 1 << 19)) for _ in range(count))
    dtype = data.draw(st.sampled_from(chosen.dtypes))
    layout = data.draw(st.sampled_from(chosen.layouts)) or None
    problem = chosen.problem(numbers, dtype=dtype, layout=layout)
    assert chosen.special(problem) == {}
    again = chosen.problem(chosen.text(problem), dtype=dtype, layout=layout)
    assert again == problem
    by_name = chosen.problem(dict(problem.sizes), dtype=dtype, layout=layout)
    assert by_name == problem
    assert hash(by_name) == hash(problem)


def test_attributes_off_their_default_are_told():
    problem = matmul.problem("64x96x128", layout="tn", beta=1, lda=200)
    assert matmul.special(problem) == {"beta": 1, "lda": 200}
    assert matmul.problem(matmul.text(problem), layout="tn", **matmul.special(problem)) == problem


@pytest.mark.parametrize("chosen", OPERATIONS, ids=lambda chosen: chosen.name)
def test_defaults_are_a_problem(chosen):
    problem = chosen.problem()
    assert chosen.flops(problem) >= 0
    assert chosen.bytes(problem) > 0
    with pytest.raises(AttributeError, match="NO_SUCH"):
        _ = problem.NO_SUCH


@pytest.mark.parametrize("chosen", OPERATIONS, ids=lambda chosen: chosen.name)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_arrays_and_traffic(chosen, dtype):
    """Least traffic is the bytes of every operand, twice for those read and written."""
    for layout in chosen.layouts:
        problem = chosen.problem(dtype=dtype, layout=layout or None)
        traffic = 0
        for array in chosen.arrays(problem):
            assert len(array.shape) == len(array.strides)
            assert array.elements >= 1
            assert array.bytes == array.elements * problem.element_bytes
            volume = problem.element_bytes
            for extent in array.shape:
                volume *= extent
            traffic += volume * (2 if array.role == "inout" else 1)
        assert chosen.bytes(problem) == traffic


def test_gaps_between_rows_count_as_memory_not_as_traffic():
    tight = matmul.problem("8x8x8", dtype="fp32")
    wide = matmul.problem("8x8x8", dtype="fp32", lda=100)
    a_tight, a_wide = matmul.arrays(tight)[0], matmul.arrays(wide)[0]
    assert a_tight.elements == 64
    assert a_wide.elements == 7 * 100 + 8
    assert matmul.bytes(wide) == matmul.bytes(tight)


def test_an_empty_operand_has_no_elements():
    a, b, c = matmul.arrays(matmul.problem("4x0x8"))
    assert (a.elements, b.elements, c.elements) == (32, 0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: matmul.problem("64x64"), ["MxNxK", "BxMxNxK"]),
        (lambda: matmul.problem("1x2x3x4x5"), ["MxNxK"]),
        (lambda: matmul.problem((64, -1, 64)), ["-1", "0 or more"]),
        (lambda: matmul.problem({"M": 1, "N": 2}), ["K"]),
        (lambda: matmul.problem({"M": 1, "N": 2, "KK": 3}), ["KK", "did you mean K?"]),
        (lambda: matmul.problem(dtype="fp23"), ["fp23", "did you mean fp32", "bf16"]),
        (lambda: matmul.problem(layout="ntt"), ["ntt", "nt"]),
        (lambda: matmul.problem(bata=1), ["bata", "did you mean beta"]),
        (lambda: matmul.problem(beta=2), ["beta=2"]),
        (lambda: matmul.problem("8x8x8", lda=4), ["lda=4", "8"]),
        (lambda: matmul.problem("8x8x8", align=3), ["align=3"]),
        (lambda: matmul.problem("8x8x8", dtype="fp64", align=4), ["align=4"]),
        (lambda: operation("matmull"), ["matmull", "did you mean matmul", "tunegen kernels"]),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(call, words):
    with pytest.raises(UsageError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_the_registry_names_each_spec_once():
    names = [(spec.operation.name, spec.name) for spec in SPECS]
    assert len(set(names)) == len(names)
    for spec in SPECS:
        assert operation(spec.operation.name) is spec.operation, "specs share their operation"


@pytest.mark.parametrize(
    ("sizes", "attributes", "word"),
    [
        ((2**62, 1, 1), {}, "M="),
        ((0, 2**62, 1), {}, "N="),
        ((1, 1, 1), {"ldb": 2**62}, "ldb="),
        ((1, 1, 1), {"align": 2**62}, "align="),
        ((2**31, 2**31, 1), {}, "C of matmul"),
        ((2**20, 1, 1), {"lda": 2**42}, "A of matmul"),
        ((2**20, 2**20, 1, 2**22), {}, "A of matmul"),
    ],
)
def test_what_64_bits_cannot_address_is_refused(sizes, attributes, word):
    with pytest.raises(UsageError) as caught:
        matmul.problem(sizes, **attributes)
    assert word in str(caught.value)
    assert "2^6" in str(caught.value)


@pytest.mark.parametrize("sizes", [(4.0, 4, 4), {"M": 4.5, "N": 4, "K": 4}, ("4", 4, 4)])
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(UsageError, match="not a whole number"):
        matmul.problem(sizes)
    assert matmul.problem((np.int64(4), 4, 4)) == matmul.problem("4x4x4")


@pytest.mark.parametrize(
    ("text", "traffic"),
    [("0x5x7", 0), ("5x0x7", 0), ("0x5x5x7", 0), ("5x7x0", 4 * 35), ("2x3x5", 4 * (10 + 15 + 6))],
)
def test_an_empty_output_needs_no_input(text, traffic):
    assert matmul.bytes(matmul.problem(text)) == traffic
    beta = 0 if traffic == 0 else 4 * matmul.problem(text).M * matmul.problem(text).N
    assert matmul.bytes(matmul.problem(text, beta=1)) == traffic + beta


def test_problem_survives_pickling():
    problem = matmul.problem((2, 3, 4), dtype="bf16", layout="nt")
    again = pickle.loads(pickle.dumps(problem))
    assert again == problem
    assert again.lda == 4

# SPDX-License-Identifier: Apache-2.0
"""The exception tree: its drawing, its exit codes, and the error for an unknown name."""

from __future__ import annotations

import inspect
import re

import pytest

from tunegen import errors
from tunegen.errors import CompileError, TunegenError, UsageError, unknown

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, TunegenError)
]


def test_the_drawing_is_the_tree():
    """Every class stands in the module's docstring, with its exit code, and nothing else does."""
    drawn = dict(re.findall(r"^\s+(?:[├└]── )?(\w+) +(?:exit code )?(\d)\b", errors.__doc__, re.M))
    assert drawn == {cls.__name__: str(cls.exit_code) for cls in CLASSES}


def test_every_class_says_when_it_is_raised():
    for cls in CLASSES:
        assert inspect.getdoc(cls), cls
        assert cls is TunegenError or inspect.getdoc(cls) != inspect.getdoc(TunegenError), cls


def test_the_hint_follows_the_message():
    error = TunegenError("what was found", hint="what to try")
    assert str(error) == "what was found (what to try)"
    assert (error.message, error.hint) == ("what was found", "what to try")
    assert str(TunegenError("alone")) == "alone"


def test_a_compile_error_carries_its_log():
    error = CompileError("does not compile", log="k.cu(3): error: ...", hint="look")
    assert error.log == "k.cu(3): error: ..."
    assert "k.cu" not in str(error)


@pytest.mark.parametrize(
    ("value", "known", "near"),
    [
        ("fp23", ["fp32", "fp64", "bf16"], ["fp32", "fp64"]),
        ("matmull", ["matmul", "fill", "copy"], ["matmul"]),
        ("BLOCKM", ["BLOCK_M", "BLOCK_N", "UNROLL"], ["BLOCK_M", "BLOCK_N"]),
        ("sm_9", ["sm_90", "sm_89", "gfx90a"], ["sm_90", "sm_89"]),
    ],
)
def test_unknown_names_the_nearest_first(value, known, near):
    error = unknown("thing", value, known, hint="look here")
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert f"did you mean {' or '.join(near)}?" in error.message
    assert error.message.endswith("known: " + ", ".join(known))
    assert error.hint == "look here"
    assert "\n" not in str(error)


def test_unknown_makes_no_guess_where_nothing_is_near():
    assert "did you mean" not in str(unknown("dtype", "zzz", ["fp32"]))
    assert str(unknown("dtype", "x", [])).endswith("known: none")

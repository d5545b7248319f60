# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/steps.py: what single parameters are worth, from the trials of studies."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from tunegen.model import Config, Measurement, Outcome, Trial

SCRIPTS = Path(__file__).parent / "gpu"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as undo:
        undo.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which the script extends
        undo.syspath_prepend(SCRIPTS)
        yield importlib.import_module("steps")


def trial(number, us, **config):
    outcome = Outcome("rejected", reason="no") if us is None else Outcome(
        "measured", Measurement(us, "burst", us, us, 1)
    )  # fmt: skip
    return Trial(number, "wgmma", Config(config), outcome, "sampler", 0.1)


def test_pairs_differ_in_one_parameter_and_are_fast(script):
    trials = [
        trial(0, 10.0, A=1, B=1),
        trial(1, 8.0, A=2, B=1),
        trial(2, 20.0, A=1, B=2),  # slow, but beside a fast one
        trial(3, 19.0, A=2, B=2),
        trial(4, None, A=4, B=1),
    ]
    found = sorted((s.parameter, s.first, s.second, gain) for s, gain in script.steps(trials))
    # Of A not 20 / 19, where both are slow.
    assert found == [("A", 1, 2, 10 / 8), ("B", 1, 2, 8 / 19), ("B", 1, 2, 10 / 20)]


def test_nothing_comes_of_nothing(script):
    assert list(script.steps([])) == []
    assert list(script.steps([trial(0, None, A=1)])) == []

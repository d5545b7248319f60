# SPDX-License-Identifier: Apache-2.0
"""Recorded spaces, and the whole loop on one of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tunegen.errors import UsageError
from tunegen.model import Candidate, Config, Measurement, Outcome
from tunegen.perfmodel import default_chip
from tunegen.replay import ReplayEvaluator, load_space
from tunegen.search import Contender, make_search
from tunegen.tuner import Budget, tune

RECORDED = Path(__file__).parent / "data" / "recorded_spaces"
PNPOLY = RECORDED / "pnpoly_3060.json.gz"
DEVICE = default_chip("sm_90")

SMALL = {
    "space": "small",
    "kernel": "twice",
    "gpu": "none",
    "params": {"B": [4, 1], "A": [0, 7], "C": [3]},
    "rows": [[[1, 7, 3], 2.5], [[4, 0, 3], None], [[1, 0, 3], 1.5]],
}


@pytest.fixture
def write(tmp_path):
    def write(document):
        path = tmp_path / "space.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


class NoCompiler:
    def compile(self, source, target):
        raise AssertionError("a replay compiles nothing")


def replay(recorded, *, trials, seed=0, sampler="tpe"):
    contenders = [Contender(recorded.spec, recorded.space.enumerate(), recorded.default)]
    return tune(
        recorded.problem,
        contenders,
        evaluator=ReplayEvaluator(recorded.outcomes),
        compiler=NoCompiler(),
        device=DEVICE,
        search=make_search(sampler, contenders, seed),
        budget=Budget(trials),
    )


# --- files ---------------------------------------------------------------------------------------


def test_what_is_read(write):
    recorded = load_space(write(SMALL))
    assert recorded.spec.name == recorded.problem.operation == "twice"
    assert recorded.space.names == ("B", "A", "C")
    assert [parameter.values for parameter in recorded.space.parameters] == [(1, 4), (0, 7), (3,)]
    assert [tuple(config.values()) for config in recorded.space.enumerate()] == [
        (1, 0, 3), (1, 7, 3), (4, 0, 3),
    ]  # fmt: skip
    times = {
        tuple(config.values()): outcome.median_us if outcome.ok else outcome.kind
        for (spec, config), outcome in recorded.outcomes.items()
    }
    assert times == {(1, 7, 3): 2.5, (4, 0, 3): "launch_failed", (1, 0, 3): 1.5}
    assert recorded.best_us == 1.5
    assert recorded.space.violated(Config({"B": 4, "A": 7, "C": 3})) == (
        "the configuration was recorded",
    )
    assert recorded.spec.space(recorded.problem, DEVICE) is recorded.space
    assert recorded.spec.default(recorded.problem, DEVICE) == recorded.default


def test_plain_and_gzipped_are_the_same(write, tmp_path):
    zipped = tmp_path / "space.json.gz"
    zipped.write_bytes(gzip.compress(json.dumps(SMALL).encode()))
    assert load_space(zipped).outcomes == load_space(write(SMALL)).outcomes


def test_the_default_is_chosen_without_a_look_at_times(write):
    slower = {**SMALL, "rows": [[row, time and 100 - time] for row, time in SMALL["rows"]]}
    assert load_space(write(SMALL)).default == load_space(write(slower)).default


def changed(**entries):
    return {**SMALL, **entries}


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[1, 2]",
        '{"kernel": "cut off',
        {name: value for name, value in SMALL.items() if name != "rows"},
        changed(params={"B": [1, 4], "A": [0, 7]}),
        changed(params={"B": [1, 4], "A": [0, 7], "C": ["three"]}),
        changed(params=[1, 2]),
        changed(rows=[[[1, 7, 3]]]),
        changed(rows=[[[1, 7], 2.5]]),
        changed(rows=[[[2, 7, 3], 2.5]]),
        changed(rows=[[[1, 7.5, 3], 2.5]]),
        changed(rows=[[[1, 7, 3], -2.5]]),
        changed(rows=[[[1, 7, 3], 0]]),
        changed(rows=[[[1, 7, 3], float("nan")]]),
        changed(rows=[[[1, 7, 3], "fast"]]),
        changed(rows=[[[1, 7, 3], 2.5], [[1, 7, 3], 2.5]]),
        changed(rows=[]),
    ],
)
def test_what_is_no_recorded_space_is_refused_in_one_line(write, document):
    with pytest.raises(UsageError, match=r"space\.json") as caught:
        load_space(write(document))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="none"):
        load_space(tmp_path / "none.json")
    for content in (b"no gzip", gzip.compress(b"{}" * 999)[:-12]):
        (tmp_path / "cut.json.gz").write_bytes(content)
        with pytest.raises(UsageError, match=r"cut\.json\.gz"):
            load_space(tmp_path / "cut.json.gz")


def test_the_recorded_space_here_is_small_and_licensed():
    assert PNPOLY.stat().st_size < 200_000
    notice = (RECORDED / "LICENSE").read_text()
    assert all(file.name in notice for file in RECORDED.glob("*.gz"))
    assert "Permission is hereby granted" in notice


# --- the evaluator -------------------------------------------------------------------------------


def test_outcomes_come_back_as_recorded(write):
    recorded = load_space(write(SMALL))
    judge = ReplayEvaluator(recorded.outcomes)
    assert (judge.evidence, judge.needs_kernels) == ("measured", False)
    assert ReplayEvaluator({}, evidence="predicted").evidence == "predicted"
    for (_, config), outcome in recorded.outcomes.items():
        assert judge.evaluate(Candidate(recorded.spec, config), recorded.problem) is outcome
    unknown = Candidate(recorded.spec, Config({"B": 4, "A": 7, "C": 3}))
    assert judge.evaluate(unknown, recorded.problem).kind == "rejected"


# --- the loop ------------------------------------------------------------------------------------


def test_the_loop_replays_a_recorded_space():
    recorded = load_space(PNPOLY)
    table = recorded.space.enumerate()
    assert len(table) == len(recorded.outcomes) == 4092
    result = replay(recorded, trials=100)
    assert result.stop_reason == "budget"
    assert result.default.config == recorded.default
    assert len({trial.config for trial in result.trials}) == 100
    for trial in result.trials:
        assert trial.outcome == recorded.outcomes["cn_pnpoly", trial.config]
    assert result.best.outcome == Outcome(
        "measured",
        Measurement(min(t.outcome.median_us for t in result.trials if t.outcome.ok), "recorded"),
    )
    assert sum(result.counts.values()) == 100
    assert replay(recorded, trials=100).trials[-1].config == result.trials[-1].config


def test_tpe_comes_closer_to_the_best_than_chance():
    recorded = load_space(PNPOLY)
    reached = {
        sampler: np.mean([
            recorded.best_us / replay(recorded, trials=60, seed=seed, sampler=sampler)
            .best.outcome.median_us
            for seed in range(5)
        ])
        for sampler in ("tpe", "random")
    }  # fmt: skip
    assert reached["tpe"] > reached["random"]
    assert reached["tpe"] > 0.9


def test_a_whole_space_is_replayed(write):
    result = replay(load_space(write(SMALL)), trials=10)
    assert result.stop_reason == "exhausted"
    assert result.counts == {"measured": 2, "launch_failed": 1}
    assert tuple(result.best.config.values()) == (1, 0, 3)

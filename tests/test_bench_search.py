# SPDX-License-Identifier: Apache-2.0
"""Searches on recorded spaces: the figures, the command, and a floor for the default sampler."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tunegen import rival
from tunegen.cli.main import run
from tunegen.errors import ToolkitError, UsageError
from tunegen.replay import load_space
from tunegen.session import bench_search

PNPOLY = Path(__file__).parent / "data" / "recorded_spaces" / "pnpoly_3060.json.gz"

# Sixteen configurations of two parameters; one in the corner fails, the best is 2.0 at (0, 3).
SMALL = {
    "space": "small",
    "kernel": "twice",
    "gpu": "none",
    "params": {"A": [0, 1, 2, 3], "B": [0, 1, 2, 3]},
    "rows": [
        [[a, b], None if (a, b) == (3, 3) else 2.0 + 3 * a + (3 - b)]
        for a in range(4)
        for b in range(4)
    ],
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


def score(result, sampler):
    (found,) = (score for score in result.scores if score.sampler == sampler)
    return found


# After 25, 50 and 100 evaluations, six seeds. Thirty seeds have means of .963, .995 and 1.000 with
# deviations of .051, .014 and .001 from run to run: the floor lies three or more of a mean of six
# below. TPE has means of .913, .959 and .975, chance of .892, .924 and .942.
FLOOR = (0.90, 0.975, 0.99)


def test_the_floor():
    """The default sampler on a recorded space; what is no better than chance falls through it."""
    result = bench_search(
        [PNPOLY], samplers=["portfolio", "random"], seeds=6, evaluations=(25, 50, 100)
    )
    found, chance = score(result, "portfolio"), score(result, "random")
    assert all(mean >= low for mean, low in zip(found.fractions, FLOOR, strict=True)), found
    assert found.arrived >= 5 / 6
    assert chance.fractions[1] < FLOOR[1]
    assert chance.fractions[2] < FLOOR[2]
    assert chance.arrived <= 4 / 6


def test_fractions_are_of_what_was_found(small):
    """By hand: a search in order of the space."""
    result = bench_search([small], samplers=["bruteforce"], seeds=1, evaluations=(1, 2, 5, 16, 99))
    recorded = load_space(small)
    times = {
        tuple(config.values()): recorded.outcomes["twice", config]
        for config in recorded.space.enumerate()
    }
    default = times.pop(tuple(recorded.default.values()))
    after, best = [], math.inf
    for outcome in [default, *times.values()]:
        best = min(best, outcome.median_us if outcome.ok else math.inf)
        after.append(recorded.best_us / best)
    found = score(result, "bruteforce")
    assert found.fractions == tuple(after[min(n, 16) - 1] for n in (1, 2, 5, 16, 99))
    assert found.fractions[-1] == 1.0
    assert found.arrived == 1.0
    assert found.errors == (0.0,) * 5


def test_the_same_call_gives_the_same_scores(small):
    """Whatever the number of processes."""
    scores = [
        [
            (s.fractions, s.errors, s.arrived)
            for s in bench_search(
                [small], samplers=["tpe", "random"], seeds=5, evaluations=(4, 8), processes=count
            ).scores
        ]
        for count in (1, 2)
    ]
    assert scores[0] == scores[1]
    assert scores[0][0] != scores[0][1]
    assert any(error > 0 for error in scores[0][1][1])


def test_noise_misleads(small):
    """With times that say nothing, what is taken to be best is anything: the fraction is that of
    its recorded time, and never above the optimum."""
    how = {"samplers": ["random"], "seeds": 8, "evaluations": (16,), "processes": 1}
    loud = score(bench_search([small], noise=9.0, **how), "random")
    still = score(bench_search([small], **how), "random")
    assert still.fractions == (1.0,)
    assert 0 < loud.fractions[0] < 0.8


def test_means_are_over_spaces(small, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**SMALL, "rows": SMALL["rows"][:9]}))
    result = bench_search(
        [small, other], samplers=["random"], seeds=4, evaluations=(3, 6), processes=1
    )
    assert [s.space for s in result.scores] == ["small", "other"]
    (mean,) = result.means
    for column in range(2):
        both = [s.fractions[column] for s in result.scores]
        assert mean.fractions[column] == pytest.approx(sum(both) / 2)
        spread = [s.errors[column] for s in result.scores]
        assert mean.errors[column] == pytest.approx(math.hypot(*spread) / 2)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_table(small, capsys):
    words = ["bench-search", str(small), "--samplers", "random,tpe", "--seeds", "1",
             "--evaluations", "4, 8"]  # fmt: skip
    assert run(["-q", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("space"))
    assert "(1 seed, 1 at a time)" in " ".join(lines[:head])
    assert lines[head].split()[:4] == ["space", "sampler", "4", "8"]
    assert [line.split()[:2] for line in lines[-2:]] == [["small", "random"], ["small", "tpe"]]


def test_the_command_prints_json(small, capsys):
    assert run(["bench-search", str(small), "--samplers", "random", "--seeds", "1", "--json",
                "--evaluations", "4,8", "--noise", "0.1"]) == 0  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    assert (document["seeds"], document["noise"], document["evaluations"]) == (1, 0.1, [4, 8])
    (found,) = document["scores"]
    assert (found["sampler"], found["space"], len(found["fractions"])) == ("random", "small", 2)
    assert found["ms"] >= 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--samplers", "portfolo"], "unknown sampler 'portfolo': did you mean portfolio"),
        (["--samplers", "kt:genetic"], "did you mean kt:genetic_algorithm"),
        (["--samplers", ","], "nothing to compare"),
        (["--seeds", "0"], "seeds=0"),
        (["--evaluations", "0,5"], "evaluations=0,5"),
        (["--evaluations", "50,25"], "evaluations=50,25"),
        (["--evaluations", "many"], "--evaluations 'many'"),
        (["--noise", "-1"], "noise=-1.0"),
        (["--noise", "nan"], "noise=nan"),
        (["--look-ahead", "0"], "look_ahead=0"),
    ],
)
def test_bad_values_are_usage_errors(small, capsys, words, says):
    assert run(["bench-search", str(small), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_space_is_named_before_anything_runs(small, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    assert run(["bench-search", str(small), str(broken)]) == 2
    assert "broken.json" in capsys.readouterr().err


# --- Kernel Tuner --------------------------------------------------------------------------------


@pytest.mark.skipif(rival.installed_version() is not None, reason="Kernel Tuner is installed")
def test_without_kernel_tuner_its_strategies_are_refused(small, capsys):
    with pytest.raises(ToolkitError, match="pip install kernel_tuner"):
        bench_search([small], samplers=["kt:genetic_algorithm"])
    assert run(["bench-search", str(small), "--samplers", "kt:pso"]) == 1
    assert "Kernel Tuner, not installed here" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("strategy", rival.STRATEGIES)
def test_kernel_tuners_evaluations_are_counted_alike(small, strategy):
    """Unique, failures among them, none beyond the budget, none that was not recorded."""
    pytest.importorskip("kernel_tuner")
    times = {(a, b): None if a == b else 2.0 + a + abs(b - 3) for a in range(8) for b in range(8)}

    def explore():
        space = rival.rival_space(("A", "B"), [range(8), range(8)], list(times))
        return rival.explore(strategy, space, times.__getitem__, seed=0, evaluations=30)

    evaluated, seconds = explore()
    assert 1 <= len(evaluated) <= 30
    assert len(set(evaluated)) == len(evaluated)
    assert set(evaluated) <= set(times)
    assert seconds >= 0
    result = bench_search([PNPOLY], samplers=[f"kt:{strategy}"], seeds=1, evaluations=(40,))
    assert 0 < score(result, f"kt:{strategy}").fractions[0] <= 1.0


def test_kernel_tuner_is_not_asked_to_search_what_is_tiny(small):
    pytest.importorskip("kernel_tuner")
    with pytest.raises(UsageError, match="need 50 configurations, not 16"):
        bench_search([small], samplers=["kt:pso"], seeds=1)


def test_bad_files_raise_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="none"):
        bench_search([tmp_path / "none.json"])

# SPDX-License-Identifier: Apache-2.0
"""Which earlier trials a tune uses, from the library call to the store and back: faults that users
of other tuners reported. The GPU is played by a script, and writes down what it was asked to try.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import scripted
import test_gpu_session as session_tests

from tunegen import compiler, kernels, session
from tunegen.database import Database
from tunegen.session import gpu

pytestmark = pytest.mark.nvrtc

FOLDER = Path(__file__).parent / "data" / "faulty_kernel"
TRIALS = 4


class Tuning:
    """Tunes a kernel of its own, kept beside its template in a folder of its own."""

    def __init__(self, folder, home):
        self.folder, self.home = folder, home
        self.template = folder / "faulty.cu.jinja"
        self.store = home / "tunegen" / "studies.db"
        self.log = home / "log"

    def __call__(self, trials=TRIALS, change=lambda spec: spec, problem="4096", **options):
        """The configurations that the GPU had to try, the earlier trials used, and the notes."""
        spec = change(kernels.load(self.folder / "faulty.py"))
        self.log.unlink(missing_ok=True)
        notes = []
        result = session.tune(
            "faulty", problem=problem, trials=trials, specs=(spec,), evaluator="gpu",
            sampler="random", on_note=notes.append, **options,
        )  # fmt: skip
        lines = scripted.logged(self.log) if self.log.exists() else []
        assert all(scripted.is_gone(pid) for pid, _ in lines)
        tried = sum(text.startswith("trying") for _, text in lines)
        assert len({trial.config for trial in result.run.trials}) == len(result.run.trials)
        return tried, result.run.past, notes


@pytest.fixture
def tune(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "NvrtcCompiler", session_tests.TellingCompiler)
    monkeypatch.setattr(gpu, "find_gpus", lambda: session_tests.found(session_tests.H200))
    monkeypatch.setattr(gpu, "vendor_worker", lambda card: (None, "not here"))
    script = {"log": str(tmp_path / "log"), "shape": [4096], "noise": 0.002}
    monkeypatch.setattr(gpu, "COMMAND", scripted.command(script))
    shutil.copytree(FOLDER, tmp_path / "kernel", ignore=shutil.ignore_patterns("__pycache__"))
    return Tuning(tmp_path / "kernel", tmp_path)


def right_ones(spec):
    """The same spec with the right configurations only."""
    return more_values(spec, THREADS=(64, 128, 256, 512), FAULT=(0,))


def more_values(spec, **values):
    def space(problem, device):
        whole = spec.space(problem, device)
        chosen = [
            dataclasses.replace(p, values=values.get(p.name, p.values)) for p in whole.parameters
        ]
        return dataclasses.replace(whole, parameters=tuple(chosen))

    return dataclasses.replace(spec, space=space)


def test_old_timings_are_not_taken_for_new_code(tune):
    """A reworded comment is no new code; another statement is, also where it computes the same."""
    assert tune(change=right_ones)[1] == 0
    text = tune.template.read_text()
    tune.template.write_text(text.replace("// Fast and wrong:", "// Quick and wrong:"))
    assert tune(change=right_ones)[:2] == (0, TRIALS)
    tune.template.write_text(text.replace("a * x[at]", "x[at] * a"))
    assert tune(change=right_ones)[:2] == (TRIALS, 0)
    tune.template.write_text(text)
    assert tune(change=right_ones)[:2] == (0, TRIALS)


def test_old_timings_are_not_taken_for_another_compilers(tune, monkeypatch):
    assert tune(change=right_ones)[1] == 0
    version = compiler.nvrtc_version()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: f"{version}.1")
    assert tune(change=right_ones)[:2] == (TRIALS, 0)


def test_one_problem_learns_from_another(tune, tmp_path):
    """Of four trials one is for what is known: the winner of the problem before, from the database
    that ``db`` names, or from its study."""

    def second_trial(**options):
        found = []

        def on_event(trial, progress):
            found.append(trial)

        tune(problem="8192", change=right_ones, on_event=on_event, **options)
        return found[1]

    assert tune(change=right_ones, db=tmp_path / "db")[:2] == (TRIALS, 0)
    ((_, record),) = Database(tmp_path / "db").records()
    assert record.config["THREADS"] != 128, "the default"
    trial = second_trial(db=tmp_path / "db")
    assert (trial.origin, dict(trial.config)) == ("record", record.config)
    trial = second_trial(db=tmp_path / "other", fresh=True)
    assert (trial.origin, dict(trial.config)) == ("study", record.config)
    trial = second_trial(db=tmp_path / "db", fresh=True, warm=False)
    assert trial.origin == "sampler"
    storage = f"sqlite:///{tmp_path / 'empty.db'}"
    trial = second_trial(db=tmp_path / "third", storage=storage)
    assert trial.origin == "sampler"


def test_an_added_value_costs_no_earlier_trial(tune):
    assert tune(change=right_ones)[:2] == (TRIALS, 0)
    more = TRIALS + 1
    tried, past, _ = tune(
        more, lambda spec: more_values(spec, THREADS=(64, 128, 256, 512, 1024), FAULT=(0,))
    )
    assert (tried, past) == (1, TRIALS)


@pytest.mark.parametrize(
    "other",
    [
        {"problem": "8192"},
        {"policy": "warm"},
        {"change": lambda spec: dataclasses.replace(right_ones(spec), error_factor=2.0)},
        {"shared": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_was_measured_otherwise_is_kept_apart(tune, other):
    """Another size, another policy, another tolerance, a card that others use."""
    assert tune(change=right_ones)[:2] == (TRIALS, 0)
    assert tune(**{"change": right_ones, **other})[:2] == (TRIALS, 0)
    assert tune(change=right_ones)[:2] == (0, TRIALS)


@pytest.mark.parametrize("cut", ["12 bytes", "all"])
def test_a_torn_store_costs_a_warning_and_the_torn_trials(tune, cut):
    assert tune(change=right_ones)[1] == 0
    content = tune.store.read_bytes()
    tune.store.write_bytes(content[:-12] if cut == "12 bytes" else b"")
    tried, past, notes = tune(change=right_ones)
    assert tried + past == TRIALS
    assert past == 0 or cut == "12 bytes"
    assert len([note for note in notes if str(tune.store) in note]) == 1
    again = tune(change=right_ones)
    assert again[:2] == (0, TRIALS)
    assert not any(str(tune.store) in note for note in again[2])


def test_a_space_of_one_and_a_budget_beyond_it(tune):
    """Every configuration once, and the run ends; the default comes first however small the
    budget."""
    only = lambda spec: more_values(spec, THREADS=(128,), FAULT=(0,))  # noqa: E731
    assert tune(50, only)[:2] == (1, 0)
    assert tune(50, right_ones)[:2] == (3, 1)
    lines = [text for _, text in scripted.logged(tune.log) if text.startswith("trying")]
    assert len(lines) == 3


def test_three_trials_are_no_worse_than_the_default(tune):
    """The default is tried before anything else, and plays in the finals."""
    spec = right_ones(kernels.load(tune.folder / "faulty.py"))
    result = session.tune(
        "faulty", problem="4096", trials=3, specs=(spec,), evaluator="gpu", sampler="random",
        fresh=True,
    )  # fmt: skip
    default = spec.default(spec.operation.problem("4096"), scripted.DEVICE)
    assert result.run.trials[0].config == default
    assert any(standing.trial == 0 for standing in result.run.contest.standings)
    assert result.record.default_us is not None
    assert result.record.measurement.median_us <= result.record.default_us

# SPDX-License-Identifier: Apache-2.0
"""tunegen study on the command line, and what a tune may use of the trials stored."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from store_writer import make_key, make_trial, url

from tunegen import kernels
from tunegen.cli.main import run
from tunegen.model import Measurement, Outcome, Trial
from tunegen.perfmodel import ModelEvaluator
from tunegen.search import Contender, make_search
from tunegen.session import open_study, request
from tunegen.session.studies import source_digests
from tunegen.store import Study

ADDED = Path(__file__).parent / "data" / "added_kernel"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def tunegen(capsys):
    """Run a command line; gives exit code, stdout and stderr."""

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def fill(trials, storage=None, **changes):
    with Study.open(storage, make_key(**changes), fresh=True) as study:
        for trial in trials:
            study.add(trial, {"kernel": "a" * 64}, {"kernel": "b" * 64})
        return study.name


TRIALS = (make_trial(0, 12.0, a=4), make_trial(1, 8.0, a=8), make_trial(2, reason="it hangs"))


# --- the command ---------------------------------------------------------------------------------


def test_no_studies(tunegen, tmp_path):
    code, _, errors = tunegen("study", "list")
    assert (code, errors) == (0, "0 studies\n")
    assert not (tmp_path / "data").exists()
    assert tunegen("study", "list", "--json")[:2] == (0, "[]\n")


def test_list(tunegen):
    first, second = fill(TRIALS), fill([], policy="sustained")
    code, out, errors = tunegen("study", "list")
    assert (code, errors) == (0, "2 studies\n")
    one, two = (line for line in out.splitlines() if "nothing-1024" in line)
    assert one.split()[:7] == [first, "sm_90", "measured", "3", "1", "8", "us"]
    assert two.split()[:6] == [second, "sm_90", "measured", "0", "0", "none"]
    assert "--fresh" not in out


def test_list_says_what_a_fresh_start_set_aside(tunegen):
    names = fill(TRIALS), fill(TRIALS)
    _, out, _ = tunegen("study", "list")
    lines = [next(x for x in out.splitlines() if x.split()[:1] == [name]) for name in names]
    assert ["set aside by --fresh" in line for line in lines] == [True, False]


def test_show(tunegen):
    name = fill(TRIALS)
    code, out, errors = tunegen("study", "show", name)
    assert (code, errors) == (0, "")
    for part in (
        "nothing 1024 fp32",
        "NVIDIA H200 (sm_90, 132 multiprocessors)",
        "measured, policy burst, tolerance 1e-05, NVRTC 13.0.88",
        "3: 1 launch_failed, 2 measured",
        "8 us, trial 1: wide: A=8 B=1 ONE=7",
    ):
        assert part in out
    assert tunegen("study", "show", "nothing-10")[1] == out


def test_json_holds_every_trial(tunegen):
    name = fill(TRIALS)
    code, out, errors = tunegen("study", "show", name, "--json")
    document = json.loads(out)
    assert (code, errors) == (0, "")
    assert document["name"] == name
    assert document["counts"] == {"measured": 2, "launch_failed": 1}
    assert document["trials"] == 3
    assert document["device"]["name"] == "NVIDIA H200"
    assert document["current"] is True
    assert [trial["number"] for trial in document["list"]] == [0, 1, 2]
    fastest, failure = document["list"][1:]
    assert document["best"] == fastest
    assert fastest["config"] == {"A": 8, "B": 1, "ONE": 7}
    assert (fastest["median_us"], fastest["low_us"], fastest["high_us"]) == (8.0, 7.0, 9.0)
    assert (failure["outcome"], failure["reason"]) == ("launch_failed", "it hangs")
    assert failure["digests"] == {"kernel": "a" * 64}
    assert failure["cubins"] == {"kernel": "b" * 64}
    listed = json.loads(tunegen("study", "list", "--json")[1])
    assert listed == [{key: value for key, value in document.items() if key != "list"}]


def test_another_storage(tunegen, tmp_path):
    storage = url(tmp_path / "other.db")
    name = fill(TRIALS, storage)
    assert name in tunegen("study", "list", "--storage", storage)[1]
    assert name not in tunegen("study", "list")[1]
    assert tunegen("study", "show", name, "--storage", storage)[0] == 0


BAD = {
    "study show nothing-1024-fp23": (2, "unknown study 'nothing-1024-fp23': did you mean nothing"),
    "study show nothing": (2, "2 studies begin with 'nothing': nothing-"),
    "study show": (2, "NAME"),
    "study shaw": (2, "shaw"),
    "study list --storage studies.db": (2, "malformed storage 'studies.db' (write sqlite:///"),
    "study list --storage mysql://host/x": (2, "unknown storage 'mysql'"),
    "study list --storage sqlite:///absent.db": (1, "there is no study file"),
    "study list --storage sqlite:///text": (2, "is no study file, and stays as it is"),
    "study show x --storage sqlite:///.": (2, "is a folder"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words, tunegen, tmp_path, monkeypatch):
    fill(TRIALS), fill(TRIALS, policy="sustained")
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("not a database, and nobody's to move\n")
    before = sorted(tmp_path.iterdir())
    code, message = BAD[words]
    got, out, errors = tunegen(*words.split())
    assert (got, out) == (code, "")
    assert message in errors
    assert errors.startswith("tunegen: ")
    assert errors.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [("study",), ("study", "list"), ("study", "show")])
def test_help(words, tunegen):
    code, out, _ = tunegen(*words, "--help")
    assert code == 0
    if words == ("study",):
        assert out.count("  tunegen study ") >= 3


# --- what a tune may use -------------------------------------------------------------------------


@pytest.fixture
def added(tmp_path):
    """A request for a kernel that is kept beside its template, in a folder of its own."""
    shutil.copytree(ADDED, tmp_path / "kernel")
    spec = kernels.load(tmp_path / "kernel" / "scale.py")
    return request("scale", arch="sm_90", problem="2^20", specs=(spec,))


def contenders(wanted, space=lambda space: space):
    found = []
    for spec in wanted.specs:
        table = space(spec.space(wanted.problem, wanted.device)).enumerate()
        found.append(Contender(spec, table, spec.default(wanted.problem, wanted.device)))
    return found


class Judge(ModelEvaluator):
    """Stands for a GPU, as far as a study is concerned."""

    evidence = "measured"
    needs_kernels = False


def study_of(wanted, found=None, **options):
    judge = Judge(wanted.device)
    return open_study(wanted, found or contenders(wanted), judge, policy="burst", **options)


def try_out(wanted, study, configs):
    """Store a success of each configuration, as a tune does."""
    (spec,) = wanted.specs
    for number, config in enumerate(configs):
        outcome = Outcome("measured", Measurement(number + 1.0, "burst"))
        trial = Trial(number, spec.name, config, outcome, "sampler")
        study.add(trial, source_digests(wanted, spec, config))


def test_a_changed_template_uses_no_old_trial(added, tmp_path):
    """Until it is what it was again. A comment is no change."""
    (only,) = contenders(added)
    with study_of(added) as study:
        try_out(added, study, only.table[:5])
    template = tmp_path / "kernel" / "scale.cu.jinja"
    text = template.read_text()

    def used():
        with study_of(added) as study:
            return len(study.trials())

    assert used() == 5
    template.write_text(text + "// Nothing but a remark.\n")
    assert used() == 5
    template.write_text(text + "static __device__ int unused;\n")
    assert used() == 0
    with study_of(added) as study:
        try_out(added, study, only.table[:2])
    assert used() == 2
    template.write_text(text)
    assert used() == 5


def more_threads(space):
    threads, *others = space.parameters
    return replace(space, parameters=(replace(threads, values=(*threads.values, 2048)), *others))


def fewer_threads(space):
    threads, *others = space.parameters
    return replace(space, parameters=(replace(threads, values=(128, 256)), *others))


def test_a_changed_space_uses_what_is_still_valid(added):
    (only,) = contenders(added)
    with study_of(added) as study:
        try_out(added, study, only.table)
    with study_of(added, contenders(added, more_threads)) as study:
        past = study.trials()
    assert [trial.config for trial in past] == list(only.table)
    with study_of(added, contenders(added, fewer_threads)) as study:
        past = study.trials()
    assert {trial.config.THREADS for trial in past} == {128, 256}
    assert [trial.number for trial in past] == list(range(len(past)))


def test_another_kind_of_gpu_never_joins(added):
    (only,) = contenders(added)
    with study_of(added) as study:
        try_out(added, study, only.table[:3])
        name = study.name
    other = replace(added, device=replace(added.device, name="NVIDIA GH200"))
    fewer = replace(added, device=replace(added.device, sm_count=added.device.sm_count - 2))
    for wanted in (other, fewer):
        with study_of(wanted) as study:
            assert study.trials() == ()
            assert study.name != name


def test_a_predicting_study_names_its_toolkit(added):
    """The model reads the compiler's figures, so that its times are of one compiler."""
    names = set()
    for needs_kernels in (False, True):
        judge = Judge(added.device)
        judge.needs_kernels = needs_kernels
        with open_study(added, contenders(added), judge, policy="burst") as study:
            names.add(study.name)
    assert len(names) == 2


@pytest.mark.parametrize("stops", [(1, 7), (8, 20, 25)])
def test_a_study_goes_on_as_if_it_had_never_stopped(added, stops):
    """With one proposal under way at a time; another run of the same budget does nothing more."""
    found = contenders(added)

    def run_to(budget, **options):
        with study_of(added, found, **options) as study:
            past = study.trials()
            search = make_search("tpe", found, 3)
            search.tell_past(past)
            for _ in range(budget - len(past)):
                proposal = search.ask()
                us = 1.0 + sum(map(abs, (proposal.config.THREADS - 128, proposal.config.UNROLL)))
                outcome = Outcome("measured", Measurement(us, "burst"))
                search.tell(proposal, outcome)
                spec = proposal.contender.spec
                study.add(
                    Trial(proposal.number, spec.name, proposal.config, outcome, proposal.origin),
                    source_digests(added, spec, proposal.config),
                )
            return study.trials()

    for stop in stops:
        run_to(stop)
    resumed = run_to(30)
    assert run_to(30) == resumed
    assert len(resumed) == 30
    assert run_to(30, fresh=True) == resumed

# SPDX-License-Identifier: Apache-2.0
"""What a search tries first because it was fast elsewhere: from where, in what order, how much."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunegen import session
from tunegen.cli.main import run
from tunegen.cli.tune_report import _begun_from
from tunegen.database import Database
from tunegen.model import (
    Config,
    Constraint,
    DeviceIdentity,
    KernelSpec,
    LaunchPlan,
    Measurement,
    Operation,
    Outcome,
    Space,
    Trial,
    TuningRecord,
    parameters,
)
from tunegen.perfmodel import find_chip
from tunegen.search import Contender, make_search
from tunegen.session import Request
from tunegen.session.warmstart import MOST_POINTS, KnownPoint, distance, warm_points
from tunegen.store import Study, StudyKey

H200, H100 = find_chip("NVIDIA H200"), find_chip("NVIDIA H100 PCIe")
A100, A6000 = find_chip("NVIDIA A100-SXM4-80GB"), find_chip("NVIDIA RTX A6000")

OPERATION = Operation(
    name="nothing",
    summary="never run",
    axes=("M", "N"),
    dtypes=("fp32", "fp64", "fp16", "bf16"),
    default_sizes=(1024, 1024),
    layouts=("nn", "nt"),
    attributes=lambda sizes, dtype, layout: {"ld": sizes["N"], "beta": 0},
    arrays=lambda problem: (),
    reference=lambda problem, operands, scalars: {},
    flops=lambda problem: 0,
)


def make_space(count=6, values=4):
    """Parameters P0, P1 ... of which no configuration may have all at their highest."""
    rows = ((f"P{i}", range(values), "") for i in range(count))
    highest = count * (values - 1)
    names = [f"P{i}" for i in range(count)]
    bounded = Constraint("bounded", lambda c: sum(getattr(c, n) for n in names) < highest)
    return Space(parameters(rows), (bounded,))


def make_spec(name="one", space=None):
    found = make_space() if space is None else space
    return KernelSpec(
        name=name,
        operation=OPERATION,
        summary="",
        space=lambda problem, device: found,
        default=lambda problem, device: found.enumerate().config(0),
        kernels=lambda config, problem: (),
        plan=lambda config, problem, sizes: LaunchPlan(()),
        work=lambda config, problem, device: None,
        limits=lambda config, problem: (),
    )


ONE = make_spec()


def ask(*specs, sizes="1024x1024", dtype="fp32", layout="nn", device=H200, **attributes):
    problem = OPERATION.problem(sizes, dtype=dtype, layout=layout, **attributes)
    return Request(OPERATION, problem, device, specs or (ONE,))


def contenders_of(wanted):
    return [
        Contender(spec, spec.space(wanted.problem, wanted.device).enumerate(),
                  spec.default(wanted.problem, wanted.device))
        for spec in wanted.specs
    ]  # fmt: skip


def config(digits):
    """``config("130000")``: the values of P0, P1 ..."""
    return Config({f"P{i}": int(digit) for i, digit in enumerate(digits)})


def record(digits, sizes="1024x1024", device=H200, *, spec="one", policy="burst", **changes):
    words = {key: changes.pop(key) for key in ("dtype", "layout", "beta") if key in changes}
    fields = {
        "operation": "nothing",
        "spec": spec,
        "arch": device.arch,
        "target": device.arch,
        "problem": OPERATION.problem(sizes, **words),
        "config": dict(config(digits)),
        "device": DeviceIdentity.of(device),
        "evidence": "measured",
        "measurement": Measurement(10.0, policy),
        "default_us": None,
        "images": (),
        "limits": (),
        "nvrtc": "13.0",
        "tunegen": "0",
        "created": "2026-01-02T03:04:05+00:00",
        "trials": 100,
        "seed": 0,
        "command": "",
    }
    return TuningRecord(**{**fields, **changes})


@pytest.fixture
def db(tmp_path):
    return Database(tmp_path / "user", tmp_path / "shipped")


def digits_of(points):
    return ["".join(str(value) for value in point.config.values()) for point in points]


def first_of(db, wanted=None, trials=100, **options):
    wanted = wanted or ask()
    return digits_of(warm_points(db, wanted, contenders_of(wanted), trials, **options))


# --- how near ------------------------------------------------------------------------------------

sizes_of = st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20))


@given(left=sizes_of, right=sizes_of)
def test_sizes_count_in_doublings(left, right):
    there = OPERATION.problem(right)
    away = distance(ask(sizes=left), there, DeviceIdentity.of(H200))
    ratios = [max(1, a) / max(1, b) for a, b in zip(left, right, strict=True)]
    assert away == pytest.approx(sum(abs(math.log2(ratio)) for ratio in ratios))
    back = distance(ask(sizes=right), OPERATION.problem(left), DeviceIdentity.of(H200))
    assert back == pytest.approx(away)


@pytest.mark.parametrize(
    ("words", "device"),
    [({"dtype": "bf16"}, H200), ({"layout": "nt"}, H200), ({"beta": 1}, H200), ({}, H100)],
    ids=["dtype", "layout", "attribute", "device"],
)
def test_whatever_else_differs_is_farther(words, device):
    wanted = ask(dtype="fp16")
    same = OPERATION.problem("2048x1024", dtype="fp16")
    other = OPERATION.problem("2048x1024", **{"dtype": "fp16", **words})
    here = DeviceIdentity.of(H200)
    assert distance(wanted, same, here) == 1.0, "leading dimensions follow the sizes"
    assert distance(wanted, other, DeviceIdentity.of(device)) >= 2.0


def test_what_says_nothing():
    here = DeviceIdentity.of(H200)
    assert distance(ask(), OPERATION.problem(dtype="fp64"), here) is None
    strange = dataclasses.replace(OPERATION.problem(), layout="tt")
    assert distance(ask(), strange, here) is None
    assert distance(ask(), dataclasses.replace(strange, operation="another"), here) is None
    fewer = dataclasses.replace(OPERATION.problem(), sizes=(("M", 1024),))
    assert distance(ask(), fewer, here) is None


# --- which records -------------------------------------------------------------------------------


def test_the_nearest_first_and_the_very_problem_before_all(db):
    written = [
        record("333000"),
        record("222000", device=H100),  # the same problem, before a nearer one
        record("111000", "2048x1024"),
        record("000333", "1024x4096", layout="nn"),
        record("000222", "1024x1024", beta=1, device=H100),
        record("000111", "1024x1024", layout="nt", device=H100),
    ]
    for order in (written, written[::-1]):
        for each in order:
            db.put(each)
        points = warm_points(db, ask(), contenders_of(ask()), 100)
        assert digits_of(points) == ["333000", "222000", "111000", "000333", "000222", "000111"]
    assert [point.distance for point in points] == [0, 2, 1, 2, 3, 4]
    assert {point.origin for point in points} == {"record"}
    assert points[1].device == "NVIDIA H100 PCIe"
    assert "2048x1024" in points[2].problem


def test_of_two_as_near_the_one_that_beat_the_vendor_by_more(db):
    ratios = {"111000": 0.9, "222000": 1.1, "000111": None}
    for number, (digits, ratio) in enumerate(ratios.items()):
        named = {"baseline": "a library", "baseline_ratio": ratio} if ratio else {}
        db.put(record(digits, ["2048x1024", "1024x2048", "512x1024"][number], **named))
    assert first_of(db) == ["222000", "111000", "000111"]


def test_what_was_recorded_before_there_was_a_parameter_is_completed(db):
    rows = (*((f"P{i}", range(4), "") for i in range(6)), ("LATER", (0, 1), "", 1))
    wanted = ask(make_spec(space=Space(parameters(rows), ())))
    contenders = contenders_of(wanted)
    db.put(record("123000", "2048x1024"))
    points = warm_points(db, wanted, contenders, 100)
    assert digits_of(points) == ["1230001"]
    search = make_search("random", contenders, 0, [point.first for point in points])
    assert [search.ask().origin for _ in range(3)] == ["default", "record", "sampler"]


def test_neighbours_of_one_another_are_not_both_taken(db):
    db.put(record("111000", "2048x1024"))
    db.put(record("121100", "4096x1024"))  # two parameters differ
    db.put(record("122200", "8192x1024"))
    assert first_of(db) == ["111000", "122200"]


def test_what_is_known_of_the_very_problem_is_taken_however_near(db):
    db.put(record("111000"))
    db.put(record("112000", policy="sustained"))
    db.put(record("113000", "2048x1024"))
    assert sorted(first_of(db)) == ["111000", "112000"]


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 3)] * 5), min_size=1, max_size=25),
    free=st.integers(1, 5),
)
def test_they_differ_in_three_parameters_or_in_all_that_there_are(rows, free, tmp_path_factory):
    space = make_space(free)
    wanted = ask(make_spec(space=space))
    db = Database(tmp_path_factory.mktemp("db"), tmp_path_factory.getbasetemp() / "none")
    for number, row in enumerate(rows, 1):
        db.put(record("".join(map(str, row[:free])), f"{1024 + number}x1024"))
    found = first_of(db, wanted)
    assert len(found) <= MOST_POINTS
    for left, right in itertools.combinations(found, 2):
        assert sum(a != b for a, b in zip(left, right, strict=True)) >= min(3, free)
    written = {"".join(map(str, row[:free])) for row in rows}
    default, highest = "0" * free, "3" * free
    assert (not found) == (written <= {default, highest})


NOT_TAKEN = {
    "the default": record("000000"),
    "breaks a constraint": record("333333"),
    "a value that there is no more": record("444000"),
    "fewer parameters": record("111"),
    "no such spec": record("111000", spec="two"),
    "predicted": record("111000", evidence="predicted"),
    "another element size": record("111000", dtype="fp64"),
    "another family": record("111000", device=A100),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_cannot_help_is_left_out(db, name):
    db.put(NOT_TAKEN[name])
    db.put(record("222000", "4096x4096"))
    assert first_of(db) == ["222000"]


def test_capabilities_of_one_family_help_each_other(db):
    db.put(record("111000", device=A100))
    assert first_of(db, ask(device=A6000)) == ["111000"]


def test_specs_are_tried_together_each_with_its_own(db):
    two = make_spec("two")
    db.put(record("111000", "2048x1024"))
    db.put(record("111000", "1024x2048", spec="two"))
    wanted = ask(ONE, two)
    points = warm_points(db, wanted, contenders_of(wanted), 100)
    assert {(point.spec, point.config) for point in points} == {
        ("one", config("111000")), ("two", config("111000")),
    }  # fmt: skip


def test_most_of_a_search_is_as_it_would_be_without(db):
    far = ["111000", "222000", "333000", "000111", "000222", "000333", "123123", "231231"]
    for number, digits in enumerate(far, 1):
        db.put(record(digits, f"{1024 << number}x1024"))
    assert first_of(db) == far[:6]
    assert [len(first_of(db, trials=trials)) for trials in (1, 3, 4, 11, 24, 10**6)] == [
        0, 0, 1, 2, 6, 6,
    ]  # fmt: skip
    assert first_of(db, trials=11) == far[:2]


def test_shipped_records_count_too(db):
    Database(db.shipped, db.shipped.with_name("none")).put(record("111000", "2048x1024"))
    db.put(record("222000", "4096x1024"))
    assert first_of(db) == ["111000", "222000"]


def test_a_file_that_cannot_be_read_costs_its_own_records_only(db):
    db.put(record("111000", device=A100))
    db.put(record("222000", "2048x1024", device=A6000))
    (db.user_folder / "sm_80" / "nothing.json").write_text("{")
    notes = []
    assert first_of(db, ask(device=A6000), on_note=notes.append) == ["222000"]
    (note,) = notes
    assert "sm_80" in note


def test_a_winner_that_came_of_the_past_is_no_news(db):
    """The run that goes on begins from the list of the one that it continues."""
    db.put(record("111000", "2048x1024"))
    db.put(record("222000", "4096x1024"))
    before = first_of(db)
    db.put(record("111300"))
    past = [Trial(0, "one", config("111300"), Outcome("measured"), "sampler")]
    assert first_of(db, past=past) == before
    assert first_of(db) == ["111300", "222000"]
    known = [dataclasses.replace(past[0], origin="record")]
    assert first_of(db, past=known) == ["111300", "222000"], "it was in the list before"


# --- studies -------------------------------------------------------------------------------------


def open_study(tmp_path, wanted=None, *, fresh=False, **changes):
    wanted = wanted or ask()
    facts = {
        "operation": OPERATION,
        "problem": wanted.problem,
        "arch": wanted.arch,
        "device": DeviceIdentity.of(wanted.device),
        "evidence": "measured",
        "policy": "burst",
        "tolerance": None,
        "toolkit": "13.0",
        "spaces": {spec.name: spec.space(wanted.problem, wanted.device) for spec in wanted.specs},
    }
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    return Study.open(url, StudyKey(**{**facts, **changes}), fresh=fresh)


def fill(tmp_path, times, wanted=None, **options):
    with open_study(tmp_path, wanted, **options) as study:
        for digits, us in times.items():
            outcome = Outcome("launch_failed", reason="test")
            if us is not None:
                outcome = Outcome("measured", Measurement(us, "burst"))
            study.add(Trial(0, "one", config(digits), outcome, "sampler"), {})


def first_with_study(tmp_path, db, wanted=None, **options):
    with open_study(tmp_path, wanted) as study:
        wanted = wanted or ask()
        return warm_points(db, wanted, contenders_of(wanted), 100, study=study, **options)


ELSEWHERE = ask(sizes="2048x1024")


def test_the_fastest_of_other_studies(db, tmp_path):
    times = {"333000": None, "111000": 5.0, "112000": 4.0, "000222": 4.2, "000111": 4.3,
             "222000": 9.0}  # fmt: skip
    fill(tmp_path, times, ELSEWHERE)
    fill(tmp_path, {"321000": 1.0}, ask(sizes="4096x1024", device=H100))
    points = first_with_study(tmp_path, db)
    # 000111 is a third of one study, 222000 slow there, 111000 beside the fastest.
    assert digits_of(points) == ["112000", "000222", "321000"]
    assert {point.origin for point in points} == {"study"}
    assert [point.distance for point in points] == [1, 1, 4]


def test_records_come_before_trials_that_are_as_near(db, tmp_path):
    fill(tmp_path, {"111000": 1.0, "000111": 1.0}, ELSEWHERE)
    db.put(record("112000", "1024x2048"))
    points = first_with_study(tmp_path, db)
    assert [(point.config, point.origin) for point in points] == [
        (config("112000"), "record"), (config("000111"), "study"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"evidence": "predicted"},
        {"policy": "warm", "problem": ask().problem},  # this very problem
        {"problem": OPERATION.problem("2048x1024", dtype="fp64")},
        {"arch": "sm_80"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_studies_that_cannot_help(db, tmp_path, changes):
    fill(tmp_path, {"111000": 1.0}, ELSEWHERE, **changes)
    assert first_with_study(tmp_path, db) == ()


def test_what_a_fresh_start_set_aside_is_not_used_elsewhere_either(db, tmp_path):
    fill(tmp_path, {"111000": 1.0}, ELSEWHERE)
    fill(tmp_path, {"222000": 2.0}, ELSEWHERE, fresh=True)
    assert digits_of(first_with_study(tmp_path, db)) == ["222000"]


# --- from the command line -----------------------------------------------------------------------


@pytest.fixture
def axpy_db(tmp_path):
    """A folder with a measured record of axpy, of 2^22 elements on an H100 PCIe."""
    made = session.tune(
        "axpy", arch="sm_90", chip="NVIDIA H100 PCIe", problem="2^22", trials=1, evaluator="model",
        db=tmp_path / "predicted",
    ).record  # fmt: skip
    wanted = session.request("axpy", arch="sm_90", problem="2^22")
    configs = wanted.spec().space(wanted.problem, wanted.device).enumerate()
    chosen = configs.config(len(configs) // 3)
    assert dict(chosen) != made.config, "not the default"
    folder = tmp_path / "db"
    Database(folder).put(dataclasses.replace(made, evidence="measured", config=dict(chosen)))
    return folder, dict(chosen)


@pytest.mark.nvrtc
def test_tune_begins_with_it_says_so_and_does_not_when_told(axpy_db, tmp_path, capsys):
    folder, chosen = axpy_db
    words = ("tune", "axpy", "--arch", "sm_90", "--chip", "NVIDIA H200", "--problem", "2^24",
             "--trials", "8", "--evaluator", "model")  # fmt: skip

    def tune(*more, name):
        db = tmp_path / name
        Database(db).merge(folder)
        code = run([*words, "--db", str(db), *more])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    (result,) = json.loads(tune("--json", name="a"))["results"]
    (point,) = result["begun_from"]
    assert (point["config"], point["origin"]) == (chosen, "record")
    assert point["device"] == "NVIDIA H100 PCIe"
    assert result["trials"]["origins"]["record"] == 1
    assert sum(result["trials"]["origins"].values()) == 8
    assert "--cold" not in result["command"]
    out = tune(name="b")
    line = next(line for line in out.splitlines() if line.startswith("begun from"))
    assert line.split(None, 2)[2].startswith("1 record: ")
    assert "NVIDIA H100 PCIe" in line
    (cold,) = json.loads(tune("--cold", "--json", name="c"))["results"]
    assert cold["begun_from"] == []
    assert "record" not in cold["trials"]["origins"]
    assert "--cold" in cold["command"]


@pytest.mark.nvrtc
def test_it_comes_right_after_the_defaults(axpy_db):
    folder, chosen = axpy_db
    tried = []
    result = session.tune(
        "axpy", arch="sm_90", chip="NVIDIA H200", problem="2^24", trials=8, evaluator="model",
        db=folder, on_event=lambda trial, progress: tried.append(trial),
    )  # fmt: skip
    defaults = len(result.valid_configs)
    origins = [trial.origin for trial in tried]
    assert origins[: defaults + 1] == ["default"] * defaults + ["record"]
    assert dict(tried[defaults].config) == chosen
    assert set(origins[defaults + 1 :]) <= {"model", "sampler"}


def test_the_report_counts_what_was_tried_first():
    def said(*origins):
        points = tuple(
            KnownPoint("simt", Config({}), origin, f"{number}x1x1", "a card", 0.0)
            for number, origin in enumerate(origins)
        )
        winner = types.SimpleNamespace(origin="model")
        return _begun_from(types.SimpleNamespace(begun_from=points, winner=winner))

    assert said("record") == "1 record: 0x1x1 on a card"
    text = said("record", "record", "study")
    assert text.startswith("2 records, 1 trial of other studies: 0x1x1 on a card; ")
    assert said("study", "study").startswith("2 trials of other studies: ")

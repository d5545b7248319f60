# SPDX-License-Identifier: Apache-2.0
"""``tunegen tune --shapes``: the file, the loop over its problems, and the table at the end."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunegen import kernels, session
from tunegen.cli import tune_report
from tunegen.cli.main import run
from tunegen.cli.tune import Attempt
from tunegen.errors import DeviceError, UsageError
from tunegen.session import Shape, name_shapes, read_shapes

SHAPES = Path(__file__).parent / "data" / "shapes.json"
S1 = {"name": "S1", "group": "square", "m": 64, "n": 32, "k": 16}
V1 = {"name": "V1", "group": "one", "n": 1000}


@pytest.fixture
def write(tmp_path):
    """A file of shapes; gives its place."""

    def call(content):
        place = tmp_path / "list.json"
        place.write_text(content if isinstance(content, str) else json.dumps(content))
        return place

    return call


@pytest.fixture
def tunegen(tmp_path, monkeypatch, capsys):
    """Run a command line without a GPU; gives exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# --- the file ------------------------------------------------------------------------------------


def test_the_list_of_the_scripts():
    content = json.loads(SHAPES.read_text())
    shapes = read_shapes("matmul", SHAPES)
    assert [shape.name for shape in shapes] == [entry["name"] for entry in content["matmul"]]
    operation = kernels.operation("matmul")
    for shape, entry in zip(shapes, content["matmul"], strict=True):
        problem = operation.problem(shape.sizes, dtype=shape.dtype, layout=shape.layout)
        numbers = [entry.get("batch", 1), entry["m"], entry["n"], entry["k"]]
        assert [number for _, number in problem.sizes] == numbers
        assert (problem.dtype, problem.layout) == ("bf16", "nt")
        assert shape.group == entry["group"]
        assert operation.problem(shape.text, dtype=shape.dtype, layout=shape.layout) == problem


def test_the_example_in_the_readme(write):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"^```json\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    place = write(example)
    assert [(s.text, s.dtype, s.layout) for s in read_shapes("matmul", place)] == [
        ("4096x4096x4096", "bf16", "nt"), ("16x1024x1024x128", "bf16", "nn"),
    ]  # fmt: skip
    assert [(s.text, s.dtype) for s in read_shapes("axpy", place)] == [("16777216", "fp32")]


sizes = st.fixed_dictionaries(
    {key: st.integers(0, 5000) for key in "mnk"}, optional={"batch": st.integers(1, 9)}
)
words = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(kernels.operation("matmul").dtypes),
        "layout": st.sampled_from(kernels.operation("matmul").layouts),
    },
)


@given(general=words, entries=st.lists(st.tuples(sizes, words), min_size=1), above=words)
def test_what_is_given_stands_above_the_entry_and_that_above_the_file(
    general, entries, above, tmp_path_factory
):
    content = {
        **general,
        "matmul": [
            {"name": f"no {i}", "group": "all", **numbers, **own}
            for i, (numbers, own) in enumerate(entries)
        ],
    }
    place = tmp_path_factory.getbasetemp() / "drawn.json"
    place.write_text(json.dumps(content))
    shapes = read_shapes("matmul", place, **above)
    assert len(shapes) == len(entries)
    for shape, (numbers, own) in zip(shapes, entries, strict=True):
        expected = {**general, **own, **above}
        assert (shape.dtype, shape.layout) == (expected.get("dtype"), expected.get("layout"))
        assert shape.sizes == {
            "B": numbers.get("batch", 1), **{axis.upper(): numbers[axis] for axis in "mnk"}
        }  # fmt: skip


def test_a_layout_for_other_operations_is_no_error_for_vectors(write):
    place = write({"layout": "nt", "dtype": "bf16", "matmul": [S1], "axpy": [V1]})
    (shape,) = read_shapes("axpy", place)
    assert shape == Shape("V1", "one", "1000", {"N": 1000}, "bf16", None)


def test_a_byte_order_mark_is_no_error(tmp_path):
    place = tmp_path / "list.json"
    place.write_bytes(b"\xef\xbb\xbf" + json.dumps({"axpy": [V1]}).encode())
    assert len(read_shapes("axpy", place)) == 1


def test_problems_of_the_command_line_are_checked_before_any_is_tuned():
    assert name_shapes("axpy", ()) == (Shape("", "", "", None),)
    two = name_shapes("axpy", ("2^4", "7"), dtype="fp16")
    assert [(s.name, s.text, s.sizes, s.dtype) for s in two] == [
        ("2^4", "16", {"N": 16}, "fp16"), ("7", "7", {"N": 7}, "fp16"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="malformed problem"):
        name_shapes("axpy", ("2^4", "x"))


def matmul(**changes):
    """A file with a right entry and one with changes, None for what it lacks."""
    entry = {**S1, "name": "odd one", **changes}
    return {"matmul": [S1, {key: value for key, value in entry.items() if value is not None}]}


ENTRY = "entry 2 of matmul (odd one): "
BAD = {
    "no JSON": ("{", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "a number too long": ('{"matmul": [%s]}' % ("9" * 5000), "is not JSON"),
    "no object": ([S1], "holds no JSON object"),
    "nothing": ({}, "lists no problem of matmul; operations with some: none"),
    "another operation": ({"axpy": [V1]}, "operations with some: axpy"),
    "an empty list": ({"matmul": []}, "lists no problem of matmul"),
    "a misspelt word": ({"layuot": "nt", "matmul": [S1]}, "'layuot': did you mean layout"),
    "no list": ({"matmul": S1}, "unknown key 'matmul'"),
    "a list of dtypes": ({"dtype": ["bf16"], "matmul": [S1]}, "dtype is a text, not ['bf16']"),
    "twice": ('{"matmul": [], "matmul": []}', "'matmul' stands twice"),
    "no entry": ({"matmul": [S1, 4096]}, "entry 2 of matmul: an entry is an object, not 4096"),
    "no name": (matmul(name=None), "entry 2 of matmul: name is missing"),
    "no group": (matmul(group=None), ENTRY + "group is missing"),
    "an empty name": (matmul(name=" "), "name is a text of one line"),
    "a name of two lines": (matmul(name="a\nb"), "name is a text of one line"),
    "a number as a group": (matmul(group=3), ENTRY + "group is a text of one line, not 3"),
    "the same name": (matmul(name="S1"), "entry 2 of matmul (S1): another entry has this name"),
    "no size": (matmul(k=None), ENTRY + "k is missing"),
    "an unknown key": (matmul(bacth=2), ENTRY + "unknown key 'bacth': did you mean batch"),
    "a fraction": (matmul(m=1.5), ENTRY + "m is a whole number, not 1.5"),
    "a truth": (matmul(m=True), ENTRY + "m is a whole number, not True"),
    "a text": (matmul(batch="2"), ENTRY + "batch is a whole number, not '2'"),
    "below 0": (matmul(n=-1), ENTRY + "sizes of matmul are 0 or more, not -1"),
    "too large": (matmul(n=2**62), ENTRY + "N=4611686018427387904 is 2^62 or more"),
    "a dtype": (matmul(dtype="fp23"), ENTRY + "unknown dtype for matmul 'fp23': did you mean"),
    "a null": (matmul(dtype=[]), ENTRY + "dtype is a text of one line, not []"),
    "a layout": (matmul(layout="nx"), ENTRY + "unknown layout for matmul 'nx'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_wrong_is_one_line_that_names_the_entry(name, write, tunegen):
    content, text = BAD[name]
    place = write(content)
    code, out, err = tunegen("tune", "matmul", "--arch", "sm_90", "--shapes", place)
    assert (code, out) == (2, "")
    assert err.startswith(f"tunegen: {place}")
    assert text in err
    assert err.count("\n") == 1, err


def test_a_file_that_cannot_be_read(tunegen, tmp_path):
    (tmp_path / "bytes.json").write_bytes(b'{"matmul": "\xff\xfe"}')
    for place, text in (
        (tmp_path / "none.json", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "bytes.json", "is not JSON"),
    ):
        code, out, err = tunegen("tune", "matmul", "--arch", "sm_90", "--shapes", place)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert text in err


def test_shapes_and_problem_exclude_each_other(write, tunegen):
    code, out, err = tunegen(
        "tune", "axpy", "--arch", "sm_90", "--shapes", write({"axpy": [V1]}), "--problem", "7"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--shapes and --problem exclude each other" in err


def test_attributes_are_checked_with_every_entry(write, tunegen):
    wide = {**S1, "name": "wide", "k": 128}
    words = ("--arch", "sm_90", "--shapes", write({"matmul": [S1, wide]}))
    code, out, err = tunegen("tune", "matmul", *words, "--attribute", "lda=64")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "entry 2 of matmul (wide): " in err
    assert "less than a row" in err


# --- tuning what it lists ------------------------------------------------------------------------

AXPY = {
    "dtype": "fp32",
    "axpy": [
        {"name": "first", "group": "small", "n": 1000},
        {"name": "second", "group": "large", "n": 2**20, "dtype": "bf16"},
        {"name": "third", "group": "small", "n": 4096},
    ],
}


@pytest.mark.nvrtc
def test_one_table_by_group_and_progress_beside_it(write, tunegen, tmp_path):
    words = ("--arch", "sm_90", "--shapes", write(AXPY), "--trials", 2)
    code, out, err = tunegen("tune", "axpy", *words)
    assert code == 0
    title, header, _, *rows = out.splitlines()
    assert title == "axpy on NVIDIA H200 (sm_90)"
    assert header.split() == [
        "group", "name", "problem", "time", "vendor/ours", "95", "%", "of", "floor", "spec",
    ]  # fmt: skip
    assert [row.split()[:4] for row in rows] == [
        ["small", "first", "1000", "fp32"],
        ["small", "third", "4096", "fp32"],
        ["large", "second", "1048576", "bf16"],
    ]
    for row in rows:
        assert re.search(r" us +predicted +\d+% +vector$", row), row
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/3] first 1000", "[2/3] second 1048576", "[3/3] third 4096",
    ]  # fmt: skip
    assert sum(line.startswith("predicted: no GPU") for line in lines) == 1
    for name in ("first", "second", "third"):
        assert sum(bool(re.match(rf"{name}: .* us, predicted, .*2 trials", x)) for x in lines) == 1
    stored = json.loads((tmp_path / "data/tunegen/tuned_db/sm_90/axpy.json").read_text())
    assert len(stored["records"]) == 3


@pytest.mark.nvrtc
def test_one_json_document(write, tunegen):
    words = ("--arch", "sm_90", "--shapes", write(AXPY), "--trials", 2, "--json")
    code, out, _ = tunegen("-q", "tune", "axpy", *words, "--dtype", "fp16")
    assert code == 0
    document = json.loads(out)
    assert [(r["name"], r["group"], r["problem"]) for r in document["results"]] == [
        ("first", "small", "1000"), ("second", "large", "1048576"), ("third", "small", "4096"),
    ]  # fmt: skip
    for result in document["results"]:
        assert result["record"]["problem"]["dtype"] == "fp16"
        assert result["vendor_ratio"] is None
        us = result["record"]["measurement"]["median_us"]
        assert result["floor_share"] == pytest.approx(result["floor"]["us"] / us)
    assert document["failures"] == []
    assert document["geometric_means"] == {"groups": {"small": None, "large": None}, "all": None}


def failing(monkeypatch, bad, error, real=session.tune):
    """Let ``session.tune`` fail for some sizes."""

    def tune(operation, *, problem, **options):
        if problem["N"] in bad:
            raise error
        return real(operation, problem=problem, **options)

    monkeypatch.setattr(session, "tune", tune)


@pytest.mark.nvrtc
@pytest.mark.parametrize("shapes", [True, False])
def test_one_that_fails_does_not_stop_the_others(shapes, write, tunegen, monkeypatch):
    failing(monkeypatch, {1000}, DeviceError("10 bytes\nare needed", hint="take less"))
    words = ("--shapes", write(AXPY)) if shapes else ("--problem", "1000", "--problem", "4096")
    call = ("tune", "axpy", "--arch", "sm_90", *words, "--trials", 2)
    code, out, err = tunegen(*call)
    assert code == 1
    name = "first" if shapes else "1000"
    assert f"tunegen: {name}: 10 bytes are needed (take less)" in err.splitlines()
    if shapes:
        assert re.search(r"^small +first +1000 fp32 +failed$", out, re.MULTILINE)
    assert re.search(r"^small +third .*vector$" if shapes else "^winner", out, re.MULTILINE)
    code, out, err = tunegen("-q", *call, "--json")
    assert code == 1
    document = json.loads(out)
    assert len(document["results"]) == (2 if shapes else 1)
    (failure,) = document["failures"]
    assert (failure["problem"], failure["reason"]) == ("1000", "10 bytes\nare needed (take less)")
    assert failure.get("name") == ("first" if shapes else None)
    assert err.count("\n") == 1


def test_all_may_fail(write, tunegen, monkeypatch):
    failing(monkeypatch, {1000, 4096, 2**20}, DeviceError("no"))
    code, out, _ = tunegen("tune", "axpy", "--arch", "sm_90", "--shapes", write(AXPY))
    assert code == 1
    assert out.count("failed") == 3
    assert out.startswith("axpy\n")


def test_a_wrong_option_is_said_once(write, tunegen):
    words = ("--arch", "sm_90", "--shapes", write(AXPY), "--policy", "brust")
    code, out, err = tunegen("-q", "tune", "axpy", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "did you mean burst" in err


@pytest.mark.nvrtc
@pytest.mark.parametrize("shapes", [True, False])
def test_ctrl_c_keeps_what_is_done(shapes, write, tunegen, monkeypatch):
    failing(monkeypatch, {2**20}, KeyboardInterrupt())
    words = ("--problem", "1000", "--problem", "2^20", "--problem", "4096")
    words = ("--shapes", write(AXPY)) if shapes else words
    call = ("tune", "axpy", "--arch", "sm_90", *words, "--trials", 2)
    code, out, err = tunegen(*call)
    assert code == 130
    assert ("first" if shapes else "winner") in out
    assert "third" not in out
    assert "interrupted; 1 of 3 problems are above" in err
    code, out, _ = tunegen(*call, "--json")
    assert code == 130
    assert [result["problem"] for result in json.loads(out)["results"]] == ["1000"]
    failing(monkeypatch, {1000}, KeyboardInterrupt())
    code, out, err = tunegen("-q", *call)
    assert (code, out, err.strip()) == (130, "", "tunegen: interrupted")


@pytest.mark.nvrtc
def test_one_that_ctrl_c_ended_early_is_the_last(write, tunegen, monkeypatch):
    real = session.tune

    def tune(operation, **options):
        result = real(operation, **options)
        stopped = dataclasses.replace(result.run, stop_reason="interrupted")
        return dataclasses.replace(result, run=stopped)

    monkeypatch.setattr(session, "tune", tune)
    words = ("--arch", "sm_90", "--shapes", write(AXPY), "--trials", 2, "--json")
    code, out, _ = tunegen("tune", "axpy", *words)
    assert code == 130
    assert [result["name"] for result in json.loads(out)["results"]] == ["first"]


# --- seconds that some leave ---------------------------------------------------------------------


class Script:
    """``session.tune`` by a script: for each problem what its searches come to, one after the
    other: the reason to stop, the seconds it took, and the gain that is left; or an error."""

    def __init__(self, runs, result):
        self.runs, self.result, self.calls = runs, result, []

    def __call__(self, operation, *, problem, seconds, after=None, **options):
        self.calls.append((problem["N"], seconds, after))
        found = self.runs[problem["N"]].pop(0)
        if isinstance(found, BaseException):
            raise found
        reason, took_s, gain = found
        run = dataclasses.replace(
            self.result.run, stop_reason=reason, search_seconds=took_s, left_gain=gain
        )
        record = dataclasses.replace(self.result.record, command=f"call {len(self.calls)}")
        path = None if reason == "interrupted" else self.result.path
        return dataclasses.replace(self.result, run=run, record=record, path=path)


@pytest.fixture
def scripted(monkeypatch, predicted):
    def call(runs):
        script = Script({size: list(made) for size, made in runs.items()}, predicted)
        monkeypatch.setattr(session, "tune", script)
        return script

    return call


RUNS = {
    1000: [("no progress expected", 4.0, None)],
    2**20: [("time", 40.0, 0.031), ("time", 36.0, 0.02), ("exhausted", 1.0, None)],
    4096: [("time", 40.0, 0.05), ("budget", 8.0, None)],
}
GOING = ("--arch", "sm_90", "--seconds", 40, "--least-gain", 0.01)


def listed(document):
    return [result["command"] for result in document["results"]]


@pytest.mark.nvrtc
@pytest.mark.parametrize("shapes", [True, False])
def test_what_some_leave_goes_to_those_with_most_to_gain(shapes, write, tunegen, scripted):
    words = ("--problem", "1000", "--problem", "2^20", "--problem", "4096")
    words = ("--shapes", write(AXPY)) if shapes else words
    script = scripted(RUNS)
    code, out, err = tunegen("tune", "axpy", *GOING, *words, "--json")
    assert code == 0
    # 36 s are left. 28 of them come back from the third, and are too few after that.
    calls = [(size, seconds) for size, seconds, _ in script.calls]
    assert calls == [(1000, 40), (2**20, 40), (4096, 40), (4096, 36), (2**20, 28)]
    assert [after is None for *_, after in script.calls] == [True] * 3 + [False] * 2
    assert script.calls[3][2].record.command == "call 3"
    names = ("third", "second") if shapes else ("4096", "2^20")
    assert [line for line in err.splitlines() if "goes on" in line] == [
        f"{names[0]} goes on for 36 s: up to 5 % may be left",
        f"{names[1]} goes on for 28 s: up to 3.1 % may be left",
    ]
    document = json.loads(out)
    assert listed(document) == ["call 1", "call 5", "call 4"]
    assert [r["trials"]["left_gain"] for r in document["results"]] == [None, 0.02, None]
    script = scripted(RUNS)
    _, out, _ = tunegen("tune", "axpy", *GOING, *words)
    if not shapes:
        again = [line.split()[-1] for line in out.splitlines() if line.startswith("again")]
        assert again == ["1", "2", "3", "4", "5"], "each as soon as it is known"


@pytest.mark.nvrtc
@pytest.mark.parametrize("missing", ["--seconds", "--least-gain"])
def test_without_either_nobody_goes_on(missing, write, tunegen, scripted):
    runs = {**RUNS, 4096: [("time", 40.0, None)]}
    at = GOING.index(missing)
    script = scripted(runs)
    words = (*GOING[:at], *GOING[at + 2 :], "--shapes", write(AXPY))
    code, _, err = tunegen("tune", "axpy", *words)
    assert (code, len(script.calls)) == (0, 3)
    assert "goes on" not in err


@pytest.mark.nvrtc
def test_one_that_fails_to_go_on_keeps_what_it_has(write, tunegen, scripted):
    runs = {**RUNS, 4096: [("time", 40.0, None), DeviceError("others came")]}
    script = scripted(runs)
    code, out, err = tunegen("tune", "axpy", *GOING, "--shapes", write(AXPY), "--json")
    assert code == 1
    assert "third goes on for 36 s: how much may be left is not known" in err
    assert "tunegen: third: others came" in err
    document = json.loads(out)
    assert listed(document) == ["call 1", "call 2", "call 3"]
    assert [failure["name"] for failure in document["failures"]] == ["third"]
    assert len(script.calls) == 4, "its seconds are gone"


@pytest.mark.nvrtc
@pytest.mark.parametrize("ends", [("interrupted", 1.0, None), KeyboardInterrupt()])
def test_ctrl_c_in_one_that_goes_on_keeps_what_it_has(ends, write, tunegen, scripted):
    script = scripted({**RUNS, 4096: [("time", 40.0, 0.5), ends]})
    code, out, _ = tunegen("tune", "axpy", *GOING, "--shapes", write(AXPY), "--json")
    assert (code, len(script.calls)) == (130, 4)
    assert listed(json.loads(out)) == ["call 1", "call 2", "call 3"]


# --- ratios --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    return session.tune(
        "fill", arch="sm_90", chip="NVIDIA H200", problem="64", trials=1, evaluator="model",
        db=tmp_path_factory.mktemp("db"),
    )  # fmt: skip


def attempt(result, name, group, ratio):
    """An attempt whose record holds a ratio to the vendor's library, 0 for none."""
    found = {"ratio": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio, "name": "a library"}
    measurement = dataclasses.replace(
        result.record.measurement, details={"vendor": found} if ratio else {}
    )
    record = dataclasses.replace(result.record, evidence="measured", measurement=measurement)
    return Attempt(Shape(name, group, "64", {"N": 64}), dataclasses.replace(result, record=record))


@pytest.mark.nvrtc
def test_means_are_geometric_and_say_of_how_many(predicted, capsys):
    attempts = [
        attempt(predicted, "a", "one", 2.0), attempt(predicted, "b", "[two]", 3.0),
        attempt(predicted, "c", "one", 0.5), attempt(predicted, "d", "one", 0),
        Attempt(Shape("e", "[two]", "64", {"N": 64}), failure="it failed"),
    ]  # fmt: skip
    tune_report.report_shapes("fill", attempts)
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [
        ["one", "a"], ["one", "c"], ["one", "d"], ["one", "geometric mean of 2"],
        ["[two]", "b"], ["[two]", "e"], ["[two]", "geometric mean of 1"],
        ["all", "geometric mean of 3"],
    ]  # fmt: skip
    assert rows[0][4:6] == ["2.000", "1.800 to 2.200"]
    assert rows[2][4] == "no vendor"
    assert (rows[3][2], rows[6][2], rows[7][2]) == ("1.000", "3.000", "1.442")
    means = tune_report.documents(attempts, listed=True)["geometric_means"]
    assert means["groups"]["one"] == {"vendor_ratio": pytest.approx(1.0), "problems": 2}
    assert means["all"]["vendor_ratio"] == pytest.approx(math.cbrt(3.0))

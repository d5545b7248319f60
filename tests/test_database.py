# SPDX-License-Identifier: Apache-2.0
"""The database: bytes, layers, the ladder, and writers that are many or are killed."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from database_writer import H200, make_record, problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tunegen
from tunegen import database, resources
from tunegen.database import Database, files, form, layers
from tunegen.errors import DatabaseError, UsageError
from tunegen.kernels import matmul
from tunegen.model import (
    DeviceIdentity,
    KernelImage,
    Limit,
    Measurement,
    Problem,
    TuningRecord,
)

HERE = Path(__file__).resolve().parent
SCHEMA_1 = HERE / "data" / "database_schema_1"
WRITER = HERE / "database_writer.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tunegen.__file__).resolve().parents[1])}

H100_PCIE = replace(H200, name="NVIDIA H100 PCIe", sm_count=114, memory_clock_mhz=1593)
GH200 = replace(H200, name="NVIDIA GH200", memory_clock_mhz=2619)
A10 = replace(
    H200, name="NVIDIA A10", arch="sm_86", sm_count=72, l2_bytes=6 << 20,
    shared_bytes_per_block=99 << 10, memory_clock_mhz=6251,
)  # fmt: skip


@pytest.fixture
def db(tmp_path):
    return Database(tmp_path / "user", tmp_path / "shipped")


def shipped(db):
    """A database that writes where ``db`` reads its shipped records."""
    return Database(db.shipped, db.shipped.with_name("none"))


def look_up(db, sizes="4096x4096x4096", device=H200, *, dtype="fp32", usable=None, **more):
    attributes = more.pop("attributes", {})
    asked = problem(sizes, dtype, **attributes)
    return db.lookup(matmul.OPERATION, asked, device, usable=usable or (lambda record: ""), **more)


def stored(db):
    return [record for _, record in db.records()]


# --- file form -----------------------------------------------------------------------------------

numbers = st.integers(-(2**62), 2**62)
counts = st.integers(0, 2**62)
reals = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | reals | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def problems(draw, operation):
    sizes = draw(st.lists(st.tuples(texts, counts), max_size=4, unique_by=lambda pair: pair[0]))
    attributes = draw(st.dictionaries(texts, numbers, max_size=4))
    return Problem(
        operation, tuple(sizes), draw(texts), draw(texts), tuple(sorted(attributes.items()))
    )


@st.composite
def records(draw):
    operation = draw(texts)
    return draw(
        st.builds(
            TuningRecord,
            operation=st.just(operation),
            spec=texts,
            arch=texts,
            target=texts,
            problem=problems(operation),
            config=st.dictionaries(texts, numbers, max_size=4),
            device=st.builds(
                DeviceIdentity, name=texts, sm_count=counts, shared_bytes_per_block=counts,
                l2_bytes=counts, memory_clock_mhz=counts,
            ),
            evidence=st.sampled_from(["measured", "predicted"]),
            measurement=st.builds(
                Measurement, reals, texts, reals, reals, counts,
                st.dictionaries(texts, json_values, max_size=3),
            ),
            default_us=st.none() | reals,
            images=st.lists(
                st.builds(
                    KernelImage, name=texts, source_digest=texts, cubin_sha256=texts,
                    registers=counts, spill_bytes=counts, shared_bytes=counts,
                ),
                max_size=2,
            ).map(tuple),
            limits=st.lists(
                st.builds(
                    Limit,
                    texts,
                    st.sampled_from(["multiple_of", "at_most", "at_least", "equal"]),
                    numbers,
                ),
                max_size=2,
            ).map(tuple),
            nvrtc=texts, tunegen=texts, created=texts, trials=counts, seed=numbers,
            command=texts, baseline=texts, baseline_ratio=st.none() | reals,
            relative_error=st.none() | reals, tolerance=st.none() | reals,
            deterministic=st.none() | st.booleans(), driver=texts, min_driver=texts,
            extra=st.dictionaries(texts, reals, max_size=2),
        )
    )  # fmt: skip


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(st.lists(records(), max_size=3, unique_by=lambda record: record.identity))
def test_any_record_survives_a_file_and_the_bytes_depend_on_the_records_alone(found):
    content = form.encode(found)
    back = form.decode(content, Path("file"))
    assert back == sorted(found, key=lambda record: record.identity)
    assert [form.settle(record) for record in found] == found
    assert form.encode(back) == content
    assert form.encode(reversed(found)) == content


def assert_sorted(value, path=()):
    """All names of all objects in order, but for sizes. Objects are tuples here, arrays lists."""
    if isinstance(value, tuple):
        names = [name for name, _ in value]
        assert names == sorted(names) or path == ("records", "problem", "sizes")
        for name, inner in value:
            assert_sorted(inner, (*path, name))
    if isinstance(value, list):
        for inner in value:
            assert_sorted(inner, path)


@quick
@given(st.lists(records(), min_size=1, max_size=2))
def test_canonical_form(found):
    content = form.encode(found).decode()
    assert_sorted(json.loads(content, object_pairs_hook=tuple, parse_constant=pytest.fail))
    assert content == json.dumps(json.loads(content), indent=2, ensure_ascii=False) + "\n"


def test_sizes_keep_the_order_in_which_a_problem_is_written(db):
    db.put(make_record("3x5x7"))
    (record,) = stored(db)
    assert record.problem == problem("3x5x7")
    assert matmul.OPERATION.text(record.problem) == "3x5x7"


def test_a_file_whose_sizes_were_reordered_means_the_same(db):
    path = db.put(make_record("300x500x700"))
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content, sort_keys=True))
    match = look_up(db, "300x500x700")
    assert match.rung == "exact"
    assert matmul.OPERATION.text(match.record.problem) == "300x500x700"


def test_load_and_save_is_the_same_bytes(db):
    path = db.put(make_record(block_m=1))
    content = path.read_bytes()
    again = make_record(
        config={"BLOCK_N": np.int64(64), "BLOCK_M": 1}, measurement=Measurement(1000, "sustained"),
        default_us=np.float64(2000),
    )  # fmt: skip
    assert db.put(again).read_bytes() == content


@pytest.mark.parametrize(
    "changes",
    [
        {"measurement": Measurement(1.0, "burst", details={"clocks": [1.0, math.nan]})},
        {"extra": {"joules": math.inf}},
        {"extra": {"joules": -math.inf}},
        {"extra": {"joules": "many"}},
        {"measurement": Measurement(1.0, "burst", details={"clocks": object()})},
        {"config": {"BLOCK_M": 1.5}},
        {"trials": True},
        {"evidence": "guessed"},
        {"command": "tunegen \ud800"},
        {"problem": replace(problem(), operation="softmax")},
    ],
)
def test_what_json_or_the_schema_lacks_is_refused_and_nothing_is_written(db, changes):
    content = db.put(make_record()).read_bytes()
    with pytest.raises(DatabaseError):
        db.put(make_record(**changes))
    assert [path.read_bytes() for path in db.user_folder.rglob("*.json")] == [content]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"schema": 1', '"schema": 7'), ["7", str(form.SCHEMA)]),
        (lambda text: text.replace('"schema": 1', '"schema": 0'), ["0"]),
        (lambda text: text.replace('"schema": 1', '"schema": true'), ["schema"]),
        (lambda text: text.replace('"seed"', '"sed"'), ["sed"]),
        (lambda text: text.replace('"sm_count": 132', '"sm_count": "132"'), ["sm_count"]),
        (lambda text: text.replace('"measured"', '"guessed"'), ["evidence"]),
        (lambda text: text.replace("1000.0", "NaN"), []),
        (lambda text: text.replace("1000.0", "null"), ["median_us"]),
        (lambda text: text[:-12], []),
        (lambda text: "", []),
        (lambda text: "[]", []),
    ],
)
def test_a_malformed_file_is_named_and_left_alone(db, change, words):
    path = db.put(make_record())
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    for action in (
        lambda: list(db.records()),
        lambda: db.put(make_record(block_m=2)),
        lambda: look_up(db),
    ):
        with pytest.raises(DatabaseError) as caught:
            action()
        assert all(word in str(caught.value) for word in (str(path), *words))
    assert path.read_text() == change(text)
    assert [finding.kind for finding in check(db)] == ["malformed"]
    assert len(db.where()[0].unreadable) == 1


def test_a_file_of_schema_1_without_the_fields_that_came_later_still_loads(tmp_path):
    db = Database(SCHEMA_1, tmp_path / "shipped")
    (record,) = stored(db)
    asked = matmul.OPERATION.problem("2048x1024x512", layout="nt")
    assert record.problem != asked
    assert matmul.OPERATION.complete(record.problem) == asked
    assert record.measurement.median_us == 61.0
    assert record.tolerance is None
    match = db.lookup(matmul.OPERATION, asked, H200, usable=lambda r: "")
    assert (match.rung, match.record) == ("exact", record)
    copy = Database(tmp_path / "copy", tmp_path / "shipped")
    assert copy.merge(SCHEMA_1).added == 1
    assert stored(copy) == [record]


def test_the_published_schema_is_that_of_the_types():
    published = (resources.data_dir("tuned_db") / "schema.json").read_text()
    assert published == database.json_schema(), (
        'python -c "from tunegen.database import json_schema; '
        "print(json_schema(), end='')\" > tuned_db/schema.json"
    )


def test_the_published_schema_names_every_field_of_a_record(db):
    schema = json.loads(database.json_schema())["$defs"]
    (written,) = json.loads(db.put(make_record()).read_bytes())["records"]
    names = {field.name for field in dataclasses.fields(TuningRecord)}
    assert set(written) == set(schema["RecordForm"]["properties"]) == names
    for part in ("problem", "device", "measurement"):
        reference = schema["RecordForm"]["properties"][part]["$ref"].split("/")[-1]
        assert set(written[part]) == set(schema[reference]["properties"])


def test_ten_thousand_records_load_within_a_second(tmp_path):
    path = tmp_path / "sm_90" / "matmul.json"
    path.parent.mkdir()
    (one,) = json.loads(form.encode([make_record()]))["records"]
    many = [{**one, "config": {"BLOCK_M": n, "BLOCK_N": 64}} for n in range(10_000)]
    path.write_text(json.dumps({"schema": 1, "records": many}))
    times = []
    for _ in range(2):
        started = time.process_time()
        assert len(stored(Database(tmp_path, tmp_path / "none"))) == 10_000
        times.append(time.process_time() - started)
    assert min(times) < 1.0


# --- records side by side (cases 22, 24) ---------------------------------------------------------

OTHER_IDENTITIES = {
    "size": make_record("4096x8192x8192"),
    "policy": make_record(policy="burst"),
    "tolerance": make_record(tolerance=1e-3),
    "dtype": make_record(dtype="fp64"),
    "attribute": make_record(attributes={"beta": 1}),
    "stride": make_record(attributes={"lda": 5000}),
    "config": make_record(block_m=64),
    "spec": make_record(spec="naive"),
    "evidence": make_record(evidence="predicted"),
    "device": make_record(device=GH200),
    "capability": make_record(device=A10),
    "slice": make_record(device=replace(H200, sm_count=16)),
}


@pytest.mark.parametrize("name", OTHER_IDENTITIES)
def test_records_that_differ_stand_side_by_side(db, name):
    first, second = make_record(), OTHER_IDENTITIES[name]
    db.put(first)
    db.put(second)
    assert sorted(stored(db), key=repr) == sorted([first, second], key=repr)


def test_the_same_winner_found_again_replaces_its_record(db):
    db.put(make_record(median_us=900.0))
    newer = make_record(
        median_us=950.0, seed=3, command="tunegen tune matmul",
        images=(KernelImage(name="matmul_simt", source_digest="c" * 64, cubin_sha256="d" * 64,
                            registers=96, spill_bytes=0, shared_bytes=0),),
    )  # fmt: skip
    db.put(newer)
    assert stored(db) == [newer]


def test_a_record_of_an_older_template_never_answers(db):
    stale, fresh = make_record(block_m=1, median_us=1.0), make_record(block_m=2, median_us=5.0)
    db.put(stale)
    db.put(fresh)

    def usable(record):
        return "stale: the template has changed" if record == stale else ""

    match = look_up(db, usable=usable)
    assert match.record == fresh
    assert match.skipped == (database.Skipped(stale, "stale: the template has changed"),)
    match = look_up(db, usable=lambda record: "stale")
    assert (match.record, match.rung, len(match.skipped)) == (None, "default", 2)
    assert "stale" in match.reason


# --- layers --------------------------------------------------------------------------------------


def test_layers_in_order(db):
    shipped(db).put(make_record("64x64x64", device=A10))
    db.put(make_record())
    db.put(make_record(block_m=2))
    found = [(at.layer, at.path, at.exists, at.records) for at in db.where()]
    assert found == [("user", db.user_folder, True, 2), ("shipped", db.shipped, True, 1)]
    assert [layer for layer, _ in db.records()] == ["user", "user", "shipped"]
    assert [layer for layer, _ in db.records(arch="sm_86")] == ["shipped"]
    assert list(db.records(operation="softmax")) == []


def test_folders_that_are_not_there_are_empty(db):
    assert [(at.exists, at.records, at.files) for at in db.where()] == [(False, 0, ())] * 2
    assert stored(db) == []
    assert check(db) == []
    assert not db.user_folder.exists()


def test_default_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    db = Database()
    assert db.user_folder == tmp_path / "tunegen" / "tuned_db"
    assert db.shipped == resources.data_dir("tuned_db")
    assert db.put(make_record()) == db.user_folder / "sm_90" / "matmul.json"


def test_only_the_user_layer_is_written(db):
    record = make_record(created="2020-01-01T00:00:00+00:00")
    path = shipped(db).put(record)
    before = {p: p.stat().st_mtime_ns for p in (path, path.parent, db.shipped)}
    db.put(replace(record, created="2026-01-01T00:00:00+00:00"))
    db.merge(db.shipped)
    look_up(db)
    check(db)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert path.read_bytes() == form.encode([record])


def test_the_installed_package_is_never_written(monkeypatch, tmp_path):
    package = tmp_path / "site-packages" / "tunegen"
    monkeypatch.setattr(layers, "_PACKAGE", package)
    db = Database(package / "tuned_db", tmp_path / "shipped")
    with pytest.raises(DatabaseError, match="installed package"):
        db.put(make_record())
    assert not package.exists()


def test_predictions_are_never_shipped(db):
    predicted = make_record(evidence="predicted", policy="model")
    with pytest.raises(DatabaseError, match="shipped"):
        Database(db.shipped, db.shipped).put(predicted)
    db.put(predicted)
    db.put(make_record())
    report = Database(db.shipped, db.shipped).merge(db.user_folder)
    assert (report.added, report.left_out) == (1, 1)
    assert [record.evidence for record in stored(shipped(db))] == ["measured"]


def test_the_same_winner_in_both_layers_is_the_users(db):
    shipped(db).put(make_record(median_us=900.0))
    mine = make_record(median_us=950.0)
    db.put(mine)
    match = look_up(db)
    assert (match.layer, match.record) == ("user", mine)
    # A stale one of the user's does not hide the shipped one.
    match = look_up(db, usable=lambda record: "stale" if record == mine else "")
    assert (match.layer, match.record.measurement.median_us) == ("shipped", 900.0)


def test_merge_keeps_the_newer_and_says_what_it_did(db, tmp_path):
    old, new = "2026-01-01T23:00:00+00:00", "2026-01-01T22:30:00-01:00"  # half an hour later
    ours = [make_record(block_m=n, created=old) for n in (1, 2)] + [
        make_record(block_m=3, created="2026-01-03T00:00:00Z")
    ]
    theirs = [make_record(block_m=n, created=new, seed=9) for n in (2, 3, 4)]
    theirs.append(make_record(device=A10, seed=9))
    other = Database(tmp_path / "other", tmp_path / "none")
    for record in ours:
        db.put(record)
    for record in theirs:
        other.put(record)
    assert db.merge(other.user_folder) == database.MergeReport(added=2, replaced=1, kept=1)
    expected = [ours[0], theirs[0], ours[2], theirs[2], theirs[3]]
    assert sorted(map(repr, stored(db))) == sorted(map(repr, expected))
    content = {path: path.read_bytes() for path in db.user_folder.rglob("*.json")}
    assert db.merge(other.user_folder) == database.MergeReport(added=0, replaced=0, kept=4)
    assert {path: path.read_bytes() for path in content} == content


def test_a_merge_with_a_malformed_file_changes_nothing(db, tmp_path):
    other = Database(tmp_path / "other", tmp_path / "none")
    other.put(make_record(device=A10))
    bad = other.put(make_record())
    bad.write_text("{}")
    with pytest.raises(DatabaseError, match=bad.name):
        db.merge(other.user_folder)
    assert stored(db) == []
    with pytest.raises(UsageError, match="nowhere"):
        db.merge(tmp_path / "nowhere")


# --- the ladder ----------------------------------------------------------------------------------


def test_each_rung_is_named_and_gives_its_reason(db):
    for sizes, device, rung, words in [
        ("4096x4096x4096", H200, "exact", ["measured", "NVIDIA H200", "sustained"]),
        ("4096x4096x8192", H200, "range", ["4096x4096x4096", "factor of 2"]),
        ("4096x4096x4096", GH200, "capability", ["NVIDIA H200", "NVIDIA GH200", "3201 for 2619"]),
        ("8x3200x3200", H200, "default", ["4096x4096x4096", "M", "512"]),
    ]:
        assert look_up(db, sizes, device).reason == "no record of matmul for sm_90"
        db.put(make_record())
        match = look_up(db, sizes, device)
        assert match.rung == rung
        assert (match.record is None) == (rung == "default")
        assert all(word in match.reason for word in words), match.reason
        assert match.skipped == ()
        shutil.rmtree(db.user_folder)


def test_a_higher_rung_answers_whatever_the_times_below(db):
    exact = make_record(median_us=1000.0)
    ranged = make_record("4096x4096x4000", median_us=10.0)
    elsewhere = make_record(device=GH200, median_us=1.0)
    for record in (elsewhere, ranged, exact):
        db.put(record)
    assert look_up(db).record == exact
    assert look_up(db, usable=lambda r: "no" if r == exact else "").record == ranged
    match = look_up(db, usable=lambda r: "no" if r != elsewhere else "")
    assert (match.record, match.rung) == (elsewhere, "capability")
    assert [skipped.record for skipped in match.skipped] == [exact, ranged]


@pytest.mark.parametrize("order", [1, -1])
def test_on_a_rung_measured_comes_first_then_the_lowest_time(db, order):
    predicted = make_record(block_m=1, evidence="predicted", policy="model", median_us=1.0)
    slow, fast = make_record(block_m=2, median_us=50.0), make_record(block_m=3, median_us=40.0)
    for record in (predicted, slow, fast)[::order]:
        db.put(record)
    assert look_up(db).record == fast
    assert len(stored(db)) == 3
    assert look_up(db, evidence="predicted").record == predicted
    match = look_up(db, usable=lambda record: "no" if record.evidence == "measured" else "")
    assert match.record == predicted
    assert "predicted" in match.reason


def test_a_measured_record_of_another_size_comes_before_a_predicted_one_on_its_rung(db):
    db.put(make_record("4096x4096x4095", evidence="predicted", policy="model", median_us=1.0))
    measured = make_record("4096x4096x2048", median_us=700.0)
    db.put(measured)
    assert look_up(db).record == measured


def test_times_of_different_policies_are_not_compared(db):
    burst = make_record(policy="burst", median_us=1.0, created="2026-01-01T00:00:00Z")
    sustained = make_record(median_us=90.0, block_m=2, created="2026-01-02T00:00:00Z")
    better = make_record(median_us=80.0, block_m=3, created="2026-01-01T00:00:00Z")
    for record in (burst, sustained, better):
        db.put(record)
    match = look_up(db)
    assert match.record == better
    assert "1 under another policy" in match.reason
    assert look_up(db, policy="burst").record == burst
    assert look_up(db, policy="warm").rung == "default"


def test_the_nearest_range_answers_not_the_fastest(db):
    near, far = make_record("4096x4096x4000", median_us=9.0), make_record("2048x2048x2048")
    db.put(near)
    db.put(replace(far, measurement=Measurement(1.0, "sustained")))
    assert look_up(db).record == near


@quick
@given(st.data())
def test_a_range_covers_up_to_the_factor_in_each_size(data):
    sizes = st.tuples(*[st.integers(0, 40)] * 4)
    tuned, asked = data.draw(sizes), data.draw(sizes)
    factor = database.RANGE_FACTOR
    near = all(
        a == b or (a > 0 < b and max(a, b) <= factor * min(a, b))
        for a, b in zip(tuned, asked, strict=True)
    )
    # Leading dimensions follow the sizes here, but are at least 1.
    record = make_record("x".join(map(str, tuned)))
    question = functools.partial(database.ladder.Question, matmul.OPERATION, device=H200)
    entry = database.ladder.Entry("user", record)
    match = database.ladder.climb(
        question(problem("x".join(map(str, asked))), usable=lambda r: ""), [entry]
    )
    if tuned == asked:
        assert match.rung == "exact"
    else:
        assert match.rung == ("range" if near else "default")


@pytest.mark.parametrize(
    ("tuned", "asked"),
    [
        ("3200x3200x3200", "8x3200x3200"),
        ("8x3200x3200", "3200x3200x3200"),
        ("16x4096x4096", "4096x4096x4096"),
        ("1024x1024x1024", "2049x1024x1024"),
        ("1024x1024x1024", "0x1024x1024"),
        ("2x64x64x64", "5x64x64x64"),
    ],
)
def test_the_nearest_size_answers_only_within_the_margin(db, tuned, asked):
    db.put(make_record(tuned))
    match = look_up(db, asked)
    assert (match.record, match.rung) == (None, "default")
    assert matmul.OPERATION.text(problem(tuned)) in match.reason
    assert "factor" in match.reason or "=0" in match.reason


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "fp64"},
        {"attributes": {"beta": 1}},
        {"attributes": {"align": 4}},
        {"attributes": {"lda": 4096 * 3}},
    ],
)
def test_a_record_of_another_class_does_not_answer(db, asked):
    db.put(make_record())
    assert look_up(db, "4096x4096x4096", **asked).rung == "default"


def test_a_stride_is_a_size_not_a_class(db):
    packed, padded = make_record(), make_record(attributes={"lda": 4608})
    db.put(packed)
    assert look_up(db, attributes={"lda": 4352}).rung == "range"
    db.put(padded)
    assert look_up(db, attributes={"lda": 4500}).record == padded
    assert look_up(db, attributes={"lda": 4104}).record == packed
    db.put(make_record("64x64x0"))  # whose leading dimension does not follow K below 1
    assert look_up(db, "64x64x0", attributes={"lda": 2}).rung == "range"


def test_a_record_from_before_an_attribute_stands_for_its_default(db):
    record = make_record()
    fewer = tuple(pair for pair in record.problem.attributes if pair[0] != "align")
    db.put(replace(record, problem=replace(record.problem, attributes=fewer)))
    assert look_up(db).rung == "exact"
    assert look_up(db, attributes={"align": 8}).rung == "default"


@pytest.mark.parametrize(
    ("limit", "asked", "holds"),
    [
        (Limit("K", "multiple_of", 8), "4096x4096x4096", True),
        (Limit("K", "multiple_of", 8), "4096x4096x4092", False),
        (Limit("ldb", "at_most", 4096), "4096x4097x4096", False),
        (Limit("M", "at_least", 4096), "4095x4096x4096", False),
        (Limit("SM_COUNT", "equal", 132), "4096x4096x4096", True),
        (Limit("SM_COUNT", "at_least", 133), "4096x4096x4096", False),
        (Limit("H", "at_most", 4096), "4096x4096x4096", False),  # no such quantity
        (Limit("B", "at_most", 1), "2x4096x4096x4096", False),
        (Limit("A", "multiple_of", 16), "4096x4096x4096", True),  # an address: the launch checks
    ],
)
def test_limits_are_checked_against_problem_and_device(db, limit, asked, holds):
    db.put(make_record(limits=(limit,)))
    match = look_up(db, asked)
    assert (match.rung == "default") != holds
    if not holds:
        (skipped,) = match.skipped
        assert str(limit) in skipped.why
        assert str(limit) in match.reason


def test_usable_is_asked_last_and_only_about_records_that_could_answer(db):
    db.put(make_record(limits=(Limit("M", "at_most", 1),)))
    db.put(make_record("64x64x64"))
    db.put(make_record("4096x4096x4000", block_m=2))
    exact = make_record(block_m=3)
    db.put(exact)
    asked = []
    look_up(db, usable=lambda record: asked.append(record) or "")
    assert asked == [exact]


# --- other GPUs (cases 27, 28) -------------------------------------------------------------------


def test_a_record_for_another_gpu_is_not_used_says_why_and_falls_back(db):
    record = make_record(shared_bytes=200 << 10)
    db.put(record)
    match = look_up(db, device=A10)
    assert (match.record, match.rung) == (None, "default")
    (skipped,) = match.skipped
    assert skipped.record == record
    for word in ("sm_90", "sm_86", str(200 << 10), str(99 << 10)):
        assert word in skipped.why


def test_a_file_copied_to_another_capability_does_not_answer_there(db):
    path = db.put(make_record())
    copy = db.user_folder / "sm_86" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    match = look_up(db, device=A10)
    assert match.rung == "default"
    assert "sm_90" in match.skipped[0].why
    assert "misplaced" in [finding.kind for finding in check(db)]
    # Nor do a device's own records where they do not belong.
    path.unlink()
    assert look_up(db).rung == "default"


def test_shared_memory_is_checked_on_the_device_asked_about(db):
    db.put(make_record(shared_bytes=200 << 10))
    small = replace(H200, name="a slice", shared_bytes_per_block=128 << 10)
    assert look_up(db, device=GH200).rung == "capability"
    match = look_up(db, device=small)
    assert match.rung == "default"
    assert str(200 << 10) in match.skipped[0].why


@pytest.mark.parametrize(
    "change",
    [
        {"name": "NVIDIA GH200"},
        {"sm_count": 114},
        {"shared_bytes_per_block": 228 << 10},
        {"l2_bytes": 60 << 20},
        {"memory_clock_mhz": 2619},
    ],
)
def test_another_chip_of_the_capability_answers_only_on_its_rung(db, change):
    db.put(make_record())
    match = look_up(db, device=replace(H200, **change))
    assert match.rung == "capability"
    assert str(next(iter(change.values()))) in match.reason


def test_what_timings_do_not_depend_on_is_no_part_of_a_device(db):
    db.put(make_record())
    assert look_up(db, device=replace(H200, source="elsewhere")).rung == "exact"


def test_of_other_chips_the_likest_answers_not_the_fastest(db):
    db.put(make_record(device=replace(H200, name="tiny", sm_count=16), median_us=1.0))
    likest = make_record(device=GH200, median_us=500.0)
    db.put(likest)
    assert look_up(db, device=H100_PCIE).record == likest


def test_a_malformed_file_of_another_capability_does_not_stop_a_look_up(db):
    bad = db.put(make_record(device=A10))
    bad.write_text("{")
    assert str(bad) in look_up(db).reason
    db.put(make_record())
    assert look_up(db).rung == "exact"


# --- check ---------------------------------------------------------------------------------------


def test_a_folder_that_may_not_be_read_is_named(db, monkeypatch):
    """It is no empty one: what is in it would be missed, or a new file put beside it."""
    db.put(make_record())
    real = Path.iterdir

    def refuse(folder):
        if folder == db.user_folder:
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    words = re.escape(f"{db.user_folder} cannot be read: Permission denied")
    with pytest.raises(DatabaseError, match=words):
        list(db.records())
    with pytest.raises(DatabaseError, match=words):
        look_up(db)
    (location, *_) = db.where()
    assert re.search(words, location.unreadable[0])
    (finding,) = check(db)
    assert (finding.kind, finding.path) == ("malformed", db.user_folder)


def test_a_file_that_could_not_be_written_is_found_before_the_work(db, tmp_path):
    db.ensure_writable("sm_90", "matmul")
    assert list(db.records()) == []
    (db.user_folder / "sm_90" / "matmul.json").write_text("{")
    with pytest.raises(DatabaseError, match="does not follow schema"):
        db.ensure_writable("sm_90", "matmul")
    (tmp_path / "file").touch()
    blocked = Database(tmp_path / "file" / "db", shipped=tmp_path / "none")
    with pytest.raises(DatabaseError, match="cannot be written"):
        blocked.ensure_writable("sm_90", "matmul")


def check(db, illegal=lambda record: "", stale=lambda record: ""):
    return db.check(illegal=illegal, stale=stale)


def test_a_sound_database_has_no_findings(db):
    db.put(make_record())
    db.put(make_record(evidence="predicted", policy="model"))
    shipped(db).put(make_record(device=A10))
    assert check(db) == []


def test_amend_replaces_what_stands_there_and_nothing_else(db):
    old, other = make_record(block_m=1), make_record(block_m=2)
    new = replace(old, seed=old.seed + 1)
    assert not db.amend(old, new)
    assert stored(db) == []
    for record in (old, other):
        db.put(record)
    assert db.amend(old, new)
    assert stored(db) == [new, other]
    assert not db.amend(old, replace(old, seed=old.seed + 2))
    assert stored(db) == [new, other]
    with pytest.raises(DatabaseError, match="impossible"):
        db.amend(new, replace(new, trials=0))
    assert stored(db) == [new, other]


def test_amend_keeps_the_same_winner_that_was_found_since(db):
    old, since = make_record(block_m=1), make_record(block_m=2)
    for record in (old, since):
        db.put(record)
    assert db.amend(old, replace(old, config=since.config, seed=since.seed + 1))
    assert stored(db) == [since]


def test_check_asks_what_is_illegal_then_what_is_stale(db):
    illegal, stale, sound = (make_record(block_m=n) for n in (1, 2, 3))
    for record in (illegal, stale, sound):
        db.put(record)

    def is_stale(record):
        assert record != illegal, "no source can be generated for it"
        return "another digest" if record == stale else ""

    findings = check(db, lambda record: "BLOCK_M=1" if record == illegal else "", is_stale)
    assert [(f.kind, f.reason, f.record) for f in findings] == [
        ("illegal", "BLOCK_M=1", illegal),
        ("stale", "another digest", stale),
    ]


def test_check_finds_predictions_among_shipped_records(db):
    other = Database(db.shipped, db.shipped.with_name("none"))
    other.put(make_record(evidence="predicted", policy="model"))
    (finding,) = check(db)
    assert (finding.layer, finding.kind) == ("shipped", "misplaced")
    assert "predicted" in finding.reason


def test_check_finds_bytes_that_tunegen_would_not_write(db):
    path = db.put(make_record())
    path.write_text(path.read_text().replace("  ", " "))
    assert [finding.kind for finding in check(db)] == ["not canonical"]
    record = make_record()
    path.write_bytes(form.encode([record, replace(record, seed=5)]))
    assert [finding.kind for finding in check(db)] == ["not canonical"]


IMPOSSIBLE = {
    "time of zero": {"measurement": Measurement(0.0, "burst")},
    "negative time": {"measurement": Measurement(-1.0, "burst")},
    "default of zero": {"default_us": 0.0},
    "outside its interval": {"measurement": Measurement(3.0, "burst", 1.0, 2.0, 9)},
    "interval upside down": {"measurement": Measurement(1.5, "burst", 2.0, 1.0, 9)},
    "no samples": {"measurement": Measurement(1.0, "burst", samples=0)},
    "no policy": {"measurement": Measurement(1.0, "")},
    "no trials": {"trials": 0},
    "ratio of zero": {"baseline": "cublas", "baseline_ratio": 0.0},
    "ratio to nothing": {"baseline_ratio": 1.0},
    "negative error": {"relative_error": -1e-3},
    "wrong result": {"relative_error": 1e-2, "tolerance": 1e-3},
    "tolerance of zero": {"tolerance": 0.0},
    "negative size": {"problem": replace(problem(), sizes=(("B", 1), ("M", -1)))},
    "negative registers": {
        "images": (replace(make_record().images[0], registers=-1),),
    },
    "multiple of zero": {"limits": (Limit("M", "multiple_of", 0),)},
    "no multiprocessors": {"device": replace(H200, sm_count=0)},
    "no device name": {"device": replace(H200, name="")},
    "unknown arch": {"arch": "sm_91", "target": "sm_91"},
    "target of another arch": {"target": "sm_86"},
    "malformed target": {"target": "compute_90"},
    "no date": {"created": "yesterday"},
    "a date without its offset": {"created": "2026-01-01T00:00:00"},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_record_is_not_written_does_not_answer_and_is_found(db, name):
    record = make_record(**IMPOSSIBLE[name])
    with pytest.raises(DatabaseError):
        db.put(record)
    assert not list(db.user_folder.rglob("*.json"))
    path = db.user_folder / "sm_90" / "matmul.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(form.encode([record]))
    assert look_up(db).record is None
    assert "impossible" in [finding.kind for finding in check(db)]
    other = Database(db.user_folder.with_name("other"), db.shipped)
    with pytest.raises(DatabaseError):
        other.merge(db.user_folder)


@pytest.mark.parametrize("name", ["../matmul", "", "a/b", ".hidden", "..", "a\0b", "a b"])
def test_an_operation_cannot_name_a_file_elsewhere(db, name):
    record = make_record(operation=name, problem=replace(problem(), operation=name))
    with pytest.raises(DatabaseError):
        db.put(record)
    assert not db.user_folder.exists()


# --- writers (case 26) ---------------------------------------------------------------------------


def run_writers(*arguments):
    done = subprocess.run(
        [sys.executable, WRITER, *map(str, arguments)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sixteen_writers_of_which_one_is_killed(tmp_path):
    folder, writers, count = tmp_path / "db", 16, 6
    run_writers("write", folder, writers, count, 5)
    logs = [tmp_path / f"db.{writer}.log" for writer in range(writers)]
    db = Database(folder, tmp_path / "none")
    written = {record.config["BLOCK_M"]: record for record in stored(db)}
    reported = [int(word) for log in logs for word in log.read_text().split()]
    assert len(reported) >= count * (writers - 1) + 3
    assert set(reported) <= set(written)
    assert len(set(written) - set(reported)) <= 1  # written by the victim, not yet reported
    shared = [record for record in written.values() if record.problem == problem()]
    assert {record.config["BLOCK_M"] // 1000 for record in shared} == set(range(writers))
    assert look_up(db).record == min(shared, key=lambda record: record.measurement.median_us)

    assert check(db) == []
    db.put(make_record("1x1x1"))
    left = sorted(path.name for path in (folder / "sm_90").iterdir())
    assert left == [".matmul.json.lock", "matmul.json"]


def test_a_kill_at_any_line_leaves_the_old_file_or_the_new(tmp_path):
    old, new, temporary = map(int, run_writers("crash", tmp_path / "db").split())
    assert old >= 10
    assert new >= 2
    assert temporary >= 3


def test_threads_of_one_database_lose_nothing(db):
    def write(writer):
        for turn in range(5):
            db.put(make_record(block_m=writer * 10 + turn))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored(db)) == 20


def test_a_lock_that_is_held_for_too_long_is_an_error(db, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT_SECONDS", 0.05)
    path = db.put(make_record())
    with files.exclusive(path), pytest.raises(DatabaseError, match="locked"):
        db.put(make_record(block_m=2))
    db.put(make_record(block_m=2))
    assert len(stored(db)) == 2


def test_a_full_disk_leaves_the_old_file(db, monkeypatch):
    path = db.put(make_record())
    content = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(DatabaseError, match="No space left on device"):
            db.put(make_record(block_m=2))
    assert path.read_bytes() == content
    assert sorted(p.name for p in path.parent.iterdir()) == [".matmul.json.lock", path.name]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        Database(tmp_path / "file")
    with pytest.raises(DatabaseError, match="cannot be written"):
        Database(tmp_path / "file" / "db", tmp_path / "shipped").put(make_record())


def test_an_unreadable_file_is_an_error(db):
    path = db.put(make_record())
    path.unlink()
    path.mkdir()
    with pytest.raises(DatabaseError, match="cannot be read"):
        stored(db)


def test_a_change_by_another_process_is_seen(db):
    db.put(make_record(median_us=100.0))
    assert look_up(db).record.measurement.median_us == 100.0
    path = Database(db.user_folder, db.shipped).put(make_record(median_us=200.0))
    os.utime(path, ns=(0, 0))
    assert look_up(db).record.measurement.median_us == 200.0

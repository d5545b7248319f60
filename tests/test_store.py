# SPDX-License-Identifier: Apache-2.0
"""Every trial, durable: exact round trips, kills, torn files, others at work, changed spaces."""

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import platformdirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_writer import DEVICE, OPERATION, SPACES, make_key, make_trial, url

import tunegen
from tunegen.errors import DatabaseError, ToolkitError, UsageError
from tunegen.model import Config, Measurement, Outcome, Space, Trial, parameters
from tunegen.store import Study, default_path, list_studies
from tunegen.store import sqlite as sqlite_files

WRITER = Path(__file__).parent / "store_writer.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tunegen.__file__).resolve().parents[1])}
DIGESTS = {"kernel": "a" * 64}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "studies.db"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's data directory, with the default file in it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Path(platformdirs.user_data_dir("tunegen"))


def fill(path, trials, **changes):
    """Add trials to a study; gives its name."""
    with Study.open(url(path), make_key(**changes)) as study:
        for trial in trials:
            study.add(trial, DIGESTS)
        return study.name


def stored(path, **changes):
    with Study.open(url(path), make_key(**changes)) as study:
        found = study.trials()
        assert study.warnings == ()
        return found


def rows(path, statement):
    connection = sqlite3.connect(path)
    found = connection.execute(statement).fetchall()
    connection.close()
    return found


# --- what comes back -----------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63)
TIMES = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
DETAILS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
MEASUREMENTS = st.builds(
    Measurement, TIMES, st.text(max_size=9), TIMES, TIMES, st.integers(1, 10**6), DETAILS
)
OUTCOMES = st.builds(
    Outcome, st.sampled_from(["measured", "predicted"]), MEASUREMENTS
) | st.builds(
    Outcome,
    st.sampled_from(
        ["rejected", "compile_failed", "launch_failed", "wrong_result", "timed_out"]
    ),
    st.none(),
    st.text(max_size=40),
)  # fmt: skip


@st.composite
def trials(draw):
    spec = draw(st.sampled_from(sorted(SPACES)))
    config = {p.name: draw(st.sampled_from(p.values)) for p in SPACES[spec].parameters}
    origin = draw(st.sampled_from(["default", "record", "study", "model", "sampler"]))
    return Trial(0, spec, Config(config), draw(OUTCOMES), origin, draw(TIMES))


@settings(max_examples=12)
@given(st.lists(trials(), max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_trials_come_back_as_they_were(tmp_path_factory, added, digests):
    path = tmp_path_factory.getbasetemp() / "round_trip.db"
    with Study.open(url(path), make_key(), fresh=True) as study:
        for trial in added:
            study.add(trial, digests, {"kernel": "cubin"})
    seen = []
    with Study.open(url(path), make_key(), usable=lambda t, d: seen.append(d) or True) as study:
        found = study.trials()
    assert found == tuple(replace(trial, number=n) for n, trial in enumerate(added))
    assert [list(t.config) for t in found] == [list(t.config) for t in added]  # order too
    assert seen == [digests] * len(added)


def test_what_json_lacks_becomes_what_it_has(path):
    details = {"clock": np.float32(0.5), "count": np.int64(3), "throttle": ("power",)}
    outcome = Outcome("measured", Measurement(1.0, "burst", details=details))
    fill(path, [replace(make_trial(), outcome=outcome)])
    (found,) = stored(path)
    assert found.outcome.measurement.details == {"clock": 0.5, "count": 3, "throttle": ["power"]}


def test_what_cannot_be_kept_is_refused(path):
    with Study.open(url(path), make_key()) as study:
        for us in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(DatabaseError, match="took"):
                study.add(make_trial(us=us), DIGESTS)
        odd = Outcome("measured", Measurement(1.0, "burst", details={"device": object()}))
        with pytest.raises(DatabaseError, match="a trial of wide cannot be kept: a object has no"):
            study.add(replace(make_trial(), outcome=odd), DIGESTS)
        with pytest.raises(UsageError, match="A=3 is not in the space"):
            study.add(make_trial(a=3), DIGESTS)
        with pytest.raises(UsageError, match="unknown spec of the study 'wider'"):
            study.add(replace(make_trial(), spec="wider"), DIGESTS)
        assert study.trials() == ()


def test_it_is_a_study_to_optuna_too(path):
    narrow = Trial(0, "narrow", Config({"A": 32}), make_trial(us=3.0).outcome, "model")
    name = fill(path, [make_trial(1, 5.0, a=8), make_trial(reason="it hangs"), narrow])
    study = optuna.load_study(study_name=name, storage=url(path))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert [trial.value for trial in study.trials] == [5.0, None, 3.0]
    assert study.trials[0].params == {"spec": "wide", "wide.A": 8, "wide.B": 1}
    assert study.best_params == {"spec": "narrow", "narrow.A": 32}


def test_optuna_keeps_quiet_and_stays_as_it_was(path, capfd):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    fill(path, [make_trial()])
    fill(path, [make_trial()])
    list_studies(url(path))
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert capfd.readouterr() == ("", "")


# --- which trials are used -----------------------------------------------------------------------

OTHERS = {
    "problem": OPERATION.problem("2048"),
    "dtype": OPERATION.problem("1024", dtype="fp64"),
    "arch": "sm_100",
    "device": replace(DEVICE, name="NVIDIA H100"),
    "multiprocessors": replace(DEVICE, sm_count=114),
    "memory clock": replace(DEVICE, memory_clock_mhz=2619),
    "evidence": "predicted",
    "policy": "sustained",
    "tolerance": 1e-3,
    "toolkit": "13.1.0",
}
FIELDS = {"dtype": "problem", "multiprocessors": "device", "memory clock": "device"}


def test_what_is_not_comparable_is_another_study(path):
    names = {fill(path, [make_trial(us=1.0)])}
    for us, (what, value) in enumerate(OTHERS.items(), 2):
        changes = {FIELDS.get(what, what): value}
        names.add(fill(path, [make_trial(us=float(us))], **changes))
        assert [t.outcome.median_us for t in stored(path, **changes)] == [us], what
    assert [t.outcome.median_us for t in stored(path)] == [1.0]
    assert len(names) == 1 + len(OTHERS)


def test_names_can_be_read(path):
    name = fill(path, [])
    assert name.startswith("nothing-1024-fp32-nvidia-h200-")
    assert name.replace("-", "").isalnum()


def changed(**values):
    """The spaces of the test study with other values of the parameters of "wide"."""
    wide = tuple(
        replace(p, values=values.get(p.name, p.values)) for p in SPACES["wide"].parameters
    )
    return {**SPACES, "wide": Space(wide)}


def test_a_changed_space_uses_the_earlier_trials(path):
    """One value more, one value less, and back again."""
    more, less = changed(A=(1, 2, 4, 8, 16)), changed(A=(1, 2))
    names = {
        fill(path, [make_trial(us=1.0, a=8)]),
        fill(path, [make_trial(us=2.0, a=16)], spaces=more),
        fill(path, [make_trial(us=3.0, a=2)], spaces=less),
        fill(path, [], spaces={"wide": SPACES["wide"]}),  # --spec wide
    }
    assert len(names) == 4
    for spaces in (SPACES, more, less, {"wide": SPACES["wide"]}):
        found = stored(path, spaces=spaces)
        assert [trial.outcome.median_us for trial in found] == [1.0, 2.0, 3.0]
        assert [trial.number for trial in found] == [0, 1, 2]


def test_the_caller_says_what_is_still_usable(path):
    with Study.open(url(path), make_key()) as study:
        for number, digest in enumerate(["old", "new", "old", "new"]):
            study.add(make_trial(us=number + 1.0), {"kernel": digest})

    def usable(trial, digests):
        return digests == {"kernel": "new"} and trial.config.A == 1

    with Study.open(url(path), make_key(), usable=usable) as study:
        found = study.trials()
    assert [(t.number, t.outcome.median_us) for t in found] == [(0, 2.0), (1, 4.0)]


def test_fresh_starts_anew_and_keeps_the_old(path):
    first = fill(path, [make_trial(us=1.0)])
    with Study.open(url(path), make_key(), fresh=True) as study:
        assert study.trials() == ()
        study.add(make_trial(us=2.0), DIGESTS)
        second = study.name
    assert second == f"{first}-2"
    assert [trial.outcome.median_us for trial in stored(path)] == [2.0]
    # Those of the changed space are of the old generation too.
    found, _ = list_studies(url(path))
    assert [(info.name, info.current) for info in found] == [(first, False), (second, True)]
    assert [trial.outcome.median_us for trial in stored(path, spaces=changed(A=(1,)))] == [2.0]


def test_fresh_on_nothing_is_the_first(path):
    with Study.open(url(path), make_key(), fresh=True) as study:
        name = study.name
    assert fill(path, []) == name


def test_studies_are_listed(path):
    first = fill(path, [make_trial(1, 5.0), make_trial(reason="it hangs"), make_trial(us=4.0)])
    second = fill(path, [], policy="sustained")
    (one, two), warnings = list_studies(url(path))
    assert warnings == ()
    assert (one.name, two.name) == (first, second)
    assert one.counts == {"measured": 2, "launch_failed": 1}
    assert (one.best.trial.number, one.best.trial.outcome.median_us) == (2, 4.0)
    assert one.trials[1].trial.outcome.reason == "it hangs"
    assert one.trials[0].digests == DIGESTS
    assert one.facts["device"]["name"] == "NVIDIA H200"
    assert one.facts["policy"] == "burst"
    assert one.facts["created"] <= one.updated == one.trials[2].finished
    assert two.best is None
    assert two.counts == {}
    assert two.updated == two.facts["created"]


# --- kills, and others at work -------------------------------------------------------------------


def writers(*words):
    done = subprocess.run(
        [sys.executable, WRITER, *map(str, words)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def numbers(path):
    return [number for (number,) in rows(path, "SELECT number FROM trials ORDER BY trial_id")]


def test_a_kill_loses_nothing_that_was_reported(path):
    """Twenty kills, the first while the file is being made."""
    reported = writers("crash", path, 20)
    assert len(reported) > 20, "the writers must come to writing"
    found = stored(path)
    reasons = [trial.outcome.reason for trial in found]
    assert len(set(reasons)) == len(reasons)
    assert set(reported) <= set(reasons)
    # A trial may be stored whose report the kill came before: at most one of each writer.
    unreported = Counter(reason.split(".")[0] for reason in set(reasons) - set(reported))
    assert all(count == 1 for count in unreported.values())
    assert numbers(path) == list(range(len(found)))
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_writers_at_once_lose_nothing(path):
    reported = writers("together", path, 4, 8)
    reasons = [trial.outcome.reason for trial in stored(path)]
    assert sorted(reasons) == sorted(reported)
    assert len(reported) == 4 * 8
    assert sorted(numbers(path)) == list(range(32))
    (only,), _ = list_studies(url(path))
    assert len(only.trials) == 32


def test_a_commit_reaches_the_disk(path):
    """What an operating system has only in its memory, a crash of the machine takes."""
    fill(path, [])
    connection = sqlite_files.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()


def test_two_studies_see_each_others_trials(path):
    with Study.open(url(path), make_key()) as one, Study.open(url(path), make_key()) as two:
        one.add(make_trial(us=1.0), DIGESTS)
        two.add(make_trial(us=2.0), DIGESTS)
        one.add(make_trial(us=3.0), DIGESTS)
        assert one.trials() == two.trials()
        assert [(t.number, t.outcome.median_us) for t in one.trials()] == [
            (0, 1.0), (1, 2.0), (2, 3.0),
        ]  # fmt: skip


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of two studies with 40 trials."""
    path = tmp_path_factory.mktemp("whole") / "studies.db"
    fill(path, [make_trial(n, n + 1.0) for n in range(30)])
    fill(path, [make_trial(n, n + 1.0) for n in range(10)], policy="sustained")
    return path


def check_mended(path, whole, before):
    """Open a damaged file; gives how many trials are left. They are whole, one warning says what
    was done, and tuning goes on."""
    intact = stored(whole)
    with Study.open(url(path), make_key()) as study:
        (warning,) = study.warnings
        found = study.trials()
        assert len(study.warnings) == 1
        study.add(make_trial(0, 1e6), DIGESTS)
        assert len(study.trials()) == len(found) + 1
    known = {trial.outcome.median_us: replace(trial, number=0) for trial in intact}
    for trial in found:
        assert replace(trial, number=0) == known[trial.outcome.median_us]
    aside = path.with_name(f"{path.name}.damaged-1")
    assert str(aside) in warning
    assert aside.read_bytes() == before
    assert len(stored(path)) == len(found) + 1  # and no warning any more
    for (study_id,) in rows(path, "SELECT study_id FROM studies"):
        found_numbers = rows(path, f"SELECT number FROM trials WHERE study_id = {study_id}")
        assert sorted(found_numbers) == [(n,) for n in range(len(found_numbers))]
    return len(found)


@pytest.mark.parametrize("cut", [1, 12, 512, 4096, 4108, 20_000])
def test_a_torn_file(cut, path, whole):
    shutil.copy(whole, path)
    os.truncate(path, path.stat().st_size - cut)
    kept = check_mended(path, whole, path.read_bytes())
    if cut <= 12:
        assert kept >= 20  # a page holds no more of them


@pytest.mark.parametrize("seed", range(6))
def test_a_file_with_spoilt_pages(seed, whole, home):
    """Something else was written over parts of it: what is left is whole, and tuning goes on."""
    content = bytearray(whole.read_bytes())
    rng = np.random.default_rng(seed)
    for _ in range(3):
        start = int(rng.integers(4096, len(content) - 600))
        content[start : start + 600] = rng.bytes(600)
    home.mkdir(parents=True)
    (home / "studies.db").write_bytes(content)
    with Study.open(None, make_key()) as study:
        found = study.trials()
        assert len(study.warnings) <= 2
        study.add(make_trial(0, 1e6), DIGESTS)
        assert len(study.trials()) == len(found) + 1
    intact = {trial.outcome.median_us: trial for trial in stored(whole)}
    for trial in found:
        assert replace(trial, number=0) == replace(intact[trial.outcome.median_us], number=0)


def test_a_trial_that_is_not_whole_is_left_out(path):
    """Its row is there, and not what was written."""
    fill(path, [make_trial(us=1.0), make_trial(us=2.0)])
    connection = sqlite3.connect(path)
    spoil = "UPDATE trial_user_attributes SET value_json = replace(value_json, ?, ?)"
    connection.execute(spoil, ('"median_us": 1.0', '"median_us": 9.0'))
    connection.commit()
    connection.close()
    with Study.open(url(path), make_key()) as study:
        assert [(t.number, t.outcome.median_us) for t in study.trials()] == [(0, 2.0)]
        assert study.warnings == (f"1 trials of {study.name} cannot be read and are left out",)
    (info,), _ = list_studies(url(path))
    assert (len(info.trials), info.unreadable) == (1, 1)


def test_a_torn_log(tmp_path, path):
    """As after a kill: the log holds trials that the file does not."""
    with Study.open(url(path), make_key()) as study:
        for number in range(5):
            study.add(make_trial(number, number + 1.0), DIGESTS)
        killed = tmp_path / "killed.db"
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    os.truncate(f"{killed}-wal", os.stat(f"{killed}-wal").st_size - 12)
    assert [trial.outcome.median_us for trial in stored(killed)] == [1.0, 2.0, 3.0, 4.0]
    fill(killed, [make_trial(us=6.0)])
    assert len(stored(killed)) == 5


def test_an_empty_file(path):
    path.touch()
    with Study.open(url(path), make_key()) as study:
        assert study.warnings == (f"{path} was empty: studies start anew",)
        study.add(make_trial(), DIGESTS)
    assert len(stored(path)) == 1


def test_an_old_log_is_not_taken_for_the_new_files(path):
    with Study.open(url(path), make_key()) as study:
        study.add(make_trial(), DIGESTS)
        shutil.copy(f"{path}-wal", f"{path}.log")
    path.unlink()
    os.replace(f"{path}.log", f"{path}-wal")
    assert stored(path) == ()


@pytest.mark.parametrize("content", [b"not a database\n" * 99, b"\0" * 8192, b"x"])
def test_what_is_no_database_is_set_aside_in_our_own_place(content, home):
    home.mkdir(parents=True)
    file = home / "studies.db"
    file.write_bytes(content)
    with Study.open(None, make_key()) as study:
        (warning,) = study.warnings
        study.add(make_trial(), DIGESTS)
    aside = home / "studies.db.damaged-1"
    assert warning == f"nothing can be read of {file}, now {aside}: studies start anew"
    assert aside.read_bytes() == content
    with Study.open(None, make_key()) as study:
        assert len(study.trials()) == 1
        assert study.warnings == ()


def test_a_file_torn_in_half(path, whole, home):
    """The list of its tables is gone: our own file makes way, any other stays."""
    half = whole.read_bytes()[: whole.stat().st_size // 2]
    path.write_bytes(half)
    with pytest.raises(DatabaseError, match=r"is damaged beyond reading \(move it away\)"):
        Study.open(url(path), make_key())
    assert path.read_bytes() == half
    home.mkdir(parents=True)
    (home / "studies.db").write_bytes(half)
    with Study.open(None, make_key()) as study:
        assert len(study.warnings) == 1
        study.add(make_trial(), DIGESTS)
    assert (home / "studies.db.damaged-1").read_bytes() == half


@pytest.mark.parametrize("kind", ["text", "database", "torn database"])
@pytest.mark.parametrize(
    "use",
    [
        lambda file: Study.open(url(file), make_key()),
        lambda file: list_studies(url(file)),
        lambda file: sqlite_files.mend(file, ours=False),
    ],
)
def test_what_is_not_ours_stays_as_it_is(kind, use, tmp_path):
    """A mistyped URL must not cost anybody a file."""
    file = tmp_path / "precious"
    file.write_text("a,b\n1,2\n")
    if kind != "text":
        file.unlink()
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE precious (a)")
        connection.executemany("INSERT INTO precious VALUES (?)", [("x" * 999,)] * 20)
        connection.commit()
        connection.close()
    if kind == "torn database":
        os.truncate(file, file.stat().st_size - 12)
    before = file.read_bytes()
    with pytest.raises((UsageError, DatabaseError), match=r"is no study file|is damaged"):
        use(file)
    assert file.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} <= {"precious", ".precious.lock"}


def test_listing_writes_nothing(tmp_path, whole, home):
    assert list_studies(None) == ((), ())
    assert not home.exists()
    with pytest.raises(DatabaseError, match="there is no study file"):
        list_studies(url(tmp_path / "studies.db"))
    torn, empty = tmp_path / "torn.db", tmp_path / "empty.db"
    empty.touch()
    assert list_studies(url(empty)) == ((), ())
    shutil.copy(whole, torn)
    os.truncate(torn, torn.stat().st_size - 12)
    before = torn.read_bytes()
    with pytest.raises(DatabaseError, match=r"torn.db is damaged \(the next tune"):
        list_studies(url(torn))
    assert torn.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty.db", "torn.db"]
    assert empty.stat().st_size == 0


# --- places --------------------------------------------------------------------------------------

WRONG = {
    "studies.db": (UsageError, "malformed storage 'studies.db'"),
    "": (UsageError, "malformed storage ''"),
    "sqlite:///": (UsageError, "names no file"),
    "sqlite://": (UsageError, "names no file"),
    "sqlite:///:memory:": (UsageError, "names no file"),
    "sqlite://host/studies.db": (UsageError, "names no file"),
    "sqlite:///studies.db?mode=ro": (UsageError, "names no file"),
    "sqlit:///studies.db": (UsageError, "unknown storage 'sqlit': did you mean sqlite"),
    "mysql://host/studies": (UsageError, "unknown storage 'mysql'"),
    "postgresql+psycopg://host": (UsageError, "names no database"),
    "postgresql+nothing://host/studies": (ToolkitError, "no driver for postgresql"),
    "sqlite:///no/such/folder/studies.db": (DatabaseError, "No such file or directory"),
    "sqlite:///folder": (UsageError, "is a folder"),
    "sqlite:///folder/file/studies.db": (DatabaseError, "Not a directory"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_place_is_one_line_and_nothing_is_written(wrong, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    kind, message = WRONG[wrong]
    with pytest.raises(kind, match=message) as caught:
        Study.open(wrong, make_key())
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_password_is_not_repeated(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    with pytest.raises(ToolkitError) as caught:
        Study.open("postgresql+psycopg://user:secret@host/studies", make_key())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["{braces}.db", "100%.db", "a b.db", "üñ.db", "q?x=1.db"])
def test_odd_file_names(name, tmp_path):
    place = url(tmp_path / name.replace("?", "%3F")) if "?" in name else url(tmp_path / name)
    with Study.open(place, make_key()) as study:
        study.add(make_trial(), DIGESTS)
    with Study.open(place, make_key()) as study:
        assert len(study.trials()) == 1


def test_the_default_is_in_the_users_data(home):
    assert default_path() == home / "studies.db"
    with Study.open(None, make_key()) as study:
        study.add(make_trial(), DIGESTS)
    (info,), _ = list_studies(None)
    assert len(info.trials) == 1
    assert (home / "studies.db").is_file()


def test_a_relative_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill("here.db", [make_trial()])
    assert len(stored(tmp_path / "here.db")) == 1


# --- speed ---------------------------------------------------------------------------------------


def test_who_stores_nothing_loads_no_database():
    code = "import sys, tunegen.session; sys.exit('sqlalchemy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0
    )


def test_ten_thousand_trials_open_at_once(path):
    fill(path, [make_trial(us=1.0)])
    connection = sqlite3.connect(path)
    for table in ("trials", "trial_params", "trial_values", "trial_user_attributes"):
        names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        kept = [name for name in names if name == "trial_id" or name != names[0]]
        chosen = [f"n + {name}" if name in ("trial_id", "number") else name for name in kept]
        connection.execute(
            "WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many LIMIT 9999) "
            f"INSERT INTO {table} ({', '.join(kept)}) "
            f"SELECT {', '.join(chosen)} FROM {table}, many"
        )
    connection.commit()
    connection.close()
    started = time.process_time()
    found = stored(path)
    assert time.process_time() - started < 2.0
    assert len(found) == 10_000


def test_adding_is_fast(path):
    """Sixteen parameters, as many as a matmul has. A trial itself takes a second."""
    space = Space(parameters([(f"P{i}", range(6), "") for i in range(16)]))
    config = Config(dict.fromkeys(space.names, 5))
    with Study.open(url(path), make_key(spaces={**SPACES, "wide": space})) as study:
        seconds = []
        for _ in range(20):
            started = time.process_time()
            study.add(replace(make_trial(), config=config), DIGESTS)
            seconds.append(time.process_time() - started)
    assert np.median(seconds) < 0.05

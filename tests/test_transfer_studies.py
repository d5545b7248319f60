# SPDX-License-Identifier: Apache-2.0
"""Studies from one storage to another, through a file."""

import gzip
import json
import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_writer import DEVICE, make_key, make_trial, url
from test_store import DIGESTS, fill, stored, trials

from tunegen.cli.main import run
from tunegen.errors import DatabaseError, UsageError
from tunegen.session import export_studies, import_studies
from tunegen.store import Study, list_studies

TRIALS = [make_trial(0, 12.0, a=4), make_trial(1, 8.0, a=8), make_trial(2, reason="it hangs")]


@pytest.fixture
def tunegen(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def studies(path):
    """Everything that is listed of a storage, but the order of its studies."""
    found, warnings = list_studies(url(path))
    assert warnings == ()
    return {info.name: info for info in found}


def contents(path):
    """How often each trial is in each study of a storage, whatever its number."""
    return {
        name: Counter(repr(replace(s, trial=replace(s.trial, number=0))) for s in info.trials)
        for name, info in studies(path).items()
    }


# --- there and back ------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    st.lists(trials(), max_size=4),
    st.lists(trials(), max_size=3),
    st.sampled_from(["f.json", "f.json.gz"]),
)
def test_everything_arrives_as_it_was(tmp_path_factory, first, second, name):
    folder = tmp_path_factory.mktemp("carried")
    fill(folder / "a.db", first)
    fill(folder / "a.db", second, policy="sustained")
    export_studies(folder / name, storage=url(folder / "a.db"))
    import_studies(folder / name, storage=url(folder / "b.db"))
    assert studies(folder / "b.db") == studies(folder / "a.db")
    export_studies(folder / f"again-{name}", storage=url(folder / "b.db"))
    assert (folder / f"again-{name}").read_bytes() == (folder / name).read_bytes()


@settings(max_examples=15)
@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_a_merge_loses_and_doubles_nothing(tmp_path_factory, here, there):
    """Each trial is afterwards there as often as where it was most often; twice is as once."""
    folder = tmp_path_factory.mktemp("merged")
    known = [make_trial(n, reason=f"reason {n}", seconds=n / 4) for n in range(6)]
    fill(folder / "a.db", [known[n] for n in here])
    fill(folder / "b.db", [known[n] for n in there])
    for path in (folder / "a.db", folder / "b.db"):
        at_once(path)
    before = [contents(folder / file) for file in ("a.db", "b.db")]
    export_studies(folder / "a.json", storage=url(folder / "a.db"))
    (name,) = before[0]
    for lacking in (before[0][name] - before[1][name], Counter()):
        (received,) = import_studies(folder / "a.json", storage=url(folder / "b.db"))
        assert (received.added, received.known) == (
            lacking.total(), len(here) - lacking.total())  # fmt: skip
        assert contents(folder / "b.db") == {name: before[0][name] | before[1][name]}


def at_once(path):
    """Let all trials of a storage have finished in the same second."""
    from tunegen.store.form import _checksum

    connection = sqlite3.connect(path)
    query = "SELECT rowid, value_json FROM trial_user_attributes"
    for row, text in connection.execute(query).fetchall():
        content = {**json.loads(text), "finished": "2026-01-01T00:00:00+00:00"}
        del content["checksum"]
        content["checksum"] = _checksum(content)
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE rowid = ?",
            (json.dumps(content), row),
        )
    connection.commit()
    connection.close()


def test_a_tune_goes_on_from_what_was_imported(tmp_path):
    fill(tmp_path / "a.db", TRIALS)
    export_studies(tmp_path / "f.json", storage=url(tmp_path / "a.db"))
    import_studies(tmp_path / "f.json", storage=url(tmp_path / "b.db"))
    assert stored(tmp_path / "b.db") == stored(tmp_path / "a.db") == tuple(TRIALS)
    fill(tmp_path / "b.db", [make_trial(3, 7.0, a=2)])  # with the same choices
    assert len(stored(tmp_path / "b.db")) == 4


def test_generations_stay_what_they_are(tmp_path):
    """The newest is in use, wherever it is from."""
    for us in (3.0, 2.0):
        with Study.open(url(tmp_path / "a.db"), make_key(), fresh=True) as study:
            study.add(make_trial(us=us), DIGESTS)
    fill(tmp_path / "b.db", [make_trial(us=9.0)])
    export_studies(tmp_path / "a.json", storage=url(tmp_path / "a.db"))
    export_studies(tmp_path / "b.json", storage=url(tmp_path / "b.db"))
    received = import_studies(tmp_path / "a.json", storage=url(tmp_path / "b.db"))
    assert [(r.added, r.current) for r in received] == [(1, False), (1, True)]
    assert [t.outcome.median_us for t in stored(tmp_path / "b.db")] == [2.0]
    (received,) = import_studies(tmp_path / "b.json", storage=url(tmp_path / "a.db"))
    assert (received.added, received.current) == (1, False)
    assert contents(tmp_path / "a.db") == contents(tmp_path / "b.db")


def test_a_damaged_trial_stays_behind(tmp_path):
    fill(tmp_path / "a.db", TRIALS)
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute(
        "UPDATE trial_user_attributes SET value_json = replace(value_json, 'hangs', 'hongs')"
    )
    connection.commit()
    connection.close()
    (carried,), _ = export_studies(tmp_path / "f.json", storage=url(tmp_path / "a.db"))
    assert (len(carried.trials), carried.unreadable) == (2, 1)
    import_studies(tmp_path / "f.json", storage=url(tmp_path / "b.db"))
    assert stored(tmp_path / "b.db") == tuple(TRIALS[:2])


def test_the_same_choices_or_none(tmp_path):
    """A file that was changed by hand says nothing of the space in its digest."""
    fill(tmp_path / "a.db", TRIALS)
    export_studies(tmp_path / "f.json", storage=url(tmp_path / "a.db"))
    document = json.loads((tmp_path / "f.json").read_text())
    document["studies"][0]["choices"]["wide.A"].append(3)
    (tmp_path / "f.json").write_text(json.dumps(document))
    with pytest.raises(DatabaseError, match=r"other values of wide\.A in the storage"):
        import_studies(tmp_path / "f.json", storage=url(tmp_path / "a.db"))
    assert stored(tmp_path / "a.db") == tuple(TRIALS)


# --- the command ---------------------------------------------------------------------------------


def test_by_command(tunegen, tmp_path):
    names = [fill(tmp_path / "a.db", TRIALS, policy=p) for p in ("burst", "sustained")]
    from_a, to_b = ("--storage", url(tmp_path / "a.db")), ("--storage", url(tmp_path / "b.db"))
    assert tunegen("study", "export", "f.json.gz", *from_a)[:2] == (
        0, "2 studies and 6 trials in f.json.gz\n")  # fmt: skip
    document = json.loads(gzip.decompress(Path("f.json.gz").read_bytes()))
    assert [study["name"] for study in document["studies"]] == names
    assert tunegen("study", "import", "f.json.gz", names[1], *to_b)[:2] == (
        0, f"{names[1]}: 3 trials added, 0 known\n")  # fmt: skip
    code, out, _ = tunegen("study", "import", "f.json.gz", *to_b, "--json")
    assert (code, [(r["added"], r["known"]) for r in json.loads(out)]) == (0, [(3, 0), (0, 3)])
    _, out, _ = tunegen("study", "export", "one.json", names[0], *from_a, "--json")
    assert json.loads(out) == [{"name": names[0], "trials": 3, "unreadable": 0}]


def spoil(change):
    """A file of one study in which ``change`` was made to the document."""

    def make(path, whole):
        document = json.loads(whole)
        path.write_text(json.dumps(change(document) or document))

    return make


def set_in(*keys, to):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return spoil(change)


H100 = {"name": "NVIDIA H100", **{k: getattr(DEVICE, k) for k in DEVICE.__slots__ if k != "name"}}
STUDY = ("studies", 0)

BAD_FILES = {
    "absent": (lambda path, whole: None, "cannot be read: No such file"),
    "a folder": (lambda path, whole: path.mkdir(), "cannot be read: Is a directory"),
    "empty": (lambda path, whole: path.touch(), "cannot be read as JSON"),
    "text": (lambda path, whole: path.write_text("studies\n"), "cannot be read as JSON"),
    "torn": (lambda path, whole: path.write_bytes(whole[:-40]), "cannot be read as JSON"),
    "a list": (lambda path, whole: path.write_text("[]"), "holds no studies"),
    "something else": (lambda path, whole: path.write_text('{"records": []}'), "holds no studies"),
    "a later form": (set_in("form", to=2), "is of form 2, this release reads form 1"),
    "no studies": (spoil(lambda d: d.pop("studies") and None), "'studies' is missing"),
    "no facts": (spoil(lambda d: d["studies"][0].pop("facts") and None), "'facts' is missing"),
    "twice": (spoil(lambda d: d["studies"].append(d["studies"][0])), "twice"),
    "another device": (set_in(*STUDY, "facts", "device", to=H100), "those of another study"),
    "another problem": (set_in(*STUDY, "facts", "problem", to="7"), "those of another study"),
    "another space": (set_in(*STUDY, "facts", "space", to="0" * 64), "those of another study"),
    "another name": (set_in(*STUDY, "name", to="nothing"), "those of another study"),
    "a generation": (set_in(*STUDY, "facts", "generation", to="1"), "is of generation '1'"),
    "a spoilt trial": (set_in(*STUDY, "trials", 1, "reason", to="so"), "trial 1 of nothing-1024"),
    "no trial": (set_in(*STUDY, "trials", 1, to=None), "trial 1 of nothing-1024"),
    "no choice": (set_in(*STUDY, "choices", "wide.A", to=[1, 2]), "wide.A=4, which is no choice"),
    "odd choices": (set_in(*STUDY, "choices", "wide.A", to=[None]), "are no choices"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_nothing_is_written(name, tunegen, tmp_path):
    make, message = BAD_FILES[name]
    fill(tmp_path / "a.db", TRIALS)
    export_studies("whole.json", storage=url(tmp_path / "a.db"))
    make(tmp_path / "f.json", Path("whole.json").read_bytes())
    before = sorted(tmp_path.iterdir())
    code, out, err = tunegen("study", "import", "f.json", "--storage", url(tmp_path / "b.db"))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1, err
    assert sorted(tmp_path.iterdir()) == before


def test_any_damage_is_found_or_does_no_harm(tmp_path):
    """A byte changed anywhere: the file is refused, or nothing that counts was hit."""
    fill(tmp_path / "a.db", TRIALS)
    export_studies(tmp_path / "f.json", storage=url(tmp_path / "a.db"))
    whole = (tmp_path / "f.json").read_bytes()
    rng, refused = random.Random(0), 0
    for number in range(60):
        place = rng.randrange(len(whole))
        spoilt = whole[:place] + bytes([rng.randrange(32, 127)]) + whole[place + 1 :]
        (tmp_path / "f.json").write_bytes(spoilt)
        target = tmp_path / f"{number}.db"
        try:
            import_studies(tmp_path / "f.json", storage=url(target))
        except UsageError:
            refused += 1
            assert not target.exists()
        else:
            assert stored(target) == tuple(TRIALS)
    assert refused > 30


BAD_WORDS = {
    "study export": (2, "FILE"),
    "study import": (2, "FILE"),
    "study export new.json": (2, "there are no studies to export"),
    "study export new.json nothing": (2, "unknown study 'nothing'"),
    "study export new.json nothing-2048 --storage sqlite:///a.db": (2, "unknown study"),
    "study export new.json nothing --storage sqlite:///a.db": (2, "2 studies begin with"),
    "study export no/such/new.json --storage sqlite:///a.db": (1, "cannot be written"),
    "study export new.json --storage sqlite:///absent.db": (1, "there is no study file"),
    "study export a.db --storage sqlite:///a.db": (2, "a.db is a database, and stays as it is"),
    "study export new.json --storage mysql://h/x": (2, "unknown storage 'mysql'"),
    "study import f.json nothing-2048": (2, "unknown study 'nothing-2048'"),
    "study import f.json nothing-1024-fp32-nvidia-h100": (2, "it has nothing-1024-fp32-nvidia-h2"),
    "study import f.json --storage mysql://h/x": (2, "unknown storage 'mysql'"),
    "study import f.json --storage sqlite:///no/such/b.db": (1, "No such file or directory"),
    "study import f.json --storage sqlite:///f.json": (2, "is no study file"),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD_WORDS)
def test_bad_words_are_one_line_and_nothing_is_written(words, tunegen, tmp_path):
    for policy in ("burst", "sustained"):
        fill(tmp_path / "a.db", TRIALS, policy=policy)
    export_studies("f.json", storage=url(tmp_path / "a.db"))
    before = sorted(tmp_path.rglob("*"))
    content = (tmp_path / "a.db").read_bytes()
    code, message = BAD_WORDS[words]
    got, out, err = tunegen(*words.split())
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "a.db").read_bytes() == content


def test_an_export_replaces_a_file_all_at_once(tunegen, tmp_path, monkeypatch):
    fill(tmp_path / "a.db", TRIALS)
    storage = url(tmp_path / "a.db")
    export_studies("f.json", storage=storage)
    old = Path("f.json").read_bytes()
    fill(tmp_path / "a.db", TRIALS)

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        code, _, err = tunegen("study", "export", "f.json", "--storage", storage)
    assert (code, err) == (1, "tunegen: f.json cannot be written: No space left on device\n")
    assert Path("f.json").read_bytes() == old
    assert not [p for p in Path.cwd().iterdir() if p.name.startswith(".f")]
    assert tunegen("study", "export", "f.json", "--storage", storage)[0] == 0
    assert len(Path("f.json").read_bytes()) > len(old)

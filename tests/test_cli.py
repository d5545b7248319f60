# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: results on stdout, one-line errors, exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from tunegen import cli, kernels
from tunegen.cli import common
from tunegen.cli.main import run
from tunegen.model import ARCHS
from tunegen.tuner import DEFAULT_TRIALS, PREDICTED_TRIALS


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """No test reads or writes the user's database; compiled kernels are shared."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # predictions, whatever is here


@pytest.fixture
def tunegen(capsys):
    """Run a command line; gives exit code, stdout and stderr."""

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# --- bad input -----------------------------------------------------------------------------------

BAD = {
    "tune matmull --arch sm_90": (2, "did you mean matmul"),
    "tune matmul --arch sm_91": (2, "did you mean sm_90"),
    "tune matmul --arch sm_90a": (2, "ask for sm_90"),
    "tune matmul --arch ninety": (2, "unknown arch"),
    "tune matmul --arch sm_90 --dtype fp23": (2, "did you mean fp32"),
    "tune matmul --arch sm_90 --layout nx": (2, "did you mean"),
    "tune axpy --arch sm_90 --layout nn": (2, "has no layout"),
    "tune matmul --arch sm_90 --spec simd": (2, "did you mean simt"),
    "tune matmul --arch sm_90 --chip H3000": (2, "unknown"),
    "tune matmul --arch sm_80 --chip 'NVIDIA H200'": (2, "is sm_90"),
    "tune matmul --arch sm_90 --problem 1x2": (2, "MxNxK"),
    "tune matmul --arch sm_90 --problem 1x2xk": (2, "malformed problem"),
    "tune matmul --arch sm_90 --problem 4x-4x4": (2, "malformed problem"),
    "tune axpy --arch sm_90 --problem 2^99": (2, "2^62"),
    "tune axpy --arch sm_90 --problem ''": (2, "malformed problem"),
    "tune matmul --arch sm_90 --attribute lda=1": (2, "less than a row"),
    "tune matmul --arch sm_90 --attribute ldx=1": (2, "known: lda, ldb"),
    "tune matmul --arch sm_90 --attribute dtype=1": (2, "option of its own"),
    f"tune matmul --arch sm_90 --attribute lda={2**62}": (2, "2^62 or more"),
    f"tune matmul --arch sm_90 --attribute lda={2**61}": (2, "addresses end at 2^63"),
    f"tune matmul --arch sm_90 --attribute lda={'9' * 4000}": (2, "[...]"),
    "tune matmul --arch sm_90 --attribute lda": (2, "NAME=VALUE"),
    "tune matmul --arch sm_90 --trials 0": (2, "trials=0"),
    "tune matmul --arch sm_90 --trials -1": (2, "trials=-1"),
    "tune matmul --arch sm_90 --trials nan": (2, "nan"),
    "tune matmul --arch sm_90 --seconds 0": (2, "seconds=0"),
    "tune matmul --arch sm_90 --seconds -2": (2, "seconds=-2"),
    "tune matmul --arch sm_90 --seconds nan": (2, "seconds=nan"),
    "tune matmul --arch sm_90 --least-gain 0": (2, "least_gain=0"),
    "tune matmul --arch sm_90 --least-gain nan": (2, "least_gain=nan"),
    "tune matmul --arch sm_90 --sampler tpo": (2, "did you mean tpe"),
    "tune matmul --arch sm_90 --sampler brute": (2, "did you mean bruteforce"),
    "tune matmul --arch sm_90 --evaluator gpi": (2, "did you mean gpu"),
    "tune matmul --arch sm_90 --policy brust": (2, "did you mean burst"),
    "tune matmul --arch sm_90 --finals-seconds 0": (2, "finals_seconds=0"),
    "tune matmul --arch sm_90 --finals-seconds nan": (2, "finals_seconds=nan"),
    "tune matmul --arch sm_90 --device first": (2, "first"),
    "tune matmul --arch sm_90 --evaluator model --device 0": (2, "--device 0 means nothing"),
    "tune matmul --arch sm_90 --evaluator gpi --device all": (2, "did you mean gpu"),
    "tune matmul --arch sm_90 --storage studies.db": (2, "malformed storage 'studies.db'"),
    "tune matmul --arch sm_90 --evaluator model --storage redis://h/x": (2, "unknown storage"),
    "tune matmul --arch sm_90 --evaluator gpu --storage sqlite://": (2, "names no file"),
    "tune matmul --arch sm_90 --seed -1": (2, "seed -1"),
    "tune matmul --arch sm_90 --no-such-option": (2, "--no-such-option"),
    "tune": (2, "OPERATION"),
    "tuna": (2, "tuna"),
    "inspect matmul --arch sm_90 --emit pxt": (2, "did you mean ptx"),
    "inspect matmul --arch sm_90 --param BLOCK=1": (2, "did you mean BLOCK"),
    "inspect matmul --arch sm_90 --param BLOCK_M=3": (2, "its values are"),
    "inspect matmul --arch sm_90 --param BLOCK_M=x": (2, "whole number"),
    "inspect matmul --arch sm_80 --spec simt --param BLOCK_M=8 --param WARP_M=128": (
        1,
        "divides BLOCK_M",
    ),
    "export matmul --arch sm_90": (2, "--out"),
    "export matmul --out x": (2, "--arch"),
    "export matmull --arch sm_90 --out x": (2, "did you mean matmul"),
    "export matmul --arch sm_9 --out x": (2, "did you mean sm_90"),
    "export matmul --arch sm_90 --out ''": (2, "--out"),
    "tune fill --arch sm_90 --db ''": (2, "--db"),
    f"tune fill --arch sm_90 --trials 1 --db {'x' * 300}": (1, "File name too long"),
    "db show matmull --arch sm_90": (2, "did you mean matmul"),
    "db list --arch sm_9": (2, "unknown arch"),
    "db merge no_such_folder": (2, "no database folder"),
    "kernels matmull": (2, "did you mean matmul"),
    "kernels --arch sm_90": (2, "name it first"),
    "--kernel no_such_file.py kernels": (2, "no kernel file"),
    f"--kernel {'x' * 300} kernels": (2, "no kernel file"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_that_names_the_way_on(words, tunegen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = tunegen(*shlex.split(words))
    expected, text = BAD[words]
    assert (code, out) == (expected, "")
    assert err.startswith("tunegen: ")
    assert err.count("\n") == 1, err
    assert text in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--storage", "--study"])
def test_predictions_are_kept_in_no_study(option, tunegen, tmp_path):
    value = {"--storage": f"sqlite:///{tmp_path}/s.db", "--study": "any"}[option]
    words = (
        "tune",
        "fill",
        "--arch",
        "sm_90",
        "--problem",
        "2^16",
        "--trials",
        "1",
        option,
        value,
    )
    code, _, err = tunegen(*words, "--evaluator", "model", "--db", tmp_path / "db")
    assert code == 0
    assert "predictions are kept in no study: --storage and --study mean nothing here" in err
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


def test_a_gpu_asked_for_and_not_there_says_what_was_found(tunegen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = tunegen("tune", "axpy", "--arch", "sm_90", "--evaluator", "gpu")
    assert (code, out) == (1, "")
    assert re.search("no NVIDIA driver|hide|no GPU", err)


def test_no_valid_configuration_says_which_constraint_removed_how_many(tunegen):
    code, _, err = tunegen(
        "tune", "matmul", "--arch", "sm_90", "--spec", "simt", "--problem", "2^33x1x1"
    )
    assert code == 1
    assert "M=8589934592" in err
    assert "nothing can run matmul" in err
    assert not re.search(r"[\[\]']", err), "a sentence, not a list"


@pytest.mark.parametrize(
    ("text", "word"), [("SPEC = 1", "no SPEC"), ("def", "does not load"), ("import no_x", "no_x")]
)
def test_a_kernel_file_that_defines_nothing(text, word, tunegen, tmp_path):
    (tmp_path / "k.py").write_text(text)
    code, out, err = tunegen("--kernel", tmp_path / "k.py", "kernels")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert word in err
    assert "k.py" in err


def program(*words, **more):
    """Run the program itself, with other streams than a test's."""
    return subprocess.run(
        [sys.executable, "-m", "tunegen", *words], text=True, check=False, timeout=60, **more
    )


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m tunegen kernels | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("kernels",),
        pytest.param(("kernels", "--json"), marks=pytest.mark.thorough),
        ("--version",),
    ],
)
def test_closed_streams_are_no_error(words):
    """A daemon may have none of the three."""
    for stream in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        command = f"{sys.executable} -m tunegen {' '.join(words)} {stream}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), stream


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", [("kernels",), ("kernels", "fill", "--json"), ("--help",)])
def test_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = program(*words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "tunegen: the output cannot be written: No space left on device\n"


def test_no_arguments_show_the_help(tunegen):
    code, out, err = tunegen()
    assert code == 2
    assert "Usage: tunegen" in out + err


# --- help ----------------------------------------------------------------------------------------


def commands():
    for name, command in cli.cli.commands.items():
        inner = getattr(command, "commands", {})
        yield from ([name, sub] for sub in inner)
        if not inner:
            yield [name]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_help(words, tunegen):
    code, out, _ = tunegen(*words, "--help")
    assert code == 0
    assert f"Usage: tunegen {' '.join(words)}" in out


@pytest.mark.parametrize(
    "name",
    [[], ["cache"], ["db"], ["study"], *commands()],
    ids=lambda words: " ".join(words) or "-",
)
def test_examples_in_the_help_are_of_it_and_name_real_options(name, tunegen):
    _, out, _ = tunegen(*name, "--help")
    examples = [line.strip() for line in out.splitlines() if line.strip().startswith("tunegen ")]
    assert examples
    assert all(example.startswith(" ".join(["tunegen", *name])) for example in examples)
    for example in examples:
        words = example.split()[1:]
        command = cli.cli
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for p in command.params for option in p.opts}
        assert {word for word in words if word.startswith("--")} <= known, example


# --- results -------------------------------------------------------------------------------------


def test_kernels_lists_every_spec(tunegen):
    code, out, _ = tunegen("kernels", "--json")
    listed = {(op["operation"], spec) for op in json.loads(out) for spec in op["specs"]}
    assert code == 0
    assert listed == {(spec.operation.name, spec.name) for spec in kernels.SPECS}


def test_constraint_counts_and_valid_configurations_make_up_the_space(tunegen):
    code, out, _ = tunegen(
        "kernels", "matmul", "--problem", "100x50x1000", "--dtype", "fp32", "--json"
    )
    assert code == 0
    taken = [spec for spec in json.loads(out) if not spec["refusal"]]
    assert {spec["spec"] for spec in taken} == {"simt", "naive"}
    for spec in taken:
        removed = sum(constraint["removed"] for constraint in spec["constraints"])
        assert removed + spec["valid"] == spec["configurations"] > 0
        assert set(spec["default"]) == {p["name"] for p in spec["parameters"]}


def test_kernels_for_people(tunegen):
    code, out, _ = tunegen("kernels", "matmul")
    assert code == 0
    assert "BLOCK_M" in out
    assert "WARP_M divides BLOCK_M" in out


@pytest.mark.nvrtc
class TestTune:
    def test_reports_a_prediction_as_one(self, tunegen, tmp_path):
        code, out, err = tunegen(
            "tune", "axpy", "--arch", "sm_90", "--problem", "2^20", "--trials", 5,
            "--db", tmp_path / "db", "--json",
        )  # fmt: skip
        assert code == 0
        assert "predicted" in err
        (result,) = json.loads(out)["results"]
        assert result["record"]["evidence"] == "predicted"
        assert result["trials"]["counts"] == {"predicted": 5}
        stored = json.loads((tmp_path / "db" / "sm_90" / "axpy.json").read_text())
        assert stored["records"] == [result["record"]]
        assert 0 < result["floor"]["us"] <= result["record"]["measurement"]["median_us"]

    def test_again_gives_the_same_winner(self, tunegen, tmp_path):
        seen = []
        for db in ("one", "two"):
            _, out, _ = tunegen(
                "tune", "copy", "--arch", "sm_80", "--trials", 8, "--seed", 3, "--json",
                "--db", tmp_path / db,
            )  # fmt: skip
            seen.append(json.loads(out)["results"][0]["record"]["config"])
        assert seen[0] == seen[1]

    def test_the_command_it_prints_reproduces_it(self, tunegen, tmp_path):
        import shlex

        _, first, _ = tunegen(
            "tune", "matmul", "--arch", "sm_80", "--problem", "64x64x100", "--layout", "tn",
            "--dtype", "fp64", "--attribute", "lda=72", "--spec", "naive", "--trials", 2, "--json",
        )  # fmt: skip
        command = json.loads(first)["results"][0]["command"]
        code, again, _ = tunegen(*shlex.split(command)[1:], "--json")
        assert code == 0
        records = [json.loads(text)["results"][0]["record"] for text in (first, again)]
        for record in records:
            del record["created"]
        assert records[0] == records[1]

    def test_the_command_it_prints_names_kernel_files(self, tunegen, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("one", "two"):
            (tmp_path / f"{name}.py").write_text(
                "import dataclasses\nfrom tunegen.kernels import vector_copy\n"
                f"SPEC = dataclasses.replace(vector_copy.SPEC, name={name!r})\n"
            )
        words = ("tune", "copy", "--arch", "sm_90", "--problem", 1000, "--trials", 5, "--json")
        _, out, _ = tunegen("--kernel", "one.py", "--kernel", "two.py", *words)
        command = json.loads(out)["results"][0]["command"]
        assert command.startswith("tunegen --kernel one.py --kernel two.py tune copy ")
        code, again, err = tunegen(*shlex.split(command)[1:], "--json")
        assert code == 0, err
        ours, theirs = (json.loads(text)["results"][0]["record"] for text in (out, again))
        assert (ours["spec"], ours["config"]) == (theirs["spec"], theirs["config"])

    def test_a_database_that_cannot_be_written_is_said_before_any_work(self, tunegen, tmp_path):
        (tmp_path / "file").touch()
        with mock.patch("tunegen.tuner.tune", side_effect=AssertionError("it was begun")):
            code, out, err = tunegen(
                "tune", "fill", "--arch", "sm_90", "--db", tmp_path / "file" / "db"
            )
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "cannot be written" in err
        assert "--db" in err

    def test_without_trials_the_model_makes_fewer_than_a_gpu(self, tunegen):
        _, out, _ = tunegen("tune", "copy", "--arch", "sm_90", "--problem", "2^20", "--json")
        (result,) = json.loads(out)["results"]
        assert result["trials"]["counts"] == {"predicted": PREDICTED_TRIALS}
        assert f"--trials {PREDICTED_TRIALS}" in result["command"]
        _, helped, _ = tunegen("tune", "--help")
        words = " ".join(helped.split())
        assert f"{DEFAULT_TRIALS} on a GPU, {PREDICTED_TRIALS} by the model" in words
        assert PREDICTED_TRIALS < DEFAULT_TRIALS

    def test_several_problems(self, tunegen):
        code, out, _ = tunegen(
            "tune", "fill", "--arch", "sm_75", "--problem", "1000", "--problem", "2^12",
            "--trials", 2, "--json",
        )  # fmt: skip
        assert code == 0
        assert [r["problem"] for r in json.loads(out)["results"]] == ["1000", "4096"]

    def test_for_people(self, tunegen):
        code, out, err = tunegen("tune", "fill", "--arch", "sm_90", "--trials", 2)
        assert code == 0
        for word in ("winner", "default", "floor", "record", "again", "tunegen tune fill"):
            assert word in out
        assert "\x1b" not in out + err

    def test_quiet_leaves_stderr_empty(self, tunegen):
        code, out, err = tunegen("-q", "tune", "fill", "--arch", "sm_90", "--trials", 1)
        assert (code, err) == (0, "")
        assert "predicted" in out


@pytest.mark.nvrtc
class TestInspect:
    @pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_121"])
    def test_source_is_what_is_compiled(self, arch, tunegen):
        code, out, _ = tunegen("inspect", "axpy", "--arch", arch, "--emit", "cuda")
        assert code == 0
        assert 'extern "C" __global__' in out
        assert f"tunegen inspect axpy --arch {arch}" in out

    def test_the_banner_command_prints_the_same_source(self, tunegen):
        _, out, _ = tunegen(
            "inspect", "matmul", "--arch", "sm_90", "--problem", "96x33x64", "--layout", "tt",
            "--param", "BLOCK_M=32", "--emit", "cuda",
        )  # fmt: skip
        command = re.search(r"Regenerate: tunegen (.*)", out)
        assert command, out[:1000]
        _, again, _ = tunegen(*command[1].split())
        assert again == out

    def test_ptx_stands_under_its_source(self, tunegen):
        code, out, _ = tunegen("inspect", "matmul", "--spec", "naive", "--arch", "sm_90")
        assert code == 0
        assert ".visible .entry tunegen_matmul_naive" in out
        lines = out.splitlines()
        above = next(i for i, line in enumerate(lines) if "sum += convert" in line)
        assert lines[above].startswith("//")
        assert any("fma.rn.f32" in line for line in lines[above : above + 12])

    @pytest.mark.nvdisasm
    def test_sass(self, tunegen):
        code, out, _ = tunegen("inspect", "add", "--arch", "sm_80", "--emit", "sass")
        assert code == 0
        assert "LDG.E" in out

    def test_resources_say_what_limits_occupancy(self, tunegen):
        code, out, _ = tunegen(
            "inspect", "matmul", "--arch", "sm_86", "--emit", "resources", "--json"
        )
        assert code == 0
        document = json.loads(out)
        (kernel,) = document["kernels"]
        assert kernel["resources"]["registers"] > 16
        assert kernel["occupancy"]["limiter"]
        assert document["prediction"]["bound"] in document["prediction"]["parts"]

    def test_every_arch(self, tunegen):
        for arch in ARCHS:
            code, _, err = tunegen("inspect", "copy", "--arch", arch, "--emit", "resources")
            assert code == 0, err

    def test_shows_the_recorded_winner(self, tunegen):
        arguments = ["--arch", "sm_90", "--problem", "2^21"]
        _, out, _ = tunegen("tune", "add", *arguments, "--trials", 12, "--json")
        winner = json.loads(out)["results"][0]["record"]["config"]
        _, out, err = tunegen("inspect", "add", *arguments, "--json")
        assert json.loads(out)["config"] == winner
        assert "the very cubin of the record" in err


@pytest.mark.nvrtc
class TestExport:
    def test_twice_the_same_bytes_and_checksums_that_hold(self, tunegen, tmp_path):
        for name in ("one", "two"):
            code, _, err = tunegen(
                "export", "matmul", "axpy", "--arch", "sm_80", "--arch", "sm_90",
                "--out", tmp_path / name,
            )  # fmt: skip
            assert code == 0, err
        files = {
            folder: {
                str(path.relative_to(tmp_path / folder)): path.read_bytes()
                for path in (tmp_path / folder).rglob("*")
                if path.is_file()
            }
            for folder in ("one", "two")
        }
        assert files["one"] == files["two"]
        check = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
        assert subprocess.run(check, cwd=tmp_path / "one", capture_output=True).returncode == 0

    def test_a_record_is_verified_and_a_default_says_so(self, tunegen, tmp_path):
        tunegen("tune", "fill", "--arch", "sm_90", "--problem", "2^24", "--trials", 12)
        code, out, _ = tunegen(
            "export", "fill", "--arch", "sm_80", "--arch", "sm_90", "--out", tmp_path / "out",
            "--json",
        )  # fmt: skip
        assert code == 0
        found = {
            image["target"]: (image["provenance"], image["status"])
            for entry in json.loads(out)["entries"]
            for image in entry["images"]
        }
        assert found == {
            "sm_80": ("default, unmeasured", "built"),
            "sm_90": ("predicted", "verified"),
        }

    def test_a_folder_that_is_not_a_bundle_stays_as_it_is(self, tunegen, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        code, _, err = tunegen("export", "fill", "--arch", "sm_90", "--out", tmp_path / "mine")
        assert code == 1
        assert "not a bundle" in err
        assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


@pytest.mark.nvrtc
class TestDatabase:
    @pytest.fixture
    def record(self, tunegen, tmp_path):
        tunegen("tune", "fill", "--arch", "sm_90", "--problem", "4096", "--trials", 2)
        return tmp_path / "data" / "tunegen" / "tuned_db" / "sm_90" / "fill.json"

    def test_list_show_where(self, record, tunegen):
        _, out, _ = tunegen("db", "list", "--json")
        (listed,) = json.loads(out)
        assert (listed["layer"], listed["operation"]) == ("user", "fill")
        _, out, _ = tunegen("db", "show", "fill", "--arch", "sm_90", "--problem", "4096", "--json")
        assert json.loads(out)["rung"] == "exact"
        _, out, _ = tunegen("db", "where")
        assert str(record) in out

    def test_check_is_clean_and_finds_what_is_not(self, record, tunegen):
        assert tunegen("db", "check")[0] == 0
        content = json.loads(record.read_text())
        content["records"][0]["images"][0]["source_digest"] = "0" * 64
        record.write_text(json.dumps(content))
        code, out, _ = tunegen("db", "check")
        assert code == 3
        assert "stale" in out
        content["records"][0]["config"]["THREADS"] = 7
        record.write_text(json.dumps(content))
        code, out, _ = tunegen("db", "check", "--json")
        assert code == 3
        assert "illegal" in {finding["kind"] for finding in json.loads(out)}
        record.write_text(record.read_text()[:-20])
        code, out, _ = tunegen("db", "check")
        assert code == 3
        assert "malformed" in out

    def test_merge(self, record, tunegen, tmp_path):
        folder = record.parent.parent
        code, out, _ = tunegen("db", "merge", folder, "--db", tmp_path / "other", "--json")
        assert code == 0
        assert json.loads(out)["added"] == 1
        other = tmp_path / "other" / "sm_90" / "fill.json"
        assert other.read_bytes() == record.read_bytes()

    def test_a_damaged_database_is_one_line(self, record, tunegen):
        record.write_text("{")
        code, _, err = tunegen("tune", "fill", "--arch", "sm_90", "--trials", 1)
        assert code == 1
        assert str(record) in err
        assert err.count("tunegen: ") == 1


@pytest.mark.nvrtc
def test_cache_show_and_clear(tunegen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tunegen("inspect", "fill", "--arch", "sm_90", "--emit", "resources")
    _, out, _ = tunegen("cache", "show", "--json")
    before = json.loads(out)
    assert before["kernels"] == 1
    assert before["folder"].startswith(str(tmp_path))
    tunegen("cache", "clear")
    _, out, _ = tunegen("cache", "show", "--json")
    assert json.loads(out)["kernels"] == 0


@pytest.mark.nvrtc
def test_doctor(tunegen):
    code, out, _ = tunegen("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)}
    assert "cuda-bindings" in checks
    assert code == int(any(c["status"] in ("missing", "conflict") for c in checks.values()))


def test_doctor_remarks_on_what_is_not_well(tunegen):
    _, out, _ = tunegen("doctor", "--json")
    checks = json.loads(out)
    _, out, _ = tunegen("doctor")
    for check in checks:
        if check["detail"]:
            remark = f"{check['name']}: {check['detail']}" in out.splitlines()
            assert remark == (check["status"] != "ok"), check


@pytest.mark.parametrize("width", [30, 80, 200])
def test_tables_lose_nothing_on_a_narrow_terminal(width, capsys, monkeypatch):
    """Every word is there, in one piece if it is no path; numbers stand to the right."""
    cells = ["kernel_with_a_name", "12.5 us", "a sentence of several words", "/a/long/path" * 5]
    rows = common.table("", "what", ">time", "why", "where")
    rows.add_row(*cells)
    rows.add_row("x", "3 us", "", "")
    real = common.console
    monkeypatch.setattr(common, "console", lambda: setattr(c := real(), "width", width) or c)
    common.print_table(rows)
    out = capsys.readouterr().out
    for word in ["what", "time", "why", "where", *cells[0].split(), cells[1], *cells[2].split()]:
        assert word in out
    assert sum(line.count(part) for line in out.splitlines() for part in "/") == 15
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert re.search(r"\bx {20,}3 us$", out, re.MULTILINE)


def test_counts_agree_with_their_noun():
    assert [common.counted(n, "record") for n in (0, 1, 2000)] == [
        "0 records", "1 record", "2,000 records",
    ]  # fmt: skip


@pytest.mark.nvrtc
def test_records_that_differ_in_attributes_look_different(tunegen):
    for extra in ((), ("--attribute", "lda=72", "--attribute", "beta=1")):
        tunegen(
            "tune", "matmul", "--arch", "sm_90", "--problem", "64x64x64", "--dtype", "fp32",
            "--trials", 1, *extra,
        )  # fmt: skip
    _, out, err = tunegen("db", "list")
    assert err == "2 records\n"
    assert "64x64x64 fp32 nn beta=1 lda=72" in out


@pytest.mark.nvrtc
def test_a_kernel_file_of_ones_own(tunegen, request):
    path = request.path.parent / "data" / "added_kernel" / "scale.py"
    code, out, err = tunegen(
        "--kernel", path, "tune", "scale", "--arch", "sm_90", "--trials", 3, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["results"][0]["operation"] == "scale"
    _, out, _ = tunegen("--kernel", path, "inspect", "scale", "--arch", "sm_90", "--emit", "cuda")
    (again,) = re.findall(r"^// Regenerate: tunegen (.*)$", out, re.MULTILINE)
    words = shlex.split(again)
    assert words[:3] == ["--kernel", "scale.py", "inspect"]
    _, regenerated, err = tunegen("--kernel", path, *words[2:])
    assert regenerated == out, err


@pytest.mark.nvrtc
def test_interrupted_keeps_the_best_so_far(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tunegen", "tune", "matmul", "--arch", "sm_90",
         "--problem", "256x256x256", "--trials", "100000", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not len(list(tmp_path.rglob("*.kernel"))) > 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (result,) = json.loads(out)["results"]
    assert result["trials"]["stop_reason"] == "interrupted"
    assert list(tmp_path.rglob("matmul.json"))

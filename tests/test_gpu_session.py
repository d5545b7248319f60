# SPDX-License-Identifier: Apache-2.0
"""``tunegen tune --evaluator gpu`` from the command line to the database, with workers that play a
GPU by a script; and which GPU is taken, or refused."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import scripted
from scripted import DEVICE, FAULTY, TESTS

from tunegen import compiler, kernels, session
from tunegen.cli.main import run
from tunegen.database import Database
from tunegen.errors import DeviceError, NoValidConfig, UsageError
from tunegen.model import FoundGpus, GpuInfo, Problem
from tunegen.model.checks import INTEGER_RANGE
from tunegen.runner.timing import LEAST_INTERVAL_US
from tunegen.session import gpu
from tunegen.session.gpu import choose_gpu
from tunegen.session.records import find_exact
from tunegen.session.setups import ProblemSetup, draw, rotation, widened
from tunegen.session.tuning import _more
from tunegen.tuner import DEFAULT_TRIALS, Budget

H200 = GpuInfo(0, "NVIDIA H200", "GPU-1", "sm_90", 150 << 30, 149 << 30)
A10 = GpuInfo(1, "NVIDIA A10", "GPU-2", "sm_86", 24 << 30, 23 << 30)


def found(*devices, driver="580.65.06"):
    return FoundGpus(devices, "" if devices else "no NVIDIA driver", driver=driver)


# --- which GPU -----------------------------------------------------------------------------------


def test_the_model_stands_in_where_there_is_no_such_gpu():
    assert choose_gpu("model", found=found(H200)) is None
    assert choose_gpu("auto", found=found()) is None
    assert choose_gpu("auto", arch="sm_80", found=found(H200)) is None
    assert choose_gpu("auto", chip="NVIDIA H100", found=found(H200)) is None


def test_the_first_gpu_or_the_one_asked_for():
    assert choose_gpu("auto", found=found(H200, A10)) is H200
    assert choose_gpu("gpu", arch="sm_90", chip="NVIDIA H200", found=found(H200)) is H200
    assert choose_gpu("auto", index=1, found=found(H200, A10)) is A10
    assert choose_gpu("auto", index=1, found=found(A10)) is A10, "as nvidia-smi counts"


BUSY = dataclasses.replace(H200, other_processes=2)
SPLIT = dataclasses.replace(H200, mig=True, slices=("MIG-1",))

REFUSED = {
    "none": ({}, found(), "no NVIDIA driver"),
    "another index": ({"index": 3}, found(H200, A10), "no GPU 3, there is 0 (NVIDIA H200), 1"),
    "another arch": ({"arch": "sm_80"}, found(H200), "sm_80 was asked for, GPU 0"),
    "another chip": ({"chip": "NVIDIA H100"}, found(H200), "H100 was asked for, GPU 0 is NVIDIA"),
    "an old driver": ({}, found(H200, driver="550.54.14"), "driver 550.54.14 does not load"),
    "others": ({}, found(BUSY), "2 other processes compute on GPU 0"),
    "slices": ({}, found(SPLIT), "is split (MIG)"),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", REFUSED)
def test_a_gpu_that_cannot_be_used_is_refused_with_both_sides(name):
    options, gpus, text = REFUSED[name]
    with pytest.raises(DeviceError) as caught:
        choose_gpu("gpu", found=gpus, **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.nvrtc
def test_company_is_welcome_where_it_is_said_so():
    assert choose_gpu("gpu", shared=True, found=found(BUSY)) is BUSY
    assert choose_gpu("gpu", shared=True, found=found(SPLIT)) is SPLIT
    assert gpu.environment(SPLIT)["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert gpu.environment(H200)["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_the_model_has_no_device():
    with pytest.raises(UsageError, match="--device 1 means nothing"):
        choose_gpu("model", index=1)


def test_the_driver_knows_the_limits_and_the_table_the_rates():
    from tunegen.runner.protocol import Opened

    told = dataclasses.replace(
        DEVICE, l2_gbps=0.0, tensor16_per_clock=0, tensor64_per_clock=0, source="the driver"
    )
    known = gpu.device_class(Opened(told, "580.65.06", 0, 1))
    assert known == dataclasses.replace(DEVICE, source="the driver")
    unknown = dataclasses.replace(told, name="NVIDIA Z1000")
    assert gpu.device_class(Opened(unknown, "580.65.06", 0, 1)) == unknown


# --- setups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["normal", "integers"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_inputs_drawn_on_the_cpu_are_of_their_type(dtype, inputs):
    array = kernels.operation("copy").arrays(Problem("copy", (("N", 5000),), dtype))[0]
    drawn = draw(array, inputs, np.random.default_rng(0))
    assert drawn.itemsize == array.bytes // 5000
    values = widened(drawn)
    assert values.std() == pytest.approx(1.0 if inputs == "normal" else 2**0.5, rel=0.05)
    if inputs == "integers":
        assert set(values) == set(range(-INTEGER_RANGE, INTEGER_RANGE + 1))
    if dtype == "bf16":
        exact = np.random.default_rng(0)
        raw = draw(dataclasses.replace(array, dtype="fp32"), inputs, exact).astype(np.float64)
        assert np.abs(values - raw).max() <= np.abs(raw).max() * 2.0**-8


def test_what_has_no_plain_kernel_is_computed_by_numpy():
    setup = ProblemSetup(FAULTY.operation, DEVICE, scripted.FakeCompiler())
    problem = FAULTY.operation.problem("1000")
    request = setup(problem, inputs="integers", seed=3, offsets=(("x", 4),))
    assert request.reference is None
    assert request.scalars["a"] not in (0.0, 1.0)
    expected = request.scalars["a"] * request.given["x"]
    np.testing.assert_array_equal(request.expected["y"], expected)
    assert request.expected["y"].dtype == np.float64
    assert request.offsets == {"x": 4}
    plain = setup(problem, inputs="normal", seed=3)
    assert plain.scalars == dict(FAULTY.operation.scalars)
    untold = setup(problem, inputs="normal", seed=3, checked=False)
    assert untold.expected is untold.given is untold.reference is None
    with pytest.raises(NoValidConfig, match="NumPy, which is too slow for 268435456"):
        setup(FAULTY.operation.problem("2^28"), inputs="normal", seed=0)


def test_what_has_a_plain_kernel_is_computed_by_it():
    matmul = kernels.operation("matmul")
    setup = ProblemSetup(matmul, DEVICE, scripted.FakeCompiler())
    problem = matmul.problem("70x34x5", dtype="bf16", layout="nt")
    request = setup(problem, inputs="normal", seed=1, sets=3)
    assert request.given is request.expected is None
    assert [launch.kernel for launch in request.reference.plan.launches] == ["matmul_reference"]
    assert request.reference.kernels[0].entry == "tunegen_matmul_reference"
    assert {kernel.name for kernel in request.checks} >= {"random", "compare", "stray"}
    assert (request.sets, request.arrays) == (3, matmul.arrays(problem))


def test_sets_outgrow_l2_and_fit_memory():
    copy = kernels.operation("copy")
    size = 2 * 4 << 20
    problem = copy.problem("2^20")
    sets = rotation(copy, problem, 60 << 20, 100 << 30)
    assert (sets - 1) * size < 3 * (60 << 20) <= sets * size
    assert rotation(copy, copy.problem("2^30"), 60 << 20, 100 << 30) == 2
    assert rotation(copy, copy.problem("16"), 60 << 20, 100 << 30) <= 1000
    axpy = kernels.operation("axpy")  # y is read and written: as many bytes in a set
    more = rotation(axpy, axpy.problem("2^20"), 60 << 20, 100 << 30)
    # In one pass over the sets memory moves three operands of each, at 4.8 TB/s on an H200.
    assert more * size * 3 / 2 / 4.8e6 > LEAST_INTERVAL_US
    assert sets * size * 3 / 2 / 4.8e6 < LEAST_INTERVAL_US, "what it is for"
    few = rotation(copy, problem, 60 << 20, 100 << 20)
    assert 2 <= few < sets
    assert few * size <= 50 << 20


# --- whole tunes ---------------------------------------------------------------------------------


class TellingCompiler(compiler.NvrtcCompiler):
    """Puts the source where the PTX was: the scripted GPU reads it."""

    def compile(self, source, target):
        return dataclasses.replace(super().compile(source, target), ptx=source.text.encode())


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Run ``tunegen --kernel faulty.py tune faulty ...`` on a scripted GPU."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("tunegen.runner.evaluator.TRY_FLOOR_SECONDS", 0.7)
    monkeypatch.setattr("tunegen.runner.station._PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(compiler, "NvrtcCompiler", TellingCompiler)
    monkeypatch.setattr(gpu, "find_gpus", lambda: found(H200))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, find=importlib.util.find_spec: (
        None if name == "torch" else find(name)))  # fmt: skip
    log = tmp_path / "log"

    def play(script):
        script = {
            "log": str(log), "shape": [4096], "noise": 0.002,
            "us": {"32": 60.0, "64": 50.0, "128": 55.0, "256": 58.0, "512": 52.5, "1024": 70.0},
            **script,
        }  # fmt: skip
        monkeypatch.setattr(gpu, "COMMAND", scripted.command(script))

    def call(*words, script=None, operation="faulty"):
        play(script or {})
        kernel = str(TESTS / "data" / "faulty_kernel" / "faulty.py")
        code = run(["--kernel", kernel, "tune", operation, *(str(word) for word in words)])
        captured = capsys.readouterr()
        if log.exists():
            assert all(scripted.is_gone(pid) for pid, _ in scripted.logged(log))
        return code, captured.out, captured.err

    call.log = lambda: [text for _, text in scripted.logged(log)]
    call.script = play
    return call


PROBLEM = ("--problem", "4096", "--trials", "11")


@pytest.mark.nvrtc
def test_a_space_with_every_fault_in_it(tune, tmp_path):
    """One hangs, one faults, one is wrong, two write half: exit 0, the six right ones timed."""
    code, out, err = tune(*PROBLEM, "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["trials"]["counts"] == {
        "measured": 6, "wrong_result": 3, "timed_out": 1, "launch_failed": 1
    }  # fmt: skip
    record = result["record"]
    assert record["evidence"] == "measured"
    assert record["config"] == {"FAULT": 0, "THREADS": 64}
    assert record["measurement"]["policy"] == "burst"
    assert record["measurement"]["median_us"] == pytest.approx(50.0, rel=0.01)
    assert record["default_us"] == pytest.approx(55.0, rel=0.01)
    assert (record["driver"], record["min_driver"]) == ("580.65.06", "580")
    assert record["relative_error"] == 3e-8
    assert record["tolerance"] == FAULTY.tolerance(FAULTY.operation.problem("4096"))
    assert record["deterministic"] is True
    assert (record["baseline"], record["baseline_ratio"]) == ("", None)
    assert record["device"]["name"] == "NVIDIA H200"
    assert record["measurement"]["details"]["burst"]["before"]["sm_clock_mhz"] == 1980
    assert result["contest"]["no_vendor"].endswith("torch, through which it is called, is not "
                                                   "installed")  # fmt: skip
    kept = list((tmp_path / "data" / "tunegen" / "quarantine").iterdir())
    assert len(kept) == 2
    assert all((folder / "faulty.cu").exists() for folder in kept)
    stored = json.loads((tmp_path / "data/tunegen/tuned_db/sm_90/faulty.json").read_text())
    assert stored["records"] == [record]
    assert result["seconds"]["lost"] >= 0.5
    assert result["seconds"]["near_best"] <= result["trials"]["seconds"]


@pytest.mark.parametrize("gain", [None, 0.003, 0.0, 5e-324])
def test_what_is_said_to_go_on_is_taken(gain):
    run = types.SimpleNamespace(trials=(None,) * 40, expected_gain=gain)
    option, *value = _more(run).split()
    if option == "--trials":
        assert Budget(int(*value)).trials > 40
    elif option == "--least-gain":
        assert not Budget(40, least_gain=float(*value)).is_enough(gain)
    else:
        assert value == ["out", "--least-gain"]
        assert gain < 1e-300


@pytest.mark.nvrtc
def test_the_same_again_does_nothing_and_more_goes_on(tune):
    _, first, _ = tune("--problem", "4096", "--trials", "4", "--json")
    tried = [text for text in tune.log() if text.startswith("trying")]
    code, again, err = tune("--problem", "4096", "--trials", "4", "--json")
    assert code == 0
    assert [text for text in tune.log() if text.startswith("trying")] == tried
    assert "nothing to do: the 4 trials are made" in err
    records = [json.loads(text)["results"][0]["record"] for text in (first, again)]
    assert records[0] == records[1]
    _, more, _ = tune("--problem", "4096", "--trials", "8", "--json")
    (result,) = json.loads(more)["results"]
    assert result["trials"]["past"] == 4
    assert sum(result["trials"]["counts"].values()) == 8
    assert result["record"]["trials"] == 8
    _, fresh, _ = tune("--problem", "4096", "--trials", "4", "--fresh", "--json")
    assert json.loads(fresh)["results"][0]["trials"]["past"] == 0


@pytest.mark.nvrtc
def test_what_time_cut_short_goes_on_in_its_study(tune):
    """Even one that was begun anew; its finals are played again."""
    words = {"problem": "4096", "trials": 4, "specs": (FAULTY,), "evaluator": "gpu"}
    tune("--problem", "4096", "--trials", "6")  # the scripted GPU stays; what --fresh leaves alone
    first = session.tune("faulty", **words, seconds=1e-9, fresh=True)
    assert (first.run.stop_reason, first.run.past) == ("time", 0)
    made = len(first.run.trials)
    assert made < 4
    again = session.tune("faulty", **words, seconds=60, fresh=True, after=first)
    assert (again.run.past, len(again.run.trials), again.run.stop_reason) == (made, 4, "budget")
    assert again.run.trials[0].config == first.run.trials[0].config
    assert again.run.contest is not None
    assert (again.record.trials, again.path) == (4, first.path)
    assert "--seconds 60 " in again.record.command
    assert again.run.search_seconds < again.run.seconds


@pytest.mark.nvrtc
def test_without_trials_a_gpu_makes_more_than_the_model(tune):
    _, out, _ = tune("--problem", "4096", "--seconds", "0.01", "--json")
    (result,) = json.loads(out)["results"]
    assert f"--trials {DEFAULT_TRIALS} " in result["command"]


@pytest.mark.nvrtc
def test_the_table_for_people(tune):
    code, out, err = tune(*PROBLEM)
    assert code == 0, err
    for word in ("winner", "default", "floor", "vendor", "measured, policy burst", "not installed",
                 "checked", "card", "1755 MHz", "within 2 % of the winner",
                 "verifying", "--evaluator gpu", "--fresh"):  # fmt: skip
        assert word in out, word
    assert "[1." in out, "the default's ratio has an interval"
    command = next(line for line in out.splitlines() if line.startswith("again"))
    assert shlex.split(command)[1:6] == ["tunegen", "--kernel", "faulty.py", "tune", "faulty"]


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("words", "script", "text"),
    [
        (("--device", "2"), {}, "no GPU 2, there is 0 (NVIDIA H200)"),
        (("--arch", "sm_80", "--evaluator", "gpu"), {}, "sm_80 was asked for"),
        ((), {"cannot_open": "CUDA_ERROR_NO_DEVICE"}, "CUDA_ERROR_NO_DEVICE"),
        ((), {"cannot_prepare": "1,000 bytes are needed, 10 are free"}, "1,000 bytes are needed"),
        ((), {"others": [17]}, "another process computes on GPU 0"),
        ((), {"came": [17]}, "others came onto GPU 0"),
        (("--problem", "0"), {}, "there is nothing to launch"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, script, text, tune):
    if "--problem" not in words:
        words = (*words, "--problem", "4096")
    code, out, err = tune("--trials", "2", *words, script=script)
    assert (code, out) == (1, "")
    assert text in err
    assert err.count("\n") == 1, err


@pytest.mark.nvrtc
def test_a_shared_card_is_said_to_be_one(tune):
    code, out, _ = tune("--problem", "4096", "--trials", "2", "--shared", "--json",
                        script={"others": [17], "came": [17]})  # fmt: skip
    assert code == 0
    record = json.loads(out)["results"][0]["record"]
    assert record["measurement"]["details"]["shared"] is True
    assert "--shared" in record["command"]


@pytest.mark.nvrtc
def test_nobody_is_right_at_the_edges(tune):
    script = {"wrong_at_edges": [32, 64, 128, 256, 512, 1024]}
    code, _, err = tune("--problem", "4096", "--trials", "6", script=script)
    assert code == 1
    assert "was right in the finals" in err


@pytest.mark.nvrtc
def test_the_model_shows_what_a_gpu_has_measured(tune, monkeypatch):
    assert tune("--problem", "4096", "--trials", "3")[0] == 0
    monkeypatch.setattr(gpu, "find_gpus", lambda: found())
    for problem in ("4096", "4000"):
        words = ("--problem", problem, "--arch", "sm_90", "--trials", "2")
        code, out, _ = tune(*words)
        assert code == 0
        assert out.startswith("measured   "), out
        assert "measured on NVIDIA H200" in out.splitlines()[0]
        _, out, _ = tune(*words, "--json")
        (result,) = json.loads(out)["results"]
        assert result["known"]["evidence"] == "measured"
        assert result["record"]["evidence"] == "predicted"
    _, out, _ = tune("--problem", "2^24", "--arch", "sm_90", "--trials", "2", "--json")
    assert json.loads(out)["results"][0]["known"] is None


# Slow enough for sustained blocks, under which 64 is a tenth slower: 512 is the faster one then.
FLIPPING = {
    "us": {
        "32": 1200.0,
        "64": 1000.0,
        "128": 1100.0,
        "256": 1160.0,
        "512": 1050.0,
        "1024": 1400.0,
    },
    "sustained": {"64": 1.1},
}
ALL = {"problem": "4096", "trials": 11, "specs": (FAULTY,), "evaluator": "gpu"}


@pytest.mark.nvrtc
def test_where_policies_disagree_the_winner_of_each_is_recorded(tune):
    tune.script(FLIPPING)
    found = session.tune("faulty", **ALL)
    records = [record for _, record in Database().records("sm_90", "faulty")]
    assert len(records) == 2
    sustained, burst = (
        find_exact(Database(), found.request, policy) for policy in ("sustained", "burst")
    )
    assert find_exact(Database(), found.request) == sustained
    assert find_exact(Database(), found.request, "warm") is None
    assert (found.record.identity, found.other.identity) == (sustained.identity, burst.identity)
    for record, policy, threads, us in (
        (sustained, "sustained", 512, 1050.0),
        (burst, "burst", 64, 1000.0),
    ):
        assert record.config == {"FAULT": 0, "THREADS": threads}
        assert record.measurement.policy == policy
        assert record.measurement.median_us == pytest.approx(us, rel=0.01)
        assert record.default_us == pytest.approx(1100.0, rel=0.01)
        assert record.measurement.details["flip"] == found.run.contest.flip
    moments = [datetime.datetime.fromisoformat(r.created) for r in (burst, sustained)]
    assert moments[1] - moments[0] >= datetime.timedelta(seconds=1)
    assert [image.cubin_sha256 for image in burst.images] != [
        image.cubin_sha256 for image in sustained.images
    ]
    assert (burst.command, burst.trials, burst.seed, burst.driver) == (
        sustained.command, sustained.trials, sustained.seed, sustained.driver,
    )  # fmt: skip
    # The same again finds the one that decided.
    again = session.tune("faulty", **ALL)
    assert (again.record, again.other, again.path) == (sustained, None, None)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("us", "slower"),
    [(1050.0, 1.0), (1010.0, 1.02)],
    ids=["the same winner", "neither loses much under the other"],
)
def test_where_policies_agree_one_winner_is_recorded(us, slower, tune):
    times = {**FLIPPING["us"], "512": us}
    tune.script({"us": times, "noise": 0.0005, "sustained": {"64": slower}})
    found = session.tune("faulty", **ALL)
    (record,) = (record for _, record in Database().records("sm_90", "faulty"))
    assert found.other is None
    assert record.identity == found.record.identity
    assert record.measurement.policy == "sustained"


@pytest.mark.nvrtc
def test_interrupted_finals_leave_the_search(tune, tmp_path):
    script = {"interrupted_once": str(tmp_path / "once")}
    code, out, _ = tune("--problem", "4096", "--trials", "4", "--json", script=script)
    assert code == 130
    (result,) = json.loads(out)["results"]
    record = result["record"]
    assert record["measurement"]["policy"] == "search"
    assert "unfinished" in record["measurement"]["details"]
    assert {"quantity": "N", "rule": "equal", "value": 4096} in record["limits"]
    assert record["default_us"] is None
    # The next run plays the finals.
    code, out, _ = tune("--problem", "4096", "--trials", "4", "--json", script=script)
    assert code == 0
    (result,) = json.loads(out)["results"]
    assert (result["trials"]["past"], result["contest"]["policy"]) == (4, "burst")
    # What is cut short after that takes nobody's place.
    again = {"interrupted_once": str(tmp_path / "twice")}
    words = ("--problem", "4096", "--trials", "4", "--fresh", "--json")
    code, out, _ = tune(*words, script=again)
    assert code == 130
    assert json.loads(out)["results"][0]["path"] is None
    stored = {r.measurement.policy for _, r in Database().records("sm_90", "faulty")}
    assert stored == {"search", "burst"}


@pytest.mark.nvrtc
def test_a_list_of_problems_beside_the_vendors_library(tune, tmp_path, monkeypatch):
    script = {"shape": [4096], "noise": 0.002, "dice": 5, "vendor": {"us": 60.0}}
    monkeypatch.setattr(gpu, "vendor_worker", lambda card: (scripted.worker(script), ""))
    entries = [
        {"name": "one", "group": "alone", "n": 4096},
        {"name": "none", "group": "no", "n": 0},
    ]
    (tmp_path / "list.json").write_text(json.dumps({"faulty": entries}))
    words = ("--shapes", str(tmp_path / "list.json"), "--trials", "4")
    code, out, err = tune(*words, "--json")
    assert code == 1
    assert "tunegen: none: the output of faulty 0 is empty" in err
    document = json.loads(out)
    (result,) = document["results"]
    ratio = result["vendor_ratio"]
    assert ratio["low"] <= ratio["ratio"] == result["record"]["baseline_ratio"] <= ratio["high"]
    us = result["record"]["measurement"]["median_us"]
    assert ratio["ratio"] == pytest.approx(60.0 / us, rel=0.01)
    assert document["geometric_means"]["groups"]["alone"]["problems"] == 1
    # Where there is nothing left to do, the record that stands tells the same.
    code, out, err = tune(*words)
    assert code == 1
    assert "nothing to do" in err
    row = next(line for line in out.splitlines() if line.startswith("alone") and "one" in line)
    assert f"{ratio['ratio']:.3f}  " in row
    assert f"{ratio['low']:.3f} to {ratio['high']:.3f}" in row
    assert f"vendor/ours {ratio['ratio']:.3f} (" in err


TUNE = """
import sys
sys.path.insert(0, sys.argv[1])
import scripted, test_gpu_session as t
from tunegen import compiler, session
from tunegen.runner import evaluator
from tunegen.session import gpu
evaluator.TRY_FLOOR_SECONDS = evaluator.FIRST_TRY_SECONDS = 1.0
compiler.NvrtcCompiler = t.TellingCompiler
gpu.find_gpus = lambda: t.found(t.H200)
gpu.vendor_worker = lambda card: (None, "not here")
gpu.COMMAND = scripted.command({"log": sys.argv[2], "shape": [4096], "noise": 0.002})
session.tune("faulty", problem="4096", trials=6, specs=(scripted.FAULTY,), evaluator="gpu",
             on_event=lambda trial, progress: print(trial.number, flush=True))
print("done", flush=True)
"""


@pytest.mark.nvrtc
def test_nothing_reported_is_lost_when_the_parent_is_killed(tmp_path):
    """At several moments; the run after it goes on with all that was told, and ends well."""
    log = tmp_path / "log"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", TUNE, str(TESTS), str(log)],
            stdout=subprocess.PIPE, text=True, env=environment, cwd=TESTS.parent,
        )  # fmt: skip

    told = 0
    for more in (1, 2):
        process = start()
        for _ in range(more):
            told = int(process.stdout.readline()) + 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start()
    lines = process.communicate(timeout=60)[0].split()
    assert process.returncode == 0
    assert lines[-1] == "done"
    assert int(lines[0]) >= told == 3, "numbers go on after what was reported"
    deadline = time.monotonic() + 20
    while not all(scripted.is_gone(pid) for pid, _ in scripted.logged(log)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.nvrtc
def test_a_study_of_another_gpu_or_problem_is_refused(tune, tmp_path):
    """In one line, and nothing is written; one that begins so is this one."""
    storage = ("--storage", f"sqlite:///{tmp_path / 's.db'}")
    words = ("--problem", "4096", "--trials", "2", *storage)
    for other in (
        "faulty-4096-fp32-nvidia-h100",
        "faulty-2048-",
        "faulty-4096-fp32-nvidia-h200-1-",
    ):
        code, out, err = tune(*words, "--study", other)
        assert (code, out) == (2, "")
        assert f"study '{other}' is not that of this problem on NVIDIA H200 (faulty-4096-" in err
        assert err.count("\n") == 1
        assert not (tmp_path / "s.db").exists()
    assert tune(*words, "--study", "faulty-4096-fp32-nvidia-h200-")[0] == 0
    assert tune(*words, "--study", "", "--fresh")[0] == 0


@pytest.mark.nvrtc
def test_finals_that_another_host_plays_are_not_recorded_here(tune, tmp_path, monkeypatch):
    from tunegen.store import hosts

    other = ("else", "node7 (process 11)")
    with monkeypatch.context() as patch:
        patch.setattr(hosts.Hosts, "finish", lambda self, contributed: other)
        code, out, err = tune("--problem", "4096", "--trials", "3", "--json")
        assert code == 0
        assert "node7 (process 11) goes on with the study, and records the winner" in err
        (result,) = json.loads(out)["results"]
        assert (result["path"], result["trials"]["left_to"]) == (None, other[1])
        assert result["record"]["measurement"]["details"]["unfinished"] == (
            "node7 (process 11) plays the finals"
        )
        _, out, _ = tune("--problem", "4096", "--trials", "3")
        assert "none here: node7 (process 11) plays the finals" in out
        assert not any((tmp_path / "data" / "tunegen" / "tuned_db").rglob("*.json"))
    _, out, _ = tune("--problem", "4096", "--trials", "3", "--json")
    (result,) = json.loads(out)["results"]
    assert (result["trials"]["past"], result["trials"]["left_to"]) == (3, None)
    assert result["contest"] is not None
    assert result["path"]

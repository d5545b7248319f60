# SPDX-License-Identifier: Apache-2.0
"""The scripts of ``tests/gpu`` that show what the tuner promises, on workers that play a GPU by a
script: each part passes where things are right, and fails where they are not."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scripted
from scripted import DEVICE

from tunegen import calibration, compiler, disasm, kernels, perfmodel, replay
from tunegen.database import Database
from tunegen.model import (
    Calibration,
    Config,
    Contest,
    DeviceIdentity,
    Figure,
    Figures,
    FoundGpus,
    GpuInfo,
    Measurement,
    Standing,
    StreamPoint,
    TuningRecord,
)
from tunegen.runner.process import Worker
from tunegen.session import gpu

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "gpu"))

import acceptance  # noqa: E402
import acceptance_common as common  # noqa: E402
import acceptance_faulty as faulty  # noqa: E402
import acceptance_hundred as hundred  # noqa: E402
import acceptance_kills as kills  # noqa: E402
import acceptance_processes as processes  # noqa: E402
import acceptance_records as records  # noqa: E402
import acceptance_seeds as seeds  # noqa: E402
import acceptance_subspace as subspace  # noqa: E402
import acceptance_two as two  # noqa: E402
import correlation  # noqa: E402

pytestmark = pytest.mark.thorough

H200 = GpuInfo(0, "NVIDIA H200", "GPU-1", "sm_90", 150 << 30, 149 << 30)


class SourceCompiler(scripted.FakeCompiler):
    """Compiles nothing: the scripted GPU reads the source."""

    def __init__(self, cache=None, lineinfo=False):
        pass


def patches(script):
    """What puts a scripted GPU in the place of a real one: (object, name, value)."""
    vendor = script.get("vendor")
    there = tuple(
        dataclasses.replace(H200, index=index, uuid=f"GPU-{index + 1}")
        for index in script.get("all", [0])
    )

    def vendor_worker(card):
        if not vendor:
            return None, "it is not here"
        return Worker(scripted.command(script), {"TUNEGEN_WORKER_PRELOAD": "torch"}), ""

    return (
        (compiler, "NvrtcCompiler", SourceCompiler),
        (compiler, "nvrtc_version", lambda: "13.0.88"),
        (disasm, "code_digest", lambda cubin: ""),
        (gpu, "find_gpus", lambda: FoundGpus(there, driver="580.65.06")),
        (gpu, "COMMAND", scripted.command(script)),
        (gpu, "vendor_worker", vendor_worker),
    )


def install(script):
    """In a process of its own."""
    from tunegen.runner import evaluator

    for where, name, value in patches(script):
        setattr(where, name, value)
    evaluator.TRY_FLOOR_SECONDS = 0.7


IN_CHILD = """
import json, sys
sys.path[:0] = [{tests!r}, {gpu!r}]
import test_acceptance_scripts as t
t.install(json.loads({script!r}))
{run}
"""


def in_child(script, run):
    text = IN_CHILD.format(
        tests=str(TESTS), gpu=str(TESTS / "gpu"), script=json.dumps(script), run=run
    )
    return (sys.executable, "-c", text)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Play a GPU by a script, here and in the processes that the parts start."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def play(**script):
        script = {"noise": 0.002, "log": str(tmp_path / "log"), **script}
        for where, name, value in patches(script):
            monkeypatch.setattr(where, name, value)
        cli = "from tunegen.cli.main import run; sys.exit(run(sys.argv[1:]))"
        monkeypatch.setattr(common, "TUNEGEN", in_child(script, cli))
        child = "import acceptance_child; acceptance_child.main(sys.argv[1])"
        monkeypatch.setattr(kills, "CHILD", in_child(script, child))

    return play


@pytest.fixture
def setting(tmp_path):
    said = []
    for name in ("out", "work", "db"):
        (tmp_path / name).mkdir()
    made = common.Setting(
        tmp_path / "out", tmp_path / "work", tmp_path / "db", tmp_path / "cal", said.append
    )
    yield made
    assert sum(map(len, said)) < 3000, "parts are brief"


AXPY = ("axpy", "--problem", "2^16", "--dtype", "fp32")
TIMES = {"64": 50.0, "128": 60.0, "256": 70.0, "512": 65.0, "1024": 90.0}


# --- the script ----------------------------------------------------------------------------------


def test_a_part_that_fails_is_told_and_the_others_follow(tmp_path, monkeypatch, capsys):
    def breaks(setting):
        raise ValueError("as it happens")

    def hangs(setting):
        time.sleep(20)

    parts = {
        "breaks": acceptance.Part(breaks, 5, ""),
        "hangs": acceptance.Part(hangs, 0.1, ""),
        "passes": acceptance.Part(lambda setting: common.Verdict(True, "7 of 7"), 5, ""),
    }
    monkeypatch.setattr(acceptance, "PARTS", parts)
    out = tmp_path / "out"
    assert acceptance.main(["--out", str(out)]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("FAIL breaks")
    assert lines[0].endswith("ValueError: as it happens")
    assert "out of time after 0 s" in lines[1]
    assert lines[2].startswith("PASS passes")
    assert "as it happens" in printed.err
    kept = json.loads((out / "acceptance.json").read_text())
    assert [(part["name"], part["passed"]) for part in kept] == [
        ("breaks", False), ("hangs", False), ("passes", True)
    ]  # fmt: skip
    assert acceptance.main(["--out", str(out), "--only", "passes"]) == 0
    assert acceptance.main(["--list"]) == 0
    with pytest.raises(SystemExit):
        acceptance.main(["--only", "passes,dances"])


def test_time_that_is_over_ends_commands(monkeypatch):
    monkeypatch.setattr(common, "TUNEGEN", (sys.executable, "-c", "import time; time.sleep(60)"))
    started = time.monotonic()
    with pytest.raises(common.OutOfTime), common.limit(0.3):
        common.command([])
    assert time.monotonic() - started < 10


def test_a_tune_that_fails_is_quoted(monkeypatch):
    words = "import sys; print('no such GPU', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(common, "TUNEGEN", (sys.executable, "-c", words))
    with pytest.raises(common.TuneFailed, match="exited with 1: no such GPU"):
        common.result_of(common.command([]))


# --- processes -----------------------------------------------------------------------------------


def test_memory_of_parent_and_workers_with_the_library_apart():
    """A parent of little memory with a worker and a process that loads the vendor's library."""
    text = """
import os, subprocess, sys, time
own = bytearray(50 << 20)
def start(mib, **more):
    return subprocess.Popen([sys.executable, "-c",
        f"import time; held = bytearray(b'x') * ({mib} << 20); print('.'); time.sleep(60)"],
        env={**os.environ, **more}, stdout=subprocess.PIPE)
both = [start(120), start(300, TUNEGEN_WORKER_PRELOAD="torch")]
for child in both: child.stdout.readline()
time.sleep(0.5)
for child in both: child.kill()
"""
    command = [sys.executable, "-c", text]
    with common.subprocess.Popen(command) as process, processes.Memory(process.pid) as memory:
        process.wait()
    mib = 1 << 20
    assert 110 * mib < memory.worker_bytes < 200 * mib
    assert 290 * mib < memory.vendor_bytes < 400 * mib
    assert memory.together_bytes < 290 * mib, "without the library"
    assert memory.together_bytes >= memory.worker_bytes + 5 * mib
    assert memory.samples > 5


# --- hundred, seeds ------------------------------------------------------------------------------


def case(least):
    return hundred.Case("tune_2048_seed0", AXPY, least)


def test_hundred(play, setting, monkeypatch):
    play(us=TIMES, vendor={"us": 60.0})
    monkeypatch.setattr(hundred, "TRIALS", 8)
    monkeypatch.setattr(hundred, "CASES", (case(0.9),))
    verdict = hundred.run(setting)
    assert verdict.passed, verdict.figure
    assert "8 trials in" in verdict.figure
    found = verdict.details["tune_2048_seed0"]
    assert found["ratio"] >= 0.95
    assert 0 < found["worker_bytes"] < found["together_bytes"] < 1 << 30
    assert found["vendor_bytes"] > 0
    result = json.loads((setting.out / "tune_2048_seed0.json").read_text())
    memory = processes.Memory(0)
    assert hundred.judge(case(0.9), result, 100.0, memory)[0]
    assert not hundred.judge(case(9.0), result, 100.0, memory)[0], "not as fast as that"
    assert not hundred.judge(case(0.9), result, 121.0, memory)[0], "not in time"
    memory.together_bytes = 3 << 29
    assert not hundred.judge(case(0.9), result, 100.0, memory)[0], "not below 1.5 GiB"
    monkeypatch.setattr(hundred, "TRIALS", 9)
    assert not hundred.judge(case(0.9), result, 100.0, processes.Memory(0))[0], "a trial short"


def test_hundred_without_the_vendors_library(play, setting, monkeypatch):
    play(us=TIMES)
    monkeypatch.setattr(hundred, "TRIALS", 3)
    monkeypatch.setattr(hundred, "CASES", (case(0.9),))
    verdict = hundred.run(setting)
    assert not verdict.passed
    assert "no ratio: it is not here" in verdict.figure


def test_seeds(play, setting, monkeypatch):
    play(us=TIMES)
    monkeypatch.setattr(seeds, "TRIALS", 4)
    monkeypatch.setattr(seeds, "FINALS_SECONDS", 1.0)
    problem = {"operation": "axpy", "problem": "2^16", "dtype": "fp32", "layout": ""}
    monkeypatch.setattr(seeds, "PROBLEM", problem)

    # One of them was tuned before, and its winner is known.
    def known(threads):
        name = f"{seeds.NAME}_seed0"
        config = {**seed_one["record"]["config"], "THREADS": threads}
        record = {"spec": "vector", "config": config, "measurement": {"median_us": 50.0}}
        common.keep(setting, name, {"record": record})

    seed_one = seeds._tuned(setting, 1)
    threads = seed_one["record"]["config"]["THREADS"]
    known(threads)
    assert seeds.run(setting).figure.startswith("both seeds chose")
    known(next(int(t) for t in TIMES if int(t) != threads))
    verdict = seeds.run(setting)
    assert not verdict.passed, verdict.figure
    assert set(verdict.details["figures"]) == {"seed 0", "seed 1"}
    play(us=dict.fromkeys(TIMES, 50.0))
    verdict = seeds.run(setting)
    assert verdict.passed, verdict.figure
    assert "of the other's time" in verdict.figure


def contest(ratio, low, high, failure=""):
    def figures(*ratios):
        return {"burst": Figures(1.0, 1.0, 1.0, 30, *ratios)}

    return Contest(
        standings=(
            Standing("seed 0", 0, figures=figures(1.0, 1.0, 1.0)),
            Standing("seed 1", 1, figures=figures(ratio, low, high), failure=failure),
        ),
        winner=None,
        policy="burst",
    )


@pytest.mark.parametrize(
    ("ratio", "low", "failure", "passed"),
    [(1.009, 1.008, "", True), (1.02, 0.99, "", True), (1.02, 1.01, "", False),
     (1.0, 1.0, "it faulted", False)],
)  # fmt: skip
def test_seeds_agree(ratio, low, failure, passed):
    assert seeds.judge(contest(ratio, low, 1.1, failure))[0] == passed


def test_seeds_that_the_finals_left_out_do_not_agree():
    whole = contest(1.0, 1.0, 1.0)
    assert not seeds.judge(dataclasses.replace(whole, standings=whole.standings[:1]))[0]


# --- two -----------------------------------------------------------------------------------------


@pytest.fixture
def short_cases(monkeypatch):
    monkeypatch.setattr(two, "CASES", (two.Case("two_axpy", AXPY),))
    monkeypatch.setattr(two, "TRIALS", 24)
    monkeypatch.setattr(two, "FINALS_SECONDS", "1")


def test_two(play, setting, short_cases):
    play(us=TIMES, try_seconds=0.2, all=[0, 1])
    verdict = two.run(setting)
    found = verdict.details["two_axpy"]
    assert verdict.passed, verdict.figure
    assert found["one"]["measured_by_gpu"] == {0: 24}
    assert set(found["two"]["measured_by_gpu"]) == {0, 1}
    assert 4.0 < found["one"]["per_second"] < 5.0, "24 in 0.2 s each"
    assert "ratio" in verdict.figure
    # Half of what was measured, twice the same config, or one GPU alone.
    one, both = found["one"], found["two"]
    assert two.judge(two.CASES[0], one, both)[0]
    slow = {**both, "per_second": 1.89 * one["per_second"]}
    for wrong in (slow, {**both, "different": 23}, {**both, "trials": 23},
                  {**both, "measured_by_gpu": {0: 24}}):  # fmt: skip
        assert not two.judge(two.CASES[0], one, wrong)[0]


def test_two_on_one(play, setting):
    play(us=TIMES)
    verdict = two.run(setting)
    assert not verdict.passed
    assert verdict.figure == "it takes two GPUs, there is 0"


def test_what_takes_two_gpus_runs_by_name_only():
    assert "two" not in acceptance._options([]).only
    assert acceptance._options(["--only", "two"]).only == ["two"]


# --- subspace ------------------------------------------------------------------------------------

PART = subspace.Subspace(
    operation="axpy", problem="2^16", dtype="fp32", layout=None, spec="vector",
    free={"THREADS": (64, 128, 256, 512, 1024), "UNROLL": (1, 2, 4, 8)}, least_configs=15,
)  # fmt: skip


def test_the_part_of_the_matmul_has_its_default_and_about_a_thousand_configs():
    (spec,) = kernels.specs_of("matmul", only="simt")
    problem = subspace.MATMUL.problem_of(spec)
    table = subspace.MATMUL.space(spec, problem, DEVICE).enumerate()
    assert 900 <= len(table) <= 1100
    assert table.row(spec.default(problem, DEVICE)) is not None
    whole = spec.space(problem, DEVICE)
    assert not any(whole.violated(config) for config in table[::97])


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(subspace, "SEEDS", (0, 1, 2))
    monkeypatch.setattr(subspace, "ENOUGH", 3)
    monkeypatch.setattr(subspace, "CONTEST_SECONDS", 1.0)


def test_subspace(play, setting, small, monkeypatch):
    play(us=TIMES, refused=[1024])
    monkeypatch.setattr(subspace, "TRIALS", 12)
    verdict = subspace.run(setting, PART, processes=1)
    assert verdict.passed, verdict.figure
    recorded = replay.load_space(setting.out / "subspace.json")
    assert len(recorded.outcomes) == len(recorded.space.enumerate()) == verdict.details["valid"]
    times = {c["THREADS"]: o.median_us if o.ok else None for (_, c), o in
             recorded.outcomes.items()}  # fmt: skip
    assert times[1024] is None
    assert times[64] == pytest.approx(50.0, rel=0.02)
    assert verdict.details["best"]["config"]["THREADS"] == 64
    # Searches that try the default alone do not find it.
    monkeypatch.setattr(subspace, "TRIALS", 1)
    verdict = subspace.run(setting, PART, processes=1)
    assert not verdict.passed
    assert verdict.figure.startswith("0 of 3 seeds")


def test_subspace_that_was_not_measured_in_time(play, setting, small, monkeypatch):
    play(us=TIMES)
    monkeypatch.setattr(subspace, "MEASURING_SECONDS", 0.0)
    verdict = subspace.run(setting, PART, processes=1)
    assert not verdict.passed
    assert "the best of 1 " in verdict.figure


def test_searches_side_by_side_are_those_one_after_the_other(setting):
    (spec,) = kernels.specs_of("axpy")
    table = PART.space(spec, PART.problem_of(spec), DEVICE).enumerate()
    path = setting.out / "space.json"
    rows = [[list(config.values()), 50.0 + row] for row, config in enumerate(table)]
    params = {p.name: list(p.values) for p in table.space.parameters}
    path.write_text(json.dumps({"kernel": spec.name, "gpu": "none", "params": params,
                                "rows": rows}))  # fmt: skip
    job = subspace.Replay(path, PART, DEVICE, DEVICE)
    assert job.run_all((0, 1), 2) == job.run_all((0, 1), 1)


# --- faulty --------------------------------------------------------------------------------------

FAULTY_TIMES = {"32": 60.0, "64": 50.0, "128": 55.0, "256": 58.0, "512": 52.5, "1024": 70.0}


def test_faulty(play, setting, monkeypatch):
    monkeypatch.setattr(faulty, "SIZES", "4096")
    monkeypatch.setattr(faulty, "FINALS_SECONDS", "1")
    play(us=FAULTY_TIMES, shape=[4096])
    verdict = faulty.run(setting)
    assert verdict.passed, verdict.figure
    assert "1 launch_failed, 6 measured, 1 timed_out, 2 wrong_result" in verdict.figure
    assert len(verdict.details["times"]) == 6
    busy = dataclasses.replace(H200, other_processes=1)
    monkeypatch.setattr(gpu, "find_gpus", lambda: FoundGpus((busy,)))
    assert not common.card_is_free(0.1)


def measurement(us, low, high, **details):
    return Measurement(us, "burst", low, high, details=details)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (measurement(102.0, 101.9, 102.1), True),
        (measurement(104.0, 103.9, 104.1), False),
        (measurement(104.0, 100.0, 105.0), True),
        (measurement(108.0, 107.9, 108.1, raced_out=True), True),
        (measurement(112.0, 111.9, 112.1, raced_out=True), False),
        (measurement(104.0, 103.9, 104.1, drift=1.03), True),
    ],
)
def test_what_noise_is(other, same):
    row = faulty.Row(Config({"THREADS": 32}), measurement(100.0, 99.9, 100.1), other)
    assert row.same == same


# --- kills ---------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(kills, "PROBLEM", {"operation": "axpy", "problem": "2^16"})
    monkeypatch.setattr(kills, "FINALS_SECONDS", 3.0)
    for name, value in {"PAIRS": 1, "STARTS": 1, "SEARCH_MOMENT": 0.2, "START_MOMENT": 1.5,
                        "FINALS_MOMENT": 0.2}.items():  # fmt: skip
        monkeypatch.setattr(kills, name, value)


def test_kills(play, setting, few):
    play(us=TIMES)
    verdict = kills.run(setting)
    assert verdict.passed, verdict.figure
    assert verdict.figure.startswith("5 kills (3 of the parent, 2 of the worker)")
    assert verdict.details["stored"] >= 5


def test_kills_see_a_run_that_ends_by_itself(play, setting, few):
    play(us=TIMES, cannot_open="CUDA_ERROR_NO_DEVICE")
    verdict = kills.run(setting)
    assert not verdict.passed
    assert "CUDA_ERROR_NO_DEVICE" in verdict.figure


@pytest.mark.parametrize(
    ("lines", "before", "stored", "text"),
    [
        ([(3, 30)], 2, [10, 20, 30], "the next run counts"),
        ([(2, 30)], 2, [10, 20, 30, 30], "tried twice"),
        ([(2, 30)], 2, [20, 30], "2 trials and 1 more are 2"),
        ([(2, 30), (3, 40)], 2, [10, 20, 40], "1 reported trials are lost"),
    ],
)
def test_kills_hold_a_run_against_the_store(lines, before, stored, text, monkeypatch):
    def trial(us):
        return ["vector", [["THREADS", us]], "measured", us]

    class Run:
        reported = [{"number": number, "trial": trial(us)} for number, us in lines]  # noqa: RUF012

    log = kills.Log("sqlite://")
    monkeypatch.setattr(kills.Log, "stored", lambda log: [trial(us) for us in stored])
    with pytest.raises(kills.Broken, match=text):
        log.check(Run, before)


# --- records -------------------------------------------------------------------------------------


def record(operation="copy", dtype="fp32", size=2**28, us=600.0, vendor=(1.0, 0.999, 1.001)):
    (spec,) = kernels.specs_of(operation)
    problem = spec.operation.problem((size,), dtype=dtype)
    details = {}
    if vendor:
        details["vendor"] = dict(zip(("ratio", "low", "high"), vendor, strict=True))
    return TuningRecord(
        operation=operation, spec=spec.name, arch="sm_90", target="sm_90", problem=problem,
        config=dict(spec.default(problem, DEVICE)), device=DeviceIdentity.of(DEVICE),
        evidence="measured", measurement=Measurement(us, "sustained", us, us, 20, details),
        default_us=None, images=(), limits=(), nvrtc="13.0.88", tunegen="0.1",
        created="2026-01-01T00:00:00+00:00", trials=1, seed=0, command="tunegen tune",
    )  # fmt: skip


def ceilings(folder, spread=0.01):
    def figure(value):
        return Figure(value, value * (1 - spread), value * (1 + spread), 7)

    streams = {name: (StreamPoint(1 << 30, figure(250.0)),) for name in ("read", "add", "copy",
                                                                         "write")}  # fmt: skip
    calibration.save(
        Calibration(
            arch="sm_90", device=DeviceIdentity.of(DEVICE), streams=streams, l2_read_gbps=None,
            shared_read_gbps=None, peak_tflops={}, launch_us=figure(0.5),
            dependent_launch_us=figure(0.5), policy="burst", driver="580", nvrtc="13.0.88",
            tunegen="0.1", created="2026-01-01T00:00:00+00:00",
        ),
        folder,
    )  # fmt: skip


def test_floors(setting):
    assert records.floors(setting).figure.startswith("no measured records")
    database = Database(setting.db)
    database.put(record(us=520.0))
    assert "no calibration of NVIDIA H200" in records.floors(setting).figure
    ceilings(setting.calibration)
    verdict = records.floors(setting)
    assert verdict.passed
    assert verdict.figure.startswith("0 of 1 records below the floor; the nearest copy 268435456")
    # 2 GiB at 1 GiB in 247.0 us, and the launch, by the fastest repeats.
    assert verdict.details["copy 268435456 fp32"][0] == pytest.approx(520 / 494.5, rel=1e-3)
    database.put(record(us=491.0, dtype="bf16", size=2**29))
    assert records.floors(setting).passed, "within the spread of the calibration"
    database.put(record(us=485.0, size=2**28))
    verdict = records.floors(setting)
    assert not verdict.passed
    assert verdict.figure.startswith("1 of ")


def test_vectors(setting):
    database = Database(setting.db)
    for operation in ("copy", "add", "axpy"):
        for dtype in ("fp32", "bf16"):
            assert not records.vectors(setting).passed
            database.put(record(operation, dtype))
    verdict = records.vectors(setting)
    assert verdict.passed, verdict.figure
    assert "axpy bf16 1.000 [0.999, 1.001]" in verdict.figure
    slower = record("add", "fp32", us=601.0, vendor=(0.99, 0.989, 0.991))
    database.put(dataclasses.replace(slower, created="2026-01-02T00:00:00+00:00"))
    assert not records.vectors(setting).passed, "the newest counts"


# --- correlation ---------------------------------------------------------------------------------


def test_spearman_is_the_correlation_of_ranks_with_equal_ones_sharing_theirs():
    assert list(correlation.ranks([10, 30, 20, 20])) == [1, 4, 2.5, 2.5]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(50)
    assert correlation.spearman(values, np.exp(values)) == pytest.approx(1.0)
    assert correlation.spearman(values, -values) == pytest.approx(-1.0)
    assert abs(correlation.spearman(values, rng.standard_normal(50))) < 0.4
    assert correlation.spearman(values, [1.0] * 50) == 0.0
    # Without ties: 1 - 6 sum(d^2) / (n (n^2 - 1)).
    assert correlation.spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 24 / 120)


def test_correlation(play, tmp_path, capsys):
    play(us=TIMES)
    out = tmp_path / "figures.json"
    words = ["--problem", "axpy 2^16 fp32", "--problem", "copy 2^16 bf16", "--configs", "12"]
    code = correlation.main([*words, "--out", str(out)])
    printed = capsys.readouterr().out
    figures = json.loads(out.read_text())
    first, second = figures["problems"]
    found = [correlation.correlations(p) for p in (first, second)]
    assert code == int(any(f["formula"] < 0.6 or f["compiled"] < 0.75 for f in found))
    assert first["outcomes"] == {"measured": 12}
    assert len(first["points"]) == len({tuple(point[3:]) for point in first["points"]}) == 12
    column = first["columns"].index("THREADS")
    for point in first["points"]:
        expected = TIMES.get(str(point[column]), 100.0 + point[column])
        assert point[2] == pytest.approx(expected, rel=0.02)
    assert first["problem"] == "axpy 65536 fp32"
    assert (figures["device"], figures["driver"]) == ("NVIDIA H200", "580.65.06")
    for problem in figures["problems"]:
        assert f"| {problem['problem']}, vector | 12 |" in printed
    # The same draw again, and the formula's times are the model's.
    (spec,) = kernels.specs_of("axpy")
    config = Config(dict(zip(first["columns"][3:], first["points"][0][3:], strict=True)))
    work = spec.work(config, spec.operation.problem("2^16"), DEVICE)
    assert first["points"][0][0] == pytest.approx(perfmodel.predict_us(work, DEVICE), rel=1e-3)


def test_the_readme_is_written_between_its_markers(tmp_path):
    points = [[1.0, 1.0, 2.0, 1], [2.0, 3.0, 4.0, 2], [3.0, 2.0, 20_000.0, 4]]
    figures = {
        "device": "NVIDIA H200", "driver": "580", "nvrtc": "13.0.88", "model": "model-2",
        "calibrated": True, "created": "2026-01-01T00:00:00+00:00",
        "problems": [{"problem": "axpy 1 fp32", "spec": "vector", "points": points}],
    }  # fmt: skip
    kept, readme = tmp_path / "figures.json", tmp_path / "README.md"
    correlation.write(kept, figures)
    assert json.loads(kept.read_text()) == figures
    readme.write_text(f"before\n{correlation.BEGIN}\nold\n{correlation.END}\nafter\n")
    words = ["--readme", "--out", str(kept), "--readme-file", str(readme)]
    for _ in range(2):
        assert correlation.main(words) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- correlation: begin -->\n| problem")
    assert text.endswith("<!-- correlation: end -->\nafter\n")
    assert "| axpy 1 fp32, vector | 3 | 1.000 | 0.500 | 2 us to 20 ms |" in text
    readme.write_text("no markers")
    with pytest.raises(SystemExit, match="needs one line"):
        correlation.main(words)


def test_the_readme_says_what_was_measured():
    """The table is that of the figures, and there is none without them."""
    text = correlation.README.read_text()
    if not correlation.FIGURES.exists():
        stands = text.partition(correlation.BEGIN)[2].partition(correlation.END)[0]
        assert "|" not in stands
        return
    figures = json.loads(correlation.FIGURES.read_text())
    assert correlation.block(figures) in text
    for problem in figures["problems"]:
        for level, aim in correlation.AIMS.items():
            assert correlation.correlations(problem)[level] >= aim

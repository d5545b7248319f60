# SPDX-License-Identifier: Apache-2.0
"""The GPU as an evaluator, with a worker that plays a GPU by a script: some configurations hang,
fault, are wrong or half-written, and the others get their times all the same."""

from __future__ import annotations

import json
import re

import pytest
import scripted
from scripted import DEVICE, FAULTY, PROBLEM, RIGHT, candidate

from tunegen import codegen
from tunegen.errors import DeviceError
from tunegen.model import LaunchPlan
from tunegen.runner import evaluator as module
from tunegen.runner.evaluator import RETIME_EVERY, GpuEvaluator, try_seconds
from tunegen.runner.quarantine import Fault, Quarantine, digest


@pytest.fixture(autouse=True)
def short_hangs(monkeypatch):
    monkeypatch.setattr(module, "TRY_FLOOR_SECONDS", 0.7)
    monkeypatch.setattr("tunegen.runner.station._PAUSE_SECONDS", 0.01)


@pytest.fixture
def judge(tmp_path):
    """Evaluators on scripted GPUs, with the problem prepared."""
    stations = []

    def make(script=None, **options):
        script = {"log": str(tmp_path / "log"), **(script or {})}
        card = scripted.station(script)
        stations.append(card)
        card.prepare(scripted.setup()(PROBLEM, inputs="normal", seed=0, sets=2), 60.0)
        options.setdefault("quarantine", quarantine(tmp_path))
        return GpuEvaluator(card, DEVICE, **options)

    yield make
    pids = {pid for pid, _ in scripted.logged(tmp_path / "log")}
    for card in stations:
        card.close()
    assert pids
    assert all(scripted.is_gone(pid) for pid in pids)


def quarantine(folder):
    def sources(kept):
        return codegen.render(kept.spec, kept.config, PROBLEM, DEVICE.arch)

    return Quarantine(folder / "quarantine", sources, lambda: {"temperature_c": 40})


def evaluate(judge, *numbers, **options):
    return judge.evaluate(candidate(*numbers, **options), PROBLEM)


# --- outcomes ------------------------------------------------------------------------------------


def test_what_the_broken_do_costs_the_others_nothing(judge):
    alone = judge()
    expected = {threads: evaluate(alone, threads).median_us for threads in RIGHT}
    together = judge()
    order = [(128, 0), (256, 1), (64, 0), (256, 2), (256, 0), (256, 3), (1024, 0), (256, 4),
             (32, 0), (256, 5), (512, 0)]  # fmt: skip
    outcomes = {pair: evaluate(together, *pair) for pair in order}
    kinds = {fault: outcomes[256, fault].kind for fault in range(1, 6)}
    assert kinds == {
        1: "timed_out", 2: "launch_failed", 3: "wrong_result", 4: "wrong_result", 5: "wrong_result"
    }  # fmt: skip
    times = {threads: outcomes[threads, 0].median_us for threads in RIGHT}
    assert times == pytest.approx(expected)
    assert together.spent.restarting > 0
    assert together.spent.lost >= 0.5
    assert together.spent.verifying == pytest.approx(0.01 * 9)
    assert together.spent.timing == pytest.approx(0.02 * 6)


def test_reasons_say_what_happened(judge):
    judge = judge()
    evaluate(judge, 128)
    assert "no answer within" in evaluate(judge, 256, 1).reason
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in evaluate(judge, 256, 2).reason
    assert "largest error 2.1 at 4153344" in evaluate(judge, 256, 3).reason
    assert "were not written" in evaluate(judge, 256, 4).reason


def test_a_refused_launch_costs_no_worker(judge, tmp_path):
    judge = judge({"refused": [64]})
    outcome = evaluate(judge, 64)
    assert outcome.kind == "launch_failed"
    assert outcome.reason == "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"
    assert evaluate(judge, 128).ok
    assert len({pid for pid, _ in scripted.logged(tmp_path / "log")}) == 1
    assert not (tmp_path / "quarantine").exists()


def test_a_worker_killed_by_somebody_else_is_no_fault_of_the_config(judge, tmp_path):
    judge = judge({"killed_once": str(tmp_path / "killed")})
    outcome = evaluate(judge, 128)
    assert (tmp_path / "killed").exists()
    assert outcome.kind == "measured"
    assert not (tmp_path / "quarantine").exists()


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_no_kernel_can_have_is_never_one(us, judge):
    judge = judge({"always_us": us})
    outcome = evaluate(judge, 128)
    assert outcome.kind == "launch_failed"
    assert "which is no time" in outcome.reason
    assert judge.best_us is None


def test_nothing_to_launch_is_not_timed(judge):
    judge = judge()
    empty = FAULTY.operation.problem("0")
    outcome = judge.evaluate(candidate(problem=empty), empty)
    assert outcome.kind == "rejected"
    assert "nothing to launch" in outcome.reason


def test_a_gpu_that_is_gone_is_raised():
    with scripted.station({"cannot_open": "CUDA_ERROR_NO_DEVICE"}) as card:
        judge = GpuEvaluator(card, DEVICE)
        with pytest.raises(DeviceError, match="CUDA_ERROR_NO_DEVICE"):
            evaluate(judge, 128)


# --- racing, limits and drift --------------------------------------------------------------------


def best_told(path):
    found = [re.search(r"best (\S+)", text) for _, text in scripted.logged(path)]
    return [None if m[1] == "None" else float(m[1]) for m in found if m]


def test_each_trial_is_told_the_best_so_far(judge, tmp_path):
    judge = judge()
    for threads in (256, 512, 128, 64):
        evaluate(judge, threads)
    assert best_told(tmp_path / "log") == [None, 356.0, 356.0, 228.0]
    assert judge.best_us == 164.0


def test_limits_follow_the_best_time():
    assert try_seconds(None, 100.0) == pytest.approx(module.FIRST_TRY_SECONDS + 0.1)
    assert try_seconds(None) > try_seconds(None, 100.0)
    assert try_seconds(2_700.0) == pytest.approx(0.7 + 2.7)
    assert try_seconds(1.0) < try_seconds(100.0) < try_seconds(10_000.0)


@pytest.mark.parametrize("change", [0.01, -0.005])
def test_drift_is_seen_and_said(change, judge):
    """The card becomes slower, or faster, by the same share with every trial."""
    judge = judge({"drift": change})
    us = [evaluate(judge, 64 if n == 0 else 128) for n in range(3 * RETIME_EVERY)]
    drifts = [outcome.measurement.details["drift"] for outcome in us]
    assert drifts[: RETIME_EVERY // 2] == [1.0] * (RETIME_EVERY // 2)
    steady = [o.median_us / o.measurement.details["drift"] for o in us[1:]]
    raw = [outcome.median_us for outcome in us[1:]]
    assert max(raw) / min(raw) > (1 + abs(change)) ** (2 * RETIME_EVERY)
    # Freed of drift, what is left is what gathers between two looks.
    assert max(steady) / min(steady) < (1 + abs(change)) ** (RETIME_EVERY + 2)
    assert judge.best_us == pytest.approx(164.0 * drifts[-1], rel=0.02)


# --- quarantine ----------------------------------------------------------------------------------


def test_what_hangs_or_faults_is_kept_whole(judge, tmp_path):
    judge = judge()
    evaluate(judge, 128)
    for fault, kind in ((1, "timed_out"), (2, "launch_failed")):
        broken = candidate(256, fault)
        outcome = judge.evaluate(broken, PROBLEM)
        plan = FAULTY.bound_plan(broken.config, PROBLEM, DEVICE)
        folder = tmp_path / "quarantine" / f"faulty-faults-{digest(broken, plan)}"
        assert f"kept in {folder}" in outcome.reason
        assert f"FAULT = {fault}," in (folder / "faulty.cu").read_text()
        assert (folder / "faulty.ptx").read_bytes() == broken.kernels[0].ptx
        assert (folder / "faulty.cubin").read_bytes() == broken.kernels[0].cubin
        case = json.loads((folder / "case.json").read_text())
        assert case["outcome"] == kind
        assert case["error"] in outcome.reason
        assert case["config"] == {"FAULT": fault, "THREADS": 256}
        assert case["problem"]["sizes"] == {"N": 4096}
        assert case["plan"]["launches"][0]["block"] == [256, 1, 1]
        assert case["telemetry"] == {"temperature_c": 40}
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def test_the_same_again_has_the_same_folder(tmp_path):
    kept = quarantine(tmp_path)
    plan = FAULTY.bound_plan(scripted.config(), PROBLEM, DEVICE)
    fault = Fault("timed_out", "no answer", True)
    words = {kept.put(candidate(), PROBLEM, plan, fault) for _ in range(2)}
    assert len(words) == 1
    assert kept.put(candidate(), PROBLEM, LaunchPlan(()), fault) not in words


def test_a_file_in_the_way_ends_nothing(judge, tmp_path):
    (tmp_path / "quarantine").write_text("in the way")
    judge = judge()
    outcome = evaluate(judge, 256, 2)
    assert outcome.kind == "launch_failed"
    assert "could not be kept" in outcome.reason
    assert evaluate(judge, 128).ok

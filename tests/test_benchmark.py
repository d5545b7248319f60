# SPDX-License-Identifier: Apache-2.0
"""bench, devices and calibrate: the journey on a GPU that is none, and what is printed of it."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from fake_gpu import DEVICE
from in_process import InProcess, NamingCompiler, gpu_with

from tunegen import calibration
from tunegen.cli.main import run
from tunegen.database import Database
from tunegen.errors import DeviceError, UsageError
from tunegen.model import Config, FoundGpus, GpuInfo
from tunegen.runner import timing
from tunegen.runner.process import Lost
from tunegen.runner.protocol import (
    Block,
    Enter,
    Entered,
    Failed,
    Open,
    Prepare,
    Timed,
    Transfer,
    Transferred,
)
from tunegen.runner.station import Station
from tunegen.session import benchmark
from tunegen.session.benchmark import bench, choices
from tunegen.session.cpu import CpuRun
from tunegen.session.resolve import request

GPU = GpuInfo(0, "fake", "GPU-fake", "sm_90", 256 << 20, 256 << 20)
FOUND = FoundGpus((GPU,), driver="580.65.06", driver_cuda="13.0")

TUNED_US, DEFAULT_US, NAIVE_US, VENDOR_US = 20.0, 40.0, 400.0, 25.0


class Machine:
    """What the fake machine is made of; tests change it before they ask."""

    def __init__(self):
        self.found = FOUND
        self.cpu = CpuRun((100.0, 110.0, 120.0), "fp32", "NumPy, 2 threads")
        self.transfer_us = {(True, False): 50.0, (True, True): 10.0,
                            (False, False): 60.0, (False, True): 12.0}  # fmt: skip
        self.errors = {}
        self.failures = {}
        self.vendor = True
        self.no_vendor = "torch is not installed"
        self.workers = []

    def intercept(self, asked):
        match asked:
            case Enter(name=name, executable=executable):
                if name in self.failures:
                    return self.failures[name]
                described = "cuBLAS" if executable is None else ""
                return Entered(self.errors.get(name, 1e-7), described)
            case Block(name=name, seconds=seconds):
                us = {"tuned": TUNED_US, "default": DEFAULT_US, "naive": NAIVE_US}.get(
                    name, VENDOR_US
                )
                state = self.workers[0].worker._monitor.read()
                return Timed((us * 0.99, us, us * 1.01), 3, seconds, state, state)
            case Transfer(to_device=to_device, pinned=pinned, repeats=repeats):
                us = self.transfer_us[to_device, pinned]
                if us is None:
                    return Failed("no pages to lock", False, "device")
                return Transferred(tuple(us + i for i in range(repeats)))
        return None

    def worker(self):
        self.workers.append(
            InProcess(gpu_with({}, memory_bytes=64 << 20), intercept=self.intercept)
        )
        return self.workers[-1]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    made = Machine()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tunegen.session.devices.find_gpus", lambda: made.found)
    monkeypatch.setattr("tunegen.session.gpu.compiler.nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(benchmark, "station", lambda gpu: Station(made.worker))

    def vendor(gpu):
        return (made.worker(), "") if made.vendor else (None, made.no_vendor)

    monkeypatch.setattr(benchmark, "vendor_worker", vendor)
    monkeypatch.setattr(benchmark, "run_on_cpu", lambda *arguments: made.cpu)
    names = NamingCompiler()
    for place in ("tunegen.session.benchmark", "tunegen.session.building"):
        monkeypatch.setattr(f"{place}.compiler.NvrtcCompiler", lambda *a, **k: names)

    def prepare(self, problem, *, inputs, seed, sets):
        scalars = dict(self.operation.scalars)
        return Prepare(self.operation.arrays(problem), scalars, seed, sets, checks=())

    monkeypatch.setattr(benchmark.ProblemSetup, "__call__", prepare)
    monkeypatch.setattr(timing, "_rest", lambda us: None)
    return made


@pytest.fixture(autouse=True)
def no_operands(monkeypatch):
    """Nothing is computed here, so nothing has to be allocated and filled."""
    from tunegen.runner import worker

    class Nothing:
        bytes = 0

        def close(self):
            pass

    class Nobody:
        def leave(self):
            pass

    monkeypatch.setattr(worker, "Operands", lambda gpu, asked: Nothing())
    monkeypatch.setattr(worker, "Contest", lambda gpu, monitor, operands: Nobody())


def one(name="matmul", problem="512x512x512", dtype="fp32", **options):
    (result,) = bench(name, [problem], dtype=dtype, **options)
    return result


def named(result):
    return {contender.name: contender for contender in result.contenders}


def test_each_step_of_the_journey_is_measured_apart(machine):
    result = one()
    assert [(m.direction, m.pinned) for m in result.moves] == [
        ("to device", False), ("to device", True), ("to host", False), ("to host", True),
    ]  # fmt: skip
    there, _, back, _ = result.moves
    assert there.bytes == 2 * 512 * 512 * 4
    assert back.bytes == 512 * 512 * 4
    assert there.us.median == pytest.approx(54.5)
    assert result.kernel_us == DEFAULT_US, "there is no record"
    assert result.journey_us(pinned=False) == pytest.approx(54.5 + DEFAULT_US + 64.5)
    assert result.journey_us(pinned=True) == pytest.approx(14.5 + DEFAULT_US + 16.5)
    assert result.policy == "burst"
    assert not any(worker.alive for worker in machine.workers)


def test_kernels_are_compared_with_naive_and_the_library(machine):
    found = named(one())
    assert list(found) == ["default", "naive", "vendor"]
    assert found["naive"].us.median == NAIVE_US
    assert found["vendor"].us.median == VENDOR_US
    assert found["vendor"].description == "cuBLAS"
    assert found["default"].relative_error == 1e-7


def test_in_place_operands_travel_both_ways(machine):
    result = one("axpy", "2^20")
    there, _, back, _ = result.moves
    assert (there.bytes, back.bytes) == (2 << 22, 1 << 22)
    assert list(named(result)) == ["default", "vendor"], "axpy has no naive kernel"


def test_what_only_comes_back_does_not_go_there(machine):
    there, pinned, back, _ = one("fill", "2^20").moves
    assert there.bytes == pinned.bytes == 0
    assert there.us.median == 0.0
    assert back.bytes == 1 << 22


def test_large_operands_are_told_at_the_rate_of_what_was_moved(machine):
    elements = 3 * benchmark.MOST_MOVED_BYTES // 4
    there = one("copy", (elements,)).moves[0]
    assert there.moved_bytes == benchmark.MOST_MOVED_BYTES
    assert there.bytes == 3 * benchmark.MOST_MOVED_BYTES
    assert there.us.median == pytest.approx(3 * 54.5)
    moved = [r.bytes for w in machine.workers for r in w.requests if isinstance(r, Transfer)]
    assert max(moved) == benchmark.MOST_MOVED_BYTES


def test_a_transfer_that_fails_costs_only_its_row(machine):
    machine.transfer_us[True, True] = None
    result = one()
    assert result.moves[1].us is None
    assert "no pages to lock" in result.moves[1].failure
    assert result.journey_us(pinned=True) is None
    assert result.journey_us(pinned=False) is not None


def test_a_wrong_result_has_no_time(machine):
    machine.errors["naive"] = 0.5
    naive = named(one())["naive"]
    assert naive.us is None
    assert naive.failure.startswith("wrong result: the relative RMS error is 0.5")
    machine.errors["naive"] = float("nan")
    assert named(one())["naive"].us is None


def test_a_kernel_that_fails_costs_only_its_row(machine):
    machine.failures["default"] = Failed("CUDA_ERROR_INVALID_VALUE", False, "kernel")
    result = one()
    assert result.kernel_us is None
    assert result.journey_us(pinned=True) is None
    assert named(result)["naive"].us is not None


def test_without_the_library_the_rest_is_measured(machine):
    machine.vendor = False
    result = one()
    assert "vendor" not in named(result)
    assert result.notes == ("no vendor's library: torch is not installed",)


def test_a_library_that_dies_is_a_row_that_says_so(machine):
    machine.failures["vendor"] = Lost("died", "worker 2: killed by SIGSEGV")
    vendor = named(one())["vendor"]
    assert vendor.us is None
    assert "SIGSEGV" in vendor.failure


def test_a_library_that_cannot_open_the_gpu_is_left_out(machine, monkeypatch):
    class Refusing(InProcess):
        def ask(self, asked, timeout_s):
            if isinstance(asked, Open):
                return Failed("torch sees no GPU", False, "device")
            return super().ask(asked, timeout_s)

    monkeypatch.setattr(benchmark, "vendor_worker", lambda gpu: (Refusing(gpu_with({})), ""))
    result = one()
    assert result.notes == ("no vendor's library: torch sees no GPU",)


def test_several_problems_are_measured_in_one_process(machine):
    results = list(bench("copy", ["2^10", "2^12"], vendor=False))
    assert [r.request.problem.N for r in results] == [1024, 4096]
    assert len(machine.workers) == 1


def test_floors_use_a_calibration_of_the_device(machine, tmp_path):
    from test_calibration import calibration_of

    before = one("copy", "2^20")
    assert not before.calibrated
    calibration.save(calibration_of(DEVICE, gbps=dict.fromkeys(("read", "add", "copy"), 50.0)))
    after = one("copy", "2^20")
    assert after.calibrated
    assert after.floor.ceilings == "calibration"
    assert after.floor.us > before.floor.us


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_budget_is_a_usage_error(machine, seconds):
    with pytest.raises(UsageError, match="is no budget"):
        one(seconds=seconds)


def test_bad_values_are_told_before_a_gpu_is_looked_for(machine):
    machine.found = FoundGpus(reason="no NVIDIA driver")
    for options in ({"dtype": "fp23"}, {"layout": "xx"}, {"spec": "simd"}):
        with pytest.raises(UsageError):
            one(**options)
    with pytest.raises(UsageError, match="writes nothing"):
        one("copy", "0")
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        one()


# --- what is compared ----------------------------------------------------------------------------


def wanted_for(name="matmul", problem="4096x4096x4096"):
    wanted = request(name, arch="sm_90", problem=problem, dtype="fp32")
    return dataclasses.replace(wanted, device=DEVICE)


class OneRecord:
    """A database that answers with one record."""

    def __init__(self, record, rung="exact"):
        self._match = dataclasses.make_dataclass("Match", ["record", "rung"])(record, rung)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(benchmark, "find", lambda database, wanted: database._match)
    fields = dataclasses.make_dataclass("Record", ["spec", "config", "evidence"])
    return lambda config, spec="simt": OneRecord(fields(spec, dict(config), "measured"))


def test_the_record_is_what_would_be_run(recorded):
    wanted = wanted_for()
    default = wanted.spec().default(wanted.problem, DEVICE)
    other = Config({**default, "RASTER_GROUP": 1})
    found = choices(wanted, recorded(other))
    assert [choice.name for choice in found] == ["tuned", "default", "naive"]
    assert found[0].config == other
    assert "measured record (exact)" in found[0].description


def test_the_same_configuration_is_timed_once(recorded):
    wanted = wanted_for()
    default = wanted.spec().default(wanted.problem, DEVICE)
    assert [c.name for c in choices(wanted, recorded(default))] == ["tuned", "naive"]


def test_a_record_of_another_size_is_fitted_to_this_one(recorded):
    wanted = wanted_for(problem="24x8x8")
    large = wanted_for()
    config = large.spec().default(large.problem, DEVICE)
    found = choices(wanted, recorded(config))
    space = wanted.spec().space(wanted.problem, DEVICE)
    assert not space.violated(found[0].config)


def test_without_a_record_the_default_comes_first(tmp_path):
    wanted = wanted_for("copy", "2^20")
    assert [c.name for c in choices(wanted, Database(tmp_path))] == ["default"]


# --- the command line ----------------------------------------------------------------------------


def command(capsys, *words):
    code = run(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_bench_prints_the_journey_and_who_wins(machine, capsys):
    code, out, err = command(capsys, "bench", "matmul", "--problem", "512x512x512")
    assert code == 0
    for step in ("to device, pageable", "to device, pinned", "to host, pageable",
                 "default", "naive", "vendor", "floor", "CPU"):  # fmt: skip
        assert step in out
    assert re.search(r"data on the device: 40 us, 2\.75 times as fast as the CPU", out)
    assert re.search(r"pageable memory: 159 us, the CPU wins, 1\.45 times as fast", out)
    assert "tunegen calibrate" in err


def test_bench_shows_where_the_cpu_wins(machine, capsys):
    machine.cpu = CpuRun((1.0,), "fp32", "NumPy, 1 thread")
    code, out, _ = command(capsys, "bench", "copy", "--problem", "2^4", "--json")
    assert code == 0
    (found,) = json.loads(out)["results"]
    assert found["cpu_wins"] == {"pageable": True, "pinned": True, "on_device": True}
    assert found["cpu"]["median_us"] == 1.0
    assert found["journey_us"]["pinned"] > found["journey_us"]["on_device"]


def test_bench_says_why_numpy_was_not_timed(machine, capsys):
    machine.cpu = CpuRun(refusal="it would take NumPy too long")
    code, out, _ = command(capsys, "bench", "matmul", "--problem", "512x512x512")
    assert code == 0
    assert "it would take NumPy too long" in out
    code, out, _ = command(capsys, "bench", "matmul", "--problem", "512x512x512", "--json")
    (found,) = json.loads(out)["results"]
    assert found["cpu_wins"] == {"pageable": None, "pinned": None, "on_device": None}


def test_bench_without_a_gpu_fails_in_one_line(machine, capsys):
    machine.found = FoundGpus(reason="no NVIDIA driver", hint="install one")
    code, out, err = command(capsys, "bench", "copy")
    assert (code, out) == (1, "")
    assert err == "tunegen: no NVIDIA driver (install one)\n"
    code, _, err = command(capsys, "bench", "copi")
    assert code == 2
    assert "did you mean copy?" in err


def test_devices_lists_what_is_there(machine, capsys):
    machine.found = dataclasses.replace(
        FOUND,
        devices=(GPU, dataclasses.replace(GPU, index=1, other_processes=3),
                 dataclasses.replace(GPU, index=2, mig=True, slices=("MIG-a", "MIG-b"))),
        hidden=1,
    )  # fmt: skip
    code, out, err = command(capsys, "devices")
    assert code == 0
    assert "nobody" in out
    assert "3 processes" in out
    assert "MIG, 2 slices" in out
    assert "tunegen calibrate" in out
    assert "580.65.06" in out
    assert "hides 1 more" in err
    code, out, _ = command(capsys, "devices", "--json")
    found = json.loads(out)
    assert [d["other_processes"] for d in found["devices"]] == [0, 3, 0]
    assert found["devices"][0]["calibrated"] is None
    assert found["driver"] == "580.65.06"


def test_no_devices_are_no_error(machine, capsys):
    machine.found = FoundGpus(reason="no NVIDIA driver", hint="install one")
    code, out, err = command(capsys, "devices")
    assert (code, out) == (0, "")
    assert err == "no NVIDIA driver (install one)\n"
    code, out, _ = command(capsys, "devices", "--json")
    assert code == 0
    assert json.loads(out)["devices"] == []


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    from test_calibration import H200, calibration_of

    from tunegen import session

    found = calibration_of(H200, sm_clock_mhz=(1755, 1980), throttle=("power cap",))
    result = session.CalibrationResult(
        found, H200, tmp_path / "h200.json", session.calibrating.lines(found, H200),
        ("bf16_packed: refused",), 12.0,
    )  # fmt: skip
    asked = {}
    monkeypatch.setattr(session, "calibrate", lambda **options: asked.update(options) or result)
    return result, asked


def test_calibrate_prints_figures_spread_and_share(calibrated, capsys):
    result, asked = calibrated
    code, out, err = command(capsys, "calibrate", "--device", "1", "--shared")
    assert code == 0
    assert (asked["device"], asked["shared"]) == (1, True)
    copy = next(line for line in result.lines if line.name == "device memory, copy")
    assert f"{copy.of_datasheet:.1%}" in out
    assert f"{copy.figure.spread:.1%}" in out
    assert str(result.path) in out
    assert "power cap" in out
    assert f"{2**30:,}" in out, "the curve"
    assert "not measured: bf16_packed: refused" in err


def test_calibrate_prints_one_document(calibrated, capsys):
    code, out, _ = command(capsys, "calibrate", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["calibration"]["launch_us"]["median"] == 1.5
    assert {line["name"] for line in found["figures"]} >= {"launch", "device memory, read"}


def test_calibrate_without_a_gpu_fails_in_one_line(machine, capsys):
    machine.found = FoundGpus(reason="no NVIDIA driver", hint="install one")
    code, out, err = command(capsys, "calibrate")
    assert (code, out) == (1, "")
    assert err == "tunegen: no NVIDIA driver (install one)\n"

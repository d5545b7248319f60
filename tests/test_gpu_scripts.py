# SPDX-License-Identifier: Apache-2.0
"""The scripts about shipped records (tests/gpu): on scripted GPUs from the first tune to the table
in the README, and once with real workers and real kernels."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import scripted
from test_whole_tune import tune as emulated_tune  # noqa: F401 (a fixture)

from tunegen import calibration, compiler, disasm, session
from tunegen.database import Database
from tunegen.device import find_gpus
from tunegen.errors import UsageError
from tunegen.model import Calibration, DeviceIdentity, Figure, FoundGpus, GpuInfo, StreamPoint
from tunegen.perfmodel import default_chip
from tunegen.runner.ratios import Estimate
from tunegen.session import gpu

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).parent / "gpu"
ROOT = SCRIPTS.parents[1]
H200 = GpuInfo(0, "NVIDIA H200", "GPU-1", "sm_90", 150 << 30, 149 << 30)
DEVICE = default_chip("sm_90")

# What they change for themselves is not for the other tests.
with pytest.MonkeyPatch.context() as undo:
    undo.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    undo.syspath_prepend(SCRIPTS)
    import readme_table
    import records
    import verify_records

THREADS = range(32, 1025, 32)
COPY = "copy fp32 2\\^20$"
MATMUL = "matmul fp32 nt 1000"


class TellingCompiler(scripted.FakeCompiler):
    """Compiles nothing; the scripted GPU reads the source."""

    nvrtc = "13.0"

    def __init__(self, cache=None, lineinfo=False):
        pass

    def compile(self, source, target):
        made = super().compile(source, target)
        cubin = f"{source.digest} by {self.nvrtc}".encode()
        return dataclasses.replace(made, nvrtc=self.nvrtc, cubin=cubin)


def exact(value):
    return Figure(value, value, value, 1)


CALIBRATION = Calibration(
    arch="sm_90",
    device=DeviceIdentity.of(DEVICE),
    streams={"copy": (StreamPoint(1 << 23, exact(10.0)), StreamPoint(1 << 31, exact(500.0)))},
    l2_read_gbps=None,
    shared_read_gbps=None,
    peak_tflops={"fp32": exact(60.0)},
    launch_us=exact(2.0),
    dependent_launch_us=exact(1.0),
    policy="burst",
    driver="580.65.06",
    nvrtc="13.0",
    tunegen="0.1.0",
    created="2026-01-01T00:00:00+00:00",
)


@pytest.fixture
def machine(tmp_path, tmp_path_factory, monkeypatch, capsys):
    """A machine with a scripted GPU, whose script can be changed, calibrated at once."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(compiler, "NvrtcCompiler", TellingCompiler)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(disasm, "code_digest", lambda cubin: hashlib.sha256(cubin[:8]).hexdigest())
    for place in ("tunegen.session.gpu.find_gpus", "tunegen.session.devices.find_gpus"):
        monkeypatch.setattr(place, lambda: FoundGpus((H200,), driver="580.65.06"))
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, find=importlib.util.find_spec: find("json" if name == "torch" else name),
    )  # fmt: skip
    monkeypatch.setattr(records, "_COLD_S", 0.0)
    # What is shipped changes with every release.
    monkeypatch.setattr(records._tree, "TUNED_DB", tmp_path / "shipped")
    calibrations = []

    def calibrate(device):
        calibrations.append(device)
        path = calibration.save(CALIBRATION)
        return session.CalibrationResult(CALIBRATION, DEVICE, path, (), (), 1.0)

    monkeypatch.setattr(session, "calibrate", calibrate)
    script = {
        "log": str(tmp_path / "log"), "noise": 0.002, "vendor": {"us": 45.0},
        "us": {str(threads): 40.0 + threads / 64 for threads in THREADS},
    }  # fmt: skip

    class Machine:
        folder = tmp_path
        db = tmp_path / "db"
        calibrated = calibrations

        def set(self, **changes):
            monkeypatch.setattr(gpu, "COMMAND", scripted.command({**script, **changes}))

        def tune(self, *words):
            return records.main(["--db", str(self.db), "--trials", "2", *words])

        def have(self, pattern):
            """The records of a tune; made once, since every test here begins with them."""
            kept = tmp_path_factory.getbasetemp() / f"records-{zlib.crc32(pattern.encode())}"
            if not kept.exists():
                assert self.tune("--only", pattern) == 0
                shutil.copytree(self.db, kept)
            else:
                shutil.copytree(kept, self.db)
            capsys.readouterr()

        def verify(self, *words):
            seconds = ("--seconds-each", "0.3")
            return verify_records.main(["--db", str(self.db), *seconds, *words])

        def logged(self, text):
            log = tmp_path / "log"
            lines = scripted.logged(log) if log.exists() else []
            return [pid for pid, found in lines if found.startswith(text)]

        def edited(self, **changes):
            """The only record, with other fields."""
            (path,) = self.db.glob("sm_90/*.json")
            content = json.loads(path.read_text())
            (record,) = content["records"]
            record |= changes
            path.write_text(json.dumps(content))

    made = Machine()
    made.set()
    return made


# --- records.py ----------------------------------------------------------------------------------


def test_the_list_is_what_is_shipped():
    titles = [case.title for case in records.cases()]
    assert len(titles) == len(set(titles)) == 10 + 1 + 3 * 2 * 4
    assert {"matmul fp32 nt 64x4096x4096", "matmul fp64 nn 2048x2048x2048"} <= set(titles)
    assert {"copy bf16 2^28", "axpy fp32 2^24+1", "add fp32 2^20"} <= set(titles)


def test_tunes_go_on_where_they_ended(machine, capsys):
    assert machine.tune("--only", COPY, "--out", str(machine.folder / "out")) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("copy fp32 2^20 "))
    assert "vendor 1." in line
    assert "2 trials, 2 compiled, 0 cached" in line
    assert "1 tuned, 0 failed, 0 left" in out
    ((_, record),) = Database(machine.db).records()
    assert record.baseline_ratio == pytest.approx(45 / record.measurement.median_us, rel=0.02)
    assert record.command.startswith("tunegen tune copy --arch sm_90 --problem 1048576 ")
    for word in ("--trials 2", "--evaluator gpu", "--finals-seconds 6", "--seconds 26"):
        assert word in record.command
    (details,) = json.loads((machine.folder / "out" / "records.json").read_text())
    assert details["record"]["config"] == record.config
    # Calibrated once, and the calibration is beside the records.
    assert machine.calibrated == [0]
    assert calibration.find(DEVICE, machine.db / "calibration") == CALIBRATION
    tried = len(machine.logged("trying"))
    assert machine.tune("--only", "copy fp32 2.20$") == 0
    assert "1 stand, 0 to tune" in capsys.readouterr().out
    assert (len(machine.logged("trying")), machine.calibrated) == (tried, [0])
    assert machine.tune("--only", COPY, "--again") == 0
    assert len(machine.logged("trying")) > tried
    # Elsewhere the calibration that is beside the records will do.
    for path in (machine.folder / "data").glob("tunegen/calibration/*"):
        path.unlink()
    assert machine.tune("--only", COPY) == 0
    assert (machine.calibrated, calibration.find(DEVICE)) == ([0], CALIBRATION)


def test_nothing_begins_that_might_not_end(machine, capsys):
    assert machine.tune("--only", COPY, "--budget", "39") == 0
    out = capsys.readouterr().out
    assert "stopped after 0 s" in out
    assert "0 tuned, 0 failed, 1 left" in out
    assert not machine.db.joinpath("sm_90").exists()


def test_a_failure_does_not_keep_the_others(machine, capsys, monkeypatch):
    real = session.tune

    def tune(name, **options):
        if options["dtype"] == "fp32":
            raise KeyError("a fault of its own")
        return real(name, **options)

    monkeypatch.setattr(session, "tune", tune)
    assert machine.tune("--only", "copy .* 2.20$") == 1
    out = capsys.readouterr().out
    assert "a fault of its own" in out
    assert "1 tuned, 1 failed, 0 left" in out
    assert [r.problem.dtype for _, r in Database(machine.db).records()] == ["bf16"]


def test_what_has_ended_is_waited_for(machine, monkeypatch):
    busy = dataclasses.replace(H200, other_processes=1)
    found = [busy, busy, H200]
    monkeypatch.setattr(
        "tunegen.session.devices.find_gpus", lambda: FoundGpus((found.pop(0),), driver="580")
    )
    records.wait_until_alone(0)
    assert found == []


def test_what_hangs_is_given_up(machine, capsys, monkeypatch):
    monkeypatch.setattr(session, "tune", lambda name, **options: time.sleep(60))
    started = time.monotonic()
    assert machine.tune("--only", COPY, "--seconds-each", "0.2") == 1
    assert time.monotonic() - started < 20
    assert "it took more than 0.4 s" in capsys.readouterr().out
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_below_the_floor_is_a_fault(machine, capsys):
    machine.set(us={str(threads): 1.0 for threads in THREADS})
    assert machine.tune("--only", COPY) == 1
    assert "is below the floor" in capsys.readouterr().out


def test_without_a_gpu_it_is_one_line(machine, capsys, monkeypatch):
    monkeypatch.setattr("tunegen.session.devices.find_gpus", lambda: FoundGpus(reason="no driver"))
    for run in (machine.tune, machine.verify):
        assert run() == 1
        assert capsys.readouterr().out.startswith("error: no driver")


# --- verify_records.py ---------------------------------------------------------------------------


def rows(out):
    """The lines of the table that begin with an operation."""
    return [line.split() for line in out.splitlines() if line.startswith(("copy ", "axpy "))]


def test_records_that_hold(machine, capsys):
    machine.have(f"{COPY}|axpy bf16 2.24.1")
    before = len(machine.logged("Open"))
    assert machine.verify("--out", str(machine.folder / "out")) == 0
    out = capsys.readouterr().out
    assert "2 records: 2 right, 0 stale, 0 failed" in out
    axpy, copy = rows(out)
    assert (copy[1], copy[2], axpy[1], axpy[2]) == ("2^20", "fp32", "2^24+1", "bf16")
    assert copy[-4:-1] == ["yes", "yes", "burst"]
    details = json.loads((machine.folder / "out" / "verify_records.json").read_text())
    assert details[0]["found"]["ratio"]["median"] == pytest.approx(
        details[0]["recorded_ratio"], rel=0.02
    )
    # One worker and one process with the library for both.
    assert len(machine.logged("Open")) - before == 2
    # The edge problems of the operation were computed, exactly.
    assert len(machine.logged("verifying {'THREADS'")) > 2
    assert all(scripted.is_gone(pid) for pid in machine.logged(""))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vendor": {"us": 40.0}}, "a library takes 0."),
        ({"unsteady": [*THREADS]}, "differs from run to run"),
        ({"wrong_at_edges": [*THREADS], "shape": [1 << 20]}, "largest error 1.5"),
        ({"vendor": None, "scale": 1.2}, "us were recorded"),
        ({"came": [17]}, "others used the card meanwhile"),
        ({"refused": [*THREADS]}, "CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_record_that_does_not_hold(machine, capsys, change, text):
    machine.have(COPY)
    machine.set(**change)
    capsys.readouterr()
    assert machine.verify() == 1
    out = capsys.readouterr().out
    (fault,) = (line for line in out.splitlines() if line.startswith("copy fp32 2^20: "))
    assert text in fault
    assert "1 failed" in out
    assert rows(out)[0][-1] == "FAILED"


def test_long_calls_are_timed_in_sustained_blocks(machine, capsys):
    machine.set(scale=10.0, vendor={"us": 450.0})
    machine.tune("--only", COPY)
    capsys.readouterr()
    before = len(machine.logged("block ours sustained"))
    assert machine.verify("--seconds-each", "1.2") == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[-2] == "sustained"
    assert len(machine.logged("block ours sustained")) - before == 2
    machine.set(scale=11.0, vendor={"us": 450.0})
    assert machine.verify("--seconds-each", "1.2") == 1


def test_no_library_is_said_and_times_are_compared(machine, capsys):
    machine.have(COPY)
    machine.set(vendor=None)
    capsys.readouterr()
    assert machine.verify() == 0
    assert "no vendor's library: torch is not there" in capsys.readouterr().out


def test_a_stale_record_is_not_run(machine, capsys):
    machine.have(COPY)
    ((_, record),) = Database(machine.db).records()
    image = dataclasses.asdict(record.images[0])
    machine.edited(images=[{**image, "source_digest": "0" * 64}])
    capsys.readouterr()
    before = len(machine.logged("verifying"))
    assert machine.verify() == 1
    out = capsys.readouterr().out
    assert "0 right, 1 stale, 1 failed" in out
    assert "the template has changed since" in out
    assert len(machine.logged("verifying")) == before


def test_other_machine_code_of_the_same_compiler_is_a_fault(machine, capsys, monkeypatch):
    machine.have(COPY)
    monkeypatch.setattr(disasm, "code_digest", lambda cubin: "")
    image = dataclasses.asdict(next(Database(machine.db).records())[1].images[0])
    machine.edited(images=[{**image, "cubin_sha256": "0" * 64}])
    assert machine.verify() == 1
    assert "NVRTC 13.0 makes other code of it" in capsys.readouterr().out
    monkeypatch.setattr(TellingCompiler, "nvrtc", "13.1")
    assert machine.verify() == 0
    assert rows(capsys.readouterr().out)[-1][-3] == "no"


def test_only_records_of_this_device_are_checked(machine, capsys):
    machine.have(COPY)
    ((_, record),) = Database(machine.db).records()
    machine.edited(device={**dataclasses.asdict(record.device), "l2_bytes": 1 << 20})
    capsys.readouterr()
    assert machine.verify() == 1
    assert "0 of 1 measured records" in capsys.readouterr().out


def test_how_much_slower_is_too_slow(machine):
    machine.have(COPY)
    ((_, record),) = Database(machine.db).records()
    record = dataclasses.replace(record, baseline="cuBLAS", baseline_ratio=1.0)
    us = Estimate(*(f * record.measurement.median_us for f in (2.0, 1.9, 2.1)))
    slow, close = Estimate(0.9, 0.89, 0.94), Estimate(0.9, 0.89, 0.96)
    assert verify_records.slower(record, us, slow, "cuBLAS")
    assert not verify_records.slower(record, us, close, "cuBLAS"), "clocks are the same for both"
    assert verify_records.slower(record, us, close, "another one")
    assert verify_records.slower(record, us, None, "")
    same = Estimate(*(f * record.measurement.median_us for f in (1.05, 1.04, 1.06)))
    assert not verify_records.slower(record, same, slow, "another one")


# --- readme_table.py -----------------------------------------------------------------------------

FRAME = "before\n\n<!-- records: begin -->\nold\n<!-- records: end -->\n\nafter\n"


def test_the_readmes_table_is_what_the_database_says(capsys):
    assert readme_table.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_of_nothing(tmp_path):
    assert readme_table.table(tmp_path) == ""
    assert readme_table.replaced(FRAME, "") == FRAME.replace("old\n", "")


def test_the_table(machine, tmp_path, capsys):
    machine.have(f"{COPY}|{MATMUL}")
    readme = tmp_path / "README.md"
    readme.write_text(FRAME)
    words = ["--db", str(machine.db), "--readme", str(readme)]
    assert readme_table.main([*words, "--check"]) == 1
    assert readme.read_text() == FRAME
    assert readme_table.main(words) == 0
    text = readme.read_text()
    assert text.startswith("before\n\n<!-- records: begin -->\nNVIDIA H200 (sm_90), driver 580.")
    assert text.endswith("\n<!-- records: end -->\n\nafter\n")
    assert readme_table.main([*words, "--check"]) == 0
    assert "by this card's calibration" in text
    assert "The library: a library (matmul, copy)." in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "aligned"
    header, rule, matmul, copy = ([c.strip() for c in line.split("|")[1:-1]] for line in lines)
    assert [rule[header.index(name)][-1] for name in ("time, us", "ratio", "policy")] == [*"::-"]
    found = dict(zip(header, copy, strict=True))
    record = next(r for _, r in Database(machine.db).records() if r.operation == "copy")
    us = record.measurement.median_us
    assert float(found["time, us"]) == pytest.approx(us, rel=1e-3)
    assert found["rate"] == f"{2 * 4 * 2**20 / us / 1e3:.0f} GB/s"
    # The calibration copied 8 MiB in 10 us.
    assert float(found["floor"]) == pytest.approx(10 / us, abs=0.006)
    assert (found["bound by"], found["policy"], found["problem"]) == ("memory", "burst", "2^20")
    assert float(found["ratio"]) == pytest.approx(record.baseline_ratio, abs=0.001)
    found = dict(zip(header, matmul, strict=True))
    assert found["layout"] == "nt"
    assert found["rate"].endswith(" TFLOP/s")


def test_without_a_calibration_the_datasheet_must_do(machine):
    machine.have(COPY)
    for path in (machine.db / "calibration").iterdir():
        path.unlink()
    assert "by the datasheet" in readme_table.table(machine.db)


def test_what_does_not_answer_is_not_shown(machine):
    machine.have(COPY)
    ((_, record),) = Database(machine.db).records()
    image = dataclasses.asdict(record.images[0])
    machine.edited(images=[{**image, "source_digest": "0" * 64}])
    assert readme_table.table(machine.db) == ""


@pytest.mark.parametrize("text", ["", FRAME + FRAME, FRAME.replace("begin", "END")])
def test_a_readme_without_its_marks(tmp_path, capsys, text):
    with pytest.raises(UsageError, match="has not one"):
        readme_table.replaced(text, "")
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert readme_table.main(["--readme", str(readme)]) == 1
    assert readme.read_text() == text


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["records", "verify_records", "readme_table"])
def test_they_run_from_anywhere_and_are_no_tests(name, tmp_path):
    """Not installed, from another folder: only what stands beside them is used."""
    script = SCRIPTS / f"{name}.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not script.match("test_*.py")
    assert not script.match("*_test.py")


@pytest.mark.skipif(bool(find_gpus().devices), reason="there is a GPU here")
def test_they_say_that_there_is_no_gpu(capsys, tmp_path):
    assert records.main(["--db", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.emulator
@pytest.mark.nvrtc
def test_a_record_of_real_workers_and_kernels(emulated_tune, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tunegen.session.devices.find_gpus", gpu.find_gpus)
    db = tmp_path / "db"
    words = ("--problem", "1031", "--dtype", "bf16", "--trials", 1, "--finals-seconds", 1)
    code, _, err = emulated_tune("tune", "axpy", *words, "--db", db)
    assert code == 0, err
    # Times on the CPU say nothing: whether it is right is what counts here.
    monkeypatch.setattr(verify_records, "slower", lambda *given: [])
    assert verify_records.main(["--db", str(db), "--seconds-each", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "1 records: 1 right, 0 stale, 0 failed" in out
    assert "no vendor's library: torch" in out

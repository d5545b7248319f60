# SPDX-License-Identifier: Apache-2.0
"""The scripts about the list of matrix products (tests/gpu): records and the contest on scripted
GPUs, cublasLt's calls on a library that computes in NumPy, verdicts, and the README's table."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_twins
import numpy as np
import pytest
import scripted
from fake_gpu import FakeGpu, FakeMonitor
from fake_torch import FakeTorch
from problems import CHECKS
from test_gpu_scripts import H200, machine  # noqa: F401 (a fixture)

from tunegen import kernels
from tunegen.database import Database
from tunegen.errors import DeviceError, UsageError
from tunegen.kernels.references import REFERENCES
from tunegen.model import FoundGpus
from tunegen.perfmodel import default_chip
from tunegen.runner import contest
from tunegen.runner.process import Worker as Process
from tunegen.runner.protocol import Block, Enter, Entered, Failed, Open, Prepare, Prepared, Timed
from tunegen.runner.worker import Worker

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).parent / "gpu"

# What they change for themselves is not for the other tests.
with pytest.MonkeyPatch.context() as undo:
    undo.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    undo.syspath_prepend(SCRIPTS)
    import _rival_cublaslt
    import _rival_triton
    import _rivals
    import _shapes
    import readme_table
    import shape_contest
    import shape_records

MATMUL = kernels.operation("matmul")


# --- the list ------------------------------------------------------------------------------------


def test_the_list_is_done_by_what_matters_most():
    names = [shape.name for shape in _shapes.wanted()]
    assert len(names) == 28
    assert names[:2] == ["P1", "P2"]
    assert {shape.group for shape in _shapes.wanted()} == set(_shapes.GROUPS)
    assert [shape.key for shape in _shapes.wanted(groups=["odd", "skinny"])][-2:] == [
        "K1 bf16 nt", "K3 bf16 nt",
    ]  # fmt: skip
    assert {s.name for s in _shapes.wanted(layout="tn")} == set(_shapes.OTHER_LAYOUTS)
    assert [s.key for s in _shapes.wanted(only=["B3"], dtype="fp16")] == ["B3 fp16 nt"]
    with pytest.raises(UsageError, match="no shape S9: there are S1"):
        _shapes.wanted(only=["S9"])
    with pytest.raises(UsageError, match="no group squares"):
        _shapes.wanted(groups=["squares"])


def test_every_goal_is_about_shapes_of_the_list():
    listed = {shape.name for shape in _shapes.wanted()}
    assert {name for goal in _shapes.GOALS for name in goal.shapes} == listed


# --- verdicts ------------------------------------------------------------------------------------


def row(name, *, median=1.5, low=None, high=None, lt=1.3, error=1.0, dtype="bf16", layout="nt"):
    shape = _shapes.wanted(only=[name], dtype=dtype, layout=layout)[0]
    ratio = {"median": median, "low": low or median - 0.01, "high": high or median + 0.01}
    rivals = {
        "vendor": {"ratio": ratio, "description": "cuBLAS 13", "failure": ""},
        "cublaslt": {"ratio": {"median": lt, "low": lt, "high": lt}, "failure": ""},
        "triton": {"ratio": None, "failure": "Triton is not installed"},
    }
    return shape.key, {
        "name": name, "group": shape.group, "sizes": dict(shape.problem.sizes), "dtype": dtype,
        "layout": layout, "spec": "wgmma", "config": {},
        "us": {"median": 10.0, "low": 9, "high": 11},
        "flops": MATMUL.flops(shape.problem), "floor_us": 8.0, "bound": "compute",
        "relative_error": 1e-3, "error_ratio": error, "rivals": rivals,
    }  # fmt: skip


def judged(rows, text):
    (found,) = (verdict for verdict in _shapes.verdicts(dict(rows)) if text in verdict.text)
    return found


def all_rows(**changed):
    names = [shape.name for shape in _shapes.wanted()]
    return [row(name, **{"median": 4.5 if name == "O2" else 2.5, **changed}) for name in names]


def test_everything_holds():
    verdicts = list(_shapes.verdicts(dict(all_rows())))
    assert [verdict.passed for verdict in verdicts] == [True] * (len(_shapes.GOALS) + 1)
    assert str(verdicts[0]).startswith("PASS bf16 nt S4 S5 ")


@pytest.mark.parametrize(
    ("name", "change", "text", "passed"),
    [
        ("K1", {"median": 0.99, "high": 1.01}, "K1 K3", True),
        ("K1", {"median": 0.984, "high": 1.01}, "K1 is slower", False),
        ("K1", {"median": 0.99, "high": 0.999}, "K1 is slower", False),
        ("O2", {"median": 3.9}, "O2 3.900 < 4", False),
        ("O1", {"median": 0.9, "high": 0.91}, "O1 O2 O4 O5", True),
        ("S4", {"error": 1.06}, "above: S4 bf16 nt 1.060", False),
        ("S4", {"error": None}, "not known: S4 bf16 nt", None),
    ],
)
def test_what_does_not_hold(name, change, text, passed):
    rows = dict(all_rows()) | dict([row(name, **{"median": 2.5, **change})])
    assert judged(rows.items(), text).passed is passed


def test_the_least_geometric_mean():
    low = [row(name, median=1.07) for name in ("K1", "K3")]
    assert judged(low, "K1 K3").passed is False
    assert judged([row("K1", median=1.2)], "not measured: K3").passed is None
    slow = all_rows(lt=1.13)
    assert judged(slow, "all against the best of cublasLt").passed is False


def test_fp16_and_other_layouts_have_their_margins():
    half = [row(name, median=1.06, dtype="fp16") for name in ("K1", "K3")]
    assert judged(half, "fp16 nt K1 K3").passed is True
    nt = [row(name, median=1.5) for name in _shapes.OTHER_LAYOUTS]
    nn = [row(name, median=1.46, layout="nn") for name in _shapes.OTHER_LAYOUTS]
    assert judged(nt + nn, "bf16 nn over nt").passed is True
    nn[0] = row("S4", median=1.45, layout="nn")
    assert judged(nt + nn, "bf16 nn over nt").passed is False
    assert judged(nt + nn[1:], "bf16 nn over nt").passed is None


# --- cublasLt ------------------------------------------------------------------------------------


class FakeLt:
    """As much of cublasLt as is called, in column-major NumPy over the fake GPU's memory. It
    offers three algorithms, the second one of which cannot be launched."""

    def __init__(self, gpu):
        self.gpu, self.described, self.destroyed, self.asked = gpu, {}, 0, []

    def __getattr__(self, name):
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        if name.endswith("Create"):
            return self._create
        if name.endswith("Destroy"):
            return self._destroy
        return {"SetAttribute": self._set}[name[-12:]]

    cublasLtGetVersion = staticmethod(lambda: 130100)
    cublasLtGetStatusString = staticmethod(lambda status: b"not supported")

    def _create(self, made, *arguments):
        made._obj.value = len(self.described) + 1
        self.described[made._obj.value] = [arguments, {}]
        return 0

    def _destroy(self, made):
        self.destroyed += 1
        return 0

    def _set(self, made, attribute, value, size):
        assert size == ctypes.sizeof(value._obj)
        self.described[made.value][1][attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, product, a, b, c, d, preference, asked, offers, count
    ):
        self.asked.append(self.described[preference.value][1])
        for number in range(min(asked, 3)):
            offers[number].algorithm.data[0] = number
        count._obj.value = 3
        return 0

    def cublasLtMatmul(
        self, handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
        algorithm, workspace, workspace_bytes, stream,
    ):  # fmt: skip
        assert (alpha._obj.value, beta._obj.value, c) == (1.0, 0.0, d)
        assert len(self.gpu.memory.view(workspace, workspace_bytes)) == 64 << 20
        if algorithm._obj.data[0] == 1:
            return 15
        transposed = self.described[product.value][1]
        left = self._matrices(a, a_layout, transposed[3])
        right = self._matrices(b, b_layout, transposed[4])
        out, dtype = self._view(d, d_layout)

        def act():
            product = check_twins.load(left[0], left[1]) @ check_twins.load(right[0], right[1])
            assert product.shape == out.shape
            out[...] = check_twins.store(product, dtype)

        self.gpu._do(20.0 + float(algorithm._obj.data[0]), act)
        return 0

    def _view(self, address, layout):
        (kind, rows, columns, leading), more = self.described[layout.value]
        batch, stride = more.get(5, 1), more.get(6, 0)
        dtype, item = {2: ("fp16", np.float16), 14: ("bf16", np.uint16)}[kind]
        extent = (batch - 1) * stride + (columns - 1) * leading + rows
        flat = self.gpu.memory.view(address, extent, item)
        strides = (stride * 2, 2, leading * 2)
        return np.lib.stride_tricks.as_strided(flat, (batch, rows, columns), strides), dtype

    def _matrices(self, address, layout, transposed):
        values, dtype = self._view(address, layout)
        return (values.swapaxes(1, 2) if transposed else values), dtype


class RivalWorker:
    """A worker as _rivals.py starts it, with a problem prepared."""

    def __init__(self, monkeypatch, sizes, **options):
        problem = REFERENCES["matmul"].operation.problem(sizes, **options)
        self.problem = problem
        self.gpu = FakeGpu(check_twins.kernels(), memory_bytes=1 << 30)
        self.lt = FakeLt(self.gpu)
        monkeypatch.setitem(sys.modules, "torch", FakeTorch(self.gpu))
        monkeypatch.setattr(_rival_cublaslt, "load", lambda: self.lt)
        monkeypatch.setattr(contest, "VendorCall", _rivals.Rivals())
        self.worker = Worker(lambda index: (self.gpu, FakeMonitor(self.gpu)))
        self.worker.handle(Open(0))
        self.prepare()

    def prepare(self):
        operation, problem = REFERENCES["matmul"].operation, self.problem
        arrays = operation.arrays(problem)
        random = np.random.default_rng(0)
        given = {
            array.name: check_twins.store(random.integers(-3, 4, array.shape), array.dtype)
            for array in arrays
            if array.role != "out"
        }
        wide = {n: check_twins.load(v, problem.dtype) for n, v in given.items()}
        scalars = dict(operation.scalars)
        expected = operation.reference(problem, wide, scalars)
        request = Prepare(
            arrays=arrays, scalars=scalars, seed=1, sets=3, checks=CHECKS, given=given,
            expected=expected,
        )  # fmt: skip
        assert isinstance(self.worker.handle(request), Prepared)

    def enter(self, rival):
        return self.worker.handle(Enter("x", None, rival, self.problem.layout))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_cublaslt_gets_the_right_operands(monkeypatch, layout, dtype):
    for sizes in ("5x7x3", "1x8x16", "2x5x4x6"):
        rivals = RivalWorker(monkeypatch, sizes, dtype=dtype, layout=layout)
        entered = rivals.enter("cublaslt 0")
        assert isinstance(entered, Entered), entered
        assert entered.relative_error == 0
        assert entered.description == "cublasLt 13.1.0, algorithm 1 of 3"
        assert rivals.lt.asked == [{1: 64 << 20, 5: 256, 6: 256, 7: 256, 8: 256}]
        assert rivals.enter("matmul").description.startswith("cuBLAS")


def test_cublaslts_algorithms_are_timed_as_any_contender(monkeypatch):
    rivals = RivalWorker(monkeypatch, "64x64x64", dtype="bf16", layout="nt")
    assert isinstance(rivals.enter("cublaslt 2"), Entered)
    timed = rivals.worker.handle(Block("x", "burst", 0.01))
    assert isinstance(timed, Timed)
    assert set(timed.samples_us) == {22.0}
    assert rivals.gpu.graphs
    for rival, text in (("1", "not supported (15)"), ("3", "cublasLt offers 3 algorithms")):
        answer = rivals.enter(f"cublaslt {rival}")
        assert isinstance(answer, Failed)
        assert text in answer.reason
        assert not answer.sticky
    assert len(rivals.lt.asked) == 1, "once for a problem"
    rivals.prepare()
    assert isinstance(rivals.enter("cublaslt 0"), Entered)
    assert len(rivals.lt.asked) == 2


def test_what_cublaslt_is_not_asked_for(monkeypatch):
    rivals = RivalWorker(monkeypatch, "8x8x8", dtype="fp64", layout="nn")
    assert "no product of fp64" in rivals.enter("cublaslt 0").reason
    rivals = RivalWorker(monkeypatch, "8x8x8", dtype="bf16", layout="nn", beta=1)
    assert "added to another" in rivals.enter("cublaslt 0").reason
    monkeypatch.setitem(sys.modules, "torch", None)
    rivals.worker = Worker(lambda index: (rivals.gpu, FakeMonitor(rivals.gpu)))
    monkeypatch.setattr(contest, "VendorCall", _rivals.Rivals())
    rivals.worker.handle(Open(0))
    rivals.prepare()
    assert "torch cannot be imported" in rivals.enter("cublaslt 0").reason


def test_types_are_those_of_the_header():
    assert ctypes.sizeof(_rival_cublaslt.Algorithm) == 64
    assert ctypes.sizeof(_rival_cublaslt.Offer) == 96
    assert _rival_cublaslt.Offer.workspace_bytes.offset == 64


def test_a_machine_without_cublaslt_says_so(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 00:00 1  /nowhere/libcublasLt.so.99\n")
    with pytest.raises(DeviceError, match=r"cublasLt cannot be loaded: .*libcublasLt\.so\.99"):
        _rival_cublaslt.load(maps)


# --- Triton --------------------------------------------------------------------------------------


def test_every_shape_has_configurations_that_fit():
    for shape in _shapes.wanted():
        found = _rival_triton.configs(shape.problem)
        assert 9 <= len(found) <= 36, shape
        for config in found:
            operands = (config.block_m + config.block_n) * config.block_k * 2
            assert operands * config.stages < 227 << 10, (shape, config)
            assert min(config.block_m, config.block_n, config.block_k) >= 16
        maps = any(config.kernel == "descriptors" for config in found)
        rows = (shape.problem.lda, shape.problem.ldb, shape.problem.ldc)
        assert not maps or all(row % 8 == 0 for row in rows), shape
    huge = MATMUL.problem("65536x65536x65536", dtype="bf16", layout="nt")
    assert _rival_triton.configs(huge) == ()


def test_kernels_are_shared_by_problems_of_a_kind():
    sources = {
        _rival_triton.source(config, shape.problem, "sm_90")
        for shape in _shapes.wanted()
        for config in _rival_triton.configs(shape.problem)
    }
    assert len(sources) < 250


def test_the_launch_is_what_the_kernel_is_written_for():
    device = default_chip("sm_90")
    problem = MATMUL.problem("300x200x64", dtype="bf16", layout="nt")
    compiled = _rival_triton.Compiled(b"cubin", "tiled", 100 << 10, 256, 0, 0.1)
    config = _rival_triton.TritonConfig("tiled", 128, 64, 64, 3, 8)
    (launch,) = _rival_triton.executable(config, compiled, problem, device).plan.launches
    assert (launch.grid, launch.block) == ((3 * 4, 1, 1), (256, 1, 1))
    values = {a.name: (a.type, a.value) for a in launch.arguments}
    text = (SCRIPTS / "_triton_kernels.py").read_text()
    written = text.split("def tiled(\n", 1)[1].split("TRANSPOSE_A", 1)[0]
    names = [name.strip() for name in written.split(",") if name.strip()]
    assert [name.lower() for name in values] == [*names, "scratch", "profile"]
    assert values["ldb"] == ("int32", 64)
    assert values["batch_c"] == ("int32", 300 * 200)
    assert values["scratch"] == ("int64", 0)
    config = _rival_triton.TritonConfig("descriptors", 16, 16, 64, 3, 8)
    compiled = _rival_triton.Compiled(b"cubin", "descriptors", 100 << 10, 256, 384, 0.1)
    plan = _rival_triton.executable(config, compiled, problem, device).plan
    assert plan.launches[0].grid == (device.sm_count, 1, 1)
    assert plan.workspace_bytes == 384 * device.sm_count


# --- the whole of it, on scripted GPUs -----------------------------------------------------------


class Contesting:
    """A machine with a record of S1, and rivals by a script."""

    def __init__(self, machine, monkeypatch, capsys, kept):  # noqa: F811
        self.machine, self.folder, self.capsys = machine, machine.folder, capsys
        self.monkeypatch, self._kept = monkeypatch, kept
        self.script = {
            "noise": 0.002,
            "vendors": {
                "matmul": {"us": 120.0, "error": 3e-8},
                "cublaslt 0": {"us": 118.0},
                "cublaslt 1": {"us": 116.0},
                "cublaslt 2": {"us": 20.0, "error": 0.5},
            },
        }
        self.rivals()
        monkeypatch.setattr(shape_contest, "compile_pool", lambda: ThreadPoolExecutor(2))
        monkeypatch.setattr(
            "tunegen.session.devices.find_gpus", lambda: FoundGpus((H200,), driver="580.65.06")
        )
        monkeypatch.setattr(shape_contest._tree, "TUNED_DB", self.folder / "shipped")

    def rivals(self, **changes):
        script = {**self.script, **changes}
        self.monkeypatch.setattr(shape_contest, "RIVALS", scripted.command(script))

    def tune(self, *words):
        return shape_records.main(
            ["--db", str(self.machine.db), "--trials", "2", "--only", "S1", *words]
        )

    def have(self, *names):
        """Records of these; made once, since every test here begins with them."""
        kept = self._kept / "-".join(names)
        if not kept.exists():
            db = self._kept / "made"
            words = ["--trials", "1", "--only", ",".join(names)]
            assert shape_records.main(["--db", str(db), *words]) == 0
            db.rename(kept)
        shutil.copytree(kept, self.machine.db)
        self.capsys.readouterr()

    def run(self, *words, names="S1"):
        json_file = self.folder / "out" / "shapes.json"
        return shape_contest.main([
            "--db", str(self.machine.db), "--only", names, "--json", str(json_file),
            "--out", str(self.folder / "out"), "--seconds-each", "0.5", *words,
        ])  # fmt: skip

    def results(self, name="shapes"):
        return json.loads((self.folder / "out" / f"{name}.json").read_text())

    @property
    def out(self):
        return self.capsys.readouterr().out


@pytest.fixture
def contesting(machine, monkeypatch, capsys, tmp_path_factory):  # noqa: F811
    kept = tmp_path_factory.getbasetemp() / "shape-records"
    return Contesting(machine, monkeypatch, capsys, kept)


def test_records_of_the_list(contesting):
    assert contesting.tune("--out", str(contesting.folder / "out")) == 0
    out = contesting.out
    (line,) = (line for line in out.splitlines() if line.startswith("S1 bf16 nt"))
    ((_, record),) = Database(contesting.machine.db).records()
    assert record.spec in line
    assert f"{record.measurement.median_us:.2f} us" in line
    assert "cuBLAS " in line
    assert contesting.results("shape_records")[0]["shape"] == "S1 bf16 nt"
    assert contesting.tune() == 0
    assert "1 stand, 0 to tune" in contesting.out
    assert contesting.tune("--again", "--budget", "29") == 0
    assert "0 tuned, 0 failed, 1 left" in contesting.out
    assert contesting.tune("--seconds-each", "61") == 1
    assert "61 is not within 60" in contesting.out


def test_the_contest(contesting):
    contesting.have("S1")
    # One shape alone reaches no goal of a group.
    code = contesting.run("--sustained", "S1", names="S1,S2")
    out = contesting.out
    assert code == 1
    assert "1 to measure, 0 stand, 1 have no record: S2 bf16 nt" in out
    assert "without Triton: Triton is not installed" in out
    document = contesting.results()
    row = document["rows"]["S1 bf16 nt"]
    us = row["us"]["median"]
    rivals = row["rivals"]
    assert rivals["vendor"]["ratio"]["median"] == pytest.approx(120 / us, rel=0.01)
    assert rivals["vendor"]["ratio"]["low"] <= rivals["vendor"]["ratio"]["high"]
    assert rivals["cublaslt"]["ratio"]["median"] == pytest.approx(116 / us, rel=0.01)
    assert rivals["triton"]["ratio"] is None
    assert row["error_ratio"] == pytest.approx(1.0)
    assert row["rounds"] >= 15
    assert row["sets"] * 3 * 512 * 512 * 2 >= 3 * default_chip("sm_90").l2_bytes
    assert row["sustained"]["vendor"]["energy_mj"] > 0
    details = contesting.results("shape_contest_times")["S1 bf16 nt"]
    assert details["choosing_us"]["cublaslt"]["2"] == "its error is 0.5"
    assert details["choosing_us"]["cublaslt"]["3"] == "torch is not there"
    assert len(details["burst_us"]["ours"]) == row["rounds"]
    assert document["about"]["device"] == "NVIDIA H200"
    # What stands is not measured again, nor where it only is to be judged.
    assert contesting.run() == 0
    assert "0 to measure, 1 stand, 0 have no record" in contesting.out
    json_file = str(contesting.folder / "out" / "shapes.json")
    assert shape_contest.main(["--verdict", "--json", json_file]) == 0
    verdict = contesting.out
    assert "OPEN bf16 nt S1 S2 S3 P8 against cuBLAS" in verdict
    assert "PASS error over cuBLAS's" in verdict


def test_triton_takes_part_with_its_best(contesting, monkeypatch):
    contesting.have("S1")

    def executable(config, compiled, problem, device):
        if config.kernel == "persistent":
            raise ValueError("no such launch")
        ((_, record),) = Database(contesting.machine.db).records()
        build = shape_contest.build_of(record, device)
        return shape_contest.Executable(build.kernels, build.plan)

    def compile(made):
        if made.config.kernel == "descriptors":
            raise RuntimeError("out of resource")
        big = made.config.block_m == 256
        return _rival_triton.Compiled(b"", "tiled", (1 << 20) if big else 0, 128, 0, 0.1)

    monkeypatch.setattr(_rival_triton, "missing", lambda: "")
    monkeypatch.setattr(_rival_triton, "version", lambda: "Triton 3.6.0")
    monkeypatch.setattr(_rival_triton, "compile", compile)
    monkeypatch.setattr(_rival_triton, "executable", executable)
    assert contesting.run() == 0
    row = contesting.results()["rows"]["S1 bf16 nt"]
    assert row["rivals"]["triton"]["failure"] == ""
    assert row["rivals"]["triton"]["description"].startswith("Triton tiled ")
    choosing = contesting.results("shape_contest_times")["S1 bf16 nt"]["choosing_us"]["triton"]
    told = " ".join(map(str, choosing.values()))
    for text in ("RuntimeError: out of resource", "ValueError: no such launch", "bytes of shared"):
        assert text in told
    assert contesting.results()["about"]["triton"] == "Triton 3.6.0"


def test_a_rival_that_fails_does_not_keep_the_others(contesting):
    contesting.have("S1")
    contesting.rivals(vendors={"matmul": {"us": 120.0}})
    assert contesting.run() == 0
    assert "without the best of cublasLt: torch is not there" in contesting.out
    contesting.rivals(vendors={}, cannot_prepare="no memory")
    assert contesting.run("--again") == 0
    assert "without cuBLAS: the operands cannot be prepared: no memory" in contesting.out
    assert contesting.results()["rows"]["S1 bf16 nt"]["us"]["median"] > 0


def test_a_shape_that_fails_does_not_keep_the_others(contesting, monkeypatch):
    contesting.have("S1", "S2")
    real = shape_contest.build_of

    def build_of(record, device):
        if record.problem.M == 512:
            raise KeyError("a fault of its own")
        return real(record, device)

    monkeypatch.setattr(shape_contest, "build_of", build_of)
    assert contesting.run(names="S1,S2") == 1
    out = contesting.out
    assert "a fault of its own" in out
    assert "2 to measure, 1 failed" in out
    assert list(contesting.results()["rows"]) == ["S2 bf16 nt"]


def test_company_spoils_a_shape(contesting):
    contesting.have("S1")
    contesting.rivals(came=[17])
    assert contesting.run() == 1
    assert "others used the card meanwhile" in contesting.out


def test_nothing_begins_that_might_not_end(contesting):
    contesting.have("S1")
    assert contesting.run("--budget", "5") == 0
    assert "stopped after" in contesting.out
    assert contesting.results()["rows"] == {}


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tunegen.session.devices.find_gpus", lambda: FoundGpus(reason="no driver"))
    for script in (shape_records, shape_contest):
        assert script.main(["--db", str(tmp_path)]) == 1
        assert capsys.readouterr().out.startswith("error: no driver")


# --- the README ----------------------------------------------------------------------------------


def document(rows):
    about = {
        "device": "NVIDIA H200",
        "driver": "580",
        "cublas": "cuBLAS 13",
        "triton": "no Triton",
    }
    return {"about": about, "rows": dict(rows)}


def test_the_table(tmp_path, capsys):
    rows = [row("S4", median=1.02), row("T6", median=1.8), row("S4", layout="nn")]
    kept, readme = tmp_path / "shapes.json", tmp_path / "README.md"
    kept.write_text(json.dumps(document(rows)))
    readme.write_text(f"before\n{shape_contest.BEGIN}\nold\n{shape_contest.END}\nafter\n")
    words = ["--readme", "--json", str(kept), "--readme-file", str(readme)]
    assert shape_contest.main(words) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{shape_contest.BEGIN}\nNVIDIA H200, driver 580, cuBLAS 13")
    assert text.endswith(f"\n{shape_contest.END}\nafter\n")
    assert shape_contest.with_table(text, document(rows)) == text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert text.index("bf16, nt:") < text.index("bf16, nn:")
    header, _, square, mean = ([c.strip() for c in line.split("|")[1:-1]] for line in lines[:4])
    found = dict(zip(header, square, strict=True))
    assert (found["shape"], found["M x N x K"]) == ("S4", "4096x4096x4096")
    assert (found["cuBLAS"], found["95 %"]) == ("1.020", "1.010 to 1.030")
    assert found["TFLOP/s"] == f"{2 * 4096**3 / 10 / 1e6:.1f}"
    assert (found["cublasLt"], found["Triton"], found["floor"]) == ("1.300", "-", "0.80")
    assert (mean[0], mean[4]) == ("**square**", "**1.020**")
    kept.write_text("[]")
    assert shape_contest.main(words) == 1
    assert "holds no results" in capsys.readouterr().out


def test_the_readmes_table_is_what_was_measured():
    """Once there are results, and marks for them."""
    readme = readme_table.README.read_text()
    if shape_contest.BEGIN not in readme:
        return
    results = json.loads(shape_contest.JSON.read_text())
    assert shape_contest.with_table(readme, results) == readme


@pytest.mark.parametrize("name", ["shape_records", "shape_contest"])
def test_they_run_from_anywhere(name, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"], cwd=tmp_path, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_rivals_process_starts_and_ends(tmp_path):
    """As a real process: it answers, and without a driver says so."""
    command = (sys.executable, str(SCRIPTS / "_rivals.py"))
    with Process(command) as process:
        answer = process.ask(Enter("x", None, "cublaslt 0", "nt"), 60.0)
    assert isinstance(answer, Failed)
    assert answer.reason == "no problem has been prepared"

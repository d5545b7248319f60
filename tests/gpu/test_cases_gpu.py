# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other kernels and tuners reported, on a real GPU: every kind with every
matmul spec and the vector kernels, and broken kernels in a whole tune."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import test_worker_gpu as workers
from emulator.numbers import STORED, load, store

from tunegen import session
from tunegen.kernels import load as load_spec
from tunegen.kernels import (
    matmul_naive,
    matmul_simt,
    vector_add,
    vector_axpy,
    vector_copy,
    vector_fill,
)
from tunegen.model import DTYPE_BYTES, SM_COUNT, Config
from tunegen.runner.process import Worker
from tunegen.runner.protocol import (
    Executable,
    Failed,
    Open,
    Opened,
    Prepared,
    Tried,
    Try,
    Verdict,
    Verify,
)
from tunegen.runner.timing import LEAST_INTERVAL_US

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]

DATA = Path(__file__).resolve().parents[1] / "data"
NAIVE, SIMT = matmul_naive.SPEC, matmul_simt.SPEC
MATMUL = SIMT.operation
VECTORS = (vector_fill.SPEC, vector_copy.SPEC, vector_add.SPEC, vector_axpy.SPEC)

DTYPES = ("fp32", "fp64", "fp16", "bf16")
LAYOUTS = ("nn", "nt", "tn", "tt")

# Every way of a simt kernel through its template.
WAYS = (
    {},
    {"SHARED_BUFFERS": 0},
    {"SHARED_BUFFERS": 2, "ASYNC_COPY": 0},
    {"SHARED_BUFFERS": 3, "ASYNC_COPY": 1},
    {"SPLIT_K": 4},
)

PATIENCE_S = 120.0

# Sizes, so that a machine that only plays a GPU can take smaller ones.
TAILS = (1000, 999, 1001)
SHORT = ("2x130x67x1", "130x67x7", "2x33x65x31", "67x130x33", "9x11x0", "96x1953x31")
WRITTEN = ("96x1953x64", "96x1953x0", "3x64x104x40")
VECTOR = 1_000_003
LARGE = (3_270_680_000, 40960 * 128256)
WIDE = 50_000
PARTIALS = 16_384
FAR = 2**30 + 8
LONG_K = 14_336
ROWS = (512, 64)
COLUMNS = 4096
TUNED, ELSEWHERE = "1024x1024x3072", ("2048x2048x2048", "1000x1000x1000", "999x1001x1000")
BATCH, TALL = 65_538, 1_048_576 + 16
REPEATS = 200
SCALED, HALVED = 2**22, 2**20


@dataclasses.dataclass(frozen=True)
class Built:
    """A configuration compiled for one problem, to be launched for others that it covers."""

    spec: object
    config: Config
    made_for: object
    kernels: tuple

    def __str__(self):
        return f"{self.spec.name} {dict(self.config)}"

    def covers(self, problem):
        limits = self.spec.limits(self.config, self.made_for)
        return all(limit.holds(problem.names) for limit in limits)

    def at(self, problem, device):
        formulas = self.spec.symbolic_plan(self.config, self.made_for)
        return Executable(
            self.kernels, formulas.bind({**problem.names, SM_COUNT: device.sm_count})
        )


class Bench:
    """A worker on the GPU, and kernels compiled on all cores for it."""

    def __init__(self, folder):
        self.builder = workers.Builder(folder)
        self.worker, self.device = None, None
        self.start()

    def start(self):
        """A fresh worker; a killed one leaves nothing on the device."""
        self.close()
        self.worker = Worker()
        self.device = self.ask(Open(0), Opened).device

    def close(self):
        if self.worker is not None:
            self.worker.kill()

    def ask(self, request, expected):
        answer = self.worker.ask(request, PATIENCE_S)
        if not isinstance(answer, expected):
            self.start()  # lest one failure is the next test's too
            raise AssertionError(answer)
        return answer

    def build(self, problem, *pairs):
        """Compile (spec, config) pairs, configs complete."""

        def compiled(pair):
            spec, config = pair
            executable = self.builder.executable(spec, problem, self.device, config)
            return Built(spec, Config(config), problem, executable.kernels)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compiled, pairs))

    def prepare(self, problem, operation=MATMUL, **options):
        """Whether the device has the memory."""
        request = self.builder.prepare(operation, problem, self.device, **options)
        answer = self.worker.ask(request, PATIENCE_S)
        if isinstance(answer, Failed) and "bytes of device memory" in answer.reason:
            pytest.skip(answer.reason)
        assert isinstance(answer, Prepared), answer

    def check(self, built, problem, **options):
        """The verdict on a right result."""
        tolerance = built.spec.tolerance(problem)
        request = Verify(built.at(problem, self.device), tolerance, **options)
        verdict = self.ask(request, Verdict)
        assert not verdict.reason, f"{built} at {problem}: {verdict.reason}"
        return verdict

    def check_all(self, builts, problem, operation=MATMUL, *, exact=True, **options):
        """Every kernel on normal inputs, and on integers, whose results are exact."""
        options.setdefault("sets", 1)
        for kind in ("normal", "integers")[: 1 + exact]:
            self.prepare(problem, operation, inputs=kind, **options)
            for built in builts:
                self.check(built, problem, exact=kind == "integers")

    @functools.cache  # noqa: B019 (one bench)
    def ways(self, problem, seed=0):
        """The default of every matmul spec, and of simt a random configuration for every way."""
        table = SIMT.space(problem, self.device).enumerate()
        random = np.random.default_rng(seed)
        rows = random.integers(len(table), size=50_000)
        columns = table.columns(rows)
        pairs = [(NAIVE, NAIVE.default(problem, self.device))]
        pairs.append((SIMT, SIMT.default(problem, self.device)))
        for way in WAYS:
            fits = np.ones(len(rows), bool)
            for name, value in way.items():
                fits &= getattr(columns, name) == value
            if fits.any():  # asynchronous copies need 4 or 8 bytes
                pairs.append((SIMT, table[int(rows[np.argmax(fits)])]))
        assert len(pairs) >= 2 + len(WAYS) - 1
        return pairs


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("cache"))
    yield bench
    bench.close()


def matmul(sizes, dtype="fp32", layout="nn", gap=0, **attributes):
    """A problem with leading dimensions longer than rows; bases are no more aligned then."""
    tight = MATMUL.problem(sizes, dtype=dtype, layout=layout)
    if gap:
        attributes |= {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        attributes.setdefault("align", DTYPE_BYTES[dtype])
    return MATMUL.problem(sizes, dtype=dtype, layout=layout, **attributes)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tails_layouts_and_leading_dimensions(bench, dtype, layout):
    """Odd sizes and rows, misaligned bases, alpha and beta; sums of 1, 7, 31, 33 terms and of
    none; sizes below the largest tile. C that is only written holds NaN at first."""
    scalars = {"alpha": -1.5, "beta": 0.75}
    shift = {name: DTYPE_BYTES[dtype] for name in "ABC"}
    whole = matmul(TAILS, dtype, layout, gap=3, beta=1)
    reading = bench.build(whole, *bench.ways(whole, LAYOUTS.index(layout)))
    bench.check_all(reading, whole, scalars=scalars, exact=False)
    for sizes in SHORT:
        problem = matmul(sizes, dtype, layout, gap=1, beta=1)
        able = [built for built in reading if built.covers(problem)]
        assert len(able) == len(reading)
        whole_scalars = {"alpha": -2.0, "beta": 3.0}
        bench.check_all(able, problem, scalars=whole_scalars, offsets=shift)
    writing = matmul(WRITTEN[0], dtype, layout)
    default = SIMT.default(writing, bench.device)
    split = {**default, "SPLIT_K": 4}
    naive = (NAIVE, NAIVE.default(writing, bench.device))
    builts = bench.build(writing, naive, (SIMT, default), (SIMT, split))
    for sizes in WRITTEN:
        problem = matmul(sizes, dtype, layout)
        bench.check_all([b for b in builts if b.covers(problem)], problem, scalars=scalars)


@pytest.mark.parametrize("spec", VECTORS, ids=lambda spec: spec.operation.name)
def test_vectors_at_tails_and_misalignments(bench, spec):
    operation = spec.operation
    for dtype in DTYPES:
        large = operation.problem((VECTOR,), dtype=dtype)
        default = spec.default(large, bench.device)
        narrow = {"VECTOR_BYTES": DTYPE_BYTES[dtype], "UNROLL": 1}
        changes = ({}, {"BLOCKS_PER_SM": 2}, narrow)
        pairs = [(spec, {**default, **change}) for change in changes]
        builts = bench.build(large, *pairs)
        names = [array.name for array in operation.arrays(large)]
        for n, apart in (
            (VECTOR, (0, 0, 0)),
            (8192, (1, 1, 1)),
            (1000, (1, 2, 3)),
            (1, (0,) * 3),
        ):
            offsets = {
                name: DTYPE_BYTES[dtype] * away for name, away in zip(names, apart, strict=False)
            }
            problem = operation.problem((n,), dtype=dtype)
            bench.check_all(builts, problem, operation, offsets=offsets)


@pytest.mark.parametrize("elements", LARGE)
@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (vector_fill.SPEC, {}),
        (vector_copy.SPEC, {"BLOCKS_PER_SM": 4}),
        (vector_copy.SPEC, {}),
        (vector_axpy.SPEC, {}),
    ],
    ids=["fill", "copy-persistent", "copy", "axpy"],
)
def test_more_than_2_31_elements(bench, spec, config, elements):
    problem = spec.operation.problem((elements,), dtype="fp16")
    complete = {**spec.default(problem, bench.device), **config}
    (built,) = bench.build(problem, (spec, complete))
    bench.prepare(problem, spec.operation, sets=1, inputs="integers")
    bench.check(built, problem, exact=True, repeats=0)


@pytest.mark.parametrize(
    "problem",
    [
        lambda: matmul((WIDE, WIDE, 8), "fp16"),
        lambda: matmul("3x5x7x9", "fp16", lda=FAR, ldb=FAR, ldc=FAR, beta=1),
    ],
    ids=["elements", "rows"],
)
def test_matrices_beyond_2_31_elements(bench, problem):
    problem = problem()
    near = matmul((WIDE, WIDE, 8), "fp16", beta=problem.beta, align=2)
    pairs = [(spec, spec.default(near, bench.device)) for spec in (NAIVE, SIMT)]
    builts = bench.build(problem, *pairs)
    bench.prepare(problem, sets=1, inputs="integers")
    for built in builts:
        bench.check(built, problem, exact=True, repeats=0)


def test_partial_sums_beyond_2_31_elements(bench):
    problem = matmul((PARTIALS, PARTIALS, 128))
    config = {**SIMT.default(problem, bench.device), "SPLIT_K": 8, "RASTER_GROUP": 1}
    (built,) = bench.build(problem, (SIMT, config))
    bench.prepare(problem, sets=1, inputs="integers")
    bench.check(built, problem, exact=True, repeats=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", ROWS)
def test_slices_lose_no_precision(bench, rows, dtype):
    """Partial sums are fp32: the error with them is that without."""
    problem = matmul((rows, COLUMNS, LONG_K), dtype, "nt")
    random = np.random.default_rng(rows)
    given = {
        array.name: store(random.uniform(-1, 1, array.shape).astype(np.float32), dtype)
        for array in MATMUL.arrays(problem)
        if array.role == "in"
    }
    default = {**SIMT.default(problem, bench.device), "SPLIT_K": 1}
    builts = bench.build(problem, *((SIMT, {**default, "SPLIT_K": k}) for k in (1, 2, 8, 32)))
    bench.prepare(problem, sets=1, given=given)
    whole, *split = (bench.check(built, problem).relative_error for built in builts)
    assert whole > 0
    assert max(split) <= 1.02 * whole


def test_the_same_call_gives_the_same_bits(bench):
    """Split or not, so many times; and what does not is told."""
    for dtype in ("fp32", "bf16"):
        problem = matmul((64, 512, 4096), dtype, beta=1)
        default = SIMT.default(problem, bench.device)
        builts = bench.build(problem, *((SIMT, {**default, "SPLIT_K": k}) for k in (1, 4, 32)))
        bench.prepare(problem, sets=1)
        for built in builts:
            assert bench.check(built, problem, repeats=REPEATS).deterministic, built


def test_runs_that_differ_are_told(bench):
    spec = load_spec(DATA / "total_kernel" / "total.py")
    problem = spec.operation.problem()
    (built,) = bench.build(problem, (spec, spec.default(problem, bench.device)))
    random = np.random.default_rng(0)
    given = {
        "x": random.standard_normal(problem.N).astype(np.float32),
        "y": np.ones(1, np.float32),
    }
    expected = spec.operation.reference(problem, given, {})
    bench.prepare(problem, spec.operation, sets=1, given=given, expected=expected)
    request = Verify(built.at(problem, bench.device), 1.0, repeats=REPEATS)
    verdict = bench.ask(request, Verdict)
    assert (verdict.reason, verdict.deterministic) == ("", False)


@pytest.mark.parametrize(("dtype", "layout"), list(zip(DTYPES, LAYOUTS, strict=True)))
def test_what_is_tuned_at_one_size_is_right_at_others(bench, dtype, layout):
    """Or its limits say that it is not made for them."""
    tuned = matmul(TUNED, dtype, layout)
    builts = bench.build(tuned, *bench.ways(tuned, seed=7))
    taken = 0
    for sizes in (TUNED, *ELSEWHERE):
        problem = matmul(sizes, dtype, layout)
        able = [built for built in builts if built.covers(problem)]
        taken += len(able)
        bench.check_all(able, problem)
    assert taken >= 2 * len(builts)
    odd = matmul(ELSEWHERE[-1], dtype, layout)
    assert any(not built.covers(odd) for built in builts), "rows of 999 are not aligned"


def test_more_blocks_than_y_and_z_take(bench):
    """A batch, rows and columns: 65,536 and more of them."""
    for sizes in (f"{BATCH}x4x4x4", f"{TALL}x8x4", f"8x{TALL}x4", f"{BATCH}x1x1x5"):
        problem = matmul(sizes, beta=1)
        pairs = [(spec, spec.default(problem, bench.device)) for spec in (NAIVE, SIMT)]
        for built in (builts := bench.build(problem, *pairs)):
            for launch in built.at(problem, bench.device).plan.launches:
                assert max(launch.grid[1:]) <= 65_535
        bench.check_all(builts, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(bench, dtype):
    """NaN (with the first signalling bits too) stays NaN, Inf * 0 is NaN, and no other element
    is touched: the checks compare where expected and found ones are."""
    layout = LAYOUTS[DTYPES.index(dtype)]
    problem = matmul((133, 67, 261), dtype, layout, gap=1, beta=1)
    random = np.random.default_rng(1)
    given = {}
    for array in MATMUL.arrays(problem):
        values = random.standard_normal(array.shape)
        if array.name != "C":
            # Where the row of A and the column of B are along the other axis, that is as good.
            values[0, -1, -1] = np.nan if array.name == "A" else -np.inf
            values[0, 3, 5], values[0, 7, 11] = np.inf, 0.0
            values[0, 5, 3], values[0, 11, 7] = 0.0, 0.0
        given[array.name] = store(values, dtype)
    if dtype == "fp32":
        bits = given["A"].view(np.uint32)
        bits[np.isnan(given["A"])] = 0x7F800001
    wide = {name: load(values, dtype) for name, values in given.items()}
    with np.errstate(invalid="ignore"):
        expected = MATMUL.reference(problem, wide, {"alpha": 1.0, "beta": 1.0})["C"]
    assert np.isnan(expected).any()
    assert np.isfinite(expected).any()
    assert all(values.dtype == STORED[dtype] for values in given.values())
    builts = bench.build(problem, *bench.ways(problem))
    bench.prepare(problem, sets=1, given=given)
    for built in builts:
        bench.check(built, problem)


# --- tuning --------------------------------------------------------------------------------------


def no_workers():
    """No child of this process but the bench's own is left."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            command = (stat.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z" and b"tunegen.runner.worker" in command:
            left.append(int(stat.parent.name))
    return left


@pytest.fixture
def tune(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    bench.close()  # a card in use by others is not measured

    def tune(spec, problem, trials, **options):
        result = session.tune(
            spec.operation.name, problem=problem, trials=trials, specs=(spec,), evaluator="gpu",
            finals_seconds=2.0, db=tmp_path / "db", **options,
        )  # fmt: skip
        assert no_workers() == []
        return result

    tune.home = tmp_path
    yield tune
    bench.start()


def times_of(result):
    return {
        trial.config: trial.outcome.median_us for trial in result.run.trials if trial.outcome.ok
    }


def test_broken_configurations_cost_the_others_nothing(tune):
    """A hang, a store far out of bounds, a wrong and two half-written results among right ones."""
    spec = load_spec(DATA / "faulty_kernel" / "faulty.py")

    def right_only(problem, device):
        space = spec.space(problem, device)
        first, *rest = space.parameters
        return dataclasses.replace(
            space, parameters=(dataclasses.replace(first, values=(0,)), *rest)
        )

    alone = tune(dataclasses.replace(spec, space=right_only), (SCALED,), 6)
    together = tune(spec, (SCALED,), 11)
    assert dict(together.run.counts) == {
        "measured": 6, "wrong_result": 3, "timed_out": 1, "launch_failed": 1
    }  # fmt: skip
    assert together.record.config["FAULT"] == 0
    expected = {config.THREADS: us for config, us in times_of(alone).items()}
    found = {config.THREADS: us for config, us in times_of(together).items()}
    assert found == pytest.approx(expected, rel=0.05)
    reasons = {
        trial.config.FAULT: trial.outcome.reason
        for trial in together.run.trials
        if not trial.outcome.ok
    }
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in reasons[2]
    assert "largest error" in reasons[3]
    assert f"were not written, the first at ({SCALED // 2})" in reasons[4]
    assert "were not written, the first at (0)" in reasons[5]
    kept = list((tune.home / "tunegen" / "quarantine").glob("*/case.json"))
    assert {json.loads(path.read_text())["config"]["FAULT"] for path in kept} == {1, 2}
    for path in kept:
        assert {".cu", ".ptx", ".cubin"} <= {file.suffix for file in path.parent.iterdir()}
    assert all(r["config"]["FAULT"] == 0 for r in stored(tune.home / "db"))


def stored(folder):
    for path in folder.glob("*/*.json"):
        yield from json.loads(path.read_text())["records"]


def test_wrong_at_other_sizes_or_when_applied_again(tune):
    """In place: inputs are restored for every call that counts. What is right at the tuned size
    only is found in the finals, and not recorded however fast it is."""
    spec = load_spec(DATA / "halving_kernel" / "halving.py")
    result = tune(spec, (HALVED,), 6)
    kinds = {trial.config: trial.outcome.kind for trial in result.run.trials}
    for config, kind in kinds.items():
        assert (kind == "measured") == (config.FAULT == 0), (config, kind)
    reasons = [t.outcome.reason for t in result.run.trials if t.config.FAULT == 1]
    assert all("finals at 1000" in reason for reason in reasons), reasons
    assert {record["config"]["FAULT"] for record in stored(tune.home / "db")} == {0}


def test_short_calls_are_timed_in_intervals_that_can_be_read(bench):
    """One element: a microsecond or so, many of them to an interval, never zero."""
    spec = vector_fill.SPEC
    problem = spec.operation.problem((1,))
    (built,) = bench.build(problem, (spec, spec.default(problem, bench.device)))
    bench.prepare(problem, spec.operation, sets=3)
    executable = built.at(problem, bench.device)
    tried = bench.ask(Try(executable, 0.0, "burst"), Tried)
    measurement = tried.outcome.measurement
    assert measurement is not None, tried
    assert 0.3 < measurement.low_us <= measurement.median_us < 50
    assert measurement.details["calls_per_interval"] > 4
    assert measurement.details["interval_us"] > 0.8 * LEAST_INTERVAL_US


def test_a_launch_that_fails_is_no_time(bench):
    spec = vector_fill.SPEC
    problem = spec.operation.problem((4096,))
    (built,) = bench.build(problem, (spec, spec.default(problem, bench.device)))
    bench.prepare(problem, spec.operation)
    right = built.at(problem, bench.device)
    (launch,) = right.plan.launches
    for change in ({"block": (2048, 1, 1)}, {"shared_bytes": 1 << 20}):
        plan = dataclasses.replace(right.plan, launches=(dataclasses.replace(launch, **change),))
        tried = bench.ask(Try(Executable(right.kernels, plan), 0.0, "burst"), Tried)
        assert tried.outcome.kind == "launch_failed", tried
        assert "CUDA_ERROR_INVALID_VALUE" in tried.outcome.reason
    assert bench.ask(Try(right, 0.0, "burst"), Tried).outcome.kind == "measured"

# SPDX-License-Identifier: Apache-2.0
"""Workers on a real GPU: their checks against NumPy, their times against plausibility, and what
becomes of kernels that fault, hang, and are wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import check_twins
import numpy as np
import pytest
from emulator.numbers import load, store

from tunegen import codegen
from tunegen.compiler import KernelCache, NvrtcCompiler
from tunegen.device import find_gpus, open_gpu
from tunegen.kernels import load as load_spec
from tunegen.kernels import matmul_simt, vector_axpy, vector_copy, vector_fill
from tunegen.kernels.checks import DEFINITIONS
from tunegen.kernels.references import REFERENCES
from tunegen.model import DTYPE_BYTES, SM_COUNT, Array, Config
from tunegen.runner.checkers import Checkers, Count
from tunegen.runner.checks import Checks
from tunegen.runner.operands import Operands, place
from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import (
    PRELOAD,
    Block,
    Enter,
    Entered,
    Executable,
    Failed,
    Open,
    Opened,
    Prepare,
    Prepared,
    Timed,
    Tried,
    Try,
    Verdict,
    Verify,
)

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]

EMPTY = Config({})
PATIENCE_S = 120.0
FAULTY = Path(__file__).resolve().parents[1] / "data" / "faulty_kernel" / "faulty.py"
TORCH = importlib.util.find_spec("torch") is not None


class Builder:
    """Compiles for the GPU that is here."""

    def __init__(self, folder):
        self.arch = find_gpus().devices[0].arch
        self._nvrtc = NvrtcCompiler(KernelCache(folder))
        self.checks = tuple(self.definition(definition) for definition in DEFINITIONS)

    def definition(self, definition):
        return self._nvrtc.compile(codegen.render_definition(definition, self.arch), self.arch)

    def executable(self, spec, problem, device, config=None):
        config = Config({**spec.default(problem, device), **(config or {})})
        target = spec.target(self.arch)
        sources = codegen.render(spec, config, problem, self.arch)
        kernels = tuple(self._nvrtc.compile(source, target) for source in sources)
        sizes = {**problem.names, SM_COUNT: device.sm_count}
        return Executable(kernels, spec.symbolic_plan(config, problem).bind(sizes))

    def prepare(self, operation, problem, device, **options):
        reference = REFERENCES.get(operation.name)
        if reference is not None:
            options["reference"] = self.executable(reference, problem, device)
        settings = {"seed": 3, "sets": 2, "scalars": dict(operation.scalars), **options}
        return Prepare(arrays=operation.arrays(problem), checks=self.checks, **settings)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return Builder(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def gpu():
    return open_gpu(0)[0]


@pytest.fixture
def start():
    """Start a worker with the device open; all of them end with the test."""
    workers = []

    def start(**environment):
        worker = Worker(environment=environment)
        workers.append(worker)
        opened = worker.ask(Open(0), PATIENCE_S)
        assert isinstance(opened, Opened), opened
        return worker, opened.device

    yield start
    for worker in workers:
        worker.kill()


def ask(worker, request, expected, timeout_s=PATIENCE_S):
    answer = worker.ask(request, timeout_s)
    assert isinstance(answer, expected), answer
    return answer


# --- the kernels that check ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
@pytest.mark.parametrize(
    ("shape", "strides"), [((1_000_003,), (1,)), ((3, 517, 129), (517 * 136, 136, 1))]
)
def test_checks_are_those_of_numpy(gpu, builder, dtype, shape, strides):
    array = Array("X", shape, strides, dtype, "out")
    item = np.dtype(check_twins.STORED[dtype])
    checkers = Checkers(gpu, builder.checks)
    memory = gpu.allocate(place(array, 0).end)
    where = place(array, memory)

    def elements():
        content = gpu.download(where.address, np.empty(array.elements, item))
        steps = [stride * item.itemsize for stride in strides]
        return content, np.lib.stride_tricks.as_strided(content, shape, steps)

    for integers in (True, False):
        gpu.fill(where.buffer, 0xFF, where.buffer_bytes)
        checkers.draw(array, where.address, 99, integers=integers)
        _, drawn = elements()
        draw = check_twins.integers if integers else check_twins.normals
        wanted = draw(99, drawn.size).reshape(shape)
        if integers:
            np.testing.assert_array_equal(load(drawn, dtype), wanted)
        else:
            error = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-3, "bf16": 2e-2}[dtype]
            np.testing.assert_allclose(load(drawn, dtype), wanted, atol=error, rtol=error)
    buffer = (where.buffer, where.buffer_bytes, where.address)
    assert checkers.stray(array, *buffer) == Count()

    expected = load(drawn, dtype) + 1e-2 * np.random.default_rng(0).standard_normal(shape)
    expected_at = gpu.allocate(expected.nbytes)
    gpu.upload(expected_at, expected)
    found = checkers.compare(array, where.address, expected_at)
    errors = load(drawn, dtype) - expected
    np.testing.assert_allclose(
        found.relative_error, np.sqrt(np.sum(errors**2) / np.sum(expected**2)), rtol=1e-12
    )
    assert found.largest_error == np.abs(errors).max()
    assert found.largest_at == np.abs(errors).argmax()
    inexact = load(drawn, dtype) != load(store(expected, dtype), dtype)
    # The device rounds to 16 bits by way of fp32, NumPy at once: about one in 2^13 ties differs.
    assert abs(found.inexact.count - inexact.sum()) <= inexact.size * 2e-5
    assert found == checkers.compare(array, where.address, expected_at)

    kept = gpu.allocate(array.bytes)
    gpu.copy(kept, where.address, array.bytes)
    assert checkers.differences(array, where.address, kept) == Count()
    content, view = elements()
    view[(-1,) * len(shape)] = 0
    gpu.upload(where.address, content)
    assert checkers.differences(array, where.address, kept) == Count(1, array.elements - 1)
    gpu.fill(where.address + array.bytes + 40 * item.itemsize, 0, item.itemsize)
    assert checkers.stray(array, *buffer) == Count(1, array.elements + 40)
    for address in (memory, expected_at, kept):
        gpu.release(address)
    checkers.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_the_matmul_reference_is_numpys(gpu, builder, dtype):
    operation = REFERENCES["matmul"].operation
    device = gpu.device_class()
    problem = operation.problem("2x211x307x129", dtype=dtype, layout="nt", beta=1, ldb=131)
    request = builder.prepare(operation, problem, device, scalars={"alpha": -2.0, "beta": 0.5})
    operands = Operands(gpu, request)
    stored = {}
    for name, placed in operands.originals.items():
        item = np.dtype(check_twins.STORED[dtype])
        content = gpu.download(placed.address, np.empty(placed.array.elements, item))
        steps = [stride * item.itemsize for stride in placed.array.strides]
        view = np.lib.stride_tricks.as_strided(content, placed.array.shape, steps)
        stored[name] = load(view, dtype)
    wanted = operation.reference(problem, stored, request.scalars)["C"]
    found = gpu.download(operands.expected["C"], np.empty(wanted.shape))
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)
    operands.close()


def test_the_matmul_reference_takes_little_time(gpu, builder):
    operation = REFERENCES["matmul"].operation
    device = gpu.device_class()
    problem = operation.problem("2048x2048x2048")
    request = builder.prepare(operation, problem, device, sets=1)
    operands = Operands(gpu, request)
    kernels = gpu.load(request.reference.kernels)
    addresses = operands.addresses(0) | {"reference_C": operands.expected["C"]}
    call = kernels.bind(request.reference.plan, addresses, request.scalars)
    call.launch(gpu.stream)
    start = gpu.mark()
    call.launch(gpu.stream)
    end = gpu.mark()
    end.wait()
    seconds = end.since_us(start) / 1e6
    operands.close()
    # At a fifth of the fp64 rate, with 1/64 of the fp32 rate on most cards.
    rate = 2 * device.sm_count * device.fp64_per_clock * device.clock_mhz * 1e6
    assert seconds < 5 * 2 * 2048**3 / rate


# --- whole workers -------------------------------------------------------------------------------


def test_a_right_kernel_is_verified_and_timed(start, builder):
    worker, device = start()
    operation = matmul_simt.SPEC.operation
    problem = operation.problem("1024x1024x1024")
    kernel = builder.executable(matmul_simt.SPEC, problem, device)
    ask(worker, builder.prepare(operation, problem, device, sets=16), Prepared)
    verdict = ask(worker, Verify(kernel, 4e-6, repeats=5), Verdict)
    assert (verdict.reason, verdict.deterministic) == ("", True)
    assert 1e-8 < verdict.relative_error < 4e-6
    tried = ask(worker, Try(kernel, 4e-6, "burst"), Tried)
    measurement = tried.outcome.measurement
    assert measurement is not None, tried
    rate = 2 * device.sm_count * device.fp32_per_clock * device.clock_mhz * 1e6
    least_us = 2 * 1024**3 / rate * 1e6
    assert least_us < measurement.median_us < 20 * least_us
    assert measurement.high_us < 1.1 * measurement.low_us
    raced = ask(worker, Try(kernel, 4e-6, "burst", best_us=least_us / 4), Tried)
    assert raced.outcome.measurement.details["raced_out"] is True

    for name in ("a", "b"):
        ask(worker, Enter(name, kernel), Entered)
    times = {"a": [], "b": []}
    for name in "abba" * 3:
        times[name] += ask(worker, Block(name, "burst", 0.05), Timed).samples_us
    a, b = (np.median(times[name]) for name in "ab")
    assert a == pytest.approx(b, rel=0.02)
    assert a == pytest.approx(measurement.median_us, rel=0.1)

    sustained = ask(worker, Block("a", "sustained", 1.0), Timed)
    assert sustained.seconds == pytest.approx(1.0, rel=0.3)
    assert sustained.after.sm_clock_mhz > 0
    assert sustained.after.power_w > 50
    if sustained.before.energy_mj is not None:
        watts = (sustained.after.energy_mj - sustained.before.energy_mj) / 1e3 / sustained.seconds
        assert 50 < watts < 2000
    exact = builder.prepare(operation, problem, device, inputs="integers")
    ask(worker, exact, Prepared)
    assert not ask(worker, Verify(kernel, 1.0, exact=True), Verdict).reason


@pytest.mark.parametrize("policy", ["burst", "sustained"])
def test_calls_in_place_are_timed(start, builder, policy):
    worker, device = start()
    spec = vector_axpy.SPEC
    problem = spec.operation.problem("2^24")
    ask(worker, builder.prepare(spec.operation, problem, device, sets=12), Prepared)
    kernel = builder.executable(spec, problem, device)
    measurement = ask(worker, Try(kernel, 1e-6, policy), Tried).outcome.measurement
    least_us = 3 * 4 * 2**24 / device.memory_gbps / 1e3
    assert least_us < measurement.median_us < 3 * least_us


def test_copies_come_from_memory_not_from_the_cache(start, builder):
    worker, device = start()
    spec = vector_copy.SPEC
    problem = spec.operation.problem("2^20")
    kernel = builder.executable(spec, problem, device)
    sets = -(-3 * device.l2_bytes // (2 * 4 * 2**20))
    ask(worker, builder.prepare(spec.operation, problem, device, sets=sets), Prepared)
    cold_us = ask(worker, Try(kernel, 0.0, "burst"), Tried).outcome.median_us
    warm_us = ask(worker, Try(kernel, 0.0, "warm"), Tried).outcome.median_us
    assert warm_us < cold_us
    assert cold_us > 2 * 4 * 2**20 / device.memory_gbps / 1e3


def test_more_than_2_31_elements(start, builder):
    worker, device = start()
    spec = vector_fill.SPEC
    problem = spec.operation.problem((3_270_680_000,), dtype="fp16")
    request = builder.prepare(spec.operation, problem, device, sets=1)
    answer = worker.ask(request, PATIENCE_S)
    if isinstance(answer, Failed) and "bytes of device memory" in answer.reason:
        pytest.skip(answer.reason)
    assert isinstance(answer, Prepared), answer
    kernel = builder.executable(spec, problem, device)
    assert not ask(worker, Verify(kernel, 0.0, exact=True), Verdict).reason


def test_broken_kernels_harm_nobody_else(start, builder):
    spec = load_spec(FAULTY)
    problem = spec.operation.problem("2^22")
    x = np.linspace(1, 2, 2**22, dtype=np.float32)

    def fresh():
        worker, device = start()
        request = builder.prepare(
            spec.operation, problem, device, given={"x": x}, expected={"y": 2.0 * x}
        )
        ask(worker, request, Prepared)
        return worker, device

    worker, device = fresh()
    kernels = {
        fault: builder.executable(spec, problem, device, {"FAULT": fault, "THREADS": 256})
        for fault in range(6)
    }
    right_us = ask(worker, Try(kernels[0], 1e-6, "burst"), Tried).outcome.median_us
    for fault, words in (
        (3, "the relative RMS error of y is"),
        (4, "of 4,194,304 elements of y were not written, the first at (2097152)"),
        (5, "of 4,194,304 elements of y were not written, the first at (0)"),
    ):
        outcome = ask(worker, Try(kernels[fault], 1e-6, "burst"), Tried).outcome
        assert outcome.kind == "wrong_result"
        assert words in outcome.reason
    again_us = ask(worker, Try(kernels[0], 1e-6, "burst"), Tried).outcome.median_us
    assert again_us == pytest.approx(right_us, rel=0.05)

    answer = ask(worker, Try(kernels[2], 1e-6, "burst"), Failed)
    assert (answer.sticky, answer.kind) == (True, "kernel")
    worker, _ = fresh()
    answer = ask(worker, Try(kernels[1], 1e-6, "burst"), Lost, timeout_s=5.0)
    assert answer.kind == "timed_out"
    worker, _ = fresh()
    last_us = ask(worker, Try(kernels[0], 1e-6, "burst"), Tried).outcome.median_us
    assert last_us == pytest.approx(right_us, rel=0.05)


def test_memory_is_asked_for_before_anything_is_allocated(start, builder):
    worker, device = start()
    spec = vector_copy.SPEC
    problem = spec.operation.problem("2^30", dtype="fp64")
    request = builder.prepare(spec.operation, problem, device, sets=200)
    answer = ask(worker, request, Failed)
    assert (answer.sticky, answer.kind) == (False, "device")
    assert "bytes of device memory" in answer.reason
    assert "are free" in answer.reason
    small = builder.prepare(spec.operation, spec.operation.problem("2^20"), device)
    ask(worker, small, Prepared)


# --- the vendor's library ------------------------------------------------------------------------


@pytest.mark.skipif(not TORCH, reason="torch is not installed (pip install 'tunegen[torch]')")
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("matmul", "512x384x640", {"dtype": "fp32", "layout": "nn"}),
        ("matmul", "512x384x640", {"dtype": "fp64", "layout": "tn", "beta": 1}),
        ("matmul", "3x256x384x128", {"dtype": "fp16", "layout": "nt"}),
        ("matmul", "512x384x640", {"dtype": "bf16", "layout": "tt", "ldc": 392}),
        ("fill", "2^20", {"dtype": "bf16"}),
        ("copy", "2^20", {"dtype": "fp16"}),
        ("copy", "2^26", {"dtype": "fp32"}),
        ("add", "2^20", {"dtype": "fp32"}),
        ("axpy", "2^20", {"dtype": "fp64"}),
    ],
)
def test_the_vendors_library(start, builder, name, sizes, options):
    worker, device = start(**{PRELOAD: "torch"})
    operation = REFERENCES[name].operation
    problem = operation.problem(sizes, **options)
    ask(worker, builder.prepare(operation, problem, device, sets=4), Prepared)
    entered = ask(worker, Enter.vendor("vendor", operation, problem), Entered)
    assert (
        entered.relative_error
        < {"fp64": 1e-14, "fp32": 2e-6, "fp16": 1e-3, "bf16": 5e-3}[problem.dtype]
    )
    assert "torch" in entered.description
    assert ("cuBLAS" in entered.description) == (name == "matmul")
    for policy in ("burst", "sustained"):
        timed = ask(worker, Block("vendor", policy, 0.1), Timed)
        least_us = operation.bytes(problem) / device.memory_gbps / 1e3 / 20  # from L2
        assert least_us < min(timed.samples_us) < 1e4


def test_what_is_checked_here_is_what_trials_check(gpu, builder):
    """A result that is off in one element of four million."""
    spec = vector_copy.SPEC
    device = gpu.device_class()
    problem = spec.operation.problem("2^22")
    operands = Operands(gpu, builder.prepare(spec.operation, problem, device))
    kernel = builder.executable(spec, problem, device)
    loaded = gpu.load(kernel.kernels)
    call = loaded.bind(kernel.plan, operands.addresses(0), {})
    checks = Checks(gpu, operands)
    checks.launch(lambda index: call.launch(gpu.stream))
    assert not checks.inspect(tolerance=0.0, exact=True).reason
    y = operands.sets[0]["y"].address + 4 * 3_000_000
    gpu.upload(y, np.array([100.0], np.float32))
    reason = checks.inspect(tolerance=0.0, exact=True).reason
    assert "1 of 4,194,304 elements of y are not exact on integers" in reason
    assert "at (3000000): 100 instead of" in reason
    loaded.close()
    operands.close()

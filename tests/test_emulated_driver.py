# SPDX-License-Identifier: Apache-2.0
"""The layer over the driver, with the real bindings and a driver of our own below them; and whole
workers on it, faults and hangs included, with kernels of the shipped templates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import emulated_driver
import numpy as np
import pytest

from tunegen.kernels import load
from tunegen.kernels.checks import DEFINITIONS
from tunegen.kernels.references import REFERENCES
from tunegen.kernels.vector_axpy import SPEC as AXPY
from tunegen.model import SM_COUNT, Config
from tunegen.perfmodel.chips import default_chip
from tunegen.runner.process import Lost, Worker
from tunegen.runner.protocol import (
    CONTEXT_LOST,
    Block,
    Close,
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

pytestmark = pytest.mark.emulator

TESTS = Path(__file__).resolve().parent
CALLS = TESTS / "emulated_driver" / "calls.py"
DEVICE = default_chip("sm_90")
EMPTY = Config({})
FAULTY = load(TESTS / "data" / "faulty_kernel" / "faulty.py")
PATIENCE_S = 60.0


@pytest.mark.parametrize(
    "name",
    ["device", "memory", "launches", "tensor_maps", "graphs", "times", "misfits", "fault",
     "no_context"],
)  # fmt: skip
def test_calls(name):
    problem = AXPY.operation.problem((1000,))
    (definition,) = REFERENCES["axpy"].kernels(EMPTY, problem)
    image = emulated_driver.image(definition).cubin.rstrip(b"\0").decode()
    done = subprocess.run(
        [sys.executable, str(CALLS), name, image],
        env={**os.environ, **emulated_driver.environment(), "PYTHONPATH": str(TESTS.parent)},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def executable(spec, config, problem):
    kernels = tuple(
        emulated_driver.image(definition, spec.template_root, config)
        for definition in spec.kernels(config, problem)
    )
    sizes = {**problem.names, SM_COUNT: 4}
    return Executable(kernels, spec.symbolic_plan(config, problem).bind(sizes))


def prepare(operation, problem, **options):
    reference = REFERENCES.get(operation.name)
    if reference is not None:
        options["reference"] = executable(reference, EMPTY, problem)
    return Prepare(
        arrays=operation.arrays(problem), scalars=dict(operation.scalars), seed=3, sets=2,
        checks=tuple(map(emulated_driver.image, DEFINITIONS)), **options,
    )  # fmt: skip


@pytest.fixture
def worker():
    worker = Worker(environment=emulated_driver.environment())
    opened = worker.ask(Open(0), PATIENCE_S)
    assert isinstance(opened, Opened), opened
    assert opened.pid == worker.pid
    assert opened.device.arch == "sm_90"
    yield worker
    worker.kill()


def test_a_worker_does_all_that_it_is_asked(worker):
    operation = AXPY.operation
    problem = operation.problem((3001,), dtype="bf16")
    prepared = worker.ask(prepare(operation, problem, offsets={"x": 2}), PATIENCE_S)
    assert isinstance(prepared, Prepared), prepared
    kernel = executable(AXPY, AXPY.default(problem, DEVICE), problem)
    verdict = worker.ask(Verify(kernel, 2.0**-8), PATIENCE_S)
    assert isinstance(verdict, Verdict), verdict
    assert (verdict.reason, verdict.deterministic) == ("", True)
    assert 2.0**-11 < verdict.relative_error < 2.0**-8
    tried = worker.ask(Try(kernel, 2.0**-8, "burst", budget_ms=5.0), PATIENCE_S)
    assert isinstance(tried, Tried), tried
    assert tried.outcome.kind == "measured", tried
    assert tried.outcome.measurement.samples >= 3
    assert worker.ask(Enter("a", kernel), PATIENCE_S) == Entered(verdict.relative_error, "")
    timed = worker.ask(Block("a", "burst", 0.005), PATIENCE_S)
    assert isinstance(timed, Timed), timed
    assert min(timed.samples_us) > 1
    exact = prepare(operation, problem, inputs="integers")
    assert isinstance(worker.ask(exact, PATIENCE_S), Prepared)
    assert not worker.ask(Verify(kernel, 2.0**-8, exact=True), PATIENCE_S).reason
    worker.post(Close(), PATIENCE_S)
    assert worker._process.wait(PATIENCE_S) == 0


@pytest.fixture
def faulty(worker):
    """Ask for a trial of a configuration of the faulty kernel."""
    operation = FAULTY.operation
    problem = operation.problem((1500,))
    x = np.linspace(1, 2, 1500, dtype=np.float32)
    request = prepare(operation, problem, given={"x": x}, expected={"y": 2.0 * x})
    assert isinstance(worker.ask(request, PATIENCE_S), Prepared)

    def ask(fault, timeout_s=PATIENCE_S):
        kernel = executable(FAULTY, Config({"FAULT": fault, "THREADS": 256}), problem)
        return worker.ask(Try(kernel, 1e-6, "burst", budget_ms=1.0), timeout_s)

    return ask


def test_wrong_kernels_are_told_from_right_ones(faulty):
    for _ in range(2):
        for fault, words in (
            (3, "the relative RMS error of y is"),
            (4, "750 of 1,500 elements of y were not written, the first at (750)"),
            (5, "750 of 1,500 elements of y were not written, the first at (0)"),
        ):
            outcome = faulty(fault).outcome
            assert outcome.kind == "wrong_result"
            assert words in outcome.reason
        assert faulty(0).outcome.kind == "measured"


def test_a_store_far_out_of_bounds_ends_the_worker(worker, faulty):
    answer = faulty(2)
    assert isinstance(answer, Failed)
    assert (answer.sticky, answer.kind) == (True, "kernel")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in answer.reason
    assert worker._process.wait(PATIENCE_S) == CONTEXT_LOST


def test_a_kernel_that_hangs_is_killed_with_its_worker(worker, faulty):
    answer = faulty(1, timeout_s=1.0)
    assert isinstance(answer, Lost)
    assert answer.kind == "timed_out"
    assert worker._process.poll() is not None

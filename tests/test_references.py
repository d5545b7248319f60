# SPDX-License-Identifier: Apache-2.0
"""The plain kernels that others are held against are themselves held against NumPy."""

from __future__ import annotations

import itertools

import check_twins
import numpy as np
import pytest
from emulator.numbers import load
from fake_gpu import DEVICE, FakeGpu, compiled
from host_kernels import host_kernel

from tunegen import codegen, compiler
from tunegen.kernels import SPECS
from tunegen.kernels.checks import DEFINITIONS
from tunegen.kernels.references import REFERENCES
from tunegen.model import ARCHS, DTYPE_BYTES, Config
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import Executable, Prepare

EMPTY = Config({})

# Tails of a tile in each direction, sums of one and none, two matrices, and how much longer than
# its rows a leading dimension is.
MATMULS = (("70x65x19", 0), ("2x9x67x33", 3), ("1x1x1", 0), ("5x3x0", 2), ("130x7x16", 1))
VECTORS = (1, 255, 4099)


def computed(problem, operation, integers=False, scalars=None):
    """What the reference of an operation writes, and what NumPy makes of the same inputs."""
    spec = REFERENCES[operation.name]
    definitions = spec.kernels(EMPTY, problem)
    own = {definition.name: host_kernel(definition) for definition in definitions}
    gpu = FakeGpu({**check_twins.kernels(), **own})
    scalars = scalars or dict(operation.scalars)
    plan = spec.bound_plan(EMPTY, problem, DEVICE)
    arrays = operation.arrays(problem)
    request = Prepare(
        arrays=arrays, scalars=scalars, seed=11, sets=1,
        checks=tuple(compiled(definition.name) for definition in DEFINITIONS),
        inputs="integers" if integers else "normal",
        reference=Executable(tuple(map(compiled, own)), plan),
    )  # fmt: skip
    operands = Operands(gpu, request)
    stored = {}
    for name, placed in operands.originals.items():
        steps = [stride * DTYPE_BYTES[placed.array.dtype] for stride in placed.array.strides]
        kind = {8: np.float64, 4: np.float32}.get(steps[-1], np.uint16)
        kind = np.float16 if placed.array.dtype == "fp16" else kind
        flat = gpu.memory.view(placed.address, placed.array.elements, kind)
        shaped = np.lib.stride_tricks.as_strided(flat, placed.array.shape, steps)
        stored[name] = load(shaped, placed.array.dtype)
    wanted = operation.reference(problem, stored, scalars)
    assert gpu.lost == ""
    return {
        name: (gpu.memory.view(address, wanted[name].size, np.float64), wanted[name].reshape(-1))
        for name, address in operands.expected.items()
    }


def test_every_operation_has_one():
    assert set(REFERENCES) == {spec.operation.name for spec in SPECS}
    for name, spec in REFERENCES.items():
        assert spec.operation.name == name
        problem = spec.operation.problem()
        assert spec.space(problem, DEVICE).enumerate()[0] == spec.default(problem, DEVICE)
        work = spec.work(EMPTY, problem, DEVICE)
        assert work.unit == "fp64"
        assert work.blocks * work.threads > 0


@pytest.mark.emulator
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("fp32", "nn"), ("fp32", "tt"), ("fp64", "nt"), ("fp64", "tn"), ("fp16", "nn"),
        ("bf16", "nt"),
    ],
)  # fmt: skip
def test_matmul(dtype, layout, integers):
    operation = REFERENCES["matmul"].operation
    for (sizes, gap), beta in itertools.product(MATMULS, (0, 1)):
        tight = operation.problem(sizes, dtype=dtype, layout=layout)
        leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        problem = operation.problem(sizes, dtype=dtype, layout=layout, beta=beta, **leading)
        scalars = {"alpha": -2.0, "beta": 3.0}
        for found, wanted in computed(problem, operation, integers, scalars).values():
            if integers:
                np.testing.assert_array_equal(found, wanted)
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.emulator
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(("dtype", "output"), [("fp64", "fp64"), ("fp16", "bf16")])
def test_matmul_with_an_epilogue(dtype, output, activation):
    operation = REFERENCES["matmul"].operation
    for beta in (0, 1):
        problem = operation.problem(
            "2x9x67x33", dtype=dtype, beta=beta, bias=1, activation=activation, output=output
        )
        scalars = {"alpha": -0.5, "beta": 2.0}
        for found, wanted in computed(problem, operation, scalars=scalars).values():
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
@pytest.mark.parametrize("name", ["fill", "copy", "add", "axpy"])
def test_vectors(name, dtype):
    operation = REFERENCES[name].operation
    for size in VECTORS:
        scalars = dict.fromkeys(dict(operation.scalars), -1.5)
        for found, wanted in computed(
            operation.problem((size,), dtype=dtype), operation, scalars=scalars
        ).values():
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", [ARCHS[0], "sm_90", ARCHS[-1]])
def test_they_compile_without_a_word(arch):
    nvrtc = compiler.NvrtcCompiler()
    for spec in REFERENCES.values():
        for dtype in ("fp32", "bf16"):
            problem = spec.operation.problem(dtype=dtype)
            for definition in spec.kernels(EMPTY, problem):
                kernel = nvrtc.compile(codegen.render_definition(definition, arch), arch)
                assert not kernel.warnings
                assert not kernel.rejection
                assert not kernel.resources.stack_bytes


def test_an_empty_output_is_not_computed():
    for spec in REFERENCES.values():
        operation = spec.operation
        sizes = dict.fromkeys(operation.axes, 0)
        assert not spec.bound_plan(EMPTY, operation.problem(sizes), DEVICE).launches

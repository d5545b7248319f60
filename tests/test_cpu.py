# SPDX-License-Identifier: Apache-2.0
"""The same operation by NumPy: it computes what it says, and says what it computes in."""

from __future__ import annotations

import numpy as np
import pytest

from tunegen import kernels
from tunegen.model import Operation
from tunegen.session import cpu
from tunegen.session.cpu import run_on_cpu

QUICK = 1e-3


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", ["7x5x9", "3x7x5x9"])
@pytest.mark.parametrize("beta", [0, 1])
def test_products_are_those_of_the_reference(sizes, layout, beta):
    operation = kernels.operation("matmul")
    problem = operation.problem(sizes, dtype="fp64", layout=layout, beta=beta)
    check(operation, problem)


@pytest.mark.parametrize("name", ["fill", "copy", "add", "axpy"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16"])
def test_vectors_are_those_of_the_reference(name, dtype):
    operation = kernels.operation(name)
    check(operation, operation.problem((1001,), dtype=dtype))


def check(operation, problem):
    """One call on drawn operands against the operation's reference."""
    make, _ = cpu._CALLS[operation.name]
    dtype = cpu._DTYPES[problem.dtype]
    rng = np.random.default_rng(0)
    operands = {
        array.name: cpu._draw(array.shape, dtype, rng) for array in operation.arrays(problem)
    }
    before = {name: values.copy() for name, values in operands.items()}
    scalars = dict(operation.scalars)
    call, _ = make(problem, operands, scalars)
    call()
    expected = operation.reference(problem, before, scalars)
    rounding = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 5e-3}[problem.dtype]
    for name, values in expected.items():
        np.testing.assert_allclose(operands[name], values, rtol=rounding, atol=rounding)


def test_every_operation_has_its_numpy_call():
    assert set(cpu._CALLS) == set(kernels.operations())


@pytest.mark.parametrize(
    ("name", "dtype", "computed", "said"),
    [
        ("add", "bf16", "fp32", "in fp32: NumPy has no bf16"),
        ("matmul", "bf16", "fp32", "in fp32: NumPy has no bf16"),
        ("matmul", "fp16", "fp32", "in fp32: NumPy has no library for products of fp16"),
        ("add", "fp16", "fp16", ""),
        ("matmul", "fp64", "fp64", ""),
    ],
)
def test_a_type_that_numpy_lacks_is_said(name, dtype, computed, said):
    operation = kernels.operation(name)
    sizes = "33x33x33" if name == "matmul" else "1000"
    found = run_on_cpu(operation, operation.problem(sizes, dtype=dtype), QUICK)
    assert found.refusal == ""
    assert found.dtype == computed
    assert found.how.endswith(said) if said else "in fp32" not in found.how
    assert f"NumPy {np.__version__}" in found.how
    assert len(found.samples_us) >= 3
    assert all(us > 0 for us in found.samples_us)


def test_libraries_and_threads_are_named():
    operation = kernels.operation("matmul")
    found = run_on_cpu(operation, operation.problem("33x33x33"), QUICK)
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert built in found.how
    assert "threads" in found.how
    vector = kernels.operation("copy")
    assert "1 thread" in run_on_cpu(vector, vector.problem((100,)), QUICK).how


def test_threads_are_those_of_the_library(monkeypatch):
    counted = cpu._blas_threads()
    assert counted is None or 1 <= counted <= 1024
    monkeypatch.setattr(cpu, "_loaded_libraries", list)
    assert cpu._blas_threads() is None
    assert f"up to {cpu.cores()} threads" in cpu.blas()


def test_what_takes_too_long_or_too_much_is_not_tried(monkeypatch):
    operation = kernels.operation("matmul")
    huge = operation.problem("65536x65536x65536")
    assert "too long" in run_on_cpu(operation, huge).refusal
    monkeypatch.setattr(cpu, "free_bytes", lambda: 1000)
    small = operation.problem("33x33x33")
    assert "GB of host memory" in run_on_cpu(operation, small).refusal


def test_an_operation_of_ones_own_has_no_numpy_call():
    add = kernels.operation("add")
    own = Operation(
        name="my_add", summary="", axes=add.axes, dtypes=add.dtypes,
        default_sizes=(100,), arrays=add.arrays, reference=add.reference, flops=add.flops,
    )  # fmt: skip
    assert "no NumPy call is known for my_add" in run_on_cpu(own, own.problem()).refusal


def test_memory_that_is_free_is_known():
    assert 1 << 20 < cpu.free_bytes() < 1 << 50

# SPDX-License-Identifier: Apache-2.0
"""The vendor's library gets the right operands in the right order, for every operation, layout and
dtype: its results are held against the reference, as ours are."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import check_twins
import numpy as np
import pytest
from fake_gpu import FakeGpu, FakeMonitor
from fake_torch import FakeTorch
from problems import CHECKS

from tunegen.kernels.references import REFERENCES
from tunegen.runner import vendor
from tunegen.runner.protocol import Block, Enter, Entered, Failed, Open, Prepare, Prepared, Timed
from tunegen.runner.worker import Worker

# No larger error than that of rounding the result.
ROUNDING = {"fp64": 1e-15, "fp32": 1e-7, "fp16": 1e-3, "bf16": 8e-3}


class Library:
    """A worker that may load torch, with a problem of an operation prepared."""

    def __init__(self, monkeypatch, name, sizes, *, scalars=None, us=30.0, **options):
        operation = REFERENCES[name].operation
        self.problem = operation.problem(sizes, **options)
        self.gpu = FakeGpu(check_twins.kernels(), memory_bytes=1 << 30)
        self.torch = FakeTorch(self.gpu, us)
        monkeypatch.setitem(sys.modules, "torch", self.torch)
        self.worker = Worker(lambda index: (self.gpu, FakeMonitor(self.gpu)))
        self.worker.handle(Open(0))
        scalars = scalars or dict(operation.scalars)
        arrays = operation.arrays(self.problem)
        random = np.random.default_rng(0)
        given = {
            array.name: check_twins.store(random.integers(-3, 4, array.shape), array.dtype)
            for array in arrays
            if array.role != "out"
        }
        dtypes = {array.name: array.dtype for array in arrays}
        wide = {n: check_twins.load(v, dtypes[n]) for n, v in given.items()}
        expected = operation.reference(self.problem, wide, scalars)
        request = Prepare(
            arrays=arrays, scalars=scalars, seed=1, sets=3, checks=CHECKS, given=given,
            expected=expected,
        )  # fmt: skip
        assert isinstance(self.worker.handle(request), Prepared)

    def enter(self, operation=None):
        request = Enter.vendor(
            "vendor", REFERENCES[self.problem.operation].operation, self.problem
        )
        if operation is not None:
            request = dataclasses.replace(request, operation=operation)
        return self.worker.handle(request)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_matmul(monkeypatch, layout, dtype):
    cases = itertools.product(
        ("5x7x3", "2x5x4x6"),
        (({"alpha": 1.0, "beta": 1.0}, 0), ({"alpha": -2.0, "beta": 1.0}, 0),
         ({"alpha": 2.0, "beta": 3.0}, 1)),
        (0, 2),
    )  # fmt: skip
    for sizes, (scalars, beta), gap in cases:
        tight = REFERENCES["matmul"].operation.problem(sizes, dtype=dtype, layout=layout)
        leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        library = Library(
            monkeypatch, "matmul", sizes, dtype=dtype, layout=layout, scalars=scalars, beta=beta,
            **leading,
        )  # fmt: skip
        entered = library.enter()
        assert isinstance(entered, Entered), entered
        assert entered.relative_error <= ROUNDING[dtype]
        assert library.torch.precision == "highest"
        expected = {(0, 1.0): "mm", (0, -2.0): "addmm", (1, 2.0): "addmm_"}[beta, scalars["alpha"]]
        if sizes.count("x") == 3:
            expected = {"mm": "bmm", "addmm": "baddbmm", "addmm_": "baddbmm_"}[expected]
        assert library.torch.calls == [expected]


# Attributes, alpha, and the calls for one matrix: what torch fuses, then what it does not.
EPILOGUES = [
    ({"bias": 1}, 1.0, ["addmm"]),
    ({"bias": 1}, -2.0, ["addmm"]),
    ({"activation": "relu"}, 1.0, ["_addmm_activation"]),
    ({"activation": "relu", "bias": 1}, 1.0, ["_addmm_activation"]),
    ({"activation": "relu", "bias": 1}, -2.0, ["addmm", "relu_"]),
    ({"activation": "gelu"}, 1.0, ["mm", "gelu_"]),
    ({"activation": "silu", "bias": 1}, 1.0, ["addmm", "silu_"]),
    ({"activation": "relu", "bias": 1, "beta": 1}, 1.0, ["addmm_", "add_", "relu_"]),
    ({"output": "fp32"}, 1.0, ["mm"]),
    ({"output": "fp32", "bias": 1, "activation": "relu"}, 1.0, ["addmm", "relu_"]),
    ({"output": "fp32", "beta": 1}, 1.0, ["addmm"]),
    ({"output": "fp16"}, 1.0, ["mm", "copy_"]),
    ({"output": "fp16", "bias": 1, "beta": 1}, 2.0, ["copy_", "addmm", "add_", "copy_"]),
]


@pytest.mark.parametrize("sizes", ["5x7x3", "2x5x4x6"])
@pytest.mark.parametrize(("attributes", "alpha", "calls"), EPILOGUES)
def test_epilogues(monkeypatch, sizes, attributes, alpha, calls):
    scalars = {"alpha": alpha, "beta": 3.0}
    library = Library(
        monkeypatch, "matmul", sizes, dtype="bf16", layout="nt", scalars=scalars, **attributes
    )
    entered = library.enter()
    assert isinstance(entered, Entered), entered
    # torch rounds after every call.
    assert entered.relative_error <= 2 * ROUNDING["bf16"]
    if sizes == "2x5x4x6":
        several = {
            "mm": ["bmm"],
            "addmm": ["baddbmm"],
            "addmm_": ["baddbmm_"],
            "_addmm_activation": ["baddbmm" if "bias" in attributes else "bmm", "relu_"],
        }
        calls = [name for call in calls for name in several.get(call, [call])]
    assert library.torch.calls == calls
    plain = len(calls) == 1 and calls[0] != "_addmm_activation"
    assert (f"({' and '.join(calls)})" in entered.description) != plain


def test_an_older_torch_has_no_products_with_another_output(monkeypatch):
    library = Library(monkeypatch, "matmul", "5x7x3", dtype="bf16", output="fp32")
    library.torch.__version__ = "2.7.1"
    answer = library.enter()
    assert isinstance(answer, Failed)
    assert "torch 2.7.1 has no products with another output type" in answer.reason


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "call", "scalars"),
    [
        ("fill", "fill_", {"value": 2.5}), ("copy", "copy_", {}), ("add", "add", {}),
        ("axpy", "add_", {"a": -2.0}),
    ],
)  # fmt: skip
def test_vectors(monkeypatch, name, call, scalars, dtype):
    library = Library(monkeypatch, name, (1001,), dtype=dtype, scalars=scalars)
    entered = library.enter()
    assert isinstance(entered, Entered), entered
    assert entered.relative_error <= ROUNDING[dtype]
    assert library.torch.calls == [call]
    assert entered.description == "torch 2.11.0"


def test_the_library_is_named(monkeypatch):
    library = Library(monkeypatch, "matmul", "5x7x3")
    description = library.enter().description
    assert description.startswith("cuBLAS")
    assert description.endswith(" through torch 2.11.0, tf32 off")
    library.torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    assert library.enter().description.endswith("tf32 off, fp32 partial sums")


def test_it_is_timed_as_any_contender(monkeypatch):
    library = Library(monkeypatch, "axpy", (1001,), us=12.0)
    library.enter()
    timed = library.worker.handle(Block("vendor", "burst", 0.01))
    assert isinstance(timed, Timed)
    assert set(timed.samples_us) == {12.0}


def test_large_copies_are_not_recorded(monkeypatch):
    for large in (False, True):
        monkeypatch.setattr(vendor, "_DIRECT_COPY_BYTES", 4000 if large else 5000)
        library = Library(monkeypatch, "copy", (1001,))
        library.enter()
        library.worker.handle(Block("vendor", "burst", 0.01))
        assert (library.gpu.graphs == 0) == large


def test_what_the_library_lacks_is_an_answer(monkeypatch):
    library = Library(monkeypatch, "copy", (10,))
    answer = library.enter("transpose")
    assert answer == Failed("no library call is known for transpose", False, "device")
    library.torch.cuda.is_available = lambda: False
    assert "cannot use the GPU" in library.enter().reason
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = library.enter()
    assert isinstance(answer, Failed)
    assert "torch cannot be imported" in answer.reason
    assert (answer.sticky, answer.kind) == (False, "device")
    vendor.preload()  # says nothing

# SPDX-License-Identifier: Apache-2.0
"""The dtype of a problem that names none: by the specs that prefer one, where they take it."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from scripted import FAULTY

from tunegen import kernels
from tunegen.errors import UsageError
from tunegen.kernels import matmul_naive, matmul_simt
from tunegen.model import ARCHS, FoundGpus, GpuInfo
from tunegen.session import request, tuning


def refuses(problem, device):
    if device.arch != "sm_90":
        return "its instructions are those of sm_90"
    return "its loads take 16 bytes" if problem.lda * problem.element_bytes % 16 else ""


TENSOR = dataclasses.replace(
    matmul_simt.SPEC, name="tensor", preferred_dtype="bf16", refuses=refuses
)
HALF = dataclasses.replace(
    matmul_simt.SPEC, name="half", preferred_dtype="fp16",
    refuses=lambda problem, device: "" if device.arch in ("sm_80", "sm_90") else "no such unit",
)  # fmt: skip
SPECS = (matmul_simt.SPEC, TENSOR, HALF, matmul_naive.SPEC)


def dtype(*, specs=SPECS, arch="sm_90", **words):
    return request("matmul", arch=arch, specs=specs, **words).problem.dtype


def test_specs_that_prefer_nothing_leave_the_operations_first():
    plain = tuple(spec for spec in kernels.SPECS if not spec.preferred_dtype)
    for name, operation in kernels.operations(plain).items():
        for arch in ARCHS:
            assert request(name, arch=arch, specs=plain).problem.dtype == operation.dtypes[0]


def test_the_first_spec_that_prefers_one_and_takes_the_problem():
    assert dtype() == "bf16"
    assert dtype(specs=SPECS[::-1]) == "fp16"
    assert dtype(arch="sm_80") == "fp16"
    assert dtype(arch="sm_75") == "fp32"
    assert dtype(problem="64x64x64", attributes={"lda": 68}) == "fp16"
    assert dtype(problem="64x64x64", attributes={"lda": 72}) == "bf16"


def test_the_rest_of_the_problem_is_as_it_was_asked_for():
    asked = {"problem": "2x40x48x64", "layout": "tn", "attributes": {"lda": 72, "beta": 1}}
    wanted = request("matmul", arch="sm_90", specs=SPECS, **asked)
    operation = wanted.operation
    assert wanted.problem == operation.problem(
        "2x40x48x64", dtype="bf16", layout="tn", lda=72, beta=1
    )
    assert wanted.specs == SPECS


def test_what_is_asked_for_comes_first():
    assert dtype(dtype="fp64") == "fp64"
    assert dtype(spec="simt") == "fp32", "the other specs have no say"
    assert dtype(spec="half") == "fp16"


def test_a_preference_that_the_operation_does_not_know():
    wrong = dataclasses.replace(FAULTY, preferred_dtype="bf16")
    with pytest.raises(UsageError, match="unknown dtype for faulty 'bf16'"):
        request("faulty", arch="sm_90", specs=(wrong,))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_tune_without_an_arch_takes_that_of_the_gpu_that_is_there(arch, monkeypatch):
    gpu = GpuInfo(0, "a card", "GPU-1", arch, 24 << 30, 23 << 30)
    monkeypatch.setattr(tuning, "find_gpus", lambda: FoundGpus((gpu,)))
    ask = functools.partial(request, "matmul", specs=SPECS)
    wanted, chosen = tuning._resolve(ask, None, None, "model", None, False)
    assert chosen == ()
    assert (wanted.arch, wanted.problem.dtype) == (arch, dtype(arch=arch))

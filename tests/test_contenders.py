# SPDX-License-Identifier: Apache-2.0
"""Which specs take part in a search."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted import DEVICE, FAULTY, PROBLEM

from tunegen import perfmodel
from tunegen.kernels import matmul
from tunegen.session.contenders import list_contenders
from tunegen.session.resolve import Request, request


@pytest.fixture
def taking_part(monkeypatch):
    """Names of those that take part, given what the model says of each spec's configurations, the
    last time being that of all further ones."""

    def names(**times):
        def rank(spec, problem, device, table):
            given = times[spec.name]
            return np.array([*given, *[given[-1]] * (len(table) - len(given))], np.float64)

        monkeypatch.setattr(perfmodel, "rank", rank)
        specs = tuple(dataclasses.replace(FAULTY, name=name) for name in times)
        found = list_contenders(Request(FAULTY.operation, PROBLEM, DEVICE, specs))
        return [contender.name for contender in found]

    return names


def test_whom_the_model_puts_far_behind_does_not_take_part(taking_part):
    assert taking_part(far=[61], near=[59], best=[10, 400]) == ["near", "best"]


def test_it_is_the_best_configuration_that_counts(taking_part):
    assert taking_part(best=[10], mostly_far=[1000, 59, 1000]) == ["best", "mostly_far"]
    assert taking_part(best=[10], mostly_far=[1000, 61, 1000]) == ["best"]


@pytest.mark.parametrize("unseen", [np.nan, np.inf])
def test_what_the_model_cannot_see_running_decides_nothing(unseen, taking_part):
    assert taking_part(partly=[unseen, 20, unseen], best=[10]) == ["partly", "best"]
    assert taking_part(never=[unseen], best=[10], far=[61]) == ["best"]
    assert taking_part(never=[unseen], neither=[unseen]) == ["never", "neither"]


@pytest.mark.parametrize(("dtype", "stays"), [("fp32", True), ("bf16", False)])
def test_kernels_without_tensor_cores_stay_where_nothing_has_them(dtype, stays):
    specs = ("simt", "mma")
    wanted = request("matmul", arch="sm_90", problem="4096x4096x4096", dtype=dtype, layout="nn")
    chosen = tuple(spec for spec in wanted.specs if spec.name in specs)
    assert chosen[0].operation is matmul.OPERATION
    found = list_contenders(dataclasses.replace(wanted, specs=chosen))
    assert ("simt" in {contender.name for contender in found}) == stays

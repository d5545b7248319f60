# SPDX-License-Identifier: Apache-2.0
"""matmul, spec wgmma: Hopper's tensor cores, fed by the copy engine (TMA), on sm_90a."""

from __future__ import annotations

from tunegen.kernels import matmul
from tunegen.kernels.matmul_wgmma.cost import work
from tunegen.kernels.matmul_wgmma.plans import (
    kernels,
    limits,
    needs_padding,
    operands_in_place,
    plan_over,
    refuses_any,
)
from tunegen.kernels.matmul_wgmma.space import default, space
from tunegen.model import Config, DeviceClass, KernelSpec, LaunchPlan, Problem, Sizes

# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    return plan_over(operands_in_place(p, s), c, p, s)


# --- arguments and preconditions -----------------------------------------------------------------


def refuses(p: Problem, d: DeviceClass) -> str:
    if reason := refuses_any(p, d):
        return reason
    reasons = needs_padding(p)
    return next((reason for reason in reasons.values() if reason), "")


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="wgmma",
    operation=matmul.OPERATION,
    summary="Hopper's tensor cores, fed by the copy engine",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
    suffix="a",
    preferred_dtype="bf16",
)

# SPDX-License-Identifier: Apache-2.0
"""copy, spec vector: one load and one store, bit for bit."""

from __future__ import annotations

from tunegen.kernels import vector
from tunegen.model import (
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    LaunchPlan,
    Limit,
    Point,
    Problem,
    Sizes,
    Space,
    Work,
)

# --- derived quantities --------------------------------------------------------------------------

LOADS = 1

# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    return vector.plan("copy_vector", vector.COPY, c, p, s)


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    return (
        KernelDefinition(
            "copy_vector", "vector/copy.cu.jinja", vector.types(p), vector.constants(loads=LOADS)
        ),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    return vector.limits(c, p)


# --- flops and bytes -----------------------------------------------------------------------------


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    return vector.work(vector.COPY, c, p, d, loads=LOADS, fma=0)


# --- space ---------------------------------------------------------------------------------------


def space(p: Problem, d: DeviceClass) -> Space:
    return vector.space(p, d, loads=LOADS)


def default(p: Problem, d: DeviceClass) -> Config:
    return vector.default(p, loads=LOADS)


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="vector",
    operation=vector.COPY,
    summary="several vectors a thread in flight",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=lambda p, d: vector.refuses(p),
)

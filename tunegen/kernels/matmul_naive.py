# SPDX-License-Identifier: Apache-2.0
"""matmul, spec naive: one thread an output, the baseline of every tutorial."""

from __future__ import annotations

from typing import Any

from tunegen.kernels import matmul
from tunegen.model import (
    GRID_LIMITS,
    Config,
    Constraint,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Limit,
    Point,
    Problem,
    Sizes,
    Space,
    Work,
    ceil_div,
    formula,
    minimum,
    parameters,
)

# --- derived quantities --------------------------------------------------------------------------


def threads(c: Point) -> Any:
    return c.BLOCK_M * c.BLOCK_N


def tiles(c: Point, s: Any) -> Any:
    return ceil_div(s.M, c.BLOCK_M) * ceil_div(s.N, c.BLOCK_N)


# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    grid = (formula(tiles(c, s)), 1, formula(minimum(s.B, 65535)))
    launch = Launch("matmul_naive", grid, (c.BLOCK_N, c.BLOCK_M, 1), matmul.arguments(p, s))
    return LaunchPlan((launch,))


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    return (
        KernelDefinition(
            "matmul_naive", "matmul/naive.cu.jinja", matmul.types(p), matmul.constants(p)
        ),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    return matmul.size_limits()


def refuses(p: Problem, d: DeviceClass) -> str:
    blocks = tiles(default(p, d), p)
    if blocks > GRID_LIMITS[0]:
        return f"C has {blocks} blocks of 16x16, a grid has at most {GRID_LIMITS[0]} of them in x"
    return matmul.refuses(p)


# --- flops and bytes -----------------------------------------------------------------------------


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """Per thread and step of K one load of A (broadcast in a warp when untransposed), one of B and
    one multiply-add; L1 serves the reuse inside a block, L2 that between blocks."""
    blocks = tiles(c, p) * p.B
    warps = ceil_div(threads(c), 32)
    element = p.element_bytes
    # Lines of 128 bytes that one warp touches per step: threads along N read one row of B, or one
    # element from each of many rows when B is transposed.
    b_lines = minimum(c.BLOCK_N, 32) if p.layout[1] == "t" else 1
    rows_per_warp = ceil_div(32, c.BLOCK_N)
    a_lines = 1 if p.layout[0] == "t" else rows_per_warp
    loaded = p.K * (c.BLOCK_M + c.BLOCK_N) * element
    stored = threads(c) * (1 + p.beta) * matmul.output_bytes(p)
    return Work(
        blocks=blocks,
        threads=threads(c),
        registers=40,
        shared_bytes=0,
        fma=threads(c) * p.K,
        instructions=warps * (p.K * 3 + 60),
        shared_wavefronts=0,
        l1_wavefronts=warps * p.K * (a_lines + b_lines),
        l2_bytes=blocks * (loaded + stored),
        dram_bytes=matmul.OPERATION.bytes(p),
        inflight_bytes=2 * 4 * element,
        steps=ceil_div(p.K, 4),
        overlap=0,
        unit="fp64" if p.dtype == "fp64" else "fp32",
    )


# --- space ---------------------------------------------------------------------------------------


def space(p: Problem, d: DeviceClass) -> Space:
    return Space(
        parameters(
            (
                ("BLOCK_M", (16,), "rows of C per block, threadIdx.y"),
                ("BLOCK_N", (16,), "columns of C per block, threadIdx.x"),
            )
        ),
        (Constraint("a block has at most 1024 threads", lambda c: threads(c) <= 1024),),
    )


def default(p: Problem, d: DeviceClass) -> Config:
    return Config({"BLOCK_M": 16, "BLOCK_N": 16})


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="naive",
    operation=matmul.OPERATION,
    summary="one thread an output, straight from global memory: the tutorial baseline",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
)

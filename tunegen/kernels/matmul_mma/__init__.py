# SPDX-License-Identifier: Apache-2.0
"""matmul, spec mma: the tensor cores by a warp's instructions, for rows of any alignment."""

from __future__ import annotations

from tunegen.kernels import matmul, split_k, tiled
from tunegen.kernels.matmul_mma.cost import work

# --- derived quantities --------------------------------------------------------------------------
from tunegen.kernels.matmul_mma.derived import alignments, shared_bytes, threads
from tunegen.kernels.matmul_mma.space import default, space
from tunegen.kernels.tiled import blocks
from tunegen.model import (
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Limit,
    Problem,
    Sizes,
    formula,
)

# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    grid, block = (formula(blocks(c, s)), c.SPLIT_K, 1), (threads(c), 1, 1)
    main = Launch(
        "matmul_mma", grid, block, matmul.arguments(p, s), int(shared_bytes(c, p)),
        programmatic=bool(c.PROGRAMMATIC_LAUNCH),
    )  # fmt: skip
    return LaunchPlan((main,)) if c.SPLIT_K == 1 else split_k.with_slices(main, c.SPLIT_K, p, s)


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    sliced = c.SPLIT_K > 1
    align_a, align_b = alignments(p)
    constants = {
        **matmul.constants(p),
        "ALIGN_A": align_a,
        "ALIGN_B": align_b,
        "ALIGN_C": split_k.accumulator_vector(p) if sliced else matmul.alignment_c(p),
        **(matmul.NO_EPILOGUE if sliced else {}),
    }
    types = matmul.types(p, sums=sliced)
    main = KernelDefinition("matmul_mma", "matmul/mma.cu.jinja", types, constants)
    return (main, split_k.reduce_kernel(p, c.PROGRAMMATIC_LAUNCH)) if sliced else (main,)


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    a, b = alignments(p)
    return (*matmul.size_limits(), *matmul.access_limits(p, a=a, b=b, c=matmul.alignment_c(p)))


def refuses(p: Problem, d: DeviceClass) -> str:
    if d.capability < 80:
        return f"mma needs asynchronous copies and the instructions of sm_80, not {d.arch}"
    if p.dtype not in ("fp16", "bf16", "fp64"):
        return f"mma multiplies fp16, bf16 and fp64, not {p.dtype}"
    return tiled.refuses_grid(p) or matmul.refuses(p)


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="mma",
    operation=matmul.OPERATION,
    summary="the tensor cores by a warp's instructions, for rows of any alignment",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
    preferred_dtype="bf16",
)

# SPDX-License-Identifier: Apache-2.0
"""matmul, spec simt: register and shared-memory tiles on the CUDA cores, on any architecture."""

from __future__ import annotations

from tunegen.kernels import matmul, split_k, tiled
from tunegen.kernels.matmul_simt.cost import work

# --- derived quantities --------------------------------------------------------------------------
from tunegen.kernels.matmul_simt.derived import (
    shared_bytes,
    threads,
    vector_c,
    vectors,
)
from tunegen.kernels.matmul_simt.space import default, space
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
    arguments = matmul.arguments(p, s)
    grid, block = (formula(blocks(c, s)), c.SPLIT_K, 1), (threads(c), 1, 1)
    shared = int(shared_bytes(c, p))
    main = Launch("matmul_simt", grid, block, arguments, shared)
    return LaunchPlan((main,)) if c.SPLIT_K == 1 else split_k.with_slices(main, c.SPLIT_K, p, s)


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    sliced = c.SPLIT_K > 1
    constants = {
        **matmul.constants(p),
        "ALIGN_A": matmul.alignment(p, p.lda),
        "ALIGN_B": matmul.alignment(p, p.ldb),
        "ALIGN_C": split_k.accumulator_vector(p) if sliced else matmul.alignment_c(p),
        **(matmul.NO_EPILOGUE if sliced else {}),
    }
    types = matmul.types(p, sums=sliced)
    main = KernelDefinition("matmul_simt", "matmul/simt.cu.jinja", types, constants)
    return (main, split_k.reduce_kernel(p)) if sliced else (main,)


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    a, b = map(int, vectors(c, p))
    # The kernel that adds slices up writes C as wide as it may.
    width = split_k.accumulator_vector(p) if c.SPLIT_K > 1 else int(vector_c(c, p))
    written = min(width, matmul.alignment_c(p))
    return (*matmul.size_limits(), *matmul.access_limits(p, a=a, b=b, c=written))


def refuses(p: Problem, d: DeviceClass) -> str:
    return tiled.refuses_grid(p) or matmul.refuses(p)


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="simt",
    operation=matmul.OPERATION,
    summary="register and shared-memory tiles on the CUDA cores",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
)

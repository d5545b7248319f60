# SPDX-License-Identifier: Apache-2.0
"""matmul, spec simt: register and shared-memory tiles on the CUDA cores, on any architecture."""

from __future__ import annotations

from tunegen.kernels import matmul, split_k
from tunegen.kernels.matmul_simt.cost import work

# --- derived quantities --------------------------------------------------------------------------
from tunegen.kernels.matmul_simt.derived import (
    blocks,
    shared_bytes,
    threads,
    vector_c,
    vectors,
)
from tunegen.kernels.matmul_simt.space import default, space
from tunegen.model import (
    GRID_LIMITS,
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Limit,
    Problem,
    Sizes,
    ceil_div,
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

# Rows and columns of the largest block that every element type has registers for on any device.
LARGE_BLOCK = 128


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    types = matmul.types(p)
    constants = {
        **matmul.constants(p),
        "ALIGN_A": matmul.alignment(p, p.lda),
        "ALIGN_B": matmul.alignment(p, p.ldb),
    }
    if c.SPLIT_K == 1:
        constants["ALIGN_C"] = matmul.alignment(p, p.ldc)
        return (KernelDefinition("matmul_simt", "matmul/simt.cu.jinja", types, constants),)
    slices = {**constants, "ALIGN_C": split_k.accumulator_vector(p), "READS_C": 0}
    return (
        KernelDefinition("matmul_simt", "matmul/simt.cu.jinja", types, slices),
        split_k.reduce_kernel(p),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """What vector accesses rely on. Batch strides are whole rows, so theirs follows. Addresses are
    limited through ``align``, which all three keep: the batch has the name of an operand."""
    a, b = vectors(c, p)
    # The kernel that adds slices up writes C as wide as it may.
    width = split_k.accumulator_vector(p) if c.SPLIT_K > 1 else vector_c(c, p)
    used = {"lda": a, "ldb": b, "ldc": min(width, matmul.alignment(p, p.ldc))}
    widest = max(int(elements) for elements in used.values())
    return (
        *matmul.size_limits(),
        *(Limit(ld, "multiple_of", int(n)) for ld, n in used.items() if n > 1),
        *((Limit("align", "multiple_of", widest * p.element_bytes),) if widest > 1 else ()),
    )


def refuses(p: Problem, d: DeviceClass) -> str:
    fewest = p.B * ceil_div(p.M, LARGE_BLOCK) * ceil_div(p.N, LARGE_BLOCK)
    if fewest > GRID_LIMITS[0]:
        return (
            f"C has {fewest} blocks of {LARGE_BLOCK}x{LARGE_BLOCK}, "
            f"a grid has at most {GRID_LIMITS[0]} of them in x"
        )
    return matmul.refuses(p)


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

# SPDX-License-Identifier: Apache-2.0
"""matmul, spec simt: register and shared-memory tiles on the CUDA cores, on any architecture."""

from __future__ import annotations

from tunegen.kernels import matmul
from tunegen.kernels.matmul_simt.cost import work

# --- derived quantities --------------------------------------------------------------------------
from tunegen.kernels.matmul_simt.derived import (
    REDUCE_THREADS,
    accumulator_bytes,
    accumulator_vector,
    alignment,
    blocks,
    reduce_blocks,
    shared_bytes,
    strips,
    threads,
    vectors,
)
from tunegen.kernels.matmul_simt.space import default, space
from tunegen.model import (
    GRID_LIMITS,
    Argument,
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
    if c.SPLIT_K == 1:
        return LaunchPlan((Launch("matmul_simt", grid, block, arguments, shared),))

    # Rows of partial sums are padded to whole vectors, matrices are stored back to back.
    row = ceil_div(s.N, accumulator_vector(p)) * accumulator_vector(p)
    partials = Argument("partials", "workspace")
    own = {
        "C": partials,
        "ldc": Argument("ldc", "int64", formula(row)),
        "batch_stride_c": Argument("batch_stride_c", "int64", formula(s.M * row)),
    }
    named = {argument.name: argument for argument in arguments}
    reduce = ("C", "batch", "m", "n", "ldc", "batch_stride_c", "alpha", "beta")
    return LaunchPlan(
        (
            Launch(
                "matmul_simt", grid, block, tuple(own.get(a.name, a) for a in arguments), shared
            ),
            Launch(
                "matmul_split_k_reduce",
                (formula(reduce_blocks(p, s)), 1, 1),
                (REDUCE_THREADS, 1, 1),
                (partials, *(named[name] for name in reduce)),
            ),
        ),
        workspace_bytes=formula(s.B * s.M * row * (c.SPLIT_K * accumulator_bytes(p))),
    )


# --- arguments and preconditions -----------------------------------------------------------------

# Rows and columns of the largest block that every element type has registers for on any device.
LARGE_BLOCK = 128


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    types = matmul.types(p)
    align_c = alignment(p, p.ldc)
    constants = {
        **matmul.constants(p),
        "ALIGN_A": alignment(p, p.lda),
        "ALIGN_B": alignment(p, p.ldb),
    }
    if c.SPLIT_K == 1:
        constants["ALIGN_C"] = align_c
        return (KernelDefinition("matmul_simt", "matmul/simt.cu.jinja", types, constants),)
    slices = {**constants, "ALIGN_C": accumulator_vector(p), "READS_C": 0}
    reduce = {"READS_C": p.beta, "ALIGN_C": align_c, "REDUCE_THREADS": REDUCE_THREADS}
    return (
        KernelDefinition("matmul_simt", "matmul/simt.cu.jinja", types, slices),
        KernelDefinition("matmul_split_k_reduce", "matmul/split_k_reduce.cu.jinja", types, reduce),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """What vector accesses rely on. Batch strides are whole rows, so theirs follows. Addresses are
    limited through ``align``, which all three keep: the batch has the name of an operand."""
    a, b = vectors(c, p)
    width = accumulator_vector(p) if c.SPLIT_K > 1 else strips(c, p)[1]
    used = {"lda": a, "ldb": b, "ldc": min(c.VECTOR_WIDTH, alignment(p, p.ldc), width)}
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

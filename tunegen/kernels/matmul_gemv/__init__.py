# SPDX-License-Identifier: Apache-2.0
"""matmul, spec gemv: dot products on the CUDA cores for few rows of A, on any architecture."""

from __future__ import annotations

from tunegen.kernels import matmul
from tunegen.kernels.matmul_gemv.cost import work

# --- derived quantities --------------------------------------------------------------------------
from tunegen.kernels.matmul_gemv.derived import (
    groups,
    in_cluster,
    shared_bytes,
    slice_bytes,
    takes_tickets,
    threads,
    ticket_bytes,
    vector_a,
    vector_b,
)
from tunegen.kernels.matmul_gemv.space import MOST_ROWS, WIDEST_BLOCK, default, space
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
    """One launch: blocks for all columns along x, for the slices of K along y. Partial sums and
    the tickets that count them are zeros before and after."""
    arguments = matmul.arguments(p, s)
    workspace: int | str = 0
    if takes_tickets(c):
        tickets = ticket_bytes(c, s)
        slices = (
            Argument("tickets", "workspace"),
            Argument("partials", "workspace", formula(tickets)),
        )
        first = [argument.name for argument in arguments].index("batch")
        arguments = (*arguments[:first], *slices, *arguments[first:])
        workspace = formula(tickets + groups(c, s) * int(c.SPLIT_K * slice_bytes(c, p)))
    launch = Launch(
        "matmul_gemv",
        (formula(groups(c, s)), c.SPLIT_K, 1),
        (threads(c), 1, 1),
        arguments,
        int(shared_bytes(c, p)),
        (1, c.SPLIT_K, 1) if in_cluster(c) else (1, 1, 1),
        bool(c.PROGRAMMATIC_LAUNCH),
    )
    return LaunchPlan((launch,), workspace, "zero" if workspace else "none")


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    constants = {
        **matmul.constants(p),
        "ALIGN_A": matmul.alignment(p, p.lda),
        "ALIGN_B": matmul.alignment(p, p.ldb),
    }
    template = "matmul/gemv.cu.jinja"
    return (KernelDefinition("matmul_gemv", template, matmul.types(p), constants),)


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """How many rows fit, and what vector accesses rely on: see matmul simt."""
    a, b = int(vector_a(c, p)), int(vector_b(c, p))
    return (
        *(limit for limit in matmul.size_limits() if limit.quantity != "M"),
        Limit("M", "at_most", c.ROWS),
        *matmul.access_limits(p, a=a, b=b),
    )


def refuses(p: Problem, d: DeviceClass) -> str:
    if p.M > MOST_ROWS:
        return (
            f"M={p.M}: each thread keeps the sums of all rows of C in registers, "
            f"and has room for {MOST_ROWS}"
        )
    fewest = p.B * ceil_div(p.N, WIDEST_BLOCK)
    if fewest > GRID_LIMITS[0]:
        return (
            f"C has {fewest} blocks of {WIDEST_BLOCK} columns, "
            f"a grid has at most {GRID_LIMITS[0]} of them in x"
        )
    return matmul.refuses(p)


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="gemv",
    operation=matmul.OPERATION,
    summary="few rows: dot products on the CUDA cores, as fast as B comes in",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
)

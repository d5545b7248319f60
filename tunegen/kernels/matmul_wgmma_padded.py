# SPDX-License-Identifier: Apache-2.0
"""matmul, spec wgmma_padded: wgmma on copies, for operands whose rows do not lie in whole lines.

The copy engine cannot read rows that are not whole 16 bytes, and is slow where they are not whole
lines of 128: a box of 128 bytes a row then touches two lines each. Such rows are copied to whole
lines: one pass over the operands, which is small beside a large product. Copies of a few megabytes
are still in L2 when they are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunegen.kernels import matmul, split_k
from tunegen.kernels.matmul_wgmma import cost
from tunegen.kernels.matmul_wgmma.derived import ATOM
from tunegen.kernels.matmul_wgmma.plans import (
    ALIGNED,
    TMA_BYTES,
    Stored,
    needs_padding,
    operands_in_place,
    own_limits,
    plan_over,
    refuses_any,
    stores_by_copy_engine,
)
from tunegen.kernels.matmul_wgmma.plans import kernels as product_kernels
from tunegen.kernels.matmul_wgmma.space import default, space
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
    Point,
    Problem,
    Sizes,
    Work,
    ceil_div,
    formula,
    minimum,
)

# --- derived quantities --------------------------------------------------------------------------

PAD = "matmul_pad_rows"
PAD_THREADS, PAD_UNROLL = 256, 4  # threads of a block, vectors that each of them copies

# Copies begin where any kernel may assume aligned addresses.
BASE_BYTES = 256


def stored_shape(which: int, p: Problem, s: Sizes) -> tuple[Any, Any]:
    """Rows of one matrix A (0) or B (1) as stored, and their length."""
    rows, columns = ((s.M, s.K), (s.N, s.K))[which]
    if (p.layout[0] == "t", p.layout[1] == "n")[which]:
        rows, columns = columns, rows
    return rows, columns


def copy_blocks(rows: Any, columns: Any) -> Any:
    return ceil_div(rows * ceil_div(columns, ALIGNED), PAD_THREADS * PAD_UNROLL)


def padded(columns: Any) -> Any:
    return ceil_div(columns, ATOM) * ATOM


def copied(p: Problem) -> tuple[str, ...]:
    """The operands that are copied."""
    reasons = needs_padding(p)
    ragged = {"A": p.lda % ATOM, "B": p.ldb % ATOM}
    return tuple(name for name in "AB" if reasons[name] or ragged[name])


# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    """Copies of what needs one, then the product. The workspace holds the sums of slices of K
    first, then the copies."""
    operands = list(operands_in_place(p, s))
    end: Any = 0 if c.SPLIT_K == 1 else _whole(split_k.partial_bytes(c.SPLIT_K, p, s))
    copies = []
    for which, name in enumerate("AB"):
        if name not in copied(p):
            continue
        rows, columns = stored_shape(which, p, s)
        width = padded(columns)
        copies.append(_copy(which, end, rows, columns, c, s))
        operands[which] = Stored("workspace", width, rows * width, end)
        end = end + _whole(s.B * rows * width * 2)
    product = plan_over((operands[0], operands[1]), c, p, s)
    return replace(product, launches=(*copies, *product.launches), workspace_bytes=formula(end))


def _whole(size: Any) -> Any:
    return ceil_div(size, BASE_BYTES) * BASE_BYTES


def _copy(which: int, offset: Any, rows: Any, columns: Any, c: Config, s: Sizes) -> Launch:
    rows = s.B * rows
    arguments = (
        Argument("AB"[which], "pointer"),
        Argument("padded", "workspace", formula(offset)),
        Argument("rows", "int64", formula(rows)),
        Argument("columns", "int32", formula(columns)),
        Argument("ld", "int64", formula((s.lda, s.ldb)[which])),
        Argument("padded_ld", "int64", formula(padded(columns))),
    )
    blocks = copy_blocks(rows, columns)
    # Nothing is copied where C has no elements: there is no product to read it.
    needed = minimum((s.N, s.M)[which], 1)
    return Launch(
        PAD, (formula(blocks), formula(needed), 1), (PAD_THREADS, 1, 1), arguments,
        programmatic=bool(c.PROGRAMMATIC_LAUNCH),
    )  # fmt: skip


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    own = {"PAD_THREADS": PAD_THREADS, "PAD_UNROLL": PAD_UNROLL}
    product = product_kernels(c, p)
    return (*product, KernelDefinition(PAD, "matmul/pad_rows.cu.jinja", {}, own))


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """Operands that are not copied have to be as the copy engine needs them."""
    in_place = [ld for name, ld in (("A", "lda"), ("B", "ldb")) if name not in copied(p)]
    mapped = bool(in_place) or stores_by_copy_engine(c, p)
    align = TMA_BYTES if mapped else matmul.alignment_c(p) * matmul.output_bytes(p)
    return (
        *own_limits(c, p),
        *(Limit(ld, "multiple_of", ALIGNED) for ld in in_place),
        *((Limit("align", "multiple_of", align),) if align > matmul.output_bytes(p) else ()),
    )


def refuses(p: Problem, d: DeviceClass) -> str:
    if reason := refuses_any(p, d):
        return reason
    if not copied(p):
        return "the rows of A and B are whole lines: wgmma reads them where they lie"
    shapes = (stored_shape(which, p, Sizes(p.names)) for which in (0, 1))
    blocks = max(int(copy_blocks(p.B * rows, columns)) for rows, columns in shapes)
    if blocks > GRID_LIMITS[0]:
        return f"copies need {blocks} blocks, a grid has at most {GRID_LIMITS[0]} of them in x"
    return ""


# --- flops and bytes -----------------------------------------------------------------------------


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    product = cost.work(c, p, d)
    names = copied(p)
    elements = {"A": p.B * p.M * p.K, "B": p.B * p.N * p.K}
    moved = sum(2 * elements[name] * p.element_bytes for name in names)
    return replace(
        product,
        extra_launches=product.extra_launches + len(names),
        extra_bytes=product.extra_bytes + moved,
    )


# --- spec ----------------------------------------------------------------------------------------

SPEC = KernelSpec(
    name="wgmma_padded",
    operation=matmul.OPERATION,
    summary="wgmma on copies of operands whose rows do not lie in whole lines",
    space=space,
    default=default,
    kernels=kernels,
    plan=plan,
    work=work,
    limits=limits,
    refuses=refuses,
    suffix="a",
)

# SPDX-License-Identifier: Apache-2.0
"""matmul, spec wgmma_padded: wgmma on copies, for operands whose rows do not lie in whole lines.

The copy engine cannot read rows that are not whole 16 bytes, and is slow where they are not whole
lines of 128: a box of 128 bytes a row then touches two lines each. Such rows are copied to whole
lines: one launch, one pass over the operands, which is small beside a large product. Copies of a
few megabytes are still in L2 when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunegen.kernels import matmul
from tunegen.kernels.matmul_wgmma import cost
from tunegen.kernels.matmul_wgmma.derived import ALIGNED, ATOM, TMA_BYTES
from tunegen.kernels.matmul_wgmma.plans import (
    Stored,
    needs_padding,
    operands_in_place,
    own_limits,
    partial_bytes,
    plan_over,
    refuses_any,
    stores_by_copy_engine,
    whole_bases,
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
PAD_THREADS = 256

# Vectors that a thread copies, most first. More of them divide what a thread does once, and are
# loaded at once, but leave fewer blocks.
PAD_UNROLLS = (4, 2, 1)

# Blocks that there should be, whatever the unrolling: two on each multiprocessor of an H100 SXM or
# an H200, which have the most of capability 9.0. A kernel is made for its capability, not for a
# device: with fewer multiprocessors it has more blocks on each.
PAD_BLOCKS = 2 * 132


def stored_shape(which: int, p: Problem, s: Sizes) -> tuple[Any, Any]:
    """Rows of one matrix A (0) or B (1) as stored, and their length."""
    rows, columns = ((s.M, s.K), (s.N, s.K))[which]
    if (p.layout[0] == "t", p.layout[1] == "n")[which]:
        rows, columns = columns, rows
    return rows, columns


def pad_unroll(p: Problem) -> int:
    """Vectors that a thread copies: as many as leave enough blocks for both operands together."""
    s = Sizes(p.names)
    shapes = (stored_shape(which, p, s) for which in copied(p))
    vectors = sum(p.B * rows * ceil_div(columns, ALIGNED) for rows, columns in shapes)
    enough = (u for u in PAD_UNROLLS if vectors >= PAD_BLOCKS * PAD_THREADS * u)
    return next(enough, PAD_UNROLLS[-1])


def copy_blocks(rows: Any, columns: Any, unroll: int) -> Any:
    return ceil_div(rows * ceil_div(columns, ALIGNED), PAD_THREADS * unroll)


def padded(columns: Any) -> Any:
    return ceil_div(columns, ATOM) * ATOM


def copied(p: Problem) -> tuple[int, ...]:
    """The operands that are copied: A (0), B (1)."""
    reasons = needs_padding(p)
    ragged = {"A": p.lda % ATOM, "B": p.ldb % ATOM}
    return tuple(which for which, name in enumerate("AB") if reasons[name] or ragged[name])


# --- launch geometry -----------------------------------------------------------------------------


def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    """Copies of what needs one, then the product. The workspace holds sums that are added
    up first, then the copies."""
    operands = list(operands_in_place(p, s))
    end: Any = whole_bases(partial_bytes(c, p, s))
    offsets = []
    for which in copied(p):
        rows, columns = stored_shape(which, p, s)
        width = padded(columns)
        operands[which] = Stored("workspace", width, rows * width, end)
        offsets.append(end)
        end = end + whole_bases(s.B * rows * width * 2)
    product = plan_over((operands[0], operands[1]), c, p, s)
    launches = (_copy(offsets, c, p, s), *product.launches)
    return replace(product, launches=launches, workspace_bytes=formula(end))


def _copy(offsets: Sequence[Any], c: Config, p: Problem, s: Sizes) -> Launch:
    """One launch for all copies: blocks of the first one, then those of the second."""
    arguments: list[Argument] = []
    blocks: Any = 0
    last = copied(p)[-1:]
    for which, offset in zip(copied(p), offsets, strict=True):
        rows, columns = stored_shape(which, p, s)
        prefix = "" if which in last else "first_"
        blocks = blocks + copy_blocks(s.B * rows, columns, pad_unroll(p))
        arguments += (
            Argument("AB"[which], "pointer"),
            Argument(f"{prefix}padded", "workspace", formula(offset)),
            Argument(f"{prefix}rows", "int64", formula(s.B * rows)),
            Argument(f"{prefix}columns", "int32", formula(columns)),
            Argument(f"{prefix}ld", "int64", formula((s.lda, s.ldb)[which])),
            Argument(f"{prefix}padded_ld", "int64", formula(padded(columns))),
        )
        if prefix:
            arguments.append(Argument("first_blocks", "int32", formula(blocks)))
    # Nothing is copied where C has no elements: there is no product to read it.
    needed = minimum(minimum(s.M, s.N), 1)
    return Launch(
        PAD, (formula(blocks), formula(needed), 1), (PAD_THREADS, 1, 1), tuple(arguments),
        programmatic=bool(c.PROGRAMMATIC_LAUNCH),
    )  # fmt: skip


# --- arguments and preconditions -----------------------------------------------------------------


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    own = {
        "PAD_THREADS": PAD_THREADS,
        "PAD_UNROLL": pad_unroll(p),
        "PAD_MATRICES": len(copied(p)),
    }
    product = product_kernels(c, p)
    return (*product, KernelDefinition(PAD, "matmul/pad_rows.cu.jinja", {}, own))


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """Operands that are not copied have to be as the copy engine needs them."""
    in_place = [ld for which, ld in enumerate(("lda", "ldb")) if which not in copied(p)]
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
    shapes = (stored_shape(which, p, Sizes(p.names)) for which in copied(p))
    unroll = pad_unroll(p)
    blocks = sum(int(copy_blocks(p.B * rows, columns, unroll)) for rows, columns in shapes)
    if blocks > GRID_LIMITS[0]:
        return f"copies need {blocks} blocks, a grid has at most {GRID_LIMITS[0]} of them in x"
    return ""


# --- flops and bytes -----------------------------------------------------------------------------


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    product = cost.work(c, p, d)
    elements = (p.B * p.M * p.K, p.B * p.N * p.K)
    moved = sum(2 * elements[which] * p.element_bytes for which in copied(p))
    return replace(
        product,
        extra_launches=product.extra_launches + 1,
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

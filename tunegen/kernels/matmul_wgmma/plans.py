# SPDX-License-Identifier: Apache-2.0
"""Launches of matmul wgmma: kernels, tensor maps, and what they rely on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tunegen.kernels import matmul, split_k
from tunegen.kernels.matmul_wgmma.derived import (
    ALIGNED,
    ATOM,
    CONSUMER_REGISTERS,
    TMA_BYTES,
    across,
    box_columns,
    cluster,
    consumer_bytes,
    direct_store,
    resident_clusters,
    right_across,
    right_columns,
    shared_bytes,
    store_columns,
    takes_copies_of_c,
    threads,
    tile_consumers,
    turns,
)
from tunegen.model import (
    SM_COUNT,
    Argument,
    Config,
    DeviceClass,
    KernelDefinition,
    Launch,
    LaunchPlan,
    Limit,
    Problem,
    Sizes,
    TensorMap,
    ceil_div,
    formula,
    minimum,
)

# Arguments of a matmul, besides maps of its operands.
_TAKEN = (
    "C", "bias", "flags", "slots", "batch", "m", "n", "k", "ldc", "batch_stride_c", "alpha",
    "beta",
)  # fmt: skip

# What lies in the workspace begins where any kernel may assume aligned addresses.
BASE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Stored:
    """How an operand lies in memory: in which array, at which byte, and how many elements its rows
    and its matrices are apart."""

    array: str
    ld: Any
    stride: Any
    offset: Any = 0


def operands_in_place(p: Problem, s: Sizes) -> tuple[Stored, Stored]:
    strides = matmul.batch_strides(s, p.layout)
    return Stored("A", s.lda, strides[0]), Stored("B", s.ldb, strides[1])


def plan_over(operands: tuple[Stored, Stored], c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    """The product of operands that the copy engine can read; a persistent grid takes the tiles."""
    size = int(cluster(c))
    wanted = turns(c, s)
    if c.STREAM_K:
        wanted = wanted * ceil_div(s.K, c.BLOCK_K)
    blocks = minimum(wanted, resident_clusters(c, getattr(s, SM_COUNT))) * size
    maps = [_operand_map(which, operands[which], c, p, s) for which in (0, 1)]
    left, right = (maps[1], maps[0]) if c.SWAP_OPERANDS else (maps[0], maps[1])
    if stores_by_copy_engine(c, p):
        maps.append(_c_map(c, p, s))
    named = {argument.name: argument for argument in matmul.arguments(p, s)}
    if c.STREAM_K:
        named["flags"] = Argument("flags", "workspace")
        named["slots"] = Argument("slots", "workspace", formula(flag_bytes(c, s)))
    arguments = (
        Argument(left.name, "tensor_map"),
        Argument(right.name, "tensor_map"),
        # A kernel that does not store through a map of C is given any.
        Argument(maps[-1].name, "tensor_map"),
        *(named[name] for name in _TAKEN if name in named),
    )
    main = Launch(
        "matmul_wgmma", (formula(blocks), 1, 1), (int(threads(c)), 1, 1), arguments,
        int(shared_bytes(c, p)), programmatic=bool(c.PROGRAMMATIC_LAUNCH),
    )  # fmt: skip
    if c.STREAM_K:
        return LaunchPlan(
            (main,), formula(partial_bytes(c, p, s)), "zero", tuple(maps),
            formula(flag_bytes(c, s)),
        )  # fmt: skip
    if c.SPLIT_K == 1:
        return LaunchPlan((main,), tensor_maps=tuple(maps))
    return replace(split_k.with_slices(main, c.SPLIT_K, p, s), tensor_maps=tuple(maps))


def whole_bases(size: Any) -> Any:
    """``size`` rounded up to where the next thing in the workspace may begin."""
    return ceil_div(size, BASE_BYTES) * BASE_BYTES


def flag_bytes(c: Config, s: Sizes) -> Any:
    """A flag for each slot, at the start of the workspace. How many there are depends on the
    device alone: a workspace serves calls of all sizes."""
    return whole_bases(int(tile_consumers(c)) * getattr(s, SM_COUNT) * 4)


def partial_bytes(c: Config, p: Problem, s: Sizes) -> Any:
    """Workspace for sums that other blocks add up, at its start; 0 where there are none."""
    if c.STREAM_K:
        return flag_bytes(c, s) + getattr(s, SM_COUNT) * int(tile_consumers(c) * consumer_bytes(c))
    return 0 if c.SPLIT_K == 1 else split_k.partial_bytes(c.SPLIT_K, p, s)


def _operand_map(which: int, stored: Stored, c: Config, p: Problem, s: Sizes) -> TensorMap:
    """A box is what one block brings of 64 elements along the rows as stored, swizzled: all rows
    of its tile, or its part of them where the blocks of a cluster share."""
    runs_across = across(p)[which]
    rows = (s.M, s.N)[which]
    sharers = (c.CLUSTER_N, c.CLUSTER_M)[which]
    tile = (c.BLOCK_M, c.BLOCK_N)[which]
    height = (c.BLOCK_K if runs_across else tile) // sharers
    return TensorMap(
        name=("a_map", "b_map")[which],
        array=stored.array,
        dtype=p.dtype,
        extents=tuple(map(formula, (rows, s.K, s.B) if runs_across else (s.K, rows, s.B))),
        strides=(formula(2 * stored.ld), formula(2 * stored.stride)),
        box=(ATOM, height, 1),
        swizzle=128,
        l2_promotion=c.L2_PROMOTION,
        offset=formula(stored.offset),
    )


def _c_map(c: Config, p: Problem, s: Sizes) -> TensorMap:
    columns = int(box_columns(c))
    height = int(store_columns(c)) if c.SWAP_OPERANDS else ATOM
    return TensorMap(
        name="c_map",
        array="C",
        dtype=matmul.output(p),
        extents=tuple(map(formula, (s.N, s.M, s.B))),
        strides=(formula(2 * s.ldc), formula(2 * matmul.batch_strides(s, p.layout)[2])),
        box=(columns, height, 1),
        swizzle=2 * columns,
        l2_promotion=0,
    )


def stores_by_copy_engine(c: Config, p: Problem) -> bool:
    return not direct_store(c, p) and takes_copies_of_c(p)


def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    a_across, b_across = across(p)
    own = {
        "IS_FP16": int(p.dtype == "fp16"),
        "MMA_N": int(right_columns(c)),
        "LEFT_ACROSS": int(b_across if c.SWAP_OPERANDS else a_across),
        "RIGHT_ACROSS": int(right_across(c, p)),
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS[c.CONSUMERS, c.PRODUCER_REGISTERS],
        "STORE_COLUMNS": int(store_columns(c)),
        "DIRECT_STORE": int(direct_store(c, p)),
        "TMA_STORE": int(stores_by_copy_engine(c, p)),
        "ALIGN_C": matmul.alignment_c(p),
        **(matmul.epilogue(p) if c.SPLIT_K == 1 else matmul.NO_EPILOGUE),
    }
    types = {"Output": "fp32" if c.SPLIT_K > 1 else matmul.output(p)}
    main = KernelDefinition("matmul_wgmma", "matmul/wgmma.cu.jinja", types, own)
    if c.SPLIT_K == 1:
        return (main,)
    return (main, split_k.reduce_kernel(p, c.PROGRAMMATIC_LAUNCH))


def own_limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """What the kernel relies on apart from its operands: extents that are not empty, and how C is
    stored."""
    stored = ALIGNED if stores_by_copy_engine(c, p) else matmul.alignment_c(p)
    return (
        *matmul.size_limits(),
        Limit("K", "at_least", 1),
        # Turns are counted in 31 bits. Memory bounds them where matrices are larger than tiles.
        *((Limit("B", "at_most", matmul.INT32_MAX // (2 * c.SPLIT_K)),) if c.SPLIT_K > 1 else ()),
        *((Limit("ldc", "multiple_of", stored),) if stored > 1 else ()),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """What the copy engine demands of operands besides: whole 16 bytes."""
    return (
        *own_limits(c, p),
        Limit("lda", "multiple_of", ALIGNED),
        Limit("ldb", "multiple_of", ALIGNED),
        Limit("align", "multiple_of", TMA_BYTES),
    )


def needs_padding(p: Problem) -> dict[str, str]:
    """For A and B why the copy engine cannot read it where it lies, or the empty string."""
    found = {}
    for operand, name in (("A", "lda"), ("B", "ldb")):
        reason = ""
        if p.names[name] % ALIGNED:
            reason = f"{name}={p.names[name]}: the copy engine needs rows of whole 16 bytes"
        elif p.align % TMA_BYTES:
            reason = f"align={p.align}: the copy engine needs addresses of whole 16 bytes"
        found[operand] = reason
    return found


def refuses_any(p: Problem, d: DeviceClass) -> str:
    """What no copy of operands mends."""
    if d.capability != 90:
        return f"wgmma is an instruction of sm_90a, not of {d.arch}"
    if p.dtype not in ("fp16", "bf16"):
        return f"wgmma multiplies fp16 and bf16, not {p.dtype}"
    if p.K == 0:
        return "K=0: the copy engine reads nothing of an operand without elements"
    return matmul.refuses(p)

# SPDX-License-Identifier: Apache-2.0
"""Derived quantities of matmul gemv: each as the template computes it, for a config or columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels import tiled
from tunegen.kernels.matmul import ACCESS_BYTES, alignment
from tunegen.kernels.split_k import accumulator_bytes, accumulator_vector
from tunegen.kernels.tiled import WARP
from tunegen.model import Point, Problem, Sizes, ceil_div, maximum, minimum

TICKET_BYTES = 4


def threads(c: Point) -> Any:
    return WARP * c.WARPS_N * c.WARPS_K


def block_n(c: Point) -> Any:
    """Columns of C per block."""
    return c.WARPS_N * (WARP // c.LANES_K) * c.COLS


def along_k(p: Problem) -> bool:
    """Whether the rows of B, as stored, run along K."""
    return p.layout[1] == "t"


def vector_b(c: Point, p: Problem) -> Any:
    """Elements of one access to B."""
    aligned = alignment(p, p.ldb)
    return aligned + 0 * c.COLS if along_k(p) else minimum(aligned, c.COLS)


def run_k(c: Point, p: Problem) -> Any:
    """Consecutive steps of K that a thread takes in a round."""
    return vector_b(c, p) if along_k(p) else accumulator_vector(p)


def loads(c: Point, p: Problem) -> Any:
    """Accesses of a thread to B in a round."""
    return run_k(c, p) * c.COLS // vector_b(c, p)


def unit_k(c: Point, p: Problem) -> Any:
    """Steps of K of which slices are whole multiples."""
    return c.LANES_K * run_k(c, p)


def round_k(c: Point, p: Problem) -> Any:
    return c.WARPS_K * unit_k(c, p)


def turn_k(c: Point, p: Problem) -> Any:
    """Steps of K of one turn of the unrolled loop, all of which are under way at once."""
    return c.UNROLL * round_k(c, p)


def bytes_under_way(c: Point, p: Problem) -> Any:
    """Bytes of B that a thread has asked for and not used yet."""
    return c.UNROLL * loads(c, p) * vector_b(c, p) * p.element_bytes


def vector_a(c: Point, p: Problem) -> Any:
    """Elements of one access to A in global memory."""
    if p.layout[0] == "t":
        return 1 + 0 * c.TILE_K
    run = run_k(c, p)
    part = np.where(c.TILE_K > 0, minimum(run, accumulator_vector(p)), run)
    return minimum(alignment(p, p.lda), part)


def takes_tickets(c: Point) -> Any:
    return (c.SPLIT_K > 1) & (c.REDUCE == 0)


def in_cluster(c: Point) -> Any:
    return (c.SPLIT_K > 1) & (c.REDUCE == 1)


def shared_bytes(c: Point, p: Problem) -> Any:
    """The tile of A, and the sums of every warp along K."""
    return c.ROWS * (c.TILE_K + c.WARPS_K * block_n(c)) * accumulator_bytes(p)


def registers_needed(c: Point, p: Problem) -> Any:
    """Registers per thread below which ptxas mostly spills: sums, what is under way, half of what
    a part of a run is widened to, addresses of rows and columns, and what the rest took in some
    140 compilations for sm_90 with NVRTC 13.0, of which one in fifteen spills nevertheless."""
    words = accumulator_bytes(p) // 4
    run = run_k(c, p)
    part = minimum(run, accumulator_vector(p))
    # An element narrower than a register has one to itself.
    width = maximum(vector_b(c, p) * p.element_bytes, 4) // 4
    under_way = c.UNROLL * loads(c, p) * width
    columns = c.COLS if along_k(p) else c.COLS // vector_b(c, p)
    rows = np.where(c.TILE_K > 0, 0, c.ROWS)
    steps = 0 if along_k(p) else c.UNROLL * run // 2  # offsets of rows of B
    return (
        c.ROWS * c.COLS * words
        + part * (c.COLS + 1) * words // 2
        + under_way
        + 2 * (columns + rows)
        + c.ROWS
        + steps
        + 8 * words
        + 15
    )


def register_limit(c: Point) -> Any:
    return tiled.register_limit(c, threads(c))


def groups(c: Point, s: Any) -> Any:
    """Blocks for one slice of K of every matrix; none where C has no rows."""
    return ceil_div(s.N, block_n(c)) * s.B * minimum(s.M, 1)


def depth(c: Point, p: Problem) -> Any:
    """Steps of K of the longest slice."""
    return minimum(ceil_div(ceil_div(p.K, unit_k(c, p)), c.SPLIT_K) * unit_k(c, p), p.K)


def rounds(c: Point, p: Problem) -> Any:
    return ceil_div(depth(c, p), round_k(c, p))


def slice_bytes(c: Point, p: Problem) -> Any:
    """Bytes of one block's sums of a slice."""
    return c.ROWS * block_n(c) * accumulator_bytes(p)


def ticket_bytes(c: Point, s: Sizes) -> Any:
    """Bytes of the tickets, before the partial sums in the workspace."""
    return ceil_div(groups(c, s) * TICKET_BYTES, ACCESS_BYTES) * ACCESS_BYTES

# SPDX-License-Identifier: Apache-2.0
"""Derived quantities of matmul mma, as the template computes them, for a config or columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels import tiled
from tunegen.kernels.matmul import ACCESS_BYTES, alignment, alignment_c
from tunegen.kernels.matmul import output_bytes as result_bytes
from tunegen.kernels.split_k import accumulator_bytes, accumulator_vector
from tunegen.kernels.tiled import WARP
from tunegen.model import DeviceClass, Point, Problem, ceil_div, maximum, minimum

MOST_SUMS = 128  # registers of a thread

# The part of the tensor cores' rate that a warp's instructions reach where larger ones have come
# (wgmma, tcgen05). Estimate from Hopper: 60 to 65 %.
RATE_KEPT = 0.62

ROW_GAP = 8  # elements between rows of sums that wait in shared memory


def threads(c: Point) -> Any:
    return c.BLOCK_M // c.WARP_M * (c.BLOCK_N // c.WARP_N) * WARP


def across(p: Problem) -> tuple[bool, bool]:
    """Whether the rows of A and of B, as stored, run across K."""
    return p.layout[0] == "t", p.layout[1] == "n"


def alignments(p: Problem) -> tuple[int, int]:
    """Elements that the rows of A and of B are aligned to."""
    return alignment(p, p.lda), alignment(p, p.ldb)


def is_shifted(p: Problem, operand: int) -> bool:
    """Whether rows begin at any 16-bit element, so that copies pass through registers."""
    return alignments(p)[operand] * p.element_bytes < 4


def vector(p: Problem, operand: int) -> int:
    """Elements per copy to shared memory."""
    return 2 if is_shifted(p, operand) else alignments(p)[operand]


def row_vectors(c: Point, p: Problem, operand: int) -> Any:
    """Copies that make a row of an operand's tile."""
    tile = (c.BLOCK_M, c.BLOCK_N)[operand]
    return (tile if across(p)[operand] else c.BLOCK_K) // vector(p, operand)


def copies(c: Point, p: Problem, operand: int) -> Any:
    """Copies of a thread for one tile of an operand, as whole rows are shared out."""
    tile = (c.BLOCK_M, c.BLOCK_N)[operand]
    rows = c.BLOCK_K if across(p)[operand] else tile
    row, count = row_vectors(c, p, operand), maximum(threads(c), 1)
    side_by_side = maximum(minimum(row, count), 1)
    return ceil_div(rows, maximum(count // side_by_side, 1)) * (row // side_by_side)


def step(c: Point, p: Problem) -> Any:
    """Steps of K that a fragment has."""
    return 16 if p.element_bytes == 2 else maximum(8, c.MMA_K)


def steps(c: Point, p: Problem) -> Any:
    """Fragments of a tile along K."""
    return c.BLOCK_K // step(c, p)


def sums_registers(c: Point, p: Problem) -> Any:
    return c.WARP_M * c.WARP_N // WARP * (accumulator_bytes(p) // 4)


def stage_bytes(c: Point, p: Problem) -> Any:
    return (c.BLOCK_M + c.BLOCK_N) * c.BLOCK_K * p.element_bytes


def output_bytes(c: Point, p: Problem) -> Any:
    """Of an element that the main kernel writes: of C, or of a slice's sums."""
    return np.where(c.SPLIT_K > 1, accumulator_bytes(p), result_bytes(p))


def reads_c(c: Point, p: Problem) -> Any:
    return np.where(c.SPLIT_K > 1, 0, p.beta)


def store_vector(c: Point, p: Problem) -> Any:
    """Elements per access to what the main kernel writes."""
    aligned = np.where(c.SPLIT_K > 1, accumulator_vector(p), alignment_c(p))
    widest = np.where(c.STAGED_STORE, ACCESS_BYTES // output_bytes(c, p), 2)
    return minimum(aligned, widest)


def staged_bytes(c: Point, p: Problem) -> Any:
    """16 rows of sums of each warp, in the type in which they wait in shared memory."""
    element = np.where(reads_c(c, p), accumulator_bytes(p), output_bytes(c, p))
    return threads(c) // WARP * 16 * (c.WARP_N + ROW_GAP) * element


def shared_bytes(c: Point, p: Problem) -> Any:
    """The ring of tiles, and later what is staged."""
    staged = np.where(c.STAGED_STORE, staged_bytes(c, p), 0)
    return maximum(c.STAGES * stage_bytes(c, p), staged)


def registers_needed(c: Point, p: Problem) -> Any:
    """Registers per thread below which ptxas mostly spills: sums, fragments, words under way, and
    what the rest took in some 220 compilations for sm_80 to sm_120 with NVRTC 13.0."""
    fragment = step(c, p) * np.where(p.element_bytes == 2, 1, 4) // 4
    fragments = (c.WARP_M + c.WARP_N) // 16 * fragment * c.REGISTER_BUFFERS
    words = sum(2 * copies(c, p, i) for i in (0, 1) if is_shifted(p, i))
    return sums_registers(c, p) + fragments + words + 40


def register_limit(c: Point) -> Any:
    return tiled.register_limit(c, threads(c))


def rate_kept(p: Problem, d: DeviceClass) -> float:
    """The part of the rate of a device's tensor cores that a warp's instructions reach."""
    return RATE_KEPT if p.element_bytes == 2 and 90 <= d.capability < 120 else 1.0

# SPDX-License-Identifier: Apache-2.0
"""Derived quantities of matmul wgmma, as the template computes them, for a config or columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels.matmul import output_bytes
from tunegen.model import Point, Problem, ceil_div, maximum, minimum

WARPGROUP = 128
ATOM = 64  # elements of a row of 128 bytes: what one swizzled box holds
MAX_SHARED_BYTES = 232_448  # of a block, on sm_90
TMA_BYTES = 16  # bases and strides of what the copy engine reads and writes
ALIGNED = TMA_BYTES // 2  # elements of that

# Registers of a consumer's thread by how many consumers there are, beside a producer with 24 or
# 40: all of them share the 64 Ki that the block was launched with, as multiples of 8. A single
# consumer leaves the registers as they are.
CONSUMER_REGISTERS = {
    (1, 24): 240,
    (1, 40): 240,
    (2, 24): 240,
    (2, 40): 232,
    (3, 24): 160,
    (3, 40): 160,
}

# Sums of a thread, of three consumers, or of fewer by the registers of the producer, that leave
# room for descriptors and addresses mostly without spilling: compiled with NVRTC 13.0, 192 of 240
# registers do and 208 do not, 96 of 160 do and 128 do not.
MOST_SUMS = {24: 192, 40: 176}
MOST_SUMS_OF_THREE = 96


def across(p: Problem) -> tuple[bool, bool]:
    """Whether the rows of A and of B, as stored, run across K."""
    return p.layout[0] == "t", p.layout[1] == "n"


def left_rows(c: Point) -> Any:
    """Rows of the left operand per block: of A, or of B transposed."""
    return np.where(c.SWAP_OPERANDS, c.BLOCK_N, c.BLOCK_M)


def right_columns(c: Point) -> Any:
    """Columns of the right operand per block, and per instruction."""
    return np.where(c.SWAP_OPERANDS, c.BLOCK_M, c.BLOCK_N)


def cluster(c: Point) -> Any:
    """Blocks of a cluster."""
    return c.CLUSTER_M * c.CLUSTER_N * c.CLUSTER_K


def right_sharers(c: Point) -> Any:
    """Blocks of a cluster that bring the right operand together."""
    return np.where(c.SWAP_OPERANDS, c.CLUSTER_N, c.CLUSTER_M)


def right_across(c: Point, p: Problem) -> Any:
    a, b = across(p)
    return np.where(c.SWAP_OPERANDS, a, b)


def tile_consumers(c: Point) -> Any:
    """Warpgroups that work on a tile together."""
    return np.where(c.PINGPONG, 1, c.CONSUMERS)


def sums(c: Point) -> Any:
    """Sums of one thread."""
    return left_rows(c) * right_columns(c) // (WARPGROUP * maximum(tile_consumers(c), 1))


def most_sums(c: Point) -> Any:
    """Sums that a thread has registers for."""
    fewer = np.where(c.PRODUCER_REGISTERS == 24, MOST_SUMS[24], MOST_SUMS[40])
    return np.where(c.CONSUMERS == 3, MOST_SUMS_OF_THREE, fewer)


def consumer_bytes(c: Point) -> Any:
    """Bytes of all sums of one consumer, as they are handed to another block."""
    return sums(c) * WARPGROUP * 4


def stage_bytes(c: Point, p: Problem) -> Any:
    right = right_columns(c)
    padded = np.where(right_across(c, p), ceil_div(right, ATOM) * ATOM, right)
    return (left_rows(c) + padded) * c.BLOCK_K * 2


def store_columns(c: Point) -> Any:
    """Columns of the right operand whose sums are staged in shared memory at once, at most."""
    return ceil_div(right_columns(c), 16 * c.STORE_PARTS) * 16


def box_columns(c: Point) -> Any:
    """Columns of C per box that is stored: as wide as a swizzle that divides every part."""
    parts = np.where(
        right_columns(c) % store_columns(c), store_columns(c) | right_columns(c), store_columns(c)
    )
    columns = np.where(c.SWAP_OPERANDS, ATOM, parts)
    return np.where(columns % 64 == 0, 64, np.where(columns % 32 == 0, 32, 16))


def direct_store(c: Point, p: Problem) -> Any:
    """Whether sums go to global memory from registers: elements of four bytes do."""
    return (c.SPLIT_K > 1) | (output_bytes(p) == 4)


def takes_copies_of_c(p: Problem) -> bool:
    """Whether C, of elements of two bytes, lies as the copy engine can write it."""
    return p.align % TMA_BYTES == 0 and p.ldc % ALIGNED == 0


def staged_bytes(c: Point, p: Problem) -> Any:
    """Sums of one consumer that are staged at once. Rows of C that threads store are an odd number
    of 16 bytes apart, so that neither way in nor out meets a bank twice."""
    columns = store_columns(c)
    rows_apart = np.where(c.SWAP_OPERANDS, columns * (ATOM // 8 + 1), ATOM * (columns // 8 | 1))
    staged = ATOM * columns * 2 if takes_copies_of_c(p) else rows_apart * 16
    return np.where(direct_store(c, p), 0, staged)


def shared_bytes(c: Point, p: Problem) -> Any:
    """Stages, staged sums, what other blocks of the cluster send, two barriers for each stage and
    each consumer, and a block's share of what is shared out."""
    staged = staged_bytes(c, p)
    sent = (c.CLUSTER_K - 1) * consumer_bytes(c)
    share = 32 * minimum(c.STREAM_K, 1)
    return c.STAGES * (stage_bytes(c, p) + 16) + c.CONSUMERS * (staged + sent + 16) + share


def threads(c: Point) -> Any:
    """A producer warpgroup and the consumers."""
    return WARPGROUP * (1 + c.CONSUMERS)


def groups(c: Point, s: Any) -> tuple[Any, Any]:
    """Clusters of tiles along M and along N."""
    return (
        ceil_div(s.M, c.BLOCK_M * c.CLUSTER_M),
        ceil_div(s.N, c.BLOCK_N * c.CLUSTER_N),
    )


def turns(c: Point, s: Any) -> Any:
    """Clusters of tiles of all matrices and slices of K."""
    along_m, along_n = groups(c, s)
    return along_m * along_n * s.B * c.SPLIT_K


def resident_clusters(c: Point, sm_count: Any) -> Any:
    """Clusters that run at once, a block on each multiprocessor that is not spared."""
    return maximum((sm_count - c.SPARE_SMS) // cluster(c), 1)


def shared_turns(c: Point, p: Problem, sm_count: int) -> Any:
    """Turns whose blocks of K all clusters share: what is left of whole waves of tiles, and a wave
    more where there is one and ``STREAM_K`` is 2."""
    at_once = resident_clusters(c, sm_count)
    waves = turns(c, p) // at_once
    whole = maximum(waves + 1 - c.STREAM_K, 0)
    return np.where(c.STREAM_K, turns(c, p) - whole * at_once, 0)


def k_blocks(c: Point, p: Problem) -> Any:
    """Blocks of K that a block multiplies for a tile, at most."""
    return ceil_div(ceil_div(p.K, c.BLOCK_K), c.SPLIT_K * c.CLUSTER_K)

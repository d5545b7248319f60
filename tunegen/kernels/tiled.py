# SPDX-License-Identifier: Apache-2.0
"""What matmul specs whose blocks take tiles of C have in common: counts, bounds and traffic.

Their configs have ``BLOCK_M``, ``BLOCK_N``, ``BLOCK_K``, ``SPLIT_K``, ``RASTER_GROUP`` and
``MIN_BLOCKS``. What needs fewer of them says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tunegen.kernels.split_k import reduce_blocks
from tunegen.model import (
    GRID_LIMITS,
    Constraint,
    DeviceClass,
    Point,
    Problem,
    ceil_div,
    maximum,
    minimum,
)

WARP = 32
LINE_BYTES = 128  # what L1 looks up and shared memory delivers at once
REGISTERS = 65536  # of a multiprocessor, on every architecture

# Rows and columns of the largest block that every element type has registers for on any device.
LARGE_BLOCK = 128

# The compute capability from which a launch may begin while the one ahead of it runs, and the
# parameter that lets it.
EARLIEST_PROGRAMMATIC = 90
PROGRAMMATIC_LAUNCH = (
    "PROGRAMMATIC_LAUNCH",
    (0, 1),
    "1: begins while the launch ahead still runs, and waits for it itself",
)
FETCHING_LAUNCH = (
    "PROGRAMMATIC_LAUNCH",
    (0, 1, 2),
    f"{PROGRAMMATIC_LAUNCH[2]}; 2: and has L2 fetch its first operands meanwhile",
)

# The part of L2 that operands keep from one wave of blocks to the next. Estimate.
L2_KEPT = 0.75


# --- launches ------------------------------------------------------------------------------------


def launches_early(d: DeviceClass) -> Constraint:
    return Constraint(
        "programmatic launches need compute capability 9.0",
        lambda c: (c.PROGRAMMATIC_LAUNCH == 0) | programmatic(d),
        structural=False,
    )


def programmatic(d: DeviceClass) -> int:
    """The value of ``PROGRAMMATIC_LAUNCH`` to start from."""
    return int(d.capability >= EARLIEST_PROGRAMMATIC)


def overlapped_launch(c: Point) -> Any:
    """What the model calls ``programmatic``. To fetch operands ahead costs more than it saves,
    mostly: see ``templates/matmul/LADDER.md``."""
    return (c.PROGRAMMATIC_LAUNCH > 0) - 0.2 * (c.PROGRAMMATIC_LAUNCH > 1)


# --- derived quantities --------------------------------------------------------------------------


def grid(c: Point, s: Any) -> tuple[Any, Any]:
    """Blocks along M and along N."""
    return ceil_div(s.M, c.BLOCK_M), ceil_div(s.N, c.BLOCK_N)


def blocks(c: Point, s: Any) -> Any:
    """Blocks for one slice of K of every matrix."""
    along_m, along_n = grid(c, s)
    return along_m * along_n * s.B


def tiles(c: Point, p: Problem) -> Any:
    """Tiles along K of the longest slice."""
    return ceil_div(ceil_div(p.K, c.BLOCK_K), c.SPLIT_K)


def register_limit(c: Point, threads: Any) -> Any:
    """Registers per thread that ``MIN_BLOCKS`` in the launch bounds leaves: whole eights, at most
    255."""
    return minimum(255, REGISTERS // maximum(c.MIN_BLOCKS * threads, 1) // 8 * 8)


def next_power_of_two(size: int) -> int:
    """The least power of two that is not less than ``size``; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()


# --- preconditions -------------------------------------------------------------------------------


def refuses_grid(p: Problem) -> str:
    """The reason why not even the largest blocks make a grid, or the empty string."""
    fewest = p.B * ceil_div(p.M, LARGE_BLOCK) * ceil_div(p.N, LARGE_BLOCK)
    if fewest > GRID_LIMITS[0]:
        return (
            f"C has {fewest} blocks of {LARGE_BLOCK}x{LARGE_BLOCK}, "
            f"a grid has at most {GRID_LIMITS[0]} of them in x"
        )
    return ""


# --- space ---------------------------------------------------------------------------------------

Quantity = Callable[[Point], Any]


def fitting(
    d: DeviceClass,
    *,
    shared_bytes: Quantity,
    threads: Quantity,
    registers_needed: Quantity,
    register_limit: Quantity,
) -> tuple[Constraint, ...]:
    """A block, and ``MIN_BLOCKS`` of them, fit a multiprocessor."""

    def fits_multiprocessor(c: Point) -> Any:
        bytes_per_block = shared_bytes(c) + d.shared_bytes_reserved
        return (
            (c.MIN_BLOCKS * bytes_per_block <= d.shared_bytes_per_sm)
            & (c.MIN_BLOCKS * threads(c) <= d.threads_per_sm)
            & (d.blocks_per_sm >= c.MIN_BLOCKS)
        )

    return (
        Constraint(
            f"a block has at most {d.shared_bytes_per_block} bytes of shared memory",
            lambda c: shared_bytes(c) <= d.shared_bytes_per_block,
            structural=False,
        ),
        Constraint(
            "MIN_BLOCKS blocks fit the threads and shared memory of a multiprocessor",
            fits_multiprocessor,
            structural=False,
        ),
        Constraint(
            "launch bounds leave the registers that a thread needs, by estimate",
            lambda c: registers_needed(c) <= register_limit(c),
            structural=False,
        ),
    )


def no_larger_than_c(p: Problem, least: int) -> tuple[Constraint, ...]:
    """Tiles are at most twice what the problem has; ``least`` is always allowed."""
    rows, columns, depth = (next_power_of_two(size) for size in (p.M, p.N, p.K))
    return (
        Constraint(
            "a block is at most twice as high as C",
            lambda c: maximum(least, 2 * rows) >= c.BLOCK_M,
            structural=False,
        ),
        Constraint(
            "a block is at most twice as wide as C",
            lambda c: maximum(least, 2 * columns) >= c.BLOCK_N,
            structural=False,
        ),
        Constraint(
            "a tile is at most twice as deep as K",
            lambda c: maximum(least, 2 * depth) >= c.BLOCK_K,
            structural=False,
        ),
    )


def worth_it(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    """Slices of K and an order of blocks are for problems in which they make a difference, and
    the blocks make a grid."""

    def slices(c: Point) -> Any:
        short = ceil_div(p.K, c.BLOCK_K) < c.SPLIT_K
        return (c.SPLIT_K == 1) | (~short & (blocks(c, p) * c.SPLIT_K <= 4 * d.sm_count))

    def raster(c: Point) -> Any:
        along_m, along_n = grid(c, p)
        waves = blocks(c, p) * c.SPLIT_K > d.sm_count
        return (c.RASTER_GROUP == 1) | ((2 * along_m > c.RASTER_GROUP) & (along_n > 1) & waves)

    return (
        Constraint(
            "slices of K are no shorter than a tile, and for C of few blocks",
            slices,
            structural=False,
        ),
        Constraint(
            "the order of blocks matters where it differs and not all of them run at once",
            raster,
            structural=False,
        ),
        Constraint(
            f"a grid has at most {GRID_LIMITS[0]} blocks",
            lambda c: (
                (blocks(c, p) <= GRID_LIMITS[0])
                & ((c.SPLIT_K == 1) | (reduce_blocks(p, p) <= GRID_LIMITS[0]))
            ),
            structural=False,
        ),
    )


# --- bytes ---------------------------------------------------------------------------------------


class Raster(NamedTuple):
    """The order in which blocks, or clusters of them, take tiles: ``group`` lines of ``grouped``
    are walked together, along ``walked``. The extents are rows or columns of C of one step."""

    group: Any
    grouped: Any
    walked: Any
    grouped_extent: Any
    walked_extent: Any


def dram_bytes(
    p: Problem, d: DeviceClass, raster: Raster, *, at_once: Any, in_all: Any, depth: Any
) -> Any:
    """Bytes of A and B from device memory: once where L2 keeps them, else once for each wave that
    reads them. ``at_once`` of ``in_all`` make a wave, each ``depth`` steps of K long."""
    once = float(p.B) * (p.M + p.N) * p.K * p.element_bytes
    if once <= L2_KEPT * d.l2_bytes:
        return once
    if p.M == 0 or p.N == 0:
        return 0.0
    grouped = minimum(maximum(raster.group, at_once / raster.walked), raster.grouped)
    walked = minimum(at_once / grouped, raster.walked)
    wave = grouped * raster.grouped_extent + walked * raster.walked_extent
    return maximum(wave * depth * p.element_bytes * np.ceil(in_all / at_once), once)


def block_dram_bytes(c: Point, p: Problem, d: DeviceClass) -> Any:
    """:func:`dram_bytes` of blocks that are started in order, rows of them walked together."""
    along_m, along_n = grid(c, p)
    return dram_bytes(
        p,
        d,
        Raster(c.RASTER_GROUP, along_m, along_n, c.BLOCK_M, c.BLOCK_N),
        at_once=d.sm_count * c.MIN_BLOCKS,
        in_all=blocks(c, p) * c.SPLIT_K,
        depth=c.BLOCK_K * tiles(c, p),
    )

# SPDX-License-Identifier: Apache-2.0
"""Space of matmul wgmma: parameters, constraints, and the configuration to start from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tunegen.kernels import tiled
from tunegen.kernels.matmul_wgmma.derived import (
    ATOM,
    MAX_SHARED_BYTES,
    cluster,
    direct_store,
    groups,
    k_blocks,
    left_rows,
    most_sums,
    resident_clusters,
    right_across,
    right_columns,
    right_sharers,
    shared_bytes,
    shared_turns,
    stage_bytes,
    store_columns,
    sums,
    tile_consumers,
    turns,
)
from tunegen.model import (
    Config,
    Constraint,
    DeviceClass,
    Point,
    Problem,
    Space,
    ceil_div,
    maximum,
    parameters,
)

TILES = tuple(range(16, 257, 16))

# Waves of tiles beyond which it hardly matters that the last one is not full, and blocks of K
# below which a share of them is not worth what it costs to hand sums over.
MOST_WAVES = 64
LEAST_SHARE = 4


def space(p: Problem, d: DeviceClass) -> Space:
    return Space(
        parameters(
            (
                ("SWAP_OPERANDS", (0, 1), "1: the rows of instructions are columns of C"),
                ("BLOCK_M", TILES, "rows of C per tile"),
                ("BLOCK_N", TILES, "columns of C per tile"),
                ("CONSUMERS", (1, 2, 3), "warpgroups that multiply"),
                ("PINGPONG", (0, 1), "1: consumers take turns, a tile each; 0: they share one"),
                ("STORE_PARTS", (1, 2, 3, 4), "parts in which sums go through shared memory"),
                ("BLOCK_K", (64, 128, 256), "steps of K per stage"),
                ("STAGES", (2, 3, 4, 5, 6, 7, 8), "stages of the ring in shared memory"),
                ("CLUSTER_M", (1, 2), "tiles along M that share their part of B"),
                ("CLUSTER_N", (1, 2), "tiles along N that share their part of A"),
                ("CLUSTER_K", (1, 2, 4, 8), "blocks of a cluster that share a tile's steps of K"),
                ("SPLIT_K", (1, 2, 4, 8, 16), "slices of K, added up by a second kernel"),
                ("RASTER_GROUP", (1, 2, 4, 8), "rows of clusters that are walked together"),
                ("RASTER_COLUMNS", (0, 1), "1: it is columns that are walked together"),
                ("SPARE_SMS", (0, 4, 12), "multiprocessors that are left without a block"),
                ("MMA_IN_FLIGHT", (0, 1), "products still running when a stage is handed back"),
                ("PRODUCER_REGISTERS", (24, 40), "registers of a producer's thread"),
                (
                    "L2_PROMOTION",
                    (0, 128, 256),
                    "bytes that the copy engine fetches into L2 at least, 0: what it needs",
                ),
                tiled.FETCHING_LAUNCH,
                (
                    "STREAMED_OPERAND",
                    (0, 1, 2),
                    "the operand whose lines are the first to leave L2: 1 A, 2 B, 0 neither",
                    0,
                ),
                (
                    "STREAM_K",
                    (0, 1, 2),
                    "waves of tiles whose steps of K are shared out evenly: 1 the last one, which "
                    "is not full, 2 that and the one before",
                    0,
                ),
            )
        ),
        (*structural_constraints(p), *shared_constraints(p), *problem_constraints(p, d)),
    )


def structural_constraints(p: Problem) -> tuple[Constraint, ...]:
    """Those that stand in the template as well, with the same words."""
    return (
        Constraint(
            "each consumer of a tile has whole blocks of 64 rows of the left operand",
            lambda c: left_rows(c) % (64 * tile_consumers(c)) == 0,
        ),
        Constraint("two consumers take turns", lambda c: (c.PINGPONG == 0) | (c.CONSUMERS == 2)),
        Constraint(
            "sums fit the registers that a consumer has",
            lambda c: sums(c) <= most_sums(c),
        ),
        Constraint(
            "sums are staged in parts of whole 16 columns, the last of them may be narrower",
            lambda c: (
                ((c.STORE_PARTS - 1) * store_columns(c) < right_columns(c))
                & ((right_columns(c) % store_columns(c) == 0) | (c.SWAP_OPERANDS == 0))
            ),
        ),
        Constraint(
            "three consumers leave a producer 24 registers, one needs no change",
            lambda c: (c.CONSUMERS == 2) | (c.PRODUCER_REGISTERS == 24),
        ),
        Constraint(
            "a cluster shares an operand among 2 blocks, or K among 2, 4 or 8",
            lambda c: (cluster(c) <= 2) | (c.CLUSTER_M * c.CLUSTER_N == 1),
        ),
        Constraint(
            "tiles whose steps of K all blocks share have no other slices",
            lambda c: (c.STREAM_K == 0) | (c.SPLIT_K * c.CLUSTER_K == 1),
        ),
        Constraint(
            "slices of K, and results of four bytes, are stored from registers, in one part",
            lambda c: (direct_store(c, p) == 0) | (c.STORE_PARTS == 1),
        ),
    )


def shared_constraints(p: Problem) -> tuple[Constraint, ...]:
    """Structural ones that depend on the layout."""
    return (
        Constraint(
            "blocks that share an operand bring whole groups of 8 rows",
            lambda c: right_across(c, p) | (right_columns(c) % (8 * right_sharers(c)) == 0),
        ),
        Constraint(
            "stages and staged sums fit shared memory",
            lambda c: shared_bytes(c, p) <= MAX_SHARED_BYTES,
        ),
    )


def problem_constraints(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    def slices(c: Point) -> Any:
        count = c.SPLIT_K * c.CLUSTER_K
        short = ceil_div(p.K, c.BLOCK_K) < 2 * count
        return (count == 1) | (~short & (turns(c, p) * cluster(c) <= 2 * d.sm_count))

    def raster(c: Point) -> Any:
        along_m, along_n = groups(c, p)
        waves = turns(c, p) * cluster(c) > d.sm_count
        grouped = (c.RASTER_COLUMNS == 0) * along_m + (c.RASTER_COLUMNS == 1) * along_n
        return (c.RASTER_GROUP == 1) & (c.RASTER_COLUMNS == 0) | (
            (2 * grouped > c.RASTER_GROUP) & (along_m > 1) & (along_n > 1) & waves
        )

    ragged = bool(p.lda % ATOM or p.ldb % ATOM)

    def tiles_of_block(c: Point) -> Any:
        return ceil_div(turns(c, p) * cluster(c), d.sm_count)

    def streamed(c: Point) -> Any:
        along_m, along_n = groups(c, p)
        return (
            (c.STREAMED_OPERAND == 0)
            | (c.STREAMED_OPERAND == 1) & (along_n <= 2)
            | (c.STREAMED_OPERAND == 2) & (along_m <= 2)
        )

    def spare(c: Point) -> Any:
        usual = np.where(cluster(c) <= 2, 4, 12)
        many = turns(c, p) * cluster(c) > d.sm_count - usual
        none = (cluster(c) <= 2) | (many == 0)
        return (c.SPARE_SMS == 0) & none | (usual == c.SPARE_SMS) & many

    def stream(c: Point) -> Any:
        at_once = resident_clusters(c, d.sm_count)
        waves, rest = turns(c, p) // at_once, turns(c, p) % at_once
        share = shared_turns(c, p, d.sm_count) * k_blocks(c, p) // at_once
        uneven = (rest > 0) & (waves < MOST_WAVES) & (waves + 1 >= c.STREAM_K)
        return (c.STREAM_K == 0) | uneven & (share >= LEAST_SHARE)

    return (
        Constraint(
            "a tile is at most twice as high as C",
            lambda c: maximum(64, 2 * p.M) >= c.BLOCK_M,
            structural=False,
        ),
        Constraint(
            "a tile is at most twice as wide as C",
            lambda c: maximum(64, 2 * p.N) >= c.BLOCK_N,
            structural=False,
        ),
        Constraint(
            "operands are swapped where C has fewer rows than an instruction would",
            lambda c: (c.SWAP_OPERANDS == 1) | (p.M > 32),
            structural=False,
        ),
        Constraint(
            "the ring has no more stages than a block ever fills, beyond 3",
            lambda c: maximum(3, k_blocks(c, p) * tiles_of_block(c)) >= c.STAGES,
            structural=False,
        ),
        Constraint(
            "slices of K have two blocks at least, and are for C of few tiles",
            slices,
            structural=False,
        ),
        Constraint(
            "the order of tiles matters where it differs and not all of them run at once",
            raster,
            structural=False,
        ),
        Constraint(
            "multiprocessors are spared where all have tiles, 12 so that clusters of 4 and 8 fit",
            spare,
            structural=False,
        ),
        Constraint(
            "steps of K are shared out where a wave of few is not full, and shares are not short",
            stream,
            structural=False,
        ),
        Constraint(
            "what is read by two clusters of tiles at most may leave L2 first",
            streamed,
            structural=False,
        ),
        Constraint(
            "of rows in whole lines no less than a line is fetched",
            lambda c: (c.L2_PROMOTION > 0) | ragged,
            structural=False,
        ),
        Constraint(
            "how it begins matters to a launch of two waves of tiles at most",
            lambda c: (c.PROGRAMMATIC_LAUNCH == 1) | (turns(c, p) * cluster(c) <= 2 * d.sm_count),
            structural=False,
        ),
    )


# Tiles of C to start from, larger ones first: rows and columns, consumers, and whether they take
# turns. Larger tiles move fewer bytes for each product.
_TILES = (
    (128, 256, 2, 0),
    (128, 192, 2, 0),
    (128, 128, 2, 1),
    (64, 256, 2, 1),
    (128, 64, 2, 0),
    (64, 128, 1, 0),
    (64, 64, 1, 0),
)


def default(p: Problem, d: DeviceClass) -> Config:
    """Reasoned, not measured: of a few tiles the one whose waves fill the device best, operands
    swapped where C has few rows, slices of K where it has few tiles."""
    whole = space(p, d)
    best = min(_candidates(p, d, whole), key=lambda found: found[0], default=None)
    if best is not None:
        return best[1]
    return whole.enumerate().require(f"matmul wgmma on {d.arch}").config(0)


def _candidates(p: Problem, d: DeviceClass, whole: Space) -> Iterator[tuple[float, Config]]:
    swap = int(p.M <= 128)
    needed = max(16, ceil_div(p.M if swap else p.N, 16) * 16)
    for rows, columns, consumers, turns_taken in _TILES:
        right = min(columns, needed)
        for slices in (1, 2, 4, 8, 16):
            config = _config(p, d, whole, (swap, rows, right, consumers, turns_taken), slices)
            if config is not None:
                yield _cost(config, p, d), config


def _config(
    p: Problem, d: DeviceClass, whole: Space, tile: tuple[int, int, int, int, int], slices: int
) -> Config | None:
    """The tile with as many stages as fit, and sums staged in as few parts as leave four."""
    swap, left, right, consumers, turns_taken = tile
    block_m, block_n = (right, left) if swap else (left, right)
    values = {
        "SWAP_OPERANDS": swap, "BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers,
        "PINGPONG": turns_taken, "STORE_PARTS": 1, "BLOCK_K": 64, "STAGES": 2, "CLUSTER_M": 1,
        "CLUSTER_N": 1, "CLUSTER_K": 1, "SPLIT_K": slices,
        "RASTER_GROUP": 8, "RASTER_COLUMNS": 0, "SPARE_SMS": 0,
        "MMA_IN_FLIGHT": 1, "PRODUCER_REGISTERS": 40 if consumers == 2 else 24,
        "L2_PROMOTION": 128 if p.lda % ATOM or p.ldb % ATOM else 256, "PROGRAMMATIC_LAUNCH": 1,
        "STREAMED_OPERAND": 0, "STREAM_K": 0,
    }  # fmt: skip
    along_m, along_n = groups(Config(values), p)
    larger, readers = (2, along_m) if p.N > p.M else (1, along_n)
    if readers <= 2 and 2 * p.B * max(p.M, p.N) * p.K > d.l2_bytes:
        # It is read once or twice and does not stay, the smaller one is read again and again.
        values["STREAMED_OPERAND"] = larger
    depth = int(k_blocks(Config(values), p))
    direct = bool(direct_store(Config(values), p))
    # An epilogue that reads both C and a bias spills where all sums are staged at once.
    fewest = 2 if p.beta and p.bias else 1
    for parts in (1,) if direct else (n for n in (1, 2, 4) if n >= fewest):
        one = Config({**values, "STORE_PARTS": parts, "STAGES": 1})
        stage = int(stage_bytes(one, p)) + 16
        fitting = 1 + (MAX_SHARED_BYTES - int(shared_bytes(one, p))) // stage
        stages = min(8, fitting, max(3, depth))
        if stages < min(4, max(3, depth)):
            continue
        for raster in (8, 4, 1):
            config = Config({**one, "STAGES": stages, "RASTER_GROUP": raster})
            if not whole.violated(config):
                return config
    return None


def _cost(c: Config, p: Problem, d: DeviceClass) -> float:
    """Clocks, roughly: rounds of tiles, each bound by products or by shared memory, and the first
    fetch, which costs as much as a few blocks of K."""
    rounds = ceil_div(int(turns(c, p)), d.sm_count)
    left, right = int(left_rows(c)), int(right_columns(c))
    products = left * right * c.BLOCK_K / 2048
    copies = c.BLOCK_K * 2 * (2 * left + right + right * (left // 64)) / 128
    depth = int(k_blocks(c, p)) + 8
    return float(rounds * max(products, copies) * depth * (1.1 if c.SPLIT_K > 1 else 1.0))

# SPDX-License-Identifier: Apache-2.0
"""Space of matmul mma: parameters, constraints, and the configuration to start from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tunegen.kernels import tiled
from tunegen.kernels.matmul_mma.derived import (
    MOST_SUMS,
    copies,
    rate_kept,
    register_limit,
    registers_needed,
    row_vectors,
    shared_bytes,
    steps,
    sums_registers,
    threads,
)
from tunegen.kernels.tiled import blocks, tiles
from tunegen.model import (
    Config,
    Constraint,
    DeviceClass,
    Point,
    Problem,
    Space,
    ceil_div,
    parameters,
)

BLOCKS = (16, 32, 64, 96, 128, 192, 256)
WARPS = (16, 32, 64, 128)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


def space(p: Problem, d: DeviceClass) -> Space:
    wide = p.element_bytes == 8
    return Space(
        parameters(
            (
                ("BLOCK_M", BLOCKS, "rows of C per block"),
                ("WARP_M", WARPS, "rows of C per warp"),
                ("BLOCK_N", BLOCKS, "columns of C per block"),
                ("WARP_N", WARPS, "columns of C per warp"),
                ("MMA_ROWS", (8, 16) if wide else (16,), "rows of an instruction"),
                ("MMA_K", (4, 8, 16) if wide else (16,), "steps of K of an instruction"),
                ("BLOCK_K", (8, 16, 32) if wide else (16, 32, 64), "steps of K per tile"),
                ("REGISTER_BUFFERS", (1, 2), "sets of fragments, 2: loaded one step ahead"),
                ("STAGES", (2, 3, 4, 5, 6), "tiles in shared memory"),
                ("STAGED_STORE", (0, 1), "1: sums go to C through shared memory"),
                ("MIN_BLOCKS", (1, 2, 3, 4), "blocks per multiprocessor that must fit"),
                ("SPLIT_K", SPLITS, "slices of K, added up by a second kernel"),
                ("RASTER_GROUP", (1, 2, 4, 8), "rows of blocks that are walked together"),
                tiled.PROGRAMMATIC_LAUNCH,
            )
        ),
        (*structural_constraints(p), *device_constraints(p, d), *problem_constraints(p, d)),
    )


def structural_constraints(p: Problem) -> tuple[Constraint, ...]:
    """Those that stand in the template as well, with the same words."""

    def whole_rows(c: Point) -> Any:
        count = threads(c)
        rows = [row_vectors(c, p, operand) for operand in (0, 1)]
        a, b = ((row > 0) & ((row % count == 0) | (count % row == 0)) for row in rows)
        return a & b

    return (
        Constraint("WARP_M divides BLOCK_M", lambda c: c.BLOCK_M % c.WARP_M == 0),
        Constraint("WARP_N divides BLOCK_N", lambda c: c.BLOCK_N % c.WARP_N == 0),
        Constraint("a block has at most 1024 threads", lambda c: threads(c) <= 1024),
        Constraint(
            f"sums take at most {MOST_SUMS} registers of a thread",
            lambda c: sums_registers(c, p) <= MOST_SUMS,
        ),
        Constraint(
            "instructions for 8 rows take 4 steps of K",
            lambda c: (c.MMA_ROWS == 16) | (c.MMA_K == 4),
        ),
        Constraint("MMA_K divides BLOCK_K", lambda c: c.BLOCK_K % c.MMA_K == 0),
        Constraint("threads fill whole rows of both tiles", whole_rows),
        Constraint(
            "a thread makes at most 32 copies to each tile",
            lambda c: (copies(c, p, 0) <= 32) & (copies(c, p, 1) <= 32),
        ),
        Constraint(
            "two sets of fragments take an even number of steps",
            lambda c: (c.REGISTER_BUFFERS == 1) | (steps(c, p) % 2 == 0),
        ),
        Constraint(
            "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers",
            lambda c: (c.MIN_BLOCKS == 1) | (c.MIN_BLOCKS * threads(c) > 256),
        ),
    )


def device_constraints(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    return (
        Constraint(
            "fp64 instructions for 16 rows are sm_90's: elsewhere they become several for 8",
            lambda c: (p.element_bytes == 2) | (c.MMA_ROWS == 8) | (d.capability == 90),
            structural=False,
        ),
        tiled.launches_early(d),
        *tiled.fitting(
            d,
            shared_bytes=lambda c: shared_bytes(c, p),
            threads=threads,
            registers_needed=lambda c: registers_needed(c, p),
            register_limit=register_limit,
        ),
    )


def problem_constraints(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    rows, columns = tiled.next_power_of_two(p.M), tiled.next_power_of_two(p.N)
    # Elements of C for half of a multiprocessor; one matrix of a large batch may have less.
    share = min(64 * 64, p.B * p.M * p.N // (2 * d.sm_count), max(16, rows) * max(16, columns))

    return (
        *tiled.no_larger_than_c(p, least=16),
        Constraint(
            "no more tiles are under way than K has",
            lambda c: (c.STAGES == 2) | (tiles(c, p) >= c.STAGES - 1),
            structural=False,
        ),
        Constraint(
            "blocks are large where C has much for every multiprocessor",
            lambda c: share <= c.BLOCK_M * c.BLOCK_N,
            structural=False,
        ),
        *tiled.worth_it(p, d),
    )


# Blocks and warps along M and along N.
Shape = tuple[tuple[int, int], tuple[int, int]]
SHAPES: tuple[Shape, ...] = (
    ((128, 64), (256, 64)),
    ((128, 64), (128, 64)),
    ((128, 64), (128, 32)),
    ((128, 32), (64, 32)),
    ((64, 32), (128, 32)),
    ((64, 32), (64, 32)),
    ((256, 64), (32, 16)),
    ((32, 16), (256, 64)),
    ((128, 32), (32, 16)),
    ((32, 16), (128, 32)),
    ((64, 32), (32, 16)),
    ((32, 16), (64, 32)),
    ((256, 64), (16, 16)),
    ((16, 16), (256, 64)),
    ((128, 32), (16, 16)),
    ((16, 16), (128, 32)),
    ((32, 16), (32, 16)),
    ((64, 16), (16, 16)),
    ((16, 16), (64, 16)),
    ((32, 16), (16, 16)),
    ((16, 16), (32, 16)),
    ((16, 16), (16, 16)),
)

# For the choice of a default. Cycles: what a tile takes at least, from barrier to barrier; a block
# until its first tile is there and after its last one; the second kernel of slices.
SLICE_STEPS = 256  # of K that are worth the traffic of a slice's sums
TILE_CYCLES = 250
BLOCK_CYCLES = 2000
SLICES_CYCLES = 4000
L2_SM_BYTES_PER_CLOCK = 32  # what L2 hands over to a multiprocessor while all ask


def default(p: Problem, d: DeviceClass) -> Config:
    """Reasoned, not measured: of some shapes and numbers of slices the valid ones that take the
    fewest cycles, counted roughly; with them the deepest pipeline that is valid."""
    whole = space(p, d)
    families = [
        list(_candidates(shape, split, p, d))
        for shape, split in itertools.product(SHAPES, (1, 2, 4, 8, 16))
        if _suits(shape, split, p, d)
    ]
    found: list[Config] = []
    for family in sorted(families, key=lambda family: _cycles(family[0], p, d)):
        found += itertools.islice((c for c in family if not whole.violated(c)), 1)
        # What is valid may be worse than what the family was ranked by.
        if len(found) == 3:
            break
    if found:
        return min(found, key=lambda config: _cycles(config, p, d))
    return whole.enumerate().require(f"matmul mma on {d.arch}").config(0)


def _suits(shape: Shape, split: int, p: Problem, d: DeviceClass) -> bool:
    """Whether a shape is no larger than C, and slices are long and few."""
    (block_m, _), (block_n, _) = shape
    count = p.B * ceil_div(p.M, block_m) * ceil_div(p.N, block_n)
    return (
        block_m <= max(16, tiled.next_power_of_two(p.M))
        and block_n <= max(16, tiled.next_power_of_two(p.N))
        and (split == 1 or (split * SLICE_STEPS <= p.K and count * split <= 4 * d.sm_count))
    )


def _candidates(shape: Shape, split: int, p: Problem, d: DeviceClass) -> Iterator[Config]:
    """A shape with the rest of a configuration, the preferred one first."""
    (block_m, warp_m), (block_n, warp_n) = shape
    wide = p.element_bytes == 8
    depths = (16, 8) if wide else (64, 32, 16) if block_m * block_n <= 64 * 128 else (32, 64, 16)
    for instruction, depth, sets, stages, raster in itertools.product(
        ((16, 8), (8, 4)) if wide else ((16, 16),), depths, (2, 1), (4, 3, 2), (8, 4, 1)
    ):
        yield Config(
            {
                "BLOCK_M": block_m, "WARP_M": warp_m, "BLOCK_N": block_n, "WARP_N": warp_n,
                "MMA_ROWS": instruction[0], "MMA_K": instruction[1],
                "BLOCK_K": depth, "REGISTER_BUFFERS": sets, "STAGES": stages,
                "STAGED_STORE": int(not wide and split == 1), "MIN_BLOCKS": 1,
                "SPLIT_K": split, "RASTER_GROUP": raster,
                "PROGRAMMATIC_LAUNCH": tiled.programmatic(d),
            }
        )  # fmt: skip


def _cycles(c: Config, p: Problem, d: DeviceClass) -> float:
    """Rounds of blocks, each bound by products, by shared memory, or by what L2 delivers."""
    wide = p.element_bytes == 8
    rate = d.tensor64_per_clock or d.fp64_per_clock if wide else d.tensor16_per_clock
    products = c.BLOCK_M * c.BLOCK_N / (rate * rate_kept(p, d))
    brought = (c.BLOCK_M + c.BLOCK_N) * p.element_bytes
    read = c.BLOCK_M * c.BLOCK_N * (1 / c.WARP_M + 1 / c.WARP_N) * p.element_bytes
    # Near the corner none hides the others wholly.
    bounds = (products, (brought + read) / 128, brought / L2_SM_BYTES_PER_CLOCK)
    step_cycles = sum(bound**3 for bound in bounds) ** (1 / 3)
    count = int(blocks(c, p)) * c.SPLIT_K
    tile_cycles = max(step_cycles * c.BLOCK_K, TILE_CYCLES)
    block_cycles = tile_cycles * int(tiles(c, p)) + BLOCK_CYCLES
    rounds = int(ceil_div(count, d.sm_count))
    return float(rounds * block_cycles + SLICES_CYCLES * (c.SPLIT_K > 1))

# SPDX-License-Identifier: Apache-2.0
"""Space of matmul simt: parameters, constraints, and the configuration to start from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tunegen.kernels import tiled
from tunegen.kernels.matmul import ACCESS_BYTES
from tunegen.kernels.matmul_simt.derived import (
    along_k,
    lanes,
    register_limit,
    registers_needed,
    share,
    shared_bytes,
    threads,
    vector_c,
    vectors,
)
from tunegen.kernels.tiled import WARP
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

BLOCKS = (8, 16, 32, 64, 128, 256)
WARPS = (4, 8, 16, 32, 64, 128)
THREADS = (1, 2, 4, 8, 16)


def space(p: Problem, d: DeviceClass) -> Space:
    widths = tuple(w for w in (1, 2, 4, 8) if w * p.element_bytes <= ACCESS_BYTES)
    return Space(
        parameters(
            (
                ("BLOCK_M", BLOCKS, "rows of C per block"),
                ("WARP_M", WARPS, "rows of C per warp"),
                ("THREAD_M", THREADS, "rows of C per thread"),
                ("BLOCK_N", BLOCKS, "columns of C per block"),
                ("WARP_N", WARPS, "columns of C per warp"),
                ("THREAD_N", THREADS, "columns of C per thread"),
                ("SHARED_BUFFERS", (0, 1, 2, 3, 4), "tiles in shared memory, 0: none at all"),
                ("ASYNC_COPY", (0, 1), "1: cp.async, 0: through registers, one tile ahead"),
                ("BLOCK_K", (4, 8, 16, 32), "steps of K per tile"),
                ("REGISTER_BUFFERS", (1, 2), "sets of fragments, 2: loaded one step ahead"),
                ("UNROLL_K", (4, 8, 16, 32), "steps of K per turn of the unrolled loop"),
                ("VECTOR_WIDTH", widths, "elements of the widest global access"),
                ("PADDING", (0, 4), "elements between rows of a tile in shared memory"),
                ("MIN_BLOCKS", (1, 2, 3, 4), "blocks per multiprocessor that must fit"),
                ("SPLIT_K", (1, 2, 4, 8, 16, 32), "slices of K, added up by a second kernel"),
                ("RASTER_GROUP", (1, 4, 8, 16), "rows of blocks that are walked together"),
            )
        ),
        (*structural_constraints(p), *device_constraints(p, d), *problem_constraints(p, d)),
    )


def structural_constraints(p: Problem) -> tuple[Constraint, ...]:
    """Those that stand in the template as well, with the same words."""
    any_along_k = any(along_k(p))

    def copies(c: Point) -> Any:
        a_share, b_share = share(c)
        return (c.SHARED_BUFFERS == 0) | ((a_share > 0) & (b_share > 0))

    def accesses(c: Point) -> Any:
        (a_share, b_share), (a, b) = share(c), vectors(c, p)
        return (a_share <= 32 * a) & (b_share <= 32 * b)

    def widest(c: Point) -> Any:
        a, b = vectors(c, p)
        return maximum(maximum(a, b), vector_c(c, p)) == c.VECTOR_WIDTH

    return (
        Constraint("WARP_M divides BLOCK_M", lambda c: c.BLOCK_M % c.WARP_M == 0),
        Constraint("WARP_N divides BLOCK_N", lambda c: c.BLOCK_N % c.WARP_N == 0),
        Constraint(
            "32 threads of THREAD_M x THREAD_N cover WARP_M x WARP_N",
            lambda c: (
                (c.WARP_M % c.THREAD_M == 0)
                & (c.WARP_N % c.THREAD_N == 0)
                & (lanes(c)[0] * lanes(c)[1] == 32)
            ),
        ),
        Constraint("a block has at most 1024 threads", lambda c: threads(c) <= 1024),
        Constraint(
            "asynchronous copies fill another buffer than the one that is read",
            lambda c: (c.ASYNC_COPY == 0) | (c.SHARED_BUFFERS >= 2),
        ),
        Constraint(
            "copies through registers are one tile ahead and need at most 2 buffers",
            lambda c: (c.ASYNC_COPY == 1) | (c.SHARED_BUFFERS <= 2),
        ),
        Constraint(
            "asynchronous copies move elements of 4 or 8 bytes as they are",
            lambda c: (c.ASYNC_COPY == 0) | (p.element_bytes >= 4),
        ),
        Constraint(
            "a barrier is worth at least 8 steps of K",
            lambda c: (c.SHARED_BUFFERS == 0) | (c.BLOCK_K >= 8),
        ),
        Constraint("every thread copies a part of both tiles", copies),
        Constraint(
            "UNROLL_K is all of BLOCK_K or a quarter: as one turn is peeled, a half is all",
            lambda c: (c.UNROLL_K == c.BLOCK_K) | (4 * c.UNROLL_K == c.BLOCK_K),
        ),
        Constraint(
            "without shared memory the whole tile is unrolled",
            lambda c: (c.SHARED_BUFFERS > 0) | (c.UNROLL_K == c.BLOCK_K),
        ),
        Constraint(
            "at most 2048 unrolled multiply-adds fit the instruction cache",
            lambda c: c.UNROLL_K * c.THREAD_M * c.THREAD_N <= 2048,
        ),
        Constraint("some operand is accessed VECTOR_WIDTH elements at a time", widest),
        Constraint("a thread makes at most 32 accesses to each tile", accesses),
        Constraint(
            "padding is for operands that are transposed on their way to shared memory",
            lambda c: (c.PADDING == 0) | ((c.SHARED_BUFFERS > 0) & any_along_k),
        ),
        Constraint(
            "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers",
            lambda c: (c.MIN_BLOCKS == 1) | (c.MIN_BLOCKS * threads(c) > 256),
        ),
    )


def device_constraints(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    return (
        Constraint(
            "asynchronous copies need sm_80",
            lambda c: (c.ASYNC_COPY == 0) | (d.capability >= 80),
            structural=False,
        ),
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
    # Elements of C for every thread that the device holds.
    density = p.B * p.M * p.N // (d.sm_count * d.threads_per_sm)
    # A block has a warp at least, and one matrix of a large batch may have less than that.
    per_thread = min(16, density, rows * columns // WARP)

    def coarse(c: Point) -> Any:
        return (
            (min(32, 2 * density, rows) <= c.BLOCK_M)
            & (min(32, 2 * density, columns) <= c.BLOCK_N)
            & (per_thread <= c.THREAD_M * c.THREAD_N)
        )

    return (
        *tiled.no_larger_than_c(p, least=8),
        Constraint(
            "blocks and threads have more than a few elements where C has many for each thread",
            coarse,
            structural=False,
        ),
        *tiled.worth_it(p, d),
    )


# Tiles of block, warp and thread along M and along N, by falling reuse of what is loaded; those
# that are flat or narrow are for matrices with few rows or columns.
SHAPES = (
    ((128, 64, 8), (128, 32, 8)),
    ((128, 32, 8), (64, 32, 4)),
    ((64, 32, 8), (64, 32, 4)),
    ((64, 16, 4), (32, 32, 4)),
    ((32, 16, 4), (32, 32, 4)),
    ((32, 16, 4), (32, 16, 2)),
    ((16, 16, 4), (128, 32, 4)),
    ((128, 32, 4), (16, 16, 4)),
    ((16, 16, 4), (64, 16, 2)),
    ((64, 16, 2), (16, 16, 4)),
    ((8, 8, 8), (128, 64, 2)),
    ((128, 64, 2), (8, 8, 8)),
    ((8, 8, 4), (64, 16, 1)),
    ((64, 16, 1), (8, 8, 4)),
)
SMALL_SHAPES = (
    ((16, 16, 4), (16, 8, 1)),
    ((8, 8, 1), (8, 4, 1)),
)
# A block of one warp, 4 lanes along M and 8 along N: for batches of small matrices.
WARP_SHAPES = tuple(
    ((m, m, m // 4), (n, n, n // 8)) for m in (32, 16, 8) for n in (128, 64, 32, 16, 8)
)
Shape = tuple[tuple[int, int, int], tuple[int, int, int]]

# Steps of K that are worth the traffic of a slice's sums.
SLICE_STEPS = 256


def default(p: Problem, d: DeviceClass) -> Config:
    """Reasoned, not measured: the largest tiles of which C has about one for every
    multiprocessor; where it has none such, slices of K; then as much of the rest as is valid."""
    whole = space(p, d)
    for config in _candidates(p, d):
        if not whole.violated(config):
            return config
    return whole.enumerate().require(f"matmul simt on {d.arch}").config(0)


def _candidates(p: Problem, d: DeviceClass) -> Iterator[Config]:
    for shape, split in _shapes(p, d):
        (block_m, warp_m, thread_m), (block_n, warp_n, thread_n) = shape
        large = block_m * block_n == 128 * 128
        for (buffers, asynchronous), depth, resident, raster in itertools.product(
            ((3, 1), (2, 0), (0, 0)),
            (8, 4) if large else (16, 8, 4),
            (2, 1) if large else (1,),
            (8, 4, 1),
        ):
            config = Config(
                {
                    "BLOCK_M": block_m, "WARP_M": warp_m, "THREAD_M": thread_m,
                    "BLOCK_N": block_n, "WARP_N": warp_n, "THREAD_N": thread_n,
                    "SHARED_BUFFERS": buffers, "ASYNC_COPY": asynchronous, "BLOCK_K": depth,
                    "REGISTER_BUFFERS": 2, "UNROLL_K": depth,
                    "VECTOR_WIDTH": ACCESS_BYTES // p.element_bytes,
                    "PADDING": 4 if buffers and any(along_k(p)) else 0,
                    "MIN_BLOCKS": resident, "SPLIT_K": split, "RASTER_GROUP": raster,
                }
            )  # fmt: skip
            a, b = vectors(config, p)
            width = int(max(a, b, vector_c(config, p)))
            yield Config({**config, "VECTOR_WIDTH": width})


def _shapes(p: Problem, d: DeviceClass) -> Iterator[tuple[Shape, int]]:
    """Shapes with a number of slices, the preferred ones first."""
    enough = d.sm_count * 3 // 4
    highest, widest = max(8, tiled.next_power_of_two(p.M)), max(8, tiled.next_power_of_two(p.N))

    def count(shape: Shape) -> int:
        (block_m, _, _), (block_n, _, _) = shape
        return int(p.B * ceil_div(p.M, block_m) * ceil_div(p.N, block_n))

    def fitting(shapes: tuple[Shape, ...]) -> list[Shape]:
        return [s for s in shapes if s[0][0] <= highest and s[1][0] <= widest]

    yield from ((s, 1) for s in fitting(SHAPES) if count(s) >= enough)
    if enough <= p.B:
        yield from ((s, 1) for s in fitting(WARP_SHAPES))
    splits = [split for split in (2, 4, 8, 16, 32) if split * SLICE_STEPS <= p.K]
    for split in splits:
        yield from ((s, split) for s in fitting(SHAPES) if count(s) * split >= enough)
    most_blocks = sorted(fitting(SHAPES + SMALL_SHAPES), key=count, reverse=True)
    for split in (*reversed(splits), 1):
        yield from ((s, split) for s in most_blocks)

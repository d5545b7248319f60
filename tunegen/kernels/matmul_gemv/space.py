# SPDX-License-Identifier: Apache-2.0
"""Space of matmul gemv: parameters, constraints, and the configuration to start from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tunegen.kernels import tiled
from tunegen.kernels.matmul_gemv.derived import (
    along_k,
    block_n,
    bytes_under_way,
    depth,
    groups,
    in_cluster,
    loads,
    register_limit,
    registers_needed,
    round_k,
    run_k,
    shared_bytes,
    threads,
    turn_k,
    vector_b,
)
from tunegen.kernels.split_k import accumulator_bytes
from tunegen.kernels.tiled import WARP
from tunegen.model import (
    GRID_LIMITS,
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

ROWS = (1, 2, 4, 8, 16)
MOST_ROWS = ROWS[-1]
WIDEST_BLOCK = 64  # columns that a block of every type, layout and alignment can have

# Registers for the sums of a thread, and bytes of B that it has under way.
SUM_REGISTERS = 64
BYTES_UNDER_WAY = 256

# Reading partial sums of a slice costs as much as so many steps of K.
SLICE_STEPS = 128


def space(p: Problem, d: DeviceClass) -> Space:
    return Space(
        parameters(
            (
                ("ROWS", ROWS, "rows of C per block: all of them"),
                ("COLS", (1, 2, 4, 8, 16), "columns of C per thread"),
                ("LANES_K", (1, 2, 4, 8, 16, 32), "lanes of a warp along K, the others along N"),
                ("UNROLL", (1, 2, 4, 8, 16), "rounds of loads of B that are under way"),
                ("WARPS_K", (1, 2, 4, 8, 16), "warps of a block along K"),
                ("WARPS_N", (1, 2, 4, 8), "warps of a block along N"),
                ("MIN_BLOCKS", (1, 2, 3, 4), "blocks per multiprocessor that must fit"),
                ("TILE_K", (0, 512, 1024, 2048, 4096, 8192),
                 "steps of A in shared memory, widened; 0: A is read through L1"),
                ("SPLIT_K", (1, 2, 4, 8, 16, 32), "slices of K, a block each"),
                ("REDUCE", (0, 1),
                 "slices are added up by 0 the last block that is done, 1 a cluster"),
                ("LOAD_POLICY", (1, 2, 3),
                 "of B: 1 ld.nc, 2 ld.nc.L1::no_allocate, 3 ld.cs (first to be evicted)"),
                tiled.FETCHING_LAUNCH,
            )
        ),
        (*structural_constraints(p), *device_constraints(p, d), *problem_constraints(p, d)),
    )  # fmt: skip


def structural_constraints(p: Problem) -> tuple[Constraint, ...]:
    """Those that stand in the template as well, with the same words."""
    return (
        Constraint(
            f"a thread's sums take at most {SUM_REGISTERS} registers",
            lambda c: c.ROWS * c.COLS * (accumulator_bytes(p) // 4) <= SUM_REGISTERS,
        ),
        Constraint(
            f"a thread has at most {BYTES_UNDER_WAY} bytes of B under way",
            lambda c: bytes_under_way(c, p) <= BYTES_UNDER_WAY,
        ),
        Constraint(
            "at most 1024 unrolled multiply-adds, as they stand twice, fit the instruction cache",
            lambda c: c.UNROLL * run_k(c, p) * c.ROWS * c.COLS <= 1024,
        ),
        Constraint("a block has at most 1024 threads", lambda c: threads(c) <= 1024),
        Constraint(
            "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers",
            lambda c: (c.MIN_BLOCKS == 1) | (c.MIN_BLOCKS * threads(c) > 256),
        ),
        Constraint(
            "a turn of the unrolled loop is at most 8192 steps of K",
            lambda c: turn_k(c, p) <= 8192,
        ),
        Constraint(
            "a tile of A is whole turns of the unrolled loop",
            lambda c: c.TILE_K % turn_k(c, p) == 0,
        ),
        Constraint(
            "a single slice of K is not reduced", lambda c: (c.REDUCE == 0) | (c.SPLIT_K > 1)
        ),
        Constraint("a cluster has at most 8 blocks", lambda c: (c.REDUCE == 0) | (c.SPLIT_K <= 8)),
    )


def device_constraints(p: Problem, d: DeviceClass) -> tuple[Constraint, ...]:
    return (
        Constraint(
            "clusters need sm_90",
            lambda c: ~in_cluster(c) | (d.capability >= 90),
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
    # What every thread of the device would have to do: where it is much, so must a thread.
    many = 64 * d.sm_count * d.threads_per_sm <= p.B * p.N * p.K

    def lane_loads(c: Point) -> Any:
        """Whether lanes side by side along N or K bring whole sectors."""
        side = c.LANES_K if along_k(p) else WARP // c.LANES_K
        return side * vector_b(c, p) * p.element_bytes >= 32

    def slices(c: Point) -> Any:
        short = depth(c, p) < SLICE_STEPS
        return (c.SPLIT_K == 1) | (~short & (groups(c, p) * c.SPLIT_K <= 8 * d.sm_count))

    return (
        Constraint(
            "ROWS is M rounded up to a power of two",
            lambda c: rows == c.ROWS,
            structural=False,
        ),
        Constraint(
            "a block is at most twice as wide as C",
            lambda c: block_n(c) <= maximum(WARP, 2 * columns),
            structural=False,
        ),
        Constraint(
            "a round is at most twice as deep as a slice of K",
            lambda c: round_k(c, p) <= maximum(256, 2 * depth(c, p)),
            structural=False,
        ),
        Constraint(
            "not more is under way than a slice of K has",
            lambda c: (c.UNROLL == 1) | (turn_k(c, p) < 2 * depth(c, p)),
            structural=False,
        ),
        Constraint(
            "a tile of A is at most twice as deep as a slice of K",
            lambda c: maximum(1024, 2 * depth(c, p)) > c.TILE_K,
            structural=False,
        ),
        Constraint(
            "lanes that lie side by side read whole sectors of B",
            lambda c: lane_loads(c) | (not many),
            structural=False,
        ),
        Constraint(
            "a thread has several loads under way where there are many for each",
            lambda c: (c.UNROLL * loads(c, p) >= 2) | (not many),
            structural=False,
        ),
        Constraint(
            f"slices of K have at least {SLICE_STEPS} steps, and are for C of few blocks",
            slices,
            structural=False,
        ),
        Constraint(
            f"a grid has at most {GRID_LIMITS[0]} blocks",
            lambda c: groups(c, p) <= GRID_LIMITS[0],
            structural=False,
        ),
    )


def default(p: Problem, d: DeviceClass) -> Config:
    """Reasoned, not measured: see :func:`_candidates`; the first valid one."""
    whole = space(p, d)
    for config in _candidates(p, d):
        if not whole.violated(config):
            return config
    return whole.enumerate().require(f"matmul gemv on {d.arch}").config(0)


def _candidates(p: Problem, d: DeviceClass) -> Iterator[Config]:
    """Lanes read whole lines of B. A thread has 8 accesses under way, of a block of 256 threads
    32 KB: more than latency times bandwidth; as many such blocks as there are registers for. Warps
    lie along K, and slices of K make up for few columns. Several rows of A are widened once, in
    shared memory."""
    rows = tiled.next_power_of_two(p.M)
    warps = ((8, 1), (4, 1), (2, 1), (1, 1), (1, 8))  # along K and N; the last for huge C
    shapes = itertools.product(
        warps, (4, 2, 1) if along_k(p) else (8, 4, 2, 1), (8, 4, 16, 32, 2, 1)
    )
    for (warps_k, warps_n), cols, lanes_k in shapes:
        for tiles, unroll, resident in itertools.product(
            (_tiles(p, rows), (0,)), (8, 4, 2, 1), (3, 2, 1)
        ):
            shape = {
                "ROWS": rows, "COLS": cols, "LANES_K": lanes_k, "UNROLL": unroll,
                "WARPS_K": warps_k, "WARPS_N": warps_n, "MIN_BLOCKS": resident,
            }  # fmt: skip
            rest = {
                "SPLIT_K": 1, "REDUCE": 0, "LOAD_POLICY": 2,
                "PROGRAMMATIC_LAUNCH": tiled.programmatic(d),
            }  # fmt: skip
            staged = [Config({**shape, "TILE_K": tile, **rest}) for tile in tiles]
            able = [c for c in staged if _is_moderate(c, p)]
            yield from (Config({**c, "SPLIT_K": _slices(c, p, d)}) for c in able)
            yield from able


def _is_moderate(c: Config, p: Problem) -> bool:
    """Whether no more is under way than does good, and registers are not short: the estimate
    lacks some of them for several rows."""
    many = c.UNROLL > 1 and c.UNROLL * loads(c, p) > 8
    tight = registers_needed(c, p) + 4 * (c.ROWS - 1) > register_limit(c)
    return not (many or (c.MIN_BLOCKS > 1 and tight))


def _tiles(p: Problem, rows: int) -> tuple[int, ...]:
    """Of A in shared memory, 32 KB of it where that is enough; none where widening is cheap."""
    if rows == 1 and p.layout[0] == "n":
        return ()
    fitting = max(1024, 32768 // accumulator_bytes(p) // rows)
    return tuple(tile for tile in (4096, 2048, 1024, 512) if tile <= fitting)


def _slices(c: Config, p: Problem, d: DeviceClass) -> int:
    """As many as give every multiprocessor a block, of two rounds and more."""
    wanted = ceil_div(d.sm_count * 3 // 4, max(1, int(groups(c, p))))
    able = max(1, p.K // max(2 * int(round_k(c, p)) // 3, SLICE_STEPS))
    return max(
        split for split in (1, 2, 4, 8, 16, 32) if split == 1 or split < 2 * min(wanted, able)
    )

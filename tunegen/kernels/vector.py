# SPDX-License-Identifier: Apache-2.0
"""The operations fill, copy, add and axpy, and what the specs that compute them share.

All four are one pass over contiguous arrays of N elements (``templates/lib/elementwise.cuh``) and
differ in what they load and in the arithmetic per element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tunegen.model import (
    ACCUMULATOR,
    Argument,
    Array,
    Config,
    Constraint,
    DeviceClass,
    EdgeProblem,
    Launch,
    LaunchPlan,
    Limit,
    Operation,
    Point,
    Problem,
    Sizes,
    Space,
    Work,
    ceil_div,
    formula,
    maximum,
    minimum,
    parameters,
)

DTYPES = ("fp32", "fp64", "fp16", "bf16")

# Tiles are counted in 31 bits: a grid has no more blocks in x, and a block steps by the grid.
MAX_TILES = 2**31 - 1

# Vectors of each operand that a thread may have in flight.
UNROLLS = (1, 2, 4, 8)

# Shared memory that a block may hold unused.
UNUSED_SHARED_KIB = (0, 8, 16, 32, 64)

# Registers for addresses, bounds and conversions besides the vectors themselves.
OTHER_REGISTERS = 32


# --- operations ----------------------------------------------------------------------------------


def _array(p: Problem, name: str, role: Any) -> Array:
    return Array(name, (p.N,), (1,), p.dtype, role)


def _wide(operands: Mapping[str, Any], name: str) -> Any:
    return np.asarray(operands[name], dtype=np.float64)


# Elements, and by how many of them each operand is away from an aligned address: tails of vectors
# and of tiles, less than a vector, and bases that are misaligned alike and apart.
EDGES = (
    (100_003, (0, 0, 0)),
    (32_768, (1, 1, 1)),
    (40_001, (1, 2, 3)),
    (4_099, (0, 1, 0)),
    (33, (0, 0, 1)),
    (7, (3, 3, 3)),
    (1, (0, 0, 0)),
)


def edge_problems(operation: Operation, p: Problem) -> tuple[EdgeProblem, ...]:
    names = [array.name for array in operation.arrays(p)]
    return tuple(
        EdgeProblem(
            operation.problem((n,), dtype=p.dtype),
            tuple(
                (name, p.element_bytes * away) for name, away in zip(names, apart, strict=False)
            ),
        )
        for n, apart in EDGES
    )


FILL: Operation = Operation(
    name="fill",
    summary="y = value",
    axes=("N",),
    dtypes=DTYPES,
    default_sizes=(2**24,),
    scalars=(("value", 1.0),),
    arrays=lambda p: (_array(p, "y", "out"),),
    reference=lambda p, operands, scalars: {"y": np.full(p.N, scalars["value"])},
    flops=lambda p: 0,
    edge_problems=lambda p: edge_problems(FILL, p),
)

COPY: Operation = Operation(
    name="copy",
    summary="y = x",
    axes=("N",),
    dtypes=DTYPES,
    default_sizes=(2**24,),
    arrays=lambda p: (_array(p, "x", "in"), _array(p, "y", "out")),
    reference=lambda p, operands, scalars: {"y": _wide(operands, "x")},
    flops=lambda p: 0,
    edge_problems=lambda p: edge_problems(COPY, p),
)

ADD: Operation = Operation(
    name="add",
    summary="z = x + y",
    axes=("N",),
    dtypes=DTYPES,
    default_sizes=(2**24,),
    arrays=lambda p: (_array(p, "x", "in"), _array(p, "y", "in"), _array(p, "z", "out")),
    reference=lambda p, operands, scalars: {"z": _wide(operands, "x") + _wide(operands, "y")},
    flops=lambda p: p.N,
    edge_problems=lambda p: edge_problems(ADD, p),
)

AXPY: Operation = Operation(
    name="axpy",
    summary="y = a x + y",
    axes=("N",),
    dtypes=DTYPES,
    default_sizes=(2**24,),
    scalars=(("a", 2.0),),
    arrays=lambda p: (_array(p, "x", "in"), _array(p, "y", "inout")),
    reference=lambda p, operands, scalars: {
        "y": scalars["a"] * _wide(operands, "x") + _wide(operands, "y")
    },
    flops=lambda p: 2 * p.N,
    edge_problems=lambda p: edge_problems(AXPY, p),
)


# --- derived quantities --------------------------------------------------------------------------


def tile(c: Point, p: Problem) -> Any:
    """Elements that a block takes at a time."""
    return c.THREADS * c.UNROLL * c.VECTOR_BYTES // p.element_bytes


def vector_registers(c: Point, loads: int) -> Any:
    """Registers for the vectors that a thread has in flight."""
    return c.UNROLL * c.VECTOR_BYTES // 4 * max(1, loads)


# --- launch geometry -----------------------------------------------------------------------------


def plan(kernel: str, operation: Operation, c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    """One launch: a block per tile, or BLOCKS_PER_SM persistent blocks on every multiprocessor."""
    blocks = ceil_div(s.N, tile(c, p))
    if c.BLOCKS_PER_SM:
        blocks = minimum(blocks, s.SM_COUNT * c.BLOCKS_PER_SM)
    launch = Launch(
        kernel, (formula(blocks), 1, 1), (c.THREADS, 1, 1), arguments(operation, p, s),
        shared_bytes=c.UNUSED_SHARED_KIB * 1024,
    )  # fmt: skip
    return LaunchPlan((launch,))


# --- arguments and preconditions -----------------------------------------------------------------


def types(p: Problem) -> dict[str, str]:
    return {"Element": p.dtype, "Accumulator": ACCUMULATOR[p.dtype]}


def constants(*, loads: int) -> dict[str, int]:
    """What the template needs and the space of an operation without loads does not have."""
    return {} if loads else {"LOAD_POLICY": 0, "L2_PREFETCH_BYTES": 0}


def arguments(operation: Operation, p: Problem, s: Sizes) -> tuple[Argument, ...]:
    scalar: Literal["fp32", "fp64"] = "fp64" if p.dtype == "fp64" else "fp32"
    return (
        *(Argument(array.name, "pointer") for array in operation.arrays(p)),
        Argument("n", "int64", formula(s.N)),
        *(Argument(name, scalar) for name, _ in operation.scalars),
    )


def limits(c: Config, p: Problem) -> tuple[Limit, ...]:
    """The size alone: base addresses are looked at in the kernel."""
    return (Limit("N", "at_most", MAX_TILES * tile(c, p)),)


def refuses(p: Problem) -> str:
    (limit,) = limits(_config(_unroll(p, 0), 0), p)
    return "" if limit.holds(p.names) else f"N={p.N}: kernels count the tiles in 31 bits"


# --- flops and bytes -----------------------------------------------------------------------------


def work(
    operation: Operation, c: Point, p: Problem, d: DeviceClass, *, loads: int, fma: int
) -> Work:
    """Each element is loaded ``loads`` times, goes through ``fma`` full-rate operations and is
    stored once. A conversion per 16-bit operand comes on top."""
    tiles = ceil_div(p.N, tile(c, p))
    persistent = c.BLOCKS_PER_SM * d.sm_count + (c.BLOCKS_PER_SM == 0) * tiles
    blocks = maximum(1, minimum(tiles, persistent))
    tiles_per_block = ceil_div(tiles, blocks)
    warps = ceil_div(c.THREADS, 32)
    accesses = tiles_per_block * warps * c.UNROLL * (loads + 1)
    elements = tiles_per_block * c.UNROLL * c.VECTOR_BYTES // p.element_bytes  # of one thread
    conversions = (loads + 1) * (p.element_bytes == 2) * (fma > 0)
    traffic = operation.bytes(p)
    vectors = vector_registers(c, loads)
    return Work(
        blocks=blocks,
        threads=c.THREADS,
        # As ptxas 13.0 counted them on sm_80 and sm_90: half as many again for widened elements.
        registers=vectors + (conversions > 0) * (vectors // 2) + 20,
        shared_bytes=c.UNUSED_SHARED_KIB * 1024,
        fma=c.THREADS * elements * fma,
        # Some 50 per block find the tile and the alignment, some 8 per tile step the addresses.
        instructions=accesses
        + warps * (elements * (fma + conversions) + 8 * tiles_per_block + 50),
        shared_wavefronts=0,
        # A warp's access is 32 vectors wide, and half a line costs as much as a whole one.
        l1_wavefronts=accesses * maximum(1, c.VECTOR_BYTES // 4),
        l2_bytes=traffic,
        dram_bytes=traffic,
        # A step waits for its loads. Stores are not waited for: as if all were in flight.
        inflight_bytes=c.UNROLL * c.VECTOR_BYTES * loads if loads else traffic,
        steps=tiles_per_block,
        overlap=int(loads == 0),
        unit="fp64" if p.dtype == "fp64" else "fp32",
        register_limit=minimum(255, d.registers_per_sm // c.THREADS),
    )


# --- space ---------------------------------------------------------------------------------------


def space(p: Problem, d: DeviceClass, *, loads: int) -> Space:
    rows: list[Any] = [
        ("THREADS", (64, 128, 256, 512, 1024), "threads per block"),
        ("VECTOR_BYTES", (2, 4, 8, 16, 32), "bytes that one load or store moves"),
        ("UNROLL", UNROLLS, "vectors of each operand that a thread has in flight"),
        ("BLOCKS_PER_SM", (0, 1, 2, 4, 8, 16),
         "persistent blocks on each multiprocessor, or 0: one block per tile"),
        ("STORE_POLICY", (0, 1, 2, 3),
         "0 st, 1 st.cs (first to be evicted), 2 st.wt, 3 st.L1::no_allocate"),
        ("UNUSED_SHARED_KIB", UNUSED_SHARED_KIB,
         "KiB of shared memory that a block takes for nothing, so that fewer run at once", 0),
    ]  # fmt: skip
    if loads:
        rows += [
            ("LOAD_POLICY", (0, 1, 2, 3, 4),
             "0 ld, 1 ld.nc, 2 ld.nc.L1::no_allocate, 3 ld.cs (first to be evicted), "
             "4 ld.L1::no_allocate; a load in place is never nc"),
            ("L2_PREFETCH_BYTES", (0, 128, 256),
             "bytes that a miss makes L2 fetch, or 0: as the hardware likes"),
        ]  # fmt: skip
    return Space(parameters(rows), (*_structural(p, loads), *_conditional(p, d, loads)))


def _structural(p: Problem, loads: int) -> tuple[Constraint, ...]:
    return (
        Constraint(
            "a vector holds at least one element", lambda c: p.element_bytes <= c.VECTOR_BYTES
        ),
        Constraint(
            "a block's registers hold its vectors and 32 more per thread",
            lambda c: (vector_registers(c, loads) + OTHER_REGISTERS) * c.THREADS <= 65536,
        ),
    )


def _conditional(p: Problem, d: DeviceClass, loads: int) -> tuple[Constraint, ...]:
    constraints = [
        Constraint(
            "vectors of 32 bytes need compute capability 10.0",
            lambda c: (c.VECTOR_BYTES <= 16) | (d.capability >= 100),
            structural=False,
        ),
        Constraint(
            "tiles are counted in 31 bits",
            lambda c: MAX_TILES * tile(c, p) >= p.N,
            structural=False,
        ),
        *persistent_grid(d, lambda c: ceil_div(p.N, tile(c, p))),
        Constraint(
            "shared memory stays unused only where every tile has a block of its own",
            lambda c: (c.UNUSED_SHARED_KIB == 0) | (c.BLOCKS_PER_SM == 0),
            structural=False,
        ),
        Constraint(
            "unused shared memory leaves a multiprocessor fewer threads than without, and half of "
            "all at least",
            lambda c: (c.UNUSED_SHARED_KIB == 0) | _leaves_fewer_threads(c, d),
            structural=False,
        ),
    ]
    if loads:
        constraints += [
            Constraint(
                "an L2 prefetch of 256 bytes needs compute capability 8.0",
                lambda c: (c.L2_PREFETCH_BYTES <= 128) | (d.capability >= 80),
                structural=False,
            ),
            # ptxas assembles .L2::256B as LTC128B there.
            Constraint(
                "ld.nc prefetches at most 128 bytes on sm_80",
                lambda c: (
                    (c.L2_PREFETCH_BYTES <= 128)
                    | ((c.LOAD_POLICY != 1) & (c.LOAD_POLICY != 2))
                    | (d.arch != "sm_80")
                ),
                structural=False,
            ),
        ]
    return tuple(constraints)


def _leaves_fewer_threads(c: Point, d: DeviceClass) -> Any:
    taken = c.UNUSED_SHARED_KIB * 1024 + d.shared_bytes_reserved
    left = d.shared_bytes_per_sm // maximum(1, taken)
    most = minimum(d.blocks_per_sm, d.threads_per_sm // c.THREADS)
    fewer = (left < most) & (2 * left * c.THREADS >= d.threads_per_sm)
    fits = d.shared_bytes_per_block >= c.UNUSED_SHARED_KIB * 1024
    return fewer & fits


def persistent_grid(d: DeviceClass, tiles: Callable[[Point], Any]) -> tuple[Constraint, ...]:
    """What ``BLOCKS_PER_SM`` blocks of ``THREADS`` demand that take so many ``tiles`` in turn."""
    return (
        Constraint(
            "all blocks of a persistent grid run at once",
            lambda c: (
                (d.blocks_per_sm >= c.BLOCKS_PER_SM)
                & (d.threads_per_sm >= c.BLOCKS_PER_SM * c.THREADS)
            ),
            structural=False,
        ),
        Constraint(
            "a persistent grid has fewer blocks than there are tiles",
            lambda c: (c.BLOCKS_PER_SM == 0) | (c.BLOCKS_PER_SM * d.sm_count < tiles(c)),
            structural=False,
        ),
    )


def default(p: Problem, *, loads: int) -> Config:
    """Full vectors, and a block per tile. A thread has one of each operand, as many more as keep
    the tiles countable: on an H200 blocks that take 1 or 2 KiB of an operand copied and added 2^24
    and 2^28 elements 10 % faster than blocks that take 16 KiB, and within 2 % of the fastest
    configuration."""
    return _config(_unroll(p, loads), loads)


def _unroll(p: Problem, loads: int) -> int:
    few = (unroll for unroll in UNROLLS if MAX_TILES * tile(_config(unroll, loads), p) >= p.N)
    return next(few, UNROLLS[-1])


def _config(unroll: int, loads: int) -> Config:
    values = {"THREADS": 128, "VECTOR_BYTES": 16, "UNROLL": unroll, "BLOCKS_PER_SM": 0}
    policies = {"STORE_POLICY": 0, "UNUSED_SHARED_KIB": 0}
    if loads:
        policies |= {"LOAD_POLICY": 0, "L2_PREFETCH_BYTES": 0}
    return Config(values | policies)

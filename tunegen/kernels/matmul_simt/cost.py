# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes of matmul simt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tunegen.kernels.matmul import output_bytes, output_traffic
from tunegen.kernels.matmul_simt.derived import (
    SECTOR_BYTES,
    along_k,
    lanes,
    register_limit,
    registers_needed,
    share,
    shared_bytes,
    strips,
    threads,
    vector_c,
    vectors_of,
)
from tunegen.kernels.split_k import accumulator_bytes, accumulator_vector
from tunegen.kernels.tiled import LINE_BYTES, WARP, block_dram_bytes, grid, tiles
from tunegen.model import DeviceClass, Point, Problem, Work, maximum, minimum

BANKS = 32

# What ptxas takes beyond need where the launch bounds leave it free; median of 200 compilations.
SPARE_REGISTERS = 32


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """A step of K costs a thread its two fragments from shared memory and their outer product, a
    tile its share of both copies, addresses and a barrier, a block the way of its sums to C."""
    split = c.SPLIT_K > 1
    block_threads = threads(c)
    warps, k_tiles = block_threads // WARP, tiles(c, p)
    shares = share(c)
    widths = vectors_of(c, p, shares)
    a, b = (_copy(c, p, i, block_threads, shares[i], widths[i]) for i in (0, 1))
    fragment_loads, fragment_wavefronts = _fragments(c, p)
    sums, vector = c.THREAD_M * c.THREAD_N, vector_c(c, p)

    per_step = sums + fragment_loads
    # Two instructions for an address; barrier, change of buffers and end of the loop; for C a
    # product and a conversion an element, check, address and access a vector.
    per_tile = 3 * (a.accesses + b.accesses) + a.stores + b.stores + 24
    per_block = 150 + 2 * sums + 6 * (1 + p.beta) * (sums / vector)

    out_bytes = np.where(split, accumulator_bytes(p), output_bytes(p))
    out_line = minimum(lanes(c)[1] * vector * out_bytes, LINE_BYTES)
    out_wavefronts = c.BLOCK_M * c.BLOCK_N * (1 + p.beta) * (out_bytes / out_line)

    cells = float(p.B) * p.M * p.N
    c_bytes = output_traffic(p)
    partial_bytes = cells * c.SPLIT_K * accumulator_bytes(p)
    written = np.where(split, partial_bytes, c_bytes)
    along_m, along_n = grid(c, p)
    slice_blocks = along_m * along_n * p.B * c.SPLIT_K
    l2_bytes = float(p.B) * p.K * p.element_bytes * (p.M * along_n + p.N * along_m)
    needed, limit = registers_needed(c, p), register_limit(c)
    brought = (c.BLOCK_M + c.BLOCK_N) * c.BLOCK_K * p.element_bytes
    return Work(
        blocks=slice_blocks,
        threads=block_threads,
        registers=maximum(minimum(needed + SPARE_REGISTERS, limit), needed),
        shared_bytes=shared_bytes(c, p),
        fma=c.BLOCK_M * c.BLOCK_N * c.BLOCK_K * k_tiles,
        instructions=warps * (k_tiles * (c.BLOCK_K * per_step + per_tile) + per_block),
        shared_wavefronts=warps
        * k_tiles
        * (c.BLOCK_K * fragment_wavefronts + a.wavefronts + b.wavefronts),
        l1_wavefronts=warps * k_tiles * (a.lines + b.lines) + out_wavefronts,
        l2_bytes=l2_bytes + written,
        dram_bytes=minimum(block_dram_bytes(c, p, d), l2_bytes) + written,
        inflight_bytes=brought / block_threads * np.where(c.ASYNC_COPY, c.SHARED_BUFFERS - 1, 1),
        # A single buffer takes a second barrier, before it is overwritten.
        steps=k_tiles * (1 + (c.SHARED_BUFFERS == 1)) + 1,
        overlap=np.where((c.SHARED_BUFFERS == 0) & (c.REGISTER_BUFFERS == 1), 0, 1),
        unit="fp64" if p.dtype == "fp64" else "fp32",
        extra_launches=np.where(split, 1, 0),
        extra_bytes=np.where(split, partial_bytes + c_bytes, 0),
        register_limit=limit,
    )


def _fragments(c: Point, p: Problem) -> tuple[Any, Any]:
    """Loads of a thread from shared memory at every step, and their wavefronts for a warp."""
    strip_m, strip_n = strips(c, p)
    lanes_m, lanes_n = lanes(c)
    shared = c.SHARED_BUFFERS > 0
    loads_m, loads_n = c.THREAD_M / strip_m * shared, c.THREAD_N / strip_n * shared

    def wavefronts(strip: Any, other_lanes: Any) -> Any:
        # 8 lanes at a time with 16 bytes, 16 with 8; twice as many where they go in pairs that
        # want the same, which they do when more than one lane lies along the other dimension.
        words = strip * (accumulator_bytes(p) // 4)
        return maximum(words / (1 + (other_lanes > 1)), 1)

    return (
        loads_m + loads_n,
        loads_m * wavefronts(strip_m, lanes_n) + loads_n * wavefronts(strip_n, lanes_m),
    )


class _Copy(NamedTuple):
    """What bringing one operand's tile costs: instructions of a thread, cycles for a warp."""

    accesses: Any  # to global memory
    stores: Any  # to shared memory, and conversions
    lines: Any  # touched in L1
    wavefronts: Any  # of what arrives in shared memory


def _copy(
    c: Point, p: Problem, operand: int, block_threads: Any, owned: Any, vector: Any
) -> _Copy:
    """The cost for one thread's ``owned`` elements, ``vector`` of them an access."""
    block, own_lanes = (c.BLOCK_M, c.BLOCK_N)[operand], lanes(c)[operand]
    direct, element = np.equal(c.SHARED_BUFFERS, 0), p.element_bytes
    accesses = owned / vector
    if along_k(p)[operand]:
        # Lanes side by side along a row: a sector of it, as the template's TileCopy places them.
        sector = maximum(SECTOR_BYTES // element // vector, 1)
        side = maximum(minimum(c.BLOCK_K // vector, sector), block_threads // block)
        side = minimum(side, WARP)
        lines = np.where(direct, own_lanes, WARP / side * _lines(side * vector * element))
        stores = owned
        wavefronts = owned * _transposing(c, p, block, vector, side)
    else:
        side = minimum(block / vector, WARP)
        line_lanes = np.where(direct, own_lanes, side)
        lines = _lines(line_lanes * vector * element) * np.where(direct, 1, WARP / side)
        stores = owned / minimum(vector, accumulator_vector(p))
        wavefronts = owned * (accumulator_bytes(p) * WARP / LINE_BYTES)
    conversions = owned if element == 2 else 0
    staged = (c.ASYNC_COPY == 0) & ~direct
    return _Copy(
        accesses=accesses,
        stores=stores * staged + conversions,
        lines=accesses * lines,
        wavefronts=wavefronts * ~direct,
    )


def _lines(contiguous_bytes: Any) -> Any:
    return maximum(contiguous_bytes / LINE_BYTES, 1)


def _transposing(c: Point, p: Problem, block: Any, vector: Any, side: Any) -> Any:
    """Wavefronts of a warp's store of one element each, where ``side`` neighbours are ``vector``
    rows of shared memory apart and the other lanes lie side by side."""
    words = accumulator_bytes(p) // 4
    together, banks = WARP // words, BANKS // words  # lanes served at once, banks of an element
    side = minimum(side, together)
    shift = vector * (block + c.PADDING)
    apart = minimum(shift & -shift, banks)  # from row to row: sizes and padding are powers of two
    run = together / side
    distinct = minimum(side, banks / apart)
    covered = minimum((distinct - 1) * minimum(apart, run) + run, banks)
    return words * together / covered

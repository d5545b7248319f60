# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes of matmul gemv."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels import matmul
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
    rounds,
    run_k,
    shared_bytes,
    slice_bytes,
    takes_tickets,
    threads,
    vector_a,
    vector_b,
)
from tunegen.kernels.split_k import accumulator_bytes, accumulator_vector
from tunegen.kernels.tiled import LINE_BYTES, WARP, overlapped_launch
from tunegen.model import DeviceClass, Point, Problem, Work, maximum, minimum


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """A round costs a thread its elements of B, widened, those of A, and their products; the end
    of a block the sums over lanes, warps and slices."""
    block_threads, block_rounds = threads(c), rounds(c, p)
    warps = block_threads // WARP
    run, accesses, staged = run_k(c, p), loads(c, p), c.TILE_K > 0
    narrow = int(p.element_bytes == 2)
    sums = c.ROWS * c.COLS

    # Accesses to A in a round, from shared memory or through L1, and what widens it there.
    part = minimum(run, accumulator_vector(p))
    a_accesses = c.ROWS * run / np.where(staged, part, vector_a(c, p))
    widened = narrow * run * (c.COLS + np.where(staged, 0, c.ROWS))
    per_round = run * sums + widened + a_accesses + 3 * accesses + 4

    tile_elements = c.ROWS * depth(c, p) * staged  # of A, by all threads of the block
    per_element = (2 + narrow + 6 / vector_a(c, p)) / block_threads
    folding = 3 * maximum(sums, 1) + 4 * np.log2(c.LANES_K)
    elements = p.M * block_n(c)  # of C in a block
    finishing = elements / block_threads * (c.WARPS_K + np.where(c.SPLIT_K > 1, 2, 0) + 8)
    per_thread = 200 + tile_elements * per_element + folding + finishing

    slice_blocks = groups(c, p) * c.SPLIT_K
    b_bytes = float(p.B) * p.N * p.K * p.element_bytes * min(p.M, 1)
    a_bytes = groups(c, p) * (float(p.M) * p.K * p.element_bytes)  # every block reads all rows
    c_bytes = matmul.output_traffic(p)
    # Partial sums are written, read and made zero again, and do not leave L2.
    partial_bytes = slice_blocks * slice_bytes(c, p) * 3.0 * takes_tickets(c)
    steps = np.ceil(block_rounds / c.UNROLL) + 1
    # The first fetch is waited for; then tickets are a write, an atomic and a read one after the
    # other, a cluster's sums a barrier and a read.
    waits = 1 + 3 * takes_tickets(c) + 1 * in_cluster(c)
    return Work(
        blocks=slice_blocks,
        threads=block_threads,
        registers=minimum(registers_needed(c, p), register_limit(c)),
        shared_bytes=shared_bytes(c, p),
        fma=c.ROWS * block_n(c) * depth_walked(c, p, block_rounds),
        instructions=warps * (block_rounds * per_round + per_thread),
        shared_wavefronts=warps * block_rounds * a_accesses * _broadcast(c, p, part) * staged
        + 2.0 * slice_bytes(c, p) * c.WARPS_K / LINE_BYTES,
        l1_wavefronts=warps * block_rounds * accesses * _lines(c, p)
        + warps * block_rounds * a_accesses * np.where(staged, 0, 1),
        l2_bytes=b_bytes + a_bytes + c_bytes + partial_bytes,
        dram_bytes=float(matmul.OPERATION.bytes(p)),
        inflight_bytes=bytes_under_way(c, p),
        steps=steps + waits,
        overlap=1 - waits / (steps + waits),
        unit="fp64" if p.dtype == "fp64" else "fp32",
        programmatic=overlapped_launch(c),
        register_limit=register_limit(c),
    )


def depth_walked(c: Point, p: Problem, block_rounds: Any) -> Any:
    """Steps of K that a block's lanes walk together, idle ones of the last round included."""
    return block_rounds * c.WARPS_K * c.LANES_K * run_k(c, p)


def _lines(c: Point, p: Problem) -> Any:
    """Lines of L1 that one access of a warp to B touches."""
    side = c.LANES_K if along_k(p) else WARP // c.LANES_K
    return WARP / side * maximum(side * vector_b(c, p) * p.element_bytes / LINE_BYTES, 1)


def _broadcast(c: Point, p: Problem, part: Any) -> Any:
    """Wavefronts of one access of a warp to A's tile: lanes along N want the same."""
    return maximum(c.LANES_K * part * accumulator_bytes(p) / LINE_BYTES, 1)

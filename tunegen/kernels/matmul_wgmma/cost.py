# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes of matmul wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels.matmul import output_bytes, output_traffic
from tunegen.kernels.matmul_wgmma.derived import (
    cluster,
    direct_store,
    groups,
    k_blocks,
    left_rows,
    resident_clusters,
    right_columns,
    shared_bytes,
    stage_bytes,
    sums,
    threads,
    turns,
)
from tunegen.kernels.tiled import LINE_BYTES, WARP, Raster, dram_bytes, overlapped_launch
from tunegen.model import DeviceClass, Point, Problem, Work, maximum, minimum

# How much longer it takes to hand sums over than the same bytes take in L2: a block waits for
# others, and its tensor cores for it. Tiles of 256x192 took 8 to 16 us on an H200, L2 takes 2.5.
HANDED_SLOWDOWN = 4


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """A tile counts as a block, or where steps of K are shared out, an even share of all tiles.
    An instruction reads all of the right operand from shared memory, into which both were copied
    before: with narrow tiles that, not the multiply-adds, is what binds. What it reads of the
    left one costs nothing that was seen: on an H200 128x176 took as long as 192x176, and 128x192
    by two consumers in turns less than 256x192 where K is short. The copy engine costs no
    instructions to speak of; the way of the sums to C does, and is hidden only where consumers
    take turns."""
    streamed = c.STREAM_K > 0
    at_once = resident_clusters(c, d.sm_count)
    blocks = np.where(streamed, at_once, turns(c, p)) * cluster(c)
    share = np.where(streamed, turns(c, p) / at_once, 1.0)  # tiles of a block
    tiles = np.ceil(share)
    left, right, depth = left_rows(c), right_columns(c), k_blocks(c, p) * share
    step_bytes = c.BLOCK_K * 2 * (left + right + right * (left // 64))
    cells = float(p.B) * p.M * p.N
    c_bytes = output_traffic(p)
    partial_bytes = cells * c.SPLIT_K * 4
    sliced, direct = c.SPLIT_K > 1, direct_store(c, p)
    written = np.where(sliced, partial_bytes, c_bytes)
    staged = np.where(direct, 0, left * right * output_bytes(p) * 2) * tiles
    # A block leaves its sums of one tile, and adds those that another one has left.
    handed_bytes = np.where(streamed, 2.0 * left * right * 4, 0.0) * HANDED_SLOWDOWN
    loaded = _loaded_bytes(c, p)
    warps = threads(c) // WARP
    own_sums = sums(c)
    # Nobody multiplies while all consumers write C. Estimate.
    idle_clocks = np.where(c.PINGPONG, 0, 16 * own_sums) * tiles
    return Work(
        blocks=blocks,
        threads=threads(c),
        registers=np.where(c.CONSUMERS == 3, 128, 168),  # at launch
        shared_bytes=shared_bytes(c, p),
        fma=c.BLOCK_M * c.BLOCK_N * c.BLOCK_K * depth + idle_clocks * d.tensor16_per_clock,
        instructions=warps * (depth * 40 + 150 * tiles)
        + (left * right // WARP) * (2 + p.beta) * tiles,
        shared_wavefronts=(depth * step_bytes + staged) / LINE_BYTES,
        l1_wavefronts=np.where(direct, left * right * 4 / LINE_BYTES, 0) * tiles,
        l2_bytes=loaded + written,
        dram_bytes=minimum(_dram_bytes(c, p, d), loaded) + written,
        inflight_bytes=(c.STAGES - 1) * stage_bytes(c, p) / threads(c),
        # The last products, and the sums' way out, wait for each other unless another consumer
        # goes on meanwhile.
        steps=depth + np.where(c.PINGPONG, 1, 4 + own_sums / 16) * tiles,
        overlap=1,
        unit="tensor16",
        extra_launches=np.where(sliced, 1, 0),
        # What is handed over waits for the products, and they for it.
        extra_bytes=np.where(sliced, partial_bytes + c_bytes, 0) + handed_bytes * blocks,
        programmatic=overlapped_launch(c),
        register_limit=65536 // (threads(c)),
    )


def _loaded_bytes(c: Point, p: Problem) -> Any:
    """Bytes of A and B that all blocks request, a shared part once for the cluster."""
    along_m, along_n = groups(c, p)
    return float(p.B) * p.K * 2 * (p.M * along_n + p.N * along_m)


def _dram_bytes(c: Point, p: Problem, d: DeviceClass) -> Any:
    along_m, along_n = groups(c, p)
    high, wide = c.CLUSTER_M * c.BLOCK_M, c.CLUSTER_N * c.BLOCK_N
    columns = c.RASTER_COLUMNS == 1  # are walked together
    raster = Raster(
        c.RASTER_GROUP,
        np.where(columns, along_n, along_m),
        np.where(columns, along_m, along_n),
        np.where(columns, wide, high),
        np.where(columns, high, wide),
    )
    at_once = maximum(d.sm_count // cluster(c), 1)
    depth = p.K / c.SPLIT_K
    return dram_bytes(p, d, raster, at_once=at_once, in_all=turns(c, p), depth=depth)

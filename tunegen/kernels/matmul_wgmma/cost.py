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
    right_columns,
    shared_bytes,
    stage_bytes,
    sums,
    threads,
    turns,
)
from tunegen.model import DeviceClass, Point, Problem, Work, maximum, minimum

WARP = 32
LINE_BYTES = 128  # what shared memory delivers at once

# The part of L2 that operands keep from one wave of tiles to the next. Estimate.
L2_KEPT = 0.75


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """A tile counts as a block. An instruction reads 64 rows of the left operand and all of the
    right one from shared memory, into which both were copied before: with large tiles that, not
    the multiply-adds, is what binds. The copy engine costs no instructions to speak of; the way
    of the sums to C does, and is hidden only where consumers take turns."""
    tiles = turns(c, p) * cluster(c)
    left, right, depth = left_rows(c), right_columns(c), k_blocks(c, p)
    step_bytes = c.BLOCK_K * 2 * (2 * left + right + right * (left // 64))
    cells = float(p.B) * p.M * p.N
    c_bytes = output_traffic(p)
    partial_bytes = cells * c.SPLIT_K * 4
    sliced, direct = c.SPLIT_K > 1, direct_store(c, p)
    written = np.where(sliced, partial_bytes, c_bytes)
    staged = np.where(direct, 0, left * right * output_bytes(p) * 2)
    loaded = _loaded_bytes(c, p)
    warps = threads(c) // WARP
    own_sums = sums(c)
    return Work(
        blocks=tiles,
        threads=threads(c),
        registers=168,
        shared_bytes=shared_bytes(c, p),
        fma=c.BLOCK_M * c.BLOCK_N * c.BLOCK_K * depth,
        instructions=warps * (depth * 40 + 150) + (left * right // WARP) * (2 + p.beta),
        shared_wavefronts=(depth * step_bytes + staged) / LINE_BYTES,
        l1_wavefronts=np.where(direct, left * right * 4 / LINE_BYTES, 0),
        l2_bytes=loaded + written,
        dram_bytes=minimum(_dram_bytes(c, p, d), loaded) + written,
        inflight_bytes=(c.STAGES - 1) * stage_bytes(c, p) / threads(c),
        # The last products, and the sums' way out, wait for each other unless another consumer
        # goes on meanwhile.
        steps=depth + np.where(c.PINGPONG, 1, 4 + own_sums / 16),
        overlap=1,
        unit="tensor16",
        extra_launches=np.where(sliced, 1, 0),
        extra_bytes=np.where(sliced, partial_bytes + c_bytes, 0),
        register_limit=65536 // (threads(c)),
    )


def _loaded_bytes(c: Point, p: Problem) -> Any:
    """Bytes of A and B that all blocks request, a shared part once for the cluster."""
    along_m, along_n = groups(c, p)
    return float(p.B) * p.K * 2 * (p.M * along_n + p.N * along_m)


def _dram_bytes(c: Point, p: Problem, d: DeviceClass) -> Any:
    """Bytes of A and B from device memory: once where L2 keeps them, else once for each wave of
    tiles that reads them."""
    once = float(p.B) * (p.M + p.N) * p.K * 2
    if once <= L2_KEPT * d.l2_bytes:
        return once
    along_m, along_n = groups(c, p)
    at_once = maximum(d.sm_count // cluster(c), 1)
    columns_first = c.RASTER_COLUMNS == 1
    fast, slow = (
        np.where(columns_first, along_n, along_m),
        np.where(columns_first, along_m, along_n),
    )
    grouped = minimum(maximum(c.RASTER_GROUP, at_once / slow), fast)
    walked = minimum(at_once / grouped, slow)
    rows, columns = (
        np.where(columns_first, walked, grouped),
        np.where(columns_first, grouped, walked),
    )
    wave = rows * c.CLUSTER_M * c.BLOCK_M + columns * c.CLUSTER_N * c.BLOCK_N
    waves = np.ceil(turns(c, p) / at_once)
    return maximum(wave * (p.K / c.SPLIT_K) * 2.0 * waves, once)

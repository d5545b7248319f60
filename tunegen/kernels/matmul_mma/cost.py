# SPDX-License-Identifier: Apache-2.0
"""Flops and bytes of matmul mma."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels.matmul import output_traffic
from tunegen.kernels.matmul_mma.derived import (
    copies,
    is_shifted,
    output_bytes,
    rate_kept,
    reads_c,
    register_limit,
    registers_needed,
    shared_bytes,
    stage_bytes,
    step,
    steps,
    store_vector,
    threads,
    vector,
)
from tunegen.kernels.split_k import accumulator_bytes
from tunegen.kernels.tiled import (
    LINE_BYTES,
    WARP,
    block_dram_bytes,
    grid,
    tiles,
)
from tunegen.model import DeviceClass, Point, Problem, Unit, Work, maximum, minimum

# What ptxas takes beyond need where the launch bounds leave it free; median of 160 compilations.
SPARE_REGISTERS = 4


def work(c: Point, p: Problem, d: DeviceClass) -> Work:
    """A step of K costs a warp its fragments from shared memory and its instructions, a tile its
    share of both copies and a barrier, a block the way of its sums to C."""
    split = c.SPLIT_K > 1
    block_threads = threads(c)
    warps, k_tiles, k_steps = block_threads // WARP, tiles(c, p), steps(c, p)
    # A fragment of 16 rows: four matrices of 8 x 8, in fp64 as many loads of 16 bytes a lane.
    loads = (c.WARP_M + c.WARP_N) // 16 * (step(c, p) * p.element_bytes // 32)
    products = c.WARP_M // c.MMA_ROWS * (c.WARP_N // 8) * (step(c, p) // c.MMA_K)
    brought = [_copy(c, p, operand) for operand in (0, 1)]
    copy_instructions = sum(instructions for instructions, _, _ in brought)
    copy_wavefronts = sum(wavefronts for _, wavefronts, _ in brought)
    copy_lines = sum(lines for _, _, lines in brought)

    sums = c.WARP_M * c.WARP_N / WARP
    accesses = sums / store_vector(c, p) * (1 + reads_c(c, p))
    store_instructions = 2 * sums + 6 * accesses + np.where(c.STAGED_STORE, sums, 0)
    out_bytes = c.BLOCK_M * c.BLOCK_N * output_bytes(c, p) * (1 + reads_c(c, p))

    cells = float(p.B) * p.M * p.N
    c_bytes = output_traffic(p)
    partial_bytes = cells * c.SPLIT_K * accumulator_bytes(p)
    written = np.where(split, partial_bytes, c_bytes)
    along_m, along_n = grid(c, p)
    slice_blocks = along_m * along_n * p.B * c.SPLIT_K
    l2_bytes = float(p.B) * p.K * p.element_bytes * (p.M * along_n + p.N * along_m)
    needed, limit = registers_needed(c, p), register_limit(c)
    return Work(
        blocks=slice_blocks,
        threads=block_threads,
        registers=maximum(minimum(needed + SPARE_REGISTERS, limit), needed),
        shared_bytes=shared_bytes(c, p),
        fma=c.BLOCK_M * c.BLOCK_N * c.BLOCK_K * k_tiles / rate_kept(p, d),
        instructions=warps
        * (
            k_tiles * (k_steps * (loads * 1.25 + products) + copy_instructions + 24)
            + 250
            + store_instructions
        ),
        shared_wavefronts=warps * (k_tiles * (k_steps * loads * 4 + copy_wavefronts))
        + np.where(c.STAGED_STORE, 2 * out_bytes / LINE_BYTES, 0),
        l1_wavefronts=warps * k_tiles * copy_lines
        # Pairs from registers fill half a line's sectors or less.
        + out_bytes / LINE_BYTES * np.where(c.STAGED_STORE, 1, 2),
        l2_bytes=l2_bytes + written,
        dram_bytes=minimum(block_dram_bytes(c, p, d), l2_bytes) + written,
        inflight_bytes=_inflight_bytes(c, p),
        steps=k_tiles + 1,
        overlap=1,
        unit=_unit(p, d),
        extra_launches=np.where(split, 1, 0),
        extra_bytes=np.where(split, partial_bytes + c_bytes, 0),
        programmatic=c.PROGRAMMATIC_LAUNCH,
        register_limit=limit,
    )


def _unit(p: Problem, d: DeviceClass) -> Unit:
    if p.element_bytes == 2:
        return "tensor16"
    # Without fp64 tensor cores the instruction takes as long as the CUDA cores do.
    return "tensor64" if d.tensor64_per_clock else "fp64"


def _copy(c: Point, p: Problem, operand: int) -> tuple[Any, Any, Any]:
    """Bringing one operand's tile: a warp's instructions, wavefronts into shared memory, and lines
    touched in L1."""
    count = copies(c, p, operand)
    copy_bytes = vector(p, operand) * p.element_bytes
    lines = maximum(WARP * copy_bytes / LINE_BYTES, 1)
    if is_shifted(p, operand):
        # Every second row is read twice; all begin in the middle of a line.
        return count * 5.5, count, count * 1.5 * 2
    # Rows narrower than a line touch more of them.
    row_bytes = (
        (c.BLOCK_M, c.BLOCK_N)[operand] if p.layout[operand] == "tn"[operand] else c.BLOCK_K
    )
    narrow = maximum(LINE_BYTES / (row_bytes * p.element_bytes), 1)
    return count * 2, count * lines, count * lines * narrow


def _inflight_bytes(c: Point, p: Problem) -> Any:
    """Of a thread: all stages but one, or one tile where copies pass through registers."""
    shifted = is_shifted(p, 0) or is_shifted(p, 1)
    return stage_bytes(c, p) / maximum(threads(c), 1) * (1 if shifted else c.STAGES - 1)

# SPDX-License-Identifier: Apache-2.0
"""Derived quantities of matmul simt: each as the template computes it, for a config or columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunegen.kernels import tiled
from tunegen.kernels.matmul import alignment, alignment_c
from tunegen.kernels.split_k import accumulator_bytes, accumulator_vector
from tunegen.kernels.tiled import WARP
from tunegen.model import (
    Point,
    Problem,
    maximum,
    minimum,
)

SECTOR_BYTES = 32  # the least that global memory delivers


def threads(c: Point) -> Any:
    return c.BLOCK_M // c.WARP_M * (c.BLOCK_N // c.WARP_N) * WARP


def lanes(c: Point) -> tuple[Any, Any]:
    """Lanes of a warp along M and along N."""
    return c.WARP_M // c.THREAD_M, c.WARP_N // c.THREAD_N


def strips(c: Point, p: Problem) -> tuple[Any, Any]:
    """Elements of a thread's fragments of A and B that one access to shared memory reads."""
    widest = accumulator_vector(p)
    return minimum(c.THREAD_M, widest), minimum(c.THREAD_N, widest)


def along_k(p: Problem) -> tuple[bool, bool]:
    """Whether the rows of A and of B, as stored, run along K."""
    return p.layout[0] == "n", p.layout[1] == "t"


def share(c: Point) -> tuple[Any, Any]:
    """Elements of A and of B that one thread brings from global memory for every tile."""
    direct, count = c.SHARED_BUFFERS == 0, maximum(threads(c), 1)
    return (
        np.where(direct, c.THREAD_M * c.BLOCK_K, c.BLOCK_M * c.BLOCK_K // count),
        np.where(direct, c.THREAD_N * c.BLOCK_K, c.BLOCK_N * c.BLOCK_K // count),
    )


def vectors(c: Point, p: Problem) -> tuple[Any, Any]:
    """Elements per global access to A and to B: as wide as asked for and aligned, no longer than
    the operand's rows in a tile, and with something to copy for every thread."""
    return vectors_of(c, p, share(c))


def vectors_of(c: Point, p: Problem, shares: tuple[Any, Any]) -> tuple[Any, Any]:
    """:func:`vectors` where the shares are known."""
    widths = []
    for operand, (ld, block, strip) in enumerate(
        zip((p.lda, p.ldb), (c.BLOCK_M, c.BLOCK_N), strips(c, p), strict=True)
    ):
        widest = minimum(minimum(c.VECTOR_WIDTH, alignment(p, ld)), shares[operand])
        if along_k(p)[operand]:
            # Transposed on their way, asynchronous copies bring one element each.
            widths.append(np.where(c.ASYNC_COPY == 1, 1, minimum(widest, c.BLOCK_K)))
        else:
            row = np.where(c.SHARED_BUFFERS == 0, strip, block)
            widths.append(minimum(widest, row))
    return widths[0], widths[1]


def vector_c(c: Point, p: Problem) -> Any:
    """Elements per access to what the main kernel writes: C, or partial sums in whole vectors."""
    aligned = np.where(c.SPLIT_K > 1, accumulator_vector(p), alignment_c(p))
    return minimum(minimum(c.VECTOR_WIDTH, aligned), strips(c, p)[1])


def shared_bytes(c: Point, p: Problem) -> Any:
    buffer = c.BLOCK_K * (c.BLOCK_M + c.BLOCK_N + 2 * c.PADDING)
    return c.SHARED_BUFFERS * buffer * accumulator_bytes(p)


def registers_needed(c: Point, p: Problem) -> Any:
    """Registers per thread below which ptxas mostly spills: sums, fragments, staged elements, and
    what the rest took in some 400 compilations for sm_90 with NVRTC 13.0."""
    words = accumulator_bytes(p) // 4
    fragments = (c.THREAD_M + c.THREAD_N) * words * c.REGISTER_BUFFERS
    shares = share(c)
    staged = sum(
        # A 16-bit element that is loaded alone has a register of its own.
        np.where(width * p.element_bytes < 4, owned, owned * p.element_bytes // 4)
        for owned, width in zip(shares, vectors_of(c, p, shares), strict=True)
    ) * (1 - c.ASYNC_COPY)
    besides = np.where(c.SHARED_BUFFERS == 0, fragments * c.BLOCK_K + 32, fragments + staged + 24)
    return c.THREAD_M * c.THREAD_N * words + besides


def register_limit(c: Point) -> Any:
    return tiled.register_limit(c, threads(c))

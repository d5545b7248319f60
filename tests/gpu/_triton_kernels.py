# SPDX-License-Identifier: Apache-2.0
"""C = A B in Triton, as the contest's rival. Imported only where Triton is installed.

``a``, ``b`` and ``c`` are row-major as stored, transposed or not, ``lda``, ``ldb`` and ``ldc``
elements from row to row; sums are in fp32. Tiles go in groups of GROUP_M rows, so that those that
run together share operands in L2.
"""

# ruff: noqa: SIM108 (Triton compiles only the branch of a statement that is taken)

import triton
import triton.language as tl


@triton.jit
def _place(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a tile."""
    width = GROUP_M * tl.cdiv(n, BLOCK_N)
    first = tile // width * GROUP_M
    rows = min(tl.cdiv(m, BLOCK_M) - first, GROUP_M)
    return first + tile % width % rows, tile % width // rows


@triton.jit
def _tile(
    a, b, c, m, n, k, lda, ldb, ldc, tile,
    TRANSPOSE_A: tl.constexpr, TRANSPOSE_B: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, column = _place(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    # What lies outside is read from inside and not written: loads need no mask along M and N.
    inner_rows = tl.max_contiguous(tl.multiple_of(rows % m, BLOCK_M), BLOCK_M)
    inner_columns = tl.max_contiguous(tl.multiple_of(columns % n, BLOCK_N), BLOCK_N)
    if TRANSPOSE_A:
        a_at, a_step = a + steps[None, :] * lda + inner_rows[:, None], BLOCK_K * lda
    else:
        a_at, a_step = a + (rows % m)[:, None] * lda + steps[None, :], BLOCK_K
    if TRANSPOSE_B:
        b_at, b_step = b + (columns % n)[None, :] * ldb + steps[:, None], BLOCK_K
    else:
        b_at, b_step = b + steps[:, None] * ldb + inner_columns[None, :], BLOCK_K * ldb
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, k, BLOCK_K):
        if EVEN_K:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            x = tl.load(a_at, mask=steps[None, :] < k - done, other=0.0)
            y = tl.load(b_at, mask=steps[:, None] < k - done, other=0.0)
        sums = tl.dot(x, y, sums)
        a_at += a_step
        b_at += b_step
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    at = c + rows[:, None] * ldc + columns[None, :]
    tl.store(at, sums.to(c.dtype.element_ty), mask=inside)


@triton.jit
def tiled(
    a, b, c, m, n, k, lda, ldb, ldc, batch_a, batch_b, batch_c,
    TRANSPOSE_A: tl.constexpr, TRANSPOSE_B: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A program for each tile, and for each matrix of the batch."""
    matrix = tl.program_id(1)
    _tile(
        a + matrix * batch_a, b + matrix * batch_b, c + matrix * batch_c, m, n, k, lda, ldb, ldc,
        tl.program_id(0), TRANSPOSE_A, TRANSPOSE_B, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
    )  # fmt: skip


@triton.jit
def persistent(
    a, b, c, m, n, k, lda, ldb, ldc, batch_a, batch_b, batch_c,
    TRANSPOSE_A: tl.constexpr, TRANSPOSE_B: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As many programs as run at once, which take tiles in turns; one matrix."""
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _tile(
            a, b, c, m, n, k, lda, ldb, ldc, tile,
            TRANSPOSE_A, TRANSPOSE_B, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip


@triton.jit
def descriptors(
    a, b, c, m, n, k, lda, ldb, ldc, batch_a, batch_b, batch_c,
    TRANSPOSE_A: tl.constexpr, TRANSPOSE_B: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As :func:`persistent`, with the copy engine (TMA): rows begin at whole 16 bytes."""
    if TRANSPOSE_A:
        a_map = tl.make_tensor_descriptor(a, [k, m], [lda, 1], [BLOCK_K, BLOCK_M])
    else:
        a_map = tl.make_tensor_descriptor(a, [m, k], [lda, 1], [BLOCK_M, BLOCK_K])
    if TRANSPOSE_B:
        b_map = tl.make_tensor_descriptor(b, [n, k], [ldb, 1], [BLOCK_N, BLOCK_K])
    else:
        b_map = tl.make_tensor_descriptor(b, [k, n], [ldb, 1], [BLOCK_K, BLOCK_N])
    c_map = tl.make_tensor_descriptor(c, [m, n], [ldc, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = _place(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        row *= BLOCK_M
        column *= BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            done = step * BLOCK_K
            if TRANSPOSE_A:
                x = a_map.load([done, row]).T
            else:
                x = a_map.load([row, done])
            if TRANSPOSE_B:
                y = b_map.load([column, done]).T
            else:
                y = b_map.load([done, column])
            sums = tl.dot(x, y, sums)
        c_map.store([row, column], sums.to(c.dtype.element_ty))

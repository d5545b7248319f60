# SPDX-License-Identifier: Apache-2.0
"""The operation matmul: C = alpha * A B + beta * C, shared by every spec that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunegen.errors import UsageError
from tunegen.model import (
    ACCUMULATOR,
    Argument,
    Array,
    EdgeProblem,
    Limit,
    Operation,
    Problem,
    Sizes,
    formula,
)

INT32_MAX = 2**31 - 1
ACCESS_BYTES = 16  # the widest load or store


def attributes(sizes: Mapping[str, int], dtype: str, layout: str) -> dict[str, int]:
    """Leading dimensions (elements between rows as stored), whether C is read (beta), and the
    alignment in bytes that the base addresses of A, B and C keep."""
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    return {
        "lda": max(1, k if layout[0] == "n" else m),
        "ldb": max(1, n if layout[1] == "n" else k),
        "ldc": max(1, n),
        "beta": 0,
        "align": 16,
    }


def check(p: Problem) -> None:
    least = attributes(dict(p.sizes), p.dtype, p.layout)
    for name in ("lda", "ldb", "ldc"):
        if getattr(p, name) < least[name]:
            raise UsageError(f"{name}={getattr(p, name)} is less than a row of {least[name]}")
    if p.beta not in (0, 1):
        raise UsageError(f"beta={p.beta} is neither 0 (C is only written) nor 1 (C is read)")
    if p.align <= 0 or p.align % p.element_bytes or p.align & (p.align - 1):
        raise UsageError(f"align={p.align} is not a power of two of whole elements in bytes")


def batch_strides(s: Sizes, layout: str) -> tuple[Any, Any, Any]:
    """Elements from one matrix of the batch to the next: matrices are stored back to back."""
    return (
        (s.M if layout[0] == "n" else s.K) * s.lda,
        (s.K if layout[1] == "n" else s.N) * s.ldb,
        s.M * s.ldc,
    )


def arrays(p: Problem) -> tuple[Array, ...]:
    a_shape = (p.M, p.K) if p.layout[0] == "n" else (p.K, p.M)
    b_shape = (p.K, p.N) if p.layout[1] == "n" else (p.N, p.K)
    stride_a, stride_b, stride_c = batch_strides(Sizes(p.names), p.layout)
    return (
        Array("A", (p.B, *a_shape), (stride_a, p.lda, 1), p.dtype, "in"),
        Array("B", (p.B, *b_shape), (stride_b, p.ldb, 1), p.dtype, "in"),
        Array("C", (p.B, p.M, p.N), (stride_c, p.ldc, 1), p.dtype, "inout" if p.beta else "out"),
    )


def reference(
    p: Problem, operands: Mapping[str, Any], scalars: Mapping[str, float]
) -> dict[str, Any]:
    """C in fp64 from A, B and C (batch first, as stored; C is read only when ``beta`` is 1)."""
    a = np.asarray(operands["A"], dtype=np.float64)
    b = np.asarray(operands["B"], dtype=np.float64)
    product = np.matmul(
        a if p.layout[0] == "n" else a.swapaxes(1, 2),
        b if p.layout[1] == "n" else b.swapaxes(1, 2),
    )
    result = scalars["alpha"] * product
    if p.beta:
        result = result + scalars["beta"] * np.asarray(operands["C"], dtype=np.float64)
    return {"C": result}


def flops(p: Problem) -> int:
    return 2 * p.B * p.M * p.N * p.K


# Sizes as they are written, and how much longer than their rows the leading dimensions are. Tails
# of every block, one row, one column, sums shorter than any pipeline and none at all, sums longer
# than any slice, two matrices.
EDGES = (
    ("300x261x70", 0),
    ("130x67x19", 3),
    ("1x259x64", 0),
    ("259x1x64", 5),
    ("64x96x3", 0),
    ("70x34x1", 1),
    ("33x40x0", 0),
    ("37x29x2049", 1),
    ("2x72x40x264", 8),
    ("2x33x65x31", 1),
)


def edge_problems(p: Problem) -> tuple[EdgeProblem, ...]:
    """Bases are no more aligned than the class of the problem promises."""
    found = []
    for sizes, gap in EDGES:
        tight = OPERATION.problem(sizes, dtype=p.dtype, layout=p.layout)
        leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        problem = OPERATION.problem(
            sizes, dtype=p.dtype, layout=p.layout, beta=p.beta, align=p.align, **leading
        )
        offset = p.align if gap else 0
        found.append(EdgeProblem(problem, tuple((name, offset) for name in ("A", "B", "C"))))
    return tuple(found)


OPERATION: Operation = Operation(
    name="matmul",
    summary="C = alpha * A B + beta * C",
    axes=("M", "N", "K"),
    batch_axis="B",
    dtypes=("fp32", "fp64", "fp16", "bf16"),
    layouts=("nn", "nt", "tn", "tt"),
    default_sizes=(4096, 4096, 4096),
    scalars=(("alpha", 1.0), ("beta", 1.0)),
    arrays=arrays,
    reference=reference,
    flops=flops,
    attributes=attributes,
    check=check,
    terms=lambda p: max(1, p.K + p.beta),
    edge_problems=edge_problems,
)


def types(p: Problem) -> dict[str, str]:
    return {"Element": p.dtype, "Accumulator": ACCUMULATOR[p.dtype]}


def constants(p: Problem) -> dict[str, int]:
    return {
        "TRANSPOSE_A": int(p.layout[0] == "t"),
        "TRANSPOSE_B": int(p.layout[1] == "t"),
        "READS_C": p.beta,
    }


def arguments(p: Problem, s: Sizes) -> tuple[Argument, ...]:
    """The arguments that every matmul kernel starts with, in the order of its signature."""
    scalar = ACCUMULATOR[p.dtype]
    strides = zip(("batch_stride_a", "batch_stride_b", "batch_stride_c"),
                  batch_strides(s, p.layout), strict=True)  # fmt: skip
    return (
        Argument("A", "pointer"),
        Argument("B", "pointer"),
        Argument("C", "pointer"),
        Argument("batch", "int32", formula(s.B)),
        Argument("m", "int32", formula(s.M)),
        Argument("n", "int32", formula(s.N)),
        Argument("k", "int32", formula(s.K)),
        Argument("lda", "int64", formula(s.lda)),
        Argument("ldb", "int64", formula(s.ldb)),
        Argument("ldc", "int64", formula(s.ldc)),
        *(Argument(name, "int64", formula(stride)) for name, stride in strides),
        Argument("alpha", "fp64" if scalar == "fp64" else "fp32"),
        Argument("beta", "fp64" if scalar == "fp64" else "fp32"),
    )


def alignment(p: Problem, row_elements: int) -> int:
    """Elements that every row of an operand is aligned to, at most what one access takes."""
    elements = min(p.align, ACCESS_BYTES) // p.element_bytes
    while row_elements % elements:
        elements //= 2
    return elements


def size_limits() -> tuple[Limit, ...]:
    """Row, column and batch indices are 32-bit in the kernels; offsets are 64-bit."""
    return tuple(Limit(name, "at_most", INT32_MAX - 65536) for name in ("B", "M", "N", "K"))


def refuses(p: Problem) -> str:
    for limit in size_limits():
        if not limit.holds(p.names):
            return f"{limit.quantity}={p.names[limit.quantity]}: kernels index it in 32 bits"
    return ""

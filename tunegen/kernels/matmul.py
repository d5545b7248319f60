# SPDX-License-Identifier: Apache-2.0
"""The operation matmul, shared by every spec that computes it.

C = act(alpha * A B + beta * C + bias): ``bias`` is a vector with an element for each column, for
all rows and matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tunegen.errors import UsageError
from tunegen.model import (
    ACCUMULATOR,
    DTYPE_BYTES,
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

DTYPES = ("fp32", "fp64", "fp16", "bf16")

# The names of what an attribute chooses, in the order of ``lib/epilogue.cuh``.
ACTIVATIONS = ("none", "relu", "gelu", "silu")
OUTPUTS = DTYPES

# Roundings of an activation beside that of the result: an exponential or error function, a sum, a
# product or quotient.
_ACTIVATION_TERMS = {"none": 0, "relu": 0, "gelu": 4, "silu": 4}


def attributes(sizes: Mapping[str, int], dtype: str, layout: str) -> dict[str, int]:
    """Leading dimensions (elements between rows as stored), whether C is read (beta), the
    alignment in bytes that the base addresses of all operands keep, and how C comes from sums:
    whether a bias is added, the activation, and the dtype of C and the bias."""
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    return {
        "lda": max(1, k if layout[0] == "n" else m),
        "ldb": max(1, n if layout[1] == "n" else k),
        "ldc": max(1, n),
        "beta": 0,
        "align": 16,
        "bias": 0,
        "activation": ACTIVATIONS.index("none"),
        "output": OUTPUTS.index(dtype),
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
    if p.bias not in (0, 1):
        raise UsageError(f"bias={p.bias} is neither 0 (there is none) nor 1 (one for each column)")
    if not 0 <= p.activation < len(ACTIVATIONS):
        raise UsageError(f"activation={p.activation} is none of {', '.join(ACTIVATIONS)}")
    if not 0 <= p.output < len(OUTPUTS) or output(p) not in outputs(p.dtype):
        raise UsageError(
            f"the output of {p.dtype} is {' or '.join(outputs(p.dtype))}, "
            f"not {OPERATION.named({'output': p.output})['output']}"
        )


def outputs(dtype: str) -> tuple[str, ...]:
    """What C may be: what sums are kept in, or what has 16 bits as operands have."""
    return ("fp16", "bf16", "fp32") if DTYPE_BYTES[dtype] == 2 else (dtype,)


def output(p: Problem) -> str:
    """The dtype of C and of the bias."""
    return OUTPUTS[p.output]


def output_bytes(p: Problem) -> int:
    return DTYPE_BYTES[output(p)]


def output_traffic(p: Problem) -> float:
    """Bytes of C that are written, and read, and of the bias."""
    return (float(p.B) * p.M * p.N * (1 + p.beta) + p.N * p.bias) * output_bytes(p)


def activation(p: Problem) -> str:
    return ACTIVATIONS[p.activation]


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
    role: Literal["inout", "out"] = "inout" if p.beta else "out"
    bias = (Array("bias", (p.N,), (1,), output(p), "in"),) if p.bias else ()
    return (
        Array("A", (p.B, *a_shape), (stride_a, p.lda, 1), p.dtype, "in"),
        Array("B", (p.B, *b_shape), (stride_b, p.ldb, 1), p.dtype, "in"),
        Array("C", (p.B, p.M, p.N), (stride_c, p.ldc, 1), output(p), role),
        *bias,
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
    if p.bias:
        result = result + np.asarray(operands["bias"], dtype=np.float64)
    return {"C": activated(result, activation(p))}


def activated(x: Any, name: str) -> Any:
    """NaN stays NaN; minus infinity has no gelu and no silu, as everywhere."""
    with np.errstate(over="ignore", invalid="ignore"):
        match name:
            case "relu":
                return np.where(x < 0, 0.0, x)
            case "gelu":
                erf = np.frompyfunc(math.erf, 1, 1)(x * math.sqrt(0.5))
                return 0.5 * x * (1 + erf.astype(np.float64))
            case "silu":
                return x / (1 + np.exp(-x))
            case _:
                return x


def flops(p: Problem) -> int:
    """Of the products: what follows them is not counted."""
    return 2 * p.B * p.M * p.N * p.K


# Sizes as they are written, and how much longer than their rows the leading dimensions are. Tails
# of every block, one row, one column, few rows, sums shorter than any pipeline and none at all,
# sums longer than any slice, two matrices.
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
    ("1x96x1001", 3),
    ("5x259x70", 3),
    ("2x3x40x264", 8),
    ("13x61x2049", 3),
)


def edge_problems(p: Problem) -> tuple[EdgeProblem, ...]:
    """Bases are no more aligned than the class of the problem promises."""
    kept = {name: p.names[name] for name in ("beta", "align", "bias", "activation", "output")}
    offsets = dict.fromkeys("AB", p.align) | dict.fromkeys(
        ("C", "bias") if p.bias else ("C",), max(p.align, output_bytes(p))
    )
    found = []
    for sizes, gap in EDGES:
        tight = OPERATION.problem(sizes, dtype=p.dtype, layout=p.layout)
        leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        problem = OPERATION.problem(sizes, dtype=p.dtype, layout=p.layout, **kept, **leading)
        moved = {name: offset if gap else 0 for name, offset in offsets.items()}
        found.append(EdgeProblem(problem, tuple(moved.items())))
    return tuple(found)


OPERATION: Operation = Operation(
    name="matmul",
    summary="C = act(alpha * A B + beta * C + bias)",
    axes=("M", "N", "K"),
    batch_axis="B",
    dtypes=DTYPES,
    layouts=("nn", "nt", "tn", "tt"),
    default_sizes=(4096, 4096, 4096),
    scalars=(("alpha", 1.0), ("beta", 1.0)),
    arrays=arrays,
    reference=reference,
    flops=flops,
    attributes=attributes,
    check=check,
    terms=lambda p: max(1, p.K + p.beta + p.bias) + _ACTIVATION_TERMS[activation(p)],
    exact=lambda p: not _ACTIVATION_TERMS[activation(p)],
    choices={"activation": ACTIVATIONS, "output": OUTPUTS},
    edge_problems=edge_problems,
)


def types(p: Problem, *, sums: bool = False) -> dict[str, str]:
    """Of operands, of sums, and of what is written: C, or bare ``sums``."""
    accumulator = ACCUMULATOR[p.dtype]
    written = accumulator if sums else output(p)
    return {"Element": p.dtype, "Accumulator": accumulator, "Output": written}


def constants(p: Problem) -> dict[str, int]:
    return {
        "TRANSPOSE_A": int(p.layout[0] == "t"),
        "TRANSPOSE_B": int(p.layout[1] == "t"),
        **epilogue(p),
    }


# What a kernel that writes bare sums does with them.
NO_EPILOGUE = {"READS_C": 0, "HAS_BIAS": 0, "ACTIVATION": ACTIVATIONS.index("none")}


def epilogue(p: Problem) -> dict[str, int]:
    """What becomes of sums on their way to C."""
    return {"READS_C": p.beta, "HAS_BIAS": p.bias, "ACTIVATION": p.activation}


def arguments(p: Problem, s: Sizes) -> tuple[Argument, ...]:
    """The arguments that every matmul kernel starts with, in the order of its signature."""
    scalar = ACCUMULATOR[p.dtype]
    strides = zip(("batch_stride_a", "batch_stride_b", "batch_stride_c"),
                  batch_strides(s, p.layout), strict=True)  # fmt: skip
    return (
        Argument("A", "pointer"),
        Argument("B", "pointer"),
        Argument("C", "pointer"),
        *((Argument("bias", "pointer"),) if p.bias else ()),
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
    """Elements that every row of A or B is aligned to, at most what one access takes."""
    return _alignment(p, row_elements, p.element_bytes)


def alignment_c(p: Problem) -> int:
    """The same for C and the bias."""
    return _alignment(p, p.ldc, output_bytes(p))


def _alignment(p: Problem, row_elements: int, element_bytes: int) -> int:
    # An element is aligned to its own size, whatever the operands keep together.
    elements = max(1, min(p.align, ACCESS_BYTES) // element_bytes)
    while row_elements % elements:
        elements //= 2
    return elements


def access_limits(p: Problem, *, a: int = 1, b: int = 1, c: int = 1) -> tuple[Limit, ...]:
    """What accesses of so many elements of A, B and C rely on. Batch strides are whole rows, so
    theirs follows. Addresses are limited through ``align``, which all operands keep: the batch has
    the name of an operand."""
    used = {"lda": (a, p.element_bytes), "ldb": (b, p.element_bytes), "ldc": (c, output_bytes(p))}
    wide = {ld: (count, size) for ld, (count, size) in used.items() if count > 1}
    widest = max((count * size for count, size in wide.values()), default=1)
    return (
        *(Limit(ld, "multiple_of", count) for ld, (count, _) in wide.items()),
        *((Limit("align", "multiple_of", widest),) if wide else ()),
    )


def size_limits() -> tuple[Limit, ...]:
    """Row, column and batch indices are 32-bit in the kernels; offsets are 64-bit."""
    return tuple(Limit(name, "at_most", INT32_MAX - 65536) for name in ("B", "M", "N", "K"))


def refuses(p: Problem) -> str:
    for limit in size_limits():
        if not limit.holds(p.names):
            return f"{limit.quantity}={p.names[limit.quantity]}: kernels index it in 32 bits"
    return ""

# SPDX-License-Identifier: Apache-2.0
"""Slices of K for matmul specs: partial sums in the workspace, and the kernel that adds them up.

The main kernel writes the bare sums of slice s at s times the size of all matrices; the reduction
adds them in the order of the slices, so that the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunegen.kernels import matmul
from tunegen.model import (
    ACCUMULATOR,
    DTYPE_BYTES,
    Argument,
    KernelDefinition,
    Launch,
    LaunchPlan,
    Problem,
    Sizes,
    ceil_div,
    formula,
)

REDUCE = "matmul_split_k_reduce"
REDUCE_THREADS = 256

_OF_REDUCE = ("C", "bias", "batch", "m", "n", "ldc", "batch_stride_c", "alpha", "beta")


def accumulator_bytes(p: Problem) -> int:
    return DTYPE_BYTES[ACCUMULATOR[p.dtype]]


def accumulator_vector(p: Problem) -> int:
    """Accumulators of one access."""
    return matmul.ACCESS_BYTES // accumulator_bytes(p)


def reduce_blocks(p: Problem, s: Any) -> Any:
    """Blocks of the kernel that adds the partial sums, a vector of them a thread."""
    return ceil_div(s.B * s.M * ceil_div(s.N, accumulator_vector(p)), REDUCE_THREADS)


def row_length(p: Problem, s: Any) -> Any:
    """Sums from one row to the next: whole vectors."""
    return ceil_div(s.N, accumulator_vector(p)) * accumulator_vector(p)


def partial_bytes(slices: int, p: Problem, s: Any) -> Any:
    """Workspace for the sums of all slices, at its start."""
    return s.B * s.M * row_length(p, s) * (slices * accumulator_bytes(p))


def reduce_kernel(p: Problem, programmatic: int = 0) -> KernelDefinition:
    """What adds up the sums of the config's ``SPLIT_K`` slices, with the widest accesses that C's
    rows allow, ``programmatic`` or launched plainly."""
    constants = {
        **matmul.epilogue(p),
        "PROGRAMMATIC_LAUNCH": programmatic,
        "ALIGN_C": matmul.alignment_c(p),
        "REDUCE_THREADS": REDUCE_THREADS,
    }
    return KernelDefinition(REDUCE, "matmul/split_k_reduce.cu.jinja", matmul.types(p), constants)


def with_slices(main: Launch, slices: int, p: Problem, s: Sizes) -> LaunchPlan:
    """The plan of a kernel that writes ``C`` where it has one slice: its partial sums go to the
    workspace, rows padded to whole vectors and matrices back to back, and are added up. What
    becomes of the total is the second kernel's."""
    row = row_length(p, s)
    partials = Argument("partials", "workspace")
    own = {
        "C": partials,
        "ldc": Argument("ldc", "int64", formula(row)),
        "batch_stride_c": Argument("batch_stride_c", "int64", formula(s.M * row)),
    }
    named = {argument.name: argument for argument in matmul.arguments(p, s)}
    reduce = Launch(
        REDUCE,
        (formula(reduce_blocks(p, s)), 1, 1),
        (REDUCE_THREADS, 1, 1),
        (partials, *(named[name] for name in _OF_REDUCE if name in named)),
        programmatic=main.programmatic,
    )
    arguments = tuple(own.get(a.name, a) for a in main.arguments if a.name != "bias")
    sliced = replace(main, arguments=arguments)
    return LaunchPlan(
        (sliced, reduce),
        workspace_bytes=formula(partial_bytes(slices, p, s)),
    )

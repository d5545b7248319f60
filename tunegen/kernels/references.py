# SPDX-License-Identifier: Apache-2.0
"""One plain kernel per operation that computes it in fp64 on the GPU: what results are held
against, and itself held against NumPy.

Each writes ``reference_<output>``, fp64 without gaps, and reads the operation's own operands. None
has a parameter, and none is ever tuned.
"""

from __future__ import annotations

from typing import Literal

from tunegen.kernels import matmul, vector
from tunegen.model import (
    GRID_LIMITS,
    Argument,
    Config,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Operation,
    Point,
    Problem,
    Sizes,
    Space,
    Work,
    ceil_div,
    formula,
    minimum,
)

_FP64_BYTES = 8

# --- matmul --------------------------------------------------------------------------------------

# A thread sums THREAD_TILE^2 elements, a block of LANES^2 threads a tile of 64 x 64.
_LANES, _THREAD_TILE, _TILE_K = 16, 4, 16
_TILE = _LANES * _THREAD_TILE


def _matmul_kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
    constants = {"LANES": _LANES, "THREAD_TILE": _THREAD_TILE, "TILE_K": _TILE_K}
    return (
        KernelDefinition(
            "matmul_reference",
            "matmul/reference.cu.jinja",
            matmul.types(p),
            {**matmul.constants(p), **constants},
        ),
    )


def _matmul_plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
    tiles = ceil_div(s.M, _TILE) * ceil_div(s.N, _TILE)
    grid = (formula(tiles), 1, formula(minimum(s.B, GRID_LIMITS[2])))
    arguments = (*matmul.arguments(p, s), Argument("reference_C", "pointer"))
    return LaunchPlan((Launch("matmul_reference", grid, (_LANES**2, 1, 1), arguments),))


def _matmul_work(c: Point, p: Problem, d: object) -> Work:
    blocks = ceil_div(p.M, _TILE) * ceil_div(p.N, _TILE) * p.B
    loads = 2 * _TILE * p.K  # elements that a block brings to shared memory
    warps = _LANES**2 // 32
    # A warp's step reads THREAD_TILE rows of either tile and does THREAD_TILE^2 multiply-adds.
    steps = warps * p.K
    return Work(
        blocks=blocks,
        threads=_LANES**2,
        registers=128,
        shared_bytes=2 * (_TILE + 1) * _TILE_K * _FP64_BYTES,
        fma=_TILE**2 * p.K,
        instructions=steps * (_THREAD_TILE**2 + 2 * _THREAD_TILE) + 4 * loads // 32,
        shared_wavefronts=steps * 2 * _THREAD_TILE + loads * _FP64_BYTES // 128,
        l1_wavefronts=loads // 16,
        l2_bytes=blocks * loads * p.element_bytes,
        dram_bytes=(p.M * p.K + p.K * p.N) * p.B * p.element_bytes + p.M * p.N * p.B * _FP64_BYTES,
        inflight_bytes=2 * _TILE * _TILE_K // _LANES**2 * p.element_bytes,
        steps=ceil_div(p.K, _TILE_K),
        overlap=0,
        unit="fp64",
    )


# --- fill, copy, add, axpy -----------------------------------------------------------------------

_THREADS = 256
_MAX_BLOCKS = 65536  # beyond, the grid strides


def _vector(operation: Operation, out: str) -> KernelSpec:
    """The reference of an operation whose elements are ``scalar * x + y``, or part of that."""

    def kernels(c: Config, p: Problem) -> tuple[KernelDefinition, ...]:
        constants = {
            "THREADS": _THREADS,
            **{f"READS_{name.upper()}": int(name in _read(operation, p)) for name in "xy"},
            "SCALES": len(operation.scalars),
        }
        template = "vector/reference.cu.jinja"
        return (KernelDefinition("vector_reference", template, vector.types(p), constants),)

    def plan(c: Config, p: Problem, s: Sizes) -> LaunchPlan:
        blocks = minimum(ceil_div(s.N, _THREADS), _MAX_BLOCKS)
        read = _read(operation, p)
        scalar: Literal["fp32", "fp64"] = "fp64" if p.dtype == "fp64" else "fp32"
        arguments = (
            # What is not read may be any pointer.
            *(Argument(name if name in read else out, "pointer") for name in "xy"),
            Argument(f"reference_{out}", "pointer"),
            *(Argument(name, scalar) for name, _ in operation.scalars),
            Argument("n", "int64", formula(s.N)),
        )
        launch = Launch("vector_reference", (formula(blocks), 1, 1), (_THREADS, 1, 1), arguments)
        return LaunchPlan((launch,))

    def work(c: Point, p: Problem, d: object) -> Work:
        blocks = minimum(ceil_div(p.N, _THREADS), _MAX_BLOCKS)
        elements = ceil_div(p.N, blocks * _THREADS)  # of one thread
        loads = len(_read(operation, p))
        warps = _THREADS // 32
        traffic = p.N * (loads * p.element_bytes + _FP64_BYTES)
        return Work(
            blocks=blocks,
            threads=_THREADS,
            registers=32,
            shared_bytes=0,
            fma=_THREADS * elements,
            instructions=warps * elements * (loads + 10),
            shared_wavefronts=0,
            l1_wavefronts=warps * elements * (loads + 2),
            l2_bytes=traffic,
            dram_bytes=traffic,
            inflight_bytes=max(1, loads) * p.element_bytes,
            steps=elements,
            overlap=0,
            unit="fp64",
        )

    return KernelSpec(
        name="reference",
        operation=operation,
        summary="one element at a time in fp64",
        space=lambda p, d: Space(()),
        default=lambda p, d: Config({}),
        kernels=kernels,
        plan=plan,
        work=work,
        limits=lambda c, p: (),
    )


def _read(operation: Operation, p: Problem) -> set[str]:
    return {array.name for array in operation.arrays(p) if array.role != "out"}


REFERENCES: dict[str, KernelSpec] = {
    "matmul": KernelSpec(
        name="reference",
        operation=matmul.OPERATION,
        summary="fp64 sums of widened operands, plainly tiled",
        space=lambda p, d: Space(()),
        default=lambda p, d: Config({}),
        kernels=_matmul_kernels,
        plan=_matmul_plan,
        work=_matmul_work,
        limits=lambda c, p: matmul.size_limits(),
        refuses=lambda p, d: matmul.refuses(p),
    ),
    "fill": _vector(vector.FILL, "y"),
    "copy": _vector(vector.COPY, "y"),
    "add": _vector(vector.ADD, "z"),
    "axpy": _vector(vector.AXPY, "y"),
}

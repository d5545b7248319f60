# SPDX-License-Identifier: Apache-2.0
"""matmul wgmma_padded: the copies of operands whose rows do not lie in whole lines."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap

import numpy as np
import pytest
from emulator import build
from emulator.memory import Region

from tunegen import codegen, kernels, perfmodel
from tunegen.compiler import NvrtcCompiler
from tunegen.kernels import matmul_wgmma_padded
from tunegen.model import SM_COUNT

MATMUL = kernels.operation("matmul")
H200 = next(chip for chip in perfmodel.CHIPS if chip.name == "NVIDIA H200")
SPEC = matmul_wgmma_padded.SPEC
POISON = 0xFFFF

# Rows, columns, and from one row to the next: single elements, rows shorter than what is read at
# once, rows that begin at every place inside 16 bytes, more rows than a block begins with.
SHAPES = (
    (1, 1, 1), (3, 7, 7), (2, 8, 9), (5, 15, 15), (4, 16, 17), (9, 23, 23), (3, 24, 31),
    (7, 67, 67), (5, 131, 133), (2, 4099, 4099), (1500, 5, 7), (40, 1003, 1003),
)  # fmt: skip


@functools.cache
def pad_kernel():
    problem = MATMUL.problem("999x1001x1003", dtype="bf16", layout="nt")
    config = SPEC.default(problem, H200)
    (found,) = (d for d in SPEC.kernels(config, problem) if d.name == matmul_wgmma_padded.PAD)
    return build.build_definition(
        dataclasses.replace(found, constants={**config, **found.constants}), "sm_90"
    )


def copy(rows, columns, ld, side, seed):
    """Source and target after a launch; memory ends right where the source does."""
    random = np.random.default_rng(seed)
    padded = int(matmul_wgmma_padded.padded(columns))
    blocks = int(matmul_wgmma_padded.copy_blocks(rows, columns))
    with (
        Region(2 * ((rows - 1) * ld + columns), side=side, residue=None, step=2) as source,
        Region(2 * rows * padded, side="end", residue=0, step=16) as target,
    ):
        given = source.bytes.view(np.uint16)
        given[:] = random.integers(0, 2**16, given.size)
        target.bytes.view(np.uint16)[:] = POISON
        source.protect(mmap.PROT_READ)
        values = (
            ctypes.c_uint64(source.address), ctypes.c_uint64(target.address),
            ctypes.c_int64(rows), ctypes.c_int32(columns), ctypes.c_int64(ld),
            ctypes.c_int64(padded),
        )  # fmt: skip
        threads = matmul_wgmma_padded.PAD_THREADS
        launch = build.Launch(build.Vec3(blocks, 1, 1), build.Vec3(threads, 1, 1), 0, seed, 20)
        fault = pad_kernel()(launch, list(values))
        assert not fault.kind, fault.message
        found = target.bytes.view(np.uint16).reshape(rows, padded).copy()
        steps = (ld * 2, 2)
        wanted = np.lib.stride_tricks.as_strided(given, (rows, columns), steps).copy()
    return wanted, found


@pytest.mark.emulator
@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize(("rows", "columns", "ld"), SHAPES)
def test_rows_are_copied_to_whole_words(rows, columns, ld, side):
    wanted, found = copy(rows, columns, ld, side, rows + columns)
    whole = -(-columns // 8) * 8
    np.testing.assert_array_equal(found[:, :columns], wanted)
    assert not found[:, columns:whole].any(), "a vector beyond the end of a row is zero there"
    assert (found[:, whole:] == POISON).all(), "the copy engine does not look there"


def test_a_grid_covers_every_vector():
    for rows, columns, _ in SHAPES:
        vectors = -(-columns // 8) * rows
        each = matmul_wgmma_padded.PAD_THREADS * matmul_wgmma_padded.PAD_UNROLL
        blocks = matmul_wgmma_padded.copy_blocks(rows, columns)
        assert (blocks - 1) * each < vectors <= blocks * each


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("size", ["3x0x300x77", "3x200x0x77", "0x200x300x77"])
def test_nothing_is_copied_for_an_output_without_elements(size, layout):
    problem = MATMUL.problem("3x200x300x77", dtype="bf16", layout=layout)
    plan = SPEC.symbolic_plan(SPEC.default(problem, H200), problem)
    copied = [launch.kernel for launch in plan.bind({**problem.names, SM_COUNT: 132}).launches]
    assert copied.count(matmul_wgmma_padded.PAD) == 2
    empty = MATMUL.problem(size, dtype="bf16", layout=layout)
    bound = plan.bind({**empty.names, SM_COUNT: 132})
    assert (bound.launches, bound.workspace_bytes, bound.tensor_maps) == ((), 0, ())


@pytest.mark.nvrtc
def test_a_default_with_all_of_an_epilogue_is_not_rejected():
    special = {"beta": 1, "bias": 1, "activation": "gelu"}
    for size in ("3000x5000x77", "3000x5001x77"):  # C stored by the copy engine, and by threads
        problem = MATMUL.problem(size, dtype="bf16", layout="nt", **special)
        for source in codegen.render(SPEC, SPEC.default(problem, H200), problem, H200.arch):
            kernel = NvrtcCompiler().compile(source, SPEC.target(H200.arch))
            assert not kernel.rejection

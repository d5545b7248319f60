# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other kernels reported, on the CPU: more than 2^31 elements, and special
values in configurations of every kind."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from contextlib import ExitStack

import emulator
import numpy as np
import pytest
from emulator import build
from emulator.memory import Region
from emulator.numbers import load, store

from tunegen import resources
from tunegen.kernels import (
    matmul_naive,
    matmul_simt,
    vector_add,
    vector_axpy,
    vector_copy,
    vector_fill,
)
from tunegen.model import DTYPE_BYTES, KernelDefinition
from tunegen.perfmodel.chips import default_chip

pytestmark = pytest.mark.emulator

DEVICE = dataclasses.replace(default_chip("sm_80"), sm_count=8)
NAIVE, SIMT = matmul_naive.SPEC, matmul_simt.SPEC

# Every way of a simt kernel through its template: both pipelines, both ways of copying, K split.
WAYS = {
    "default": {},
    "direct": {"SHARED_BUFFERS": 0, "ASYNC_COPY": 0},
    "registers": {"SHARED_BUFFERS": 2, "ASYNC_COPY": 0},
    "async": {"SHARED_BUFFERS": 3, "ASYNC_COPY": 1},
    "split": {"SPLIT_K": 4},
}


@functools.cache
def table_of(dtype, layout, align):
    """The space of a matmul that is large enough for all of them, and its columns."""
    problem = SIMT.operation.problem("2x64x64x512", dtype=dtype, layout=layout, align=align)
    table = SIMT.space(problem, DEVICE).enumerate()
    return table, table.columns(np.arange(len(table))), SIMT.default(problem, DEVICE)


def config_of(way, dtype, layout, align=16):
    """The configuration nearest to the default that goes this way."""
    table, columns, default = table_of(dtype, layout, align)
    fits = np.ones(len(table), bool)
    for name, value in WAYS[way].items():
        fits &= getattr(columns, name) == value
    assert fits.any(), f"no configuration goes the way {way}"
    apart = sum((getattr(columns, name) != default[name]).astype(int) for name in default)
    return table[int(np.argmin(np.where(fits, apart, len(default) + 1)))]


# --- more than 2^31 elements ---------------------------------------------------------------------

LARGE = 3_270_680_003


@pytest.fixture
def last_blocks(tmp_path):
    """A spec of which only block 0 and the last three of so many run: the first ones of a vector
    beyond 2^31 elements would take minutes. Nothing else of its template is changed."""

    def cut(spec, blocks):
        fragment = resources.data_dir("templates") / "lib" / "elementwise.cuh"
        whole = fragment.read_text()
        shifted = f"(blockIdx.x ? blockIdx.x + {blocks - 4}u : 0u)"
        text = whole.replace("= blockIdx.x;", f"= {shifted};")
        assert text != whole
        folder = tmp_path / "lib"
        folder.mkdir(exist_ok=True)
        (folder / fragment.name).write_text(text)
        return dataclasses.replace(spec, template_root=tmp_path)

    return cut


@pytest.mark.parametrize("residue", [0, 2])
@pytest.mark.parametrize(
    "spec",
    [vector_fill.SPEC, vector_copy.SPEC, vector_add.SPEC, vector_axpy.SPEC],
    ids=lambda spec: spec.operation.name,
)
def test_the_last_of_more_than_2_31_elements(spec, residue, last_blocks):
    operation = spec.operation
    problem = operation.problem((LARGE,), dtype="fp16")
    config = spec.default(problem, DEVICE)
    (launch,) = spec.bound_plan(config, problem, DEVICE).launches
    blocks = launch.grid[0]
    (kernel,) = build.build(last_blocks(spec, blocks), config, problem, DEVICE.arch).values()
    tile = config.THREADS * config.UNROLL * config.VECTOR_BYTES // problem.element_bytes
    # What the last three blocks write; the last of them has the rest.
    seen = slice((blocks - 3) * tile + 16, LARGE)
    random = np.random.default_rng(0)
    scalars = dict(operation.scalars)
    with ExitStack() as stack:
        regions, inputs, outputs = {}, {}, {}
        for array in operation.arrays(problem):
            region = Region(array.bytes, side="start", residue=residue)
            regions[array.name] = stack.enter_context(region)
            elements = region.elements(array)
            elements[seen] = np.nan
            if array.role != "out":
                drawn = store(random.standard_normal(LARGE - seen.start), "fp16")
                elements[seen] = inputs[array.name] = drawn
            if array.role != "in":
                outputs[array.name] = elements
        fault = kernel(
            build.Launch(build.Vec3(4, 1, 1), build.Vec3(*launch.block), 0, 1, 20),
            [argument_value(argument, regions, scalars) for argument in launch.arguments],
        )
        assert not fault.kind, fault.message.decode()
        few = operation.problem((LARGE - seen.start,), dtype="fp16")
        wide = {name: load(values, "fp16") for name, values in inputs.items()}
        expected = operation.reference(few, wide, scalars)
        for name, elements in outputs.items():
            np.testing.assert_array_equal(elements[seen], store(expected[name], "fp16"))


def argument_value(argument, regions, scalars):
    match argument.type:
        case "pointer":
            return ctypes.c_void_p(regions[argument.name].address)
        case "int64":
            return ctypes.c_int64(int(argument.value))
        case "fp32":
            return ctypes.c_float(scalars[argument.name])
    raise AssertionError(argument)


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("naive", "nn"),
        ("async", "nn"),
        pytest.param("direct", "tt", marks=pytest.mark.thorough),
        pytest.param("registers", "nn", marks=pytest.mark.thorough),
        pytest.param("split", "tt", marks=pytest.mark.thorough),
    ],
)
def test_matrices_of_a_batch_lie_beyond_32_bit_offsets(way, layout):
    """Rows, columns and whole matrices: every stride of a batch is beyond what an int holds."""
    far = 2**30 + 8
    problem = SIMT.operation.problem(
        "3x5x7x9", dtype="fp32", layout=layout, beta=1, lda=far, ldb=far, ldc=far
    )
    if way == "naive":
        case = emulator.Case(NAIVE, NAIVE.default(problem, DEVICE), problem, DEVICE)
    else:
        case = emulator.Case(SIMT, config_of(way, "fp32", layout), problem, DEVICE)
    emulator.check(case, seed=3)


# --- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("fp32", "nn"),
        ("bf16", "tn"),
        pytest.param("fp64", "tt", marks=pytest.mark.thorough),
        pytest.param("fp16", "nt", marks=pytest.mark.thorough),
    ],
)
def test_special_values_survive_every_way(dtype, layout):
    """NaN with the first signalling bit pattern stays NaN, Inf * 0 is NaN, and what no special
    value reaches stays finite; at the tails of tiles and slices, where zeros are filled in."""
    m, n, k = 37, 29, 133
    align = DTYPE_BYTES[dtype]
    problem = SIMT.operation.problem((m, n, k), dtype=dtype, layout=layout, beta=1, align=align)
    operands, scalars = emulator.inputs(SIMT, problem, seed=0)
    a, b, c = (load(operands[name], dtype) for name in "ABC")
    a_rows = a[0].T if layout[0] == "t" else a[0]  # views
    b_rows = b[0].T if layout[1] == "t" else b[0]
    a_rows[m - 1, k - 1] = np.nan
    a_rows[2, k - 2], b_rows[k - 2, 7] = np.inf, 0.0
    b_rows[k - 3, 3], a_rows[5, k - 3] = -np.inf, 0.0
    c[0, 11, 13] = np.inf
    operands = {name: store(x, dtype) for name, x in zip("ABC", (a, b, c), strict=True)}
    if dtype == "fp32":
        operands["A"].view(np.uint32)[np.isnan(operands["A"])] = 0x7F800001
    with np.errstate(invalid="ignore"):
        expected = SIMT.operation.reference(problem, {"A": a, "B": b, "C": c}, scalars)["C"]
    assert np.isnan(expected[0, 2, 7])
    assert np.isnan(expected[0, 5, 3])
    assert 0 < np.isfinite(expected).sum() < expected.size
    cases = {"naive": emulator.Case(NAIVE, NAIVE.default(problem, DEVICE), problem, DEVICE)}
    for way in WAYS:
        if way == "async" and dtype in ("fp16", "bf16"):
            continue  # asynchronous copies move elements of 4 or 8 bytes
        cases[way] = emulator.Case(SIMT, config_of(way, dtype, layout, align), problem, DEVICE)
    for way, case in cases.items():
        found = load(emulator.run(case, operands, scalars)["C"], dtype)
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(
                kind(found), kind(expected), err_msg=f"{way} {case.config}"
            )


# --- grids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ["65538x4x4x4", "1048592x8x4", "8x1048592x4"])
@pytest.mark.parametrize("spec", [NAIVE, SIMT], ids=lambda spec: spec.name)
def test_more_blocks_than_y_and_z_take(spec, sizes):
    """A batch, rows and columns: planned, not refused, and no more than 65,535 along y or z."""
    problem = spec.operation.problem(sizes)
    assert not spec.refuses(problem, DEVICE)
    config = spec.default(problem, DEVICE)
    launches = spec.bound_plan(config, problem, DEVICE).launches
    assert launches
    assert max(extent for launch in launches for extent in launch.grid[1:]) <= 65_535


# --- conversions where there is no instruction ---------------------------------------------------

NARROWING = """
//% include "lib/types.cuh"
//% include "lib/config.cuh"
extern "C" __global__ void tunegen_narrow(const fp32* wide, bf16* narrow, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) narrow[i] = convert<bf16>(wide[i]);
}
"""


def test_bf16_by_hand_rounds_to_even_and_keeps_nan(tmp_path):
    """The shipped conversion of sm_75, which no emulated kernel runs: those have their own. NaN
    stays NaN in every bit pattern, that of the hardware (0x7fffffff) and 0x7f800001 included."""
    shipped = (resources.data_dir("templates") / "lib" / "types.cuh").read_text()
    body = re.search(r"#else\n(.*?)#endif\n  return narrow;", shipped, re.DOTALL)
    assert body, "the branch for older capabilities has gone"
    emulated = (build.HERE / "lib" / "types.cuh").read_text()
    function = (
        "__device__ __forceinline__ bf16 shipped_narrow(fp32 value) {\n  bf16 narrow;\n"
        f"{body[1]}  return narrow;\n}}\n"
    )
    assert "asm" not in function
    text = NARROWING.replace("extern", function + "extern", 1)
    (tmp_path / "narrow.cu.jinja").write_text(text.replace("convert<bf16>", "shipped_narrow"))
    assert "lib/types.cuh" in text
    assert "bf16" in emulated
    kernel = build.build_definition(
        KernelDefinition("narrow", "narrow.cu.jinja"), "sm_75", tmp_path
    )
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    nans = (0x7FFFFFFF, 0x7F800001, 0xFF800001, 0xFFFFFFFF, 0x7FC00000)
    ties = (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x80000000)
    bits[: len(nans) + len(ties)] = nans + ties
    narrow = np.zeros(len(bits), np.uint16)
    wide = np.ascontiguousarray(bits)
    fault = kernel(
        build.Launch(build.Vec3(1, 1, 1), build.Vec3(32, 1, 1), 0, 1, 20),
        [
            ctypes.c_void_p(wide.ctypes.data),
            ctypes.c_void_p(narrow.ctypes.data),
            ctypes.c_int32(len(bits)),
        ],
    )
    assert not fault.kind, fault.message.decode()
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        nan = np.isnan(values)
    found = load(narrow, "bf16")
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(narrow[~nan], store(values[~nan], "bf16"))

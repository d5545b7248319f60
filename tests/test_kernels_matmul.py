# SPDX-License-Identifier: Apache-2.0
"""matmul: spaces, defaults, plans, limits and counts; what is compiled; the hot loop.

Numbers and addresses at tails, layouts and batches: see test_emulated_kernels.py.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import types

import emulator
import numpy as np
import pytest
from emulator.numbers import load, store
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import usual

from tunegen import kernels
from tunegen.codegen import render
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble, facts
from tunegen.errors import CompileError, PlanError
from tunegen.kernels import matmul
from tunegen.kernels.matmul_simt import cost, derived
from tunegen.kernels.matmul_simt.space import BLOCKS
from tunegen.model import ARCHS, DTYPE_BYTES, GRID_LIMITS, Config, KernelSource, Sizes, evaluate
from tunegen.perfmodel import CHIPS, LAUNCH_US, default_chip, floor, rank
from tunegen.resources import data_dir

SIMT, NAIVE = (kernels.specs_of("matmul", only=name)[0] for name in ("simt", "naive"))
H200 = default_chip("sm_90")
COMPILED_ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")

problem = matmul.OPERATION.problem

extents = st.one_of(
    st.integers(0, 40),
    st.integers(0, 1200),
    st.sampled_from([2048, 4096, 4099, 28672, 65536, 1 << 20, 1 << 24]),
)


@st.composite
def problems(draw, extents=extents):
    """Any sizes, with any leading dimensions and alignment."""
    batch = draw(st.sampled_from([0, 1, 1, 1, 3, 4096, 65538, 10**6]))
    m, n, k = draw(extents), draw(extents), draw(extents)
    if batch > 3:  # else no address is wide enough
        m, n, k = min(m, 65536), min(n, 65536), min(k, 65536)
    dtype = draw(st.sampled_from(matmul.OPERATION.dtypes))
    layout = draw(st.sampled_from(matmul.OPERATION.layouts))
    tight = matmul.attributes({"M": m, "N": n, "K": k}, dtype, layout)
    leading = {name: tight[name] + draw(st.integers(0, 8)) for name in ("lda", "ldb", "ldc")}
    return problem(
        (batch, m, n, k),
        dtype=dtype,
        layout=layout,
        beta=draw(st.integers(0, 1)),
        align=draw(st.sampled_from([8, 16, 32])),
        **leading,
    )


@functools.cache
def table_of(p, device=H200):
    return SIMT.space(p, device).enumerate()


def sampled(p, device, count, seed=0):
    """A fixed sample of the valid configurations."""
    table = table_of(p, device)
    draw = random.Random(f"{seed} {p} {device.arch}")
    return [table.config(row) for row in draw.sample(range(len(table)), count)]


def changed(p, device=H200, **values):
    """The default configuration with other values; they have to be valid."""
    config = Config({**SIMT.default(p, device), **values})
    assert not SIMT.space(p, device).violated(config)
    return config


# --- space and default ---------------------------------------------------------------------------


def test_simt_gives_the_default_of_the_operation():
    for p in (problem((4096, 4096, 4096)), problem((17, 5, 7), layout="tt")):
        able = [spec.name for spec in kernels.specs_of("matmul") if not spec.refuses(p, H200)]
        assert able == ["simt", "naive"]


@given(problems(), st.sampled_from(CHIPS))
def test_default_is_valid_for_whatever_is_not_refused(p, device):
    for spec in (SIMT, NAIVE):
        if not spec.refuses(p, device):
            config = spec.default(p, device)
            assert spec.space(p, device).violated(config) == ()
            spec.bound_plan(config, p, device)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 16, 31])
def test_batches_of_small_matrices_have_configs(size, arch):
    """What is asked of a thread in large problems, one small matrix may not have at all."""
    device = default_chip(arch)
    for p in (problem((65538, size, 5, 7)), problem((10**6, 3, size, 1001), dtype="fp64")):
        assert not SIMT.refuses(p, device)
        assert len(table_of(p, device))


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((4096, 4096, 4096), "nn"),
        ((1, 1, 1000000), "nt"),
        ((3, 568, 20152), "nn"),
        ((2, 249, 9, 277039), "tn"),
        ((8, 3200, 3200), "nn"),
        ((1, 4096, 4096), "nn"),
        ((64, 4096, 14336), "nt"),
        ((10**6, 13, 45, 32800), "nt"),
        ((65538, 2, 29, 1793), "nt"),
        ((10**6, 5, 7, 49), "nt"),
    ],
)
def test_default_is_not_far_behind_by_the_model(sizes, layout):
    for dtype in ("fp32", "bf16"):
        p = problem(sizes, dtype=dtype, layout=layout)
        prior_us = rank(SIMT, p, H200, table_of(p))
        default_us = prior_us[table_of(p).row(SIMT.default(p, H200))]
        assert default_us < 4 * prior_us.min()


@pytest.mark.parametrize(
    "sizes", [(0, 4099, 2**20), (4099, 0, 2**20), (4099, 4099, 0), (0, 1, 1, 1)]
)
def test_empty_problems_cost_launches_at_most(sizes):
    p = problem(sizes)
    table = table_of(p)
    if p.M * p.N * p.B == 0:
        assert (rank(SIMT, p, H200, table) <= 2 * LAUNCH_US).all()
    assert floor(matmul.OPERATION, p, H200).us <= rank(SIMT, p, H200, table).min()


def test_default_is_found_without_enumerating(monkeypatch):
    """It is asked for at every look-up, and enumerating takes seconds."""
    monkeypatch.setattr("tunegen.model.Space.enumerate", None)
    shapes = itertools.product(
        (1, 65538), (1, 9, 100, 4096, 1 << 20), (1, 8, 300, 1 << 22), (1, 77, 20000)
    )
    dtypes = itertools.cycle(matmul.OPERATION.dtypes)
    for sizes, dtype, device in zip(shapes, dtypes, itertools.cycle(CHIPS), strict=False):
        p = problem(sizes, dtype=dtype)
        if not SIMT.refuses(p, device):
            SIMT.default(p, device)


@pytest.mark.parametrize(
    ("sizes", "arch"), [("4096x4096x4096", "sm_90"), ("96x1953x4096", "sm_75")]
)
def test_the_space_is_large_and_bounded(sizes, arch):
    assert 10**5 <= len(table_of(problem(sizes), default_chip(arch))) <= 4 * 10**6


@pytest.mark.parametrize("sizes", ["96x97x64", "1953x64x7"])
def test_blocks_need_not_divide_sizes(sizes):
    p = problem(sizes)
    taken = set(table_of(p).columns().BLOCK_M.tolist())
    assert {size for size in BLOCKS if p.M % size} & taken >= {64, 128}


def test_every_constraint_removes_something_somewhere():
    cases = [
        (problem("64x128x128"), "sm_75"),
        (problem("40x40x40", dtype="fp16", layout="tn"), "sm_90"),
        (problem((1 << 21, 1 << 21, 8)), "sm_86"),
    ]
    removed = [dict(table_of(p, default_chip(arch)).removed) for p, arch in cases]
    reasons = {re.sub(r"\d{5,}", "", reason) for table in removed for reason in table}
    active = {
        re.sub(r"\d{5,}", "", reason) for table in removed for reason, n in table.items() if n
    }
    assert reasons == active


# --- launch plans --------------------------------------------------------------------------------


@given(problems(st.integers(0, 300)), problems(st.integers(0, 300)), st.sampled_from([1, 4]))
def test_formulas_give_what_numbers_give(p, other, split):
    config = Config({**SIMT.default(p, H200), "SPLIT_K": split})
    symbolic = SIMT.symbolic_plan(config, p)
    numeric = SIMT.plan(config, p, Sizes(other.names))
    bound = symbolic.bind(other.names)
    assert bound.launches == numeric.bind({}).launches
    assert evaluate(symbolic.workspace_bytes, other.names) == numeric.workspace_bytes


def test_empty_sums_are_launched_and_empty_outputs_are_not():
    for sizes, launches in (("64x64x0", 1), ("0x64x64", 0), ("64x0x64", 0), ("0x8x8x8", 0)):
        p = problem(sizes)
        for spec in (SIMT, NAIVE):
            plan = spec.bound_plan(spec.default(p, H200), p, H200)
            assert len(plan.launches) == launches


def test_a_batch_beyond_the_other_axes_lies_along_x():
    p = problem("65538x48x80x16")
    config = SIMT.default(p, H200)
    (launch,) = SIMT.bound_plan(config, p, H200).launches
    tiles = -(-48 // config.BLOCK_M) * -(-80 // config.BLOCK_N)
    assert launch.grid == (65538 * tiles, 1, 1)


def test_more_blocks_than_a_grid_holds_are_refused():
    p = problem((1 << 20, 1 << 20, 64))
    small = Config({**SIMT.default(p, H200), "BLOCK_M": 16, "BLOCK_N": 16})
    with pytest.raises(PlanError, match="more than 2147483647"):
        SIMT.bound_plan(small, p, H200)
    assert any("grid" in reason for reason in SIMT.space(p, H200).violated(small))
    assert not SIMT.refuses(p, H200)
    assert "4294967296 blocks" in NAIVE.refuses(p, H200)
    assert "in x" in SIMT.refuses(problem((1 << 30, 1 << 30, 64)), H200)
    assert "32 bits" in SIMT.refuses(problem((1 << 31, 1, 1)), H200)


def test_partial_sums_have_room_and_keep_to_it():
    p = problem("3x65x67x9000", dtype="bf16", beta=1)
    config = Config({**SIMT.default(p, H200), "SPLIT_K": 4})
    plan = SIMT.bound_plan(config, p, H200)
    main, reduce = plan.launches
    assert main.grid[1] == 4
    assert plan.workspace_bytes == 4 * 3 * 65 * 68 * 4  # rows of 67 padded to whole float4
    assert reduce.grid == (-(-3 * 65 * 17 // 256), 1, 1)
    arguments = {argument.name: argument for argument in main.arguments}
    assert arguments["partials"].type == "workspace"
    assert (arguments["ldc"].value, arguments["batch_stride_c"].value) == (68, 65 * 68)
    assert SIMT.bound_plan(changed(p, SPLIT_K=1), p, H200).workspace_bytes == 0


# --- limits --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(problems(st.integers(1, 64)), st.randoms(use_true_random=False))
def test_limits_hold_for_the_problem_itself(p, draw):
    space = SIMT.space(p, H200)
    config = SIMT.default(p, H200)
    for _ in range(30):
        parameter = draw.choice(space.parameters)
        proposal = Config({**config, parameter.name: draw.choice(parameter.values)})
        config = config if space.violated(proposal) else proposal
    limits = SIMT.limits(config, p)
    assert all(limit.holds(p.names) for limit in limits)
    assert {limit.quantity for limit in limits} >= {"B", "M", "N", "K"}
    assert all(limit.value <= 16 for limit in limits if limit.rule == "multiple_of")


def test_limits_say_how_far_accesses_are_aligned():
    p = problem("512x512x512", dtype="fp16", lda=520, ldb=514, ldc=516)
    limits = {(limit.quantity, limit.value) for limit in SIMT.limits(SIMT.default(p, H200), p)}
    assert {("lda", 8), ("ldb", 2), ("ldc", 4), ("align", 16)} <= limits
    odd = problem("512x512x512", dtype="fp16", lda=513, ldb=515, ldc=517)
    rules = {limit.rule for limit in SIMT.limits(SIMT.default(odd, H200), odd)}
    assert rules == {"at_most"}


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "layout", "split", "buffers"),
    [("fp32", "nn", 4, 3), ("bf16", "tt", 1, 2), ("fp64", "nt", 16, 2)],
)
def test_a_config_is_right_at_every_size_its_limits_cover(dtype, layout, split, buffers):
    """Also where it would not be chosen: fewer tiles than slices, groups higher than the grid."""
    tuned = problem("512x512x8192", dtype=dtype, layout=layout)
    config = Config(
        {
            **SIMT.default(tuned, H200), "SPLIT_K": split, "RASTER_GROUP": 16,
            "SHARED_BUFFERS": buffers, "ASYNC_COPY": int(buffers == 3),
        }
    )  # fmt: skip
    for sizes in ("8x8x8", "3x200x16x40", "40x264x8", "16x24x16", "72x136x520"):
        p = problem(sizes, dtype=dtype, layout=layout)
        assert all(limit.holds(p.names) for limit in SIMT.limits(config, tuned))
        case = emulator.Case(SIMT, config, p, H200)
        emulator.check(case, seed=1)
        emulator.check(case, seed=2, integers=True)


@pytest.mark.emulator
def test_slices_lose_no_precision():
    """Partial sums are fp32 also for 16-bit elements."""
    p = problem("4x16x4096", dtype="bf16", layout="nt")
    base = SIMT.default(p, H200)
    draw = np.random.default_rng(0)
    shapes = {array.name: array.shape for array in SIMT.operation.arrays(p)}
    operands = {name: store(draw.uniform(-1, 1, shapes[name]), "bf16") for name in ("A", "B")}
    wide = {name: load(values, "bf16") for name, values in operands.items()}
    exact = SIMT.operation.reference(p, wide, {"alpha": 1.0})["C"]
    errors = []
    for split in (1, 16):
        case = emulator.Case(SIMT, Config({**base, "SPLIT_K": split}), p, H200)
        found = load(emulator.run(case, operands)["C"], "bf16")
        errors.append(float(np.sqrt(np.mean((found - exact) ** 2))))
    assert errors[1] <= 1.01 * errors[0]


# --- counts --------------------------------------------------------------------------------------


def test_counts_of_columns_are_those_of_each_config():
    p = problem("300x200x5000", dtype="bf16", layout="nt", beta=1)
    table = table_of(p)
    rows = np.random.default_rng(0).choice(len(table), 40, replace=False)
    columns = SIMT.work(table.columns(rows), p, H200)
    for position, row in enumerate(rows):
        single = SIMT.work(table.config(int(row)), p, H200)
        assert single.unit == columns.unit == "fp32"
        for name in set(single.__slots__) - {"unit"}:
            column = np.broadcast_to(getattr(columns, name), len(rows))
            assert float(column[position]) == pytest.approx(float(getattr(single, name))), name


@settings(max_examples=40)
@given(problems(st.integers(1, 3000)), st.sampled_from(CHIPS))
def test_counts_are_no_less_than_the_problem_needs(p, device):
    assume(p.B > 0)
    for spec in (SIMT, NAIVE):
        config = spec.default(p, device)
        work = spec.work(config, p, device)
        plan = spec.bound_plan(config, p, device)
        blocks = np.prod(plan.launches[0].grid)
        if spec is NAIVE:  # past the limit of z, a block walks along several matrices
            blocks = blocks // min(p.B, GRID_LIMITS[2]) * p.B
        assert work.blocks == blocks
        assert work.threads == np.prod(plan.launches[0].block)
        assert work.shared_bytes == plan.launches[0].shared_bytes
        assert 2 * work.blocks * work.fma >= matmul.flops(p)
        least = matmul.OPERATION.bytes(p)
        assert work.l2_bytes >= least * 0.999
        assert work.dram_bytes >= least * 0.999
        assert work.extra_launches == len(plan.launches) - 1


def banks_of_a_transposing_store(block, depth, threads, vector, padding, word):
    """Wavefronts that the template's TileCopy takes for one store of each warp, by trying."""
    element = min(word, 4) * 4 if word == 1 else 8
    side = max(min(depth // vector, max(1, 32 // (vector * element))), threads // block)
    lanes = [(lane // side, lane % side * vector) for lane in range(32)]
    starts = [(col * (block + padding) + row) * word for row, col in lanes]
    total = 0
    for first in range(0, 32, 32 // word):
        touched = {}
        for start in starts[first : first + 32 // word]:
            for address in range(start, start + word):
                touched.setdefault(address % 32, set()).add(address)
        total += max(map(len, touched.values()))
    return total, min(side, 32)


@pytest.mark.parametrize(("dtype", "word"), [("fp32", 1), ("fp64", 2)])
def test_bank_conflicts_are_counted_as_they_happen(dtype, word):
    p = problem("64x64x64", dtype=dtype)
    for block, depth, threads, vector, padding in itertools.product(
        BLOCKS, (8, 16, 32), (32, 64, 128, 256), (1, 2, 4), (0, 4)
    ):
        if vector * p.element_bytes > 16 or block * depth < threads * vector:
            continue
        found, side = banks_of_a_transposing_store(block, depth, threads, vector, padding, word)
        counted = cost._transposing(types.SimpleNamespace(PADDING=padding), p, block, vector, side)
        assert counted == found, (block, depth, threads, vector, padding)


# --- compiled ------------------------------------------------------------------------------------


@functools.cache
def compiled(p, config, arch):
    (source, *_) = render(SIMT, config, p, arch)
    return NvrtcCompiler().compile(source, arch)


def with_asserts(source, equalities):
    """The source with what Python says of it, to be proved by the compiler."""
    lines = [f'static_assert({left} == {right}, "{left}");' for left, right in equalities.items()]
    return KernelSource(source.name, source.entry, "\n".join([source.text, *lines]), "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", usual(COMPILED_ARCHS, "sm_90"))
def test_valid_configs_compile_clean_and_as_python_derives_them(arch):
    device = default_chip(arch)
    draw = random.Random(arch)
    for _ in range(2):
        dtype = draw.choice(matmul.OPERATION.dtypes)
        layout = draw.choice(matmul.OPERATION.layouts)
        odd = problem("72x40x264", dtype=dtype, layout=layout).lda + draw.choice([0, 1, 2, 4])
        p = problem("72x40x264", dtype=dtype, layout=layout, beta=1, lda=odd)
        for config in sampled(p, device, 1, seed=draw.random()):
            a, b = derived.vectors(config, p)
            equalities = {
                "THREADS": derived.threads(config),
                "VECTOR_A": a,
                "VECTOR_B": b,
                "VECTOR_C": derived.vector_c(config, p),
            }
            if config.SHARED_BUFFERS:
                bytes_used = "SHARED_BUFFERS * Pipeline::SLOT * (int)sizeof(Accumulator)"
                equalities[bytes_used] = derived.shared_bytes(config, p)
            main, *rest = render(SIMT, config, p, arch)
            for source in (with_asserts(main, equalities), *rest):
                kernel = NvrtcCompiler().compile(source, arch)
                assert kernel.warnings == "", config
                assert kernel.resources.registers <= derived.register_limit(config)


def test_structural_reasons_are_the_static_asserts():
    text = data_dir("templates").joinpath("matmul", "simt.cu.jinja").read_text()
    asserted = re.findall(r'static_assert\((?:[^;"]*)"([^"]+)"\)', text)
    space = SIMT.space(problem("64x64x64"), H200)
    assert sorted(asserted) == sorted(c.reason for c in space.constraints if c.structural)


# What each structural constraint removes: changes to the default of 1024x1024x1024 on an H200,
# which has blocks of 128x64, warps of 32x32, threads of 8x4, and tiles of 16 steps.
ONE_WARP = dict(WARP_M=128, THREAD_M=16, BLOCK_N=16, WARP_N=16, THREAD_N=4)
REMOVED = {
    "WARP_M divides BLOCK_M": dict(BLOCK_M=16),
    "WARP_N divides BLOCK_N": dict(BLOCK_N=16),
    "32 threads of THREAD_M x THREAD_N cover WARP_M x WARP_N": dict(THREAD_M=4),
    "a block has at most 1024 threads": dict(BLOCK_M=256, BLOCK_N=256),
    "asynchronous copies fill another buffer than the one that is read": dict(SHARED_BUFFERS=1),
    "copies through registers are one tile ahead and need at most 2 buffers": dict(ASYNC_COPY=0),
    "asynchronous copies move elements of 4 or 8 bytes as they are": dict(ASYNC_COPY=1),
    "a barrier is worth at least 8 steps of K": dict(BLOCK_K=4, UNROLL_K=4),
    "every thread copies a part of both tiles": dict(
        BLOCK_M=256, BLOCK_N=16, WARP_N=16, THREAD_N=2, BLOCK_K=8, UNROLL_K=8
    ),
    "UNROLL_K is all of BLOCK_K or a quarter: as one turn is peeled, a half is all": dict(
        UNROLL_K=8
    ),
    "without shared memory the whole tile is unrolled": dict(
        SHARED_BUFFERS=0, ASYNC_COPY=0, PADDING=0, UNROLL_K=4
    ),
    "at most 2048 unrolled multiply-adds fit the instruction cache": dict(
        BLOCK_N=128, WARP_M=64, THREAD_M=16, WARP_N=128, THREAD_N=16
    ),
    "some operand is accessed VECTOR_WIDTH elements at a time": dict(VECTOR_WIDTH=2),
    "a thread makes at most 32 accesses to each tile": dict(**ONE_WARP, BLOCK_K=32, UNROLL_K=32),
    "padding is for operands that are transposed on their way to shared memory": dict(PADDING=4),
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers": dict(BLOCK_M=32, MIN_BLOCKS=2),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "reason",
    [c.reason for c in SIMT.space(problem("64x64x64"), H200).constraints if c.structural],
)
def test_what_a_structural_constraint_removes_trips_its_static_assert(reason):
    dtype = "fp16" if "4 or 8 bytes" in reason else "fp32"
    layout = "tn" if "padding" in reason else "nn"
    odd = dict(lda=1025, ldb=1025, ldc=1025) if "VECTOR_WIDTH" in reason else {}
    p = problem("1024x1024x1024", dtype=dtype, layout=layout, **odd)
    config = Config({**SIMT.default(p, H200), **REMOVED[reason]})
    assert reason in SIMT.space(p, H200).violated(config)
    (source, *_) = render(SIMT, config, p, "sm_90")
    with pytest.raises(CompileError) as refused:
        NvrtcCompiler().compile(source, "sm_90")
    assert reason in refused.value.log


HOT_LOOPS = [
    # Two blocks of 256 threads with 8x8 sums each, and the shape of the vendor's own kernel: one
    # block, 16x8 sums, four buffers. For nt, NVRTC 13.0 spends a few more instructions on
    # addresses than 13.5: 0.897 where that has 0.901.
    ({}, 0.85, 128),
    (
        dict(BLOCK_M=256, WARP_M=64, WARP_N=64, THREAD_M=16, SHARED_BUFFERS=4, MIN_BLOCKS=1),
        0.89,
        255,
    ),
]


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize(("values", "share", "registers"), HOT_LOOPS)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_the_hot_loop_multiplies(values, share, registers, layout):
    p = problem("4096x4096x4096", layout=layout)
    config = changed(p, **values)
    kernel = compiled(p, config, "sm_90")
    assert kernel.resources.registers <= registers
    assert kernel.resources.spill_store_bytes == 0
    loop = facts(disassemble(kernel.cubin)).hottest
    products = config.THREAD_M * config.THREAD_N * config.UNROLL_K
    fragments = (config.THREAD_M + config.THREAD_N) // 4 * config.UNROLL_K
    assert loop.counts["FFMA"] == products
    assert products / sum(loop.counts.values()) >= share
    # The three others are what ptxas puts before an asynchronous copy, and load nothing.
    loads = {kind: count for kind, count in loop.counts.items() if kind.startswith("LDS")}
    assert loads.pop("LDS.128") == fragments
    assert sum(loads.values()) <= 3
    assert loop.counts["BAR"] == 1
    assert not any(kind.startswith(("LDL", "STL", "LD.", "ST.")) for kind in loop.counts)


@pytest.mark.nvrtc
def test_estimated_registers_are_near_what_is_compiled():
    p = problem("4096x4096x4096")
    for values, _, _ in HOT_LOOPS:
        config = changed(p, **values)
        found = compiled(p, config, "sm_90").resources.registers
        assert derived.registers_needed(config, p) <= found + 8
        assert found <= SIMT.work(config, p, H200).registers + 40


# --- element types -------------------------------------------------------------------------------


def test_every_dtype_has_an_accumulator_that_fills_a_vector():
    for dtype in matmul.OPERATION.dtypes:
        p = problem("8x8x8", dtype=dtype)
        assert derived.accumulator_vector(p) * derived.accumulator_bytes(p) == 16
        assert derived.accumulator_bytes(p) >= max(4, DTYPE_BYTES[dtype])
    assert GRID_LIMITS[0] == 2**31 - 1

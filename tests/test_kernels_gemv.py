# SPDX-License-Identifier: Apache-2.0
"""matmul gemv: space, default, plan, limits and counts; its numbers at edges, on the emulator;
what is compiled; the hot loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re

import emulator
import numpy as np
import pytest
from emulator import Case
from emulator.numbers import load, store
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tunegen.codegen import render
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble, facts, lint
from tunegen.errors import CompileError
from tunegen.kernels import matmul
from tunegen.kernels.matmul_gemv import SPEC, derived
from tunegen.kernels.matmul_gemv.space import MOST_ROWS
from tunegen.model import Config, KernelSource, Sizes, evaluate
from tunegen.perfmodel import CHIPS, LAUNCH_US, default_chip, floor, rank
from tunegen.resources import data_dir

pytestmark = pytest.mark.thorough

H200 = default_chip("sm_90")
# Few multiprocessors: small problems have slices that are worth it.
DEVICES = tuple(
    dataclasses.replace(default_chip(arch), sm_count=8)
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100")
)
COMPILED_ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")

# Decode shapes: projections of one token and of a few, a vocabulary, a router.
DECODE = ("1x4096x4096", "1x28672x4096", "1x128256x4096", "8x256x7168", "16x4096x14336")

# Sizes, and how much longer than its rows each leading dimension is.
EDGES = (
    ("1x259x64", 0),
    ("5x67x19", 3),
    ("7x9x520", 0),
    ("2x3x40x264", 8),
    ("13x29x33", 3),
    ("16x128x96", 0),
    ("4x34x1", 1),
    ("9x11x0", 0),
    ("3x7x13x17", 1),
    ("3x65x2049", 1),
    ("8x40x1000", 8),
    ("2x3x5x1023", 16),
    ("1x515x1001", 7),
    ("6x61x197", 3),
    ("1x1x1", 0),
)

problem = matmul.OPERATION.problem


def edge(sizes: str, gap: int, dtype: str, layout: str, beta: int):
    tight = problem(sizes, dtype=dtype, layout=layout)
    leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
    # Where a gap makes whole vectors of the rows, these end within one; else bases are no more
    # aligned than rows are.
    align = 16 if gap % 8 == 0 or leading["ldb"] % 8 == 0 else tight.element_bytes
    return problem(sizes, dtype=dtype, layout=layout, beta=beta, align=align, **leading)


@st.composite
def problems(draw, most_rows=MOST_ROWS):
    """Few rows, whatever the other sizes, leading dimensions and alignment are."""
    batch = draw(st.sampled_from([0, 1, 1, 1, 3, 4096, 65538, 10**6]))
    extents = st.one_of(
        st.integers(0, 40),
        st.integers(0, 1200),
        st.sampled_from([2048, 4096, 4099, 28672, 65536] + [1 << 20, 1 << 24] * (batch <= 3)),
    )
    m, n, k = draw(st.integers(0, most_rows)), draw(extents), draw(extents)
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
    return SPEC.space(p, device).enumerate()


def changed(p, device=H200, **values):
    """The default configuration with other values; they have to be valid."""
    config = Config({**SPEC.default(p, device), **values})
    assert SPEC.space(p, device).violated(config) == ()
    return config


# --- space and default ---------------------------------------------------------------------------


@given(problems(), st.sampled_from(CHIPS))
def test_default_is_valid_for_whatever_is_not_refused(p, device):
    if not SPEC.refuses(p, device):
        config = SPEC.default(p, device)
        assert SPEC.space(p, device).violated(config) == ()
        SPEC.bound_plan(config, p, device)


def test_many_rows_and_blocks_are_refused_with_the_reason():
    assert "M=17" in SPEC.refuses(problem("17x64x64"), H200)
    assert "registers" in SPEC.refuses(problem("17x64x64"), H200)
    assert SPEC.refuses(problem("16x64x64"), H200) == ""
    assert "in x" in SPEC.refuses(problem((1 << 26, 1, 1 << 14, 1)), H200)
    assert "32 bits" in SPEC.refuses(problem((1, 1, 1 << 31)), H200)


def test_default_is_found_without_enumerating(monkeypatch):
    """It is asked for at every look-up."""
    monkeypatch.setattr("tunegen.model.Space.enumerate", None)
    shapes = itertools.product((1, 65538), (1, 3, 8, 16), (1, 8, 300, 1 << 22), (0, 1, 77, 20000))
    kinds = itertools.cycle(itertools.product(matmul.OPERATION.dtypes, matmul.OPERATION.layouts))
    for sizes, kind, device in zip(shapes, kinds, itertools.cycle(CHIPS), strict=False):
        p = problem(sizes, dtype=kind[0], layout=kind[1])
        if not SPEC.refuses(p, device):
            SPEC.default(p, device)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("sizes", DECODE)
def test_default_is_not_far_behind_by_the_model(sizes, layout):
    for dtype in ("bf16", "fp32"):
        p = problem(sizes, dtype=dtype, layout=layout)
        prior_us = rank(SPEC, p, H200, table_of(p))
        default_us = prior_us[table_of(p).row(SPEC.default(p, H200))]
        assert default_us < 1.5 * prior_us.min()


@pytest.mark.parametrize("sizes", DECODE)
def test_default_keeps_the_memory_busy(sizes):
    """Latency times bandwidth is 25 KB for each multiprocessor of an H200."""
    p = problem(sizes, dtype="bf16", layout="nt")
    config = SPEC.default(p, H200)
    work = SPEC.work(config, p, H200)
    assert work.blocks >= 0.75 * H200.sm_count
    per_block = min(int(work.inflight_bytes * work.threads), p.N * p.K * 2 // int(work.blocks))
    assert per_block * config.MIN_BLOCKS >= 25_000


@pytest.mark.parametrize("sizes", ["0x4099x1048576", "16x0x1048576", "16x4099x0", "0x1x1x1"])
def test_empty_problems_cost_launches_at_most(sizes):
    p = problem(sizes)
    if p.M * p.N * p.B == 0:
        assert (rank(SPEC, p, H200, table_of(p)) <= 2 * LAUNCH_US).all()
    assert floor(matmul.OPERATION, p, H200).us <= rank(SPEC, p, H200, table_of(p)).min()


@pytest.mark.parametrize("sizes", ["1x4096x4096", "8x256x7168", "16x4096x14336"])
def test_the_space_is_large_and_bounded(sizes):
    assert 10**4 <= len(table_of(problem(sizes, dtype="bf16", layout="nt"))) <= 10**6


def test_every_constraint_removes_something_somewhere():
    cases = [
        (problem("1x64x128"), "sm_75"),
        (problem("16x4096x4096", dtype="fp64", layout="nt"), "sm_75"),
        (problem("16x28672x8192", dtype="bf16", layout="nt"), "sm_90"),
        (problem((1 << 26, 1, 2000, 8)), "sm_90"),
    ]
    removed = [dict(table_of(p, default_chip(arch)).removed) for p, arch in cases]
    reasons = {re.sub(r"\d{5,}", "", reason) for table in removed for reason in table}
    active = {
        re.sub(r"\d{5,}", "", reason) for table in removed for reason, n in table.items() if n
    }
    assert reasons == active


# --- launch plans and limits ---------------------------------------------------------------------


@given(problems(), problems(), st.sampled_from([(1, 0), (4, 0), (8, 1)]))
def test_formulas_give_what_numbers_give(p, other, slices):
    split, reduce = slices
    config = Config({**SPEC.default(p, H200), "SPLIT_K": split, "REDUCE": reduce})
    symbolic = SPEC.symbolic_plan(config, p)
    numeric = SPEC.plan(config, p, Sizes(other.names))
    blocks = -(-other.N // derived.block_n(config)) * other.B
    assume(blocks < 2**31)
    assert symbolic.bind(other.names).launches == numeric.bind({}).launches
    assert evaluate(symbolic.workspace_bytes, other.names) == numeric.workspace_bytes


def test_slices_have_a_block_each_and_room_for_their_sums():
    p = problem("3x5x70x4096", dtype="bf16", layout="nt")
    config = Config({**SPEC.default(p, H200), "SPLIT_K": 4})
    blocks = 3 * -(-70 // int(derived.block_n(config)))
    plan = SPEC.bound_plan(config, p, H200)
    (launch,) = plan.launches
    assert (launch.grid, launch.cluster) == ((blocks, 4, 1), (1, 1, 1))
    tickets, partials = (a for a in launch.arguments if a.type == "workspace")
    assert (tickets.value, partials.value) == (0, -(-4 * blocks // 16) * 16)
    sums = blocks * 4 * 8 * int(derived.block_n(config))  # ROWS is 8
    assert plan.workspace_bytes == partials.value + 4 * sums
    assert plan.workspace_init == "zero"
    clustered = SPEC.bound_plan(Config({**config, "REDUCE": 1}), p, H200)
    assert (clustered.launches[0].cluster, clustered.workspace_bytes) == ((1, 4, 1), 0)
    whole = SPEC.bound_plan(Config({**config, "SPLIT_K": 1}), p, H200)
    assert (whole.launches[0].grid, whole.workspace_init) == ((blocks, 1, 1), "none")


def test_empty_sums_are_launched_and_empty_outputs_are_not():
    for sizes, launches in (("4x64x0", 1), ("4x0x64", 0), ("0x8x8x8", 0)):
        p = problem(sizes)
        assert len(SPEC.bound_plan(SPEC.default(p, H200), p, H200).launches) == launches


@settings(max_examples=40)
@given(problems(), st.randoms(use_true_random=False))
def test_limits_hold_for_the_problem_itself(p, draw):
    assume(p.M > 0 and not SPEC.refuses(p, H200))
    space = SPEC.space(p, H200)
    config = SPEC.default(p, H200)
    for _ in range(30):
        parameter = draw.choice(space.parameters)
        proposal = Config({**config, parameter.name: draw.choice(parameter.values)})
        config = config if space.violated(proposal) else proposal
    limits = SPEC.limits(config, p)
    assert all(limit.holds(p.names) for limit in limits)
    assert {limit.quantity for limit in limits} >= {"B", "M", "N", "K"}


def test_limits_say_how_many_rows_fit_and_how_far_accesses_are_aligned():
    p = problem("5x512x512", dtype="fp16", layout="nt", lda=516, ldb=520, ldc=517)
    limits = {(limit.quantity, limit.value) for limit in SPEC.limits(SPEC.default(p, H200), p)}
    assert {("M", 8), ("lda", 4), ("ldb", 8), ("align", 16)} <= limits
    odd = problem("5x512x512", dtype="fp16", layout="nt", lda=513, ldb=515)
    rules = {limit.rule for limit in SPEC.limits(SPEC.default(odd, H200), odd)}
    assert rules == {"at_most"}


# --- numbers, on the emulator --------------------------------------------------------------------

VARIANTS = tuple(itertools.product(matmul.OPERATION.dtypes, matmul.OPERATION.layouts))


def check(case: Case) -> None:
    emulator.check(case, seed=1)
    emulator.check(case, seed=2, integers=True)


@pytest.mark.emulator
@pytest.mark.parametrize(("dtype", "layout"), VARIANTS[::2])
def test_default_at_edge_problems(dtype, layout):
    turn = VARIANTS.index((dtype, layout))
    sizes, gap = EDGES[turn % len(EDGES)]
    p = edge(sizes, gap, dtype, layout, turn % 2)
    device = DEVICES[turn % len(DEVICES)]
    check(Case(SPEC, SPEC.default(p, device), p, device))


@functools.cache
def sampled():
    """Few cases with, together, every facet of thousands drawn from the spaces at all edges."""
    draw = np.random.default_rng(0)
    pool = []
    for turn, (dtype, layout) in enumerate(VARIANTS):
        for i, (sizes, gap) in enumerate(EDGES):
            device = DEVICES[(turn + i) % len(DEVICES)]
            p = edge(sizes, gap, dtype, layout, (turn + i) % 2)
            table = SPEC.space(p, device).enumerate()
            rows = draw.integers(len(table), size=20)
            pool += [Case(SPEC, table[int(row)], p, device) for row in rows]
    chosen = []
    missing = set().union(*map(facets, pool))
    while missing:
        best = max(pool, key=lambda case: len(missing & facets(case)))
        missing -= facets(best)
        chosen.append(best)
    return chosen


def facets(case: Case) -> set[object]:
    """What a case shows: operand types, its edge, each parameter's value, and along which way of
    B its slices are added up how."""
    p, c = case.problem, case.config
    along = (p.layout[1], c.SPLIT_K > 1, c.REDUCE)
    staged = (p.layout, c.TILE_K > 0)
    return {p.dtype, p.layout, p.beta, (p.sizes, p.ldb), along, staged, *c.items()}


@pytest.mark.emulator
@pytest.mark.parametrize("part", range(4))
def test_sampled_configs_at_edge_problems(part):
    cases = sampled()[part::4]
    assert cases
    for case in cases:
        check(case)


@pytest.mark.emulator
@pytest.mark.parametrize(("layout", "dtype"), [("nt", "bf16"), ("nn", "fp32"), ("tt", "fp64")])
def test_slices_give_the_same_bits_in_any_order_of_blocks_and_either_way(layout, dtype):
    p = problem("5x70x2049", dtype=dtype, layout=layout)
    device = DEVICES[2]
    base = Config({**SPEC.default(p, device), "SPLIT_K": 4, "WARPS_K": 2, "MIN_BLOCKS": 1})
    operands, scalars = emulator.inputs(SPEC, p, seed=4)
    found = []
    for reduce, seeds in ((0, (5, 6, 7)), (1, (8, 9))):
        case = Case(SPEC, Config({**base, "REDUCE": reduce}), p, device)
        found += [emulator.run(case, operands, scalars, seed=seed)["C"] for seed in seeds]
    assert all(np.array_equal(found[0].view(np.uint8), c.view(np.uint8)) for c in found[1:])


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "layout", "values"),
    [
        ("fp32", "nn", dict(SPLIT_K=16, REDUCE=0)),
        ("bf16", "tt", dict(SPLIT_K=8, REDUCE=1)),
        ("fp16", "nt", dict(SPLIT_K=1, WARPS_N=2)),
    ],
)
def test_a_config_is_right_at_every_size_its_limits_cover(dtype, layout, values):
    """Also where it would not be chosen: one row, slices without a step, half a block."""
    tuned = problem("8x1024x8192", dtype=dtype, layout=layout)
    small = dict(WARPS_K=2, MIN_BLOCKS=1)
    config = Config({**SPEC.default(tuned, DEVICES[2]), **small, **values})
    for sizes in ("8x8x8", "1x16x40", "3x8x136x8", "5x72x264", "8x8x0"):
        rows = {} if sizes != "8x8x0" else dict(lda=8, ldb=8)
        p = problem(sizes, dtype=dtype, layout=layout, **rows)
        assert all(limit.holds(p.names) for limit in SPEC.limits(config, tuned))
        check(Case(SPEC, config, p, DEVICES[2]))


@pytest.mark.emulator
@pytest.mark.parametrize(("sizes", "values"), [
    ("1x32x4096", {}),
    ("1x64x4096", dict(TILE_K=1024)),
    ("8x16x7168", {}),
    ("16x16x7168", {}),
])  # fmt: skip
def test_decode_shapes_scaled_down(sizes, values):
    p = problem(sizes, dtype="bf16", layout="nt")
    config = Config({**SPEC.default(p, DEVICES[2]), **values})
    assert SPEC.space(p, DEVICES[2]).violated(config) == ()
    check(Case(SPEC, config, p, DEVICES[2]))


@pytest.mark.emulator
@pytest.mark.parametrize(("dtype", "layout"), [("bf16", "nt"), ("fp32", "tn"), ("fp16", "nn")])
def test_what_is_left_behind_whole_vectors_counts(dtype, layout):
    """More of it along K than a block has lanes there, and along N."""
    p = edge("6x61x197", 3, dtype, layout, 1)
    assert derived.alignment(p, p.ldb) == 16 // p.element_bytes
    few = changed(p, DEVICES[2], LANES_K=2, WARPS_K=1, MIN_BLOCKS=1, TILE_K=0)
    for config in (few, Config({**few, "SPLIT_K": 2})):
        check(Case(SPEC, config, p, DEVICES[2]))


@pytest.mark.emulator
def test_slices_lose_no_precision():
    """Partial sums are fp32 also for 16-bit elements."""
    p = problem("4x16x4096", dtype="bf16", layout="nt")
    base = SPEC.default(p, DEVICES[2])
    draw = np.random.default_rng(0)
    shapes = {array.name: array.shape for array in SPEC.operation.arrays(p)}
    operands = {name: store(draw.uniform(-1, 1, shapes[name]), "bf16") for name in ("A", "B")}
    wide = {name: load(values, "bf16") for name, values in operands.items()}
    exact = SPEC.operation.reference(p, wide, {"alpha": 1.0})["C"]
    errors = []
    for split in (1, 16):
        case = Case(SPEC, Config({**base, "SPLIT_K": split}), p, DEVICES[2])
        found = load(emulator.run(case, operands)["C"], "bf16")
        errors.append(float(np.sqrt(np.mean((found - exact) ** 2))))
    assert errors[1] <= 1.01 * errors[0]


@pytest.mark.emulator
@pytest.mark.parametrize(("dtype", "layout"), [("fp32", "nt"), ("fp16", "nn"), ("bf16", "tt")])
def test_nan_and_infinity_come_out_where_they_must(dtype, layout):
    """In the last columns and steps: nothing that a tail is filled up with may meet them."""
    p = edge("9x21x37", 3, dtype, layout, 1)
    case = Case(SPEC, SPEC.default(p, DEVICES[1]), p, DEVICES[1])
    operands, scalars = emulator.inputs(SPEC, p, seed=0)
    for name, stored in operands.items():
        values = emulator.load(stored, dtype)
        flat = values.reshape(-1, values.shape[-1])
        flat[[-1, -4, -7], [-1, -2, -3]] = np.nan, np.inf, -np.inf
        operands[name] = emulator.store(values, dtype)
    found = emulator.load(emulator.run(case, operands, scalars)["C"], dtype)
    wide = {name: emulator.load(values, dtype) for name, values in operands.items()}
    with np.errstate(invalid="ignore"):
        expected = SPEC.operation.reference(p, wide, scalars)["C"]
    assert 0 < np.isnan(expected).sum() < expected.size
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(found), kind(expected))


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_rows_lie_beyond_32_bit_offsets(layout):
    far = 2**30 + 8
    p = problem("5x7x9", dtype="fp16", layout=layout, beta=1, lda=far, ldb=far, ldc=far)
    emulator.check(Case(SPEC, SPEC.default(p, DEVICES[1]), p, DEVICES[1]))


# --- counts --------------------------------------------------------------------------------------


def test_counts_of_columns_are_those_of_each_config():
    p = problem("5x200x5000", dtype="bf16", layout="nt", beta=1)
    table = table_of(p)
    rows = np.random.default_rng(0).choice(len(table), 40, replace=False)
    columns = SPEC.work(table.columns(rows), p, H200)
    for position, row in enumerate(rows):
        single = SPEC.work(table.config(int(row)), p, H200)
        for name in set(single.__slots__) - {"unit"}:
            column = np.broadcast_to(getattr(columns, name), len(rows))
            assert float(column[position]) == pytest.approx(float(getattr(single, name))), name


@settings(max_examples=40)
@given(problems(), st.sampled_from(CHIPS))
def test_counts_are_no_less_than_the_problem_needs(p, device):
    assume(p.B and p.M and p.N and p.K and not SPEC.refuses(p, device))
    config = SPEC.default(p, device)
    work = SPEC.work(config, p, device)
    (launch,) = SPEC.bound_plan(config, p, device).launches
    assert work.blocks == np.prod(launch.grid)
    assert work.threads == np.prod(launch.block)
    assert work.shared_bytes == launch.shared_bytes
    assert 2 * work.blocks * work.fma >= matmul.flops(p)
    least = matmul.OPERATION.bytes(p)
    assert work.l2_bytes >= least * 0.999
    assert work.dram_bytes >= least * 0.999


# --- compiled ------------------------------------------------------------------------------------


@functools.cache
def compiled(p, config, arch):
    (source,) = render(SPEC, config, p, arch)
    return NvrtcCompiler().compile(source, arch)


def with_asserts(source, equalities):
    """The source with what Python says of it, to be proved by the compiler."""
    lines = [f'static_assert({left} == {right}, "{left}");' for left, right in equalities.items()]
    return KernelSource(source.name, source.entry, "\n".join([source.text, *lines]), "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", COMPILED_ARCHS)
def test_valid_configs_compile_clean_and_as_python_derives_them(arch):
    device = default_chip(arch)
    draw = random.Random(arch)
    for kind in draw.sample(VARIANTS, 2):
        p = edge("6x520x2064", draw.choice([0, 1, 2, 4]), *kind, 1)
        table = table_of(p, device)
        config = table.config(draw.randrange(len(table)))
        equalities = {
            "THREADS": derived.threads(config),
            "BLOCK_N": derived.block_n(config),
            "VECTOR_A": derived.vector_a(config, p),
            "VECTOR_B": derived.vector_b(config, p),
            "RUN_K": derived.run_k(config, p),
            "LOADS": derived.loads(config, p),
            "UNIT_K": derived.unit_k(config, p),
            "TURN_K": derived.turn_k(config, p),
        }
        (source,) = render(SPEC, config, p, arch)
        kernel = NvrtcCompiler().compile(with_asserts(source, equalities), arch)
        assert kernel.warnings == "", config
        assert kernel.resources.registers <= derived.register_limit(config)


def structural():
    space = SPEC.space(problem("1x64x64"), H200)
    return sorted(c.reason for c in space.constraints if c.structural)


def test_structural_reasons_are_the_static_asserts():
    text = data_dir("templates").joinpath("matmul", "gemv.cu.jinja").read_text()
    assert sorted(re.findall(r'static_assert\((?:[^;"]*)"([^"]+)"\)', text)) == structural()


# What each structural constraint removes: changes to the default of a problem of 8 rows.
REMOVED = {
    "a block has at most 1024 threads": dict(WARPS_K=16, WARPS_N=4, MIN_BLOCKS=1, TILE_K=0),
    "a thread's sums take at most 64 registers": dict(COLS=16),
    "a thread has at most 256 bytes of B under way": dict(UNROLL=8, TILE_K=0),
    "at most 1024 unrolled multiply-adds, as they stand twice, fit the instruction cache": dict(
        UNROLL=8, TILE_K=0
    ),
    "a tile of A is whole turns of the unrolled loop": dict(TILE_K=512, WARPS_K=16),
    "a turn of the unrolled loop is at most 8192 steps of K": dict(
        LANES_K=32, WARPS_K=16, UNROLL=4, TILE_K=0
    ),
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers": dict(
        WARPS_K=1, MIN_BLOCKS=2, TILE_K=0
    ),
    "a single slice of K is not reduced": dict(SPLIT_K=1, REDUCE=1),
    "a cluster has at most 8 blocks": dict(SPLIT_K=16, REDUCE=1),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("reason", structural())
def test_what_a_structural_constraint_removes_trips_its_static_assert(reason):
    p = problem("8x4096x4096", dtype="bf16", layout="nt")
    config = Config({**SPEC.default(p, H200), **REMOVED[reason]})
    assert reason in SPEC.space(p, H200).violated(config)
    (source,) = render(SPEC, config, p, "sm_90")
    with pytest.raises(CompileError) as refused:
        NvrtcCompiler().compile(source, "sm_90")
    assert reason in refused.value.log


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [("1x28672x4096", "nt"), ("8x256x7168", "nt"), ("16x4096x14336", "nt"), ("1x4096x4096", "nn")],
)
def test_the_hot_loop_loads_wide_and_ahead(sizes, layout):
    p = problem(sizes, dtype="bf16", layout=layout)
    config = SPEC.default(p, H200)
    kernel = compiled(p, config, "sm_90")
    assert kernel.resources.spill_store_bytes == 0
    found = facts(disassemble(kernel.cubin))
    assert lint(found) == []
    products = config.UNROLL * int(derived.run_k(config, p)) * config.ROWS * config.COLS
    loads = config.UNROLL * int(derived.loads(config, p))
    # Where vectors along N may end beyond it, there is a second loop with narrow loads.
    hot = [loop for loop in found.inner_loops if loop.counts.get("FFMA") == products]
    (loop,) = (loop for loop in hot if "LDG.16" not in loop.counts)
    assert len(hot) == (1 if layout == "nt" else 2)
    # A turn has all loads of B, as wide as a thread's columns allow; A comes from shared memory,
    # or in a few more.
    wide = loop.counts[f"LDG.{16 * int(derived.vector_b(config, p))}"]
    assert wide == loads if config.TILE_K else wide >= loads
    assert not any(kind.startswith(("LDL", "STL", "LD.", "ST.")) for kind in loop.counts)
    assert loads >= 4


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
def test_loads_are_not_waited_for_in_the_turn_that_issues_them():
    """16-bit elements that are taken apart as they arrive would be: the moves stand behind the
    loads, at the end of the loop."""
    p = problem("8x4096x4096", dtype="bf16", layout="nt")
    listing = disassemble(compiled(p, SPEC.default(p, H200), "sm_90").cubin)
    lines = [line for line in listing.splitlines() if re.search(r"/\*[0-9a-f]{4}\*/", line)]
    loads = [i for i, line in enumerate(lines) if "LDG.E.NA.128" in line]
    first_products = next(i for i, line in enumerate(lines) if "FFMA" in line)
    in_loop = [i for i in loads if i > first_products]
    end = next(i for i in range(in_loop[-1], len(lines)) if "BRA" in lines[i])
    loaded = {
        f"R{int(register) + part}"
        for i in in_loop
        for register in re.findall(r"128\S* R(\d+),", lines[i])
        for part in range(4)
    }
    assert len(loaded) == 4 * len(in_loop)
    for i in in_loop:
        own = int(re.findall(r"128\S* R(\d+),", lines[i])[0])
        after = " ".join(lines[i + 1 : end])
        assert not {f"R{own + part}" for part in range(4)} & set(re.findall(r"\bR\d+\b", after))


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
def test_slices_meet_by_a_ticket_or_in_a_cluster():
    p = problem("8x256x7168", dtype="bf16", layout="nt")

    def kinds(reduce):
        kernel = compiled(p, changed(p, SPLIT_K=8, REDUCE=reduce), "sm_90")
        return " ".join(facts(disassemble(kernel.cubin)).counts)

    assert "ATOM" in kinds(0)
    assert "ATOM" not in kinds(1)
    assert "UCGABAR" in kinds(1)
    assert "UCGABAR" not in kinds(0)

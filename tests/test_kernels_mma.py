# SPDX-License-Identifier: Apache-2.0
"""matmul mma: numbers and addresses on the CPU, banks of shared memory, plans, limits and counts,
what is compiled, and the hot loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import shutil

import emulator
import numpy as np
import pytest
from emulator import Case, build
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_kernels_matmul import problems, with_asserts

from tunegen.codegen import render
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble, facts
from tunegen.errors import CompileError, PlanError
from tunegen.kernels import matmul, matmul_mma
from tunegen.kernels.matmul_mma import derived
from tunegen.model import ARCHS, Config, KernelDefinition, Sizes, evaluate
from tunegen.perfmodel import CHIPS, default_chip, rank
from tunegen.resources import data_dir

pytestmark = pytest.mark.thorough

MMA = matmul_mma.SPEC
H200 = default_chip("sm_90")
DTYPES = ("fp16", "bf16", "fp64")
problem = matmul.OPERATION.problem

# Few multiprocessors, so that small problems have rounds of blocks and slices of K.
SMALL = {
    arch: dataclasses.replace(default_chip(arch), sm_count=8)
    for arch in ("sm_80", "sm_90", "sm_120")
}


@functools.cache
def table_of(p, device=H200):
    return MMA.space(p, device).enumerate()


def sampled(p, device, seed):
    table = table_of(p, device)
    return table.config(random.Random(f"{seed} {p} {device.arch}").randrange(len(table)))


def changed(p, device=H200, **values):
    """The default configuration with other values; they have to be valid."""
    config = Config({**MMA.default(p, device), **values})
    assert not MMA.space(p, device).violated(config)
    return config


def odd(sizes, dtype, layout, gaps=(1, 1, 1), align=None, beta=0):
    """A problem whose rows are so much further apart than they are long."""
    tight = problem(sizes, dtype=dtype, layout=layout)
    names = ("lda", "ldb", "ldc")
    leading = {name: getattr(tight, name) + gap for name, gap in zip(names, gaps, strict=True)}
    align = align or tight.element_bytes
    return problem(sizes, dtype=dtype, layout=layout, align=align, beta=beta, **leading)


# --- space and default ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(problems(), st.sampled_from(CHIPS))
def test_default_is_valid_for_whatever_is_not_refused(p, device):
    if not MMA.refuses(p, device):
        config = MMA.default(p, device)
        assert MMA.space(p, device).violated(config) == ()
        MMA.bound_plan(config, p, device)


def test_what_it_cannot_do_is_refused_with_a_reason():
    assert "sm_80, not sm_75" in MMA.refuses(problem("8x8x8", dtype="fp16"), default_chip("sm_75"))
    assert "not fp32" in MMA.refuses(problem("8x8x8", dtype="fp32"), H200)
    assert "in x" in MMA.refuses(problem((1 << 30, 1 << 30, 64), dtype="bf16"), H200)
    assert "32 bits" in MMA.refuses(problem((1 << 31, 1, 1), dtype="bf16"), H200)
    for arch in ARCHS[1:]:
        for dtype in DTYPES:
            assert MMA.refuses(problem("8x8x8", dtype=dtype), default_chip(arch)) == ""


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(
    "sizes", ["4096x4096x4096", "128x7168x16384", "1x4096x4096", "4095x4097x4099", "8x256x7168"]
)
def test_default_is_not_far_behind_by_the_model(sizes, layout):
    for dtype in ("bf16", "fp64"):
        p = problem(sizes, dtype=dtype, layout=layout)
        prior_us = rank(MMA, p, H200, table_of(p))
        assert prior_us[table_of(p).row(MMA.default(p, H200))] < 1.5 * prior_us.min()


def test_every_constraint_removes_something_somewhere():
    cases = [
        (problem("64x128x128", dtype="bf16"), "sm_80"),
        (problem("40x40x8", dtype="fp64", layout="tn"), "sm_90"),
        (problem("40x40x8", dtype="fp64", layout="tn"), "sm_120"),
        (problem("512x512x512", dtype="bf16", ldb=514), "sm_90"),
        (problem((1 << 22, 1 << 21, 8), dtype="fp16", layout="tn"), "sm_86"),
    ]
    removed = [dict(table_of(p, default_chip(arch)).removed) for p, arch in cases]
    reasons = {re.sub(r"\d{5,}", "", reason) for table in removed for reason in table}
    active = {
        re.sub(r"\d{5,}", "", reason) for table in removed for reason, n in table.items() if n
    }
    assert reasons == active


# --- numbers -------------------------------------------------------------------------------------

EDGES = (
    ("130x67x19", 0), ("7x9x520", 0), ("2x72x40x264", 8), ("37x29x33", 3), ("64x128x96", 0),
    ("5x259x64", 8), ("3x17x13x7", 1), ("33x65x31", 2), ("1x1x1", 0), ("70x34x1", 1),
    ("9x11x0", 0), ("66x30x200", 4),
)  # fmt: skip
VARIANTS = tuple(itertools.product(DTYPES, matmul.OPERATION.layouts))


def edge(index, dtype, layout, beta):
    sizes, gap = EDGES[index % len(EDGES)]
    align = 16 if gap % 8 == 0 else None
    return odd(sizes, dtype, layout, (gap, gap, gap), align, beta)


def check(case):
    emulator.check(case, seed=1)
    emulator.check(case, seed=2, integers=True)


@pytest.mark.emulator
@pytest.mark.parametrize("turn", range(0, len(VARIANTS), 3))
def test_default_at_edge_problems(turn):
    dtype, layout = VARIANTS[turn]
    p = edge(5 * turn, dtype, layout, turn % 2)
    check(Case(MMA, MMA.default(p, SMALL["sm_80"]), p, SMALL["sm_80"]))


@pytest.mark.emulator
@pytest.mark.parametrize("turn", range(6))
def test_sampled_configs_at_edge_problems(turn):
    dtype, layout = VARIANTS[turn % len(VARIANTS)]
    device = tuple(SMALL.values())[turn % 3]
    p = edge(7 * turn, dtype, layout, turn // 2 % 2)
    check(Case(MMA, sampled(p, device, turn), p, device))


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("gaps", [(1, 0, 1), (2, 4, 2), (3, 1, 8)])
def test_every_alignment_of_rows(layout, gaps):
    """Each operand's rows begin at any element, word or pair of words, and so do the bases; in
    the middle of K nothing is checked, at its ends nothing outside is read."""
    p = odd("48x56x200", "bf16", layout, gaps, align=16 if gaps[0] == 2 else 2)
    config = changed(p, SMALL["sm_90"], BLOCK_K=32, SPLIT_K=1)
    for residue in (0, 2, 14, 30):
        bases = dict.fromkeys("ABC", residue if p.align == 2 else residue // 16 * 16)
        emulator.check(Case(MMA, config, p, SMALL["sm_90"]), residue, residues=bases)


@pytest.mark.emulator
@pytest.mark.parametrize("instruction", [(8, 4), (16, 4), (16, 8), (16, 16)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_fp64_instruction(layout, instruction):
    p = problem("37x50x45", dtype="fp64", layout=layout, beta=1)
    values = dict(zip(("MMA_ROWS", "MMA_K"), instruction, strict=True))
    depth = dict(BLOCK_K=32, REGISTER_BUFFERS=1, STAGES=2, SPLIT_K=1)
    check(Case(MMA, changed(p, SMALL["sm_90"], **depth, **values), p, SMALL["sm_90"]))


@pytest.mark.emulator
def test_slices_give_the_same_bits_in_any_order():
    p = odd("20x36x333", "bf16", "nt", beta=1)
    config = changed(p, SMALL["sm_80"], BLOCK_K=16, REGISTER_BUFFERS=1, SPLIT_K=6)
    case = Case(MMA, config, p, SMALL["sm_80"])
    check(case)
    operands, scalars = emulator.inputs(MMA, p, seed=4)
    first, *others = (emulator.run(case, operands, scalars, seed=s)["C"] for s in (5, 6, 7))
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_come_out_where_they_must(dtype):
    """At tails, so that what is padded with zeros, or repeated, must not meet them."""
    p = odd("19x21x37", dtype, "nt")
    case = Case(MMA, MMA.default(p, SMALL["sm_80"]), p, SMALL["sm_80"])
    operands, scalars = emulator.inputs(MMA, p, seed=0)
    for name, stored in operands.items():
        values = emulator.load(stored, dtype)
        values[0, [-1, -4, -7], [-1, -2, -3]] = (np.nan, np.inf, -np.inf)
        operands[name] = emulator.store(values, dtype)
    found = emulator.load(emulator.run(case, operands, scalars)["C"], dtype)
    wide = {name: emulator.load(values, dtype) for name, values in operands.items()}
    with np.errstate(invalid="ignore"):
        expected = MMA.operation.reference(p, wide, scalars)["C"]
    for same in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(same(found), same(expected))


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_rows_lie_beyond_32_bit_offsets(layout):
    far = 2**30 + 8
    for ld in (far, far + 1):
        p = problem("5x7x9", dtype="fp16", layout=layout, beta=1, lda=ld, ldb=ld, ldc=ld)
        emulator.check(Case(MMA, MMA.default(p, H200), p, H200))


@pytest.mark.emulator
def test_a_config_is_right_at_every_size_its_limits_cover():
    tuned = odd("512x512x8192", "bf16", "nt")
    config = changed(tuned, SPLIT_K=4, BLOCK_M=64, WARP_M=32, BLOCK_N=64, WARP_N=32)
    for sizes in ("130x67x19", "3x1x259x64", "64x64x0", "33x65x31"):
        p = odd(sizes, "bf16", "nt", (3, 5, 7))
        assert all(limit.holds(p.names) for limit in MMA.limits(config, tuned))
        check(Case(MMA, config, p, H200))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("fragment", "change", "gap"),
    [
        ("pipeline", ("    __syncthreads();\n", ""), 0),
        ("pipeline", ("copy_async_wait<AHEAD - 1>", "copy_async_wait<AHEAD>"), 0),
        ("pipeline", ("(k_steps + BLOCK_K - 1) / BLOCK_K", "k_steps / BLOCK_K"), 0),
        ("pipeline", ("    if (fetching) land();\n", ""), 1),
        ("copy", ("both >> (16 * is_odd(pass))", "both"), 1),
        ("store", ("    __syncwarp();\n    Vector", "    Vector"), 0),
    ],
)
def test_a_broken_kernel_is_caught(tmp_path, fragment, change, gap):
    """A barrier less, too short a wait or tail, words that do not land or are not shifted."""
    shutil.copytree(data_dir("templates"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"lib/mma_{fragment}.cuh"
    assert path.read_text().count(change[0]) == 1
    path.write_text(path.read_text().replace(*change))
    blocks = dict.fromkeys(("BLOCK_M", "BLOCK_N"), 32) | dict.fromkeys(("WARP_M", "WARP_N"), 16)
    kinds = set()
    for seed, depth in enumerate((200, 192, 200, 192)):
        p = odd(f"64x64x{depth}", "bf16", "nt", (gap,) * 3, None if gap else 16)
        values = {**blocks, "STAGES": 3, "BLOCK_K": 32, "SPLIT_K": 1, "STAGED_STORE": 1}
        config = Config({**MMA.default(p, SMALL["sm_80"]), **values})
        for spec in (MMA, dataclasses.replace(MMA, template_root=tmp_path)):
            try:
                emulator.check(Case(spec, config, p, SMALL["sm_80"]), seed)
            except emulator.WrongKernel as error:
                assert spec is not MMA
                kinds.add(error.kind)
    assert kinds
    assert kinds <= {"wrong_value", "unset", "memory"}


# --- banks of shared memory ----------------------------------------------------------------------

ADDRESSES = """
//% include "lib/types.cuh"
//% include "lib/config.cuh"
//% include "lib/integers.cuh"
using SharedAddress = unsigned;
static unsigned* next;
template <bool TRANSPOSED>
void load_matrices(unsigned (&)[4], SharedAddress row) { *next++ = row; }
inline void load_shared(fp64&, fp64&, SharedAddress from) { *next++ = from; }
template <typename... T> void multiply_matrices(T&&...) {}
template <typename... T> void multiply_8x8x4(T&&...) {}
//% include "lib/mma_fragments.cuh"
extern "C" __global__ void tunegen_addresses(unsigned* out) {
  const int lane = threadIdx.x;
  next = out + lane * COUNT;
  FragmentLoader<OF_B, TILE, WARP, ACROSS> loader(TILE - WARP, lane);
  Fragment fragments[WARP / 16];
  for (int step = 0; step < STEPS; ++step) loader.load(fragments, 0, step);
}
"""


@pytest.mark.emulator
@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_fragments_are_loaded_without_bank_conflicts(tmp_path, dtype, across):
    """Eight lanes at a time get 16 bytes each, all of which lie in different banks."""
    (tmp_path / "addresses.cu.jinja").write_text(ADDRESSES)
    wide = dtype == "fp64"
    shallow, deep = (8, 32) if wide else (16, 64)
    for depth, tile, warp, of_b in (
        (shallow, 16, 16, 0), (shallow, 96, 32, 1), (16 if wide else 32, 96, 32, 0),
        (deep, 256, 64, 1),
    ):  # fmt: skip
        loads = depth // 8 * 2 if wide else depth // 16
        constants = {
            "COUNT": loads * warp // 16, "TILE": tile, "WARP": warp, "ACROSS": across,
            "OF_B": of_b, "BLOCK_K": depth, "MMA_ROWS": 8, "MMA_K": 4, "WARP_M": 16, "WARP_N": 16,
        }  # fmt: skip
        types = {"Element": dtype, "Accumulator": "fp64" if wide else "fp32"}
        kernel = build.build_definition(
            KernelDefinition("addresses", "addresses.cu.jinja", types, constants),
            "sm_80", tmp_path,
        )  # fmt: skip
        out = np.zeros((32, constants["COUNT"]), np.uint32)
        one = build.Vec3(1, 1, 1)
        launch = build.Launch(one, build.Vec3(32, 1, 1), 0, 1, 20)
        pointer = build.ctypes.c_void_p(out.ctypes.data)
        assert not kernel(launch, [pointer]).kind
        size = tile * depth * (8 if wide else 2)
        assert out.max() < size
        assert len(np.unique(out)) == out.size
        banks = out.reshape(4, 8, -1) // 16 % 8
        assert (np.sort(banks, axis=1) == np.arange(8)[None, :, None]).all(), constants


# --- launch plans and limits ---------------------------------------------------------------------


@settings(max_examples=40)
@given(problems(st.integers(0, 300)), problems(st.integers(0, 300)), st.sampled_from([1, 4]))
def test_formulas_give_what_numbers_give(p, other, split):
    assume(not MMA.refuses(p, H200))
    config = Config({**MMA.default(p, H200), "SPLIT_K": split})
    symbolic = MMA.symbolic_plan(config, p)
    numeric = MMA.plan(config, p, Sizes(other.names))
    assert symbolic.bind(other.names).launches == numeric.bind({}).launches
    assert evaluate(symbolic.workspace_bytes, other.names) == numeric.workspace_bytes


def test_empty_sums_are_launched_and_empty_outputs_are_not():
    for sizes, launches in (("64x64x0", 1), ("0x64x64", 0), ("64x0x64", 0), ("0x8x8x8", 0)):
        p = problem(sizes, dtype="bf16")
        assert len(MMA.bound_plan(MMA.default(p, H200), p, H200).launches) == launches


def test_a_batch_beyond_the_other_axes_lies_along_x():
    p = problem("65538x48x80x16", dtype="bf16")
    config = MMA.default(p, H200)
    (launch,) = MMA.bound_plan(config, p, H200).launches
    tiles = -(-48 // config.BLOCK_M) * -(-80 // config.BLOCK_N)
    assert launch.grid == (65538 * tiles, 1, 1)


def test_more_blocks_than_a_grid_holds_are_refused():
    p = problem((1 << 20, 1 << 20, 64), dtype="bf16")
    small = Config({**MMA.default(p, H200), **dict.fromkeys(("BLOCK_M", "WARP_M"), 16)})
    small = Config({**small, **dict.fromkeys(("BLOCK_N", "WARP_N"), 16)})
    assert any("grid" in reason for reason in MMA.space(p, H200).violated(small))
    with pytest.raises(PlanError, match="more than 2147483647"):
        MMA.bound_plan(small, p, H200)
    assert not MMA.refuses(p, H200)


def test_limits_say_how_far_rows_are_aligned():
    p = problem("512x512x512", dtype="fp16", lda=520, ldb=514, ldc=516)
    limits = {(limit.quantity, limit.value) for limit in MMA.limits(MMA.default(p, H200), p)}
    assert {("lda", 8), ("ldb", 2), ("ldc", 4), ("align", 16)} <= limits
    none = odd("512x512x512", "fp16", "nn")
    assert {limit.rule for limit in MMA.limits(MMA.default(none, H200), none)} == {"at_most"}


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_counts_of_columns_are_those_of_each_config(dtype):
    p = odd("300x200x5000", dtype, "nt", (1, 0, 2), beta=1)
    table = table_of(p)
    rows = np.random.default_rng(0).choice(len(table), 40, replace=False)
    columns = MMA.work(table.columns(rows), p, H200)
    for position, row in enumerate(rows):
        single = MMA.work(table.config(int(row)), p, H200)
        for name in set(single.__slots__) - {"unit"}:
            column = np.broadcast_to(getattr(columns, name), len(rows))
            assert float(column[position]) == pytest.approx(float(getattr(single, name))), name


@settings(max_examples=40)
@given(problems(st.integers(1, 3000)), st.sampled_from(CHIPS))
def test_counts_are_no_less_than_the_problem_needs(p, device):
    assume(p.B > 0 and not MMA.refuses(p, device))
    config = MMA.default(p, device)
    work, plan = MMA.work(config, p, device), MMA.bound_plan(config, p, device)
    assert work.blocks == np.prod(plan.launches[0].grid)
    assert work.threads == np.prod(plan.launches[0].block)
    assert work.shared_bytes == plan.launches[0].shared_bytes
    assert 2 * work.blocks * work.fma >= matmul.flops(p)
    least = matmul.OPERATION.bytes(p)
    assert work.l2_bytes >= least * 0.999
    assert work.dram_bytes >= least * 0.999
    assert work.extra_launches == len(plan.launches) - 1


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_valid_configs_compile_clean_and_as_python_derives_them(arch):
    device = default_chip(arch)
    draw = random.Random(arch)
    for _ in range(2):
        gaps = [draw.choice([0, 1, 2, 4, 8]) for _ in range(3)]
        p = odd("200x136x264", draw.choice(DTYPES), draw.choice(matmul.OPERATION.layouts), gaps,
                16, draw.choice([0, 1]))  # fmt: skip
        config = sampled(p, device, draw.random())
        equalities = {
            "THREADS": derived.threads(config),
            "STEPS": derived.steps(config, p),
            "STAGES * Pipeline::STAGE_BYTES": config.STAGES * derived.stage_bytes(config, p),
            "THREADS / 32 * 16 * PITCH * (int)sizeof(Staged)": (derived.staged_bytes(config, p)),
            "Pipeline::CopyA::PASSES * Pipeline::CopyA::ROW_PASSES": derived.copies(config, p, 0),
            "Pipeline::CopyB::PASSES * Pipeline::CopyB::ROW_PASSES": derived.copies(config, p, 1),
        }
        main, *rest = render(MMA, config, p, arch)
        for source in (with_asserts(main, {k: int(v) for k, v in equalities.items()}), *rest):
            kernel = NvrtcCompiler().compile(source, arch)
            assert kernel.warnings == "", config
            assert kernel.resources.registers <= derived.register_limit(config)


def test_structural_reasons_are_the_static_asserts():
    texts = [
        data_dir("templates").joinpath(name).read_text()
        for name in ("matmul/mma.cu.jinja", "lib/mma_copy.cuh")
    ]
    asserted = re.findall(r'static_assert\((?:[^;"]*)"([^"]+)"\)', "".join(texts))
    space = MMA.space(problem("64x64x64", dtype="bf16"), H200)
    assert sorted(asserted) == sorted(c.reason for c in space.constraints if c.structural)


# What each structural constraint removes: changes to blocks of 128x128, warps of 64x64, tiles of
# 32 steps.
BASE = dict(
    BLOCK_M=128, WARP_M=64, BLOCK_N=128, WARP_N=64, BLOCK_K=32, REGISTER_BUFFERS=2, STAGES=2,
    SPLIT_K=1,
)  # fmt: skip
REMOVED = {
    "WARP_M divides BLOCK_M": dict(BLOCK_M=96),
    "WARP_N divides BLOCK_N": dict(BLOCK_N=96),
    "a block has at most 1024 threads": dict(BLOCK_M=256, WARP_M=16, BLOCK_N=256, WARP_N=64),
    "sums take at most 128 registers of a thread": dict(WARP_M=128),
    "instructions for 8 rows take 4 steps of K": dict(MMA_ROWS=8, MMA_K=8),
    "MMA_K divides BLOCK_K": dict(MMA_K=16, MMA_ROWS=16, BLOCK_K=8, REGISTER_BUFFERS=1),
    "threads fill whole rows of both tiles": dict(
        BLOCK_M=96, WARP_M=32, BLOCK_N=256, WARP_N=128, REGISTER_BUFFERS=1
    ),
    "a thread makes at most 32 copies to each tile": dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64),
    "two sets of fragments take an even number of steps": dict(BLOCK_K=16),
    "MIN_BLOCKS above 1 leaves a thread fewer than 256 registers": dict(MIN_BLOCKS=2),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("reason", REMOVED)
def test_what_a_structural_constraint_removes_trips_its_static_assert(reason):
    dtype = "fp64" if "MMA_" in str(REMOVED[reason]) else "bf16"
    p = problem("1024x1024x1024", dtype=dtype, layout="nt")
    if "copies" in reason:
        p = odd("1024x1024x1024", "bf16", "nt")
    if "whole rows" in reason:
        p = problem("1024x1024x1024", dtype="bf16", layout="nn", ldb=1026)
    config = Config({**MMA.default(p, H200), **BASE, **REMOVED[reason]})
    assert reason in MMA.space(p, H200).violated(config)
    (source, *_) = render(MMA, config, p, "sm_90")
    with pytest.raises(CompileError) as refused:
        NvrtcCompiler().compile(source, "sm_90")
    assert reason in refused.value.log


LOOPS = [
    ("bf16", "nt", 0, {}, 255), ("fp16", "nn", 0, {}, 255), ("bf16", "tn", 0, {}, 255),
    ("bf16", "nt", 1, dict(WARP_N=32), 255),
    ("fp64", "nt", 0, dict(MMA_ROWS=16, MMA_K=8), 255),
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize(("dtype", "layout", "gap", "values", "registers"), LOOPS)
def test_the_hot_loop_multiplies(dtype, layout, gap, values, registers):
    """Nothing but instructions, loads of fragments, copies and a barrier: no fence, no spill, and
    as many products as the tile has."""
    p = odd("4096x4096x4096", dtype, layout, (gap,) * 3, None if gap else 16)
    wide = dtype == "fp64"
    tile = dict(WARP_M=32, BLOCK_N=64, WARP_N=32, BLOCK_K=16) if wide else dict(BLOCK_K=32)
    config = Config({**MMA.default(p, H200), **BASE, "STAGES": 3, **tile, **values})
    assert not MMA.space(p, H200).violated(config)
    (source,) = render(MMA, config, p, "sm_90")
    kernel = NvrtcCompiler().compile(source, "sm_90")
    assert kernel.resources.registers <= registers
    assert kernel.resources.spill_store_bytes == 0
    loop = facts(disassemble(kernel.cubin)).hottest
    counts, kind = loop.counts, "DMMA" if wide else "HMMA"
    products = config.WARP_M * config.WARP_N * config.BLOCK_K
    assert counts[kind] == products // (config.MMA_ROWS * 8 * config.MMA_K)
    fragments = (config.WARP_M + config.WARP_N) // 16 * config.BLOCK_K
    loads = counts["LDS.128"] // 4 if wide else counts["LDSM"]
    assert loads == fragments // 16
    assert counts["BAR"] == 1
    for name in counts:
        assert not name.startswith(("LDL", "STL", "LD.", "ST.", "MEMBAR", "ERRBAR", "CCTL")), name

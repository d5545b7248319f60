# SPDX-License-Identifier: Apache-2.0
"""matmul wgmma: space, default, plan and limits; what is compiled; the inner loop.

Only a GPU runs it: see gpu/test_cases_gpu.py.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import usual

from tunegen.codegen import render
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble, facts, lint
from tunegen.errors import CompileError
from tunegen.kernels import matmul
from tunegen.kernels.matmul_wgmma import SPEC, derived
from tunegen.model import Config
from tunegen.perfmodel import default_chip, predict_us
from tunegen.resources import data_dir

H200 = default_chip("sm_90")
problem = functools.partial(matmul.OPERATION.problem, dtype="bf16", layout="nt")
aligned = st.integers(1, 600).map(lambda eights: 8 * eights)


@functools.cache
def table_of(p):
    return SPEC.space(p, H200).enumerate()


def sampled(p, count, seed=0):
    table = table_of(p)
    draw = random.Random(f"{seed} {p}")
    return [table.config(row) for row in draw.sample(range(len(table)), count)]


@settings(max_examples=25, deadline=None)
@given(
    aligned, aligned, aligned, st.integers(1, 3),
    st.sampled_from(matmul.OPERATION.layouts), st.sampled_from(["bf16", "fp16"]),
)  # fmt: skip
def test_default_is_valid_and_its_plan_binds(m, n, k, batch, layout, dtype):
    p = problem((batch, m, n, k), layout=layout, dtype=dtype)
    config = SPEC.default(p, H200)
    assert SPEC.space(p, H200).violated(config) == ()
    plan = SPEC.bound_plan(config, p, H200)
    main = plan.launches[0]
    assert main.grid[0] <= H200.sm_count
    assert main.grid[0] % derived.cluster(config) == 0
    assert main.shared_bytes <= H200.shared_bytes_per_block
    for limit in SPEC.limits(config, p):
        assert limit.holds(p.names), limit


@pytest.mark.parametrize(
    ("p", "word"),
    [
        (problem((64, 64, 0)), "copy engine"),
        (problem((64, 64, 63)), "lda=63"),
        (problem((64, 63, 64), layout="nn"), "ldb=63"),
        (problem((64, 64, 64), align=8), "align=8"),
        (problem((64, 64, 64), dtype="fp32"), "fp32"),
    ],
)
def test_what_the_copy_engine_cannot_take_is_refused(p, word):
    assert word in SPEC.refuses(p, H200)


def test_other_architectures_are_refused():
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert "sm_90a" in SPEC.refuses(problem(), default_chip(arch))


def test_odd_rows_of_c_are_stored_by_threads():
    p = problem((64, 65, 64))
    config = SPEC.default(p, H200)
    (main, *_) = SPEC.kernels(config, p)
    assert config.SPLIT_K > 1 or main.constants["TMA_STORE"] == 0
    assert [limit for limit in SPEC.limits(config, p) if limit.quantity == "ldc"] == []


def test_larger_tiles_and_shared_operands_move_fewer_bytes():
    p = problem((8192, 8192, 8192))
    config = SPEC.default(p, H200)

    def moved(**values):
        changed = Config({**config, **values})
        return SPEC.work(changed, p, H200).l2_bytes

    assert moved(CLUSTER_M=2) < moved() < moved(BLOCK_N=128) < moved(BLOCK_N=64)
    assert predict_us(SPEC.work(config, p, H200), H200) > 2 * 8192**3 / 990e12 * 1e6


@functools.cache
def compiled(p, config):
    return [
        NvrtcCompiler().compile(s, SPEC.target("sm_90")) for s in render(SPEC, config, p, "sm_90")
    ]


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("layout", usual(matmul.OPERATION.layouts, "nt"))
def test_valid_configs_compile_clean_and_loop_over_products_alone(layout):
    p = problem((1000, 1000, 1000), layout=layout, beta=1)
    for config in sampled(p, 3):
        kernel = compiled(p, config)[0]
        if kernel.rejection:
            assert "spills" in kernel.rejection
            continue
        assert kernel.warnings == "", config
        found = facts(disassemble(kernel.cubin))
        assert lint(found) == [], config
        assert found.hottest.counts["HGMMA"] >= config.BLOCK_K // 16, config


def derives(config, p):
    """Compile a kernel that asserts what Python derives for it."""
    source = render(SPEC, config, p, "sm_90")[0]
    used = "STAGES * (LEFT_BYTES + RIGHT_BYTES + 16) + CONSUMERS * (STORE_BYTES + 16)"
    equal = {
        "THREADS": derived.threads(config),
        "LEFT_ROWS": derived.left_rows(config),
        "STORE_BYTES": derived.staged_bytes(config, p),
        f"{used} + INBOX_BYTES + (STREAM_K ? 32 : 0)": derived.shared_bytes(config, p),
        "MMA_ROWS * MMA_N / 2": derived.sums(config),
    }
    if config.STREAM_K:
        equal["sizeof(Partials::slots[0]) * Partials::SLOT"] = derived.consumer_bytes(config)
        equal["sizeof(Range) <= 32"] = 1
    asserts = "".join(f'static_assert({a} == {int(b)}, "{a}");\n' for a, b in equal.items())
    with_asserts = type(source)(source.name, source.entry, source.text + asserts, "")
    NvrtcCompiler().compile(with_asserts, SPEC.target("sm_90"))


@pytest.mark.nvrtc
@pytest.mark.parametrize("slices", [1, 2])
def test_the_compiler_derives_what_python_does(slices):
    p = problem((256, 256, 4096), layout="tn")
    config = next(c for c in sampled(p, 40) if slices == c.SPLIT_K)
    derives(config, p)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "changes",
    [
        dict(STREAM_K=1),
        dict(STREAM_K=2, PINGPONG=1, BLOCK_N=128),
        dict(BLOCK_N=176, STORE_PARTS=3),
        dict(BLOCK_N=176, STORE_PARTS=3, STREAM_K=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("ldc", [4096, 4097])
def test_the_compiler_derives_what_python_does_of_shared_steps_and_uneven_parts(changes, ldc):
    p = problem((4096, 4096, 4096), ldc=ldc)
    config = Config({**SPEC.default(p, H200), **changes})
    assert SPEC.space(p, H200).violated(config) == ()
    derives(config, p)


@pytest.mark.parametrize(("parts", "columns"), [(1, 176), (2, 96), (3, 64), (4, 48)])
def test_parts_are_as_wide_as_they_must_be_and_boxes_divide_all_of_them(parts, columns):
    p = problem((4096, 4096, 4096))
    config = Config({**SPEC.default(p, H200), "BLOCK_N": 176, "STORE_PARTS": parts})
    widths = [min(columns, 176 - begin) for begin in range(0, 176, columns)]
    assert len(widths) == parts
    assert derived.store_columns(config) == columns
    box = derived.box_columns(config)
    assert box == max(b for b in (16, 32, 64) if not any(width % b for width in widths))


# --- steps of K that all blocks share ------------------------------------------------------------


def test_a_part_of_a_card_still_runs_a_cluster():
    """With fewer multiprocessors than a cluster and those spared beside it, too."""
    p = problem((64, 4096, 4096))
    config = Config({**SPEC.default(p, H200), "CLUSTER_K": 8, "SPLIT_K": 1, "SPARE_SMS": 12})
    part = dataclasses.replace(H200, sm_count=16)
    assert SPEC.bound_plan(config, p, part).launches[0].grid[0] == 8


def streamed(p, **changes):
    return Config({**SPEC.default(p, H200), "STREAM_K": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "flags"),
    # A flag of four bytes for each consumer of a tile on each of 132 multiprocessors.
    [({}, 2 * 132), (dict(PINGPONG=1, BLOCK_N=128), 132), (dict(SPARE_SMS=4), 2 * 132)],
)
def test_flags_come_first_and_slots_behind_them(changes, flags):
    p = problem((4096, 4096, 4096))
    config = streamed(p, **changes)
    plan = SPEC.bound_plan(config, p, H200)
    (main,) = plan.launches
    offsets = {a.name: a.value for a in main.arguments if a.type == "workspace"}
    assert list(offsets) == ["flags", "slots"]
    assert offsets["flags"] == 0
    assert offsets["slots"] == plan.zeroed
    assert plan.zeroed % 256 == 0
    assert 4 * flags <= plan.zeroed < 4 * flags + 256
    consumers = 1 if config.PINGPONG else 2
    slot = 4 * config.BLOCK_M * config.BLOCK_N // consumers
    assert plan.workspace_bytes - plan.zeroed == flags * slot
    assert (plan.workspace_init, plan.zeroed_bytes) == ("zero", plan.zeroed)
    names = [a.name for a in main.arguments]
    assert names.index("flags") + 1 == names.index("slots")


@settings(max_examples=20, deadline=None)
@given(aligned, aligned, aligned, st.integers(1, 3))
def test_what_is_zeroed_depends_on_the_device_alone(m, n, k, batch):
    """A workspace serves calls of all sizes: sums of one must not lie where another has flags."""
    p = problem((4096, 4096, 4096))
    config = streamed(p)
    plans = [SPEC.bound_plan(config, q, H200) for q in (p, problem((batch, m, n, k)))]
    assert len({(plan.zeroed, plan.workspace_bytes) for plan in plans}) == 1
    half = dataclasses.replace(H200, sm_count=H200.sm_count // 2)
    assert SPEC.bound_plan(config, p, half).zeroed < plans[0].zeroed


@pytest.mark.parametrize(
    ("sizes", "changes", "blocks"),
    [
        ((4096, 4096, 4096), {}, 132),
        ((4096, 4096, 4096), dict(CLUSTER_M=2), 132),
        ((4096, 4096, 4096), dict(SPARE_SMS=4), 128),
        ((128, 512, 4096), {}, 128),  # 2 tiles of 64 blocks of K
        ((128, 512, 4096), dict(CLUSTER_N=2), 128),  # a cluster of tiles
        ((128, 256, 640), {}, 10),
        ((128, 256, 8), {}, 1),
    ],
)
def test_blocks_are_no_more_than_blocks_of_k(sizes, changes, blocks):
    config = streamed(problem((4096, 4096, 4096)), **changes)
    (main,) = SPEC.bound_plan(config, problem(sizes), H200).launches
    assert main.grid == (blocks, 1, 1)


def test_structural_reasons_are_the_static_asserts():
    text = data_dir("templates").joinpath("matmul", "wgmma.cu.jinja").read_text()
    asserted = re.findall(r'static_assert\((?:[^;"]*)"([^"]+)"\)', text)
    space = SPEC.space(problem(), H200)
    assert sorted(asserted) == sorted(c.reason for c in space.constraints if c.structural)


# What a structural constraint removes: changes to the default of 4096^3, which has 128 x 256
# tiles, two consumers, four stages and two parts.
REMOVED = {
    "each consumer of a tile has whole blocks of 64 rows of the left operand": dict(BLOCK_M=64),
    "two consumers take turns": dict(PINGPONG=1, CONSUMERS=1, PRODUCER_REGISTERS=24),
    "sums fit the registers that a consumer has": dict(BLOCK_M=256, STAGES=2, STORE_PARTS=4),
    "sums are staged in parts of whole 16 columns, the last of them may be narrower": dict(
        SWAP_OPERANDS=1, BLOCK_M=256, BLOCK_N=128, STORE_PARTS=3
    ),
    "tiles whose steps of K all blocks share have no other slices": dict(
        STREAM_K=1, SPLIT_K=2, STORE_PARTS=1
    ),
    "three consumers leave a producer 24 registers, one needs no change": dict(
        CONSUMERS=3, BLOCK_M=192, BLOCK_N=96, STORE_PARTS=1
    ),
    "a cluster shares an operand among 2 blocks, or K among 2, 4 or 8": dict(
        CLUSTER_M=2, CLUSTER_N=2
    ),
    "slices of K, and results of four bytes, are stored from registers, in one part": dict(
        SPLIT_K=2
    ),
    "blocks that share an operand bring whole groups of 8 rows": None,  # 16s are always whole
    "stages and staged sums fit shared memory": dict(STAGES=5),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("reason", [reason for reason, change in REMOVED.items() if change])
def test_what_a_structural_constraint_removes_does_not_compile(reason):
    p = problem((4096, 4096, 4096))
    config = Config({**SPEC.default(p, H200), **REMOVED[reason]})
    assert reason in SPEC.space(p, H200).violated(config)
    with pytest.raises(CompileError) as caught:
        compiled(p, config)
    assert reason in str(caught.value.log)


def test_every_structural_constraint_is_tried():
    space = SPEC.space(problem(), H200)
    assert set(REMOVED) == {c.reason for c in space.constraints if c.structural}

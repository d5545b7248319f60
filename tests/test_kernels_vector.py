# SPDX-License-Identifier: Apache-2.0
"""fill, copy, add and axpy: plans, counts, what is compiled, and every address and element."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import emulator
import numpy as np
import pytest
from emulator.numbers import STORED
from hypothesis import assume, given
from hypothesis import strategies as st
from tiers import usual

from tunegen import kernels
from tunegen.codegen import render
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import code_digest, disassemble
from tunegen.errors import PlanError
from tunegen.model import DTYPE_BYTES, GRID_LIMITS, SM_COUNT, Config, Sizes, evaluate
from tunegen.perfmodel import default_chip
from tunegen.perfmodel.occupancy import occupancy

LOADS = {"fill": 0, "copy": 1, "add": 2, "axpy": 2}
SPECS = {name: kernels.specs_of(name, only="vector")[0] for name in LOADS}
H200 = default_chip("sm_90")
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")

# The vector that was reported not to work elsewhere: more elements than 31 bits count.
LARGE = 3_270_680_000

operations = st.sampled_from(sorted(SPECS))
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


def problem_of(name, size, dtype="fp32"):
    return SPECS[name].operation.problem((size,), dtype=dtype)


def table_of(name, problem, device=H200):
    return SPECS[name].space(problem, device).enumerate()


def configs(name, problem, count, device=H200, seed=0):
    """A fixed sample of the valid configurations."""
    table = table_of(name, problem, device)
    rows = random.Random(f"{seed} {name} {problem.dtype} {device.arch}").sample(
        range(len(table)), count
    )
    return [table.config(row) for row in rows]


def changed(name, problem, **values):
    """The default configuration with other values; they have to be valid."""
    config = Config({**SPECS[name].default(problem, H200), **values})
    assert not SPECS[name].space(problem, H200).violated(config)
    return config


def tile_of(config, dtype):
    return config.THREADS * config.UNROLL * config.VECTOR_BYTES // DTYPE_BYTES[dtype]


# --- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_an_empty_vector_is_not_launched(name):
    problem = problem_of(name, 0)
    assert SPECS[name].default(problem, H200) in list(table_of(name, problem))
    for config in configs(name, problem, 20):
        assert SPECS[name].bound_plan(config, problem, H200).launches == ()


@given(operations, dtypes, st.integers(1, 2**36), st.integers(1, 200), st.randoms())
def test_every_tile_has_its_block(name, dtype, size, sm_count, rng):
    """One block a tile, or the persistent blocks where those are fewer; formulas and numbers say
    the same."""
    spec, problem = SPECS[name], problem_of(name, size, dtype)
    device = dataclasses.replace(H200, sm_count=sm_count)
    values = {p.name: rng.choice(p.values) for p in spec.space(problem, device).parameters}
    config = spec.space(problem, device).config(values)
    assume(values["VECTOR_BYTES"] >= problem.element_bytes)
    tile = tile_of(config, dtype)
    tiles = next(count for count in (size // tile, size // tile + 1) if count * tile >= size)
    (launch,) = spec.bound_plan(config, problem, device).launches
    assert launch.grid == (
        min(tiles, config.BLOCKS_PER_SM * sm_count) if config.BLOCKS_PER_SM else tiles, 1, 1
    )  # fmt: skip
    assert launch.block == (config.THREADS, 1, 1)
    numbers = spec.plan(config, problem, Sizes({**problem.names, SM_COUNT: sm_count}))
    assert numbers.launches == (launch,)
    (formulas,) = spec.symbolic_plan(config, problem).launches
    names = {"N": size, SM_COUNT: sm_count}
    assert tuple(evaluate(extent, names) for extent in formulas.grid) == launch.grid


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_more_elements_than_31_bits_fit_the_grid(name, dtype):
    problem = problem_of(name, LARGE, dtype)
    for config in configs(name, problem, 50):
        (launch,) = SPECS[name].bound_plan(config, problem, H200).launches
        assert all(map(int.__le__, launch.grid, GRID_LIMITS))
        assert {a.type for a in launch.arguments if a.name == "n"} == {"int64"}


@pytest.mark.parametrize("name", SPECS)
def test_the_limit_is_where_the_grid_ends(name):
    spec = SPECS[name]
    config = changed(
        name, problem_of(name, 2**24), THREADS=64, VECTOR_BYTES=4, UNROLL=1, BLOCKS_PER_SM=0
    )
    (limit,) = spec.limits(config, problem_of(name, 1))
    last, beyond = problem_of(name, limit.value), problem_of(name, limit.value + 1)
    assert limit.holds(last.names)
    assert not limit.holds(beyond.names)
    assert not spec.space(last, H200).violated(config)
    assert spec.space(beyond, H200).violated(config) == ("tiles are counted in 31 bits",)
    assert spec.bound_plan(config, last, H200).launches[0].grid[0] == GRID_LIMITS[0]
    with pytest.raises(PlanError):
        spec.bound_plan(config, beyond, H200)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_is_valid(name, arch):
    """Wherever any configuration is, up to where the spec refuses."""
    spec, device = SPECS[name], default_chip(arch)
    for dtype in DTYPE_BYTES:
        for size in (0, 1, 1000, LARGE, 2**40):
            problem = problem_of(name, size, dtype)
            assert spec.refuses(problem, device) == ""
            default = spec.default(problem, device)
            assert spec.space(problem, device).config(default) == default
            assert spec.space(problem, device).violated(default) == ()
        assert spec.refuses(problem_of(name, 2**59, dtype), device)


@pytest.mark.parametrize("arch", ARCHS)
def test_unused_shared_memory_leaves_fewer_threads_and_half_of_all(arch):
    """By the shared memory of the launch; registers, of which there are few, left aside."""
    device, problem = default_chip(arch), problem_of("copy", 2**24)
    table = table_of("copy", problem, device)
    columns = table.columns()
    taken = np.flatnonzero(columns.UNUSED_SHARED_KIB)
    seen = set()
    for row in taken:
        config = table.config(int(row))
        (launch,) = SPECS["copy"].bound_plan(config, problem, device).launches
        case = launch.shared_bytes, config.THREADS
        if case in seen:
            continue
        seen.add(case)
        assert launch.shared_bytes == config.UNUSED_SHARED_KIB * 1024
        assert launch.shared_bytes <= device.shared_bytes_per_block
        with_it, without = (
            occupancy(device, config.THREADS, 16, memory).warps_per_sm * 32
            for memory in (launch.shared_bytes, 0)
        )
        assert device.threads_per_sm / 2 <= with_it < without
    assert seen
    assert set(columns.BLOCKS_PER_SM[taken]) == {0}


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_columns_count_what_single_configurations_do(name, dtype):
    spec, problem = SPECS[name], problem_of(name, 3 * 2**20 + 5, dtype)
    table = table_of(name, problem)
    rows = np.array(random.Random(0).sample(range(len(table)), 50))
    columns = spec.work(table.columns(rows), problem, H200)
    for position, row in enumerate(rows):
        config = table.config(int(row))
        one = spec.work(config, problem, H200)
        for field in dataclasses.fields(one):
            column = np.broadcast_to(getattr(columns, field.name), len(rows))
            assert column[position] == getattr(one, field.name), field.name
        (launch,) = spec.bound_plan(config, problem, H200).launches
        assert one.blocks == launch.grid[0]
        assert one.threads == launch.block[0]


@pytest.mark.parametrize(("name", "passes", "flops"), [
    ("fill", 1, 0), ("copy", 2, 0), ("add", 3, 1), ("axpy", 3, 2),
])  # fmt: skip
def test_traffic_and_arithmetic(name, passes, flops):
    spec, problem = SPECS[name], problem_of(name, 10**6, "bf16")
    work = spec.work(spec.default(problem, H200), problem, H200)
    assert work.dram_bytes == work.l2_bytes == passes * 2 * 10**6
    assert spec.operation.flops(problem) == flops * 10**6
    # Tail waste apart, a multiply-add an element, or an addition.
    assert bool(flops) == (10**6 <= work.blocks * work.fma < 1.01 * 10**6)


def test_references():
    x, y = np.array([1.0, -2.0, np.inf]), np.array([10.0, 20.0, 30.0])
    operands = {"x": x, "y": y}
    wanted = {"fill": [3, 3, 3], "copy": x, "add": [11, 18, np.inf], "axpy": [13, 14, np.inf]}
    for name, spec in SPECS.items():
        found = spec.operation.reference(problem_of(name, 3), operands, {"a": 3.0, "value": 3.0})
        (output,) = found.values()
        np.testing.assert_array_equal(output, wanted[name])


# --- what is compiled ----------------------------------------------------------------------------


def compiled(name, config, problem, arch):
    (source,) = render(SPECS[name], config, problem, arch)
    return NvrtcCompiler().compile(source, SPECS[name].target(arch))


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", usual(ARCHS, "sm_90"))
def test_a_sample_compiles_cleanly(name, arch):
    device = default_chip(arch)
    for dtype in random.Random(f"{name} {arch}").sample(sorted(DTYPE_BYTES), 2):
        problem = problem_of(name, 2**28, dtype)
        (config,) = configs(name, problem, 1, device)
        kernel = compiled(name, config, problem, arch)
        assert kernel.warnings == "", (dtype, config)
        assert kernel.rejection == "", (dtype, config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_no_two_policies_are_the_same_code(arch):
    """What ptxas assembles to the same instructions would be measured twice."""
    problem, device = problem_of("copy", 2**28), default_chip(arch)
    space = SPECS["copy"].space(problem, device)
    values = {parameter.name: parameter.values for parameter in space.parameters}
    base = {**SPECS["copy"].default(problem, device), "UNROLL": 1, "VECTOR_BYTES": 4}
    seen = {}
    for load, prefetch, store in itertools.product(
        values["LOAD_POLICY"], values["L2_PREFETCH_BYTES"], values["STORE_POLICY"]
    ):
        policies = {
            "LOAD_POLICY": load, "L2_PREFETCH_BYTES": prefetch, "STORE_POLICY": store,
        }  # fmt: skip
        config = Config({**base, **policies})
        # Either side alone: loads and stores do not share an instruction.
        if space.violated(config) or (store and (load or prefetch)):
            continue
        digest = code_digest(compiled("copy", config, problem, arch).cubin)
        assert digest not in seen, (policies, seen[digest])
        seen[digest] = policies
    assert len(seen) >= 8


@pytest.mark.nvrtc
@pytest.mark.parametrize("policy", [0, 1, 2, 3])
def test_what_is_written_is_never_loaded_non_coherently(policy):
    """axpy reads x in any way, y only in ways that see the kernel's own writes."""
    problem = problem_of("axpy", 2**24)
    config = changed("axpy", problem, LOAD_POLICY=policy)
    ptx = compiled("axpy", config, problem, "sm_90").ptx.decode()
    loads = re.findall(r"ld\.global\S*", ptx)
    non_coherent = [load for load in loads if ".nc" in load]
    assert len(non_coherent) == (len(loads) // 2 if policy in (1, 2) else 0)
    assert loads


ARITHMETIC = {"FADD", "FMUL", "FFMA", "F2FP", "HADD2", "HFMA2", "PRMT"}
INTEGER = {
    "IADD3",
    "IMAD",
    "ISETP",
    "LEA",
    "LOP3",
    "MOV",
    "SEL",
    "SHF",
    "UIADD3",
    "UIMAD",
    "ULOP3",
}


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "blocks_per_sm"), [("fp32", 0), ("bf16", 2)])
def test_all_loads_of_a_tile_are_in_flight_at_once(name, dtype, blocks_per_sm):
    """On a full tile no access has a predicate, every load comes before the first arithmetic, and
    little else is between them."""
    problem = problem_of(name, 2**28, dtype)
    config = changed(name, problem, BLOCKS_PER_SM=blocks_per_sm, UNUSED_SHARED_KIB=0)
    listing = disassemble(compiled(name, config, problem, "sm_90").cubin)
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d\s+)?(\S+)", listing, re.MULTILINE)
    # The full tile stands before the rest, whose accesses are guarded.
    wide = [
        (place, opcode[:3])
        for place, (guard, opcode) in enumerate(code)
        if re.match(r"(?:LDG|STG)\S*\.128", opcode) and not guard
    ][: (LOADS[name] + 1) * config.UNROLL]
    loads = [place for place, kind in wide if kind == "LDG"]
    stores = [place for place, kind in wide if kind == "STG"]
    assert len(loads) == LOADS[name] * config.UNROLL
    assert len(stores) == config.UNROLL
    opcodes = [opcode.split(".")[0] for _, opcode in code]
    if loads:
        assert loads[-1] < stores[0]
        assert not ARITHMETIC & set(opcodes[loads[0] : loads[-1]])
    if dtype == "fp32":  # 16-bit elements are widened by integer instructions
        between = opcodes[wide[0][0] : wide[-1][0]]
        assert sum(opcode in INTEGER for opcode in between) <= 2 * config.UNROLL


# --- every address and element -------------------------------------------------------------------

SIZES = (0, 1, 31, 33, 1000, 4097)
FEW_SMS = dataclasses.replace(default_chip("sm_100"), sm_count=2)


def residues(name, dtype, count, rng):
    """Base addresses modulo the widest vector: all alike, then any mixture of them."""
    steps = range(0, 32, DTYPE_BYTES[dtype])
    names = [array.name for array in SPECS[name].operation.arrays(problem_of(name, 1, dtype))]
    alike = [dict.fromkeys(names, step) for step in steps]
    return [
        *rng.sample(alike, min(len(alike), count)),
        *({operand: rng.choice(steps) for operand in names} for _ in range(count)),
    ]


@pytest.mark.emulator
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", usual(DTYPE_BYTES, "fp32", "bf16"))
def test_every_size_at_every_misalignment(name, dtype):
    rng = random.Random(f"{name} {dtype}")
    persistent = (list(SPECS).index(name) + list(DTYPE_BYTES).index(dtype)) % 2 == 0
    drawn = configs(name, problem_of(name, 2**20 + 1, dtype), 50, FEW_SMS)
    config = next(config for config in drawn if bool(config.BLOCKS_PER_SM) == persistent)
    tile = tile_of(config, dtype)
    # Around whole tiles, and several of them for each block of a persistent grid.
    edges = [tiles * tile + rng.randint(-20, 20) for tiles in (1, 2, 6)]
    for size in (*SIZES, *(edge for edge in edges if edge < 30_000)):
        case = emulator.Case(SPECS[name], config, problem_of(name, size, dtype), FEW_SMS)
        for seed, residue in enumerate(residues(name, dtype, 6, rng)):
            emulator.check(case, seed, residues=residue, integers=seed % 2 == 0)


@pytest.mark.emulator
@pytest.mark.parametrize("name", SPECS)
def test_a_million_elements_and_one(name):
    config = changed(name, problem_of(name, 2**20 + 1), BLOCKS_PER_SM=1)
    for residue in (0, 12):
        arrays = SPECS[name].operation.arrays(problem_of(name, 1))
        case = emulator.Case(SPECS[name], config, problem_of(name, 2**20 + 1), FEW_SMS)
        emulator.check(case, residues=dict.fromkeys((a.name for a in arrays), residue))


def run(name, dtype, operands, residue=0, **scalars):
    """The output of one call with the default configuration."""
    size = len(next(iter(operands.values())))
    problem = problem_of(name, size, dtype)
    spec = SPECS[name]
    case = emulator.Case(spec, spec.default(problem, H200), problem, H200)
    shift = {array.name: residue for array in spec.operation.arrays(problem)}
    (output,) = emulator.run(case, operands, scalars, residues=shift).values()
    return output


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_copy_keeps_every_bit(dtype):
    """NaN payloads and signs of zeros too; a signalling NaN stays one."""
    width = DTYPE_BYTES[dtype]
    bits = np.random.default_rng(0).integers(0, 256, 5000 * width, dtype=np.uint8)
    words = bits.view(f"u{width}").copy()
    exponent = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000, "fp64": 0x7FF0 << 48}[dtype]
    words[:3] = [exponent | 1, exponent, 1 << (8 * width - 1)]
    stored = words.view(STORED[dtype])
    found = run("copy", dtype, {"x": stored}, residue=width)
    np.testing.assert_array_equal(found.view(words.dtype), words)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", usual(DTYPE_BYTES, "fp32", "bf16"))
def test_special_values_go_through(dtype):
    """0 * Inf is NaN, also where a is 0; NaN stays NaN; overflow is infinite."""
    x = emulator.store(np.array([np.inf, np.nan, 1.0, -0.0]), dtype)
    y = emulator.store(np.array([1.0, 1.0, np.nan, -0.0]), dtype)
    found = emulator.load(run("axpy", dtype, {"x": x, "y": y}, a=0.0), dtype)
    assert np.isnan(found).tolist() == [True, True, True, False]
    assert found[3] == 0
    largest = {"fp16": 65504.0, "bf16": 3.3895e38, "fp32": 3.4028e38, "fp64": 1.797e308}[dtype]
    x = emulator.store(np.array([np.inf, np.inf, np.nan, largest]), dtype)
    y = emulator.store(np.array([np.inf, -np.inf, 1.0, largest]), dtype)
    found = emulator.load(run("add", dtype, {"x": x, "y": y}), dtype)
    assert found[0] == np.inf
    assert np.isnan(found[1])
    assert np.isnan(found[2])
    assert found[3] == np.inf


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_arithmetic_rounds_once(dtype):
    """a x + y is formed in fp32: the product is not rounded to 16 bits on the way."""
    random_ = np.random.default_rng(0)
    x = emulator.store(random_.standard_normal(4000), dtype)
    wide = emulator.load(x, dtype)
    y = emulator.store(-3.0 * wide, dtype)  # cancels all but the rounding of y
    found = run("axpy", dtype, {"x": x, "y": y}, a=3.0)
    wanted = emulator.store(3.0 * wide + emulator.load(y, dtype), dtype)
    np.testing.assert_array_equal(found, wanted)

# SPDX-License-Identifier: Apache-2.0
"""Every registered kernel on the CPU: tails, layouts, odd leading dimensions, misaligned bases,
empty sums, batches and special values, with default and with sampled configurations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TypeVar

import emulator
import numpy as np
import pytest
from emulator import Case
from tiers import usual

from tunegen import kernels
from tunegen.kernels import matmul_naive
from tunegen.model import (
    Config,
    DeviceClass,
    KernelSpec,
    LaunchPlan,
    Operation,
    Problem,
)
from tunegen.perfmodel.chips import default_chip

pytestmark = pytest.mark.emulator

# Few multiprocessors, so that persistent blocks have several tiles each. The oldest capability,
# and the first ones with asynchronous copies and with vectors of 32 bytes.
DEVICES = tuple(
    dataclasses.replace(default_chip(arch), sm_count=8) for arch in ("sm_75", "sm_80", "sm_100")
)

# Sizes and how much longer than its rows each leading dimension is.
MATMULS = (
    ("130x67x19", 0),
    ("7x9x520", 0),
    ("2x72x40x264", 8),
    ("37x29x33", 3),
    ("64x128x96", 0),
    ("5x259x64", 8),
    ("3x17x13x7", 1),
    ("33x65x31", 2),
    ("1x1x1", 0),
    ("70x34x1", 0),
    ("9x11x0", 0),
)
VECTORS = (40003, 32768, 4099, 1000, 33, 31, 1, 0)

# The other specs have files of their own; wgmma runs on a GPU only.
SPECS = tuple(spec for spec in kernels.SPECS if spec.name in ("simt", "naive", "vector"))
MATMUL_SPECS = tuple(spec for spec in SPECS if spec.operation.name == "matmul")

# The usual part of the suite tries these at every edge problem, and others by samples.
USUAL_DTYPES = ("fp32", "bf16")

PARTS = 4  # of the sampled configurations, for parallel runs

T = TypeVar("T")


def problems(operation: Operation, dtype: str, layout: str, beta: int) -> list[Problem]:
    """The edge problems of an operation."""
    if operation.axes == ("N",):
        return [operation.problem((n,), dtype=dtype) for n in VECTORS]
    assert operation.name == "matmul", f"{operation.name} has no edge problems yet"
    found = []
    for sizes, gap in MATMULS:
        tight = operation.problem(sizes, dtype=dtype, layout=layout)
        leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
        # Bases are no more aligned than rows are.
        align = 16 if gap % 8 == 0 else tight.element_bytes
        found.append(
            operation.problem(sizes, dtype=dtype, layout=layout, beta=beta, align=align, **leading)
        )
    return found


def variants(operation: Operation) -> list[tuple[str, str, int]]:
    """Every dtype with every layout; beta is 0 and 1 by turns."""
    pairs = itertools.product(operation.dtypes, operation.layouts)
    return [(dtype, layout, i % 2) for i, (dtype, layout) in enumerate(pairs)]


def by_turns(operation: Operation, edges: list[T], turn: int, count: int) -> list[T]:
    """Some of the edge problems, others at every turn: a matmul is compiled anew for another
    alignment. A vector kernel is not, and sees all of them."""
    if operation.axes == ("N",):
        return edges
    first = turn * count % len(edges)
    return (edges * 2)[first : first + min(count, len(edges))]


def is_valid(case: Case) -> bool:
    if case.spec.refuses(case.problem, case.device):
        return False
    return not case.spec.space(case.problem, case.device).violated(case.config)


Sample = tuple[DeviceClass, tuple[str, str, int], Config]


@functools.cache
def sampled(spec: KernelSpec) -> list[Sample]:
    """Few samples with, together, every facet of thousands drawn from the spaces at all edges."""
    random = np.random.default_rng(0)
    pool: list[Sample] = []
    # Every third: all dtypes, layouts and both betas in eight.
    for i, variant in enumerate((variants(spec.operation) * 3)[::3][:8]):
        device = DEVICES[i % len(DEVICES)]
        edges = problems(spec.operation, *variant)
        table = spec.space(edges[i % len(edges)], device).enumerate()
        rows = random.integers(len(table), size=400)
        pool += [(device, variant, table[int(row)]) for row in rows]
    chosen = []
    missing = set().union(*map(facets, pool))
    while missing:
        best = max(pool, key=lambda entry: len(missing & facets(entry)))
        missing -= facets(best)
        chosen.append(best)
    return chosen


def facets(sample: Sample) -> set[object]:
    """What a sample shows: its device, dtype, layout, beta and each parameter's value."""
    device, variant, config = sample
    return {device.arch, *variant, *config.items()}


def residues(case: Case) -> Iterator[dict[str, int]]:
    """Base addresses that the limits let pass: all alike, and one that differs."""
    element = case.problem.element_bytes
    names = list(case.arrays)
    if any(limit.quantity in names for limit in case.spec.limits(case.config, case.problem)):
        return
    for residue in (0, element, 16, 32 - element):
        yield dict.fromkeys(names, residue)
    for name in names:
        yield {**dict.fromkeys(names, 0), name: element}


def check(case: Case) -> None:
    emulator.check(case, seed=1)
    emulator.check(case, seed=2, integers=True)
    if case.spec.operation.axes == ("N",) and case.problem.N in (33, 40003):
        for bases in residues(case):
            emulator.check(case, seed=3, residues=bases)


def is_deterministic(case: Case) -> bool:
    """Whether other orders of blocks and threads, and other addresses, give the same bits."""
    operands, scalars = emulator.inputs(case.spec, case.problem, seed=4)
    first, *others = (emulator.run(case, operands, scalars, seed=seed) for seed in (5, 6, 7))
    return all(
        np.array_equal(first[name].view(np.uint8), other[name].view(np.uint8))
        for other in others
        for name in first
    )


def spec_variants() -> Iterator[object]:
    for spec in SPECS:
        for turn, variant in enumerate(variants(spec.operation)):
            name = "-".join((name_of(spec), *filter(None, variant[:2])))
            marks = () if variant[0] in USUAL_DTYPES else pytest.mark.thorough
            yield pytest.param(spec, variant, turn, id=name, marks=marks)


def name_of(spec: KernelSpec) -> str:
    return f"{spec.operation.name}-{spec.name}"


@pytest.mark.parametrize(("spec", "variant", "turn"), list(spec_variants()))
def test_default_at_edge_problems(spec, variant, turn):
    edges = problems(spec.operation, *variant)
    for problem in by_turns(spec.operation, edges, turn, 1):
        check(Case(spec, spec.default(problem, DEVICES[1]), problem, DEVICES[1]))


@pytest.mark.parametrize("part", usual(range(PARTS), "0"))
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_sampled_configs_at_edge_problems(spec, part):
    samples = sampled(spec)[part::PARTS]
    assert samples
    for turn, (device, variant, config) in enumerate(samples):
        cases = [Case(spec, config, p, device) for p in problems(spec.operation, *variant)]
        valid = [case for case in cases if is_valid(case)]
        assert valid
        for case in by_turns(spec.operation, valid, turn, 1):
            check(case)
        assert is_deterministic(case)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_an_empty_output_launches_nothing(spec):
    operation, device = spec.operation, DEVICES[1]
    axes = {"matmul": ("B", "M", "N")}.get(operation.name, operation.axes)
    for empty in axes:
        sizes = {axis: 0 if axis == empty else 5 for axis in (*operation.axes, *axes)}
        problem = operation.problem(sizes)
        case = Case(spec, spec.default(problem, device), problem, device)
        assert spec.bound_plan(case.config, problem, device).launches == ()
        emulator.check(case)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_nan_and_infinity_come_out_where_they_must(spec, dtype):
    """At a tail, so that what is padded with zeros must not meet them: 0 * Inf is NaN."""
    operation, device = spec.operation, DEVICES[1]
    problem = operation.problem("19x21x37" if operation.name == "matmul" else "1005", dtype=dtype)
    case = Case(spec, spec.default(problem, device), problem, device)
    operands, scalars = emulator.inputs(spec, problem, seed=0)
    specials = (np.nan, np.inf, -np.inf)
    for name, stored in operands.items():
        values = emulator.load(stored, dtype)
        # One in each of the last rows, in its last column; none share a row or column.
        flat = values.reshape(-1, values.shape[-1])
        if len(flat) == 1:
            flat[0, -3:] = specials
        else:
            flat[[-1, -4, -7], [-1, -2, -3]] = specials
        operands[name] = emulator.store(values, dtype)
        if dtype == "fp32":
            bits = operands[name].view(np.uint32)
            bits[np.isnan(operands[name])] = 0x7F800001  # the first signalling NaN
    found = emulator.run(case, operands, scalars)
    wide = {name: emulator.load(values, dtype) for name, values in operands.items()}
    with np.errstate(invalid="ignore"):
        expected = operation.reference(problem, wide, scalars)
    for name, stored in found.items():
        values = emulator.load(stored, dtype)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(expected[name]))
        np.testing.assert_array_equal(np.isposinf(values), np.isposinf(expected[name]))
        np.testing.assert_array_equal(np.isneginf(values), np.isneginf(expected[name]))


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("spec", MATMUL_SPECS, ids=name_of)
def test_rows_lie_beyond_32_bit_offsets(spec, layout):
    far = 2**30 + 8
    problem = spec.operation.problem(
        "5x7x9", dtype="fp16", layout=layout, beta=1, lda=far, ldb=far, ldc=far
    )
    emulator.check(Case(spec, spec.default(problem, DEVICES[1]), problem, DEVICES[1]))


def test_naive_takes_more_matrices_than_a_grid_has_blocks_in_z():
    """The grid is cut to two, as it is to 65535 for a batch beyond that."""

    def plan(config, problem, sizes):
        (launch,) = matmul_naive.SPEC.plan(config, problem, sizes).launches
        x, y, z = launch.grid
        return LaunchPlan((dataclasses.replace(launch, grid=(x, y, f"min({z}, 2)")),))

    spec = dataclasses.replace(matmul_naive.SPEC, plan=plan)
    problem = spec.operation.problem("5x17x19x7", dtype="fp32", beta=1)
    emulator.check(Case(spec, spec.default(problem, DEVICES[0]), problem, DEVICES[0]))

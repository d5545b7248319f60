# SPDX-License-Identifier: Apache-2.0
"""Launches that begin while the one ahead of them runs: who asks for it, and that kernels wait."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tunegen import codegen, kernels, perfmodel
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble
from tunegen.disasm.sass import parse_sass
from tunegen.model import Config

MATMUL = kernels.operation("matmul")
H200 = next(chip for chip in perfmodel.CHIPS if chip.name == "NVIDIA H200")
SPECS = tuple(spec for spec in kernels.SPECS if spec.name in ("gemv", "mma", "wgmma",
                                                              "wgmma_padded"))  # fmt: skip
SIZES = ("4x512x4096", "64x640x1030", "512x4097x4099")

# Global memory by any way: what may not come before the wait. Prefetches to L2 may.
TOUCHES = ("LDG", "LD.", "STG", "ST.", "ATOM", "RED", "UTMALDG", "UTMASTG")


FETCHING = ("matmul_gemv", "matmul_wgmma")


def problems(spec):
    found = [MATMUL.problem(size, dtype="bf16", layout="nt") for size in SIZES]
    return [problem for problem in found if not spec.refuses(problem, H200)]


def configs(spec, problem, value):
    """The default and another one with slices of K, with ``value`` of the parameter."""
    space = spec.space(problem, H200)
    if value not in next(p.values for p in space.parameters if p.name == "PROGRAMMATIC_LAUNCH"):
        return []
    table = space.enumerate()
    chosen = [Config({**spec.default(problem, H200), "PROGRAMMATIC_LAUNCH": value})]
    columns = table.columns(np.arange(len(table)))
    rows = np.flatnonzero((columns.SPLIT_K == 2) & (value == columns.PROGRAMMATIC_LAUNCH))
    chosen += [table[int(row)] for row in rows[:1]]
    return [config for config in chosen if not space.violated(config)]


def before_waiting(function):
    """The instructions that some path reaches without a wait, by index."""
    seen, left = set(), [0]
    while left:
        index = left.pop()
        if index in seen or function.code[index].kind == "ACQBULK":
            continue
        seen.add(index)
        left += function.code[index].successors
    return seen


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_launch_of_a_plan_is_as_the_parameter_says(spec):
    assert problems(spec)
    for problem in problems(spec):
        for value in (0, 1):
            for config in configs(spec, problem, value):
                plan = spec.bound_plan(config, problem, H200)
                assert {launch.programmatic for launch in plan.launches} == {bool(value)}


@pytest.mark.parametrize("chip", perfmodel.CHIPS, ids=lambda chip: chip.name)
def test_only_devices_that_have_it_begin_early(chip):
    problem = MATMUL.problem(SIZES[0], dtype="bf16", layout="nt")
    for spec in SPECS:
        if spec.refuses(problem, chip):
            continue
        table = spec.space(problem, chip).enumerate()
        values = np.unique(table.columns(np.arange(len(table))).PROGRAMMATIC_LAUNCH)
        assert (values.max() > 0) == (chip.capability >= 90)
        assert (chip.capability >= 90) == spec.default(problem, chip).PROGRAMMATIC_LAUNCH


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("value", [0, 1, 2])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernels_wait_before_they_touch_memory(spec, value):
    for problem in problems(spec):
        for config in configs(spec, problem, value):
            for source in codegen.render(spec, config, problem, H200.arch):
                kernel = NvrtcCompiler().compile(source, spec.target(H200.arch))
                text = disassemble(kernel.cubin)
                (function,) = parse_sass(text)
                kinds = Counter(instruction.kind for instruction in function.code)
                assert bool(kinds["ACQBULK"]) == bool(kinds["PREEXIT"]) == bool(value)
                if value:
                    assert ".CONSTANT" not in text, "non-coherent loads move to before the wait"
                    early = {function.code[i].kind for i in before_waiting(function)}
                    assert not [kind for kind in early if kind.startswith(TOUCHES)]
                    fetches = {"UTMAPF", "CCTL"} & {kind.split(".")[0] for kind in early}
                    assert bool(fetches) == (value == 2 and kernel.name in FETCHING)

# SPDX-License-Identifier: Apache-2.0
"""Launches that begin while the one ahead of them runs: who asks for it, and that kernels wait."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
from tiers import usual

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
    """With all that an epilogue reads: C and a bias."""
    found = [
        MATMUL.problem(size, dtype="bf16", layout="nt", beta=1, bias=1, activation="relu")
        for size in SIZES
    ]
    return [problem for problem in found if not spec.refuses(problem, H200)]


@functools.cache
def table_of(spec, problem, chip=H200):
    return spec.space(problem, chip).enumerate()


def configs(spec, problem, value, chip=H200):
    """The default, and others without and with slices of K, with ``value`` of the parameter."""
    table = table_of(spec, problem, chip)
    space = table.space
    if value not in next(p.values for p in space.parameters if p.name == "PROGRAMMATIC_LAUNCH"):
        pytest.skip(f"{spec.name} has no such value")
    chosen = [Config({**spec.default(problem, chip), "PROGRAMMATIC_LAUNCH": value})]
    columns = table.columns(np.arange(len(table)))
    for slices in {1, 2} - {chosen[0].SPLIT_K}:
        like = (slices == columns.SPLIT_K) & (value == columns.PROGRAMMATIC_LAUNCH)
        chosen += [table[int(row)] for row in np.flatnonzero(like)[:1]]
    found = [config for config in chosen if not space.violated(config)]
    assert found
    return found


def compiled(spec, config, problem, arch):
    """The kernels of a config by name, each as its only function and its listing."""
    for source in codegen.render(spec, config, problem, arch):
        yield source.name, *listing(source, spec.target(arch))


@functools.cache
def listing(source, target):
    """Several configs have the same second kernel."""
    text = disassemble(NvrtcCompiler().compile(source, target).cubin)
    (function,) = parse_sass(text)
    return function, text


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
        table = table_of(spec, problem, chip)
        values = np.unique(table.columns(np.arange(len(table))).PROGRAMMATIC_LAUNCH)
        assert (values.max() > 0) == (chip.capability >= 90)
        assert (chip.capability >= 90) == spec.default(problem, chip).PROGRAMMATIC_LAUNCH


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("value", usual([0, 1, 2], "1"))
@pytest.mark.parametrize("spec", usual(SPECS, "gemv", "wgmma", name=lambda spec: spec.name))
def test_kernels_wait_before_they_touch_memory(spec, value):
    most = None if value else 1  # what is plain is looked at once
    for problem in problems(spec)[:most]:
        for config in configs(spec, problem, value)[:most]:
            for name, function, text in compiled(spec, config, problem, H200.arch):
                kinds = Counter(instruction.kind for instruction in function.code)
                assert bool(kinds["ACQBULK"]) == bool(kinds["PREEXIT"]) == bool(value)
                if value:
                    fetches = check_waiting(function, text)
                    assert fetches == (value == 2 and name in FETCHING)


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("arch", usual(["sm_100", "sm_120"], "sm_100"))
@pytest.mark.parametrize("name", ["gemv", "mma"])
def test_kernels_wait_on_later_devices(name, arch):
    spec = next(spec for spec in SPECS if spec.name == name)
    chip = perfmodel.default_chip(arch)
    problem = problems(spec)[0]
    value = 2 if name == "gemv" else 1
    config = Config({**spec.default(problem, chip), "PROGRAMMATIC_LAUNCH": value})
    for _, function, text in compiled(spec, config, problem, arch):
        assert check_waiting(function, text) == (value == 2)


def check_waiting(function, text):
    """Whether L2 fetches something before the wait; nothing else may touch memory there."""
    assert ".CONSTANT" not in text, "non-coherent loads move to before the wait"
    early = {function.code[i].kind for i in before_waiting(function)}
    assert not [kind for kind in early if kind.startswith(TOUCHES)]
    return bool({"UTMAPF", "CCTL"} & {kind.split(".")[0] for kind in early})

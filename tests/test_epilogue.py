# SPDX-License-Identifier: Apache-2.0
"""What matmul does to its sums: bias, activations and the type of C, in every spec.

wgmma runs on a GPU only: what it computes is checked there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator import Case

from tunegen import kernels
from tunegen.cli.main import run
from tunegen.codegen import regenerate, render
from tunegen.compiler import NvrtcCompiler
from tunegen.database.ranges import relate
from tunegen.disasm import code_digest, disassemble, facts, lint
from tunegen.errors import UsageError
from tunegen.kernels import matmul
from tunegen.model import ROUNDOFF, Config, KernelSource, Problem
from tunegen.perfmodel import default_chip, floor
from tunegen.runtime.arrays import View
from tunegen.runtime.program import Program
from tunegen.runtime.sizes import resolve

pytestmark = pytest.mark.thorough

OPERATION = matmul.OPERATION
problem = OPERATION.problem
H200 = default_chip("sm_90")
SMALL = dataclasses.replace(H200, sm_count=8)
PLAIN = Path(__file__).parent / "data" / "plain_sums"

EMULATED = ("naive", "simt", "gemv", "mma")
EPILOGUES = tuple(itertools.product(matmul.ACTIVATIONS, (0, 1), (0, 1)))


@pytest.fixture
def tunegen(capsys, tmp_path, monkeypatch):
    """Run a command line; gives exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def spec_named(name):
    return kernels.specs_of("matmul", only=name)[0]


# --- problems ------------------------------------------------------------------------------------


def test_choices_are_written_by_name_and_kept_by_position():
    p = problem("8x8x8", dtype="bf16", activation="gelu", output="fp32", bias=1)
    assert (p.activation, p.output, p.bias) == (2, 0, 1)
    assert (matmul.activation(p), matmul.output(p)) == ("gelu", "fp32")
    assert problem("8x8x8", dtype="bf16", **OPERATION.special(p)) == p
    assert OPERATION.special_words(p) == ("activation=gelu", "bias=1", "output=fp32")
    assert OPERATION.named(dict(p.attributes))["output"] == "fp32"
    for dtype in OPERATION.dtypes:
        plain = problem("8x8x8", dtype=dtype)
        assert matmul.output(plain) == dtype
        assert OPERATION.special(plain) == {}


def test_positions_are_those_of_the_fragment():
    text = (Path(__file__).parents[1] / "templates" / "lib" / "epilogue.cuh").read_text()
    found = {name.lower(): int(at) for name, at in re.findall(r"ACTIVATION_(\w+) = (\d)", text)}
    assert found == {name: at for at, name in enumerate(matmul.ACTIVATIONS)}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"activation": "gelo"}, "did you mean gelu"),
        ({"activation": 4}, "one of none, relu, gelu, silu"),
        ({"activation": -1}, "one of none"),
        ({"output": "fp64"}, "fp16 or bf16 or fp32, not fp64"),
        ({"output": "fp8"}, "unknown output 'fp8'"),
        ({"bias": 2}, "bias=2"),
        ({"bias": "yes"}, "bias 'yes' is not a whole number"),
        ({"dtype": "fp32", "output": "bf16"}, "the output of fp32 is fp32, not bf16"),
        ({"dtype": "fp64", "output": "fp32"}, "the output of fp64 is fp64, not fp32"),
    ],
)
def test_what_has_no_meaning_is_said(attributes, words):
    with pytest.raises(UsageError) as caught:
        problem("8x8x8", **{"dtype": "bf16", **attributes})
    assert words in str(caught.value)


def test_commands_name_what_they_are_given(tunegen):
    words = ("--arch", "sm_90", "--dtype", "bf16", "--problem", "64x64x64", "--spec", "naive")
    asked = ("--attribute", "activation=silu", "--attribute", "output=fp32")
    code, out, _ = tunegen("inspect", "matmul", *words, *asked, "--emit", "cuda")
    assert code == 0
    assert "--attribute activation=silu --attribute output=fp32" in out
    assert "ACTIVATION = 3" in out
    code, out, _ = tunegen("kernels", "matmul", *words, *asked)
    assert code == 0
    assert "64x64x64 bf16 nn activation=silu output=fp32" in out
    code, _, err = tunegen("inspect", "matmul", *words, "--attribute", "activation=tanh")
    assert code == 2
    assert "unknown activation 'tanh': known: none, relu, gelu, silu" in err


def test_the_source_says_how_to_make_it_again():
    p = problem("64x64x64", dtype="fp16", activation="relu", bias=1)
    spec = spec_named("simt")
    line = regenerate(spec, spec.default(p, H200), p, "sm_90")
    assert "--attribute activation=relu --attribute bias=1" in line


def test_a_record_from_before_stands_for_the_defaults():
    p = problem("64x64x64", dtype="bf16", beta=1)
    new = {"bias", "activation", "output"}
    old = dataclasses.replace(
        p, attributes=tuple((name, value) for name, value in p.attributes if name not in new)
    )
    assert OPERATION.complete(old) == p
    growing = OPERATION.growing_attributes(p)
    relation = relate(OPERATION, growing, old, p)
    assert relation is not None
    assert relation.same
    for other in (dict(bias=1), dict(activation="relu"), dict(output="fp32")):
        asked = problem("64x64x64", dtype="bf16", beta=1, **other)
        assert relate(OPERATION, growing, old, asked) is None


def test_edge_problems_are_of_the_same_class():
    p = problem("512x512x512", dtype="fp16", align=2, bias=1, activation="silu", output="fp32")
    edges = OPERATION.edges(p)
    for edge in edges:
        assert OPERATION.growing_attributes(edge.problem) == {"lda", "ldb", "ldc"}
        for name in ("bias", "activation", "output", "align"):
            assert getattr(edge.problem, name) == getattr(p, name)
        offsets = dict(edge.offsets)
        assert set(offsets) == {"A", "B", "C", "bias"}
        assert offsets["C"] % 4 == offsets["bias"] % 4 == 0
    assert {dict(edge.offsets)["A"] for edge in edges} == {0, 2}


def test_bytes_and_tolerance_are_those_of_the_output():
    narrow = problem("64x48x32", dtype="bf16")
    wide = problem("64x48x32", dtype="bf16", output="fp32", bias=1)
    assert OPERATION.bytes(wide) - OPERATION.bytes(narrow) == 64 * 48 * 2 + 48 * 4
    large = [
        problem("4096x4096x64", dtype="bf16", output=output, bias=bias)
        for output, bias in (("bf16", 0), ("fp32", 0), ("fp32", 1))
    ]
    times = [floor(OPERATION, p, H200).us for p in large]
    assert times == sorted(set(times))
    assert OPERATION.flops(wide) == OPERATION.flops(narrow)
    spec = spec_named("simt")
    assert spec.tolerance(narrow) > ROUNDOFF["bf16"] > 100 * spec.tolerance(wide)
    assert spec.tolerance(problem("64x48x32", activation="gelu")) > spec.tolerance(
        problem("64x48x32")
    )


def test_integers_are_exact_unless_an_activation_rounds():
    exact = {name: OPERATION.exact(problem(activation=name)) for name in matmul.ACTIVATIONS}
    assert exact == {"none": True, "relu": True, "gelu": False, "silu": False}


# --- the reference -------------------------------------------------------------------------------


def reference(values, **attributes):
    """What becomes of sums with these values."""
    p = problem((1, len(values), 1), dtype="fp64", **attributes)
    operands = {"A": np.ones((1, 1, 1)), "B": np.reshape(values, (1, 1, -1))}
    operands |= {"C": np.full((1, 1, len(values)), 5.0), "bias": np.arange(len(values))}
    return OPERATION.reference(p, operands, {"alpha": 1.0, "beta": 2.0})["C"].ravel()


def test_the_reference_computes_the_usual_functions():
    x = np.array([-2.0, -0.5, 0.0, 1.0, 3.0])
    normal = [0.5 * math.erfc(-value / math.sqrt(2)) for value in x]
    np.testing.assert_array_equal(reference(x, activation="relu"), [0, 0, 0, 1, 3])
    np.testing.assert_allclose(reference(x, activation="gelu"), x * normal, rtol=1e-14)
    np.testing.assert_allclose(
        reference(x, activation="silu"), [v / (1 + math.exp(-v)) for v in x], rtol=1e-15
    )
    np.testing.assert_array_equal(reference(x, bias=1, beta=1), x + np.arange(5) + 10)
    far = np.array([-1e4, 1e4])
    for name in matmul.ACTIVATIONS[1:]:
        np.testing.assert_array_equal(reference(far, activation=name), [0, 1e4])
        assert np.isnan(reference(np.array([np.nan]), activation=name)[0])


# --- numbers -------------------------------------------------------------------------------------

# Sizes and how much longer than its rows each leading dimension is.
EDGES = (("5x67x19", 0), ("3x8x130", 8), ("2x4x33x40", 1), ("7x40x64", 4), ("1x1x1", 0))


def outputs_of(dtype):
    return matmul.outputs(dtype)


def made(turn, dtype, output, *epilogue):
    """An edge problem with an epilogue: activation, bias and beta."""
    sizes, gap = EDGES[turn % len(EDGES)]
    layout = OPERATION.layouts[turn % 4]
    tight = problem(sizes, dtype=dtype, layout=layout)
    leading = {name: getattr(tight, name) + gap for name in ("lda", "ldb", "ldc")}
    align = 16 if gap % 8 == 0 else tight.element_bytes
    activation, bias, beta = epilogue
    return problem(
        sizes, dtype=dtype, layout=layout, align=align, activation=activation, bias=bias,
        beta=beta, output=output, **leading,
    )  # fmt: skip


def config_of(spec, p, turn):
    """The default and others by turns, slices of K among them."""
    if turn % 3 == 0:
        return spec.default(p, SMALL)
    table = spec.space(p, SMALL).enumerate()
    draw = random.Random(turn)
    rows = [draw.randrange(len(table)) for _ in range(200)]
    configs = [table.config(row) for row in rows]
    sliced = [config for config in configs if config.get("SPLIT_K", 1) > 1]
    return (sliced if turn % 3 == 1 and sliced else configs)[0]


def cases(name):
    kinds = [(dtype, output) for dtype in OPERATION.dtypes for output in outputs_of(dtype)]
    spec = spec_named(name)
    # Half of them for each spec, not the same.
    for turn, epilogue in list(enumerate(EPILOGUES))[EMULATED.index(name) % 2 :: 2]:
        dtype, output = kinds[turn % len(kinds)]
        yield turn, spec, made(turn, dtype, output, *epilogue)


@pytest.mark.emulator
@pytest.mark.parametrize("name", EMULATED)
def test_sums_become_what_the_reference_says(name):
    tried = 0
    for turn, spec, p in cases(name):
        if spec.refuses(p, SMALL):
            continue
        case = Case(spec, config_of(spec, p, turn), p, SMALL)
        emulator.check(case, seed=turn, integers=OPERATION.exact(p))
        tried += 1
    assert tried >= len(EPILOGUES) // 4


@pytest.mark.emulator
@pytest.mark.parametrize("staged", [0, 1])
@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("output", ["fp16", "bf16", "fp32"])
def test_mma_stores_every_type_either_way(output, beta, staged):
    spec = spec_named("mma")
    p = problem(
        "37x50x45", dtype="fp16", layout="nt", lda=48, ldb=48, ldc=56, output=output, beta=beta,
        bias=1, activation="silu",
    )  # fmt: skip
    config = Config({**spec.default(p, SMALL), "STAGED_STORE": staged, "SPLIT_K": 1})
    assert not spec.space(p, SMALL).violated(config)
    emulator.check(Case(spec, config, p, SMALL), seed=3)


@pytest.mark.emulator
@pytest.mark.parametrize("activation", matmul.ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_far_values_and_nan_pass_through(dtype, activation):
    """Beyond the range of the exponential, and what is no number."""
    values = np.array([-1e30, -1e4, -89.0, -1e-30, 0.0, 1e-30, 89.0, 1e30, np.inf, np.nan])
    p = problem((1, len(values), 1), dtype=dtype, activation=activation)
    spec = spec_named("naive")
    operands = {
        "A": emulator.store(np.ones((1, 1, 1)), dtype),
        "B": emulator.store(values.reshape(1, 1, -1), dtype),
    }
    case = Case(spec, spec.default(p, H200), p, H200)
    found = emulator.run(case, operands, {"alpha": 1.0})["C"].ravel()
    wanted = reference(emulator.load(operands["B"], dtype).ravel(), activation=activation)
    tiny = float(np.finfo(found.dtype).tiny)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=tiny)


# --- what is compiled ----------------------------------------------------------------------------


@functools.cache
def compiled(spec, p, config, arch="sm_90"):
    return [
        NvrtcCompiler().compile(source, spec.target(arch))
        for source in render(spec, config, p, arch)
    ]


def recorded_words(text):
    """The words of the command that generated a source."""
    (line,) = re.findall(r"^// Regenerate: (.*)$", text, re.MULTILINE)
    return line.split()


@pytest.mark.nvrtc
@pytest.mark.parametrize("path", sorted(PLAIN.glob("*.cu")), ids=lambda path: path.stem)
def test_without_an_epilogue_the_code_is_that_of_before_there_was_one(path):
    """Sources from before: what is generated today in their place has the same machine code, so
    that no record of them is worthless."""
    before = path.read_text()
    entry = re.search(r"(tunegen_\w+)\(", before)[1]
    words = recorded_words(before)
    given = dict(itertools.pairwise(words))
    p = problem(
        given["--problem"], dtype=given["--dtype"], layout=given["--layout"],
        **{n: int(v) for n, v in (w.split("=") for w in pairs(words, "--attribute"))},
    )  # fmt: skip
    config = Config({n: int(v) for n, v in (w.split("=") for w in pairs(words, "--param"))})
    spec = spec_named(given["--spec"])
    (today,) = (s for s in render(spec, config, p, "sm_90") if s.entry == entry)
    for arch in ("sm_90",) if spec.suffix else ("sm_90", "sm_120"):
        target = spec.target(arch)
        old = KernelSource(today.name, entry, before, "")
        codes = [code_digest(NvrtcCompiler().compile(s, target).cubin) for s in (old, today)]
        assert codes[0] == codes[1]


def pairs(words, option):
    return [word for before, word in itertools.pairwise(words) if before == option]


def wgmma_problem(turn, activation, bias, beta, output):
    layout = OPERATION.layouts[turn % 4]
    sizes = ((1000, 1000, 1000), (16, 1000, 2000))[turn % 2]
    return problem(
        sizes, dtype=("bf16", "fp16")[turn // 2 % 2], layout="nt" if turn % 2 else layout,
        activation=activation, bias=bias, beta=beta, output=output,
    )  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("activation", matmul.ACTIVATIONS)
def test_wgmma_compiles_clean_with_every_epilogue(activation):
    spec = spec_named("wgmma")
    kinds = list(itertools.product((0, 1), ("fp16", "bf16", "fp32")))
    for turn, (bias, output) in list(enumerate(kinds))[len(activation) % 2 :: 2]:
        p = wgmma_problem(turn, activation, bias, turn % 3 == 0, output)
        for kernel in compiled(spec, p, spec.default(p, H200)):
            assert kernel.warnings == ""
            assert kernel.rejection == ""
            if "wgmma" not in kernel.name:
                continue
            found = facts(disassemble(kernel.cubin))
            assert lint(found) == []
            assert found.hottest.counts["HGMMA"] >= 4


def test_wgmma_stores_results_of_four_bytes_from_registers():
    spec = spec_named("wgmma")
    p = problem((4096, 4096, 4096), dtype="bf16", layout="nt", output="fp32", bias=1)
    config = spec.default(p, H200)
    assert config.STORE_PARTS == 1
    (main, *_) = spec.kernels(config, p)
    assert main.constants["DIRECT_STORE"] == 1
    assert main.types == {"Output": "fp32"}
    plan = spec.bound_plan(config, p, H200)
    assert [m.name for m in plan.tensor_maps] == ["a_map", "b_map"]
    parts = Config({**config, "STORE_PARTS": 2})
    assert any("from registers" in reason for reason in spec.space(p, H200).violated(parts))
    half = problem((4096, 4096, 4096), dtype="bf16", layout="nt", output="fp16")
    maps = spec.bound_plan(spec.default(half, H200), half, H200).tensor_maps
    assert [m.dtype for m in maps] == ["bf16", "bf16", "fp16"]


@pytest.mark.parametrize("name", ["simt", "mma", "wgmma"])
def test_slices_leave_the_epilogue_to_the_kernel_that_adds_them_up(name):
    spec = spec_named(name)
    p = problem((64, 64, 8192), dtype="bf16", layout="nt", bias=1, activation="relu")
    table = spec.space(p, H200).enumerate()
    config = next(c for c in map(table.config, range(len(table))) if c.SPLIT_K == 4)
    main, reduce = spec.kernels(config, p)
    plan = spec.bound_plan(config, p, H200)
    for definition, launch, has in zip((main, reduce), plan.launches, (0, 1), strict=True):
        assert definition.constants["HAS_BIAS"] == has
        assert definition.constants["ACTIVATION"] == has
        assert ("bias" in [argument.name for argument in launch.arguments]) == has


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", EMULATED)
def test_the_others_compile_clean(name, arch):
    spec, device = spec_named(name), default_chip(arch)
    for activation, output in (("gelu", "bf16"), ("silu", "fp32")):
        p = problem(
            (8, 1000, 1000), dtype="fp16", layout="nt", bias=1, beta=1, activation=activation,
            output=output,
        )  # fmt: skip
        if spec.refuses(p, device):
            continue
        for kernel in compiled(spec, p, spec.default(p, device), arch):
            assert kernel.warnings == ""
            assert kernel.rejection == ""
            # fp32 throughout: no function is called in the precision that its name would have.
            assert kernel.resources.stack_bytes <= 64


def test_problems_are_hashed_and_compared_with_their_epilogue():
    left = problem("8x8x8", activation="relu")
    right = problem("8x8x8", activation="silu")
    assert isinstance(left, Problem)
    assert left != right
    assert len({left, right, problem("8x8x8", activation=1)}) == 2


# --- dispatch ------------------------------------------------------------------------------------


def test_a_call_gives_the_bias_as_an_operand_of_its_own():
    p = problem("64x48x32", dtype="bf16", layout="nt", bias=1, output="fp32")
    operands = OPERATION.operands(p)
    assert [(o.name, o.dtype) for o in operands] == [
        ("A", "bf16"), ("B", "bf16"), ("C", "fp32"), ("bias", "fp32"),
    ]  # fmt: skip
    assert (operands[-1].shape, operands[-1].strides) == (("N",), (1,))
    spec = spec_named("simt")
    config = spec.default(p, H200)
    program = Program(
        "matmul", operands, ("alpha", "beta"), p.names, spec.limits(config, p),
        spec.symbolic_plan(config, p), (), "B",
    )  # fmt: skip

    def given(columns):
        shapes = ((5, 32), (24, 32), (5, 24), (columns,))
        strides = ((32, 1), (32, 1), (24, 1), (1,))
        return [
            View(256, shape, stride, operand.dtype)
            for shape, stride, operand in zip(shapes, strides, operands, strict=True)
        ]

    found = resolve(program, given(24), {})
    assert (found["M"], found["N"], found["K"], found["bias"]) == (5, 24, 32, 1)
    assert program.plan.bind(found).launches
    with pytest.raises(UsageError, match="N is 25 in bias and 24 in B"):
        resolve(program, given(25), {})

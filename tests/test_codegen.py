# SPDX-License-Identifier: Apache-2.0
"""Code generation: CUDA passes through untouched, and the text says nothing of who made it."""

from __future__ import annotations

import getpass
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from taken import taken

from tunegen import codegen, kernels
from tunegen.cli.main import run
from tunegen.codegen import render, source_digest, strip_comments
from tunegen.errors import TemplateError
from tunegen.model import Config, KernelDefinition
from tunegen.perfmodel import default_chip
from tunegen.resources import data_dir

NAIVE = kernels.specs_of("matmul", only="naive")[0]
PROBLEM = NAIVE.operation.problem("64x96x128")
CONFIG = Config({"BLOCK_M": 16, "BLOCK_N": 16})


@pytest.fixture
def generate(tmp_path):
    """Render one template text with the parameters, types and constants given."""

    def make(text, *, arch="sm_90", types=None, constants=None, **parameters):
        (tmp_path / "t.cu.jinja").write_text(text)
        definition = KernelDefinition("t", "t.cu.jinja", types or {}, constants or {})
        spec = replace(NAIVE, name="t", template_root=tmp_path, kernels=lambda c, p: (definition,))
        (source,) = render(spec, Config(parameters), PROBLEM, arch)
        return source

    return make


def body(source):
    """The generated text without the banner."""
    banner, _, rest = source.text.partition("\n\n")
    assert all(line.startswith("//") for line in banner.splitlines())
    return rest


CUDA = r"""
float acc[4][4] = {{0}};
int table[2][2] = {{0, 1}, {2, 3}};
float ones[2][2] = {{1.0f}};
asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7};");
asm("{ .reg .b32 t; mov.b32 t, %laneid; }" : "=r"(lane));
#define STRINGIFY(x) {#x}
auto lambda = [=]{#pragma unroll
};
int percent = {% 3 %};  // {% if %} {{ name }} {# no remark #}
char dollar = '$', hash = '#';
"""


def test_cuda_is_not_jinja(generate):
    """Everything that Jinja's usual delimiters would eat or choke on reaches the output."""
    assert body(generate(CUDA)) == CUDA.lstrip("\n")


def test_the_three_forms_of_jinja(generate):
    source = generate(
        "/*# for the author #*/\n"
        "int kept;\n"
        "//% if WIDTH == 4\n"
        "int four;\n"
        "//% else\n"
        "int other;\n"
        "//% endif\n"
        "  //% for i in range(2)\n"
        "int width_${i} = ${WIDTH};\n"
        "  //% endfor\n",
        WIDTH=4,
    )
    assert body(source) == "int kept;\nint four;\nint width_0 = 4;\nint width_1 = 4;\n"


def test_every_parameter_and_constant_reaches_the_kernel_under_its_name(generate):
    source = generate(
        '//% include "lib/config.cuh"\nint end;\n',
        types={"Element": "fp16"},
        constants={"TRANSPOSE": 1},
        BLOCK_M=64,
        STAGES=3,
    )
    assert body(source).splitlines() == [
        "using Element = fp16;",
        "enum : int {",
        "  BLOCK_M = 64,",
        "  STAGES = 3,",
        "  TRANSPOSE = 1,",
        "};",
        "",
        "int end;",
    ]


def test_fragments_stand_apart(generate):
    """A ``//%`` line swallows the blank lines after it, so the template cannot see to it."""
    source = generate(
        "int first;\n"
        '//% include "lib/integers.cuh"\n'
        '//% include "lib/vector.cuh"\n'
        "//% if WIDTH\n"
        "int last;\n"
        "//% endif\n\n\n",
        WIDTH=4,
    )
    lines = body(source).splitlines()
    assert lines[:2] == ["int first;", ""]
    assert lines[-2:] == ["", "int last;"]
    assert body(source).count("\n\n// N elements") == 1
    assert "\n\n\n" not in source.text
    close = generate("int first;\n\n\nint last;\n", WIDTH=4)
    assert close.digest == generate("int first;\nint last;\n", WIDTH=4).digest, "no blank counts"


def test_a_template_that_is_no_text(tmp_path):
    (tmp_path / "t.cu.jinja").write_bytes(b"int a; // \xff")
    spec = replace(
        NAIVE, template_root=tmp_path, kernels=lambda c, p: (KernelDefinition("t", "t.cu.jinja"),)
    )
    with pytest.raises(TemplateError, match=r"t\.cu\.jinja"):
        render(spec, CONFIG, PROBLEM, "sm_90")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("int x = ${BLOCK_MM};\n", "BLOCK_MM"),
        ("//% if BLOCK_MM\n//% endif\n", "BLOCK_MM"),
        ("//% if\n", "t.cu.jinja"),
        ("//% for\n", "t.cu.jinja"),
        ("//% if BLOCK_M\nint open;\n", "t.cu.jinja"),
        ('//% include "lib/no_such.cuh"\n', "no_such.cuh"),
    ],
)
def test_what_does_not_render_is_an_error(generate, text, word):
    with pytest.raises(TemplateError, match=word):
        generate(text, BLOCK_M=1)


def test_a_missing_template_is_an_error():
    lost = replace(NAIVE, kernels=lambda c, p: (KernelDefinition("lost", "matmul/lost.cu.jinja"),))
    with pytest.raises(TemplateError, match=r"lost\.cu\.jinja"):
        render(lost, CONFIG, PROBLEM, "sm_90")


def test_the_banner_says_what_it_is_and_how_to_get_it_again():
    problem = NAIVE.operation.problem("2x64x96x128", dtype="bf16", layout="tn", beta=1, lda=100)
    (source,) = render(NAIVE, CONFIG, problem, "sm_80")
    lines = source.text.splitlines()
    assert lines[0].startswith("// tunegen_matmul_naive: ")
    assert "sm_80" in lines[0]
    assert "// SPDX-License-Identifier: Apache-2.0" in lines
    assert "// Config: BLOCK_M=16 BLOCK_N=16" in lines
    (command,) = (line for line in lines if line.startswith("// Regenerate: tunegen inspect"))
    words = shlex.split(command.removeprefix("// Regenerate: "))
    for option, value in (
        ("--arch", "sm_80"),
        ("--spec", "naive"),
        ("--problem", "2x64x96x128"),
        ("--dtype", "bf16"),
        ("--layout", "tn"),
        ("--attribute", "beta=1"),
        ("--attribute", "lda=100"),
        ("--param", "BLOCK_M=16"),
        ("--emit", "cuda"),
    ):
        assert (option, value) in itertools.pairwise(words)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "spec", kernels.SPECS, ids=lambda spec: f"{spec.operation.name}-{spec.name}"
)
def test_the_command_in_the_banner_prints_the_same_source(spec, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    operation, device = spec.operation, default_chip("sm_90")
    problem = taken(spec, device, operation.dtypes[-1], operation.layouts[-1])
    config = spec.default(problem, device)
    sources = render(spec, config, problem, "sm_90")
    command = re.search(r"^// Regenerate: tunegen (.*)$", sources[0].text, re.MULTILINE)
    assert run(shlex.split(command[1])) == 0
    assert capsys.readouterr().out == "".join(source.text for source in sources)


def test_the_same_input_gives_the_same_bytes_anywhere(tmp_path):
    """Another process, hash seed, working directory and place of the templates change nothing."""
    (source,) = render(NAIVE, CONFIG, PROBLEM, "sm_90")
    script = (
        "import sys; from tunegen import codegen, kernels; from tunegen.model import Config\n"
        "spec = kernels.specs_of('matmul', only='naive')[0]\n"
        "problem = spec.operation.problem('64x96x128')\n"
        "config = Config({'BLOCK_M': 16, 'BLOCK_N': 16})\n"
        "sys.stdout.write(codegen.render(spec, config, problem, 'sm_90')[0].text)\n"
    )
    root = str(Path(codegen.__file__).resolve().parents[1])
    again = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Pacific/Apia", "PYTHONPATH": root},
    )  # fmt: skip
    assert again.stdout == source.text

    for path in data_dir("templates").rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(data_dir("templates"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    (moved,) = render(replace(NAIVE, template_root=tmp_path), CONFIG, PROBLEM, "sm_90")
    assert moved == source


def test_the_text_names_no_place_host_or_person():
    (source,) = render(NAIVE, CONFIG, PROBLEM, "sm_90")
    for word in (str(Path.cwd()), str(Path.home()), str(data_dir("")), socket.gethostname()):
        assert word not in source.text
    if (person := getpass.getuser()) != "root":
        assert person not in source.text


def test_comments_of_the_template_reach_the_reader():
    (source,) = render(NAIVE, CONFIG, PROBLEM, "sm_90")
    template = (data_dir("templates") / "matmul" / "naive.cu.jinja").read_text()
    comments = [line for line in template.splitlines() if line.startswith("// ")]
    assert len(comments) > 5
    for line in comments:
        assert line in source.text
    assert "/*#" not in source.text
    assert "//%" not in source.text


# --- identity ------------------------------------------------------------------------------------


def test_digest_ignores_comments_and_banner(generate):
    plain = generate("int a = 1;\nint b = 2;\n")
    said = generate("// Why.\nint a = 1;  // one\n\n/* two\n lines */\nint b = 2;   \n")
    assert said.text != plain.text
    assert said.digest == plain.digest
    (here,) = render(NAIVE, CONFIG, PROBLEM, "sm_90")
    (there,) = render(NAIVE, CONFIG, PROBLEM, "sm_80")
    assert here.text != there.text, "the banner names the target"
    assert here.digest == there.digest


def test_digest_follows_template_fragment_and_parameter(generate, tmp_path):
    """No old timing is taken for new code: whatever changes the kernel changes its digest."""
    (tmp_path / "part.cuh").write_text("int part = 1;\n")
    text = '//% include "part.cuh"\n//% include "lib/config.cuh"\nint a;\n'
    first = generate(text, WIDTH=1)
    assert generate(text, WIDTH=1).digest == first.digest
    digests = {first.digest, generate(text, WIDTH=2).digest, generate(text + "int b;\n").digest}
    (tmp_path / "part.cuh").write_text("int part = 2;\n")
    os.utime(tmp_path / "part.cuh", (1, 1))
    digests.add(generate(text, WIDTH=1).digest)
    assert len(digests) == 4


LITERALS = (
    r'"a // b"',
    r'"/* a */"',
    r'"a \" // b"',
    r"'\"'",
    r"'\''",
    "'/'",
    "1'000",
    "0x7fff'ffffu",
    "a / b",
    "*p",
    "x",
    ";",
)


def test_literals_are_not_comments():
    for literal in LITERALS:
        assert strip_comments(f"{literal} // gone\n") == f"{literal}\n"
    assert strip_comments("a /* x */ b\n") == "a   b\n"
    assert strip_comments("a/**/b\n") == "a b\n", "a comment separates tokens"
    assert strip_comments("// only\n\n   \nint a;\n") == "int a;\n"


comments = st.text(st.characters(codec="ascii", exclude_characters="\n\r\\\v\f\x1c\x1d\x1e"))


@given(st.lists(st.tuples(st.sampled_from(LITERALS), comments, comments), max_size=6))
def test_no_comment_changes_the_digest(lines):
    plain = "".join(f"{literal}\n" for literal, _, _ in lines)
    said = "".join(
        f"// {first}\n{literal} // {second}\n/* {second.replace('*/', '')} */\n"
        for literal, first, second in lines
    )
    assert strip_comments(said) == strip_comments(plain)
    assert source_digest(said) == source_digest(plain)
    assert strip_comments(strip_comments(said)) == strip_comments(said)

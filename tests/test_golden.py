# SPDX-License-Identifier: Apache-2.0
"""Generated sources, kept as files: a change of a template shows up as a diff to review.

``TUNEGEN_ACCEPT=1 pytest tests/test_golden.py`` writes them anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from taken import taken

from tunegen import kernels
from tunegen.codegen import render
from tunegen.model import Config
from tunegen.perfmodel import default_chip

GOLDEN = Path(__file__).parent / "golden"
TEMPLATES = Path(__file__).parents[1] / "templates"
ACCEPT = bool(os.environ.get("TUNEGEN_ACCEPT"))
ARCH = "sm_90"
OFF_BY_DEFAULT = {"beta": 1, "bias": 1, "activation": "gelu"}


def problems(spec):
    """The first dtype and layout that it takes, and the last ones with what is off by default."""
    operation, device = spec.operation, default_chip(ARCH)
    first = (taken(spec, device, dtype, operation.layouts[0]) for dtype in operation.dtypes)
    yield next(problem for problem in first if problem is not None)
    odd = tuple(1000 + number for number in range(len(operation.axes)))
    layout = operation.layouts[-1] or None
    known = dict(operation.problem(odd, layout=layout).attributes)
    flags = {name: value for name, value in OFF_BY_DEFAULT.items() if name in known}
    last = operation.problem(odd, dtype=operation.dtypes[-1], layout=layout, **flags)
    if spec.refuses(last, device):
        last = taken(spec, device, operation.dtypes[-1], layout, **flags)
    if last is not None:
        yield last


def variants(spec, problem, device):
    """The default config, then one for each further kernel that a spec launches besides."""
    default = spec.default(problem, device)
    yield default
    space = spec.space(problem, device)
    seen = {definition.name for definition in spec.kernels(default, problem)}
    for parameter in space.parameters:
        for value in parameter.values:
            config = Config({**default, parameter.name: value})
            names = {definition.name for definition in spec.kernels(config, problem)}
            if names - seen and not space.violated(config):
                seen |= names
                yield config


def sources():
    device = default_chip(ARCH)
    found = {}
    for spec in kernels.SPECS:
        for problem in problems(spec):
            words = [spec.operation.name, spec.name, problem.dtype, problem.layout]
            for config in variants(spec, problem, device):
                for source in render(spec, config, problem, ARCH):
                    extra = source.name.removeprefix(f"{words[0]}_").removeprefix(spec.name)
                    name = "-".join(word for word in (*words, extra.strip("_")) if word)
                    found.setdefault(f"{name}.cu", source.text)
    return found


SOURCES = sources()


@pytest.mark.parametrize("name", SOURCES)
def test_source_is_as_accepted(name):
    path = GOLDEN / name
    if ACCEPT:
        path.write_text(SOURCES[name])
    assert path.is_file(), "a new kernel: TUNEGEN_ACCEPT=1 pytest tests/test_golden.py writes it"
    assert path.read_text() == SOURCES[name]


def test_no_golden_is_left_behind():
    left = {path.name for path in GOLDEN.iterdir()} - set(SOURCES)
    if ACCEPT:
        for name in left:
            (GOLDEN / name).unlink()
        return
    assert not left


def test_every_spec_has_two():
    for spec in kernels.SPECS:
        prefix = f"{spec.operation.name}-{spec.name}-"
        assert sum(name.startswith(prefix) for name in SOURCES) >= 2, prefix


def clang_format(*arguments, text=None):
    scripts = sysconfig.get_path("scripts")
    tool = shutil.which("clang-format", path=f"{scripts}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("clang-format is not installed: pip install 'tunegen[test]'")
    return subprocess.run(
        [tool, "-n", "--Werror", *arguments],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_generated_sources_are_formatted():
    """What users read is formatted like the templates: choices and loops leave no scars."""
    done = clang_format(*sorted(str(path) for path in GOLDEN.glob("*.cu")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path",
    sorted(path for path in TEMPLATES.rglob("*") if path.is_file()),
    ids=lambda path: str(path.relative_to(TEMPLATES)),
)
def test_templates_are_formatted(path):
    """A template is CUDA to clang-format: its statements are comments."""
    name = str(path).removesuffix(".jinja")
    done = clang_format(f"--assume-filename={name}", text=path.read_text())
    assert done.returncode == 0, done.stderr

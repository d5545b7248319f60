# SPDX-License-Identifier: Apache-2.0
"""The architecture as tests: who may import whom, who owns what, and how files look.

Python is only parsed here, nothing of it is imported but the registry of kernels.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from taken import taken

from tunegen import kernels
from tunegen.codegen import render
from tunegen.kernels import calibrate, checks, references
from tunegen.model import Config
from tunegen.perfmodel import default_chip

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tunegen"
TEMPLATES = ROOT / "templates"

# Imports go downwards only, and never sideways; what is below the tools is free to all.
LAYERS = {
    "errors": 0,
    "resources": 0,
    "model": 1,
    **dict.fromkeys(
        ("bundle", "calibration", "codegen", "compiler", "database", "device", "disasm", "doctor",
         "kernels", "perfmodel", "replay", "rival", "runner", "runtime", "search", "store"),
        2,
    ),
    "tuner": 3,
    "session": 4,
    "cli": 5,
    "loading": 5,
    "__main__": 6,
    "__init__": 6,
}  # fmt: skip

# Tools do not import each other, but these two are what opens a device.
SIDEWAYS = {("runner", "device"), ("runtime", "device")}

# Who may import a package that is not ours; the longest name that matches counts.
OWNERS = {
    "click": {"cli"},
    "cuda.bindings.driver": {"device"},
    "cuda.bindings.nvrtc": {"compiler"},
    "filelock": {"database"},
    "jinja2": {"codegen"},
    "kernel_tuner": {"rival"},
    "msgspec": {"bundle", "database"},
    # Where arrays are values.
    "numpy": {"device", "kernels", "model", "perfmodel", "replay", "rival", "runner",
              "search", "session"},
    "optuna": {"search", "store"},
    "platformdirs": {"calibration", "compiler", "database", "store"},
    "pynvml": {"device"},
    "rich": {"cli"},
    "sqlalchemy": {"store"},
    "torch": {"runner"},
}  # fmt: skip

# Files longer than the budget, each with its reason.
LINE_BUDGET = 400
LONG_FILES: dict[str, str] = {}

MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON = sorted([*MODULES, *(ROOT / "tests").rglob("*.py")])
TEMPLATE_FILES = sorted(p for p in TEMPLATES.rglob("*") if p.suffix in (".cuh", ".jinja"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def owner_of(path: Path) -> str:
    """The top-level module or package that a file belongs to: ``codegen``, ``session``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, by whatever means, with its line."""
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield alias.name, node.lineno
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {node.lineno}: imports are absolute"
                assert module
                # `from tunegen import codegen` names a module, `from tunegen.model import X` not.
                if module == "tunegen":
                    for alias in names:
                        yield f"tunegen.{alias.name}", node.lineno
                else:
                    yield module, node.lineno
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[name, *_]):
                if isinstance(name, ast.Constant):
                    yield name.value, node.lineno
                else:  # only the table of public names is looked up
                    assert path == PACKAGE / "__init__.py", f"line {node.lineno}: a literal name"
            case ast.Call(func=ast.Name(id="__import__" | "exec" | "eval")):
                pytest.fail(f"line {node.lineno}: {node.func.id}")


@pytest.fixture(params=MODULES, ids=name_of)
def module(request):
    return request.param


# --- imports -------------------------------------------------------------------------------------


def test_imports_go_downwards_only(module):
    here = owner_of(module)
    assert here in LAYERS, "a new module: say in LAYERS where it stands"
    for name, line in imports(module):
        parts = name.split(".")
        if parts[0] != "tunegen" or parts[1:] == ["__version__"]:
            continue
        there = parts[1]
        assert there in LAYERS, f"line {line}: {name} is in no layer"
        if there == here or LAYERS[there] == 0:
            continue
        allowed = LAYERS[there] < LAYERS[here] or (here, there) in SIDEWAYS
        assert allowed, f"line {line}: {here} must not import {there}"


def test_third_party_packages_stay_with_their_owners(module):
    here = owner_of(module)
    for name, line in imports(module):
        top = name.split(".")[0]
        if top == "tunegen" or top in sys.stdlib_module_names:
            continue
        prefixes = [name[:end] for end in range(len(name), 0, -1) if f"{name}."[end] == "."]
        owned = next((prefix for prefix in prefixes if prefix in OWNERS), None)
        assert owned, f"line {line}: nobody owns {name}: say in OWNERS who does"
        assert here in OWNERS[owned], f"line {line}: {owned} belongs to {sorted(OWNERS[owned])}"


def test_the_vocabulary_needs_nothing_but_numpy():
    for path in sorted((PACKAGE / "model").glob("*.py")):
        for name, line in imports(path):
            top = name.split(".")[0]
            ours = name.startswith(("tunegen.errors", "tunegen.model"))
            assert ours or top == "numpy" or top in sys.stdlib_module_names, f"{path}:{line}"


def test_owners_own_something():
    """A table that names what nobody imports has been forgotten."""
    used = {name for path in MODULES for name, _ in imports(path)}
    for owned, owners in OWNERS.items():
        assert any(name == owned or name.startswith(f"{owned}.") for name in used), owned
        for owner in owners & {owner_of(path) for path in MODULES}:
            files = [path for path in MODULES if owner_of(path) == owner]
            names = [name for path in files for name, _ in imports(path)]
            assert any(name == owned or name.startswith(f"{owned}.") for name in names), (
                f"{owner} no longer imports {owned}"
            )


HEAVY = {"cuda", "jinja2", "msgspec", "numpy", "optuna", "pynvml", "rich", "torch"}
PROBE = """
import contextlib, io, json, sys
import tunegen
from tunegen import cli
seen = {"import": sorted(sys.modules)}
with contextlib.redirect_stdout(io.StringIO()) as text:
    from tunegen.cli.main import run
    assert run(["--help"]) == 0
    assert run(["--version"]) == 0
    for name in cli.cli.commands:
        assert run([name, "--help"]) == 0, name
assert "Usage" in text.getvalue()
seen["help"] = sorted(sys.modules)
print(json.dumps(seen))
"""


def test_help_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for when, loaded in json.loads(done.stdout).items():
        heavy = HEAVY & {name.split(".")[0] for name in loaded}
        assert not heavy, f"{when}: {sorted(heavy)}"


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_every_file_opens_with_licence_and_purpose(path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "no docstring says what the file is for"


def test_files_stay_within_the_line_budget(module):
    lines = len(module.read_text().splitlines())
    if name_of(module) in LONG_FILES:
        assert lines > LINE_BUDGET, "no longer long: take it off the list"
    else:
        assert lines <= LINE_BUDGET, f"{lines} lines: make it a package of smaller files"


def test_nothing_catches_everything(module):
    """`except Exception` hides what nobody thought of; only cleaning up and re-raising may."""
    for node in ast.walk(parse(module)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
        names = {None if kind is None else ast.unparse(kind) for kind in caught}
        if names & {None, "Exception", "BaseException"}:
            last = node.body[-1]
            assert isinstance(last, ast.Raise), f"line {node.lineno}"
            assert last.exc is None, f"line {node.lineno}"


PRINTERS = re.compile(r"^(?:print|click\.echo|click\.secho|sys\.stdout\.\w+|sys\.stderr\.\w+)$")


def test_only_the_command_line_prints(module):
    if owner_of(module) == "cli":
        return
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Call) and PRINTERS.match(ast.unparse(node.func)):
            pytest.fail(f"line {node.lineno}: {ast.unparse(node.func)}")


TEXT_TESTS = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch"}


def test_no_decision_hangs_on_the_text_of_an_error(module):
    """Texts of errors change with every release of whoever wrote them."""
    for handler in ast.walk(parse(module)):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name:
            continue
        for node in ast.walk(handler):
            inspected = list[ast.expr]()
            match node:
                case ast.Compare(left=left, comparators=rights):
                    inspected = [left, *rights]
                case ast.Call(func=ast.Attribute(value=value, attr=attr), args=arguments):
                    inspected = [value, *arguments] if attr in TEXT_TESTS else []
                case ast.Match(subject=subject):
                    inspected = [subject]
            for expression in inspected:
                text = ast.unparse(expression)
                wording = rf"\b(?:str|repr)\({handler.name}\)|\b{handler.name}\.(?:args|message)\b"
                assert not re.search(wording, text), f"line {node.lineno}: {text}"


def test_asserts_are_for_the_impossible():
    """An assert on what a caller gave vanishes under python -O: public functions raise."""
    for path in MODULES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = ast.unparse(node.exc).split("(")[0]
                assert raised not in ("Exception", "AssertionError", "NotImplemented"), (
                    f"{name_of(path)}:{node.lineno} raises {raised}"
                )


# --- the repository ------------------------------------------------------------------------------

TOP_LEVEL = {"LICENSE", "README.md", "pyproject.toml", "templates", "tests", "tuned_db", "tunegen"}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_top_level_is_fixed():
    tops = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def test_no_file_names_a_place_on_somebodys_machine():
    place = re.compile(r"(?<![\w.$}])/(?:home|Users|root|work)/[\w.-]")
    for path in tracked():
        text = path.read_bytes().decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            assert not place.search(line), f"{name_of(path)}:{number}: {line.strip()}"


# --- templates -----------------------------------------------------------------------------------

VALUES = TEMPLATES / "lib" / "config.cuh"
# An instruction whose list of registers is as long as a parameter says: C++ cannot write it.
OPERANDS = TEMPLATES / "lib" / "wgmma.cuh"
MAIN_TEMPLATES = [path for path in TEMPLATE_FILES if path.name.endswith(".cu.jinja")]


@pytest.fixture(params=TEMPLATE_FILES, ids=name_of)
def template(request):
    return request.param


def test_templates_open_with_their_licence(template):
    first = template.read_text().splitlines()[0]
    assert first == "/*# SPDX-License-Identifier: Apache-2.0 #*/"


def test_values_enter_in_one_place(template):
    if template not in (VALUES, OPERANDS):
        assert "${" not in template.read_text(), "parameters are constants: use their names"


def test_templates_are_mostly_cuda(template):
    if template == VALUES:
        return
    lines = template.read_text().splitlines()
    statements = [line for line in lines if re.match(r"\s*//%(?!\s*include\b)", line)]
    share = len(statements) / len(lines)
    assert share <= 0.1, f"{len(statements)} of {len(lines)} lines are statements"


def test_no_blank_line_after_a_statement(template):
    """Jinja would swallow it: the template would not show what it makes."""
    lines = template.read_text().splitlines()
    for number, (line, following) in enumerate(itertools.pairwise(lines), 1):
        assert not (re.match(r"\s*//%", line) and not following.strip()), f"line {number}"


def test_templates_are_short(template):
    assert len(template.read_text().splitlines()) < 300


def test_one_kernel_a_template():
    for path in TEMPLATE_FILES:
        text = path.read_text()
        entries = re.findall(r"\btunegen_\w+(?=\()", text)
        if path in MAIN_TEMPLATES:
            assert len(entries) == 1, f"{name_of(path)}: {entries}"
            assert text.count('extern "C"') == 1
            assert text.count("__global__") == 1
        else:
            assert not entries, name_of(path)
            assert "__global__" not in text, name_of(path)


def test_every_template_is_used():
    rendered = {definition.template for definition in checks.DEFINITIONS}
    for probe in calibrate.every(DEVICE, 1 << 40):
        for contender in probe.contenders:
            rendered |= {definition.template for definition in contender.definitions}
    for spec in references.REFERENCES.values():
        problem = spec.operation.problem()
        rendered |= {definition.template for definition in spec.kernels(Config({}), problem)}
    for spec in kernels.SPECS:
        for problem, config in cases(spec):
            rendered |= {definition.template for definition in spec.kernels(config, problem)}
    assert rendered == {str(path.relative_to(TEMPLATES)) for path in MAIN_TEMPLATES}
    included = {
        name
        for path in TEMPLATE_FILES
        for name in re.findall(r'//% include "([^"]+)"', path.read_text())
    }
    fragments = set(TEMPLATE_FILES) - set(MAIN_TEMPLATES)
    assert included == {str(path.relative_to(TEMPLATES)) for path in fragments}


# --- specs ---------------------------------------------------------------------------------------

SPEC_IDS = [f"{spec.operation.name}-{spec.name}" for spec in kernels.SPECS]
DEVICE = default_chip("sm_90")


def cases(spec):
    """Every dtype and layout of a spec's operation, with configs that reach all of its kernels."""
    operation = spec.operation
    for dtype in operation.dtypes:
        for layout in operation.layouts:
            problem = taken(spec, DEVICE, dtype, layout)
            if problem is None:
                continue
            default = spec.default(problem, DEVICE)
            yield problem, default
            for parameter in spec.space(problem, DEVICE).parameters:
                config = Config({**default, parameter.name: parameter.values[-1]})
                if spec.kernels(config, problem) != spec.kernels(default, problem):
                    yield problem, config


def assertions(text: str) -> Iterator[str]:
    """The sentences of the static_asserts in CUDA source, literals that were wrapped joined."""
    for match in re.finditer(r"\bstatic_assert\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield "".join(re.findall(r'"([^"]*)"', text[match.end() : end]))


@pytest.mark.parametrize("spec", kernels.SPECS, ids=SPEC_IDS)
def test_each_structural_constraint_is_a_static_assert(spec):
    """The same sentence in Python, where it prunes, and in CUDA, where it proves.

    Fragments may assert more, on the arguments that they are called with.
    """
    reasons, generated, written = set(), set(), set()
    for problem, config in cases(spec):
        space = spec.space(problem, DEVICE)
        reasons |= {constraint.reason for constraint in space.constraints if constraint.structural}
        for source in render(spec, config, problem, "sm_90"):
            generated |= set(assertions(source.text))
        for definition in spec.kernels(config, problem):
            written |= set(assertions((TEMPLATES / definition.template).read_text()))
    assert reasons <= generated, "a constraint that CUDA does not know"
    assert written <= reasons, "an assertion that Python does not know"


@pytest.mark.parametrize("spec", kernels.SPECS, ids=SPEC_IDS)
def test_entries_and_parameters_are_spelled_out(spec):
    for problem, config in cases(spec):
        names = [definition.name for definition in spec.kernels(config, problem)]
        assert len(set(names)) == len(names)
        for definition in spec.kernels(config, problem):
            assert definition.entry == f"tunegen_{definition.name}"
            entry = (TEMPLATES / definition.template).read_text()
            assert f"{definition.entry}(" in entry
        launched = {launch.kernel for launch in spec.symbolic_plan(config, problem).launches}
        assert launched == set(names), "a plan launches what is compiled, all of it"
        for parameter in spec.space(problem, DEVICE).parameters:
            assert re.fullmatch(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*", parameter.name)
            assert parameter.meaning
            assert list(parameter.values) == sorted(set(parameter.values))


@pytest.mark.parametrize("spec", kernels.SPECS, ids=SPEC_IDS)
def test_every_parameter_is_in_the_source(spec):
    """What neither a kernel of the spec nor its plan reads would be searched for nothing."""
    for problem, config in cases(spec):
        text = "".join(source.text for source in render(spec, config, problem, "sm_90"))
        for name in config:
            used = len(re.findall(rf"\b{name}\b", re.sub(r"^//.*$", "", text, flags=re.M)))
            kernels_made = len(spec.kernels(config, problem))
            if used > kernels_made:
                continue
            values = spec.space(problem, DEVICE).parameters
            (parameter,) = (parameter for parameter in values if parameter.name == name)
            plans = {
                repr(spec.symbolic_plan(Config({**config, name: value}), problem))
                for value in parameter.values
            }
            assert len(plans) > 1 or len(parameter.values) == 1, f"{name} changes nothing"


# --- documentation -------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_examples_in_docstrings_are_true(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    attempted = 0
    for found in pkgutil.walk_packages([str(PACKAGE)], "tunegen."):
        if found.name == "tunegen.__main__":  # importing it runs it
            continue
        result = doctest.testmod(importlib.import_module(found.name))
        assert not result.failed, found.name
        attempted += result.attempted
    assert attempted

# SPDX-License-Identifier: Apache-2.0
"""What is installed: the wheel's content, the pins, and the public names."""

from __future__ import annotations

import inspect
import os
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import TIERS

import tunegen
from tunegen import doctor, resources

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def pins(requirements):
    """Names of distributions to their version ranges, as text."""
    split = (re.fullmatch(r"([\w-]+)(.*)", item.partition(";")[0]) for item in requirements)
    return {match[1]: match[2].strip() for match in split}


CORE = pins(PROJECT["dependencies"])
EXTRAS = {name: pins(items) for name, items in PROJECT["optional-dependencies"].items()}


def test_doctor_asks_for_what_is_installed():
    """One range per package: in pyproject.toml and in what doctor compares with."""
    wanted = {**CORE, **EXTRAS["test"], **EXTRAS["torch"]}
    for package in doctor.PACKAGES:
        if package.name == "cuda-pathfinder":  # comes with the bindings
            continue
        lower = wanted[package.name].removesuffix(f",<{package.below}")
        assert lower == f">={package.least}", package.name
        assert package.required <= (package.name in CORE), package.name


def test_every_nvidia_package_is_held_to_one_toolkit():
    for name, versions in {**CORE, **EXTRAS["test"]}.items():
        if name.startswith(("nvidia-", "cuda-")):
            assert versions == ">=13.0,<14", name
    assert "cuda-bindings" in CORE


def test_the_core_needs_no_torch():
    assert not any("torch" in name for name in CORE)
    assert set(EXTRAS["torch"]) == {"torch"}


def test_python_versions_agree():
    assert PROJECT["requires-python"] == f">={doctor.PYTHON}"
    digits = doctor.PYTHON.replace(".", "")
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{digits}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == doctor.PYTHON


def test_the_licence_is_the_one_named():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_ci_is_a_script_that_runs():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    (required,) = re.findall(r"TUNEGEN_REQUIRE_TIERS=(\S+)", text)
    assert set(required.split(",")) == set(TIERS) - {"gpu"}, "all that CI can install"


# --- public names --------------------------------------------------------------------------------


def test_public_names_are_there_typed_and_documented():
    for name in tunegen.__all__:
        value = getattr(tunegen, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, f"{name} {parameter}"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tunegen.no_such_name
    assert (ROOT / "tunegen" / "py.typed").exists()


# --- where data is -------------------------------------------------------------------------------


def test_data_is_found_in_the_package_and_beside_it(monkeypatch, tmp_path):
    package = tmp_path / "tunegen"
    (tmp_path / "templates").mkdir(parents=True)
    package.mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert resources.data_dir("templates") == tmp_path / "templates"
    (package / "templates").mkdir()
    assert resources.data_dir("templates") == package / "templates"


# --- the wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, unpacked somewhere else."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_all_that_is_needed_and_nothing_else(wheel):
    version = tunegen.__version__
    files = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    expected = {
        *(f"tunegen/{path}" for path in source_files("templates", under=ROOT)),
        *(f"tunegen/{path}" for path in source_files("tuned_db", under=ROOT)),
        *source_files("tunegen", under=ROOT),
        *(f"tunegen-{version}.dist-info/{name}" for name in
          ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")),
    }  # fmt: skip
    assert files == expected


def source_files(folder, *, under):
    return [
        str(path.relative_to(under))
        for path in (under / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    script = (
        "import tunegen, pathlib; from tunegen.cli.main import run\n"
        f"assert pathlib.Path(tunegen.__file__).is_relative_to({str(wheel)!r}), tunegen.__file__\n"
        "assert run(['--version']) == 0\n"
        "assert run(['kernels', 'matmul']) == 0\n"
        "from tunegen.resources import data_dir\n"
        f"assert data_dir('templates').is_relative_to({str(wheel)!r})\n"
        f"assert data_dir('tuned_db').is_relative_to({str(wheel)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(wheel)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tunegen.__version__ in done.stdout
    assert "naive" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Doctor: what it says of machines that this one is not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tunegen import doctor
from tunegen.errors import ToolkitError
from tunegen.model import FoundGpus, GpuInfo

H200 = GpuInfo(0, "NVIDIA H200", "GPU-a", "sm_90", 140 << 30, 139 << 30)
NO_GPU = FoundGpus(reason="no NVIDIA driver", hint="install NVIDIA's driver")
HERE = FoundGpus((H200,), driver="580.65.06", driver_cuda="13.0")

# A machine on which all is well, whatever is installed on this one.
INSTALLED = {package.name: f"{package.least}.1" for package in doctor.PACKAGES} | {
    "tunegen": "1.2.3",
    "nvidia-cuda-nvrtc": "13.0.88",
}


@pytest.fixture
def installed(monkeypatch):
    """Package versions as a dictionary to change."""
    versions = dict(INSTALLED)

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def examine(gpus=HERE, *, nvrtc="13.0.88", nvdisasm="/bin/nvdisasm", **places):
    def find(answer):
        def found():
            if isinstance(answer, Exception):
                raise answer
            return answer

        return found

    checks = doctor.examine(
        gpus, nvrtc_version=find(nvrtc), nvdisasm=find(nvdisasm),
        **{"folders": {}, "files": {}, "caches": {}, **places},
    )  # fmt: skip
    by_name = {check.name: check for check in checks}
    assert len(by_name) == len(checks), "names are unique"
    return by_name


def not_ok(checks):
    return {name: check.status for name, check in checks.items() if check.status != "ok"}


def test_a_machine_on_which_all_is_well(installed):
    assert not_ok(examine()) == {}


def test_no_gpu_is_a_warning_and_nothing_else(installed):
    checks = examine(NO_GPU)
    assert not_ok(checks) == {"driver": "warning", "GPU": "warning"}
    assert checks["GPU"].found == NO_GPU.reason
    assert checks["GPU"].fix == NO_GPU.hint


@pytest.mark.parametrize("found", ["12.9.0", "14.0.0", "11.8.2", "14.0.0rc1"])
def test_bindings_of_another_toolkit(installed, found):
    installed["cuda-bindings"] = found
    check = examine()["cuda-bindings"]
    assert check.failed
    assert check.status == "conflict"
    assert check.found == found
    assert check.needed == ">=13.0,<14"
    assert "cuda-bindings>=13.0,<14" in check.fix


@pytest.mark.parametrize("package", doctor.PACKAGES, ids=lambda package: package.name)
def test_each_package_absent(installed, package):
    del installed[package.name]
    check = examine()[package.name]
    assert check.found == "not installed"
    assert check.failed == package.required
    assert bool(check.fix) == package.required


@pytest.mark.parametrize("package", doctor.PACKAGES, ids=lambda package: package.name)
@pytest.mark.parametrize("end", ["below", "least"])
def test_each_package_outside_its_range(installed, package, end):
    installed[package.name] = "0.9" if end == "least" else f"{package.below}.0"
    check = examine()[package.name]
    assert check.status == "conflict"
    assert package.needed in check.needed
    assert package.needed in check.fix


def test_local_and_pre_release_versions_are_read(installed):
    installed["torch"] = "2.10.0rc1+cu130"
    assert examine()["torch"].status == "ok"


def test_the_metapackage_of_the_bindings_is_not_what_counts(installed):
    installed["cuda-python"] = "12.6.0"
    assert not_ok(examine()) == {}


def test_no_nvrtc_library(installed):
    checks = examine(nvrtc=ToolkitError("the NVRTC library cannot be loaded", hint="mend it"))
    check = checks["NVRTC library"]
    assert (check.status, check.fix) == ("missing", "mend it")
    assert check.found == "the NVRTC library cannot be loaded", "the hint is not said twice"


def test_nvrtc_of_another_major(installed):
    assert examine(nvrtc="12.9.86")["NVRTC library"].status == "conflict"


@pytest.mark.parametrize("found", ["13.0.88", "13.5.12"])
def test_another_copy_of_nvrtc_comes_first(installed, found):
    installed["nvidia-cuda-nvrtc"] = "13.5.37"
    check = examine(nvrtc=found)["NVRTC library"]
    assert check.status == "warning"
    assert "13.5.37" in check.needed
    assert check.found == found


def test_no_nvdisasm_is_a_warning(installed):
    checks = examine(nvdisasm=ToolkitError("nvdisasm is not installed", hint="pip install it"))
    assert not_ok(checks) == {"nvdisasm": "warning"}
    assert checks["nvdisasm"].fix == "pip install it"


def test_a_toolkit_newer_than_the_driver(installed):
    installed["nvidia-cuda-nvrtc"] = "13.5.37"
    check = examine(nvrtc="13.5.37")["driver"]
    assert check.status == "warning", "cubins of the same major still load"
    assert "13.0" in check.found
    assert "CUDA 13.5 to load PTX of NVRTC 13.5.37" in check.needed
    assert "nvidia-cuda-nvrtc==13.0" in check.fix
    # The other way round nothing is wrong.
    newer = FoundGpus((H200,), driver="590.10", driver_cuda="13.10")
    assert examine(newer, nvrtc="13.5.37")["driver"].status == "ok"


def test_a_driver_too_old_for_the_toolkit(installed):
    old = FoundGpus((H200,), driver="570.124", driver_cuda="12.8")
    check = examine(old)["driver"]
    assert check.failed
    assert "570.124" in check.found
    assert "580" in check.needed


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"arch": "sm_61"}, "no longer"),
        ({"arch": "sm_199"}, "not known"),
        ({"mig": True, "slices": ("MIG-1", "MIG-2")}, "MIG is on, 2"),
        ({"other_processes": 3}, "3 other processes"),
    ],
)
def test_a_gpu_whose_times_would_not_count(installed, changed, word):
    checks = examine(replace(HERE, devices=(replace(H200, **changed),)))
    assert not_ok(checks) == {"GPU 0": "warning"}
    assert word in checks["GPU 0"].detail


def test_several_gpus_of_two_kinds(installed, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    other = GpuInfo(1, "NVIDIA L4", "GPU-b", "sm_89", 23 << 30, 23 << 30)
    two = FoundGpus((H200, other), driver="580.65.06", driver_cuda="13.0", hidden=2)
    check = examine(two)["GPUs together"]
    assert check.status == "warning"
    assert "1 x NVIDIA H200, 1 x NVIDIA L4, 2 more hidden" in check.found
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert examine(two)["GPUs together"].status == "ok"


def test_folders_that_cannot_be_written(installed, tmp_path):
    (tmp_path / "file").touch()
    checks = examine(folders={"good": tmp_path / "new" / "deep", "bad": tmp_path / "file" / "x"})
    assert checks["good"].status == "ok"
    assert not (tmp_path / "new").exists(), "looking leaves no trace"
    assert checks["bad"].failed
    assert str(tmp_path / "file") in checks["bad"].found


def test_files_that_cannot_be_written(installed, tmp_path):
    (tmp_path / "file").touch()
    places = {"there": "file", "new": "deep/new.db", "folder": "", "below a file": "file/new.db"}
    checks = examine(files={name: tmp_path / place for name, place in places.items()})
    assert not_ok(checks) == {"folder": "conflict", "below a file": "conflict"}
    assert checks["new"].found == str(tmp_path / "deep" / "new.db")
    assert not (tmp_path / "deep").exists(), "looking leaves no trace"
    for name in ("folder", "below a file"):
        assert checks[name].found.endswith("cannot be written")
        assert checks[name].fix


def test_a_cache_that_cannot_be_written_is_a_warning(installed, tmp_path):
    (tmp_path / "file").touch()
    checks = examine(caches={"good": tmp_path / "new", "bad": tmp_path / "file" / "x"})
    assert not_ok(checks) == {"bad": "warning"}
    assert checks["bad"].fix


def test_a_folder_that_cannot_even_be_looked_for(installed, tmp_path):
    checks = examine(folders={"long": tmp_path / ("x" * 300)})
    assert checks["long"].found.startswith(str(tmp_path)), "what is not there is made"


def test_an_old_python_and_another_system(installed, monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.2")
    assert examine()["Python"].status == "conflict"
    monkeypatch.setattr(platform, "python_version", lambda: "3.14.0rc1")
    assert examine()["Python"].status == "ok"
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert examine()["Python"].status == "warning"


def test_an_installation_without_templates(installed, monkeypatch):
    monkeypatch.setattr(doctor, "data_dir", lambda name: Path("/nowhere") / name)
    assert examine()["tunegen"].status == "missing"


# --- whole programs ------------------------------------------------------------------------------


@pytest.fixture
def with_bindings(tmp_path):
    """Run the command line where cuda-bindings has the version given."""

    def command(version, *words):
        info = tmp_path / f"cuda_bindings-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: cuda-bindings\nVersion: {version}\n")
        root = Path(doctor.__file__).resolve().parents[1]
        folders = {"XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_DATA_HOME": str(tmp_path / "d")}
        return subprocess.run(
            [sys.executable, "-c", "from tunegen.cli import main; main()", *words],
            env={**os.environ, **folders, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip

    return command


def test_incompatible_bindings_are_not_called_missing(with_bindings):
    done = with_bindings("12.9.0", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["cuda-bindings"]["status"] == "conflict"
    assert checks["cuda-bindings"]["found"] == "12.9.0"
    assert checks["cuda-bindings"]["needed"] == ">=13.0,<14"
    assert "12.9.0" in checks["NVRTC library"]["found"]


def test_it_says_where_trials_and_records_are_kept(with_bindings, tmp_path):
    checks = {c["name"]: c for c in json.loads(with_bindings("13.0.1", "doctor", "--json").stdout)}
    for name, place in {"studies": "studies.db", "database": "tuned_db"}.items():
        assert checks[name]["status"] == "ok"
        assert checks[name]["found"] == str(tmp_path / "d" / "tunegen" / place)


def test_what_needs_no_compiler_works_without_one(with_bindings):
    done = with_bindings("12.9.0", "kernels", "matmul")
    assert done.returncode == 0, done.stderr
    done = with_bindings("12.9.0", "tune", "axpy", "--arch", "sm_90", "--trials", "2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cuda-bindings 12.9.0" in done.stderr
    assert "13" in done.stderr

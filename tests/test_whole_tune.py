# SPDX-License-Identifier: Apache-2.0
"""The main job from the command line to the record, with nothing left out but the card: real
worker processes, real kernels, on a driver that runs them on the CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import emulated_driver
import jinja2
import pytest
from emulator import build
from fake_gpu import compiled

from tunegen import codegen, compiler, disasm
from tunegen.cli.main import run
from tunegen.kernels.vector import EDGES
from tunegen.model import FoundGpus, GpuInfo
from tunegen.session import gpu

pytestmark = [pytest.mark.emulator, pytest.mark.nvrtc]

TESTS = Path(__file__).resolve().parent
CARD = GpuInfo(0, "emulated", "0", "sm_90", 1 << 30, 1 << 30)


class EmulatedCompiler:
    """Builds for the host; the cubin is the name of a library that the driver loads."""

    def __init__(self, cache=None, lineinfo=False):
        pass

    def compile(self, source, target):
        library = build._built(source, 90).library._name
        return compiled(source.name, library + "\0", target)


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(compiler, "NvrtcCompiler", EmulatedCompiler)
    monkeypatch.setattr(disasm, "code_digest", lambda cubin: "")
    monkeypatch.setattr(gpu, "find_gpus", lambda: FoundGpus((CARD,), driver="580.65.06"))
    monkeypatch.setattr(gpu, "environment", lambda card: emulated_driver.environment())
    monkeypatch.setattr("tunegen.runner.evaluator.TRY_FLOOR_SECONDS", 3.0)
    # A call takes milliseconds here, so that all that is done many times is done a few times.
    monkeypatch.setattr("tunegen.runner.rounds._LEAST_ROUNDS", 2)
    monkeypatch.setattr("tunegen.kernels.vector.EDGES", EDGES[-3:])
    monkeypatch.setattr("tunegen.session.setups._MOST_SETS", 3)
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, find=importlib.util.find_spec: None if name == "torch" else find(name),
    )  # fmt: skip
    real = codegen.environment

    def environment(root=None):
        """The fragments that only a GPU can run, as the emulator has them."""
        made = real(root)
        folders = [build.HERE, *made.loader.searchpath]
        return made.overlay(loader=jinja2.FileSystemLoader(folders))

    monkeypatch.setattr(codegen, "environment", environment)

    def call(*words):
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def result_of(out):
    (result,) = json.loads(out)["results"]
    return result


def test_axpy(tune):
    words = ("tune", "axpy", "--problem", "1031", "--dtype", "bf16", "--finals-seconds", 1)
    code, out, err = tune(*words, "--trials", 3, "--json")
    assert code == 0, err
    result = result_of(out)
    assert result["trials"]["counts"] == {"measured": 3}
    record = result["record"]
    assert record["evidence"] == "measured"
    assert 0 < record["relative_error"] <= record["tolerance"]
    assert record["deterministic"] is True
    assert record["measurement"]["median_us"] > 0
    assert record["default_us"] > 0
    assert result["contest"]["winner"]["failure"] == ""
    assert not any(standing["failure"] for standing in result["contest"]["standings"])


def test_broken_configurations_among_right_ones(tune, tmp_path):
    kernel = TESTS / "data" / "faulty_kernel" / "faulty.py"
    code, out, err = tune(
        "--kernel", kernel, "tune", "faulty", "--problem", "700", "--trials", 11,
        "--finals-seconds", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    result = result_of(out)
    assert result["trials"]["counts"] == {
        "measured": 6, "timed_out": 1, "launch_failed": 1, "wrong_result": 3
    }  # fmt: skip
    assert result["record"]["config"]["FAULT"] == 0
    kept = [
        json.loads(path.read_text())
        for path in (tmp_path / "data" / "tunegen" / "quarantine").glob("*/case.json")
    ]
    assert {case["config"]["FAULT"] for case in kept} == {1, 2}
    assert any("CUDA_ERROR_ILLEGAL_ADDRESS" in case["error"] for case in kept)

# SPDX-License-Identifier: Apache-2.0
"""The README is true: its commands exist, its examples run, and CI runs what it promises."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import optuna
import pytest
from fake_driver import FakeDriver

from tunegen import loading, resources
from tunegen.bundle import manifest
from tunegen.cli.main import cli, run
from tunegen.device import driver
from tunegen.model import FoundGpus, evaluate
from tunegen.runner.evaluator import RETIME_EVERY
from tunegen.runner.finals import CLOSE, SUSTAINED_FROM_US
from tunegen.session.setups import NUMPY_ELEMENTS, NUMPY_FLOPS
from tunegen.tuner import DEFAULT_TRIALS, PREDICTED_TRIALS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def block(language: str, word: str) -> str:
    (text,) = (text for kind, text in BLOCKS if kind == language and word in text)
    return text


def commands() -> list[str]:
    shown = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
    inline = re.findall(r"`(tunegen [^`]+)`", README)
    return [line for line in shown if line.startswith("tunegen ")] + inline


def test_ci_runs_the_two_commands_word_for_word():
    promised = [
        text.strip()
        for name in ("use", "test")
        for text in re.findall(
            rf"^<!-- ci: {name} -->\n```\n(.*?)```\n<!-- ci: end -->$", README, re.M | re.S
        )
    ]
    assert promised == [
        "pip install . && tunegen tune matmul --arch sm_90",
        "pip install -e '.[test]' && pytest",
    ]
    done = subprocess.run(
        [ROOT / ".ci" / "run", "--commands"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == promised


@pytest.mark.parametrize("line", commands())
def test_commands_exist_with_their_options(line):
    words = [word for word in shlex.split(line) if word not in ("[OP]", "OP...", "OP")]
    command, options = cli, []
    rest = iter(words[1:])
    for word in rest:
        if word.startswith("-"):
            names = [name for parameter in command.params for name in parameter.opts]
            assert word in names, f"{command.name} has no {word}"
            options.append(word)
        elif word.rstrip(",") in getattr(command, "commands", {}):
            command = command.commands[word.rstrip(",")]
    assert command is not cli or options, line


@pytest.fixture
def own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nvrtc
def test_the_python_example_runs(own_folders, capsys):
    exec(compile(block("python", "tunegen.tune("), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("predicted ")
    assert lines[1].startswith("tunegen_matmul_")
    assert lines[-1].startswith("axpy ")


def test_the_optuna_example_runs(capsys):
    source = block("python", "PortfolioSampler(")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        exec(compile(source, "README.md", "exec"), {})
    finally:
        optuna.logging.set_verbosity(verbosity)
    assert capsys.readouterr().out == "{'BLOCK': 256, 'UNROLL': 2}\n"


@pytest.mark.nvrtc
def test_the_kernel_example_is_a_kernel(own_folders, capsys):
    source, template = block("python", "SPEC = KernelSpec("), block("cuda", "tunegen_relu")
    assert len(source.splitlines()) < 80
    (own_folders / "relu.py").write_text(source)
    (own_folders / "relu.cu.jinja").write_text(template)
    shown = [line for line in commands() if "--kernel relu.py" in line]
    assert len(shown) == 2
    for line in shown:
        assert run(shlex.split(line)[1:]) == 0
    output = capsys.readouterr()
    assert "relu 16777216 fp32" in output.out
    assert ".entry tunegen_relu(" in output.out
    assert "predicted" in output.err


# --- using the kernels ---------------------------------------------------------------------------


@pytest.fixture
def shipped(own_folders, monkeypatch, capsys):
    """The folder that the README exports, of defaults: what is recorded is another matter."""
    empty = own_folders / "empty"
    monkeypatch.setattr(
        resources, "data_dir",
        lambda name, real=resources.data_dir: empty if name == "tuned_db" else real(name),
    )  # fmt: skip
    (line,) = {line for line in commands() if "--out shipped" in line}
    assert run(shlex.split(line)[1:]) == 0
    assert "default, unmeasured" in capsys.readouterr().out
    return own_folders / "shipped"


def entry_of(folder, operation):
    entries = manifest.decode((folder / "manifest.json").read_bytes()).entries
    (entry,) = (entry for entry in entries if entry.operation == operation)
    return entry


class Tensor:
    """What ``launch`` asks of a torch tensor of one axis in fp32."""

    is_cuda, dtype = True, "torch.float32"

    def __init__(self, count):
        self.values = np.ones(count, dtype=np.float32)
        self.shape = self.values.shape

    def data_ptr(self):
        return self.values.ctypes.data

    def get_device(self):
        return 0

    def numel(self):
        return self.shape[0]

    def stride(self):
        return (1,)


@pytest.mark.nvrtc
def test_the_python_example_launches(shipped, monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor, torch.randn = Tensor, lambda count, device: Tensor(count)
    torch.cuda = types.SimpleNamespace(
        current_stream=lambda: types.SimpleNamespace(cuda_stream=0x77)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    fake = FakeDriver()
    fake.signed_by(entry_of(shipped, "axpy").plan)
    monkeypatch.setattr(driver, "call", fake)
    monkeypatch.setattr(loading, "_kernel_driver", lambda: "580.65.06")
    monkeypatch.setattr(loading, "find_gpus", lambda: FoundGpus())
    names = {}
    exec(compile(block("python", "axpy.launch("), "README.md", "exec"), names)
    x, y = names["x"].data_ptr(), names["y"].data_ptr()
    assert [launch.values for launch in fake.launches] == [
        (x, y, 1 << 20, 2.0), (x, y, 1 << 20, 0.5)
    ]  # fmt: skip
    assert [launch.stream for launch in fake.launches] == [0x77, 1]  # CU_STREAM_LEGACY
    assert not fake.loaded, "the with block unloads"


# As much of cuda.h as the example needs, over the host's memory.
CUDA_H = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int CUresult, CUdevice;
typedef void *CUcontext, *CUmodule, *CUstream;
typedef const char* CUfunction;
typedef unsigned long long CUdeviceptr;
enum { CUDA_SUCCESS };
static CUresult cuGetErrorString(CUresult r, const char** t) { (void)r, (void)t; return 0; }
static CUresult cuInit(unsigned flags) { return (int)flags; }
static CUresult cuDeviceGet(CUdevice* d, int index) { *d = index; return 0; }
static CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { *c = c; return d; }
static CUresult cuDevicePrimaryCtxRelease(CUdevice d) { return d; }
static CUresult cuCtxSetCurrent(CUcontext c) { return !c; }
static CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  *m = m;
  return memcmp(image, "\177ELF", 4);
}
static CUresult cuModuleUnload(CUmodule m) { return !m; }
static CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* entry) {
  *f = entry;
  return !m;
}
static CUresult cuMemAlloc(CUdeviceptr* p, size_t size) { *p = (size_t)malloc(size); return 0; }
static CUresult cuMemFree(CUdeviceptr p) { free((void*)p); return 0; }
static CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  memcpy((void*)to, from, size);
  return 0;
}
static CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  memcpy(to, (void*)from, size);
  return 0;
}
static CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                               unsigned by, unsigned bz, unsigned shared, CUstream stream,
                               void** parameters, void** extra) {
  ARGUMENTS
  printf("%s %u %u %u %u %u %u %u %lld\\n", f, gx, gy, gz, bx, by, bz, shared, (long long)n);
  for (long long i = 0; i < n; ++i) y[i] = a * x[i] + y[i];
  return stream || extra;
}
"""
C_TYPES = {"pointer": "float*", "int64": "long long", "fp32": "float"}


@pytest.mark.nvrtc
@pytest.mark.emulator
def test_the_c_example_launches_what_the_manifest_says(shipped, own_folders):
    entry = entry_of(shipped, "axpy")
    (launch,) = entry.plan.launches
    arguments = (
        f"{C_TYPES[argument.type]} {argument.name} = *({C_TYPES[argument.type]}*)parameters[{i}];"
        for i, argument in enumerate(launch.arguments)
    )
    (own_folders / "cuda.h").write_text(CUDA_H.replace("ARGUMENTS", "\n  ".join(arguments)))
    source, program = own_folders / "axpy.c", own_folders / "axpy"
    source.write_text(block("c", "cuLaunchKernel"))
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-I", str(own_folders))
    subprocess.run(["g++", "-x", "c", "-std=c99", *flags, source, "-o", program], check=True)
    (kernel,) = entry.images[0].kernels
    done = subprocess.run(
        [program, shipped / kernel.file], capture_output=True, text=True, check=True
    )
    launched, result = done.stdout.splitlines()
    entry_point, *numbers = launched.split()
    n = int(numbers[-1])
    grid = [evaluate(extent, {"N": n}) for extent in launch.grid]
    assert entry_point == kernel.entry
    assert [int(number) for number in numbers[:-1]] == [*grid, *launch.block, launch.shared_bytes]
    assert result.startswith(f"y[{n - 1}] is {3 * (n - 1):g}, "), result


@pytest.mark.nvrtc
def test_what_the_c_example_reads_is_in_the_manifest(shipped):
    text = block("c", "cuLaunchKernel")
    document = json.loads((shipped / "manifest.json").read_text())
    places = re.findall(r"(?:entries|images|plan)[\w.\[\]]*", text)
    assert len(set(places)) >= 5
    for place in places:
        found = document["entries"][0] if not place.startswith("entries") else document
        for name, index in re.findall(r"(\w+)|\[(\w)\]", place):
            found = found[name] if name else found[int(index) if index.isdigit() else 0]


# --- the text ------------------------------------------------------------------------------------


def test_limits_are_those_of_the_program():
    for number in (NUMPY_ELEMENTS, NUMPY_FLOPS):
        assert f"2^{number.bit_length() - 1} " in README
    assert f"none of them {CLOSE - 1:.0%} behind".replace("%", " %") in README
    assert f"again every {RETIME_EVERY} trials" in README
    assert f"up to {SUSTAINED_FROM_US:g} us" in README


def test_default_trials_are_those_of_the_program():
    assert f"{DEFAULT_TRIALS} trials on a GPU, {PREDICTED_TRIALS} by the model" in README


def test_every_option_of_tune_that_it_lists_exists():
    listed = re.findall(r"`(--[\w-]+)[^`]*`", README[README.index("| option of `tune`") :])
    known = {name for parameter in cli.commands["tune"].params for name in parameter.opts}
    of_others = {"--readme", "--help", "--json"}
    assert set(listed) - of_others <= known


@pytest.mark.parametrize("name", ["records", "correlation"])
def test_places_for_tables_are_there_once(name):
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    assert README.count(begin) == README.count(end) == 1
    assert README.index(begin) < README.index(end)


def test_paths_exist():
    for path in re.findall(
        r"`(?:python )?((?:tunegen|templates|tests|\.ci)/[\w./-]*)[^`]*`", README
    ):
        if path != "templates/relu/":
            assert (ROOT / path).exists(), path

# SPDX-License-Identifier: Apache-2.0
"""The README is true: its commands exist, its examples run, and CI runs what it promises."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tunegen.cli.main import cli, run

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
    exec(compile(block("python", "import tunegen\n"), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("predicted ")
    assert lines[1].startswith("tunegen_matmul_")
    assert lines[-1].startswith("axpy ")


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


def test_paths_exist():
    for path in re.findall(r"`((?:tunegen|templates|tests|\.ci)/[\w./-]*)`", README):
        if path != "templates/relu/":
            assert (ROOT / path).exists(), path

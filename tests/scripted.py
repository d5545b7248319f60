# SPDX-License-Identifier: Apache-2.0
"""What tests of the parent's side of the GPU runner share: a compiler that compiles nothing, and
workers that play a GPU by a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tunegen import codegen, kernels
from tunegen.model import Candidate, CompiledKernel, Config, Resources
from tunegen.perfmodel import default_chip
from tunegen.runner.process import Worker
from tunegen.runner.qualify import Finalist
from tunegen.runner.station import Station
from tunegen.session.setups import ProblemSetup

TESTS = Path(__file__).parent
DEVICE = default_chip("sm_90")
FAULTY = kernels.load(TESTS / "data" / "faulty_kernel" / "faulty.py")
PROBLEM = FAULTY.operation.problem("2^12")
RIGHT = (32, 64, 128, 256, 512, 1024)


class FakeCompiler:
    """Hands out kernels whose PTX is their source: what the scripted GPU reads."""

    def compile(self, source, target):
        return CompiledKernel(
            name=source.name, entry=source.entry, target=target, ptx=source.text.encode(),
            cubin=source.digest.encode(), resources=Resources(32, 0, 0, 0, 0), warnings="",
            rejection="", nvrtc="13.0", seconds=0.0, from_cache=False,
        )  # fmt: skip


def command(script):
    return (sys.executable, str(TESTS / "fake_worker.py"), json.dumps(script))


def worker(script):
    return Worker(command(script))


def station(script):
    return Station(lambda: worker(script))


def setup(spec=FAULTY):
    return ProblemSetup(spec.operation, DEVICE, FakeCompiler())


def config(threads=128, fault=0):
    return Config({"FAULT": fault, "THREADS": threads})


def candidate(threads=128, fault=0, spec=FAULTY, problem=PROBLEM):
    chosen = config(threads, fault)
    sources = codegen.render(spec, chosen, problem, DEVICE.arch)
    compiler = FakeCompiler()
    return Candidate(spec, chosen, tuple(compiler.compile(s, "sm_90") for s in sources))


def finalist(threads, *, fault=0, trial=None, us=None, default=False, spec=FAULTY):
    chosen = candidate(threads, fault, spec)
    return Finalist(
        name="default" if default else f"trial {threads}",
        trial=threads if trial is None else trial,
        candidate=chosen,
        plan=spec.bound_plan(chosen.config, PROBLEM, DEVICE),
        trial_us=100.0 + threads if us is None else us,
        default=default,
    )


def is_gone(pid):
    """Whether a process has ended, or only waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def logged(path):
    """What a scripted GPU wrote down: (process, text)."""
    lines = (line.partition(" ") for line in path.read_text().splitlines())
    return [(int(pid), text) for pid, _, text in lines]

# SPDX-License-Identifier: Apache-2.0
"""A study for tests, and processes that add to it: run as a script, so that they can be killed.

``crash FILE ROUNDS`` forks a writer ROUNDS times and kills it, every third time while it opens
the study, else somewhere in its first twenty trials. ``together FILE WRITERS COUNT`` lets several
begin at once, on no file at all. Both print, as JSON, the trials that were reported as stored.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tunegen.model import (
    Config,
    DeviceIdentity,
    Measurement,
    Operation,
    Outcome,
    Space,
    Trial,
    parameters,
)
from tunegen.store import Study, StudyKey

OPERATION = Operation(
    name="nothing",
    summary="stored, never run",
    axes=("N",),
    dtypes=("fp32", "fp64"),
    default_sizes=(1024,),
    arrays=lambda problem: (),
    reference=lambda problem, operands, scalars: {},
    flops=lambda problem: 0,
)

DEVICE = DeviceIdentity(
    name="NVIDIA H200",
    sm_count=132,
    shared_bytes_per_block=227 << 10,
    l2_bytes=60 << 20,
    memory_clock_mhz=3201,
)

SPACES = {
    "wide": Space(parameters([("A", (1, 2, 4, 8), ""), ("B", (0, 1), ""), ("ONE", (7,), "")])),
    "narrow": Space(parameters([("A", (16, 32), "")])),
}


def make_key(**changes):
    facts = {
        "operation": OPERATION,
        "problem": OPERATION.problem("1024"),
        "arch": "sm_90",
        "device": DEVICE,
        "evidence": "measured",
        "policy": "burst",
        "tolerance": 1e-5,
        "toolkit": "13.0.88",
        "spaces": SPACES,
    }
    return StudyKey(**{**facts, **changes})


def make_trial(number=0, us=10.0, a=1, *, reason="", seconds=0.5):
    """A success of the spec "wide"; with a ``reason``, a failure."""
    outcome = Outcome("measured", Measurement(us, "burst", us - 1, us + 1, 30))
    if reason:
        outcome = Outcome("launch_failed", reason=reason)
    config = Config({"A": a, "B": number % 2, "ONE": 7})
    return Trial(number, "wide", config, outcome, "sampler", seconds)


def url(path):
    return f"sqlite:///{path}"


def write(path, name, count, report):
    with Study.open(url(path), make_key()) as study:
        for number in range(count):
            study.add(make_trial(number, reason=f"{name}.{number}"), {"kernel": "digest"})
            os.write(report, f"{name}.{number}\n".encode())


def start(path, name, count):
    """Process number and reading end of the reports of a forked writer."""
    read, report = os.pipe()
    if pid := os.fork():
        os.close(report)
        return pid, read
    try:
        os.close(read)
        write(path, name, count, report)
    finally:
        os._exit(0)


def crash(path, rounds):
    rng, stored = random.Random(0), []
    for number in range(rounds):
        pid, read = start(path, number, 1000)
        with os.fdopen(read) as lines:
            if number % 3 == 0:
                time.sleep(rng.uniform(0, 0.1))
            else:
                stored += [lines.readline().strip() for _ in range(rng.randint(1, 20))]
                time.sleep(rng.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            stored += lines.read().split()
        os.waitpid(pid, 0)
    return stored


def together(path, writers, count):
    stored = []
    for pid, read in [start(path, number, count) for number in range(writers)]:
        with os.fdopen(read) as lines:
            stored += lines.read().split()
        os.waitpid(pid, 0)
    return stored


if __name__ == "__main__":
    command, file, *numbers = sys.argv[1:]
    # What is imported and set up once is not what the writers are to be killed in.
    write(Path(f"{file}.other"), "other", 1, os.open(os.devnull, os.O_WRONLY))
    done = {"crash": crash, "together": together}[command]
    print(json.dumps(done(Path(file), *map(int, numbers))))

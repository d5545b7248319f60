# SPDX-License-Identifier: Apache-2.0
"""Hosts that make one search together, as processes that can be killed: run as a script.

``URL FOLDER HOSTS KILLS TRIALS`` forks so many hosts, kills one of them every second and starts
another, so many times, and lets the rest come to their end. Each writes to a file of its own in
FOLDER what it evaluates and what it has reported, with the time. What was killed is printed as
JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path

from store_writer import make_key

from tunegen import perfmodel, replay, search, tuner
from tunegen.model import Config
from tunegen.store import Study
from tunegen.store import hosts as hosts_module

SPACE = Path(__file__).parent / "data" / "recorded_spaces" / "pnpoly_3060.json.gz"

# A trial takes this long, so that hosts are killed in the midst of one more often than not.
TRIAL_SECONDS = 0.05


class Recorder:
    """Writes lines that a kill cannot take back."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what, config=None):
        line = [what, None if config is None else dict(config), time.monotonic_ns()]
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Slow:
    """A GPU that takes its time."""

    needs_kernels = False
    evidence = "measured"

    def __init__(self, recorded, record, seconds):
        self._replay = replay.ReplayEvaluator(recorded.outcomes)
        self._record, self._seconds = record, seconds

    def evaluate(self, candidate, problem):
        self._record("evaluate", candidate.config)
        time.sleep(self._seconds)
        return self._replay.evaluate(candidate, problem)


def contender(recorded):
    return search.Contender(recorded.spec, recorded.space.enumerate(), recorded.default)


def key_of(recorded, **changes):
    return make_key(
        operation=recorded.spec.operation, problem=recorded.problem, policy=replay.POLICY,
        tolerance=None, spaces={recorded.spec.name: recorded.space}, **changes,
    )  # fmt: skip


def run(
    recorded,
    url,
    record,
    trials,
    *,
    seed=0,
    seconds=TRIAL_SECONDS,
    look_ahead=4,
    seconds_budget=None,
):
    """One host, to its end."""
    known = contender(recorded)
    with Study.open(url, key_of(recorded)) as study:

        def keep(trial, kernels):
            kept = study.add(trial, {})
            record("report" if kept else "lost", trial.config)
            return kept

        done = tuner.tune(
            recorded.problem,
            [known],
            evaluator=Slow(recorded, record, seconds),
            compiler=None,
            device=perfmodel.default_chip("sm_90"),
            search=search.make_search("portfolio", [known], seed),
            budget=tuner.Budget(trials, seconds_budget),
            threads=1,
            look_ahead=look_ahead,
            past=study.trials(),
            keep=keep,
            study=study,
        )
    record("left" if done.left_to else "finals")
    return done


def read(path):
    """The lines of a host: what, configuration or None, time. A kill leaves no part of one."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [(what, None if c is None else Config(c), ns) for what, c, ns in lines]


def fork(recorded, url, folder, number, trials):
    if pid := os.fork():
        return pid
    code = 1
    try:
        # As if each were a machine of its own: that it is dead shows by its silence only.
        machine = uuid.uuid4().hex
        hosts_module._machine = lambda: machine
        hosts_module.BEAT_SECONDS, hosts_module.SILENT_SECONDS = 0.2, 2.0
        run(recorded, url, Recorder(folder / f"{number}.log"), trials, seed=number)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(url, folder, hosts, kills, trials):
    recorded = replay.load_space(SPACE)
    rng = random.Random(0)
    started = {number: fork(recorded, url, folder, number, trials) for number in range(hosts)}
    killed, failed = [], []
    for number in range(hosts, hosts + kills):
        time.sleep(1.0)
        victim = rng.choice(sorted(started))
        os.kill(started[victim], signal.SIGKILL)
        _, status = os.waitpid(started.pop(victim), 0)
        if os.WIFSIGNALED(status):
            killed.append(victim)
        started[number] = fork(recorded, url, folder, number, trials)
    for number, pid in started.items():
        _, status = os.waitpid(pid, 0)
        if status:
            failed.append(number)
    print(json.dumps({"killed": killed, "failed": failed}))


if __name__ == "__main__":
    place, name, *numbers = sys.argv[1:]
    main(place, Path(name), *map(int, numbers))

# SPDX-License-Identifier: Apache-2.0
"""A worker process from its parent's side: whatever it does, the parent goes on without it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripted import is_gone

from tunegen.errors import DeviceError
from tunegen.model import Array
from tunegen.runner.errand import Errand
from tunegen.runner.process import COMMAND, Lost, Worker
from tunegen.runner.protocol import Enter, Entered, Failed, Leave, Open, Opened, Prepare, Prepared
from tunegen.runner.station import Station

FAKE = Path(__file__).parent / "fake_worker.py"

# Long enough for a busy machine to start Python: where it matters that nothing waits for it, the
# test says so.
LONG = 60.0


def fake(mode):
    return Worker((sys.executable, str(FAKE), mode))


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def prepare(elements=10):
    given = {"x": np.zeros(elements, np.float32)}
    array = Array("x", (elements,), (1,), "fp32", "in")
    return Prepare((array,), {}, 0, 1, (), given=given)


# --- answers -------------------------------------------------------------------------------------


def test_requests_are_answered_one_after_the_other():
    with fake("honest") as worker:
        sizes = [worker.ask(prepare(n), LONG).bytes for n in (10, 1000)]
    assert sizes[1] - sizes[0] == pytest.approx(990 * 4, abs=16)
    assert is_gone(worker.pid)


def test_a_request_larger_than_the_pipe():
    with fake("honest") as worker:
        answer = worker.ask(prepare(3_000_000), LONG)
    assert isinstance(answer, Prepared)
    assert answer.bytes > 12_000_000


def test_an_answer_can_be_fetched_later():
    with fake("late") as worker:
        started = time.monotonic()
        worker.post(Leave(), LONG)
        assert worker.take(wait=False) is None
        assert time.monotonic() - started < 0.5
        assert isinstance(worker.take(), Prepared)


def test_the_real_worker_says_that_there_is_no_gpu():
    """It starts, loads no compiler, and answers, whatever this machine has."""
    with Worker(COMMAND, {"CUDA_VISIBLE_DEVICES": ""}) as worker:
        answer = worker.ask(Open(0), LONG)
    assert isinstance(answer, Failed), answer
    assert answer.kind == "device"
    assert answer.reason


# --- losses --------------------------------------------------------------------------------------

LOSSES = {
    "exits": ("died", "exit code 3", "the last words"),
    "crashes": ("died", "killed by SIGSEGV", ""),
    "half_a_frame": ("died", "exit code 0", ""),
    "no_pickle": ("garbled", "no answer (UnpicklingError)", ""),
    "no_module": ("garbled", "no answer (ModuleNotFoundError)", ""),
    "no_answer": ("garbled", "it answered a dict", ""),
    "no_frame": ("garbled", "announced an answer of", ""),
    "lets_go": ("died", "it closed its pipe", ""),
}


@pytest.mark.parametrize("mode", LOSSES)
def test_a_loss_is_told_apart_and_leaves_no_process(mode):
    before = open_descriptors()
    worker = fake(mode)
    loss = worker.ask(prepare(), LONG)
    kind, reason, printed = LOSSES[mode]
    assert isinstance(loss, Lost), loss
    assert loss.kind == kind
    assert reason in loss.reason
    assert str(worker.pid) in loss.reason
    assert printed in "".join(loss.printed)
    assert not worker.alive
    assert is_gone(worker.pid)
    assert worker.ask(prepare(), LONG) == loss, "and so it remains"
    worker.close()
    assert open_descriptors() == before


@pytest.mark.parametrize(("mode", "elements"), [("hangs", 10), ("never_reads", 10**6)])
def test_a_hang_is_ended_in_time(mode, elements):
    worker = fake(mode)
    time.sleep(0.3)  # so that it is the hang that is waited for
    started = time.monotonic()
    loss = worker.ask(prepare(elements), 0.5)
    assert isinstance(loss, Lost)
    assert loss.kind == "timed_out"
    assert "within 0.5 s" in loss.reason
    assert 0.5 <= time.monotonic() - started < 5
    assert is_gone(worker.pid)


def test_what_a_hanging_worker_printed_is_kept():
    worker = fake("hangs")
    worker.post(Leave(), 2.0)
    loss = worker.take()
    assert loss.printed == ("about to hang",)
    assert str(loss).endswith(": about to hang")


def test_a_late_answer_answers_nothing():
    worker = fake("late")
    assert worker.ask(Leave(), 0.3).kind == "timed_out"
    assert is_gone(worker.pid)


def test_what_nobody_asked_for_is_no_answer():
    with fake("chatters") as worker:
        wait_until(lambda: select_readable(worker))
        loss = worker.ask(prepare(), LONG)
    assert loss.kind == "garbled"
    assert "without being asked" in loss.reason


def select_readable(worker):
    return select.select([worker._answers], [], [], 0)[0]


def test_what_the_worker_started_ends_with_it(tmp_path, monkeypatch):
    file = tmp_path / "pids"
    monkeypatch.setenv("FAKE_WORKER_FILE", str(file))
    with fake("has_a_child") as worker:
        wait_until(lambda: file.exists() and file.read_text().count(" "))
        pids = [int(pid) for pid in file.read_text().split()]
        assert not any(is_gone(pid) for pid in pids)
        assert worker.ask(Leave(), 0.2).kind == "timed_out"
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_command_that_does_not_exist():
    before = open_descriptors()
    with pytest.raises(DeviceError, match="cannot be started"):
        Worker(("/no/such/program",))
    assert open_descriptors() == before


def test_closing_is_polite_and_may_be_repeated():
    worker = fake("honest")
    assert isinstance(worker.ask(Leave(), LONG), Prepared)
    worker.close()
    assert worker._process.returncode == 0
    worker.close()
    assert isinstance(worker.ask(Leave(), LONG), Lost)


def test_an_interrupted_question_ends_the_worker():
    """Its answer would be taken for that of the next one."""
    worker = fake("hangs")

    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.ask(Leave(), LONG)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert is_gone(worker.pid)


PARENT = """
import sys, time
from tunegen.runner.process import Worker
worker = Worker((sys.executable, sys.argv[1], sys.argv[2]))
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("mode", ["honest", "stuck"])
def test_the_worker_dies_with_its_parent(mode, tmp_path):
    """One that reads sees the end of the pipe; one that waits for its GPU is killed."""
    file = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(FAKE), mode],
        stdout=subprocess.PIPE, text=True, cwd=FAKE.parents[1],
        env={**os.environ, "FAKE_WORKER_FILE": str(file)},
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    if mode == "stuck":
        wait_until(lambda: file.exists() and file.read_text())
    assert not is_gone(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: is_gone(pid))


# --- stations ------------------------------------------------------------------------------------


def station(script="{}"):
    return Station(lambda: fake(script))


def test_a_station_opens_once_and_closes():
    with station() as card:
        opened = card.open()
        assert isinstance(opened, Opened)
        assert card.open() is opened
        assert card.restarts == 0
    assert is_gone(opened.pid)


def test_a_fresh_worker_is_brought_to_the_same_state(tmp_path):
    log = tmp_path / "log"
    with station(f'{{"log": "{log}"}}') as card:
        first = card.open().pid
        card.prepare(prepare(), LONG)
        os.kill(first, signal.SIGKILL)
        assert isinstance(card.ask(prepare(20), LONG), Prepared)
        second = card.open().pid
    assert first != second
    assert card.restarts == 1
    assert card.restarting_seconds > 0
    told = [line.split() for line in log.read_text().splitlines()]
    assert [what for pid, what in told if int(pid) == second] == ["Open", "Prepare", "Prepare"]


def test_a_request_that_kills_its_workers_is_asked_twice(tmp_path):
    """One that died may have been killed by somebody else; two were not."""
    starts = []

    def start():
        starts.append(fake("{}" if len(starts) != 1 else "exits"))
        return starts[-1]

    with Station(start) as card:
        card.open()
        answer = card.ask("no request", LONG)
        assert isinstance(answer, Lost)
        assert answer.kind == "died"
        assert len(starts) >= 2


def test_a_device_that_cannot_be_opened():
    with (
        station('{"cannot_open": "no device 0: there are 0"}') as card,
        pytest.raises(DeviceError, match="no device 0") as caught,
    ):
        card.open()
    assert "tunegen doctor" in str(caught.value)


def test_a_worker_that_dies_at_once_is_tried_again_and_given_up(monkeypatch):
    monkeypatch.setattr("tunegen.runner.station._PAUSE_SECONDS", 0.01)
    started = []

    def start():
        started.append(fake("exits"))
        return started[-1]

    with (
        Station(start) as card,
        pytest.raises(DeviceError, match="exit code 3: the last words"),
    ):
        card.open()
    assert len(started) == 3
    assert all(is_gone(worker.pid) for worker in started)


def test_too_little_memory_is_said():
    reason = "2 sets need 1,000 bytes of device memory, 10 are free"
    with (
        station(f'{{"cannot_prepare": "{reason}"}}') as card,
        pytest.raises(DeviceError, match="1,000 bytes of device memory, 10 are free"),
    ):
        card.prepare(prepare(), LONG)


# --- errands -------------------------------------------------------------------------------------


def test_an_errand_runs_while_the_parent_does_something_else():
    with fake('{"vendor": {"seconds": 0.3}}') as worker:
        errand = Errand(
            worker, [(Open(0), LONG), (prepare(), LONG), (Enter("vendor", None), LONG)]
        )
        turns = 0
        while len(errand.answers) < 3:
            started = time.monotonic()
            errand.advance()
            assert time.monotonic() - started < 0.25
            turns += 1
            time.sleep(0.01)
        errand.finish()
    assert turns > 3
    assert [type(answer) for answer in errand.answers] == [Opened, Prepared, Entered]
    assert errand.failure == ""


@pytest.mark.parametrize("mode", ["{}", "exits"])
def test_the_first_failure_ends_an_errand(mode):
    with fake(mode) as worker:
        errand = Errand(
            worker, [(Open(0), LONG), (Enter("vendor", None), LONG), (prepare(), LONG)]
        )
        errand.finish()
        errand.advance()
    assert errand.failure in ("torch is not there",) or "exit code 3" in errand.failure
    assert len(errand.answers) <= 1

# SPDX-License-Identifier: Apache-2.0
"""The worker as a process: frames on pipes, signals, exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_gpu import FakeMonitor, Fault
from problems import Doubling

from tunegen import device
from tunegen.runner.protocol import (
    CONTEXT_LOST,
    PRELOAD,
    Close,
    Failed,
    Leave,
    Open,
    Opened,
    Prepared,
    Tried,
    Try,
    receive,
    send,
)
from tunegen.runner.worker import serve


class Served:
    """A worker on a thread of this process, at the other end of two pipes."""

    def __init__(self, problem):
        self._theirs, write_fd = os.pipe()
        read_fd, self._answers_in = os.pipe()
        self.requests = open(write_fd, "wb")  # noqa: SIM115 (closed by the tests)
        self.answers = open(read_fd, "rb")  # noqa: SIM115
        self.code = None
        opened = (problem.gpu, FakeMonitor(problem.gpu))

        def run():
            self.code = serve(self._theirs, self._answers_in, lambda index: opened)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def ask(self, request):
        send(self.requests, request)
        return receive(self.answers)

    def ended(self):
        """The exit code."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.code

    def close(self):
        for file in (self.requests, self.answers):
            with contextlib.suppress(BrokenPipeError):
                file.close()


@pytest.fixture
def problem():
    return Doubling()


@pytest.fixture
def served(problem):
    served = Served(problem)
    yield served
    served.close()
    served.ended()


def test_requests_are_answered_in_order(problem, served):
    assert isinstance(served.ask(Open(0)), Opened)
    assert isinstance(served.ask(problem.prepare_request()), Prepared)
    answer = served.ask(Try(problem.right(us=7000.0), 1e-6, "burst", budget_ms=1.0))
    assert isinstance(answer, Tried)
    assert answer.outcome.median_us == 7000
    send(served.requests, Close())
    assert served.ended() == 0


def test_the_end_of_the_pipe_is_the_end(served):
    served.ask(Open(0))
    served.requests.close()
    assert served.ended() == 0


def test_half_a_request_is_the_end(served):
    served.requests.write(b"\x40\0\0\0\0\0\0\0half of it")
    served.requests.close()
    assert served.ended() == 0


def test_an_answer_that_nobody_reads_is_the_end(served):
    served.answers.close()
    send(served.requests, Open(0))
    assert served.ended() == 0


def test_a_lost_context_is_answered_and_then_the_end(problem, served):
    def fault(memory, values):
        raise Fault("CUDA_ERROR_ILLEGAL_ADDRESS")

    served.ask(Open(0))
    served.ask(problem.prepare_request())
    answer = served.ask(Try(problem.kernel(fault), 1e-6, "burst"))
    assert isinstance(answer, Failed)
    assert answer.sticky
    assert served.ended() == CONTEXT_LOST


def test_other_failures_are_not_the_end(served):
    assert isinstance(served.ask(Leave()), Failed)
    assert isinstance(served.ask(Open(0)), Opened)


# --- as a process of its own ---------------------------------------------------------------------


@pytest.fixture
def start():
    """Start a worker process; its input, its output and the process."""
    started = []

    def start(**environment):
        theirs, mine = os.pipe()
        answers, answers_in = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tunegen.runner.worker", str(theirs), str(answers_in),
             str(os.getpid())],
            pass_fds=(theirs, answers_in), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )  # fmt: skip
        os.close(theirs)
        os.close(answers_in)
        files = (open(mine, "wb"), open(answers, "rb"))  # noqa: SIM115
        started.append((*files, process))
        return started[-1]

    yield start
    for requests, answers, process in started:
        process.kill()
        process.communicate()
        requests.close()
        answers.close()


def test_a_machine_without_a_gpu_is_an_answer(start):
    if not device.find_gpus().reason:
        pytest.skip("there is a GPU")
    requests, answers, process = start(**{PRELOAD: "torch"})
    send(requests, Open(0))
    answer = receive(answers)
    assert isinstance(answer, Failed)
    assert (answer.sticky, answer.kind) == (False, "device")
    assert answer.reason
    send(requests, Close())
    assert process.wait(20) == 0
    assert process.stdout.read() == b""


def test_ctrl_c_is_for_the_parent(start):
    requests, answers, process = start()
    send(requests, Leave())
    assert isinstance(receive(answers), Failed)  # it is up
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    send(requests, Leave())
    assert isinstance(receive(answers), Failed)
    requests.close()
    assert process.wait(20) == 0


def test_what_is_no_request_ends_it_with_a_traceback(start):
    requests, answers, process = start()
    send(requests, "please")
    with pytest.raises(EOFError):
        receive(answers)
    assert process.wait(20) == 1
    assert b"Traceback" in process.stdout.read()


def test_the_worker_loads_neither_compiler_nor_search():
    code = (
        "import sys, tunegen.runner.worker\n"
        "names = {'optuna', 'jinja2', 'rich', 'click', 'msgspec', 'torch', 'tunegen.compiler',"
        " 'tunegen.codegen', 'tunegen.kernels', 'tunegen.search', 'tunegen.tuner',"
        " 'cuda.bindings.nvrtc'}\n"
        "print(sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

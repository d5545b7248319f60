# SPDX-License-Identifier: Apache-2.0
"""The process that touches the GPU: requests in, answers out, until the pipe ends.

It is started as :mod:`tunegen.runner.protocol` says. What kernels do wrong is an answer. After an
error that loses the device context it answers once more, and ends with :data:`CONTEXT_LOST`. An
error of its own ends it with a traceback, which the parent quotes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from tunegen.device import CudaError, Gpu, Monitor, open_gpu
from tunegen.errors import DeviceError
from tunegen.runner.contest import Contest
from tunegen.runner.lifeline import die_with_parent
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import (
    CONTEXT_LOST,
    PRELOAD,
    Answer,
    Block,
    Close,
    Enter,
    Entered,
    Failed,
    Leave,
    Open,
    Opened,
    Prepare,
    Prepared,
    Request,
    Transfer,
    Try,
    Verify,
    receive,
    send,
)
from tunegen.runner.transfer import transfer
from tunegen.runner.trial import try_out, verify
from tunegen.runner.vendor import preload

OpenGpu = Callable[[int], tuple[Gpu, Monitor]]


class Worker:
    """Serves requests, one at a time, on one device and one prepared problem."""

    def __init__(self, open_gpu: OpenGpu = open_gpu) -> None:
        self._open_gpu = open_gpu
        self._device: tuple[Gpu, Monitor] | None = None
        self._problem: tuple[Operands, Contest] | None = None

    def handle(self, request: Request) -> Answer:
        """The answer to a request other than :class:`Close`, which ends the loop."""
        try:
            return self._answer(request)
        except CudaError as error:
            ours = not error.foreign and isinstance(request, Try | Verify | Enter | Block)
            return Failed(str(error), error.sticky, "kernel" if ours else "device")
        except DeviceError as error:
            return Failed(str(error), False, "device")

    def _answer(self, request: Request) -> Answer:
        match request:
            case Open(index=index):
                return self._open(index)
            case Prepare():
                return self._prepare(request)
            case Try():
                return try_out(self._gpu, self._operands, request)
            case Verify():
                return verify(self._gpu, self._operands, request)
            case Enter():
                return self._contest.enter(request)
            case Block(name=name, policy=policy, seconds=seconds):
                return self._contest.block(name, policy, seconds)
            case Transfer():
                return transfer(self._gpu, request)
            case Leave():
                self._contest.leave()
                return Entered()
            case _:
                raise ValueError(f"a {type(request).__name__} is not to be answered")

    def _open(self, index: int) -> Opened:
        gpu, monitor = self._device = self._open_gpu(index)
        return Opened(
            device=gpu.device_class(),
            driver=monitor.driver(),
            free_bytes=gpu.free_bytes(),
            pid=os.getpid(),
            uuid=monitor.uuid,
            nvml_pids=monitor.own_pids,
            telemetry=monitor.read(),
        )

    def _prepare(self, request: Prepare) -> Prepared:
        gpu = self._gpu
        if self._problem is not None:
            operands, contest = self._problem
            self._problem = None
            contest.leave()
            operands.close()
        started = time.perf_counter()
        operands = Operands(gpu, request)
        self._problem = operands, Contest(gpu, self._monitor, operands)
        return Prepared(operands.bytes, time.perf_counter() - started)

    @property
    def _gpu(self) -> Gpu:
        if self._device is None:
            raise DeviceError("no device has been opened")
        return self._device[0]

    @property
    def _monitor(self) -> Monitor:
        assert self._device is not None
        return self._device[1]

    @property
    def _operands(self) -> Operands:
        if self._problem is None:
            raise DeviceError("no problem has been prepared")
        return self._problem[0]

    @property
    def _contest(self) -> Contest:
        if self._problem is None:
            raise DeviceError("no problem has been prepared")
        return self._problem[1]


def serve(read_fd: int, write_fd: int, open_gpu: OpenGpu = open_gpu) -> int:
    """Answer what comes in on one file descriptor on the other, until :class:`Close` or the end of
    the pipe; the exit code."""
    worker = Worker(open_gpu)
    try:
        with open(read_fd, "rb") as requests, open(write_fd, "wb") as answers:
            while not isinstance(request := receive(requests), Close):
                answer = worker.handle(request)
                send(answers, answer)
                if isinstance(answer, Failed) and answer.sticky:
                    return CONTEXT_LOST
    except (EOFError, BrokenPipeError):
        pass  # the parent has gone
    return 0


def main(arguments: list[str]) -> None:
    """The process: READ_FD WRITE_FD PARENT_PID."""
    read_fd, write_fd, parent = map(int, arguments)
    die_with_parent(parent)
    # Ctrl-C is for the parent: it decides what becomes of what is under way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ.get(PRELOAD) == "torch":
        preload()
    code = serve(read_fd, write_fd)
    # Libraries that clean up at exit would meet a context that is lost, and may wait for ever.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""A worker in this process, on a GPU that is none: for what asks a worker and what it answers."""

from __future__ import annotations

import pickle

import check_twins
from fake_gpu import FakeGpu, FakeKernel, FakeMonitor, compiled

from tunegen.runner.process import Lost
from tunegen.runner.worker import Worker


class InProcess:
    """Has the methods of :class:`tunegen.runner.process.Worker`. ``intercept`` may answer in
    place of the worker, or return None."""

    pid = 1

    def __init__(self, gpu, *, monitor=FakeMonitor, intercept=lambda request: None):
        self.worker = Worker(lambda index: (gpu, monitor(gpu)))
        self.alive = True
        self.requests = []
        self._intercept = intercept

    def ask(self, request, timeout_s):
        assert timeout_s > 0
        if not self.alive:
            return Lost("died", "worker 1: it was ended")
        request = pickle.loads(pickle.dumps(request))
        self.requests.append(request)
        answer = self._intercept(request) or self.worker.handle(request)
        self.alive = not isinstance(answer, Lost)
        return answer

    def close(self):
        self.alive = False

    kill = close


class NamingCompiler:
    """Compiles nothing: the "cubin" is what ``name`` makes of a source."""

    def __init__(self, name=lambda source: source.name):
        self._name = name
        self.sources = []

    def compile(self, source, target):
        self.sources.append(source)
        return compiled(source.name, self._name(source), target)


def idle(memory, launch, values):
    """A kernel that takes its time and does nothing."""


def gpu_with(kernels, **options):
    """A GPU with these kernels, as microseconds or functions that give them, and the checks'."""
    fakes = {name: FakeKernel(idle, us) for name, us in kernels.items()}
    return FakeGpu({**check_twins.kernels(), **fakes}, **options)

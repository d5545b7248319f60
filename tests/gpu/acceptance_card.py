# SPDX-License-Identifier: Apache-2.0
"""A problem prepared on the GPU, to try configurations of it one by one, compiled ahead."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from acceptance_common import gpus

from tunegen import calibration, compiler, kernels, perfmodel, session
from tunegen.model import (
    Candidate,
    Compiler,
    Config,
    DeviceClass,
    GpuInfo,
    KernelSpec,
    Operation,
    Problem,
)
from tunegen.runner import ratios, rounds
from tunegen.runner.protocol import Enter, Entered, Executable, Opened
from tunegen.runner.quarantine import Fault
from tunegen.runner.station import ENTER_SECONDS, Station, prepare_seconds
from tunegen.session.setups import ProblemSetup, rotation
from tunegen.tuner.building import Builder, Built
from tunegen.tuner.loop import cores

# Configurations compiled ahead of the GPU.
_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Card:
    """One spec's problem on a GPU, its operands prepared in the worker of ``station``.

    ``rated`` is the device with the rates of its calibration, where there is one: what the model
    predicts by.
    """

    gpu: GpuInfo
    station: Station
    opened: Opened
    spec: KernelSpec
    problem: Problem
    device: DeviceClass
    rated: DeviceClass
    calibrated: bool
    setup: ProblemSetup
    compiler: Compiler
    sets: int

    @property
    def operation(self) -> Operation:
        return self.spec.operation

    @property
    def text(self) -> str:
        """``matmul 4096x4096x4096 fp32 nn``"""
        words = (self.operation.name, self.operation.text(self.problem), self.problem.dtype)
        return " ".join(filter(None, (*words, self.problem.layout)))

    def built(self, configs: Iterable[Config]) -> Iterator[tuple[Config, Built]]:
        """Configurations in their order, each with what became of it in the compiler."""
        build = Builder(self.problem, self.device, self.compiler)
        left = iter(configs)
        waiting: deque[tuple[Config, Future[Built]]] = deque()
        pool = ThreadPoolExecutor(cores())
        try:
            while True:
                while len(waiting) < _AHEAD and (config := next(left, None)) is not None:
                    waiting.append((config, pool.submit(build, self.spec, config)))
                if not waiting:
                    return
                config, future = waiting.popleft()
                yield config, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def candidate(self, config: Config) -> Candidate:
        """A configuration that is known to compile."""
        ((_, built),) = self.built([config])
        return Candidate(self.spec, config, built.kernels)

    def executable(self, candidate: Candidate) -> Executable:
        assert candidate.kernels is not None
        plan = self.spec.bound_plan(candidate.config, self.problem, self.device)
        return Executable(candidate.kernels, plan)


@contextlib.contextmanager
def prepared(
    operation: str,
    problem: str,
    *,
    dtype: str | None = None,
    layout: str | None = None,
    spec: str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
    seed: int = 0,
) -> Iterator[Card]:
    """The first GPU with a problem prepared on it; without ``spec`` the operation's first one."""
    gpu = gpus.choose_gpu("gpu")
    assert gpu is not None
    with gpus.station(gpu) as station:
        opened = station.open()
        asked = session.request(
            operation, arch=gpu.arch, problem=problem, dtype=dtype, layout=layout, spec=spec,
            specs=specs,
        )  # fmt: skip
        wanted = dataclasses.replace(asked, device=gpus.device_class(opened))
        nvrtc = compiler.NvrtcCompiler(compiler.KernelCache())
        setup = ProblemSetup(wanted.operation, wanted.device, nvrtc)
        sets = rotation(
            wanted.operation, wanted.problem, wanted.device.l2_bytes, opened.free_bytes
        )
        request = setup(wanted.problem, inputs="normal", seed=seed, sets=sets)
        station.prepare(request, prepare_seconds(wanted.operation.flops(wanted.problem)))
        known = calibration.find(wanted.device)
        yield Card(
            gpu=gpu,
            station=station,
            opened=opened,
            spec=wanted.spec(),
            problem=wanted.problem,
            device=wanted.device,
            rated=perfmodel.calibrated(wanted.device, known),
            calibrated=known is not None,
            setup=setup,
            compiler=nvrtc,
            sets=sets,
        )


def burst_contest(
    card: Card, configs: Mapping[str, Config], trial_us: Sequence[float], seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Configurations against each other in bursts: the times of each, one for each round, and the
    reasons of those that fell out."""
    faults: dict[str, str] = {}
    for name, config in configs.items():
        executable = card.executable(card.candidate(config))
        answer = card.station.enter(Enter(name, executable), ENTER_SECONDS)
        if not isinstance(answer, Entered):
            faults[name] = Fault.of(answer).reason
    able = [name for name in configs if name not in faults]
    count, block_s = rounds.burst_rounds(seconds, len(able), max(trial_us))
    played = rounds.play(
        {name: card.station for name in able}, "burst", ratios.shuffled(able, count, seed=0),
        block_s, card.station.forget,
    )  # fmt: skip
    faults |= {name: fault.reason for name, fault in played.faults.items()}
    return rounds.burst_times(played), faults

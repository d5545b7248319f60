# SPDX-License-Identifier: Apache-2.0
"""Timing the probes of a calibration: contests, a search around their winners, and once more
elsewhere in memory."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from tunegen import codegen
from tunegen.errors import CompileError
from tunegen.kernels import calibrate as probes
from tunegen.kernels.checks import DEFINITIONS
from tunegen.model import (
    CompiledKernel,
    Compiler,
    Config,
    DeviceClass,
    KernelDefinition,
    Telemetry,
)
from tunegen.runner import rounds
from tunegen.runner.finals import SUSTAINED_FROM_US
from tunegen.runner.protocol import Enter, Entered, Executable, Failed, Policy, Prepare
from tunegen.runner.station import ENTER_SECONDS, Station, prepare_seconds

# Calls go from one set of operands to the next, at boost clocks: what a ceiling is. Streams that
# take so long that finals would time them in sustained blocks are timed so as well: on an H200
# copies of 2 GB were half a percent faster back to back than with rests.
POLICY: Policy = "burst"
_SUSTAINED = " sustained"

# Repeats of the contenders that are close to the best after one block each, how close that is,
# and how many may be: blocks of one kernel differ by much less.
REPEATS = 7
_CLOSE, _FINALISTS = 1.05, 5

# Seconds of device time in which one contender is timed once.
_BLOCK_SECONDS = 0.01

# How many of the contenders that are close have sustained blocks, and the seconds of one.
_SUSTAINED_CONTENDERS, _SUSTAINED_BLOCK_SECONDS = 3, 0.3

# How often a search goes on from a better neighbour: at the largest sizes of a stream, whose rates
# are the ceilings of all that is larger, and at the others, which begin with what those found.
_FAR, _NEAR, _FAR_SIZES = 3, 1, 2

# Blocks of one kernel within a second differed by up to so much on an H200: what is ahead by less
# is not better.
_NOISE = 1.001

# The part of the free memory that operands may take. Guard bands and originals come on top, and a
# third set where there were two.
_MEMORY_SHARE = 0.4

Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A probe with the microseconds of a call, one for each repeat, by contender; what was timed
    in sustained blocks is called so. Of a stream those of the winner alone, in both of the places
    in memory. ``tried`` counts all contenders that there were."""

    probe: probes.Probe
    times: Times
    tried: int


@dataclass(slots=True)
class Measured:
    """The outcome of every probe, what the card was like meanwhile, and the probes that gave
    nothing, with the reason. ``nvrtc`` is the compiler's version."""

    nvrtc: str
    outcomes: list[Outcome] = field(default_factory=list)
    telemetry: list[Telemetry] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def measure(
    card: Station,
    device: DeviceClass,
    free_bytes: int,
    nvrtc: Compiler,
    on_probe: Callable[[str, int, int], None] | None = None,
    seed: int = 0,
) -> Measured:
    """Run every probe on the device that ``card`` has opened, and when all are done the winner of
    every stream once more, on operands that lie elsewhere: the rate of memory differs between two
    places, and between two minutes, by more than between repeats.

    Contenders that fail fall out. Raises :class:`DeviceError` where no worker can be had any more.
    """
    planned = list(probes.every(device, int(free_bytes * _MEMORY_SHARE)))
    total = len(planned) + sum(probe.kind == "stream" for probe in planned)
    rng = random.Random(seed)
    with ThreadPoolExecutor(thread_name_prefix="tunegen-compile") as pool:
        kernels = _Kernels(pool, device.arch, nvrtc)
        kernels.compile(DEFINITIONS)
        kernels.compile(d for p in planned for c in p.contenders for d in c.definitions)
        checks = tuple(kernels.of(DEFINITIONS))
        measured = Measured(checks[0].nvrtc)

        def contest_of(probe: probes.Probe, name: str, number: int) -> _Contest:
            if on_probe is not None:
                on_probe(name, number, total)
            request = Prepare(
                probe.arrays, probe.scalars, seed + number, probe.sets, checks,
                offsets=probe.offsets,
            )  # fmt: skip
            card.prepare(request, prepare_seconds(0))
            policy: Policy = "warm" if probe.name == "l2_read" else POLICY
            return _Contest(card, kernels, policy, rng, measured)

        winners: dict[str, list[Config]] = {}  # of each stream, from the largest size on
        finished = []
        for number, probe in enumerate(planned):
            contest = contest_of(probe, label(probe), number)
            outcome, winner = _first(contest, probe, winners.setdefault(probe.name, []))
            if outcome is None:
                why = "; ".join(dict.fromkeys(contest.reasons))
                measured.failures.append(f"{label(probe)}: {why}")
            elif winner is None:
                measured.outcomes.append(outcome)
            else:
                finished.append((outcome, winner))
        for number, (outcome, winner) in enumerate(finished, len(planned)):
            name = f"{label(outcome.probe)}, elsewhere"
            contest = contest_of(outcome.probe.elsewhere(), name, number)
            measured.outcomes.append(_again(contest, outcome, winner))
            measured.failures += [f"{name}: {why}" for why in contest.reasons]
    return measured


def label(probe: probes.Probe) -> str:
    """``copy 2147 MB``, ``fp32``."""
    return f"{probe.name} {probe.amount / 1e6:.0f} MB" if probe.kind == "stream" else probe.name


def fastest(times: Times) -> str:
    """The contender with the lowest median."""
    return min(times, key=lambda name: statistics.median(times[name]))


# --- a probe -------------------------------------------------------------------------------------


def _first(
    contest: _Contest, probe: probes.Probe, winners: list[Config]
) -> tuple[Outcome | None, probes.Contender | None]:
    """All contenders for a block each, and those that are close in every repeat. A stream's are
    joined by the winner of the next larger size and by what a search from the best of them finds;
    its winner is named, and added to ``winners``."""
    contest.enter(probe.contenders)
    choices = probe.choices
    if choices is None:
        close = list(contest.times) if probe.kind == "launch" else contest.close()
        times = contest.repeat(close)
        return Outcome(probe, times, len(contest.tried)) if times else None, None
    contest.enter(choices.contenders(winners[-1:]))
    contest.search(choices, _FAR if len(winners) < _FAR_SIZES else _NEAR)
    times = contest.repeat(contest.close())
    if not times:
        return None, None
    if statistics.median(times[fastest(times)]) > SUSTAINED_FROM_US:
        times |= contest.sustain(times)
    winner = contest.tried[fastest(times).removesuffix(_SUSTAINED)]
    assert winner.config is not None
    winners.append(winner.config)
    own = {name: times[name] for name in _names(winner) if name in times}
    return Outcome(probe, own, len(contest.tried)), winner


def _again(contest: _Contest, outcome: Outcome, winner: probes.Contender) -> Outcome:
    """The outcome with as many repeats more, timed as the first ones were."""
    contest.enter([winner])
    more = contest.repeat(list(contest.times))
    if more and len(outcome.times) > len(more):
        more |= contest.sustain(more)
    both = {name: [*first, *more[name]] for name, first in outcome.times.items() if name in more}
    return Outcome(outcome.probe, both or outcome.times, outcome.tried)


def _names(contender: probes.Contender) -> tuple[str, str]:
    return contender.name, contender.name + _SUSTAINED


class _Contest:
    """Contenders on operands that are prepared: those ``tried``, the ``times`` of a first block of
    those that work, in microseconds, and the ``reasons`` of the others."""

    def __init__(
        self,
        card: Station,
        kernels: _Kernels,
        policy: Policy,
        rng: random.Random,
        measured: Measured,
    ) -> None:
        self._card = card
        self._kernels = kernels
        self._policy = policy
        self._rng = rng
        self._measured = measured
        self.tried: dict[str, probes.Contender] = {}
        self.times: dict[str, float] = {}
        self.reasons: list[str] = []

    def enter(self, contenders: Iterable[probes.Contender], again: Sequence[str] = ()) -> None:
        """Time a block of ``again``, and of each contender that has not been tried."""
        fresh = [c for c in contenders if c.name not in self.tried]
        self.tried |= {contender.name: contender for contender in fresh}
        self._kernels.compile(d for contender in fresh for d in contender.definitions)
        names = [*again, *(contender.name for contender in fresh if self._load(contender))]
        played = self._play(names, [names], self._policy, _BLOCK_SECONDS)
        self.times |= {name: own[0] for name, own in rounds.burst_times(played).items()}

    def _load(self, contender: probes.Contender) -> bool:
        try:
            executable = Executable(self._kernels.of(contender.definitions), contender.plan)
        except CompileError as error:
            self.reasons.append(str(error))
            return False
        answer = self._card.enter(Enter(contender.name, executable), ENTER_SECONDS)
        if isinstance(answer, Entered):
            return True
        self.reasons.append(answer.reason if isinstance(answer, Failed) else str(answer))
        return False

    def search(self, choices: probes.Choices, most: int) -> None:
        """Go from the best to the best of what differs from it in one parameter, ``most`` times or
        until none is better. The best is timed along with them: clocks and memory drift."""
        for _ in range(most):
            best = self._best()
            if best is None or best.config is None:
                return
            self.enter(choices.around(best.config), again=[best.name])
            better = min(self.times.values(), default=math.inf) * _NOISE
            if best.name in self.times and better >= self.times[best.name]:
                return

    def _best(self) -> probes.Contender | None:
        if not self.times:
            return None
        return self.tried[min(self.times, key=self.times.__getitem__)]

    def close(self) -> list[str]:
        """The best few, as far as they are close to the first of them."""
        ordered = sorted(self.times, key=self.times.__getitem__)[:_FINALISTS]
        return [name for name in ordered if self.times[name] <= _CLOSE * self.times[ordered[0]]]

    def repeat(self, names: Sequence[str]) -> dict[str, list[float]]:
        """The times of every repeat, in a random order of the contenders for each."""
        orders = [self._rng.sample(names, len(names)) for _ in range(REPEATS)]
        played = self._play(names, orders, self._policy, _BLOCK_SECONDS)
        self._note(played)
        return rounds.burst_times(played)

    def sustain(self, times: Times) -> dict[str, list[float]]:
        """Times in sustained blocks of the fastest contenders, there and back."""
        names = sorted(times, key=lambda name: statistics.median(times[name]))
        names = names[:_SUSTAINED_CONTENDERS]
        played = self._play(names, [names, names[::-1]], "sustained", _SUSTAINED_BLOCK_SECONDS)
        self._note(played)
        return {f"{name}{_SUSTAINED}": own for name, own in rounds.sustained_times(played).items()}

    def _play(
        self, names: Sequence[str], orders: Sequence[Sequence[str]], policy: Policy, seconds: float
    ) -> rounds.Played:
        asked = dict.fromkeys(names, self._card)
        played = rounds.play(asked, policy, orders, seconds, self._card.forget)
        for name, fault in played.faults.items():
            self.times.pop(name, None)
            self.reasons.append(fault.reason)
        return played

    def _note(self, played: rounds.Played) -> None:
        self._measured.telemetry += [
            block.after for own in played.blocks.values() for block in own
        ]


# --- kernels -------------------------------------------------------------------------------------


class _Kernels:
    """What has been compiled, on all cores: a kernel serves every size."""

    def __init__(self, pool: Executor, arch: str, nvrtc: Compiler) -> None:
        self._pool = pool
        self._arch = arch
        self._nvrtc = nvrtc
        self._found: dict[str, CompiledKernel | CompileError] = {}

    def compile(self, definitions: Iterable[KernelDefinition]) -> None:
        """Compile those that have not been."""
        wanted = {_key(definition): definition for definition in definitions}
        fresh = {key: wanted[key] for key in wanted if key not in self._found}
        self._found |= zip(fresh, self._pool.map(self._build, fresh.values()), strict=True)

    def _build(self, definition: KernelDefinition) -> CompiledKernel | CompileError:
        source = codegen.render_definition(definition, self._arch)
        try:
            return self._nvrtc.compile(source, self._arch)
        except CompileError as error:
            return error

    def of(self, definitions: Iterable[KernelDefinition]) -> tuple[CompiledKernel, ...]:
        """Compiled definitions; raises :class:`CompileError` for one that the compiler refused."""
        found = []
        for definition in definitions:
            kernel = self._found[_key(definition)]
            if isinstance(kernel, CompileError):
                raise kernel
            found.append(kernel)
        return tuple(found)


def _key(definition: KernelDefinition) -> str:
    return f"{definition.template} {sorted({**definition.types, **definition.constants}.items())}"

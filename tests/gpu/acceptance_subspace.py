# SPDX-License-Identifier: Apache-2.0
"""A part of a space measured to the last configuration, and what searches find in it.

The part is chosen by parameters, not by times: large tiles of every shape, every way to copy and
every depth, all else as the default has it. It is measured once, in random order, and kept as a
recorded space; searches are replayed on that, and what they chose is timed against the best.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_card import Card, burst_contest, prepared
from acceptance_common import Setting, Verdict

from tunegen import kernels, perfmodel, replay, search, tuner
from tunegen.model import Candidate, Config, DeviceClass, KernelSpec, Problem, Space
from tunegen.runner import ratios
from tunegen.runner.evaluator import GpuEvaluator
from tunegen.tuner.log import steady_us

SEEDS = tuple(range(10))
TRIALS = 100
CLOSE = 1.03
ENOUGH = 9

# Measuring ends after so long; what is left out then is random, since the order is.
MEASURING_SECONDS = 200.0
LEAST_CONFIGS = 800
CONTEST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Subspace:
    """A problem of a spec, and the parameters that are not fixed at the default's value, each with
    the values that it may take."""

    operation: str
    problem: str
    dtype: str
    layout: str | None
    spec: str
    free: Mapping[str, Sequence[int]]
    least_configs: int = LEAST_CONFIGS

    def problem_of(self, spec: KernelSpec) -> Problem:
        layout = {"layout": self.layout} if self.layout else {}
        return spec.operation.problem(self.problem, dtype=self.dtype, **layout)

    def space(self, spec: KernelSpec, problem: Problem, device: DeviceClass) -> Space:
        whole, default = spec.space(problem, device), spec.default(problem, device)
        parameters = []
        for parameter in whole.parameters:
            wanted = self.free.get(parameter.name, [default[parameter.name]])
            values = tuple(value for value in parameter.values if value in wanted)
            parameters.append(dataclasses.replace(parameter, values=values))
        return Space(tuple(parameters), whole.constraints)


MATMUL = Subspace(
    operation="matmul",
    problem="2048x2048x2048",
    dtype="fp32",
    layout="nn",
    spec="simt",
    free={
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "WARP_M": (4, 8, 16, 32, 64, 128),
        "WARP_N": (4, 8, 16, 32, 64, 128),
        "THREAD_M": (8, 16),
        "THREAD_N": (8, 16),
        "SHARED_BUFFERS": (0, 1, 2, 3, 4),
        "ASYNC_COPY": (0, 1),
        "BLOCK_K": (4, 8, 16, 32),
        "UNROLL_K": (4, 8, 16, 32),
        "MIN_BLOCKS": (1, 2),
    },
)


def run(setting: Setting, subspace: Subspace = MATMUL, processes: int | None = None) -> Verdict:
    with prepared(
        subspace.operation, subspace.problem, dtype=subspace.dtype, layout=subspace.layout,
        spec=subspace.spec,
    ) as card:  # fmt: skip
        measured = measure(card, subspace, setting)
        path = setting.out / "subspace.json"
        path.write_text(text_of(card, measured))
        best = min((m for m in measured.rows if m[1] is not None), key=lambda m: m[1] or 0.0)
        job = Replay(path, subspace, card.device, card.rated)
        winners = job.run_all(SEEDS, processes)
        found, faults, times = _contest(card, best, winners)
    ratio = {seed: ratios.ratio(times[found[seed]], times[ratios.leader(times)]).median
             for seed in SEEDS if found[seed] in times}  # fmt: skip
    close = sum(value <= CLOSE for value in ratio.values())
    ok = sum(us is not None for _, us in measured.rows)
    setting.say(
        f"  {card.text}: {len(measured.rows)} of {measured.valid} configurations tried, {ok} "
        f"timed, in {measured.seconds:.1f} s; best {best[1]:.2f} us"
    )
    setting.say("  seed: its winner's time over the best's")
    setting.say("  " + ", ".join(f"{seed}: {ratio.get(seed, float('nan')):.3f}" for seed in SEEDS))
    for name, reason in faults.items():
        setting.say(f"  {name} fell out: {reason}")
    passed = close >= ENOUGH and len(measured.rows) >= subspace.least_configs
    return Verdict(
        passed,
        f"{close} of {len(SEEDS)} seeds within {CLOSE - 1:.0%} of the best of "
        f"{len(measured.rows)} (>= {ENOUGH}); the worst {max(ratio.values(), default=0):.3f}",
        {
            "seconds": measured.seconds,
            "valid": measured.valid,
            "timed": ok,
            "best": {"us": best[1], "config": dict(best[0])},
            "winners": {seed: {"us": us, "config": dict(c), "trials": n}
                        for seed, (c, us, n) in winners.items()},
            "ratios": ratio,
            "times_us": times,
            "faults": faults,
        },
    )  # fmt: skip


# --- measuring -----------------------------------------------------------------------------------

Row = tuple[Config, float | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Configurations with their times in microseconds, None where they failed; the first is the
    default. ``valid`` is how many there are in all."""

    rows: list[Row]
    valid: int
    seconds: float


def measure(card: Card, subspace: Subspace, setting: Setting) -> Measured:
    """Every configuration of the part by the trials of a tune."""
    table = subspace.space(card.spec, card.problem, card.device).enumerate()
    default = card.spec.default(card.problem, card.device)
    judge = GpuEvaluator(card.station, card.device)
    started, rows = time.monotonic(), []
    for config, built in card.built(_order(table, default)):
        outcome = built.failure or judge.evaluate(
            Candidate(card.spec, config, built.kernels), card.problem
        )
        rows.append((config, steady_us(outcome) if outcome.ok else None))
        if not outcome.ok and outcome.kind != "rejected":
            setting.say(f"  {outcome.kind}: {config}: {outcome.reason}")
        if time.monotonic() - started > MEASURING_SECONDS:
            break
    return Measured(rows, len(table), time.monotonic() - started)


def _order(table: Sequence[Config], default: Config) -> Iterator[Config]:
    yield default
    for row in np.random.default_rng(0).permutation(len(table)):
        config = table[int(row)]
        if config != default:
            yield config


def text_of(card: Card, measured: Measured) -> str:
    """A recorded space as :mod:`tunegen.replay` reads it, one configuration a line."""
    names = list(measured.rows[0][0])
    head = {
        "space": card.text,
        "kernel": card.spec.name,
        "gpu": card.device.name,
        "params": {name: sorted({config[name] for config, _ in measured.rows}) for name in names},
    }
    lines = ",\n".join(
        json.dumps([[config[name] for name in names], us]) for config, us in measured.rows
    )
    return json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n'


# --- searching -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """Searches of a recorded part, with the model that a tune on the device has."""

    path: Path
    subspace: Subspace
    device: DeviceClass
    rated: DeviceClass

    def run_all(
        self, seeds: Sequence[int], processes: int | None
    ) -> dict[int, tuple[Config, float, int]]:
        """By seed the winner, its recorded time, and how many trials there were."""
        count = min(len(seeds), os.cpu_count() or 1) if processes is None else processes
        if count <= 1:
            return {seed: self.run(seed) for seed in seeds}
        # The GPU waits meanwhile, so that they run side by side.
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            return dict(zip(seeds, pool.map(self.run, seeds), strict=True))

    def run(self, seed: int) -> tuple[Config, float, int]:
        recorded = replay.load_space(self.path)
        (spec,) = kernels.specs_of(self.subspace.operation, only=self.subspace.spec)
        problem = self.subspace.problem_of(spec)
        table = recorded.space.enumerate()
        contender = search.Contender(
            spec=spec,
            table=table,
            default=spec.default(problem, self.device),
            prior_us=perfmodel.rank(spec, problem, self.rated, table),
        )
        found = tuner.tune(
            problem,
            [contender],
            evaluator=replay.ReplayEvaluator(recorded.outcomes),
            compiler=_Nothing(),
            device=self.device,
            search=search.make_search(search.DEFAULT_SAMPLER, [contender], seed),
            budget=tuner.Budget(TRIALS),
        )
        assert found.best is not None
        return found.best.config, found.best.outcome.median_us, len(found.trials)


class _Nothing:
    """The compiler of a replay, which compiles nothing."""

    def compile(self, source: Any, target: str) -> Any:
        raise AssertionError("a replay compiles nothing")


def _contest(
    card: Card, best: Row, winners: Mapping[int, tuple[Config, float, int]]
) -> tuple[dict[int, str], dict[str, str], dict[str, list[float]]]:
    """The winners and the best of the recorded times, each configuration once, against each
    other: under which name each seed's takes part, faults, times."""
    names: dict[Config, str] = {best[0]: "best"}
    for seed, (config, _, _) in winners.items():
        names.setdefault(config, f"seed {seed}")
    longest_us = [us for _, us, _ in winners.values()]
    times, faults = burst_contest(
        card, {name: config for config, name in names.items()}, longest_us, CONTEST_SECONDS
    )
    return {seed: names[config] for seed, (config, _, _) in winners.items()}, faults, times

# SPDX-License-Identifier: Apache-2.0
"""A tune on GPUs: search in a worker process on each, keep every trial, play the finals."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tunegen import calibration, search, tuner
from tunegen.database import Database
from tunegen.errors import DeviceError, NoValidConfig
from tunegen.model import (
    Candidate,
    CompiledKernel,
    Compiler,
    Contest,
    GpuInfo,
    Trial,
    TuningRecord,
)
from tunegen.runner.evaluator import Fastest, GpuEvaluator, Spent
from tunegen.runner.finals import Deciding, Finals
from tunegen.runner.protocol import Opened, Policy
from tunegen.runner.qualify import Finalist
from tunegen.runner.quarantine import Quarantine
from tunegen.runner.station import Station, prepare_seconds
from tunegen.session import cards, setups
from tunegen.session import gpu as gpus
from tunegen.session.cards import Card
from tunegen.session.contenders import list_contenders
from tunegen.session.records import find_exact
from tunegen.session.resolve import Request
from tunegen.session.studies import open_study, source_digests
from tunegen.session.warmstart import KnownPoint, warm_points
from tunegen.store import Study

POLICIES: tuple[Deciding, ...] = ("auto", "burst", "sustained", "warm")

# Finals of a search: checks of some seconds, then rounds and blocks.
FINALS_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How to measure: see the options of the command line of the same names."""

    policy: Deciding = "auto"
    finals_seconds: float = FINALS_SECONDS
    fresh: bool = False
    deterministic: bool = False
    shared: bool = False
    storage: str | None = None
    study: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of it. ``request`` has the device that was measured.

    ``begun_from`` was tried first. ``standing`` is the record that answers already, where there
    was nothing more to do.
    """

    request: Request
    judge: GpuEvaluator
    run: tuner.TuneRun
    spent: Spent
    opened: Opened
    valid_configs: Mapping[str, int]
    begun_from: tuple[KnownPoint, ...] = ()
    standing: TuningRecord | None = None
    shared: bool = False


def measure(
    wanted: Request,
    chosen: Sequence[GpuInfo],
    how: Measuring,
    *,
    budget: tuner.Budget,
    seed: int,
    sampler: str,
    warm: bool,
    nvrtc: Compiler,
    database: Database,
    on_event: Callable[[Trial, tuner.Progress], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Search on all ``chosen`` GPUs and play the finals on the first. ``on_note`` is told what a
    user should know.

    Raises :class:`DeviceError` where a GPU cannot be used, or others came onto the first;
    :class:`UsageError` where they are not of one device class; :class:`NoValidConfig` where there
    is nothing to run.
    """
    with ExitStack() as stack:
        stations = [stack.enter_context(gpus.station(gpu)) for gpu in chosen]
        # Loading torch takes seconds, in which GPUs are opened and configurations are ordered.
        vendor, no_vendor = gpus.vendor_worker(chosen[0])
        if vendor is not None:
            stack.callback(vendor.kill)
        opened = cards.open_cards(chosen, stations)
        wanted = dataclasses.replace(wanted, device=gpus.device_class(opened[0].opened))
        for card in opened:
            _check(wanted, card, how)
        contenders = list_contenders(wanted, calibration.find(wanted.device))
        setup = setups.ProblemSetup(wanted.operation, wanted.device, nvrtc)
        sets = setups.rotation(
            wanted.operation, wanted.problem, wanted.device.l2_bytes,
            min(card.opened.free_bytes for card in opened),
        )  # fmt: skip
        policy: Policy = "warm" if how.policy == "warm" else "burst"
        judges = _judges(wanted, opened, policy, _expected_us(contenders[0]))
        study = stack.enter_context(
            open_study(
                wanted, contenders, judges[0], storage=how.storage, fresh=how.fresh,
                named=how.study,
                # Times of a card that others use are a study of their own.
                policy=f"{policy}-shared" if how.shared else policy,
                tolerance=max(c.spec.tolerance(wanted.problem) for c in contenders),
            )
        )  # fmt: skip
        for warning in study.warnings:
            on_note(warning)
        past = study.trials()
        standing = None
        if _is_spent(budget, past, sampler, contenders, seed) and not how.fresh:
            standing = _standing(database, wanted, past)
        begun_from: tuple[KnownPoint, ...] = ()
        if warm and standing is None:
            begun_from = warm_points(
                database, wanted, contenders, budget.trials,
                study=study, past=past, on_note=on_note,
            )  # fmt: skip
        finals = None
        if standing is None:
            play = Finals(
                station=stations[0],
                setup=setup,
                problem=wanted.problem,
                operation=wanted.operation,
                device=wanted.device,
                seed=seed + 1,  # inputs that the search has not seen
                sets=sets,
                policy=how.policy,
                seconds=how.finals_seconds,
                vendor=vendor,
                no_vendor=no_vendor,
                deterministic=how.deterministic,
                quarantine=_quarantine(wanted, chosen[0]),
            )
            finals = _on_the_first(play, stations)
            flops = wanted.operation.flops(wanted.problem)
            request = setup(wanted.problem, inputs="normal", seed=seed, sets=sets)
            cards.prepare(opened, request, prepare_seconds(flops))
            if len(opened) > 1:
                _align(wanted, opened, judges, contenders[0], nvrtc)
        run = tuner.tune(
            wanted.problem,
            contenders,
            evaluator=judges[0],
            beside=judges[1:],
            compiler=nvrtc,
            device=wanted.device,
            search=search.make_search(
                sampler, contenders, seed, [point.first for point in begun_from]
            ),
            budget=budget,
            past=past,
            keep=_keep(study, wanted),
            study=study if standing is None else None,  # there is nothing to share
            finals=finals,
            on_event=on_event,
        )
        for place, reason in run.lost.items():
            gpu = chosen[place]
            on_note(f"GPU {gpu.index} ({gpu.name}) was lost, the search went on: {reason}")
        return Measured(
            request=wanted,
            judge=judges[0],
            run=run,
            spent=cards.together(judges),
            opened=opened[0].opened,
            valid_configs={c.spec.name: len(c.table) for c in contenders},
            begun_from=begun_from,
            standing=standing,
            shared=_shared(opened, run, how),
        )


def _judges(
    wanted: Request, opened: Sequence[Card], policy: Policy, expected_us: float | None
) -> list[GpuEvaluator]:
    fastest = Fastest()
    return [
        GpuEvaluator(
            card.station,
            wanted.device,
            policy=policy,
            quarantine=_quarantine(wanted, card.gpu),
            expected_us=expected_us,
            fastest=fastest,
            gpu=card.gpu.index if len(opened) > 1 else None,
        )
        for card in opened
    ]


def _quarantine(wanted: Request, gpu: GpuInfo) -> Quarantine:
    return gpus.quarantine(wanted.problem, wanted.arch, gpu)


def _align(
    wanted: Request,
    opened: Sequence[Card],
    judges: Sequence[GpuEvaluator],
    contender: search.Contender,
    nvrtc: Compiler,
) -> None:
    """Make the GPUs comparable by the operation's default. Where it does not even compile, its
    trial will say so."""
    build = tuner.Builder(wanted.problem, wanted.device, nvrtc)
    built = build(contender.spec, contender.default)
    if built.failure is None:
        default = Candidate(contender.spec, contender.default, built.kernels)
        cards.align(opened, judges, default, wanted.problem)


def _on_the_first(
    finals: Finals, stations: Sequence[Station]
) -> Callable[[Iterable[Finalist]], Contest]:
    """Finals while the other GPUs are let go: they share power, air and the host."""

    def play(ranked: Iterable[Finalist]) -> Contest:
        for station in stations[1:]:
            station.close()
        return finals(ranked)

    return play


def _is_spent(
    budget: tuner.Budget,
    past: Sequence[Trial],
    sampler: str,
    contenders: Sequence[search.Contender],
    seed: int,
) -> bool:
    """Whether a search that knows the past would try nothing more."""
    if len(past) >= budget.trials:
        return True
    if budget.least_gain is None or not past:
        return False
    asked = search.make_search(sampler, contenders, seed)
    asked.tell_past(past)
    return budget.is_enough(asked.expected_gain())


def _check(wanted: Request, card: Card, how: Measuring) -> None:
    """Raise what stands against measuring before anything is compiled or launched."""
    gpu = card.gpu
    if wanted.arch != gpu.arch:
        raise DeviceError(f"GPU {gpu.index} is {gpu.arch} to NVML and {wanted.arch} to CUDA")
    others = len(card.opened.telemetry.other_pids)
    if others and not how.shared:
        raise gpus.in_company(gpu, others)
    spec = wanted.spec()
    config = spec.default(wanted.problem, wanted.device)
    if not spec.bound_plan(config, wanted.problem, wanted.device).launches:
        raise NoValidConfig(
            f"the output of {wanted.operation.name} {wanted.operation.text(wanted.problem)} is "
            "empty: there is nothing to launch, and nothing to time"
        )


def _expected_us(contender: search.Contender) -> float | None:
    """What the model says of the default, if anything."""
    row = contender.table.row(contender.default)
    if contender.prior_us is None or row is None:
        return None
    us = float(contender.prior_us[row])
    return us if math.isfinite(us) else None


def _standing(database: Database, wanted: Request, past: Sequence[Trial]) -> TuningRecord | None:
    """The record that came of these very trials, if its finals were played."""
    record = find_exact(database, wanted)
    if record is None or record.evidence != "measured" or record.trials != len(past):
        return None
    ours = any(t.spec == record.spec and dict(t.config) == record.config for t in past)
    return record if ours and "unfinished" not in record.measurement.details else None


def _keep(study: Study, wanted: Request) -> Callable[[Trial, tuple[CompiledKernel, ...]], bool]:
    specs = {spec.name: spec for spec in wanted.specs}

    def keep(trial: Trial, kernels: tuple[CompiledKernel, ...]) -> bool:
        digests = source_digests(wanted, specs[trial.spec], trial.config)
        cubins = {kernel.name: hashlib.sha256(kernel.cubin).hexdigest() for kernel in kernels}
        return study.add(trial, digests, cubins)

    return keep


def _shared(opened: Sequence[Card], run: tuner.TuneRun, how: Measuring) -> bool:
    """Whether others used a card meanwhile; raises where that was not to be."""
    came = run.contest is not None and run.contest.shared
    if came and not how.shared:
        gpu = opened[0].gpu
        raise DeviceError(
            f"others came onto GPU {gpu.index} ({gpu.name}) during the finals: nothing is "
            f"recorded, the {len(run.trials)} trials are kept",
            hint="run the same command again, or add --shared",
        )
    return came or any(
        card.gpu.other_processes or card.gpu.mig or card.opened.telemetry.other_pids
        for card in opened
    )

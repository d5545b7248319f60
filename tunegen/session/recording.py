# SPDX-License-Identifier: Apache-2.0
"""From the winner of a run to its tuning record."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import shlex
from collections.abc import Callable

from tunegen import __version__, codegen, compiler, disasm, search, tuner
from tunegen.bundle import min_driver
from tunegen.model import (
    Contest,
    DeviceIdentity,
    Evaluator,
    KernelImage,
    Limit,
    Measurement,
    Problem,
    Trial,
    TuningRecord,
)
from tunegen.session.building import Build
from tunegen.session.resolve import Request

# The policy of a time that no finals confirmed: never compared with one that they did.
SEARCH_POLICY = "search"


def make_record(
    built: Build,
    run: tuner.TuneRun,
    judge: Evaluator,
    seed: int,
    command: str,
    *,
    driver: str = "",
    shared: bool = False,
) -> TuningRecord:
    """The record of a run's winner.

    A measured one without finals says so, and holds for its very problem only: its kernels were
    not tried on others. ``shared`` marks a time on a card that others used.
    """
    assert run.best is not None
    assert run.best.outcome.measurement is not None
    wanted, default = built.request, run.default
    measurement, limits = run.best.outcome.measurement, built.limits
    if judge.evidence == "measured" and run.contest is None:
        measurement = dataclasses.replace(
            measurement,
            policy=SEARCH_POLICY,
            details={**measurement.details, "unfinished": _why_unfinished(run)},
        )
        limits = (*limits, *_only(wanted.problem))
        default = None  # its time is of another policy now
    if shared:
        details = {**measurement.details, "shared": True}
        measurement = dataclasses.replace(measurement, details=details)
    record = TuningRecord(
        operation=wanted.operation.name,
        spec=built.spec.name,
        arch=wanted.arch,
        target=built.target,
        problem=wanted.problem,
        config=dict(built.config),
        device=DeviceIdentity.of(wanted.device),
        evidence=judge.evidence,
        measurement=measurement,
        default_us=_default_us(default, measurement),
        images=images(built),
        limits=limits,
        nvrtc=built.kernels[0].nvrtc,
        driver=driver,
        min_driver=min_driver(built.kernels[0]),
        tunegen=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        trials=len(run.trials),
        seed=seed,
        command=command,
    )
    return _proven(record, run.contest)


def make_other_record(
    built: Callable[[tuner.TuneRun], Build],
    run: tuner.TuneRun,
    judge: Evaluator,
    seed: int,
    command: str,
    *,
    driver: str,
    shared: bool,
) -> TuningRecord | None:
    """The record of the winner under the policy that did not decide, where that is another one.

    Its moment is before that of :func:`make_record`'s, whose policy a look-up without one follows.
    """
    if run.contest is None or run.contest.other is None:
        return None
    seen = tuner.seen_by(run, run.contest.other)
    if seen.best is None:
        return None
    record = make_record(built(seen), seen, judge, seed, command, driver=driver, shared=shared)
    before = datetime.datetime.fromisoformat(record.created) - datetime.timedelta(seconds=1)
    return dataclasses.replace(record, created=before.isoformat(timespec="seconds"))


def _why_unfinished(run: tuner.TuneRun) -> str:
    return f"{run.left_to} plays the finals" if run.left_to else "interrupted before the finals"


def _only(problem: Problem) -> tuple[Limit, ...]:
    return tuple(Limit(name, "equal", size) for name, size in problem.sizes)


def _default_us(default: Trial | None, measurement: Measurement) -> float | None:
    """The default's time, where it was taken in the same way: others are never compared."""
    if default is None or not default.outcome.ok or default.outcome.measurement is None:
        return None
    its = default.outcome.measurement
    return its.median_us if its.policy == measurement.policy else None


def _proven(record: TuningRecord, contest: Contest | None) -> TuningRecord:
    """The record with what the finals showed besides times."""
    winner = contest.winner if contest is not None else None
    if contest is None or winner is None:
        return record
    vendor = next((s for s in contest.standings if s.trial is None), None)
    return dataclasses.replace(
        record,
        relative_error=winner.relative_error,
        tolerance=contest.tolerance,
        deterministic=winner.deterministic,
        baseline=vendor.description if vendor and winner.vendor else "",
        baseline_ratio=winner.vendor.ratio if winner.vendor else None,
    )


def images(built: Build) -> tuple[KernelImage, ...]:
    """What identifies the compiled kernels of a build in a record."""
    return tuple(
        KernelImage(
            name=kernel.name,
            source_digest=compiler.identity(source, built.target),
            cubin_sha256=hashlib.sha256(kernel.cubin).hexdigest(),
            code_sha256=disasm.code_digest(kernel.cubin),
            registers=kernel.resources.registers,
            spill_bytes=kernel.resources.spill_store_bytes + kernel.resources.spill_load_bytes,
            shared_bytes=kernel.resources.shared_bytes
            + max((x.shared_bytes for x in built.plan.launches if x.kernel == kernel.name),
                  default=0),
        )
        for source, kernel in zip(built.sources, built.kernels, strict=True)
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What was asked of a tune besides the problem, as the command line has it."""

    spec: str | None
    trials: int
    seconds: float | None
    seed: int
    evaluator: str
    sampler: str
    policy: str = "auto"
    finals_seconds: float | None = None
    least_gain: float | None = None
    deterministic: bool = False
    shared: bool = False
    device: str = ""
    warm: bool = True


def reproduce(wanted: Request, choices: Choices, *, measured: bool) -> str:
    """The command line that runs this tune again; a measured one begins a new study."""
    words = [*codegen.program_words(*wanted.specs), "tune", wanted.operation.name]
    words += ["--arch", wanted.arch]
    if not measured:
        words += ["--chip", wanted.device.name]
    words += codegen.problem_words(wanted.operation, wanted.problem)
    if choices.spec:
        words += ["--spec", choices.spec]
    words += ["--trials", str(choices.trials), "--seed", str(choices.seed)]
    if choices.seconds is not None:
        words += ["--seconds", f"{choices.seconds:g}"]
    if choices.least_gain is not None:
        words += ["--least-gain", f"{choices.least_gain:g}"]
    if measured or choices.evaluator != "auto":
        words += ["--evaluator", "gpu" if measured else choices.evaluator]
    if choices.sampler != search.DEFAULT_SAMPLER:
        words += ["--sampler", choices.sampler]
    if not choices.warm:
        words += ["--cold"]
    if measured:
        words += _measuring_words(choices)
    return shlex.join(words)


def _measuring_words(choices: Choices) -> list[str]:
    words = ["--fresh"]
    if choices.device:
        words += ["--device", choices.device]
    if choices.policy != "auto":
        words += ["--policy", choices.policy]
    if choices.finals_seconds is not None:
        words += ["--finals-seconds", f"{choices.finals_seconds:g}"]
    words += ["--deterministic"] if choices.deterministic else []
    words += ["--shared"] if choices.shared else []
    return words

# SPDX-License-Identifier: Apache-2.0
"""The main job: problem in, tuning record out."""

from __future__ import annotations

import datetime
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunegen import __version__, codegen, compiler, disasm, kernels, perfmodel, search, tuner
from tunegen.bundle import min_driver
from tunegen.database import Database
from tunegen.device import find_gpus
from tunegen.errors import DeviceError, NoValidConfig, unknown
from tunegen.model import (
    DeviceClass,
    DeviceIdentity,
    Evaluator,
    KernelImage,
    KernelSpec,
    Trial,
    TuningRecord,
)
from tunegen.session.building import Build, build
from tunegen.session.resolve import Request, request

EVALUATORS = ("auto", "model", "gpu")


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a tune found. ``record`` is in the database at ``path`` unless nothing valid ran.

    ``floor`` is the least time the device class allows, and what binds it. ``evidence`` is
    "predicted" wherever no GPU has run the kernels.
    """

    request: Request
    run: tuner.TuneRun
    record: TuningRecord
    path: Path
    floor: perfmodel.Floor
    valid_configs: Mapping[str, int]

    @property
    def winner(self) -> Trial:
        assert self.run.best is not None  # a result is only made of a run that has one
        return self.run.best


def tune(
    operation: str,
    *,
    arch: str | None = None,
    chip: str | None = None,
    problem: str | Sequence[int] | Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int] | None = None,
    spec: str | None = None,
    trials: int = tuner.DEFAULT_TRIALS,
    seconds: float | None = None,
    seed: int = 0,
    evaluator: str = "auto",
    sampler: str = search.DEFAULT_SAMPLER,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
    on_event: Callable[[Trial, tuner.Progress], None] | None = None,
) -> TuneResult:
    """Search the configurations of an operation for one problem and record the winner.

    ``arch`` is a capability ("sm_90"); ``chip`` names a device class of it; without a GPU times
    are the performance model's and the record says "predicted". ``trials`` and ``seconds`` bound
    the search, the first one reached ends it. The same ``seed`` gives the same trials. The record
    goes to the folder ``db``, or to the user's data directory.

    Raises :class:`tunegen.errors.UsageError` for names and values that do not exist,
    :class:`NoValidConfig` where constraints leave nothing, :class:`DeviceError` where a GPU was
    asked for and there is none.
    """
    budget = tuner.Budget(trials, seconds)
    wanted = request(
        operation, arch=arch, chip=chip, problem=problem, dtype=dtype, layout=layout,
        attributes=attributes, spec=spec, specs=specs,
    )  # fmt: skip
    judge = choose_evaluator(evaluator, wanted.device)
    contenders = list_contenders(wanted)
    kernel_cache = compiler.KernelCache(Path(cache) if cache else None)
    run = tuner.tune(
        wanted.problem,
        contenders,
        evaluator=judge,
        compiler=compiler.NvrtcCompiler(kernel_cache),
        device=wanted.device,
        search=search.make_search(sampler, contenders, seed),
        budget=budget,
        on_event=on_event,
    )
    if run.best is None:
        raise NoValidConfig(
            f"none of {len(run.trials)} trials of {operation} succeeded: {_failures(run)}"
        )
    chosen = next(s for s in wanted.specs if s.name == run.best.spec)
    built = build(wanted, chosen, run.best.config, cache=kernel_cache)
    command = reproduce(wanted, spec, trials, seconds, seed, evaluator, sampler)
    record = make_record(built, run, judge, seed, command)
    return TuneResult(
        request=wanted,
        run=run,
        record=record,
        path=Database(Path(db) if db else None).put(record),
        floor=perfmodel.floor(wanted.operation, wanted.problem, wanted.device),
        valid_configs={c.spec.name: len(c.table) for c in contenders},
    )


def choose_evaluator(name: str, device: DeviceClass) -> Evaluator:
    """The evaluator of that name: "model", "gpu", or "auto" for what is there."""
    if name not in EVALUATORS:
        raise unknown("evaluator", name, EVALUATORS)
    if name == "gpu":
        found = find_gpus()
        if not found.devices:
            raise DeviceError(f"--evaluator gpu: {found.reason}", hint="tunegen doctor")
        raise DeviceError(
            f"--evaluator gpu: {found.devices[0].name} is there, but this release only predicts"
        )
    return perfmodel.ModelEvaluator(device)


def list_contenders(wanted: Request) -> list[search.Contender]:
    """Every spec that takes the problem, with its valid configurations ranked by the model.

    Raises :class:`NoValidConfig` saying which constraint removed how many, where none has any.
    """
    contenders, reasons = [], []
    for spec in wanted.specs:
        if reason := spec.refuses(wanted.problem, wanted.device):
            reasons.append(f"{spec.name}: {reason}")
            continue
        table = spec.space(wanted.problem, wanted.device).enumerate()
        if not len(table):
            try:
                table.require(spec.name)
            except NoValidConfig as empty:
                reasons.append(str(empty))
            continue
        contenders.append(
            search.Contender(
                spec=spec,
                table=table,
                default=spec.default(wanted.problem, wanted.device),
                prior_us=perfmodel.rank(spec, wanted.problem, wanted.device, table),
            )
        )
    if not contenders:
        problem = wanted.operation.text(wanted.problem)
        raise NoValidConfig(f"nothing can run {wanted.operation.name} {problem}: {reasons}")
    return contenders


def make_record(
    built: Build, run: tuner.TuneRun, judge: Evaluator, seed: int, command: str
) -> TuningRecord:
    """The record of a run's winner."""
    assert run.best is not None
    assert run.best.outcome.measurement is not None
    wanted = built.request
    default = run.default
    return TuningRecord(
        operation=wanted.operation.name,
        spec=built.spec.name,
        arch=wanted.arch,
        target=built.target,
        problem=wanted.problem,
        config=dict(built.config),
        device=DeviceIdentity.of(wanted.device),
        evidence=judge.evidence,
        measurement=run.best.outcome.measurement,
        default_us=default.outcome.median_us if default and default.outcome.ok else None,
        images=images(built),
        limits=built.limits,
        nvrtc=built.kernels[0].nvrtc,
        min_driver=min_driver(built.kernels[0]),
        tunegen=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        trials=len(run.trials),
        seed=seed,
        command=command,
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


def reproduce(
    wanted: Request,
    spec: str | None,
    trials: int,
    seconds: float | None,
    seed: int,
    evaluator: str,
    sampler: str,
) -> str:
    """The command line that runs this tune again."""
    words = ["tunegen", "tune", wanted.operation.name, "--arch", wanted.arch]
    words += ["--chip", wanted.device.name]
    words += codegen.problem_words(wanted.operation, wanted.problem)
    if spec:
        words += ["--spec", spec]
    words += ["--trials", str(trials), "--seed", str(seed)]
    if seconds is not None:
        words += ["--seconds", f"{seconds:g}"]
    if evaluator != "auto":
        words += ["--evaluator", evaluator]
    if sampler != search.DEFAULT_SAMPLER:
        words += ["--sampler", sampler]
    return shlex.join(words)


def _failures(run: tuner.TuneRun) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
    last = next((t.outcome.reason for t in reversed(run.trials) if t.outcome.reason), "")
    return f"{counts}; the last because {last}" if last else counts

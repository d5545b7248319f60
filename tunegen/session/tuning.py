# SPDX-License-Identifier: Apache-2.0
"""The main job: problem in, tuning record out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunegen import calibration, compiler, kernels, perfmodel, search, tuner
from tunegen.database import Database, Match
from tunegen.device import find_gpus
from tunegen.errors import NoValidConfig, UsageError, unknown
from tunegen.model import ARCHS, GpuInfo, KernelSpec, Trial, TuningRecord
from tunegen.runner.evaluator import Spent
from tunegen.session.building import Build, build
from tunegen.session.contenders import list_contenders
from tunegen.session.gpu import Devices, check_devices, choose_gpus, devices_text
from tunegen.session.measuring import FINALS_SECONDS, POLICIES, Measuring, measure
from tunegen.session.recording import Choices, make_other_record, make_record, reproduce
from tunegen.session.records import find, find_exact
from tunegen.session.resolve import Request, request
from tunegen.session.studies import check_storage
from tunegen.session.warmstart import KnownPoint, warm_points


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a tune found. ``record`` is in the database at ``path``, None where it is not new, or
    where another host of the study plays the finals (``run.left_to``): then it is what was best in
    the search so far. ``other`` is recorded beside it where the policy that did not decide has
    another winner.

    ``floor`` is the least time the device class allows, and what binds it. ``evidence`` is
    "predicted" wherever no GPU has run the kernels; ``known`` is then what a GPU has measured
    before for this problem or one that covers it, if anything. ``begun_from`` are the points that
    were tried first since they were fast elsewhere. ``spent`` says where the GPU's seconds went.
    ``seconds`` is what the search was given, with the calls that it went on from.
    """

    request: Request
    run: tuner.TuneRun
    record: TuningRecord
    path: Path | None
    floor: perfmodel.Floor
    valid_configs: Mapping[str, int]
    other: TuningRecord | None = None
    known: Match | None = None
    begun_from: tuple[KnownPoint, ...] = ()
    spent: Spent = field(default_factory=Spent)
    seconds: float | None = None

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
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    least_gain: float | None = None,
    seed: int = 0,
    evaluator: str = "auto",
    sampler: str = search.DEFAULT_SAMPLER,
    device: int | str | Sequence[int] | None = None,
    shared: bool = False,
    policy: str = "auto",
    finals_seconds: float = FINALS_SECONDS,
    deterministic: bool = False,
    fresh: bool = False,
    warm: bool = True,
    storage: str | None = None,
    study: str | None = None,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
    after: TuneResult | None = None,
    on_event: Callable[[Trial, tuner.Progress], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> TuneResult:
    """Search the configurations of an operation for one problem and record the winner.

    ``arch`` is a capability ("sm_90"), by default that of the GPU that is there; ``chip`` names a
    device class of it. Without a ``dtype`` it is the operation's default on that arch.
    ``evaluator`` is "gpu", "model", or "auto": the GPU where there is one of that kind, else the
    performance model, whose times are predicted and marked so. ``trials`` and ``seconds`` bound
    the search, the first one reached ends it; without ``trials`` a GPU makes 100 and the model
    60. ``least_gain`` ends it too, where all configurations that are left together can be expected
    to save less than that share of the best time. The record goes to the folder ``db``, or to the
    user's data directory.

    Right after the defaults comes what a GPU measured to be fast elsewhere: winners in the
    database of other problems of the operation and of other device classes, and on a GPU the
    fastest trials of other studies in ``storage``, see :mod:`tunegen.session.warmstart`; not with
    ``warm`` False. The same ``seed`` gives the same trials where these are the same, on one GPU of
    one host.

    On a GPU, ``device`` says which, as nvidia-smi counts; ``shared`` allows one that others use.
    Several of one device class ("0,1", or "all") search together, and the first of them decides.
    Trials are kept in ``storage``, and a later call goes on where this one ended; calls on several
    hosts at once share a study, see :func:`tunegen.tuner.tune`. ``study`` is the beginning of the
    name that it must have; ``fresh`` begins anew. The finals take ``finals_seconds``; ``policy``
    says what decides them: "burst", "sustained", "warm", or "auto" for the one that fits how long
    a call takes. ``deterministic`` leaves out kernels whose results differ from run to run.

    ``after`` is the result of the same call with other ``seconds``: the search goes on from there
    for ``seconds`` more, ``fresh`` or not, also by the model, which keeps no trials itself.
    ``on_event`` is called after every trial, ``on_note`` with what a user should know.

    Raises :class:`tunegen.errors.UsageError` for names and values that do not exist,
    :class:`NoValidConfig` where constraints leave nothing, :class:`DeviceError` where a GPU was
    asked for and there is none, or it cannot be used.
    """
    budget = tuner.Budget(tuner.DEFAULT_TRIALS if trials is None else trials, seconds, least_gain)
    anew = fresh and after is None
    how = _measuring(policy, finals_seconds, anew, deterministic, shared, storage, study)
    search.check_choice(sampler, seed)
    check_storage(storage)
    devices = check_devices(device)
    ask = functools.partial(
        request, operation, problem=problem, dtype=dtype, layout=layout, attributes=attributes,
        spec=spec, specs=specs,
    )  # fmt: skip
    wanted, gpus = _resolve(ask, arch, chip, evaluator, devices, shared)
    if trials is None and not gpus:
        budget = dataclasses.replace(budget, trials=tuner.PREDICTED_TRIALS)
    choices = Choices(
        spec=spec, trials=budget.trials, seconds=_in_all(seconds, after), least_gain=least_gain,
        seed=seed, evaluator=evaluator, sampler=sampler, policy=policy,
        deterministic=deterministic, shared=shared, device=devices_text(devices),
        finals_seconds=None if finals_seconds == FINALS_SECONDS else finals_seconds,
        warm=warm,
    )  # fmt: skip
    kernel_cache = compiler.KernelCache(Path(cache) if cache else None)
    database = Database(Path(db) if db else None)
    job = _Job(wanted, choices, budget, kernel_cache, database, on_event, on_note)
    if gpus:
        return job.measured(gpus, how)
    if storage is not None or study is not None:
        on_note("predictions are kept in no study: --storage and --study mean nothing here")
    return job.predicted(after.run.trials if after is not None else ())


def _in_all(seconds: float | None, after: TuneResult | None) -> float | None:
    """The seconds of this call and those before it."""
    if seconds is None or after is None or after.seconds is None:
        return seconds
    return after.seconds + seconds


def _measuring(
    policy: str,
    finals_seconds: float,
    fresh: bool,
    deterministic: bool,
    shared: bool,
    storage: str | None,
    study: str | None,
) -> Measuring:
    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    if not (math.isfinite(finals_seconds) and finals_seconds > 0):
        raise UsageError(f"finals_seconds={finals_seconds} is no budget: it is a number above 0")
    return Measuring(
        policy=next(known for known in POLICIES if known == policy),
        finals_seconds=finals_seconds,
        fresh=fresh,
        deterministic=deterministic,
        shared=shared,
        storage=storage,
        study=study,
    )


def _resolve(
    ask: Callable[..., Request],
    arch: str | None,
    chip: str | None,
    evaluator: str,
    devices: Devices,
    shared: bool,
) -> tuple[Request, tuple[GpuInfo, ...]]:
    """The request, and the GPUs to measure it on, if any. What is wrong with the request itself is
    raised before any GPU is looked for."""
    named = bool(arch or chip)
    wanted = ask(arch=arch, chip=chip) if named else ask(arch=ARCHS[0])
    gpus = choose_gpus(
        evaluator,
        arch=wanted.arch if named else None,
        chip=wanted.device.name if chip else None,
        devices=devices,
        shared=shared,
    )
    if gpus:
        return ask(arch=gpus[0].arch), gpus
    if named:
        return wanted, ()
    here = next(iter(find_gpus().devices), None)
    known = here is not None and here.name in {chip.name for chip in perfmodel.CHIPS}
    return ask(arch=here.arch if here else None, chip=here.name if here and known else None), ()


@dataclass(frozen=True, slots=True)
class _Job:
    """A tune whose every word has been checked."""

    wanted: Request
    choices: Choices
    budget: tuner.Budget
    cache: compiler.KernelCache
    database: Database
    on_event: Callable[[Trial, tuner.Progress], None] | None
    on_note: Callable[[str], None]

    def predicted(self, past: Sequence[Trial] = ()) -> TuneResult:
        """By the model; nothing is launched, and nothing kept but the record."""
        wanted = self.wanted
        ceilings = calibration.find(wanted.device)
        contenders = list_contenders(wanted, ceilings)
        self.database.ensure_writable(wanted.arch, wanted.operation.name)
        judge = perfmodel.ModelEvaluator(wanted.device, ceilings)
        begun_from: tuple[KnownPoint, ...] = ()
        if self.choices.warm:
            begun_from = warm_points(
                self.database, wanted, contenders, self.budget.trials,
                past=past, on_note=self.on_note,
            )  # fmt: skip
        first = [point.first for point in begun_from]
        run = tuner.tune(
            wanted.problem,
            contenders,
            evaluator=judge,
            compiler=compiler.NvrtcCompiler(self.cache),
            device=wanted.device,
            search=search.make_search(self.choices.sampler, contenders, self.choices.seed, first),
            budget=self.budget,
            past=past,
            on_event=self.on_event,
        )
        known = find(self.database, wanted)
        command = reproduce(wanted, self.choices, measured=False)
        _demand_winner(wanted, run)
        record = make_record(self._built(wanted, run), run, judge, self.choices.seed, command)
        return TuneResult(
            request=wanted,
            run=run,
            record=record,
            path=self.database.put(record),
            floor=perfmodel.floor(wanted.operation, wanted.problem, wanted.device, ceilings),
            valid_configs={c.spec.name: len(c.table) for c in contenders},
            known=known if known.record and known.record.evidence == "measured" else None,
            begun_from=begun_from,
            seconds=self.choices.seconds,
        )

    def measured(self, gpus: Sequence[GpuInfo], how: Measuring) -> TuneResult:
        """On GPUs."""
        self.database.ensure_writable(self.wanted.arch, self.wanted.operation.name)
        found = measure(
            self.wanted, gpus, how, budget=self.budget, seed=self.choices.seed,
            sampler=self.choices.sampler, warm=self.choices.warm,
            nvrtc=compiler.NvrtcCompiler(self.cache), database=self.database,
            on_event=self.on_event, on_note=self.on_note,
        )  # fmt: skip
        wanted, run = found.request, found.run
        _demand_winner(wanted, run)
        record, path = found.standing, None
        other = None
        if record is None:
            command = reproduce(wanted, self.choices, measured=True)
            other = make_other_record(
                lambda seen: self._built(wanted, seen), run, found.judge, self.choices.seed,
                command, driver=found.opened.driver, shared=found.shared,
            )  # fmt: skip
            record = make_record(
                self._built(wanted, run), run, found.judge, self.choices.seed, command,
                driver=found.opened.driver, shared=found.shared,
            )  # fmt: skip
            # What was cut short does not stand beside what was not.
            if run.left_to:
                self.on_note(
                    f"{run.left_to} goes on with the study, and records the winner of its finals"
                )
            elif run.contest is not None or not _is_measured(find_exact(self.database, wanted)):
                if other is not None:
                    self.database.put(other)
                path = self.database.put(record)
        else:
            self.on_note(
                f"nothing to do: the {len(run.trials)} trials are made and their finals played; "
                f"{_more(run)} goes on, --fresh begins anew"
            )
        ceilings = calibration.find(wanted.device)
        return TuneResult(
            request=wanted,
            run=run,
            record=record,
            other=other,
            path=path,
            floor=perfmodel.floor(wanted.operation, wanted.problem, wanted.device, ceilings),
            valid_configs=found.valid_configs,
            begun_from=found.begun_from,
            spent=found.spent,
            seconds=self.choices.seconds,
        )

    def _built(self, wanted: Request, run: tuner.TuneRun) -> Build:
        """The winner, from the cache."""
        assert run.best is not None
        chosen = next(s for s in wanted.specs if s.name == run.best.spec)
        return build(wanted, chosen, run.best.config, cache=self.cache)


def _more(run: tuner.TuneRun) -> str:
    """What to say for a search to go on."""
    if run.expected_gain is None:
        return f"--trials {2 * len(run.trials)}"
    share = run.expected_gain / 2
    return f"--least-gain {share:.1g}" if share > 0 else "leaving out --least-gain"


def _is_measured(record: TuningRecord | None) -> bool:
    return record is not None and record.evidence == "measured"


def _demand_winner(wanted: Request, run: tuner.TuneRun) -> None:
    if run.best is None and run.stop_reason == "interrupted":
        raise KeyboardInterrupt
    if run.best is None:
        what = "was right in the finals" if run.contest else "succeeded"
        raise NoValidConfig(
            f"none of {len(run.trials)} trials of {wanted.operation.name} {what}: {_failures(run)}"
        )


def _failures(run: tuner.TuneRun) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
    last = next((t.outcome.reason for t in reversed(run.trials) if t.outcome.reason), "")
    return f"{counts}; the last because {last}" if last else counts

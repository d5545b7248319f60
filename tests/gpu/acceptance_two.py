# SPDX-License-Identifier: Apache-2.0
"""Trials per second on one GPU and on two of the same host, with nothing compiled before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acceptance_common import Setting, Verdict, command, gpus, keep, result_of, storage, tune_words

from tunegen import session


@dataclass(frozen=True, slots=True)
class Case:
    """A problem by the words that name it."""

    name: str
    words: tuple[str, ...]


def _matmul(dtype: str) -> Case:
    words = ("matmul", "--problem", "2048x2048x2048", "--dtype", dtype)
    return Case(f"two_2048_{dtype}", words)


CASES = (_matmul("fp32"), _matmul("bf16"))
TRIALS = 60
LEAST_RATIO = 1.9
FINALS_SECONDS = "3"


def run(setting: Setting) -> Verdict:
    there = [str(gpu.index) for gpu in gpus.find_gpus().devices]
    if len(there) < 2:
        return Verdict(False, f"it takes two GPUs, there is {', '.join(there) or 'none'}")
    passed, figures, details = True, [], {}
    for case in CASES:
        one = _rate(setting, case, there[:1])
        two = _rate(setting, case, there[:2])
        passed_one, figure = judge(case, one, two)
        passed &= passed_one
        figures.append(figure)
        details[case.name] = {"one": one, "two": two}
    return Verdict(passed, "; ".join(figures), details)


def _rate(setting: Setting, case: Case, devices: list[str]) -> dict[str, Any]:
    """A tune on these devices: what it made, and in how many seconds of search. Neither opening
    the GPUs nor the finals are in these."""
    name = f"{case.name}_on_{len(devices)}"
    words = tune_words(
        setting, name, *case.words, "--trials", str(TRIALS), "--seed", "0",
        "--device", ",".join(devices), "--finals-seconds", FINALS_SECONDS,
    )  # fmt: skip
    done = command(words, XDG_CACHE_HOME=str(setting.work / f"{name}_cache"))
    result = result_of(done)
    keep(setting, name, result)
    (study,), _ = session.list_studies(storage(setting, name))
    trials = [stored.trial for stored in study.trials]
    measured = Counter(
        trial.outcome.measurement.details.get("gpu", int(devices[0]))
        for trial in trials
        if trial.outcome.measurement is not None
    )
    seconds = result["trials"]["seconds"] - result["seconds"]["finals"]
    return {
        "trials": len(trials),
        "different": len({(trial.spec, trial.config) for trial in trials}),
        "measured_by_gpu": dict(sorted(measured.items())),
        "search_seconds": seconds,
        "per_second": len(trials) / seconds,
        "command_seconds": done.seconds,
        "median_us": result["record"]["measurement"]["median_us"],
        "spent": result["seconds"],
    }


def judge(case: Case, one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether two GPUs are as much faster than one as is demanded, in words and figures."""
    ratio = two["per_second"] / one["per_second"]
    whole = all(found["trials"] == found["different"] == TRIALS for found in (one, two))
    passed = whole and len(two["measured_by_gpu"]) == 2 and ratio >= LEAST_RATIO
    by_gpu = ", ".join(f"GPU {gpu} {n}" for gpu, n in two["measured_by_gpu"].items())
    return passed, (
        f"{case.name}: {_figures(one)} on one, {_figures(two)} on two ({by_gpu} measured), "
        f"ratio {ratio:.2f} (>= {LEAST_RATIO})"
    )


def _figures(found: Mapping[str, Any]) -> str:
    return (
        f"{found['per_second']:.2f} trials/s ({found['different']} of {found['trials']} different "
        f"in {found['search_seconds']:.1f} s, waiting {found['spent']['waiting']:.1f} s, "
        f"winner {found['median_us']:.2f} us)"
    )

# SPDX-License-Identifier: Apache-2.0
"""Two tunes of one problem with different seeds, and their winners in one common finals."""

from __future__ import annotations

import json
from typing import Any

from acceptance_card import Card, prepared
from acceptance_common import Setting, Verdict, command, keep, result_of, tune_words

from tunegen.model import Config, Contest, Standing
from tunegen.runner.finals import Finals
from tunegen.runner.qualify import Finalist

PROBLEM = {"operation": "matmul", "problem": "2048x2048x2048", "dtype": "fp32", "layout": "nn"}
NAME = "tune_2048"
SEEDS = (0, 1)
TRIALS = 100
FINALS_SECONDS = 15.0
CLOSE = 1.01


def run(setting: Setting) -> Verdict:
    records = {seed: _tuned(setting, seed)["record"] for seed in SEEDS}
    details: dict[str, Any] = {f"seed {seed}": record for seed, record in records.items()}
    first, second = (records[seed] for seed in SEEDS)
    if (first["spec"], first["config"]) == (second["spec"], second["config"]):
        return Verdict(True, f"both seeds chose {_words(first)}", details)
    if first["spec"] != second["spec"]:
        # Finals of two specs have two tolerances; a search never ends so here.
        return Verdict(False, f"seeds chose {first['spec']} and {second['spec']}", details)
    with prepared(**PROBLEM, spec=first["spec"], seed=SEEDS[-1] + 1) as card:
        contest = _finals(card, {f"seed {seed}": record for seed, record in records.items()})
    passed, figure = judge(contest)
    standings = {s.name: s.figures.get(contest.policy) for s in contest.standings}
    details["figures"] = {
        name: {"median_us": f.median_us, "ratio": [f.ratio, f.ratio_low, f.ratio_high]}
        for name, f in standings.items()
        if f is not None
    }
    return Verdict(passed, figure, details)


def _tuned(setting: Setting, seed: int) -> dict[str, Any]:
    """The result of a tune; one that another part has made already in this folder is taken."""
    name = f"{NAME}_seed{seed}"
    path = setting.out / f"{name}.json"
    if not path.exists():
        words = (PROBLEM["operation"], "--problem", PROBLEM["problem"], "--dtype",
                 PROBLEM["dtype"])  # fmt: skip
        layout = ("--layout", PROBLEM["layout"]) if PROBLEM["layout"] else ()
        counted = ("--trials", str(TRIALS), "--seed", str(seed))
        # As people tune: with what the shipped records know.
        tuned = tune_words(setting, name, *words, *layout, *counted, cold=False)
        keep(setting, name, result_of(command(tuned)))
    return json.loads(path.read_text())


def _finals(card: Card, records: dict[str, dict[str, Any]]) -> Contest:
    names = card.spec.space(card.problem, card.device).names
    finalists = []
    for number, (name, record) in enumerate(records.items()):
        config = Config({parameter: record["config"][parameter] for parameter in names})
        candidate = card.candidate(config)
        plan = card.executable(candidate).plan
        finalists.append(
            Finalist(name, number, candidate, plan, record["measurement"]["median_us"])
        )
    finals = Finals(
        station=card.station,
        setup=card.setup,
        problem=card.problem,
        operation=card.operation,
        device=card.device,
        seed=SEEDS[-1] + 2,
        sets=card.sets,
        seconds=FINALS_SECONDS,
        no_vendor="it was not asked",
    )
    return finals(finalists)


def judge(contest: Contest) -> tuple[bool, str]:
    """Whether the slower of two is within 1 %, or its interval holds 1."""
    failed = [standing for standing in contest.standings if standing.failure]
    if failed:
        return False, "; ".join(f"{s.name}: {s.failure}" for s in failed)
    if len(contest.standings) < len(SEEDS):
        return False, "one is so much slower that the finals left it out"
    slower = max(contest.standings, key=lambda standing: _ratio(standing, contest))
    figures = slower.figures[contest.policy]
    passed = figures.ratio <= CLOSE or figures.ratio_low <= 1
    return passed, (
        f"{slower.name} takes {figures.ratio:.4f} [{figures.ratio_low:.4f}, "
        f"{figures.ratio_high:.4f}] of the other's time ({contest.policy}; <= {CLOSE} or holds 1)"
    )


def _ratio(standing: Standing, contest: Contest) -> float:
    return standing.figures[contest.policy].ratio


def _words(record: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in record["config"].items())

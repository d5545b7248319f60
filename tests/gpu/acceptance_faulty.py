# SPDX-License-Identifier: Apache-2.0
"""Ten configurations of which one hangs, one faults, one is wrong and one writes half: the six
others get the times that they get without them, and nothing is left on the card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from acceptance_common import (
    Setting,
    Verdict,
    card_is_free,
    command,
    keep,
    result_of,
    storage,
    tune_words,
)

from tunegen import session
from tunegen.model import Config, Measurement

HERE = Path(__file__).parent
RIGHT = 6
WITH_FAULTS = {"measured": RIGHT, "timed_out": 1, "launch_failed": 1, "wrong_result": 2}

# Two times of one configuration are the same where their 95 % intervals overlap, or so close are
# the medians; the race ends the timing of the slower ones after a few samples.
NOISE = 0.03
RACED_NOISE = 0.10

SIZES = "2^22"
FINALS_SECONDS = "5"


def run(setting: Setting) -> Verdict:
    counts, alone_counts = {}, {}
    times, alone = {}, {}
    for name, counted, found in (
        ("ten", counts, times),
        ("six", alone_counts, alone),
    ):
        kernel = str(HERE / f"acceptance_{name}.py")
        words = tune_words(
            setting, name, "faulty", "--problem", SIZES, "--trials", "20",
            "--finals-seconds", FINALS_SECONDS,
        )  # fmt: skip
        result = result_of(command(["--kernel", kernel, *words]))
        keep(setting, f"faulty_{name}", result)
        counted.update(result["trials"]["counts"])
        found.update(_times(setting, name))
    free = card_is_free()
    rows = compare(times, alone)
    for row in rows:
        setting.say(
            f"  THREADS={row.config['THREADS']:<5} {row.us:8.2f} us with faults, "
            f"{row.alone_us:8.2f} without: {row.us / row.alone_us:.3f}"
            + ("" if row.same else "  DIFFERS")
        )
    same = sum(row.same for row in rows)
    right_counts = counts == WITH_FAULTS and alone_counts == {"measured": RIGHT}
    passed = same == len(rows) == RIGHT and right_counts and free
    ending = "no process left on the card" if free else "PROCESSES LEFT ON THE CARD"
    return Verdict(
        passed,
        f"{same} of {RIGHT} times the same within noise (intervals overlap, or {NOISE:.0%}; "
        f"{RACED_NOISE:.0%} where raced out), exit 0, "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        + f", {ending}",
        {
            "counts": counts,
            "alone_counts": alone_counts,
            "times": {str(row.config): [row.us, row.alone_us] for row in rows},
        },
    )


class Row:
    """A configuration in both runs."""

    def __init__(self, config: Config, here: Measurement, alone: Measurement) -> None:
        self.config = config
        self.us, self.alone_us = _steady(here), _steady(alone)
        raced = any("raced_out" in m.details for m in (here, alone))
        difference = abs(self.us / self.alone_us - 1)
        overlap = here.low_us <= alone.high_us and alone.low_us <= here.high_us
        self.same = overlap or difference <= (RACED_NOISE if raced else NOISE)


def compare(times: Mapping[Config, Measurement], alone: Mapping[Config, Measurement]) -> list[Row]:
    """The right configurations that both runs have timed."""
    return [
        Row(config, times[config], alone[config])
        for config in sorted(alone, key=lambda config: config["THREADS"])
        if config in times
    ]


def _steady(measurement: Measurement) -> float:
    return measurement.median_us / float(measurement.details.get("drift", 1.0))


def _times(setting: Setting, name: str) -> dict[Config, Measurement]:
    """What the search measured, from its store."""
    studies, _ = session.list_studies(storage(setting, name))
    return {
        stored.trial.config: stored.trial.outcome.measurement
        for study in studies
        for stored in study.trials
        if stored.trial.outcome.ok and stored.trial.outcome.measurement is not None
    }

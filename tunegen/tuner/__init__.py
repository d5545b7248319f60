# SPDX-License-Identifier: Apache-2.0
"""The loop: ask, render, compile, evaluate, tell, until the budget is spent; then the finals."""

from tunegen.tuner.budget import DEFAULT_TRIALS, PREDICTED_TRIALS, Budget
from tunegen.tuner.building import Builder
from tunegen.tuner.log import Progress, StopReason, TuneRun, seen_by
from tunegen.tuner.loop import LOOK_AHEAD, cores, tune

__all__ = [
    "DEFAULT_TRIALS",
    "LOOK_AHEAD",
    "PREDICTED_TRIALS",
    "Budget",
    "Builder",
    "Progress",
    "StopReason",
    "TuneRun",
    "cores",
    "seen_by",
    "tune",
]

# SPDX-License-Identifier: Apache-2.0
"""How long to search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from tunegen.errors import UsageError

# The default number of trials where a GPU measures, and where the model predicts: that one has
# ranked every configuration before the first trial, and a trial of it costs only compiling.
DEFAULT_TRIALS = 100
PREDICTED_TRIALS = 60


@dataclass(frozen=True, slots=True)
class Budget:
    """How many trials, and for how many seconds at most; the default is tried in any case.

    Raises :class:`UsageError` for anything but a positive whole number and positive seconds.
    """

    trials: int = DEFAULT_TRIALS
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trials, Integral) or self.trials < 1:
            raise UsageError(f"trials={self.trials} is no budget: it is a whole number from 1 on")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"seconds={self.seconds} is no budget: it is a number above 0")

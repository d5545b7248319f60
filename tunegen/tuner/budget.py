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

    With a ``least_gain`` a search also ends where all configurations that are left together can be
    expected to save less than this share of the best time (0.002 is 0.2 %). That is the sampler's
    judgement: one that gives none is not cut short.

    Raises :class:`UsageError` for anything but a positive whole number, positive seconds, and a
    share between 0 and 1.
    """

    trials: int = DEFAULT_TRIALS
    seconds: float | None = None
    least_gain: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trials, Integral) or self.trials < 1:
            raise UsageError(f"trials={self.trials} is no budget: it is a whole number from 1 on")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"seconds={self.seconds} is no budget: it is a number above 0")
        if self.least_gain is not None and not 0 < self.least_gain < 1:
            raise UsageError(
                f"least_gain={self.least_gain} is no share: it is a number between 0 and 1"
            )

    def is_enough(self, expected_gain: float | None) -> bool:
        """Whether a search may end that expects to gain no more than this."""
        if self.least_gain is None or expected_gain is None:
            return False
        return expected_gain < self.least_gain

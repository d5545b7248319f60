# SPDX-License-Identifier: Apache-2.0
"""One executable: is it right, and how long does it take?"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from tunegen.device import CudaError, Gpu
from tunegen.errors import DeviceError
from tunegen.model import Outcome
from tunegen.runner.checks import Checks, Finding
from tunegen.runner.loaded import Loaded
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import Tried, Try, Verdict, Verify
from tunegen.runner.timing import Stopwatch, regime_of


def try_out(gpu: Gpu, operands: Operands, request: Try) -> Tried:
    """Check and time an executable. What it does wrong is in the outcome, unless it lost the
    context: that is raised as :class:`CudaError`.

    Raises :class:`DeviceError` where the request itself makes no sense.
    """
    regime_of(request.policy)
    _demand_expected(operands)
    started = time.perf_counter()
    timing = _Timing()
    try:
        with closing(Loaded(gpu, operands, request.executable)) as loaded:
            outcome = _outcome(gpu, operands, loaded, request, timing)
    except CudaError as error:
        if error.sticky:
            raise
        outcome = Outcome("launch_failed", reason=str(error))
    except DeviceError as error:
        outcome = Outcome("launch_failed", reason=str(error))
    seconds = time.perf_counter() - started
    return Tried(outcome, seconds - timing.seconds, timing.seconds)


def verify(gpu: Gpu, operands: Operands, request: Verify) -> Verdict:
    """Check an executable, and whether further runs give the same bits; of a wrong one that is not
    asked.

    Raises :class:`CudaError` and :class:`DeviceError` where it cannot be run.
    """
    _demand_expected(operands)
    with closing(Loaded(gpu, operands, request.executable)) as loaded:
        checks = Checks(gpu, operands)
        found = _checked(operands, checks, loaded, request.tolerance, exact=request.exact)
        repeats = not found.reason and checks.repeats(loaded.launch, request.repeats)
    return Verdict(found.reason, found.relative_error, found.largest_error, repeats)


def _demand_expected(operands: Operands) -> None:
    if operands.unexpected:
        names = ", ".join(operands.unexpected)
        raise DeviceError(f"no expected values of {names} have been prepared")


class _Timing:
    """The seconds that timing took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter()


def _outcome(
    gpu: Gpu, operands: Operands, loaded: Loaded, request: Try, timing: _Timing
) -> Outcome:
    checks = Checks(gpu, operands)
    found = _checked(operands, checks, loaded, request.tolerance)
    if found.reason:
        return Outcome("wrong_result", reason=found.reason)
    with timing, closing(Stopwatch(gpu, operands, loaded.launch)) as stopwatch:
        measurement = stopwatch.race(
            request.policy, best_us=request.best_us, drop=request.drop,
            budget_ms=request.budget_ms,
        )  # fmt: skip
    # The first set has been worked on once more. Races show when launches follow one another, and
    # not in the one launch before.
    later = checks.inspect(tolerance=request.tolerance, workspace=loaded.workspace)
    if later.reason:
        operands.refresh()
        return Outcome("wrong_result", reason=f"right at first, then not: {later.reason}")
    details = {"relative_error": found.relative_error, **measurement.details}
    return Outcome("measured", replace(measurement, details=details))


def _checked(
    operands: Operands, checks: Checks, loaded: Loaded, tolerance: float, *, exact: bool = False
) -> Finding:
    """What a launch comes to. A wrong one is launched again with everything made anew, lest it is
    blamed for what another one damaged; and what it damaged is mended after it."""
    for _ in range(2):
        checks.launch(loaded.launch)
        found = checks.inspect(tolerance=tolerance, exact=exact, workspace=loaded.workspace)
        if not found.reason:
            break
        operands.refresh()
        loaded.refresh()
    return found

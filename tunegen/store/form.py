# SPDX-License-Identifier: Apache-2.0
"""A trial as JSON, and back: what stands in the one attribute of a stored trial.

The trial's parameters, value and state repeat part of it for whatever else reads Optuna's studies.
"""

from __future__ import annotations

import json
import math
import numbers
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunegen.errors import DatabaseError
from tunegen.model import Config, Measurement, Outcome, Trial

# To be raised when a reader of an older release would misunderstand what stands here.
FORM = 1


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with the digests of its sources and cubins by kernel, and when it finished: a date
    and time of ISO 8601 with its offset from UTC."""

    trial: Trial
    digests: Mapping[str, str]
    cubins: Mapping[str, str]
    finished: str


def encode(stored: StoredTrial) -> dict[str, Any]:
    """What JSON keeps of a trial: everything but its number, which is the study's to give.

    Raises :class:`DatabaseError` for a success whose time is none, and for a value in the details
    that JSON does not have.
    """
    trial = stored.trial
    measurement = trial.outcome.measurement
    if trial.outcome.ok and not 0 < trial.outcome.median_us < math.inf:
        raise DatabaseError(f"a trial of {trial.spec} took {trial.outcome.median_us} us")
    content = {
        "form": FORM,
        "spec": trial.spec,
        "config": dict(trial.config),
        "outcome": trial.outcome.kind,
        "reason": trial.outcome.reason,
        "measurement": None
        if measurement is None
        else {
            "median_us": measurement.median_us,
            "policy": measurement.policy,
            "low_us": measurement.low_us,
            "high_us": measurement.high_us,
            "samples": measurement.samples,
            "details": measurement.details,
        },
        "origin": trial.origin,
        "seconds": trial.seconds,
        "digests": stored.digests,
        "cubins": stored.cubins,
        "finished": stored.finished,
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(content, default=_plain))
    except (TypeError, ValueError) as error:
        raise DatabaseError(f"a trial of {trial.spec} cannot be kept: {error}") from error
    return {**plain, "checksum": _checksum(plain)}


def parse(text: str) -> dict[str, Any] | None:
    """The content that ``encode`` made, or None where a part of it was lost or changed."""
    try:
        content = json.loads(text)
        checksum = content.pop("checksum")
    except (ValueError, AttributeError, KeyError):
        return None
    return content if checksum == _checksum(content) else None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def decode(text: str) -> StoredTrial | None:
    """The trial in ``text``, numbered 0; None where it is damaged or of a later release."""
    content = parse(text)
    if content is None or content["form"] != FORM:
        return None
    measured = content["measurement"]
    trial = Trial(
        number=0,
        spec=content["spec"],
        config=Config(content["config"]),
        outcome=Outcome(
            content["outcome"],
            None if measured is None else Measurement(**measured),
            content["reason"],
        ),
        origin=content["origin"],
        seconds=content["seconds"],
    )
    return StoredTrial(trial, content["digests"], content["cubins"], content["finished"])


def _plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")

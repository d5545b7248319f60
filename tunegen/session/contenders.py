# SPDX-License-Identifier: Apache-2.0
"""Which specs take part in a search, and with which configurations."""

from __future__ import annotations

import math

import numpy as np

from tunegen import perfmodel, search
from tunegen.errors import NoValidConfig
from tunegen.model import Calibration
from tunegen.session.resolve import Request

# How many times slower than the best one a spec's best configuration may be by the model, which
# errs less than that between specs.
_FAR_BEHIND = 6.0


def list_contenders(
    wanted: Request, calibration: Calibration | None = None
) -> list[search.Contender]:
    """Every spec that takes the problem, with its valid configurations ranked by the model.

    Raises :class:`NoValidConfig` saying which constraint removed how many, where none has any.
    """
    contenders, reasons = [], []
    rated = perfmodel.calibrated(wanted.device, calibration)
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
                prior_us=perfmodel.rank(spec, wanted.problem, rated, table),
            )
        )
    contenders = _promising(contenders)
    if not contenders:
        special = wanted.operation.special_words(wanted.problem)
        problem = " ".join((wanted.operation.text(wanted.problem), *special))
        why = "; ".join(reasons)
        raise NoValidConfig(f"nothing can run {wanted.operation.name} {problem}: {why}")
    return contenders


def _promising(contenders: list[search.Contender]) -> list[search.Contender]:
    """Without those that the model puts far behind: one trial of them may take as long as all the
    others. Kernels for any architecture stand beside those for tensor cores."""
    best_us = [
        math.inf if c.prior_us is None else float(np.fmin.reduce(c.prior_us, initial=math.inf))
        for c in contenders
    ]
    limit_us = _FAR_BEHIND * min(best_us, default=math.inf)
    return [
        contender
        for contender, its_best_us in zip(contenders, best_us, strict=True)
        if contender.prior_us is None or its_best_us <= limit_us
    ]

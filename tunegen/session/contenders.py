# SPDX-License-Identifier: Apache-2.0
"""Which specs take part in a search, and with which configurations."""

from __future__ import annotations

from tunegen import perfmodel, search
from tunegen.errors import NoValidConfig
from tunegen.model import Calibration
from tunegen.session.resolve import Request


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
    if not contenders:
        special = wanted.operation.special_words(wanted.problem)
        problem = " ".join((wanted.operation.text(wanted.problem), *special))
        why = "; ".join(reasons)
        raise NoValidConfig(f"nothing can run {wanted.operation.name} {problem}: {why}")
    return contenders

# SPDX-License-Identifier: Apache-2.0
"""Ten configurations: six right ones, one that hangs, one that faults, one wrong, one half."""

from dataclasses import replace
from pathlib import Path

from tunegen import kernels, model

FAULTS = (1, 2, 3, 4)
_FAULTY = kernels.load(Path(__file__).parents[1] / "data" / "faulty_kernel" / "faulty.py")


def _space(p, d):
    whole = _FAULTY.space(p, d)
    known = model.Constraint("one configuration for each fault", lambda c: max(FAULTS) >= c.FAULT)
    return model.Space(whole.parameters, (*whole.constraints, replace(known, structural=False)))


SPEC = replace(_FAULTY, space=_space)

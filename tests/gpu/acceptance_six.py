# SPDX-License-Identifier: Apache-2.0
"""The six right configurations of the ten, by themselves."""

from dataclasses import replace
from pathlib import Path

from tunegen import kernels, model

_FAULTY = kernels.load(Path(__file__).parents[1] / "data" / "faulty_kernel" / "faulty.py")


def _space(p, d):
    whole = _FAULTY.space(p, d)
    right = model.Constraint("only what is right", lambda c: c.FAULT == 0, structural=False)
    return model.Space(whole.parameters, (*whole.constraints, right))


SPEC = replace(_FAULTY, space=_space)

# SPDX-License-Identifier: Apache-2.0
"""axpy as far as Kernel Tuner launches it: with at most 48 KiB of shared memory, as its backend
does not raise a kernel's limit."""

from dataclasses import replace

from tunegen.kernels.vector_axpy import SPEC as VECTOR
from tunegen.model import Constraint, Space

SHARED_KIB = 48


def _space(p, d):
    whole = VECTOR.space(p, d)
    small = Constraint(
        f"a block has at most {SHARED_KIB} KiB of shared memory",
        lambda c: c.UNUSED_SHARED_KIB <= SHARED_KIB,
        structural=False,
    )
    return Space(whole.parameters, (*whole.constraints, small))


SPEC = replace(VECTOR, name="vector48", space=_space)

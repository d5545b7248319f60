# SPDX-License-Identifier: Apache-2.0
"""matmul simt as far as Kernel Tuner launches it: with at most 48 KiB of shared memory, as its
backend does not raise a kernel's limit, and without a second kernel that adds up slices of K."""

from dataclasses import replace

from tunegen.kernels.matmul_simt import SPEC as SIMT
from tunegen.kernels.matmul_simt.derived import shared_bytes
from tunegen.model import Constraint, Space

SHARED_BYTES = 48 << 10


def _space(p, d):
    whole = SIMT.space(p, d)
    small = Constraint(
        f"a block has at most {SHARED_BYTES} bytes of shared memory",
        lambda c: shared_bytes(c, p) <= SHARED_BYTES,
        structural=False,
    )
    alone = Constraint("there is one kernel", lambda c: c.SPLIT_K == 1, structural=False)
    return Space(whole.parameters, (*whole.constraints, small, alone))


def _default(p, d):
    space, usual = _space(p, d), SIMT.default(p, d)
    if not space.violated(usual):
        return usual
    return space.enumerate().require("matmul simt48").config(0)


SPEC = replace(SIMT, name="simt48", space=_space, default=_default)

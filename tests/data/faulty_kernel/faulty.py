# SPDX-License-Identifier: Apache-2.0
"""faulty, spec faults: six right configurations and five that are each broken in its own way.

For tests of what a tuner does about it. FAULT 0 is right; 1 hangs; 2 stores far out of bounds; 3
is wrong in the last hundredth; 4 and 5 each write one half of the output only.
"""

from pathlib import Path

import numpy as np

from tunegen import model

OPERATION = model.Operation(
    name="faulty",
    summary="y = a * x",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(2**22,),
    scalars=(("a", 2.0),),
    arrays=lambda p: (
        model.Array("x", (p.N,), (1,), p.dtype, "in"),
        model.Array("y", (p.N,), (1,), p.dtype, "out"),
    ),
    reference=lambda p, operands, scalars: {"y": scalars["a"] * np.float64(operands["x"])},
    flops=lambda p: p.N,
)


def plan(c, p, s):
    arguments = (
        model.Argument("x", "pointer"),
        model.Argument("y", "pointer"),
        model.Argument("n", "int64", model.formula(s.N)),
        model.Argument("a", "fp32"),
    )
    blocks = model.formula(model.ceil_div(s.N, c.THREADS))
    launch = model.Launch("faulty", (blocks, 1, 1), (c.THREADS, 1, 1), arguments)
    return model.LaunchPlan((launch,))


def work(c, p, d):
    warps = model.ceil_div(c.THREADS, 32)
    return model.Work(
        blocks=model.ceil_div(p.N, c.THREADS),
        threads=c.THREADS,
        registers=16,
        shared_bytes=0,
        fma=c.THREADS,
        instructions=20 * warps,
        shared_wavefronts=0,
        l1_wavefronts=2 * warps,
        l2_bytes=8 * p.N,
        dram_bytes=8 * p.N,
        inflight_bytes=4,
        steps=1,
        overlap=0,
    )


def space(p, d):
    rows = (
        ("FAULT", (0, 1, 2, 3, 4, 5), "what is broken, 0: nothing"),
        ("THREADS", (32, 64, 128, 256, 512, 1024), "threads per block"),
    )
    reason = "faults come with 256 threads"
    only = model.Constraint(reason, lambda c: (c.FAULT == 0) | (c.THREADS == 256))
    return model.Space(model.parameters(rows), (only,))


SPEC = model.KernelSpec(
    name="faults",
    operation=OPERATION,
    summary="one element a thread, broken on request",
    space=space,
    default=lambda p, d: model.Config({"FAULT": 0, "THREADS": 128}),
    kernels=lambda c, p: (model.KernelDefinition("faulty", "faulty.cu.jinja"),),
    plan=plan,
    work=work,
    limits=lambda c, p: (model.Limit("N", "at_most", (2**31 - 1) * c.THREADS),),
    template_root=Path(__file__).parent,
)

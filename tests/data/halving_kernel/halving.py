# SPDX-License-Identifier: Apache-2.0
"""halving, spec in_place: right configurations, and two kinds that are broken.

For tests of what a tuner does about it. FAULT 0 is right; 1 leaves out a last block that is not
whole, which shows at other sizes only; 2 halves twice.
"""

from pathlib import Path

import numpy as np

from tunegen import model

OPERATION = model.Operation(
    name="halving",
    summary="x = 0.5 * x",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(2**20,),
    arrays=lambda p: (model.Array("x", (p.N,), (1,), p.dtype, "inout"),),
    reference=lambda p, operands, scalars: {"x": 0.5 * np.float64(operands["x"])},
    flops=lambda p: p.N,
    edge_problems=lambda p: (
        model.EdgeProblem(OPERATION.problem((1000,))),
        model.EdgeProblem(OPERATION.problem((33,))),
    ),
)


def plan(c, p, s):
    arguments = (
        model.Argument("x", "pointer"),
        model.Argument("n", "int64", model.formula(s.N)),
    )
    blocks = model.formula(model.ceil_div(s.N, c.THREADS))
    launch = model.Launch("halving", (blocks, 1, 1), (c.THREADS, 1, 1), arguments)
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


SPEC = model.KernelSpec(
    name="in_place",
    operation=OPERATION,
    summary="one element a thread, broken on request",
    space=lambda p, d: model.Space(
        model.parameters(
            (
                ("FAULT", (0, 1, 2), "what is broken, 0: nothing"),
                ("THREADS", (64, 256), "threads per block"),
            )
        ),
        (),
    ),
    default=lambda p, d: model.Config({"FAULT": 0, "THREADS": 256}),
    kernels=lambda c, p: (model.KernelDefinition("halving", "halving.cu.jinja"),),
    plan=plan,
    work=work,
    limits=lambda c, p: (model.Limit("N", "at_most", (2**31 - 1) * c.THREADS),),
    template_root=Path(__file__).parent,
)

# SPDX-License-Identifier: Apache-2.0
"""total, spec atomic: a sum that is right and differs from run to run."""

from pathlib import Path

import numpy as np

from tunegen import model

OPERATION = model.Operation(
    name="total",
    summary="y = y + sum of x",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(2**18,),
    arrays=lambda p: (
        model.Array("x", (p.N,), (1,), p.dtype, "in"),
        model.Array("y", (1,), (1,), p.dtype, "inout"),
    ),
    reference=lambda p, operands, scalars: {
        "y": np.float64(operands["y"]) + np.sum(np.float64(operands["x"]))
    },
    flops=lambda p: p.N,
)


def plan(c, p, s):
    arguments = (
        model.Argument("x", "pointer"),
        model.Argument("y", "pointer"),
        model.Argument("n", "int64", model.formula(s.N)),
    )
    blocks = model.formula(model.ceil_div(s.N, c.THREADS))
    launch = model.Launch("total", (blocks, 1, 1), (c.THREADS, 1, 1), arguments)
    return model.LaunchPlan((launch,))


SPEC = model.KernelSpec(
    name="atomic",
    operation=OPERATION,
    summary="one atomic addition a thread",
    space=lambda p, d: model.Space(
        model.parameters((("THREADS", (256,), "threads per block"),)), ()
    ),
    default=lambda p, d: model.Config({"THREADS": 256}),
    kernels=lambda c, p: (model.KernelDefinition("total", "total.cu.jinja"),),
    plan=plan,
    work=lambda c, p, d: model.Work(
        blocks=model.ceil_div(p.N, c.THREADS),
        threads=c.THREADS,
        registers=16,
        shared_bytes=0,
        fma=c.THREADS,
        instructions=160,
        shared_wavefronts=0,
        l1_wavefronts=8,
        l2_bytes=4 * p.N,
        dram_bytes=4 * p.N,
        inflight_bytes=4,
        steps=1,
        overlap=0,
    ),
    limits=lambda c, p: (model.Limit("N", "at_most", (2**31 - 1) * c.THREADS),),
    template_root=Path(__file__).parent,
)

# SPDX-License-Identifier: Apache-2.0
"""scale, spec simple: y = a * x in one pass. A whole kernel in one file beside its template."""

from pathlib import Path

import numpy as np

from tunegen import model

OPERATION = model.Operation(
    name="scale",
    summary="y = a * x",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(2**24,),
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
    blocks = model.formula(model.ceil_div(s.N, c.THREADS * c.ELEMENTS))
    return model.LaunchPlan((model.Launch("scale", (blocks, 1, 1), (c.THREADS, 1, 1), arguments),))


def work(c, p, d):
    accesses = 2 * c.ELEMENTS * model.ceil_div(c.THREADS, 32)
    return model.Work(
        blocks=model.ceil_div(p.N, c.THREADS * c.ELEMENTS),
        threads=c.THREADS,
        registers=16 + c.ELEMENTS,
        shared_bytes=0,
        fma=c.THREADS * c.ELEMENTS,
        instructions=3 * accesses,
        shared_wavefronts=0,
        l1_wavefronts=accesses,
        l2_bytes=8 * p.N,
        dram_bytes=8 * p.N,
        inflight_bytes=4 * c.UNROLL,
        steps=c.ELEMENTS // c.UNROLL,
        overlap=0,
    )


def space(p, d):
    rows = (
        ("THREADS", (32, 64, 128, 256, 512, 1024), "threads per block"),
        ("ELEMENTS", (1, 2, 4, 8, 16), "elements per thread, THREADS apart"),
        ("UNROLL", (1, 2, 4), "loads in flight"),
    )
    divides = model.Constraint("UNROLL divides ELEMENTS", lambda c: c.ELEMENTS % c.UNROLL == 0)
    return model.Space(model.parameters(rows), (divides,))


SPEC = model.KernelSpec(
    name="simple",
    operation=OPERATION,
    summary="some elements a thread",
    space=space,
    default=lambda p, d: model.Config({"THREADS": 256, "ELEMENTS": 4, "UNROLL": 4}),
    kernels=lambda c, p: (model.KernelDefinition("scale", "scale.cu.jinja"),),
    plan=plan,
    work=work,
    limits=lambda c, p: (model.Limit("N", "at_most", (2**31 - 1) * c.THREADS * c.ELEMENTS),),
    template_root=Path(__file__).parent,
)

# SPDX-License-Identifier: Apache-2.0
"""matmul on Hopper's tensor cores, on a real GPU: every way through the template, at tails, in all
layouts, with and without copies of operands."""

from __future__ import annotations

import numpy as np
import pytest
from test_cases_gpu import LAYOUTS, MATMUL, Bench, matmul

from tunegen.kernels import matmul_wgmma, matmul_wgmma_padded
from tunegen.kernels.matmul import ACTIVATIONS

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]

WGMMA, PADDED = matmul_wgmma.SPEC, matmul_wgmma_padded.SPEC

WAYS = (
    {"CLUSTER_M": 2},
    {"CLUSTER_N": 2},
    {"CLUSTER_K": 2},
    {"CLUSTER_K": 4, "PINGPONG": 1},
    {"CLUSTER_K": 8},
    {"PINGPONG": 1},
    {"SWAP_OPERANDS": 1},
    {"SWAP_OPERANDS": 1, "CLUSTER_N": 2},
    {"SWAP_OPERANDS": 1, "PINGPONG": 1, "CLUSTER_M": 2},
    {"SWAP_OPERANDS": 1, "BLOCK_M": 16},
    {"CONSUMERS": 1},
    {"CONSUMERS": 3},
    {"BLOCK_K": 128},
    {"SPLIT_K": 4},
    {"SPLIT_K": 2, "CLUSTER_K": 2},
    {"BLOCK_N": 208},
    {"STORE_PARTS": 3},
    {"BLOCK_N": 176, "STORE_PARTS": 3, "SWAP_OPERANDS": 0},
    {"STREAM_K": 1},
    {"STREAM_K": 2},
    {"STREAM_K": 1, "PINGPONG": 1},
    {"STREAM_K": 2, "CLUSTER_M": 2},
    {"STREAM_K": 1, "SWAP_OPERANDS": 1, "CONSUMERS": 3},
    {"MMA_IN_FLIGHT": 0, "RASTER_COLUMNS": 1},
)

# Sizes that the copy engine can take, tails of every tile and of its boxes among them.
WHOLE = (1000, 1008, 2056)
SMALL = ("3x136x72x24", "64x96x8", "8x2056x520", "520x8x136")

# Rows that do not end at whole 16 bytes, with room behind them that is not C's.
RAGGED = ("300x261x70", "13x2053x1030", "2x70x37x5")
ODD = (999, 1001, 1003)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("cache"))
    if bench.device.arch != "sm_90":
        pytest.skip(f"wgmma is of sm_90, not of {bench.device.arch}")
    yield bench
    bench.close()


def ways(spec, problem, device, seed):
    """The default, and a random configuration for every way that there is one of."""
    table = spec.space(problem, device).enumerate()
    rows = np.random.default_rng(seed).integers(len(table), size=200_000)
    columns = table.columns(rows)
    pairs = [(spec, spec.default(problem, device))]
    for way in WAYS:
        fits = np.ones(len(rows), bool)
        for name, value in way.items():
            fits &= getattr(columns, name) == value
        if fits.any():
            pairs.append((spec, table[int(rows[np.argmax(fits)])]))
    assert len(pairs) > len(WAYS) // 2
    return pairs


def usable(builts):
    return [built for built in builts if not any(kernel.rejection for kernel in built.kernels)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_is_right(bench, dtype, layout):
    seed = LAYOUTS.index(layout)
    whole = matmul(WHOLE, dtype, layout, beta=1, lda=2064, ldb=2064, ldc=1016)
    builts = usable(bench.build(whole, *ways(WGMMA, whole, bench.device, seed)))
    bench.check_all(builts, whole, scalars={"alpha": -2.0, "beta": 3.0})
    for sizes in SMALL:
        problem = matmul(sizes, dtype, layout, beta=1)
        able = [built for built in builts if built.covers(problem)]
        assert able
        bench.check_all(able, problem, scalars={"alpha": -2.0, "beta": 3.0})
    for sizes in RAGGED:
        problem = matmul(sizes, dtype, layout, beta=1, lda=2056, ldb=2056, ldc=2056)
        able = [built for built in builts if built.covers(problem)]
        assert able
        bench.check_all(able, problem, scalars={"alpha": -2.0, "beta": 3.0})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_and_odd_rows_of_c_are_right(bench, layout):
    odd = matmul(ODD, "bf16", layout, gap=2)
    builts = usable(bench.build(odd, *ways(PADDED, odd, bench.device, LAYOUTS.index(layout))))
    offsets = {name: 2 for name in "ABC"}
    bench.check_all(builts, odd, offsets=offsets)
    for sizes in ("2x65x67x31", "300x261x70", "1x9x5"):
        problem = matmul(sizes, "bf16", layout, gap=1)
        bench.check_all(builts, problem, offsets=offsets)


def test_results_are_the_same_every_time(bench):
    problem = matmul((64, 512, 4096), "bf16", "nt")
    for built in usable(bench.build(problem, *ways(WGMMA, problem, bench.device, 0))):
        bench.prepare(problem, sets=1)
        assert bench.check(built, problem, repeats=50).deterministic, built


@pytest.mark.parametrize("output", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_way_has_every_epilogue(bench, activation, output):
    seed = ACTIVATIONS.index(activation)
    scalars = {"alpha": -2.0, "beta": 3.0}
    how = {"bias": 1, "activation": activation, "output": output, "beta": seed % 2}
    whole = matmul(WHOLE, "bf16", "nt", **how)
    builts = usable(bench.build(whole, *ways(WGMMA, whole, bench.device, seed)))
    odd = matmul(ODD, "bf16", "tn", gap=2, **how)
    copying = usable(bench.build(odd, *ways(PADDED, odd, bench.device, seed)))
    exact = MATMUL.exact(whole)
    bench.check_all(builts, whole, scalars=scalars, exact=exact)
    for sizes in SMALL:
        problem = matmul(sizes, "bf16", "nt", **how)
        able = [built for built in builts if built.covers(problem)]
        assert able
        bench.check_all(able, problem, scalars=scalars, exact=exact)
    offsets = {"A": 2, "B": 2} | dict.fromkeys(("C", "bias"), 4 if output == "fp32" else 2)
    bench.check_all(copying, odd, scalars=scalars, exact=exact, offsets=offsets)

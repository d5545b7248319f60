# SPDX-License-Identifier: Apache-2.0
"""Warps and clusters on the emulator: a kernel that is right passes, broken ones are caught."""

from __future__ import annotations

import dataclasses

import emulator
import numpy as np
import pytest

from tunegen.model import (
    Argument,
    Array,
    Config,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Operation,
    Space,
    formula,
)
from tunegen.perfmodel import default_chip

pytestmark = pytest.mark.emulator

BLOCK = 64

# Element i goes to the other block of a cluster of two, and there to lane i ^ 5.
SWAP = """
//% include "lib/types.cuh"
//% include "lib/config.cuh"
//% include "lib/cluster.cuh"
extern "C" __global__ void __launch_bounds__(64) tunegen_swap(const fp32* x, fp32* y) {
  extern __shared__ __align__(16) fp32 stage[];
  const int thread = threadIdx.x;
  const int rank = blockIdx.x % 2;
  const int start = blockIdx.x * 64;
  const fp32 value = x[start + thread];
  stage[thread] = __shfl_xor_sync(0xffffffffu, value, 5);
  cluster_sync();  // written
  y[start + thread] = load_shared_of(rank ^ 1, stage + thread);
  cluster_sync();  // read
}
"""

BROKEN = {
    "a cluster barrier too few": ("  cluster_sync();  // written\n", "", {"wrong_value", "unset"}),
    "a block's barrier for a cluster's": (
        "cluster_sync();  // written", "__syncthreads();", {"wrong_value", "unset"},
    ),
    "a lane that does not exchange": (
        "= __shfl_xor_sync(0xffffffffu, value, 5)",
        "= thread == 3 ? value : __shfl_xor_sync(0xffffffffu, value, 5)",
        {"barrier"},
    ),
    "a thread that leaves": ("  cluster_sync();  // read\n",
                             "  if (thread < 63) cluster_sync();\n", {"barrier"}),
    "a lane that is not there": ("value, 5)", "value, 32)", {"undefined"}),
    "a block that is not there": ("rank ^ 1", "rank + 2", {"undefined"}),
    "a static variable in a cluster": (
        "extern __shared__ __align__(16) fp32 stage[];", "__shared__ fp32 stage[64];",
        {"undefined"},
    ),
}  # fmt: skip


def swapped(operands):
    pairs = operands["X"].reshape(-1, 2, BLOCK)[:, ::-1]
    return {"Y": pairs[:, :, np.arange(BLOCK) ^ 5].reshape(-1)}


OPERATION = Operation(
    name="swap",
    summary="blocks change places",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(256,),
    arrays=lambda p: (
        Array("X", (p.N,), (1,), "fp32", "in"),
        Array("Y", (p.N,), (1,), "fp32", "out"),
    ),
    reference=lambda p, operands, scalars: swapped(operands),
    flops=lambda p: 0,
)


def spec_of(folder, template: str, blocks_per_cluster: int = 2) -> KernelSpec:
    (folder / "swap.cu.jinja").write_text(template)
    arguments = (Argument("X", "pointer"), Argument("Y", "pointer"))

    def plan(c, p, s):
        grid = (formula(s.N // BLOCK), 1, 1)
        cluster = (blocks_per_cluster, 1, 1)
        return LaunchPlan((Launch("swap", grid, (BLOCK, 1, 1), arguments, 4 * BLOCK, cluster),))

    return KernelSpec(
        name="swap",
        operation=OPERATION,
        summary="",
        space=lambda p, d: Space(()),
        default=lambda p, d: Config({}),
        kernels=lambda c, p: (KernelDefinition("swap", "swap.cu.jinja"),),
        plan=plan,
        work=lambda c, p, d: None,
        limits=lambda c, p: (),
        template_root=folder,
    )


def check(spec: KernelSpec, seed: int) -> None:
    device = dataclasses.replace(default_chip("sm_90"), sm_count=2)
    problem = spec.operation.problem((4 * BLOCK,))
    emulator.check(emulator.Case(spec, Config({}), problem, device), seed)


@pytest.mark.parametrize("seed", range(4))
def test_warps_exchange_and_clusters_share(tmp_path, seed):
    check(spec_of(tmp_path, SWAP), seed)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_cooperation_is_caught(tmp_path, name):
    right, wrong, kinds = BROKEN[name]
    assert SWAP.count(right) == 1
    spec = spec_of(tmp_path, SWAP.replace(right, wrong))
    found = set()
    for seed in range(8):  # some orders of blocks hide a race
        try:
            check(spec, seed)
        except emulator.WrongKernel as error:
            found.add(error.kind)
    assert found
    assert found <= kinds


def test_a_grid_is_whole_clusters(tmp_path):
    with pytest.raises(emulator.WrongKernel, match="whole clusters"):
        check(spec_of(tmp_path, SWAP, blocks_per_cluster=3), 0)

# SPDX-License-Identifier: Apache-2.0
"""How clusters share blocks of K (lib/wgmma_stream_k.cuh), on the emulator: what each has to do at
each turn, held against what makes sums whole and lets nobody wait for ever."""

from __future__ import annotations

import collections
import ctypes
import functools
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import emulator.build
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunegen.kernels.matmul_wgmma import derived
from tunegen.model import Config, KernelDefinition

pytestmark = pytest.mark.emulator

# A block writes how many turns are for whole tiles, who has the beginning of its first shared
# tile, how many turns there are, and what it has at each.
TELLING = """
//% include "lib/config.cuh"
enum : int { CLUSTER = CLUSTER_M * CLUSTER_N };
//% include "lib/tile_order.cuh"
struct Slice {
  int first, count;
};
struct Stages {};
//% include "lib/wgmma_stream_k.cuh"
extern "C" __global__ void tunegen_shares(
    int* told, int most_turns, int batch, int m, int n, int k) {
  __shared__ __align__(16) unsigned char memory[32];
  const Job job({}, TileOrder(batch, m, n), k, static_cast<int>(blockIdx.x) % CLUSTER, memory);
  __syncthreads();
  if (threadIdx.x != 31) return;
  int* to = told + blockIdx.x * (3 + 6 * most_turns);
  to[0] = job.range.whole;
  to[1] = job.range.first_sharer;
  int turn = job.first;
  for (; job.has(turn) && turn < most_turns; turn += job.step) {
    const Part part = job.part(turn);
    int* const at = to + 3 + 6 * turn;
    at[0] = part.tile.matrix;
    at[1] = part.tile.row;
    at[2] = part.tile.col;
    at[3] = part.slice.first;
    at[4] = part.slice.count;
    at[5] = part.is_last;
  }
  to[2] = turn;
}
"""
BLOCK = {"BLOCK_M": 2, "BLOCK_N": 3, "BLOCK_K": 4}
CONFIGS = (
    {"CLUSTER_M": 1, "CLUSTER_N": 1, "RASTER_GROUP": 2, "RASTER_COLUMNS": 0},
    {"CLUSTER_M": 2, "CLUSTER_N": 1, "RASTER_GROUP": 1, "RASTER_COLUMNS": 1},
    {"CLUSTER_M": 1, "CLUSTER_N": 2, "RASTER_GROUP": 4, "RASTER_COLUMNS": 1},
)


class Part(NamedTuple):
    matrix: int
    row: int
    col: int
    first: int
    count: int
    is_last: int

    @property
    def tile(self):
        return self.matrix, self.row, self.col


class Block(NamedTuple):
    cluster: int
    whole: int
    first_sharer: int
    parts: list[Part]

    @property
    def shared(self):
        return self.parts[self.whole :]


@functools.cache
def kernel(config):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shares.cu.jinja").write_text(TELLING)
        definition = KernelDefinition("shares", "shares.cu.jinja", {}, dict(config))
        return emulator.build.build_definition(definition, "sm_90", Path(folder))


def shares(config, clusters, batch, m, n, k):
    """What every block has to do, by its number."""
    size = config.CLUSTER_M * config.CLUSTER_N
    along_m, along_n = derived.groups(config, types.SimpleNamespace(M=m, N=n))
    most = along_m * along_n * batch + 1
    told = np.full((clusters * size, 3 + 6 * most), -1, np.int32)
    launch = emulator.build.Launch(
        emulator.build.Vec3(clusters * size, 1, 1), emulator.build.Vec3(32, 1, 1), 0, 0, 20
    )
    values = [ctypes.c_void_p(told.ctypes.data), *map(ctypes.c_int32, (most, batch, m, n, k))]
    fault = kernel(config)(launch, values)
    assert not fault.kind, fault.message
    assert (told[:, 2] < most).all(), "no cluster has more turns than there are tiles"
    return [
        Block(
            number // size, row[0], row[1],
            [Part(*map(int, row[3 + 6 * turn : 9 + 6 * turn])) for turn in range(row[2])],
        )
        for number, row in enumerate(told)
    ]  # fmt: skip


def check(config, clusters, batch, m, n, k):
    size, depth = config.CLUSTER_M * config.CLUSTER_N, -(-k // config.BLOCK_K)
    blocks = shares(config, clusters, batch, m, n, k)

    done = collections.Counter(
        (part.tile, step)
        for block in blocks
        for part in block.parts
        for step in range(part.first, part.first + part.count)
    )
    high, wide = config.CLUSTER_M * config.BLOCK_M, config.CLUSTER_N * config.BLOCK_N
    assert done == {
        ((matrix, row, col), step): 1
        for matrix in range(batch)
        for row in range(0, -(-m // high) * high, config.BLOCK_M)
        for col in range(0, -(-n // wide) * wide, config.BLOCK_N)
        for step in range(depth)
    }

    problem = types.SimpleNamespace(M=m, N=n, B=batch)
    turns = int(derived.turns(config, problem))
    shared_turns = int(derived.shared_turns(config, problem, clusters * size))
    assert {clusters * block.whole for block in blocks} == {turns - shared_turns}

    for rank in range(size):
        mine = blocks[rank::size]
        parts_of = collections.defaultdict(list)
        for block in mine:
            for part in block.parts:
                assert part.count > 0
                assert part.is_last == (part.first + part.count == depth)
                parts_of[part.tile].append((part, block.cluster))
        for block in mine:
            for part in block.parts[: block.whole]:
                assert (part.first, part.count) == (0, depth)
            # What is left for others comes before anything that may wait.
            assert all(part.is_last for part in block.shared[1:])
            for part in block.parts:
                if not part.is_last or part.first == 0:
                    continue
                earlier = sorted(c for p, c in parts_of[part.tile] if p.first < part.first)
                assert earlier == list(range(block.first_sharer, block.cluster))
                assert part == block.parts[-1]
        amounts = [sum(part.count for part in block.shared) for block in mine]
        assert max(amounts) - min(amounts) <= 1
        assert sum(amounts) == shared_turns * depth
    return blocks


def config_of(which, stream_k):
    return Config({**BLOCK, **CONFIGS[which], "SPLIT_K": 1, "CLUSTER_K": 1, "SPARE_SMS": 0,
                   "STREAM_K": stream_k})  # fmt: skip


@pytest.mark.parametrize("stream_k", [1, 2])
@pytest.mark.parametrize("which", range(len(CONFIGS)))
@settings(max_examples=60, deadline=None)
@given(
    clusters=st.integers(1, 24),
    batch=st.integers(1, 2),
    m=st.integers(1, 16),
    n=st.integers(1, 24),
    k=st.integers(1, 80),
)
@example(clusters=8, batch=1, m=4, n=6, k=3)  # fewer blocks of K than clusters
@example(clusters=1, batch=1, m=6, n=9, k=20)  # nobody to share with
def test_every_block_of_k_is_multiplied_once_and_nobody_waits_for_who_waits(
    which, stream_k, clusters, batch, m, n, k
):
    check(config_of(which, stream_k), clusters, batch, m, n, k)


@pytest.mark.parametrize(("stream_k", "whole"), [(1, 3), (2, 2)])
def test_where_waves_are_full_shares_are_whole_tiles(stream_k, whole):
    blocks = check(config_of(0, stream_k), 6, 1, 6 * 2, 3 * 3, 5 * 4)  # 18 tiles, 3 waves of 6
    for block in blocks:
        assert block.whole == whole
        assert [(part.first, part.count) for part in block.parts] == [(0, 5)] * 3


@pytest.mark.parametrize("stream_k", [1, 2])
def test_clusters_without_a_block_of_k_have_whole_tiles_alone(stream_k):
    """Seven share two blocks of K of one tile, or those of eight tiles where a wave more is
    shared."""
    blocks = check(config_of(0, stream_k), 7, 1, 8 * 2, 3, 2 * 4)
    amounts = [sum(part.count for part in block.shared) for block in blocks]
    assert sorted(amounts) == ([0] * 5 + [1] * 2 if stream_k == 1 else [2] * 5 + [3] * 2)


@pytest.mark.parametrize("clusters", [2, 5, 16])
def test_one_tile_is_shared_by_all(clusters):
    blocks = check(config_of(0, 1), clusters, 1, 2, 3, 16 * 4)
    assert [len(block.parts) for block in blocks] == [1] * clusters
    assert [block.first_sharer for block in blocks] == [0] * clusters
    assert [block.parts[0].is_last for block in blocks] == [0] * (clusters - 1) + [1]


def test_the_counting_does_not_overflow():
    """A million tiles of four million blocks of K each, the last 131 shared by 132 clusters."""
    config = config_of(0, 1)
    told = np.full((132, 3), -1, np.int32)
    launch = emulator.build.Launch(
        emulator.build.Vec3(132, 1, 1), emulator.build.Vec3(32, 1, 1), 0, 0, 20
    )
    tiles = 132 * 8000 + 131
    values = [ctypes.c_void_p(told.ctypes.data), *map(ctypes.c_int32, (0, 1, 2, 3 * tiles, 2**24))]
    fault = kernel(config)(launch, values)
    assert not fault.kind, fault.message
    assert set(told[:, 0]) == {8000}
    # Each cluster but the first begins inside of the tile before that of its number.
    assert told[:, 1].tolist() == [0, *range(131)]

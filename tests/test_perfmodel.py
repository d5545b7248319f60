# SPDX-License-Identifier: Apache-2.0
"""perfmodel: chips, occupancy, the predicted time and its bounds, floors, ranking, evaluator."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taken import taken

from tunegen import kernels, perfmodel
from tunegen.errors import PlanError, UsageError
from tunegen.model import (
    ARCHS,
    Candidate,
    CompiledKernel,
    Config,
    Constraint,
    Resources,
    Space,
    Work,
    ceil_div,
    minimum,
    parameters,
)
from tunegen.perfmodel import CHIPS, default_chip, explain, find_chip, occupancy, predict_us

H200 = find_chip("NVIDIA H200")
A6000 = find_chip("RTX A6000")
SPEC_IDS = [f"{spec.operation.name}-{spec.name}" for spec in kernels.SPECS]

# A machine that is busy otherwise is no reason to fail.
relaxed = settings(deadline=None)

each_spec = pytest.mark.parametrize("spec", kernels.SPECS, ids=SPEC_IDS)


def problems(spec):
    """The default problem in every dtype, and a small one."""
    operation = spec.operation
    small = tuple(33 for _ in operation.axes)
    for dtype in operation.dtypes:
        yield operation.problem(dtype=dtype)
        yield operation.problem(small, dtype=dtype)


def compiled(registers=64, shared_bytes=0, spill_bytes=0, rejection=""):
    resources = Resources(registers, spill_bytes, spill_bytes, spill_bytes, shared_bytes)
    return CompiledKernel(
        "k", "tunegen_k", "sm_90", b"", b"", resources, "", rejection, "13.0", 0.1, False
    )


# --- chips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_has_a_default_with_a_source(arch):
    chip = default_chip(arch)
    assert chip.arch == arch
    assert chip.source
    assert chip in perfmodel.chips_of(arch)


def test_h200_is_what_sm_90_means():
    assert default_chip("sm_90") is H200


def test_names_are_unique():
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


# Peak rates as the vendor's datasheets and whitepapers print them: fp32 TFLOP/s without tensor
# cores, dense 16-bit tensor TFLOP/s with fp32 sums. They check SMs, clocks and rates at once.
PEAKS = [
    ("Tesla T4", 8.1, 65),
    ("RTX 2080 Ti", 13.4, 53.8),
    ("A100-SXM4-40GB", 19.5, 312),
    ("RTX 3090", 35.6, 71),
    ("RTX A6000", 38.7, 154.8),
    ("L40S", 91.6, 362),
    ("RTX 4090", 82.6, 165.2),
    ("H100 80GB HBM3", 66.9, 989.4),
    ("H100 PCIe", 51.2, 756),
    ("NVIDIA H200", 66.9, 989.4),
    ("B200", 75, 2250),
    ("RTX 5090", 104.8, 209.5),
    ("RTX PRO 6000", 126, 503.8),
]


@pytest.mark.parametrize(("name", "fp32_tflops", "tensor_tflops"), PEAKS)
def test_peak_rates_are_the_published_ones(name, fp32_tflops, tensor_tflops):
    chip = find_chip(name)
    per_clock = 2 * chip.sm_count * chip.clock_mhz / 1e6
    assert per_clock * chip.fp32_per_clock == pytest.approx(fp32_tflops, rel=0.04)
    # Tensor cores of Hopper and Blackwell run at a lower boost clock than the rest.
    assert per_clock * chip.tensor16_per_clock == pytest.approx(tensor_tflops, rel=0.09)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_block_can_use_what_an_sm_has(chip):
    assert chip.shared_bytes_per_block + chip.shared_bytes_reserved == chip.shared_bytes_per_sm
    assert chip.threads_per_sm % 128 == 0
    assert chip.l2_gbps > chip.memory_gbps


@pytest.mark.parametrize("wanted", ["h200", "NVIDIA H200", " H200 ", "nvidia  h200"])
def test_chips_are_found_in_any_case_and_in_part(wanted):
    assert find_chip(wanted) is H200


def test_exact_name_wins_over_longer_ones():
    assert find_chip("Orin").name == "Orin"


def test_ambiguous_chip_names_the_candidates():
    with pytest.raises(UsageError, match=r"A100-SXM4-80GB, NVIDIA A100-SXM4-40GB"):
        find_chip("A100")


@pytest.mark.parametrize("wanted", ["", "H20O", "RX 7900"])
def test_unknown_chip_is_a_usage_error(wanted):
    with pytest.raises(UsageError, match=r"known: .*NVIDIA H200"):
        find_chip(wanted)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_61", "hopper"])
def test_unknown_arch_is_a_usage_error(arch):
    with pytest.raises(UsageError):
        default_chip(arch)


# --- occupancy -----------------------------------------------------------------------------------


# Published results of the occupancy calculator.
CALCULATED = [
    # CUDA best practices guide, occupancy: 37 registers, 64 Ki registers and 2048 threads an SM.
    ("A100-SXM4-40GB", 128, 37, 0, 12, 0.75, "registers"),
    ("A100-SXM4-40GB", 320, 37, 0, 4, 0.625, "registers"),
    # siboehm, How to Optimize a CUDA Matmul Kernel, kernel 3 on an A6000.
    ("RTX A6000", 1024, 37, 8192, 1, 2 / 3, "threads"),
    # gau-nernst, profile of cuBLAS's fp32 kernel on GA10x.
    ("RTX 3090", 256, 216, 49 * 1024, 1, 1 / 6, "registers"),
    # Full occupancy by the limits of each capability.
    ("T4", 256, 64, 0, 4, 1.0, "threads"),
    ("T4", 64, 32, 0, 16, 1.0, "threads"),
    ("T4", 32, 32, 0, 16, 0.5, "blocks"),
    ("RTX 4090", 64, 40, 0, 24, 1.0, "threads"),
    ("H200", 256, 32, 0, 8, 1.0, "threads"),
    ("H200", 32, 32, 0, 32, 0.5, "blocks"),
    # 1 KiB of each block is the system's from compute capability 8.0 on.
    ("H200", 128, 32, 227 * 1024, 1, 4 / 64, "shared memory"),
    ("H200", 128, 32, 113 * 1024, 2, 8 / 64, "shared memory"),
    ("H200", 128, 32, 113 * 1024 + 1, 1, 4 / 64, "shared memory"),
    ("T4", 128, 32, 32 * 1024, 2, 8 / 32, "shared memory"),
    # Registers are given to a warp by 256, shared memory to a block by 128 bytes, 256 on Turing.
    ("H200", 128, 33, 0, 12, 0.75, "registers"),
    ("H200", 64, 32, 10649, 19, 38 / 64, "shared memory"),
    ("T4", 64, 32, 9362, 6, 12 / 32, "shared memory"),
    # Each quarter of the SM has a quarter of the registers: 9 warps do not get 9/32 of them.
    ("H200", 288, 80, 0, 2, 18 / 64, "registers"),
    # What does not fit.
    ("H200", 128, 32, 227 * 1024 + 1, 0, 0.0, "shared memory"),
    ("H200", 1024, 65, 0, 0, 0.0, "registers"),
    ("H200", 128, 256, 0, 0, 0.0, "registers"),
    ("H200", 1025, 32, 0, 0, 0.0, "threads"),
    ("H200", 0, 32, 0, 0, 0.0, "threads"),
]


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared_bytes", "blocks", "fraction", "limiter"), CALCULATED
)
def test_occupancy_is_the_calculators(
    name, threads, registers, shared_bytes, blocks, fraction, limiter
):
    found = occupancy(find_chip(name), threads, registers, shared_bytes)
    assert found.blocks_per_sm == blocks
    assert found.fraction == pytest.approx(fraction)
    assert found.limiter == limiter
    assert found.warps_per_sm == blocks * math.ceil(threads / 32)


BLOCKS = st.tuples(
    st.integers(1, 1024), st.integers(1, 255), st.integers(0, 232448), st.sampled_from(CHIPS)
)


@relaxed
@given(BLOCKS)
def test_resident_blocks_never_exceed_what_the_sm_has(block):
    threads, registers, shared_bytes, chip = block
    found = occupancy(chip, threads, registers, shared_bytes)
    assert 0 <= found.fraction <= 1
    blocks = found.blocks_per_sm
    assert blocks * threads <= chip.threads_per_sm
    assert blocks * threads * registers <= chip.registers_per_sm
    assert blocks * (shared_bytes + chip.shared_bytes_reserved) <= chip.shared_bytes_per_sm


@relaxed
@given(BLOCKS, st.sampled_from(["threads", "registers", "shared_bytes"]))
def test_a_block_that_needs_more_is_resident_no_more_often(block, which):
    threads, registers, shared_bytes, chip = block
    needs = {"threads": threads, "registers": registers, "shared_bytes": shared_bytes}
    more = {**needs, which: needs[which] + 32}
    assert perfmodel.blocks_per_sm(chip, **more) <= perfmodel.blocks_per_sm(chip, **needs)


def test_columns_give_what_numbers_give():
    random = np.random.default_rng(0)
    threads, registers = random.integers(1, 1100, 500), random.integers(1, 260, 500)
    shared_bytes = random.integers(0, 240_000, 500)
    for chip in (find_chip("T4"), A6000, H200):
        column = perfmodel.blocks_per_sm(chip, threads, registers, shared_bytes)
        rows = zip(threads.tolist(), registers.tolist(), shared_bytes.tolist(), strict=True)
        numbers = [perfmodel.blocks_per_sm(chip, *row) for row in rows]
        assert column.tolist() == numbers
        assert all(type(number) is int for number in numbers)


# --- predictions ---------------------------------------------------------------------------------


def streaming(blocks=10_000, threads=256, vectors=4):
    """A copy: every thread loads and stores so many 16-byte vectors."""
    traffic = blocks * threads * vectors * 32
    warps = threads // 32
    return Work(
        blocks=blocks, threads=threads, registers=16 + 4 * vectors, shared_bytes=0, fma=0,
        instructions=warps * (4 * vectors + 20), shared_wavefronts=0,
        l1_wavefronts=warps * vectors * 8, l2_bytes=traffic, dram_bytes=traffic,
        inflight_bytes=16 * vectors, steps=1, overlap=0,
    )  # fmt: skip


UNITS = ("fp32", "fp64", "tensor16", "tensor64")
WORK = st.builds(
    Work,
    blocks=st.integers(1, 1 << 22),
    threads=st.integers(1, 1024),
    registers=st.integers(16, 400),
    shared_bytes=st.integers(0, 232_448),
    fma=st.integers(0, 1 << 30),
    instructions=st.integers(1, 1 << 26),
    shared_wavefronts=st.integers(0, 1 << 24),
    l1_wavefronts=st.integers(0, 1 << 24),
    l2_bytes=st.integers(0, 1 << 40),
    dram_bytes=st.integers(0, 1 << 38),
    inflight_bytes=st.integers(1, 1024),
    steps=st.integers(0, 1 << 16),
    overlap=st.floats(0, 1),
    unit=st.sampled_from(UNITS),
    extra_launches=st.integers(0, 2),
    extra_bytes=st.integers(0, 1 << 30),
    register_limit=st.integers(32, 255),
)

NEVER_FASTER = [
    "fma", "instructions", "shared_wavefronts", "l1_wavefronts", "dram_bytes", "steps",
    "extra_launches", "extra_bytes",
]  # fmt: skip


@relaxed
@given(WORK, st.sampled_from(CHIPS), st.sampled_from(NEVER_FASTER), st.integers(1, 1 << 20))
def test_more_work_is_never_faster(work, chip, name, more):
    harder = dataclasses.replace(work, **{name: getattr(work, name) + more})
    assert predict_us(harder, chip) >= predict_us(work, chip) * (1 - 1e-12)


@relaxed
@given(WORK, st.sampled_from(CHIPS), st.integers(1, 5000))
def test_more_blocks_of_the_same_kind_are_never_faster(work, chip, more):
    def times(blocks):
        grown = dataclasses.replace(
            work,
            blocks=blocks,
            l2_bytes=blocks * 10_000,
            dram_bytes=blocks * 4_000,
        )
        return predict_us(grown, chip)

    assert times(work.blocks + more) >= times(work.blocks) * (1 - 1e-12)


@relaxed
@given(WORK, st.sampled_from(CHIPS), st.integers(1, 64))
def test_registers_that_cost_no_block_cost_nothing(work, chip, registers):
    """Time depends on registers through residency and spills alone."""
    resources = [Resources(registers + i, 0, 0, 0, 0) for i in (0, 1)]
    same = len({perfmodel.blocks_per_sm(chip, work.threads, r.registers, work.shared_bytes)
                for r in resources}) == 1  # fmt: skip
    first, second = (predict_us(work, chip, r) for r in resources)
    if same:
        assert first == second


@relaxed
@given(WORK, st.sampled_from(CHIPS))
def test_formula_and_compiled_agree_when_the_estimate_was_right(work, chip):
    registers = min(work.registers, 40)
    estimated = dataclasses.replace(work, registers=registers, register_limit=255)
    resources = Resources(registers, 0, 0, 0, work.shared_bytes)
    assert predict_us(estimated, chip) == predict_us(estimated, chip, resources)


def test_spills_cost_time():
    work = dataclasses.replace(streaming(), steps=100, fma=1 << 22)
    clean, spilled = Resources(64, 0, 0, 0, 0), Resources(64, 400, 400, 400, 0)
    assert predict_us(work, H200, spilled) > 1.1 * predict_us(work, H200, clean)
    issue = [explain(work, H200, resources).parts["issue"] for resources in (clean, spilled)]
    assert issue[1] > issue[0]

    wide = dataclasses.replace(work, registers=255)
    wider = dataclasses.replace(work, registers=300)
    assert predict_us(wider, H200) > 1.1 * predict_us(wide, H200)
    bounded = dataclasses.replace(wide, register_limit=64)
    assert predict_us(bounded, H200) > 1.1 * predict_us(wide, H200)
    large = dataclasses.replace(work, threads=1024, registers=64)
    larger = dataclasses.replace(large, registers=128)  # its launch bounds leave it 64
    assert 1.1 * predict_us(large, H200) < predict_us(larger, H200) < math.inf


def test_every_further_launch_costs_a_launch():
    once, thrice = (
        predict_us(dataclasses.replace(streaming(), extra_launches=more), H200) for more in (0, 2)
    )
    assert thrice == pytest.approx(once + 2 * perfmodel.LAUNCH_US)


@relaxed
@given(WORK, st.sampled_from(CHIPS))
def test_the_whole_lies_between_its_largest_part_and_their_sum(work, chip):
    try:
        found = explain(work, chip)
    except PlanError:
        assert predict_us(work, chip) == math.inf
        return
    assert found.time_us == predict_us(work, chip)
    assert found.time_us >= max(found.parts.values())
    assert found.time_us <= sum(found.parts.values()) * (1 + 1e-12)
    assert found.parts[found.bound] == max(found.parts.values())
    assert set(found.parts) == {
        "fma", "issue", "shared", "l1", "l2", "dram", "latency", "dispatch", "launch", "extra",
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    st.lists(WORK, min_size=1, max_size=20),
    st.sampled_from(CHIPS),
    st.sampled_from(UNITS),
)
def test_columns_predict_what_numbers_predict(works, chip, unit):
    works = [dataclasses.replace(work, unit=unit) for work in works]
    columns = {
        field.name: np.array([getattr(work, field.name) for work in works])
        for field in dataclasses.fields(Work)
        if field.name != "unit"
    }
    column = predict_us(Work(**columns, unit=unit), chip)
    # Vector units may round a root differently in the last place.
    numbers = [predict_us(work, chip) for work in works]
    np.testing.assert_allclose(column, numbers, rtol=1e-12)


def test_what_does_not_fit_says_what_is_missing():
    work = dataclasses.replace(streaming(), shared_bytes=300_000)
    with pytest.raises(PlanError, match=r"for want of shared memory.*300,000 bytes"):
        explain(work, H200)
    assert predict_us(work, H200) == math.inf


def test_a_large_copy_reaches_the_measured_share_of_the_memory_rate():
    """2^28 fp32 elements take 0.50 ms on an H200: torch's copy_ at 4240 GB/s."""
    work = streaming(blocks=2**28 * 4 // (256 * 4 * 16), vectors=4)
    assert work.dram_bytes == 2 * 2**28 * 4
    found = explain(work, H200)
    assert found.bound == "dram"
    assert found.time_us == pytest.approx(work.dram_bytes / 4240e3, rel=0.1)


def test_tiny_blocks_are_bound_by_how_fast_they_start():
    """On an H200, 2^28 elements of fp32 in blocks of 64 take 2.53 ms, copied or only written."""
    blocks = 2**28 // 64
    reading = dataclasses.replace(streaming(blocks, threads=64), l2_bytes=2**31, dram_bytes=2**31)
    writing = dataclasses.replace(reading, l2_bytes=2**30, dram_bytes=2**30, overlap=1)
    for work in (reading, writing):
        found = explain(work, H200)
        assert found.bound == "dispatch"
        assert found.time_us == pytest.approx(2530, rel=0.03)


def test_a_persistent_grid_waits_for_its_slowest_multiprocessor():
    persistent = dataclasses.replace(streaming(), blocks=8 * H200.sm_count, steps=1)
    many = dataclasses.replace(persistent, blocks=800 * H200.sm_count)
    resources = Resources(32, 0, 0, 0, 0)
    waiting, flowing = (explain(work, H200, resources) for work in (persistent, many))
    assert waiting.waves == 1
    assert waiting.parts["dram"] > 1.05 * flowing.parts["dram"]
    assert flowing.parts["dram"] < 1.002 * flowing.bytes / (H200.memory_gbps * 0.88 * 1e3)


def test_writing_waits_for_nothing():
    """Of 2^28 elements, fill took 0.25 ms with whatever persistent grid; copy took up to 12 ms."""
    fill, copy = kernels.specs_of("fill")[0], kernels.specs_of("copy")[0]
    few = {
        "THREADS": 128, "VECTOR_BYTES": 16, "UNROLL": 1, "BLOCKS_PER_SM": 1, "STORE_POLICY": 0,
        "UNUSED_SHARED_KIB": 0,
    }  # fmt: skip
    times = []
    for spec, config in ((fill, few), (copy, {**few, "LOAD_POLICY": 1, "L2_PREFETCH_BYTES": 0})):
        problem = spec.operation.problem("2^28")
        times.append(predict_us(spec.work(Config(config), problem, H200), H200))
    assert 230 < times[0] < 350
    assert times[1] > 1000


def test_few_bytes_in_flight_cannot_fill_the_memory():
    """Little's law: with one 4-byte load a thread and little occupancy, latency is the limit."""
    wide = streaming(vectors=4)
    narrow = dataclasses.replace(wide, steps=64, inflight_bytes=4, registers=168)
    found = explain(narrow, H200)
    assert found.bound == "latency"
    in_flight = found.occupancy.warps_per_sm * 32 * 4 * H200.sm_count
    latency_us = 600 / H200.clock_mhz
    loads = wide.dram_bytes / 2
    assert found.time_us >= loads / in_flight * latency_us
    assert found.time_us > 2 * predict_us(wide, H200)


def test_overlap_hides_latency():
    work = dataclasses.replace(streaming(blocks=132), steps=500, inflight_bytes=64)
    in_turn, overlapped = (
        predict_us(dataclasses.replace(work, overlap=overlap, l2_bytes=1 << 20), H200)
        for overlap in (0, 1)
    )
    assert overlapped < in_turn / 2


def test_deeper_buffers_hide_more_latency():
    """Twice the bytes in flight for the same traffic: a third tile buffer, say."""
    work = dataclasses.replace(
        streaming(blocks=132), steps=500, overlap=1, l2_bytes=132 * 256 * 500 * 16, dram_bytes=0
    )
    shallow, deep = (
        explain(dataclasses.replace(work, inflight_bytes=bytes_), H200).parts["latency"]
        for bytes_ in (16, 32)
    )
    assert deep < 0.8 * shallow


def test_a_wave_more_costs_a_wave():
    """One block over a full load of the device: all of a block when latency is the limit."""
    work = dataclasses.replace(streaming(), steps=1000, dram_bytes=0, l2_bytes=0)
    resident = explain(work, H200).occupancy.blocks_per_sm
    full = dataclasses.replace(work, blocks=resident * 132)
    over = dataclasses.replace(work, blocks=resident * 132 + 1)
    assert explain(full, H200).waves == 1.0
    assert predict_us(over, H200) == pytest.approx(2 * predict_us(full, H200), rel=0.02)


def test_a_partial_wave_of_arithmetic_is_spread_over_the_sms():
    """Where pipes are the limit, half the resident blocks take half the time."""
    work = dataclasses.replace(streaming(), fma=1 << 24, dram_bytes=0, l2_bytes=0)
    resident = explain(work, H200).occupancy.blocks_per_sm
    assert resident == 8
    full = predict_us(dataclasses.replace(work, blocks=8 * 132), H200)
    half = predict_us(dataclasses.replace(work, blocks=4 * 132), H200)
    assert half == pytest.approx(full / 2, rel=0.02)


def test_one_warp_uses_one_scheduler_of_four():
    one, four = (
        dataclasses.replace(
            streaming(blocks=132, threads=threads), fma=1 << 24, l2_bytes=0, dram_bytes=0
        )
        for threads in (32, 128)
    )
    assert predict_us(one, H200) == pytest.approx(4 * predict_us(four, H200), rel=0.02)


def test_a_few_blocks_cannot_draw_all_of_l2():
    few, many = (
        explain(dataclasses.replace(streaming(blocks=blocks), l2_bytes=1 << 30), H200).parts["l2"]
        for blocks in (4, 132)
    )
    assert few > 10 * many


def test_a_chip_without_an_l2_rate_is_given_one():
    unknown = dataclasses.replace(H200, l2_gbps=0.0)
    ratio = explain(streaming(), unknown).parts["l2"] / explain(streaming(), H200).parts["l2"]
    assert 0.5 < ratio < 2


# --- a published ladder of kernels ---------------------------------------------------------------


def sgemm(block_m, block_n, block_k, thread_m, thread_n, wavefronts, loads, registers):
    """4096^3 in fp32 from shared memory, one tile buffer. ``wavefronts`` and ``loads`` (shared
    load instructions) are per warp and step of K."""
    n = 4096
    threads = block_m * block_n // (thread_m * thread_n)
    warps, blocks = threads // 32, n * n // (block_m * block_n)
    staged = (block_m + block_n) * block_k * 4
    return Work(
        blocks=blocks, threads=threads, registers=registers, shared_bytes=staged,
        fma=block_m * block_n * n, instructions=warps * n * (thread_m * thread_n + loads + 2),
        shared_wavefronts=warps * n * wavefronts, l1_wavefronts=n * (block_m + block_n) * 4 // 128,
        l2_bytes=blocks * n * (block_m + block_n) * 4, dram_bytes=3 * 4 * n * n,
        inflight_bytes=staged // threads, steps=n // block_k, overlap=0,
    )  # fmt: skip


def unblocked(lines):
    """One thread an output in 32 x 32 blocks; ``lines`` of global memory per warp and step."""
    n, warps = 4096, 32
    blocks = n * n // 1024
    return Work(
        blocks=blocks, threads=1024, registers=40, shared_bytes=0, fma=1024 * n,
        instructions=warps * n * 4, shared_wavefronts=0, l1_wavefronts=warps * n * lines,
        l2_bytes=blocks * n * 64 * 4, dram_bytes=3 * 4 * n * n, inflight_bytes=32, steps=n // 4,
        overlap=0,
    )  # fmt: skip


# GFLOP/s on an A6000 as in the README of siboehm's SGEMM_CUDA; the counts follow from its kernels.
LADDER = [
    ("naive, a line per thread", 309, unblocked(lines=33)),
    ("coalesced", 1987, unblocked(lines=2)),
    ("shared memory", 2980, sgemm(32, 32, 32, 1, 1, 2, 2, 37)),
    ("1-D tiles", 8475, sgemm(64, 64, 8, 8, 1, 9, 9, 46)),
    ("2-D tiles", 15972, sgemm(128, 128, 8, 8, 8, 24, 10, 120)),
    ("vectorised", 18237, sgemm(128, 128, 8, 8, 8, 10, 4, 120)),
]


def test_the_ladder_of_matmul_kernels_comes_out_in_order():
    times = [predict_us(work, A6000) for _, _, work in LADDER]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("name", "gflops", "work"), LADDER, ids=[row[0] for row in LADDER])
def test_the_ladder_is_predicted_within_a_factor(name, gflops, work):
    predicted = 2 * 4096**3 / predict_us(work, A6000) / 1e3
    assert gflops / 1.7 < predicted < gflops * 1.7


# --- floor ---------------------------------------------------------------------------------------


@each_spec
def test_no_default_is_predicted_below_the_floor(spec):
    for chip in map(default_chip, ARCHS):
        for problem in problems(spec):
            if spec.refuses(problem, chip):
                continue
            work = spec.work(spec.default(problem, chip), problem, chip)
            floor = perfmodel.floor(spec.operation, problem, chip)
            assert predict_us(work, chip) >= floor.us, (chip.name, problem)


def test_floor_of_a_large_matmul_is_arithmetic():
    operation = kernels.operation("matmul")
    floor = perfmodel.floor(operation, operation.problem("4096x4096x4096"), H200)
    assert floor.bound == "compute"
    # 66.9 TFLOP/s in fp32; cuBLAS measured 51.4.
    assert floor.us == pytest.approx(2 * 4096**3 / 66.9e6, rel=0.01)
    half = perfmodel.floor(operation, operation.problem("4096x4096x4096", dtype="bf16"), H200)
    # cuBLAS needs 202 us on the tensor cores.
    assert 100 < half.us < 202


def test_floor_of_a_matrix_times_vector_is_memory():
    operation = kernels.operation("matmul")
    floor = perfmodel.floor(operation, operation.problem("1x28672x4096", dtype="bf16"), H200)
    assert floor.bound == "memory"
    # cuBLAS needs 54.6 us; 4.8 TB/s would be 48.9.
    assert 48.9 < floor.us < 54.6


def test_floor_of_a_tiny_problem_is_the_launch():
    operation = kernels.operation("matmul")
    floor = perfmodel.floor(operation, operation.problem("8x8x8"), H200)
    assert floor.bound == "launch"
    assert perfmodel.LAUNCH_US <= floor.us < 1.1 * perfmodel.LAUNCH_US


def test_empty_problems_have_a_floor():
    operation = kernels.operation("matmul")
    floor = perfmodel.floor(operation, operation.problem("0x8x8"), H200)
    assert floor.bound == "launch"
    assert floor.us == pytest.approx(perfmodel.LAUNCH_US, rel=1e-3)
    assert floor.flops == 0


# --- ranking -------------------------------------------------------------------------------------


def tiled_space():
    """Over 10^6 configurations of a tiled matmul with the parameters such kernels have."""
    return Space(
        parameters((
            ("BLOCK_M", (16, 32, 64, 96, 128, 192, 256), ""),
            ("THREAD_M", (1, 2, 4, 8, 16), ""),
            ("BLOCK_N", (16, 32, 64, 96, 128, 192, 256), ""),
            ("THREAD_N", (1, 2, 4, 8, 16), ""),
            ("BLOCK_K", (4, 8, 16, 32, 64), ""),
            ("BUFFERS", (1, 2, 3, 4), ""),
            ("VECTOR", (1, 2, 4), ""),
            ("PADDING", (0, 4), ""),
            ("GROUP", (1, 4, 16), ""),
            ("SPLIT_K", (1, 2, 4, 8), ""),
        )),
        (
            Constraint("threads are 32 to 1024", lambda c: (threads(c) >= 32)
                       & (threads(c) <= 1024) & (threads(c) % 32 == 0)),
            Constraint("tiles fit", lambda c: shared(c) <= H200.shared_bytes_per_block),
        ),
    )  # fmt: skip


def threads(c):
    return (c.BLOCK_M // c.THREAD_M) * (c.BLOCK_N // c.THREAD_N)


def shared(c):
    return c.BUFFERS * c.BLOCK_K * (c.BLOCK_M + c.BLOCK_N + 2 * c.PADDING) * 4


def tiled_work(c, p, d):
    blocks = ceil_div(p.M, c.BLOCK_M) * ceil_div(p.N, c.BLOCK_N) * c.SPLIT_K
    k = ceil_div(p.K, c.SPLIT_K)
    warps = threads(c) // 32
    wave = minimum(blocks, d.sm_count * 2)
    l2_bytes = blocks * k * (c.BLOCK_M + c.BLOCK_N) * 4
    rows = minimum(c.GROUP, wave)
    fresh = rows * c.BLOCK_M + ceil_div(wave, rows) * c.BLOCK_N
    conflicts = np.where(c.PADDING == 0, 2, 1)
    return Work(
        blocks=blocks,
        threads=threads(c),
        registers=c.THREAD_M * c.THREAD_N + c.THREAD_M + c.THREAD_N + 32,
        shared_bytes=shared(c),
        fma=c.BLOCK_M * c.BLOCK_N * k,
        instructions=warps * k * (c.THREAD_M * c.THREAD_N + (c.THREAD_M + c.THREAD_N) // 4 + 2),
        shared_wavefronts=warps * k * conflicts * (c.THREAD_M + c.THREAD_N) // 4,
        l1_wavefronts=k * (c.BLOCK_M + c.BLOCK_N) // (8 * c.VECTOR),
        l2_bytes=l2_bytes,
        dram_bytes=minimum(l2_bytes, ceil_div(blocks, wave) * fresh * k * 4),
        inflight_bytes=(c.BLOCK_M + c.BLOCK_N) * c.BLOCK_K * 4 // threads(c),
        steps=ceil_div(k, c.BLOCK_K),
        overlap=np.where(c.BUFFERS > 1, 1.0, 0.0),
        extra_launches=np.where(c.SPLIT_K > 1, 1, 0),
        extra_bytes=np.where(c.SPLIT_K > 1, c.SPLIT_K + 1, 0) * p.M * p.N * 4,
    )


@pytest.fixture(scope="module")
def million():
    table = tiled_space().enumerate()
    assert len(table) > 1_000_000
    return table


@pytest.fixture(scope="module")
def tiled():
    return dataclasses.replace(kernels.specs_of("matmul")[0], work=tiled_work)


def test_a_million_configs_are_ranked_in_two_seconds(million, tiled):
    problem = tiled.operation.problem("4096x4096x4096")
    # Processor time of all threads, so that what else the machine does has no part in it.
    started = time.process_time()
    times = perfmodel.rank(tiled, problem, H200, million)
    order = np.argsort(times)
    seconds = time.process_time() - started
    assert times.shape == (len(million),)
    assert seconds < 2.0
    assert times[order[0]] < times[order[-1]]


def test_ranking_predicts_row_by_row(million, tiled):
    problem = tiled.operation.problem("1000x1000x1000")
    times = perfmodel.rank(tiled, problem, H200, million)
    for row in np.random.default_rng(0).integers(0, len(million), 50).tolist():
        work = tiled.work(million[row], problem, H200)
        assert times[row] == predict_us(work, H200)


def test_the_best_ranked_tiles_are_sane(million, tiled):
    """What published fp32 kernels have: large thread tiles, several warps, no split at 4096."""
    problem = tiled.operation.problem("4096x4096x4096")
    times = perfmodel.rank(tiled, problem, H200, million)
    best = [million[row] for row in np.argsort(times)[:100].tolist()]
    assert all(c.THREAD_M * c.THREAD_N >= 32 and threads(c) >= 64 for c in best)
    assert np.median([c.SPLIT_K for c in best]) == 1
    floor = perfmodel.floor(tiled.operation, problem, H200)
    assert floor.us < times.min() < 2 * floor.us


def test_few_tiles_ask_for_split_k(million, tiled):
    problem = tiled.operation.problem("128x128x16384")
    times = perfmodel.rank(tiled, problem, H200, million)
    best = [million[row] for row in np.argsort(times)[:100].tolist()]
    assert np.mean([c.SPLIT_K > 1 for c in best]) > 0.9


@each_spec
def test_every_spec_is_ranked(spec):
    operation = spec.operation
    found = (taken(spec, H200, dtype, operation.layouts[0]) for dtype in operation.dtypes)
    problem = next(problem for problem in found if problem is not None)
    table = spec.space(problem, H200).enumerate()
    times = perfmodel.rank(spec, problem, H200, table)
    assert len(times) == len(table)
    assert np.all(times >= perfmodel.floor(spec.operation, problem, H200).us)
    assert np.isfinite(times).any()
    # Work counts the same for columns of configurations as for one of them.
    for row in np.random.default_rng(0).integers(0, len(table), 30).tolist():
        alone = predict_us(spec.work(table[row], problem, H200), H200)
        assert times[row] == pytest.approx(alone, rel=1e-9), table[row]


def test_an_empty_table_ranks_to_nothing(tiled):
    space = Space(tiled_space().parameters, (Constraint("never", lambda c: c.VECTOR < 0),))
    problem = tiled.operation.problem()
    assert perfmodel.rank(tiled, problem, H200, space.enumerate()).shape == (0,)


# --- evaluator -----------------------------------------------------------------------------------


@pytest.fixture
def naive():
    return kernels.specs_of("matmul", only="naive")[0]


def evaluate(spec, *kernels_):
    problem = spec.operation.problem()
    config = spec.default(problem, H200)
    candidate = Candidate(spec, config, kernels_ or None)
    return perfmodel.ModelEvaluator(H200).evaluate(candidate, problem)


def test_a_prediction_says_that_it_is_one(naive):
    outcome = evaluate(naive, compiled())
    assert outcome.kind == "predicted"
    assert outcome.ok
    assert outcome.measurement.policy == perfmodel.POLICY
    assert outcome.measurement.samples == 1
    assert outcome.measurement.details["bound"] in outcome.measurement.details["parts_us"]
    assert perfmodel.ModelEvaluator(H200).evidence == "predicted"
    assert perfmodel.ModelEvaluator(H200).needs_kernels


def test_compiled_registers_replace_the_estimate(naive):
    few, many = evaluate(naive, compiled(registers=32)), evaluate(naive, compiled(registers=200))
    assert few.measurement.details["blocks_per_sm"] == 8
    assert many.measurement.details["blocks_per_sm"] == 1
    assert few.median_us < many.median_us


def test_only_the_main_kernel_is_timed(naive):
    main = compiled(registers=32)
    assert evaluate(naive, main).median_us == evaluate(naive, main, compiled(200)).median_us


def test_without_kernels_the_formula_answers(naive):
    problem = naive.operation.problem()
    work = naive.work(naive.default(problem, H200), problem, H200)
    assert evaluate(naive).median_us == predict_us(work, H200)


def test_what_the_compiler_rejected_is_rejected(naive):
    outcome = evaluate(naive, compiled(), compiled(rejection="spills 800 bytes"))
    assert outcome.kind == "rejected"
    assert "spills 800 bytes" in outcome.reason
    assert outcome.measurement is None


def test_what_does_not_fit_is_not_launched(naive):
    outcome = evaluate(naive, compiled(shared_bytes=240_000))
    assert outcome.kind == "launch_failed"
    assert "shared memory" in outcome.reason


def test_evaluations_repeat_exactly(naive):
    assert evaluate(naive, compiled()) == evaluate(naive, compiled())


def test_the_order_of_parameters_does_not_matter(naive):
    problem = naive.operation.problem()
    config = naive.default(problem, H200)
    turned = Config(dict(reversed(list(config.items()))))
    judge = perfmodel.ModelEvaluator(H200)
    assert judge.evaluate(Candidate(naive, config), problem) == judge.evaluate(
        Candidate(naive, turned), problem
    )

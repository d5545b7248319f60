# SPDX-License-Identifier: Apache-2.0
"""Calibrations: kernels that measure, what is made of their times, floors, and the files."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import re
import statistics
from collections import Counter

import numpy as np
import pytest
from emulator import build
from fake_gpu import DEVICE, FakeMonitor
from hypothesis import given
from hypothesis import strategies as st
from in_process import InProcess, NamingCompiler, gpu_with

from tunegen import calibration, codegen, kernels, perfmodel, session
from tunegen.compiler import NvrtcCompiler
from tunegen.errors import CompileError, DatabaseError, DeviceError
from tunegen.kernels import calibrate as probes
from tunegen.kernels.calibrate import streaming
from tunegen.model import (
    ARCHS,
    STREAM_WRITES,
    Calibration,
    DeviceIdentity,
    Figure,
    FoundGpus,
    GpuInfo,
    StreamPoint,
    Telemetry,
)
from tunegen.runner import timing
from tunegen.runner.operands import _Layout as Layout
from tunegen.runner.protocol import (
    Block,
    Enter,
    Entered,
    Failed,
    Open,
    Opened,
    Prepare,
    Prepared,
    Timed,
)
from tunegen.runner.station import Station
from tunegen.session import calibrating, probing
from tunegen.session.calibrating import evaluate, lines
from tunegen.session.probing import measure

H200 = perfmodel.find_chip("H200")
EVERYTHING = 1 << 50

# --- the probes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_probes_fit_their_device(arch):
    device = perfmodel.default_chip(arch)
    found = list(probes.every(device, EVERYTHING))
    assert {p.name for p in found if p.kind == "stream"} == set(STREAM_WRITES)
    for probe in found:
        assert probe.contenders, probe.name
        assert len({c.name for c in probe.contenders}) >= min(len(probe.contenders), 2)
        if probe.kind == "stream":
            assert probe.sets >= 2
            assert probe.bytes >= probes.COLD_L2_MULTIPLE * device.l2_bytes
        names = {array.name for array in probe.arrays}
        for contender in probe.contenders:
            for launch in contender.plan.launches:
                assert launch.kernel == contender.definitions[0].name
                assert 0 < math.prod(launch.block) <= min(1024, device.threads_per_sm)
                pointers = {a.name for a in launch.arguments if a.type == "pointer"}
                assert pointers <= names
                factors = {a.name for a in launch.arguments if a.type in ("fp32", "fp64")}
                assert factors <= set(probe.scalars)


@pytest.mark.parametrize("name", STREAM_WRITES)
def test_streams_write_the_share_that_their_name_stands_for(name):
    for probe in probes.streams(H200, EVERYTHING):
        if probe.name == name:
            written = sum(a.bytes for a in probe.arrays if a.role == "out")
            # Sums of what was read are written too, a few bytes for each block.
            assert written / probe.amount == pytest.approx(STREAM_WRITES[name], abs=1e-3)


def test_large_operands_are_left_out():
    assert all(p.bytes <= 1 << 28 for p in probes.streams(H200, 1 << 28))
    assert not list(probes.streams(H200, 0))


def test_contenders_of_a_peak_do_the_same_work():
    for probe in probes.peaks(H200):
        work = set()
        for contender in probe.contenders:
            (launch,) = contender.plan.launches
            constants = contender.definitions[0].constants
            rounds = next(a.value for a in launch.arguments if a.name == "rounds")
            per_round = (
                launch.grid[0] * launch.block[0] * constants["CHAINS"] * constants["UNROLL"]
            )
            work.add(2 * per_round * rounds * (2 if "packed" in probe.name else 1))
        assert work == {probe.amount}


@pytest.mark.parametrize("name", ["fp32", "fp64", "shared_read", "l2_read"])
def test_what_the_chip_binds_takes_about_the_target_time(name):
    probe = next(p for p in probes.every(H200, 0) if p.name == name)
    per_us = {
        "fp32": 66.9e6, "fp64": 33.5e6, "l2_read": H200.l2_gbps * 1e3,
        "shared_read": 128 * 132 * 1980,
    }[name]  # fmt: skip
    assert probe.amount / per_us == pytest.approx(probes.TARGET_US, rel=0.05)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_cleanly(arch):
    """Those of the vector operations are compiled where their specs are tested."""
    device = perfmodel.default_chip(arch)
    sources = {}
    for probe in probes.every(device, EVERYTHING):
        for definition in (d for c in probe.contenders for d in c.definitions):
            if definition.template.startswith("calibrate/"):
                source = codegen.render_definition(definition, arch)
                sources[source.digest] = source
    assert {source.name for source in sources.values()} >= {
        f"calibrate_{name}" for name in ("read", "shared", "fma", "fma_packed", "empty")
    }
    for source in sources.values():
        kernel = NvrtcCompiler().compile(source, arch)
        assert (kernel.warnings, kernel.rejection) == ("", ""), source.text


@pytest.mark.nvrtc
def test_compilers_leave_the_work_in():
    """Loads of 16 bytes that nothing merges, and one multiply-add for each that is asked for."""
    for probe in probes.every(H200, EVERYTHING):
        (definition, *_) = probe.contenders[0].definitions
        if not definition.name.startswith("calibrate_"):
            continue
        source = codegen.render_definition(definition, "sm_90")
        ptx = NvrtcCompiler().compile(source, "sm_90").ptx.decode()
        constants = definition.constants
        counts = {
            "calibrate_read": ("ld.global.nc.L1::no_allocate.v4", constants.get("UNROLL", 0)),
            "calibrate_shared": ("ld.shared.v4", constants.get("UNROLL", 0)),
            "calibrate_fma": ("fma.rn.f", constants.get("UNROLL", 0) * constants.get("CHAINS", 0)),
            "calibrate_fma_packed": (
                "fma.rn.", constants.get("UNROLL", 0) * constants.get("CHAINS", 0),
            ),
            "calibrate_empty": ("ld.", 0),
        }  # fmt: skip
        pattern, wanted = counts[definition.name]
        assert ptx.count(pattern) == wanted, probe.name


# --- the kernels ---------------------------------------------------------------------------------

_TYPES = {
    "pointer": ctypes.c_void_p, "int32": ctypes.c_int32, "int64": ctypes.c_int64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


def run_on_host(contender, values, blocks=None):
    """Run a contender's launches, its arguments replaced by ``values`` where they are there."""
    kernel = build.build_definition(contender.definitions[0], "sm_90")
    for launch in contender.plan.launches:
        grid = (blocks or launch.grid[0], 1, 1)
        arguments = [
            _TYPES[a.type](
                values[a.name].ctypes.data if a.type == "pointer" else values.get(a.name, a.value)
            )
            for a in launch.arguments
        ]
        fault = kernel(
            build.Launch(build.Vec3(*grid), build.Vec3(*launch.block), 0, 1, 20), arguments
        )
        assert not fault.kind, fault.message


SMALL = dataclasses.replace(DEVICE, sm_count=2)


@pytest.mark.emulator
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("elements", [0, 4, 20_000, 65_536])
def test_reading_reads_everything(elements, passes):
    x = np.random.default_rng(0).integers(-4, 5, elements + 2).astype(np.float32)
    for rows in (streaming._READ_ROWS[0], (512, 4, 2), (64, 16, 0), (1024, 1, 1)):
        contender = streaming.reader(SMALL, max(elements, 1), *rows, passes=passes)
        sums = np.full(contender.plan.launches[0].grid[0], np.nan, np.float32)
        run_on_host(contender, {"x": x, "sums": sums, "n": elements})
        assert sums.sum() == passes * x[:elements].sum()


@pytest.mark.emulator
def test_shared_memory_is_read_as_often_as_it_is_counted():
    (contender,) = probes.shared_read(SMALL).contenders
    threads, unroll = 512, 4
    sums = np.zeros(2 * threads, np.float32)
    rounds = 5
    run_on_host(contender, {"sums": sums, "rounds": rounds}, blocks=2)
    # A thread reads its neighbours' vectors: 4 t + (0 + 1 + 2 + 3) with t of another thread.
    thread = np.arange(threads)
    wanted = sum(unroll * (4 * ((thread ^ r) % 8) + 6) for r in range(rounds))
    np.testing.assert_array_equal(sums.reshape(2, threads), [wanted, wanted])


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_chains_are_multiplied_and_added(dtype):
    probe = next(p for p in probes.peaks(SMALL) if p.name == dtype)
    real = np.float32 if dtype == "fp32" else np.float64
    for contender in probe.contenders:
        constants = contender.definitions[0].constants
        sums = np.zeros(constants["THREADS"], real)
        run_on_host(contender, {"sums": sums, "rounds": 2, "a": -0.75, "b": 0.5}, blocks=1)
        chains = np.arange(constants["THREADS"])[:, None] + np.arange(constants["CHAINS"])
        chains = chains.astype(np.float64)
        for _ in range(2 * constants["UNROLL"]):
            chains = chains * -0.75 + 0.5
        np.testing.assert_allclose(sums, chains.sum(axis=1), rtol=1e-5)


@pytest.mark.emulator
def test_the_empty_kernel_does_nothing():
    for contender in probes.launches().contenders:
        run_on_host(contender, {})


# --- measuring -----------------------------------------------------------------------------------

# What every launch takes, an empty one too.
LAUNCH_US = 2.0
GBPS = {"read": 90.0, "add": 80.0, "copy": 75.0, "write": 95.0}


def threads_of(source):
    return int(re.search(r"\bTHREADS = (\d+)", source.text)[1])


def by_threads(source):
    """Contenders differ in their threads, as far as the fake GPU can tell."""
    if not source.name.endswith("_vector"):
        return source.name
    return f"{source.name} {threads_of(source)}"


def fake_gpu(**options):
    """A GPU on which 512 threads stream at the rates above, and fewer at half of them."""

    def stream(name, per_element, slower):
        rate = GBPS[name] * 1e3 / slower
        return lambda values: LAUNCH_US + per_element * 4 * values["n"] / rate

    calls = {}
    for threads in (64, 128, 256, 512, 1024):
        slower = 1.0 if threads == 512 else 2.0
        calls[f"add_vector {threads}"] = stream("add", 3, slower)
        calls[f"copy_vector {threads}"] = stream("copy", 2, slower)
        calls[f"fill_vector {threads}"] = stream("write", 1, slower)

    def read(values):
        rate = GBPS["read"] if values["passes"] == 1 else 400.0
        return LAUNCH_US + values["passes"] * 4 * values["n"] / (rate * 1e3)

    calls["calibrate_read"] = read
    calls["calibrate_shared"] = lambda values: LAUNCH_US + 0.5 * values["rounds"]
    calls["calibrate_fma"] = lambda values: LAUNCH_US + 1.0 * values["rounds"]
    calls["calibrate_fma_packed"] = lambda values: 0.5 * values["rounds"]
    calls["calibrate_empty"] = LAUNCH_US
    return gpu_with(calls, **options)


@pytest.fixture
def quick(monkeypatch):
    """Small streams, short blocks, and no rest between them."""
    monkeypatch.setattr(streaming, "STREAM_ELEMENTS", (2**14, 2**16, 2**18))
    monkeypatch.setattr(probing, "_BLOCK_SECONDS", 1e-3)
    monkeypatch.setattr(timing, "_rest", lambda us: None)


def run(worker, compiler_=None, **options):
    card = Station(lambda: worker)
    opened = card.open()
    names = []
    measured = measure(
        card, DEVICE, opened.free_bytes, compiler_ or NamingCompiler(by_threads),
        lambda name, number, total: names.append((name, number, total)), **options,
    )  # fmt: skip
    return measured, names


def test_figures_are_what_the_kernels_took(quick):
    measured, names = run(InProcess(fake_gpu()))
    assert not measured.failures
    assert [number for _, number, _ in names] == list(range(len(names)))
    assert {total for _, _, total in names} == {len(names)}
    found = evaluate(measured, DEVICE, "580.65.06")
    assert found.device == DeviceIdentity.of(DEVICE)
    assert found.launch_us.median == pytest.approx(LAUNCH_US, rel=1e-2)
    assert found.dependent_launch_us.median == pytest.approx(LAUNCH_US, rel=1e-2)
    for name, points in found.streams.items():
        assert [p.bytes for p in points] == sorted(p.bytes for p in points)
        assert len(points) == 3
        for point in points:
            wanted = LAUNCH_US + point.bytes / (GBPS[name] * 1e3)
            assert point.us.median == pytest.approx(wanted, rel=1e-3)  # a clock has ticks
            assert point.us.repeats == 2 * probing.REPEATS  # in two places
            assert point.us.tried > len(streaming._READ_ROWS)
            assert name == "read" or "THREADS=512" in point.us.config
            assert point.gbps.median == pytest.approx(point.bytes / wanted / 1e3, rel=1e-3)
    assert found.l2_read_gbps.median == pytest.approx(400.0, rel=0.01)
    assert set(found.peak_tflops) == {"fp32", "fp64", "fp16_packed", "bf16_packed"}
    fp32 = next(p for p in probes.peaks(DEVICE) if p.name == "fp32")
    rounds = fp32.contenders[0].plan.launches[0].arguments[1].value
    wanted = fp32.amount / rounds / 1e6
    assert found.peak_tflops["fp32"].median == pytest.approx(wanted, rel=1e-3)
    assert found.sm_clock_mhz == (1980, 1980)
    assert found.power_w == 500.0
    assert (found.driver, found.nvrtc, found.policy) == ("580.65.06", "13.0", "burst")


def test_long_streams_are_timed_back_to_back_as_well(quick, monkeypatch):
    limit_us = 1.5 * LAUNCH_US + 4 * 2**16 / (GBPS["read"] * 1e3)  # of some streams, not of all
    monkeypatch.setattr(probing, "SUSTAINED_FROM_US", limit_us)
    monkeypatch.setattr(probing, "_SUSTAINED_BLOCK_SECONDS", 0.01)
    measured, _ = run(InProcess(fake_gpu()))
    assert not measured.failures
    for outcome in measured.outcomes:
        bursts = {
            name: own for name, own in outcome.times.items() if not name.endswith(" sustained")
        }
        fastest = min(statistics.median(own) for own in bursts.values())
        long = outcome.probe.kind == "stream" and fastest > limit_us
        back_to_back = [f"{name} sustained" for name in bursts] if long else []
        assert list(outcome.times) == [*bursts, *back_to_back]
    streams = [o.times for o in measured.outcomes if o.probe.kind == "stream"]
    assert 0 < sum(any("sustained" in name for name in times) for times in streams) < len(streams)


def test_figures_stand_beside_the_datasheet(quick):
    measured, _ = run(InProcess(fake_gpu()))
    found = evaluate(measured, DEVICE, "")
    shown = {line.name: line for line in lines(found, DEVICE)}
    copy = shown["device memory, copy"]
    assert copy.of_datasheet == pytest.approx(copy.figure.median / DEVICE.memory_gbps)
    assert 0.5 < copy.of_datasheet < 0.76
    peak = 2 * 128 * 4 * 1000 / 1e6
    fp32 = shown["multiply-add, fp32"]
    assert fp32.of_datasheet == pytest.approx(fp32.figure.median / peak)
    assert shown["L2, read"].of_datasheet is None, "the fake states no rate of L2"
    assert shown["launch"].unit == "us"


def test_slow_contenders_are_timed_once(quick):
    worker = InProcess(fake_gpu())
    run(worker)
    blocks = [r.name for r in worker.requests if isinstance(r, Block) and "STORE_POLICY" in r.name]
    counts = Counter(blocks)
    most = 3 * 2  # sizes, and add and copy, whose contenders have the same names
    slow = max(count for name, count in counts.items() if "THREADS=512" not in name)
    fast = max(count for name, count in counts.items() if "THREADS=512" in name)
    assert slow <= most
    assert fast > most * probing.REPEATS


def test_a_contender_that_fails_is_left_out(quick):
    def intercept(request):
        if isinstance(request, Enter) and "THREADS=512 VECTOR_BYTES=16 UNROLL=1" in request.name:
            return Failed("it is refused", False, "kernel")
        return None

    measured, _ = run(InProcess(fake_gpu(), intercept=intercept))
    assert not measured.failures
    found = evaluate(measured, DEVICE, "")
    # Of the rows that are left none is fast: a search finds others with as many threads.
    config = found.largest("copy").us.config
    assert "THREADS=512" in config
    assert "UNROLL=1" not in config


def test_a_probe_that_gives_nothing_is_told_with_its_reason(quick):
    def intercept(request):
        if isinstance(request, Enter) and "CHAINS" in request.name and "FORMAT" in request.name:
            return Failed("no such instruction", False, "kernel")
        return None

    measured, _ = run(InProcess(fake_gpu(), intercept=intercept))
    assert measured.failures == ["fp16_packed: no such instruction",
                                 "bf16_packed: no such instruction"]  # fmt: skip
    assert set(evaluate(measured, DEVICE, "").peak_tflops) == {"fp32", "fp64"}


def test_nothing_is_known_without_the_cost_of_a_launch(quick):
    def intercept(request):
        refused = isinstance(request, Enter) and request.name == "chain"
        return Failed("refused", False, "kernel") if refused else None

    measured, _ = run(InProcess(fake_gpu(), intercept=intercept))
    with pytest.raises(DeviceError, match="launches could not be timed"):
        evaluate(measured, DEVICE, "")


def test_launches_that_cost_nothing_are_no_measurement(quick):
    def intercept(request):
        if isinstance(request, Block) and request.name in ("once", "chain"):
            state = FakeMonitor(fake_gpu()).read()
            return Timed((1.0,), 1, 1e-6, state, state)
        return None

    measured, _ = run(InProcess(fake_gpu(), intercept=intercept))
    with pytest.raises(DeviceError, match="16 launches took no longer than one"):
        evaluate(measured, DEVICE, "")


# --- searching, and measuring again elsewhere ----------------------------------------------------

STREAM_OF = {
    frozenset(("x", "sums")): "read", frozenset("xyz"): "add", frozenset("xy"): "copy",
    frozenset("y"): "write",
}  # fmt: skip

BEST_GBPS = 4500.0


class Scripted:
    """A worker on an H200 that runs nothing: a call of a stream takes as long as its bytes at the
    best rate, times ``slower(name of the contender, place)``, where the place is 0 or 1: the first
    or the second one in memory. ``prepared`` holds what was asked for, ``blocks`` the policies."""

    def __init__(self, slower):
        self.slower = slower
        self.prepared, self.blocks = [], []
        self.worker = InProcess(fake_gpu(), intercept=self.answer)
        self.compiler = NamingCompiler()

    def answer(self, request):
        match request:
            case Open():
                return Opened(H200, "580.65.06", 139 << 30, 1)
            case Prepare():
                self.prepared.append(request)
                return Prepared(0, 0.0)
            case Enter():
                return Entered()
            case Block():
                self.blocks.append(request.policy)
                return Timed((self.us(request.name),) * 20, 20, 1.0, Telemetry(), Telemetry())
        return None

    def us(self, name):
        request = self.prepared[-1]
        stream = STREAM_OF.get(frozenset(array.name for array in request.arrays))
        if stream is None or request.sets == 1:
            return 300.0 if "=" in name else 10.0 if name == "chain" else 2.0
        moved = sum(array.bytes for array in request.arrays if array.name != "sums")
        return moved / (BEST_GBPS * 1e3) * self.slower(name, self.place)

    @property
    def place(self):
        request = self.prepared[-1]
        alike = [r for r in self.prepared if set(r.arrays) == set(request.arrays) and r.sets > 1]
        return len(alike) - 1

    def measure(self):
        card = Station(lambda: self.worker)
        return measure(card, H200, card.open().free_bytes, self.compiler)


def settings_of(name):
    """The parameters in a contender's name; a persistent grid of one block per SM has 132."""
    found = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", name)}
    if "blocks" in found:
        found["BLOCKS_PER_SM"] = int(found.pop("blocks") == H200.sm_count)
    return found


# In two or three parameters away from the nearest row, and valid at every size.
TARGET = {
    "THREADS": 512, "VECTOR_BYTES": 16, "UNROLL": 1, "BLOCKS_PER_SM": 1, "STORE_POLICY": 2,
    "LOAD_POLICY": 1, "L2_PREFETCH_BYTES": 256,
}  # fmt: skip


def away(name, target):
    return sum(target[key] != value for key, value in settings_of(name).items())


def points_of(calibration_):
    return [(name, point) for name, points in calibration_.streams.items() for point in points]


def rows_of(stream):
    """The fixed contenders at the largest size."""
    return next(p for p in probes.streams(H200, EVERYTHING) if p.name == stream)


@pytest.mark.parametrize("stream", STREAM_WRITES)
def test_neighbours_differ_in_one_parameter_and_are_valid(stream):
    probe = rows_of(stream)
    assert len(probe.contenders) <= 14
    for row in probe.contenders:
        found = probe.choices.around(row.config)
        assert len({c.config for c in found}) == len(found) > 5
        for contender in found:
            assert not probe.choices.space.violated(contender.config)
            assert sum(contender.config[key] != row.config[key] for key in row.config) == 1
        changed = {key for c in found for key in row.config if c.config[key] != row.config[key]}
        assert changed == set(row.config)


def test_the_best_is_found_where_no_row_is_it():
    scripted = Scripted(lambda name, place: 1 + 0.004 * away(name, TARGET))
    found = evaluate(scripted.measure(), H200, "")
    assert len(points_of(found)) == 20
    for stream, point in points_of(found):
        rows = rows_of(stream).contenders
        assert min(away(row.name, TARGET) for row in rows) >= 2
        assert away(point.us.config.removesuffix(" sustained"), TARGET) == 0
        assert point.gbps.median == pytest.approx(BEST_GBPS, rel=1e-3)
        assert point.us.tried > len(rows)


def test_a_search_ends_where_nothing_is_better_by_more_than_noise():
    def slower(name, place):
        return 1 + 0.0002 * away(name, TARGET)

    scripted = Scripted(slower)
    for outcome in scripted.measure().outcomes:
        probe = outcome.probe
        if probe.kind == "stream" and probe.amount == rows_of(probe.name).amount:
            best = min(probe.contenders, key=lambda row: away(row.name, TARGET))
            tried = {c.name for c in (*probe.contenders, *probe.choices.around(best.config))}
            assert outcome.tried == len(tried)


def test_small_sizes_begin_with_what_large_ones_found():
    """A target too far away for the one round of a small size."""
    target = {**TARGET, "VECTOR_BYTES": 4, "LOAD_POLICY": 3}
    found = evaluate(Scripted(lambda n, place: 1 + 0.004 * away(n, target)).measure(), H200, "")
    rows = rows_of("copy").contenders
    assert min(away(row.name, target) for row in rows) > 3
    for point in found.streams["copy"][:-1]:
        assert away(point.us.config.removesuffix(" sustained"), target) == 0


@pytest.mark.parametrize("elsewhere", [0.996, 1.004])
def test_the_spread_covers_another_place_in_memory(elsewhere):
    def slower(name, place):
        return (1 + 0.0015 * away(name, TARGET)) * (elsewhere if place else 1.0)

    scripted = Scripted(slower)
    measured = scripted.measure()
    assert not measured.failures
    for stream, point in points_of(evaluate(measured, H200, "")):
        # The winner of the first place, although others were faster there than it is now.
        assert away(point.us.config.removesuffix(" sustained"), TARGET) == 0, stream
        us = point.bytes / (BEST_GBPS * 1e3)
        assert (point.us.low, point.us.high) == pytest.approx(
            (us * min(elsewhere, 1.0), us * max(elsewhere, 1.0)), rel=1e-9
        )
        assert point.us.median == pytest.approx(us * (1 + elsewhere) / 2, rel=1e-9)
        assert point.us.spread == pytest.approx(0.002, rel=0.01)


def test_a_winner_that_fails_elsewhere_keeps_its_first_figure():
    class Failing(Scripted):
        def answer(self, request):
            if isinstance(request, Block) and self.place == 1:
                return Failed("it is too far", False, "kernel")
            return super().answer(request)

    scripted = Failing(lambda name, place: 1.0)
    measured = scripted.measure()
    assert len(measured.failures) == 20
    assert "copy 2147 MB, elsewhere: it is too far" in measured.failures
    for _, point in points_of(evaluate(measured, H200, "")):
        assert point.us.median == pytest.approx(point.bytes / (BEST_GBPS * 1e3))
        assert point.us.repeats < 2 * probing.REPEATS or "sustained" in point.us.config


def test_a_neighbour_that_does_not_compile_falls_out():
    class Refusing(NamingCompiler):
        def compile(self, source, target):
            if re.search(r"\bSTORE_POLICY = 2\b", source.text):
                raise CompileError("the assembler refuses it")
            return super().compile(source, target)

    scripted = Scripted(lambda name, place: 1 + 0.004 * away(name, TARGET))
    scripted.compiler = Refusing()
    measured = scripted.measure()
    assert not measured.failures
    for stream, point in points_of(evaluate(measured, H200, "")):
        wanted = 0 if stream == "read" else 1
        assert away(point.us.config.removesuffix(" sustained"), TARGET) == wanted


def test_operands_lie_elsewhere_the_second_time():
    scripted = Scripted(lambda name, place: 1.0)
    scripted.measure()
    streams = [r for r in scripted.prepared if r.sets > 1]
    first, second = streams[: len(streams) // 2], streams[len(streams) // 2 :]
    assert len(second) == 20
    for one, other in zip(first, second, strict=True):
        here, there = (Layout.of(request, 0) for request in (one, other))
        assert set(one.arrays) == set(other.arrays)
        assert here.end != there.end
        assert other.sets == one.sets + 1
        here_at, there_at = (
            np.array([layout.sets[0][array.name].address for array in one.arrays])
            for layout in (here, there)
        )
        moved = there_at - here_at
        assert np.all(moved > 0)
        assert len(set(moved)) == len(one.arrays), "distances between operands differ too"
        assert not np.any(moved % 4096), "aligned alike"
        # The largest that the free memory is shared out to must fit, originals and all.
        assert there.end < 139 << 30


@pytest.mark.parametrize("stream", STREAM_WRITES)
def test_the_second_place_fits_where_the_first_just_did(stream):
    free = 24 << 30
    probe = rows_of(stream)
    most = int(free * probing._MEMORY_SHARE)
    scale = most / probe.bytes  # as if the operands of two sets took all they may
    there = probe.elsewhere()
    request = Prepare(there.arrays, {}, 0, there.sets, (), offsets=there.offsets)
    assert Layout.of(request, 0).end * scale < 0.9 * free


# On an H200: a block and what comes with it, a sustained one, a kernel on one of 16 cores, and
# operands for each 10^9 bytes and at least.
BLOCK_S, SUSTAINED_S, COMPILE_S, PREPARE_S, LEAST_PREPARE_S = 0.03, 0.35, 0.3 / 16, 0.15, 0.05


def test_a_calibration_takes_less_than_two_minutes():
    """Of a landscape in which every search goes as far as it may, and all finalists are close."""
    target = {**TARGET, "THREADS": 1024, "VECTOR_BYTES": 4, "UNROLL": 8, "LOAD_POLICY": 3}
    scripted = Scripted(lambda name, place: 1 + 0.004 * away(name, target))
    scripted.measure()
    counts = Counter(scripted.blocks)
    bursts, sustained = counts["burst"] + counts["warm"], counts["sustained"]
    compiled_ = len(scripted.compiler.sources)
    prepared = [Layout.of(request, 0).end / 1e9 for request in scripted.prepared]
    seconds = (
        bursts * BLOCK_S
        + sustained * SUSTAINED_S
        + compiled_ * COMPILE_S
        + sum(max(LEAST_PREPARE_S, PREPARE_S * size) for size in prepared)
    )
    print(
        f"{bursts} blocks, {sustained} sustained, {compiled_} kernels, {len(prepared)} times "
        f"operands of {sum(prepared):.1f} GB in all: {seconds:.0f} s"
    )
    assert seconds < 110
    assert len(prepared) == 2 * 20 + 7


GPU = GpuInfo(0, "fake", "GPU-fake", "sm_90", 256 << 20, 256 << 20)


@pytest.fixture
def card(monkeypatch, tmp_path, quick):
    """A machine with the fake GPU: what is asked of it, and by whom it is used."""
    workers = []

    def station(gpu):
        def start():
            workers.append(InProcess(fake_gpu(), monitor=machine.monitor))
            return workers[-1]

        return Station(start)

    class Machine:
        monitor = FakeMonitor
        found = FoundGpus((GPU,), driver="580.65.06", driver_cuda="13.0")

    machine = Machine()
    monkeypatch.setattr(calibrating, "station", station)
    monkeypatch.setattr(
        calibrating.compiler, "NvrtcCompiler", lambda c: NamingCompiler(by_threads)
    )
    monkeypatch.setattr("tunegen.session.devices.find_gpus", lambda: machine.found)
    monkeypatch.setattr("tunegen.session.gpu.compiler.nvrtc_version", lambda: "13.0")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    machine.workers = workers
    return machine


def test_what_was_measured_is_found_again(card):
    result = session.calibrate()
    assert calibration.find(DEVICE) == result.calibration
    assert result.path.parent == calibration.default_folder()
    assert not card.workers[-1].alive
    (listed,) = session.list_gpus().gpus
    assert listed.calibration == result.calibration


def test_runs_under_one_driver_are_joined(card):
    once = session.calibrate().calibration
    twice = session.calibrate().calibration
    assert (once.runs, twice.runs) == (1, 2)
    copy, before = twice.largest("copy"), once.largest("copy")
    assert copy.us.repeats > before.us.repeats
    assert copy.us.low <= before.us.low <= before.us.high <= copy.us.high
    assert session.calibrate(fresh=True).calibration.runs == 1


def test_a_card_that_others_use_is_not_calibrated(card):
    card.found = dataclasses.replace(
        card.found, devices=(dataclasses.replace(GPU, other_processes=2),)
    )
    with pytest.raises(DeviceError, match="2 other processes compute on GPU 0"):
        session.calibrate()
    assert session.calibrate(shared=True).calibration.device.name == "fake"


def test_others_who_come_meanwhile_spoil_it(card):
    class Busy(FakeMonitor):
        def read(self):
            return dataclasses.replace(super().read(), other_pids=(4711,))

    card.monitor = Busy
    with pytest.raises(DeviceError, match="another process computed on GPU 0"):
        session.calibrate()
    assert calibration.find(DEVICE) is None
    session.calibrate(shared=True)
    assert calibration.find(DEVICE) is not None


def test_no_gpu_says_what_is_there_instead(card):
    card.found = FoundGpus(reason="no NVIDIA driver", hint="install one")
    with pytest.raises(DeviceError, match=r"no NVIDIA driver \(install one\)"):
        session.calibrate()
    assert session.list_gpus().gpus == ()


def test_a_device_that_is_not_there_names_those_that_are(card):
    with pytest.raises(DeviceError, match=r"no GPU 3, there is 0 \(fake\)"):
        session.calibrate(device=3)


# --- floors --------------------------------------------------------------------------------------


def figure(value, spread=0.01):
    return Figure(value, value * (1 - spread), value * (1 + spread), 7, "THREADS=512", 6)


def calibration_of(device, launch_us=1.5, gbps=None, sizes=(2**22, 2**25, 2**30), **changes):
    rates = {"read": 4600.0, "add": 4380.0, "copy": 4200.0, "write": 4660.0} | (gbps or {})
    streams = {
        name: tuple(StreamPoint(size, figure(launch_us + size / (rate * 1e3))) for size in sizes)
        for name, rate in rates.items()
    }
    fields = {
        "arch": device.arch, "device": DeviceIdentity.of(device), "streams": streams,
        "l2_read_gbps": figure(9000.0), "shared_read_gbps": figure(33000.0),
        "peak_tflops": {"fp32": figure(62.0, 0.02), "fp64": figure(31.0)},
        "launch_us": figure(launch_us), "dependent_launch_us": figure(1.2), "policy": "burst",
        "driver": "580.65.06", "nvrtc": "13.0", "tunegen": "0", "created": "2026-01-01T00:00:00",
    }  # fmt: skip
    return Calibration(**{**fields, **changes})


CALIBRATED = calibration_of(H200)

# A floor is what the fastest repeat took: a hundredth less than the median, of every figure here.
FASTEST = 0.99


def floor_of(name, sizes, calibration_=CALIBRATED, **options):
    operation = kernels.operation(name)
    return perfmodel.floor(operation, operation.problem(sizes, **options), H200, calibration_)


@pytest.mark.parametrize(
    ("name", "bytes_per_element", "gbps"),
    [("copy", 8, 4200), ("add", 12, 4380), ("fill", 4, 4660)],
)
@pytest.mark.parametrize("elements", [2**19, 2**20, 3_000_001, 2**28, 2**31])
def test_the_floor_of_a_stream_is_what_that_stream_took(name, bytes_per_element, gbps, elements):
    found = floor_of(name, (elements,))
    wanted = FASTEST * (1.5 + elements * bytes_per_element / (gbps * 1e3))
    assert found.us == pytest.approx(wanted, rel=1e-6)
    assert found.bound == ("memory" if wanted > 3 else "launch")
    assert found.ceilings == "calibration"
    assert found.spread == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["copy", "matmul"])
def test_no_repeat_of_the_calibration_itself_beats_its_floor(name):
    sizes = (2**26,) if name == "copy" else "4096x4096x4096"
    fastest = floor_of(name, sizes)
    wide = {
        stream: tuple(dataclasses.replace(p, us=dataclasses.replace(p.us, low=0.9 * p.us.median))
                      for p in points)
        for stream, points in CALIBRATED.streams.items()
    }  # fmt: skip
    peak = dataclasses.replace(CALIBRATED.peak_tflops["fp32"], high=70.0)
    luckier = dataclasses.replace(
        CALIBRATED, streams=wide, peak_tflops={**CALIBRATED.peak_tflops, "fp32": peak}
    )
    assert floor_of(name, sizes, luckier).us < 0.95 * fastest.us


def test_in_place_counts_as_read_and_written():
    assert floor_of("axpy", "2^28").us == pytest.approx(floor_of("add", "2^28").us)


def test_a_mix_between_two_streams_lies_between_them():
    operation = kernels.operation("matmul")
    problem = operation.problem("1024x65536x16")  # mostly writing
    found = perfmodel.floor(operation, problem, H200, CALIBRATED)
    traffic = operation.bytes(problem)
    slow, fast = (FASTEST * (1.5 + traffic / (gbps * 1e3)) for gbps in (4200, 4660))
    assert found.bound == "memory"
    assert fast < found.us < slow


def test_small_sizes_do_not_reach_the_ceiling_of_large_ones():
    late = calibration_of(H200)
    points = late.streams["copy"]
    slow = dataclasses.replace(points[0], us=figure(4.0))  # 4 MB in 4 us are 1.05 TB/s
    late = dataclasses.replace(late, streams={**late.streams, "copy": (slow, *points[1:])})
    assert floor_of("copy", (2**19,), late).us == pytest.approx(FASTEST * 4.0)
    assert FASTEST * 1.5 < floor_of("copy", (2**18,), late).us < FASTEST * 4.0
    assert floor_of("copy", (2**26,), late).us == floor_of("copy", (2**26,)).us


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(["copy", "add", "fill"]))
def test_more_elements_have_no_lower_floor(elements, more, name):
    assert floor_of(name, (elements + more,)).us >= floor_of(name, (elements,)).us * (1 - 1e-12)


def test_arithmetic_runs_at_the_measured_peak():
    found = floor_of("matmul", "4096x4096x4096")
    assert found.bound == "compute"
    assert found.us == pytest.approx(2 * 4096**3 / (1.02 * 62e6) + FASTEST * 1.5)
    assert found.spread == pytest.approx(0.02)


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_tensor_cores_keep_the_datasheets_rate(dtype):
    """The peak that was measured is none of theirs, and vendors' libraries use them."""
    datasheet = floor_of("matmul", "4096x4096x4096", None, dtype=dtype)
    found = floor_of("matmul", "4096x4096x4096", dtype=dtype)
    assert found.us == pytest.approx(datasheet.us - perfmodel.LAUNCH_US + FASTEST * 1.5)
    assert found.spread == 0.0


def test_what_was_not_measured_is_the_datasheets():
    bare = dataclasses.replace(CALIBRATED, streams={}, peak_tflops={})
    for name, sizes in (("copy", "2^28"), ("matmul", "4096x4096x4096")):
        datasheet = floor_of(name, sizes, None)
        assert datasheet.ceilings == "datasheet"
        wanted = datasheet.us - perfmodel.LAUNCH_US + FASTEST * 1.5
        assert floor_of(name, sizes, bare).us == pytest.approx(wanted)


def test_empty_problems_cost_a_launch():
    found = floor_of("copy", (0,))
    assert (found.us, found.bound) == (pytest.approx(FASTEST * 1.5), "launch")


# Public measurements on an H200 and on H100 that a datasheet's floor must not contradict: bytes
# read and written, and GB/s as a share of the datasheet's rate.
@pytest.mark.parametrize(
    ("name", "sizes", "share"),
    [("copy", "2^30", 0.904), ("add", "2^28", 4350 / 4800), ("fill", "2^30", 4690 / 4800)],
)
def test_no_published_measurement_beats_the_datasheets_floor(name, sizes, share):
    found = floor_of(name, sizes, None)
    assert found.us < found.bytes / (share * H200.memory_gbps * 1e3)


# --- predictions ---------------------------------------------------------------------------------


def test_predictions_use_measured_rates():
    slower = calibration_of(H200, gbps={"copy": 2100.0}, peak_tflops={"fp32": figure(33.45)})
    device = perfmodel.calibrated(H200, slower)
    assert device.clock_mhz == pytest.approx(H200.clock_mhz / 2, rel=0.01)
    assert device.l2_gbps == 9000.0
    (copy,) = kernels.specs_of("copy")
    (matmul,) = kernels.specs_of("matmul", only="simt")
    for spec, sizes, low, high in (
        (copy, "2^28", 1.9, 2.2),
        (matmul, "4096^1x4096x4096", 1.8, 2.1),
    ):
        problem = spec.operation.problem(sizes)
        work = spec.work(spec.default(problem, H200), problem, H200)
        ratio = perfmodel.predict_us(work, device) / perfmodel.predict_us(work, H200)
        assert low < ratio < high
    assert perfmodel.calibrated(H200, None) is H200


def test_predictions_say_that_they_are_calibrated():
    plain, measured = perfmodel.ModelEvaluator(H200), perfmodel.ModelEvaluator(H200, CALIBRATED)
    assert plain.policy == perfmodel.POLICY != measured.policy


# --- files ---------------------------------------------------------------------------------------

VALUES = st.floats(1e-6, 1e9)
SIZES = ((2**22, 2**25, 2**30), (2**22, 2**30), (2**25, 2**31))
FIGURES = st.builds(
    lambda numbers, repeats, config: Figure(
        sorted(numbers)[1], min(numbers), max(numbers), repeats, config, 3
    ),
    st.lists(VALUES, min_size=3, max_size=3), st.integers(1, 9), st.text(max_size=20),
)  # fmt: skip


@given(FIGURES)
def test_a_rate_turns_a_times_spread_round(time):
    rate = time.rate(1000.0)
    assert rate.low <= rate.median <= rate.high
    assert rate.rate(1000.0).median == pytest.approx(time.median)
    reach = time.median * time.spread
    assert max(time.median - time.low, time.high - time.median) == pytest.approx(reach)


@given(us=FIGURES, l2=st.none() | FIGURES, clocks=st.none() | st.just((345, 1980)))
def test_what_is_saved_is_found(tmp_path_factory, us, l2, clocks):
    folder = tmp_path_factory.mktemp("calibration")
    kept = calibration_of(H200, l2_read_gbps=l2, sm_clock_mhz=clocks, launch_us=us.median)
    calibration.save(kept, folder)
    assert calibration.find(H200, folder) == kept
    assert calibration.stored(folder) == [kept]


def test_a_later_one_takes_the_place_of_an_earlier_one(tmp_path):
    first, second = (calibration_of(H200, launch_us=us) for us in (1.0, 2.0))
    assert calibration.save(first, tmp_path) == calibration.save(second, tmp_path)
    assert calibration.find(H200, tmp_path) == second
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@given(st.data())
def test_joined_runs_are_the_fastest_with_the_spread_of_all(data):
    """Floors of the joined are no higher than of either, and both are within its spread."""
    rates = st.fixed_dictionaries(dict.fromkeys(("read", "add", "copy", "write"),
                                                st.floats(3000, 4700)))  # fmt: skip
    runs = [
        calibration_of(H200, gbps=data.draw(rates), sizes=data.draw(st.sampled_from(SIZES)))
        for _ in range(2)
    ]
    joined = runs[0].joined(runs[1])
    assert joined.runs == 2
    for name, points in joined.streams.items():
        known = {}
        for run in runs:
            for point in run.streams[name]:
                known.setdefault(point.bytes, []).append(point.us)
        assert [point.bytes for point in points] == sorted(known)
        for point in points:
            own = known[point.bytes]
            assert point.us.median == min(figure.median for figure in own)
            assert point.us.low == min(figure.low for figure in own)
            assert point.us.high == max(figure.high for figure in own)
    assert joined.peak_tflops["fp32"] == dataclasses.replace(
        runs[0].peak_tflops["fp32"], repeats=14
    )


def test_what_one_run_lacks_is_the_others():
    whole = calibration_of(H200)
    bare = dataclasses.replace(whole, l2_read_gbps=None, peak_tflops={}, streams={})
    for joined in (whole.joined(bare), bare.joined(whole)):
        assert joined.l2_read_gbps == whole.l2_read_gbps
        assert joined.peak_tflops == whole.peak_tflops
        assert joined.streams == whole.streams


@pytest.mark.parametrize(
    "change",
    [{"name": "NVIDIA H20"}, {"sm_count": 131}, {"memory_clock_mhz": 2619}, {"l2_bytes": 50 << 20},
     {"shared_bytes_per_block": 99 << 10}],
)  # fmt: skip
def test_another_device_class_is_not_calibrated_by_it(tmp_path, change):
    calibration.save(CALIBRATED, tmp_path)
    assert calibration.find(dataclasses.replace(H200, **change), tmp_path) is None
    # Nor where a file's name says so.
    other = dataclasses.replace(H200, **change)
    path = calibration.path_of(H200.arch, DeviceIdentity.of(other), tmp_path)
    os.replace(calibration.path_of(H200.arch, CALIBRATED.device, tmp_path), path)
    assert calibration.find(other, tmp_path) is None


def test_nothing_is_found_in_a_folder_that_is_not_there(tmp_path):
    assert calibration.find(H200, tmp_path / "none") is None
    assert calibration.stored(tmp_path / "none") == []


def edited(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-12]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[]"),
        lambda path: edited(path, lambda d: d.update(schema=2)),
        lambda path: edited(path, lambda d: d.pop("streams")),
        lambda path: edited(path, lambda d: d.update(surprise=1)),
        lambda path: edited(path, lambda d: d["launch_us"].update(median=-1.0)),
        lambda path: edited(path, lambda d: d["launch_us"].update(low=9.0)),
        lambda path: edited(path, lambda d: d["streams"]["copy"].reverse()),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage):
    path = calibration.save(CALIBRATED, tmp_path)
    damage(path)
    with pytest.raises(DatabaseError, match=re.escape(str(path))) as caught:
        calibration.find(H200, tmp_path)
    assert "tunegen calibrate" in caught.value.hint
    calibration.save(CALIBRATED, tmp_path)
    assert calibration.find(H200, tmp_path) == CALIBRATED


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    calibration.save(CALIBRATED, tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration.os, "replace", full)
    with pytest.raises(DatabaseError, match="No space left"):
        calibration.save(calibration_of(H200, launch_us=9.0), tmp_path)
    monkeypatch.undo()
    assert calibration.find(H200, tmp_path) == CALIBRATED
    assert len(list(tmp_path.iterdir())) == 1

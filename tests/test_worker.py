# SPDX-License-Identifier: Apache-2.0
"""What a worker answers: to kernels that are right, and to those that are wrong in every way."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading

import numpy as np
import pytest
from fake_gpu import FakeGpu, FakeKernel, Fault
from problems import Doubling, N, executable, fp32, fp64, pointers

from tunegen.errors import DeviceError
from tunegen.model import Array, Launch, LaunchPlan
from tunegen.model.checks import POISON
from tunegen.runner import timing
from tunegen.runner.operands import place
from tunegen.runner.protocol import (
    Block,
    Enter,
    Entered,
    Executable,
    Failed,
    Leave,
    Open,
    Opened,
    Prepared,
    Tried,
    Try,
    Verdict,
    Verify,
)
from tunegen.runner.worker import Worker

TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)


@pytest.fixture
def doubling():
    problem = Doubling()
    assert isinstance(problem.prepare(), Prepared)
    return problem


@pytest.fixture
def in_place():
    problem = Doubling(in_place=True)
    assert isinstance(problem.prepare(), Prepared)
    return problem


def attempt(problem, executable, **options):
    answer = problem.worker.handle(Try(executable, TOLERANCE, "burst", **options))
    assert isinstance(answer, Tried), answer
    return answer.outcome


def wrong(problem, run, **plan):
    """The reason why a kernel is rejected, by a trial and by a verification alike."""
    kernel = problem.kernel(run, **plan)
    outcome = attempt(problem, kernel)
    assert outcome.kind == "wrong_result"
    assert outcome.measurement is None
    verdict = problem.worker.handle(Verify(kernel, TOLERANCE))
    assert verdict.reason == outcome.reason
    assert not verdict.deterministic
    # Whatever it damaged, the next one is judged by what it does itself.
    assert attempt(problem, problem.right()).kind == "measured"
    return outcome.reason


# --- open and prepare ----------------------------------------------------------------------------


def test_open_describes_the_device():
    problem = Doubling()
    opened = problem.worker.handle(Open(0))
    assert isinstance(opened, Opened)
    assert opened.device == problem.gpu.device_class()
    assert (opened.driver, opened.uuid, opened.nvml_pids) == ("580.65.06", "GPU-fake", (1,))
    assert opened.free_bytes == problem.memory_bytes
    assert opened.telemetry.power_w == 500


def test_a_device_that_is_not_there_is_an_answer():
    def refuse(index):
        raise DeviceError(f"no device {index}: there are 1, numbered from 0")

    answer = Worker(refuse).handle(Open(3))
    assert answer == Failed("no device 3: there are 1, numbered from 0", False, "device")


@pytest.mark.parametrize("what", ["prepare", "try", "verify", "enter", "block", "leave"])
def test_what_comes_too_early_is_an_answer(what):
    problem = Doubling()
    kernel = problem.right()
    request = {
        "prepare": problem.prepare_request(), "try": Try(kernel, 1.0, "burst"),
        "verify": Verify(kernel, 1.0), "enter": Enter("a", kernel), "leave": Leave(),
        "block": Block("a", "burst", 1.0),
    }[what]  # fmt: skip
    answer = problem.worker.handle(request)
    assert isinstance(answer, Failed)
    assert answer.kind == "device"
    assert "has been" in answer.reason


@pytest.mark.parametrize("sets", [1, 3])
def test_sets_hold_the_same_inputs_between_guard_bands(sets):
    problem = Doubling(sets=sets)
    prepared = problem.prepare()
    operands = problem.worker._operands
    assert prepared.bytes == operands.bytes
    x = fp32(problem.gpu.memory, operands.sets[0]["x"].address).copy()
    assert abs(x.std() - 1) < 0.1
    assert len(operands.sets) == sets
    everything = []
    for placed in operands.sets:
        for name, one in placed.items():
            assert one.address % 256 == 0
            assert one.address - one.buffer >= 512
            assert one.end - (one.address + one.array.bytes) >= 512
            content = problem.gpu.memory.view(one.buffer, one.buffer_bytes).copy()
            inside = slice(one.address - one.buffer, one.address - one.buffer + one.array.bytes)
            if name == "x":
                np.testing.assert_array_equal(content[inside].view(np.float32), x)
                content[inside] = POISON
            assert np.all(content == POISON)
            everything.append((one.buffer, one.end))
    everything.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(everything))
    expected = fp64(problem.gpu.memory, operands.expected["y"])
    np.testing.assert_array_equal(expected, 2.0 * x)


def test_inputs_follow_the_seed():
    drawn = []
    for seed in (1, 1, 2):
        problem = Doubling(request={"seed": seed})
        problem.prepare()
        address = problem.worker._operands.sets[0]["x"].address
        drawn.append(fp32(problem.gpu.memory, address).copy())
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.any(drawn[0] == drawn[2])


def test_operands_of_a_problem_have_seeds_of_their_own():
    arrays = tuple(Array(name, (N,), (1,), "fp32", "in") for name in "ab")
    problem = Doubling(request={"arrays": arrays, "reference": None})
    problem.prepare()
    placed = problem.worker._operands.sets[0]
    a, b = (fp32(problem.gpu.memory, placed[name].address) for name in "ab")
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.15


def test_given_inputs_and_expected_results_are_used():
    x = np.arange(N, dtype=np.float32)
    problem = Doubling(request={"given": {"x": x}, "expected": {"y": 3.0 * x}, "reference": None})
    problem.prepare()

    def triple(memory, values):
        fp32(memory, values["y"])[:] = 3 * fp32(memory, values["x"])

    assert attempt(problem, problem.kernel(triple)).ok
    reason = attempt(problem, problem.right()).reason
    assert f"at ({N - 1}): {2 * (N - 1)} instead of {3 * (N - 1)}" in reason


def test_given_inputs_keep_their_gaps():
    array = Array("x", (3, 5), (8, 1), "bf16", "in")
    x = np.arange(15, dtype=np.uint16).reshape(3, 5)
    problem = Doubling(request={"arrays": (array,), "given": {"x": x}, "reference": None})
    problem.prepare()
    placed = problem.worker._operands.sets[1]["x"]
    stored = problem.gpu.memory.view(placed.address, array.elements, np.uint16)
    for row in range(3):
        np.testing.assert_array_equal(stored[8 * row : 8 * row + 5], x[row])
        assert np.all(stored[8 * row + 5 : 8 * row + 8] == 0xFFFF)


@pytest.mark.parametrize(
    ("request_part", "words"),
    [
        ({"given": {"x": np.zeros(5, np.float32)}}, "x is given as float32[5]"),
        ({"offsets": {"x": 6}}, "x cannot lie 6 bytes"),
        ({"offsets": {"x": -4}}, "x cannot lie -4 bytes"),
        ({"sets": 0}, "0 sets"),
        (
            {"arrays": (Array("z", (1, 1, 1, 1), (1, 1, 1, 1), "fp32", "in"),)},
            "z has 4 dimensions",
        ),
    ],
)
def test_what_cannot_be_prepared_is_an_answer(request_part, words):
    problem = Doubling(request=request_part)
    answer = problem.prepare()
    assert isinstance(answer, Failed)
    assert words in answer.reason
    assert problem.gpu.memory.used == 0


def test_offsets_move_operands():
    problem = Doubling(request={"offsets": {"x": 4, "y": 20}})
    problem.prepare()
    for placed in problem.worker._operands.sets:
        assert placed["x"].address % 256 == 4
        assert placed["y"].address % 256 == 20
    assert attempt(problem, problem.right()).ok


def test_memory_is_asked_for_before_anything_is_allocated():
    problem = Doubling(sets=4, memory_bytes=100_000)
    answer = problem.prepare()
    assert isinstance(answer, Failed)
    assert answer.kind == "device"
    needed = place(Array("x", (N,), (1,), "fp32", "in"), 0).buffer_bytes * 9 + 8 * N
    assert (
        f"4 sets of operands with guard bands, originals and expected results need {needed:,}"
        in (answer.reason)
    )
    assert "100,000 are free" in answer.reason
    assert problem.gpu.memory.used == 0


def test_preparing_again_gives_the_memory_back(doubling):
    used, loaded = doubling.gpu.memory.used, doubling.gpu.loaded
    for _ in range(3):
        kernel = doubling.kernel(doubling.double, workspace_bytes=100)
        doubling.worker.handle(Enter("a", kernel))
        assert isinstance(doubling.worker.handle(doubling.prepare_request()), Prepared)
    assert (doubling.gpu.memory.used, doubling.gpu.loaded) == (used, loaded)
    assert isinstance(doubling.worker.handle(Block("a", "burst", 0.01)), Failed)


# --- right kernels -------------------------------------------------------------------------------


def test_a_right_kernel_is_measured(doubling):
    outcome = attempt(doubling, doubling.right(us=12.5))
    assert outcome.kind == "measured"
    measurement = outcome.measurement
    assert measurement.median_us == measurement.low_us == measurement.high_us == 12.5
    assert measurement.policy == "burst"
    assert measurement.details["relative_error"] == 0
    assert "raced_out" not in measurement.details


def test_a_trial_leaves_nothing_behind(doubling):
    used, loaded = doubling.gpu.memory.used, doubling.gpu.loaded
    attempt(doubling, doubling.right())
    attempt(doubling, doubling.kernel(doubling.double, workspace_bytes=1000))
    attempt(doubling, doubling.kernel(lambda memory, values: None))
    doubling.worker.handle(Verify(doubling.right(), TOLERANCE))
    assert (doubling.gpu.memory.used, doubling.gpu.loaded, doubling.gpu.graphs) == (
        used,
        loaded,
        0,
    )


def test_the_answer_says_where_the_seconds_went(doubling):
    def slow(memory, values):
        doubling.double(memory, values)
        threading.Event().wait(0.02)

    answer = doubling.worker.handle(Try(doubling.kernel(slow, us=2e4), TOLERANCE, "burst"))
    launches = doubling.gpu.kernels["mine"].launches
    assert 0.02 <= answer.verify_seconds < 0.02 * launches
    assert 0.02 * (launches - 1) <= answer.timing_seconds


def test_a_right_kernel_passes_a_verification(doubling):
    verdict = doubling.worker.handle(Verify(doubling.right(), TOLERANCE))
    assert verdict == Verdict("", 0.0, 0.0, True)


def test_rounding_is_no_error_but_is_told(doubling):
    def rounded(memory, values):
        fp32(memory, values["y"])[:] = 2 * fp32(memory, values["x"]) * np.float32(1 + 2.0**-22)

    verdict = doubling.worker.handle(Verify(doubling.kernel(rounded), TOLERANCE))
    assert not verdict.reason
    assert 1e-7 < verdict.relative_error < 4e-7
    assert verdict.largest_error > 0


# --- wrong results -------------------------------------------------------------------------------


def test_fast_and_wrong(doubling):
    """The last hundredth is never multiplied."""

    def lazy(memory, values):
        doubling.double(memory, values)
        fp32(memory, values["y"])[-10:] /= 2

    reason = wrong(doubling, lazy, us=0.1)
    match = re.fullmatch(
        r"the relative RMS error of y is [\d.]+, more than 1e-06; the largest error is "
        r"([\d.]+) at \((\d+)\): (\S+) instead of (\S+)", reason,
    )  # fmt: skip
    assert match, reason
    largest, at, actual, expected = (float(group) for group in match.groups())
    assert N - 10 <= at < N
    assert actual == pytest.approx(expected / 2)
    assert largest == pytest.approx(abs(actual - expected), rel=0.01)


@pytest.mark.parametrize(("half", "first"), [(slice(0, N // 2), N // 2), (slice(N // 2, N), 0)])
def test_half_an_output_is_not_completed_by_the_kernel_before(doubling, half, first):
    def write_half(memory, values):
        fp32(memory, values["y"])[half] = 2 * fp32(memory, values["x"])[half]

    assert attempt(doubling, doubling.right()).ok  # leaves the whole output
    reason = wrong(doubling, write_half)
    assert reason == f"512 of 1,024 elements of y were not written, the first at ({first})"


def test_one_element_far_off_is_found():
    """Among so many that the RMS error does not show it."""
    count = 1 << 16
    array = Array("y", (256, 256), (256, 1), "fp32", "out")
    problem = Doubling(request={
        "arrays": (array,), "reference": None, "expected": {"y": np.ones((256, 256))},
    })  # fmt: skip
    problem.prepare()

    def off(memory, launch, values):
        y = fp32(memory, values["y"], count)
        y[:] = 1
        y[513] = 1.001

    problem.gpu.kernels["off"] = FakeKernel(off)
    kernel = executable("off", pointers("y"))
    answer = problem.worker.handle(Verify(kernel, 1e-5))
    assert "one element of y is far off, although the relative RMS error is 3.9" in answer.reason
    assert "at (2, 1): 1.00100005 instead of 1" in answer.reason
    assert not problem.worker.handle(Verify(kernel, 1e-4)).reason


def test_nan_is_not_right(doubling):
    def nan(memory, values):
        doubling.double(memory, values)
        fp32(memory, values["y"])[[3, 9]] = np.nan

    reason = wrong(doubling, nan)
    assert reason.startswith(
        "2 of 1,024 elements of y are NaN or infinite where they should not be"
    )
    assert "the first at (3): nan instead of" in reason


def test_exact_results_are_exact():
    problem = Doubling(request={"inputs": "integers"})
    problem.prepare()
    assert not problem.worker.handle(Verify(problem.right(), TOLERANCE, exact=True)).reason

    def almost(memory, values):
        problem.double(memory, values)
        y = fp32(memory, values["y"])
        y[y == 4] = np.nextafter(np.float32(4), np.float32(5))

    kernel = problem.kernel(almost)
    assert not problem.worker.handle(Verify(kernel, TOLERANCE)).reason
    reason = problem.worker.handle(Verify(kernel, TOLERANCE, exact=True)).reason
    assert re.match(r"\d+ of 1,024 elements of y are not exact on integers, the first at", reason)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (-1, "4 bytes before its first one"),
        (-100, "400 bytes before its first one"),
        (N, "0 bytes behind its last one"),
        (N + 25, "100 bytes behind its last one"),
    ],
)
def test_stray_writes_are_named(doubling, at, words):
    def stray(memory, values):
        doubling.double(memory, values)
        fp32(memory, values["y"] + 4 * at, 1)[:] = 0

    reason = wrong(doubling, stray)
    assert reason == f"wrote to 1 places beside the elements of y: {words}"


def test_writes_between_rows_are_stray():
    array = Array("y", (4, 100), (128, 1), "fp32", "out")
    problem = Doubling(request={
        "arrays": (array,), "reference": None, "expected": {"y": np.ones((4, 100))},
    })  # fmt: skip
    problem.prepare()

    def run(memory, values, width):
        for row in range(4):
            fp32(memory, values["y"] + 512 * row, width)[:] = 1

    for width, fine in ((100, True), (101, False), (128, False)):
        problem.gpu.kernels["rows"] = FakeKernel(lambda m, _, v, width=width: run(m, v, width))
        outcome = attempt(problem, executable("rows", pointers("y")))
        assert outcome.ok == fine
        if not fine:
            assert "y: between its rows, 400 bytes from its first one" in outcome.reason


def test_changed_inputs_are_found(doubling):
    def spoil(memory, values):
        doubling.double(memory, values)
        fp32(memory, values["x"])[[5, 6]] = 0

    reason = wrong(doubling, spoil)
    assert reason == "changed 2 elements of its input x, the first 20 bytes from its start"


def test_everything_that_is_wrong_is_told(doubling):
    def awful(memory, values):
        fp32(memory, values["y"])[1:] = 1
        fp32(memory, values["x"] - 8, 1)[:] = 0

    reason = wrong(doubling, awful)
    assert "1 of 1,024 elements of y were not written" in reason
    assert "beside the elements of x: 8 bytes before" in reason


def test_damage_done_far_away_is_not_blamed_on_the_next(doubling):
    """A stray write that hits the expected results, and is not seen."""

    def vandal(memory, values):
        doubling.double(memory, values)
        operands = doubling.worker._operands
        fp64(memory, operands.expected["y"])[:] = 7
        fp32(memory, operands.originals["x"].address)[:] = 7

    vandals = doubling.kernel(vandal)
    assert attempt(doubling, vandals).kind == "wrong_result"
    assert attempt(doubling, doubling.right()).ok
    doubling.gpu.kernels["mine"].run(
        doubling.gpu.memory, None, doubling.worker._operands.addresses(0)
    )
    assert attempt(doubling, doubling.right()).ok


def test_a_kernel_that_fails_only_when_repeated_is_wrong(doubling):
    def flaky(memory, values):
        doubling.double(memory, values)
        if doubling.gpu.kernels["mine"].launches > 5:
            fp32(memory, values["y"])[0] = 1e6

    outcome = attempt(doubling, doubling.kernel(flaky))
    assert outcome.kind == "wrong_result"
    assert outcome.reason.startswith("right at first, then not: the relative RMS error of y")


def test_runs_that_differ_are_told_and_not_refused(doubling):
    def dithering(memory, values):
        doubling.double(memory, values)
        if doubling.gpu.kernels["mine"].launches == 3:
            y = fp32(memory, values["y"])
            y[9] = np.nextafter(y[9], np.float32(100))

    for repeats, deterministic in ((1, True), (2, False)):
        verdict = doubling.worker.handle(
            Verify(doubling.kernel(dithering), TOLERANCE, repeats=repeats)
        )
        assert not verdict.reason
        assert verdict.deterministic == deterministic


# --- in place ------------------------------------------------------------------------------------


def test_in_place_calls_start_from_the_first_values(in_place):
    outcome = attempt(in_place, in_place.right(us=200.0))
    assert outcome.kind == "measured"
    assert outcome.measurement.median_us == 200
    verdict = in_place.worker.handle(Verify(in_place.right(), TOLERANCE, repeats=5))
    assert verdict == Verdict("", 0.0, 0.0, True)


def test_no_set_is_worked_on_twice_in_place():
    problem = Doubling(in_place=True, sets=5)
    problem.prepare()
    originals = fp32(problem.gpu.memory, problem.worker._operands.originals["x"].address).copy()

    def scale(memory, values):
        x = fp32(memory, values["x"])
        np.testing.assert_array_equal(x, originals)
        x *= 2

    kernel = problem.kernel(scale, us=90.0)
    outcome = attempt(problem, kernel)
    assert outcome.kind == "measured"
    assert outcome.measurement.median_us == 90
    assert outcome.measurement.details["calls_per_interval"] == 5
    problem.worker.handle(Enter("scale", kernel))
    for policy in ("burst", "sustained"):
        timed = problem.worker.handle(Block("scale", policy, 0.01))
        assert set(timed.samples_us) == {90}
    assert problem.gpu.kernels["mine"].launches > 100


def test_an_in_place_kernel_that_does_nothing_is_wrong(in_place):
    reason = wrong(in_place, lambda memory, values: None)
    assert reason.startswith("the relative RMS error of x is 0.5, more than")


def test_in_place_calls_cannot_be_timed_warm(in_place):
    outcome = in_place.worker.handle(Try(in_place.right(), TOLERANCE, "warm")).outcome
    assert outcome.kind == "launch_failed"
    assert "in place" in outcome.reason
    in_place.worker.handle(Enter("a", in_place.right()))
    answer = in_place.worker.handle(Block("a", "warm", 0.01))
    assert isinstance(answer, Failed)
    assert answer.kind == "device"


# --- workspaces ----------------------------------------------------------------------------------


def test_a_workspace_is_poison_unless_zeros_are_asked_for(doubling):
    seen = []

    def look(memory, values):
        seen.append(memory.view(values["scratch"], 1000).copy())
        doubling.double(memory, values)

    for init, byte in (("none", POISON), ("zero", 0)):
        seen.clear()
        kernel = doubling.kernel(look, workspace_bytes=1000, workspace_init=init)
        assert attempt(doubling, kernel).ok
        assert np.all(seen[0] == byte)


@pytest.mark.parametrize("zeroed_bytes", [0, 8, 999, 1000])
def test_the_first_bytes_of_a_workspace_are_zeroed_and_the_others_poison(doubling, zeroed_bytes):
    seen = []

    def dirty(memory, values):
        scratch = memory.view(values["scratch"], 1000)
        seen.append(scratch.copy())
        scratch[:] = 5

    kernel = doubling.kernel(
        dirty, workspace_bytes=1000, workspace_init="zero", zeroed_bytes=zeroed_bytes
    )
    attempt(doubling, kernel)
    assert len(seen) == 2, "the second launch of a wrong kernel gets it fresh"
    for scratch in seen:
        assert not scratch[:zeroed_bytes].any()
        assert (scratch[zeroed_bytes:] == POISON).all()


def test_a_workspace_has_guard_bands(doubling):
    def overrun(memory, values):
        doubling.double(memory, values)
        memory.view(values["scratch"], 1004)[:] = 1

    assert wrong(doubling, overrun, workspace_bytes=1000) == (
        "wrote to 2 places beside the elements of the workspace: 0 bytes behind its last one"
    )


def test_a_wrong_kernel_gets_a_fresh_workspace_for_its_second_launch(doubling):
    states = []

    def leave_dirt(memory, values):
        scratch = memory.view(values["scratch"], 8)
        states.append(scratch.copy())
        scratch[:] = 5

    attempt(doubling, doubling.kernel(leave_dirt, workspace_bytes=8, workspace_init="zero"))
    assert len(states) == 2
    assert not np.any(states)


def test_a_workspace_that_does_not_fit_is_the_candidates_failure(doubling):
    kernel = doubling.kernel(doubling.double, workspace_bytes=1 << 40)
    outcome = attempt(doubling, kernel)
    assert outcome.kind == "launch_failed"
    assert re.search(r"[\d,]+ bytes of device memory are needed, [\d,]+ are free", outcome.reason)
    answer = doubling.worker.handle(Verify(kernel, TOLERANCE))
    assert isinstance(answer, Failed)
    assert not answer.sticky


# --- kernels that do not run ---------------------------------------------------------------------


def test_a_time_of_zero_is_no_time(doubling):
    outcome = attempt(doubling, doubling.right(us=0.0))
    assert outcome.kind == "launch_failed"
    assert "0 us" in outcome.reason


def test_a_refused_launch_is_the_candidates_failure(doubling):
    good = doubling.right()
    launch = dataclasses.replace(good.plan.launches[0], block=(2048, 1, 1))
    bad = Executable(good.kernels, LaunchPlan((launch,)))
    outcome = attempt(doubling, bad)
    assert outcome == dataclasses.replace(
        outcome, kind="launch_failed", reason="cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"
    )
    answer = doubling.worker.handle(Verify(bad, TOLERANCE))
    assert answer == Failed("cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE", False, "kernel")
    assert attempt(doubling, good).ok


def test_a_kernel_for_another_architecture_is_the_candidates_failure(doubling):
    good = doubling.right()
    other = dataclasses.replace(good.kernels[0], target="sm_80")
    outcome = attempt(doubling, Executable((other,), good.plan))
    assert outcome.kind == "launch_failed"
    assert "sm_80" in outcome.reason


def test_a_plan_without_launches_is_no_success(doubling):
    outcome = attempt(doubling, Executable((), LaunchPlan(())))
    assert outcome.kind == "launch_failed"
    assert "nothing to run" in outcome.reason


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "kernel"),
        ("CUDA_ERROR_LAUNCH_FAILED", "kernel"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", "device"),
    ],
)
def test_a_fault_loses_the_context(code, kind):
    for make in (
        lambda kernel: Try(kernel, TOLERANCE, "burst"),
        lambda kernel: Verify(kernel, TOLERANCE),
        lambda kernel: Enter("a", kernel),
    ):
        problem = Doubling()
        problem.prepare()

        def fault(memory, values):
            raise Fault(code)

        answer = problem.worker.handle(make(problem.kernel(fault)))
        assert isinstance(answer, Failed)
        assert answer.sticky
        assert answer.kind == kind
        assert code in answer.reason


def test_a_fault_that_comes_late_is_still_the_candidates(doubling):
    def late(memory, values):
        doubling.double(memory, values)
        if doubling.gpu.kernels["mine"].launches > 20:
            raise Fault("CUDA_ERROR_ILLEGAL_ADDRESS")

    answer = doubling.worker.handle(Try(doubling.kernel(late), TOLERANCE, "burst"))
    assert isinstance(answer, Failed)
    assert answer.sticky
    assert answer.kind == "kernel"


def test_a_store_far_out_of_bounds_is_a_fault(doubling):
    def far(memory, values):
        fp32(memory, values["y"] + (1 << 45), 1)[:] = 0

    answer = doubling.worker.handle(Try(doubling.kernel(far), TOLERANCE, "burst"))
    assert (answer.sticky, answer.kind) == (True, "kernel")


def test_a_policy_that_nobody_knows_is_the_requests_failure(doubling):
    for request in (Try(doubling.right(), TOLERANCE, "slow"), Block("a", "slow", 1.0)):
        doubling.worker.handle(Enter("a", doubling.right()))
        answer = doubling.worker.handle(request)
        assert isinstance(answer, Failed)
        assert "slow" in answer.reason


def test_results_without_expectations_cannot_be_checked():
    problem = Doubling(request={"reference": None})
    problem.prepare()
    for request in (Try(problem.right(), TOLERANCE, "burst"), Verify(problem.right(), TOLERANCE)):
        answer = problem.worker.handle(request)
        assert answer == Failed("no expected values of y have been prepared", False, "device")
    # They can be timed.
    assert isinstance(problem.worker.handle(Enter("a", problem.right(us=3.0))), Entered)
    assert set(problem.worker.handle(Block("a", "burst", 0.01)).samples_us) == {3.0}


# --- contests ------------------------------------------------------------------------------------


def test_contenders_are_timed_by_name(doubling):
    for name, us in (("slow", 40.0), ("fast", 20.0)):
        entered = doubling.worker.handle(Enter(name, doubling.right(us=us, name=name)))
        assert entered == Entered(0.0, "")
    for name, us in (("slow", 40.0), ("fast", 20.0), ("slow", 40.0)):
        timed = doubling.worker.handle(Block(name, "burst", 0.01))
        assert set(timed.samples_us) == {us}
    assert isinstance(doubling.worker.handle(Block("other", "burst", 0.01)), Failed)
    doubling.worker.handle(Enter("slow", doubling.right(us=30.0, name="slow")))  # in its place
    assert set(doubling.worker.handle(Block("slow", "burst", 0.01)).samples_us) == {30.0}


def test_leaving_gives_everything_back(doubling):
    used, loaded = doubling.gpu.memory.used, doubling.gpu.loaded
    for name in "aba":
        kernel = doubling.kernel(doubling.double, name=name, workspace_bytes=100)
        doubling.worker.handle(Enter(name, kernel))
        doubling.worker.handle(Block(name, "sustained", 0.1))
    assert doubling.gpu.graphs
    assert doubling.worker.handle(Leave()) == Entered()
    assert (doubling.gpu.memory.used, doubling.gpu.loaded, doubling.gpu.graphs) == (
        used,
        loaded,
        0,
    )


def test_a_contender_says_how_exact_it_is(doubling):
    def coarse(memory, values):
        fp32(memory, values["y"])[:] = 2.02 * fp32(memory, values["x"])

    assert doubling.worker.handle(Enter("a", doubling.kernel(coarse))).relative_error == (
        pytest.approx(0.01)
    )


def test_a_contender_that_cannot_enter_leaves_nothing(doubling):
    used, loaded = doubling.gpu.memory.used, doubling.gpu.loaded
    good = doubling.right()
    launch = dataclasses.replace(good.plan.launches[0], block=(2048, 1, 1))
    bad = Executable(good.kernels, LaunchPlan((launch,), workspace_bytes=100))
    assert isinstance(doubling.worker.handle(Enter("a", bad)), Failed)
    assert (doubling.gpu.memory.used, doubling.gpu.loaded) == (used, loaded)


def test_two_launches_of_a_plan_are_one_call(doubling):
    first = doubling.kernel(lambda memory, values: None, us=3.0, name="first")
    second = doubling.right(us=4.0)
    both = Executable(
        first.kernels + second.kernels, LaunchPlan(first.plan.launches + second.plan.launches)
    )
    assert attempt(doubling, both).median_us == 7


def test_the_fake_gpu_faults_once_and_for_all():
    """What the tests above rely on."""
    gpu = FakeGpu({})
    gpu.fill(1 << 20, 0, 4)
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        gpu.synchronize()
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        gpu.allocate(4)
    assert Launch("a", (1, 1, 1), (1, 1, 1), ()).shared_bytes == 0

# SPDX-License-Identifier: Apache-2.0
"""The finals, with workers that play a GPU by a script: truth in, the right winner out."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import scripted
from hypothesis import given
from hypothesis import strategies as st
from scripted import DEVICE, FAULTY, PROBLEM, finalist
from taken import PORTABLE, taken

from tunegen import kernels
from tunegen.model import EdgeProblem, Limit, Telemetry
from tunegen.runner import ratios, rounds
from tunegen.runner.finals import CLOSE, FINALISTS, Finals
from tunegen.runner.neighbours import neighbour, worst_cases
from tunegen.runner.protocol import Timed
from tunegen.runner.qualify import fit
from tunegen.runner.quarantine import Quarantine

# Microseconds by THREADS: below 100, so that bursts decide.
SHORT = {"32": 50.0, "64": 51.0, "128": 53.0, "256": 60.0, "512": 51.5, "1024": 52.0}
STATE = Telemetry()
LONG = {name: 20 * us for name, us in SHORT.items()}


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Finals among finalists by their THREADS, the default being 256."""
    monkeypatch.setattr("tunegen.runner.qualify.VERIFY_SECONDS", 1.0)
    monkeypatch.setattr("tunegen.runner.station._PAUSE_SECONDS", 0.01)
    log = tmp_path / "log"

    def contest(script=None, *, threads=(32, 64, 128), default=256, vendor=None, **options):
        script = {
            "us": SHORT, "noise": 0.003, "log": str(log), "shape": [4096], **(script or {})
        }  # fmt: skip
        us = script["us"]
        options.setdefault("seconds", 30.0)
        options.setdefault("operation", FAULTY.operation)
        ranked = [
            finalist(name, default=name == default, us=us[str(name)])
            for name in (default, *threads)
            if name is not None
        ]
        with scripted.station(script) as card:
            other = None
            if vendor is not None:
                other = scripted.worker({**script, "dice": 5, "vendor": vendor})
            finals = Finals(
                station=card, setup=scripted.setup(), problem=PROBLEM,
                device=DEVICE, seed=7, sets=4, vendor=other,
                quarantine=Quarantine(tmp_path / "quarantine", lambda candidate: ()), **options,
            )  # fmt: skip
            result = finals(ranked)
        assert all(scripted.is_gone(pid) for pid, _ in scripted.logged(log))
        assert other is None or not other.alive
        json.dumps(dataclasses.asdict(result))
        return result

    contest.log = lambda: [text for _, text in scripted.logged(log)]
    return contest


def shares(result, policy="burst"):
    return {s.name: s.figures[policy].ratio for s in result.standings if policy in s.figures}


# --- the winner ----------------------------------------------------------------------------------


def test_the_fastest_wins_with_ratios_near_the_truth(play):
    result = play()
    assert result.winner.name == "trial 32"
    assert result.policy == "burst"
    assert result.tied == ("trial 32",)
    expected = {"default": 1.2, "trial 32": 1.0, "trial 64": 1.02, "trial 128": 1.06}
    assert shares(result) == pytest.approx(expected, rel=0.004)
    for standing in result.standings:
        found = standing.figures["burst"]
        assert found.low_us <= found.median_us <= found.high_us
        assert found.ratio_low <= found.ratio <= found.ratio_high
        assert found.rounds >= 15
        assert found.before.sm_clock_mhz == 1980
        assert found.throttle == ("power limit",)
    measurement = result.measurement(result.winner)
    assert measurement.policy == "burst"
    assert measurement.median_us == pytest.approx(50.0, rel=0.01)
    assert measurement.samples == result.winner.figures["burst"].rounds
    assert measurement.details["burst"]["ratio"] == 1.0
    json.dumps(measurement.details)


def test_the_card_getting_slower_harms_no_one(play):
    """By the end of the rounds it takes twice as long; orders are random."""
    result = play({"heat": 0.01})
    assert result.winner.name == "trial 32"
    assert shares(result)["trial 64"] == pytest.approx(1.02, rel=0.02)


def test_the_default_does_not_lose_to_noise(play):
    same = {**SHORT, "256": 50.0}
    result = play({"us": same, "noise": 0.01}, threads=(32,))
    assert set(result.tied) == {"default", "trial 32"}
    assert result.winner.name == "default"
    assert result.rule == ratios.BY_DEFAULT


def test_the_order_of_a_contest_is_that_of_its_seed(play):
    play()
    first = [text for text in play.log() if text.startswith("block")]
    orders = ratios.shuffled(["default", "trial 32", "trial 64", "trial 128"], 30, 7)
    assert [name for order in orders for name in order][: len(first)] == [
        re.match("block (.*) burst", text)[1] for text in first
    ]


def test_without_a_default(play):
    result = play(default=None)
    assert result.winner.name == "trial 32"


def test_nobody_to_play():
    with scripted.station({}) as card:
        result = Finals(
            station=card, setup=scripted.setup(), problem=PROBLEM, operation=FAULTY.operation,
            device=DEVICE, seed=0, sets=2,
        )([])  # fmt: skip
    assert result.winner is None
    assert result.standings == ()


# --- who may take part ---------------------------------------------------------------------------


def test_only_those_close_to_the_best_are_played(play):
    result = play(threads=(32, 64, 1024, 128), default=None)
    assert {s.name for s in result.standings} == {
        "trial 32",
        "trial 64",
        "trial 1024",
        "trial 128",
    }
    far = {**SHORT, "128": 50.0 * CLOSE + 1}
    result = play({"us": far}, threads=(32, 64, 1024, 128), default=None)
    assert {s.name for s in result.standings} == {"trial 32", "trial 64", "trial 1024"}


def test_everyone_is_checked_on_integers_edges_and_normal_inputs(play):
    play(threads=(32, 64))
    found = [text for text in play.log() if text.startswith("verifying")]
    edges = FAULTY.operation.edges(PROBLEM)
    assert len(edges) >= 3
    for threads in (32, 64, 256):
        mine = [text for text in found if f"'THREADS': {threads}}}" in text]
        shapes = [re.search(r"\((\d+),\)", text)[1] for text in mine]
        assert shapes == ["4096", *(str(edge.problem.N) for edge in edges), "4096"]
        assert [("exact True" in text) for text in mine] == [True] * (len(edges) + 1) + [False]


def test_integers_need_not_be_exact_where_the_operation_rounds_by_itself(play):
    play(operation=dataclasses.replace(FAULTY.operation, exact=lambda problem: False))
    found = [text for text in play.log() if text.startswith("verifying")]
    assert found
    assert all("exact False" in text for text in found)


@pytest.mark.parametrize("wrong", [(32,), (32, 64, 512, 1024)])
def test_who_is_wrong_at_an_edge_is_replaced(wrong, play):
    threads = (32, 64, 512, 1024, 128)
    result = play({"wrong_at_edges": wrong}, threads=threads)
    left = [name for name in threads if name not in wrong]
    assert result.winner.name == f"trial {left[0]}"
    for name in wrong:
        standing = result.of_trial(name)
        assert standing.failed_as == "wrong_result"
        assert re.search(r"finals at \d+, integers inputs: y: largest error 1.5", standing.failure)
        assert not standing.figures


def test_who_is_wrong_on_the_problem_itself(play):
    broken = [finalist(256, fault=3, us=40.0), finalist(64, us=51.0)]
    with scripted.station({"us": SHORT}) as card:
        result = Finals(
            station=card, setup=scripted.setup(), problem=PROBLEM, operation=FAULTY.operation,
            device=DEVICE, seed=0, sets=2,
        )(broken)  # fmt: skip
    assert result.winner.name == "trial 64"
    assert "largest error 2.1" in result.of_trial(256).failure


def test_all_are_wrong(play):
    result = play({"wrong_at_edges": (32, 64, 128, 256)})
    assert result.winner is None
    assert all(standing.failure for standing in result.standings)


def test_more_than_can_play_are_not_even_checked(play):
    near = dict.fromkeys(SHORT, 50.0)
    threads = (32, 64, 128, 512, 1024, 256)
    result = play({"us": near}, threads=threads, default=None)
    assert len(result.standings) == FINALISTS


def test_nondeterministic_ones_are_barred_on_demand(play):
    assert play({"unsteady": [32]}).winner.name == "trial 32"
    result = play({"unsteady": [32]}, deterministic=True)
    assert result.winner.name == "trial 64"
    assert "differs from run to run" in result.of_trial(32).barred
    assert result.winner.deterministic


# --- what breaks on the way ----------------------------------------------------------------------


def test_a_finalist_that_hangs_is_ended_and_kept(play, tmp_path):
    result = play({"hangs_in_finals": [32]})
    assert result.winner.name == "trial 64"
    standing = result.of_trial(32)
    assert standing.failed_as == "timed_out"
    assert "no answer within" in standing.failure
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("how", ["dies_in_block", "fails_in_block"])
def test_a_contender_that_dies_in_the_middle(how, play, tmp_path):
    result = play({how: "trial 32", "haunted": True}, vendor={"us": 48.0})
    assert result.winner.name == "trial 64"
    assert not result.shared
    standing = result.of_trial(32)
    assert standing.failed_as == "launch_failed"
    assert re.search("SIGABRT|MISALIGNED", standing.failure)
    assert not standing.figures
    assert shares(result)["default"] == pytest.approx(60 / 51, rel=0.01)
    counts = {s.figures["burst"].rounds for s in result.standings if s.figures}
    assert len(counts) == 1
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_a_worker_killed_in_between_is_replaced(play, tmp_path):
    result = play({"killed_once": str(tmp_path / "once")})
    assert result.winner.name == "trial 32"
    assert not any(standing.failure for standing in result.standings)


def test_company_is_noticed(play):
    assert not play().shared
    assert play({"came": [4711]}).shared


# --- the vendor's library ------------------------------------------------------------------------


def test_the_ratio_to_the_vendor_has_an_interval(play):
    result = play(vendor={"us": 48.0})
    ratio = result.winner.vendor
    assert ratio.low < 48 / 50 < ratio.high
    assert ratio.high - ratio.low < 0.01
    assert result.winner.name == "trial 32", "the vendor is no contender for the record"
    assert result.standing("vendor").description == "a library"
    details = result.measurement(result.winner).details["vendor"]
    assert details["name"] == "a library"
    assert details["ratio"] == ratio.ratio


def test_no_vendor_is_a_reason_and_no_error(play):
    for result, reason in (
        (play(no_vendor="torch is not installed"), "torch is not installed"),
        (play(vendor={}), "torch is not there"),
    ):
        assert result.no_vendor == reason
        assert result.winner.name == "trial 32"
        assert result.winner.vendor is None
        assert result.standing("vendor") is None


def test_a_vendor_that_dies_takes_nobody_along(play):
    result = play({"dies_in_block": "vendor"}, vendor={"us": 48.0})
    assert "SIGABRT" in result.no_vendor
    assert result.winner.name == "trial 32"
    assert result.winner.vendor is None


def test_a_result_may_be_half_as_exact_again_as_the_vendors(play):
    errors = {"32": 3.1e-8, "64": 2.9e-8}
    result = play({"errors": errors}, vendor={"us": 48.0, "error": 2e-8})
    assert result.winner.name == "trial 64"
    assert "3.1e-08 is more than 1.5 times that of a library" in result.of_trial(32).barred
    assert result.of_trial(32).figures, "it is timed all the same"


def test_where_none_is_that_exact_the_specs_promise_does(play):
    result = play(vendor={"us": 48.0, "error": 1e-9})
    assert result.winner.name == "trial 32"
    assert "no result has an error below 1.5 times" in result.notes[0]
    assert result.tolerance == FAULTY.tolerance(PROBLEM)


# --- sustained blocks ----------------------------------------------------------------------------


def test_long_calls_are_decided_by_sustained_blocks(play):
    result = play({"us": LONG, "sustained": {"32": 1.05}}, vendor={"us": 1000.0})
    assert result.policy == "sustained"
    assert result.winner.name == "trial 64"
    assert "trial 32 is faster in bursts, trial 64 sustained" in result.flip
    assert result.winner.vendor.ratio == pytest.approx(1000 / 1020, rel=0.005)
    assert set(shares(result, "sustained")) == {"default", "trial 32", "trial 64", "vendor"}
    blocks = [text for text in play.log() if "sustained" in text]
    assert blocks == [*blocks[:4], *reversed(blocks[:4])]
    assert result.winner.figures["sustained"].energy_mj == pytest.approx(510, rel=0.05)
    assert {"burst", "sustained", "flip"} <= set(result.measurement(result.winner).details)


def test_where_policies_disagree_the_other_one_has_a_winner_too(play):
    result = play({"us": LONG, "sustained": {"32": 1.05}})
    other = result.other
    assert (other.policy, other.winner.name, other.tied) == ("burst", "trial 32", ("trial 32",))
    assert other.measurement(other.winner).median_us == pytest.approx(1000.0, rel=0.01)
    assert other.measurement(other.winner).policy == "burst"
    assert (other.flip, other.other) == (result.flip, None)
    assert {s.name for s in other.standings} == {s.name for s in result.standings}


def test_where_policies_agree_there_is_no_other_winner(play):
    assert play({"us": LONG}).other is None
    assert play().other is None


def test_short_calls_are_decided_by_bursts(play):
    result = play()
    assert not any("sustained" in text for text in play.log())
    assert all("sustained" not in standing.figures for standing in result.standings)
    chosen = play(policy="sustained")
    assert chosen.policy == "sustained"


def test_bursts_decide_where_they_are_asked_for(play):
    result = play({"us": LONG, "sustained": {"32": 1.5}}, policy="burst")
    assert (result.policy, result.winner.name) == ("burst", "trial 32")


def test_warm_rounds(play):
    result = play({"us": LONG}, policy="warm")
    assert (result.policy, result.winner.name) == ("warm", "trial 32")
    assert any(text.endswith("warm") for text in play.log())


def test_short_ties_are_broken_by_energy(play):
    same = dict.fromkeys(SHORT, 50.0)
    result = play(
        {"us": same, "noise": 0.01, "watts": {"64": 400.0}}, threads=(32, 64), default=None
    )
    assert set(result.tied) == {"trial 32", "trial 64"}
    assert (result.winner.name, result.rule) == ("trial 64", ratios.BY_ENERGY)
    assert result.policy == "burst"


def test_ties_in_energy_are_broken_by_neighbouring_sizes_or_order(play):
    same = dict.fromkeys(SHORT, 50.0)
    result = play({"us": same, "noise": 0.01}, threads=(64, 32), default=None)
    assert result.rule in (ratios.BY_ORDER, ratios.BY_WORST_CASE)
    if result.rule == ratios.BY_ORDER:
        assert result.winner.name == "trial 64"


def test_no_time_for_sustained_blocks_is_said(play):
    result = play({"us": LONG}, seconds=0.5)
    assert result.policy == "burst"
    assert "no time was left for sustained blocks" in result.notes[0]


# --- time ----------------------------------------------------------------------------------------


@given(st.floats(0.1, 60), st.integers(1, 8), st.floats(1, 1e5))
def test_burst_rounds_keep_to_their_time(left_s, contenders, longest_us):
    count, block_s = rounds.burst_rounds(left_s, contenders, longest_us)
    assert 15 <= count <= 30
    assert block_s >= 3 * longest_us / 1e6
    assert count == 15 or count * contenders * 2 * block_s <= left_s


@given(st.floats(0, 100), st.integers(1, 6))
def test_sustained_blocks_keep_to_their_time(left_s, contenders):
    block_s = rounds.sustained_block(left_s, contenders)
    if block_s is None:
        assert left_s < 2 * contenders * 0.3
    else:
        assert 0.25 <= block_s <= 2.0
        assert 2 * contenders * block_s <= left_s


def test_rounds_end_with_their_time_but_not_too_soon():
    class Asked:
        def ask(self, request, timeout_s):
            return Timed((1.0,), 1, 1.0, STATE, STATE)

    orders = [["a", "b"]] * 30
    for until, count in ((0.0, 15), (float("inf"), 30)):
        played = rounds.play({"a": Asked(), "b": Asked()}, "burst", orders, 0.01, until=until)
        assert {len(blocks) for blocks in played.blocks.values()} == {count}


def test_pieces_of_blocks_correspond():
    """A contender with long calls has fewer samples: all are compared in as many pieces."""

    def block(count, us):
        return Timed((us,) * count, count, 1.0, STATE, STATE)

    played = rounds.Played(
        {"long": [block(8, 9.0), block(8, 9.0)], "short": [block(100, 1.0)] * 2}
    )
    times = rounds.sustained_times(played)
    assert {name: len(found) for name, found in times.items()} == {"long": 12, "short": 12}


def test_energy_needs_a_counter_that_moves():
    def block(before, after, calls=10):
        state = dataclasses.replace(STATE, energy_mj=before)
        return Timed((1.0,), calls, 1.0, state, dataclasses.replace(STATE, energy_mj=after))

    assert rounds.energy_per_call([block(100, 300), block(300, 700, 20)]) == 20
    assert rounds.energy_per_call([block(100, 100)]) is None
    assert rounds.energy_per_call([block(None, 100)]) is None


# --- edges and neighbours ------------------------------------------------------------------------

MATMUL = kernels.operation("matmul")


def test_edges_are_fitted_to_the_limits_of_a_kernel():
    odd = MATMUL.problem("130x67x19", lda=21, ldb=67, ldc=70)
    edge = EdgeProblem(odd, (("A", 4), ("C", 4)))
    fitted = fit(MATMUL, edge, (Limit("lda", "multiple_of", 4), Limit("M", "at_most", 1000)))
    assert fitted.problem.lda == 24
    assert fitted.problem.ldb == 67
    assert fitted.offsets == edge.offsets
    assert fit(MATMUL, edge, ()) == edge
    assert fit(MATMUL, edge, (Limit("M", "at_most", 100),)) is None
    assert fit(MATMUL, edge, (Limit("K", "equal", 20),)) is None
    aligned = fit(MATMUL, edge, (Limit("A", "multiple_of", 16),))
    assert dict(aligned.offsets) == {"A": 0, "C": 4}


@pytest.mark.parametrize("spec", kernels.SPECS, ids=lambda s: f"{s.operation.name}-{s.name}")
def test_every_edge_can_be_had_with_the_default_config(spec):
    """Fitted to its limits, and launched with the plan of the problem that it was made for."""
    for dtype in spec.operation.dtypes:
        problem = taken(spec, DEVICE, dtype, spec.operation.layouts[0])
        if problem is None:
            continue
        config = spec.default(problem, DEVICE)
        limits = spec.limits(config, problem)
        edges = spec.operation.edges(problem)
        fitted = [fit(spec.operation, edge, limits) for edge in edges]
        if spec in PORTABLE:
            assert all(fitted)
        assert any(fitted)
        for edge in filter(None, fitted):
            assert edge.problem.dtype == dtype
            assert all(limit.holds(edge.problem.names) for limit in limits)
            plan = spec.symbolic_plan(config, problem).bind(
                {**edge.problem.names, "SM_COUNT": DEVICE.sm_count}
            )
            assert plan.launches


def test_edges_of_an_operation_that_lists_none():
    edges = FAULTY.operation.edges(FAULTY.operation.problem("2^20"))
    sizes = {edge.problem.N for edge in edges}
    assert 1 in sizes
    assert len(sizes) >= 3


def test_edges_keep_the_class_of_the_problem():
    problem = MATMUL.problem("64x64x64", dtype="bf16", layout="tn", beta=1, align=4)
    for edge in MATMUL.edges(problem):
        assert (edge.problem.dtype, edge.problem.layout) == ("bf16", "tn")
        assert (edge.problem.beta, edge.problem.align) == (1, 4)
        assert all(offset % 4 == 0 for _, offset in edge.offsets)
    ks = {edge.problem.K for edge in MATMUL.edges(problem)}
    assert {0, 1} <= ks
    assert {edge.problem.B for edge in MATMUL.edges(problem)} == {1, 2}
    assert 1 in {edge.problem.M for edge in MATMUL.edges(problem)}


def test_neighbours_are_a_quarter_away():
    problem = MATMUL.problem("2x4096x2048x1000", beta=1, lda=1003)
    found = neighbour(MATMUL, problem, 1.25)
    assert dict(found.sizes) == {"B": 2, "M": 5120, "N": 2560, "K": 1250}
    assert (found.beta, found.lda) == (1, 1250)


def test_the_worst_case_over_neighbours():
    with scripted.station({"us": {"32": 50.0, "64": 55.0}}) as card:
        worst = worst_cases(
            [finalist(32), finalist(64)], station=card, setup=scripted.setup(),
            problem=PROBLEM, operation=FAULTY.operation, device=DEVICE, seed=0,
        )  # fmt: skip
    assert worst == pytest.approx({"trial 32": 1.0, "trial 64": 1.1})

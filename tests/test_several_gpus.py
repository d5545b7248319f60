# SPDX-License-Identifier: Apache-2.0
"""One search on several GPUs of a host: by evaluators that take their time, and by workers that
play GPUs by a script."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections import Counter

import pytest
import scripted
import study_hosts
from scripted import DEVICE, PROBLEM, candidate
from store_writer import url
from test_gpu_session import A10, H200, found, tune  # noqa: F401 (a fixture)
from test_hosts import can_serve, place, server  # noqa: F401 (fixtures)
from test_tuner import FakeCompiler, FakeEvaluator, run, took, total_us, with_space

from tunegen import perfmodel, replay, search, tuner
from tunegen.errors import DeviceError, UsageError
from tunegen.runner import evaluator as module
from tunegen.runner.evaluator import Fastest, GpuEvaluator
from tunegen.session import cards, gpu
from tunegen.session.gpu import check_devices, choose_gpus, devices_text
from tunegen.store import Study, list_studies

TRIAL_SECONDS = 0.05


@pytest.fixture(scope="module")
def recorded():
    return replay.load_space(study_hosts.SPACE)


class Slow:
    """A GPU that takes its time, and that nobody else may ask meanwhile."""

    needs_kernels = False
    evidence = "measured"

    def __init__(self, recorded, seconds=TRIAL_SECONDS, then=lambda tried: None):
        self._replay = replay.ReplayEvaluator(recorded.outcomes)
        self._seconds, self._then = seconds, then
        self._busy = threading.Lock()
        self.tried = []

    def evaluate(self, candidate, problem):
        assert self._busy.acquire(blocking=False), "one at a time"
        with self._busy_until_done():
            self.tried.append(candidate.config)
            self._then(self.tried)
            time.sleep(self._seconds)
            return self._replay.evaluate(candidate, problem)

    def _busy_until_done(self):
        class Done:
            def __enter__(done):
                pass

            def __exit__(done, *exception):
                self._busy.release()

        return Done()


def go(recorded, evaluators, trials, *, seconds=None, study=None, **options):
    known = study_hosts.contender(recorded)
    first, *beside = evaluators
    keep = (lambda trial, kernels: study.add(trial, {})) if study is not None else None
    return tuner.tune(
        recorded.problem, [known], evaluator=first, beside=beside, compiler=None,
        device=perfmodel.default_chip("sm_90"), search=search.make_search("portfolio", [known], 0),
        budget=tuner.Budget(trials, seconds), threads=2, study=study, keep=keep,
        past=study.trials() if study is not None else (), **options,
    )  # fmt: skip


# --- the loop ------------------------------------------------------------------------------------


def test_two_try_almost_twice_as_many_in_a_second(recorded):
    """The best of three, since other tests take processor time from either."""

    def rate(count):
        evaluators = [Slow(recorded) for _ in range(count)]
        done = go(recorded, evaluators, 60)
        tried = [config for each in evaluators for config in each.tried]
        assert len(set(tried)) == len(tried) == len(done.trials) == 60
        assert sorted(t.number for t in done.trials) == list(range(60))
        assert min(len(each.tried) for each in evaluators) > 20
        return 60 / done.seconds

    ratios = []
    while not ratios or (len(ratios) < 3 and max(ratios) < 1.9):
        ratios.append(rate(2) / rate(1))
    assert max(ratios) >= 1.9, ratios


@pytest.mark.parametrize("count", [2, 3])
def test_several_share_a_study(recorded, place, count):  # noqa: F811
    with Study.open(place, study_hosts.key_of(recorded)) as study:
        evaluators = [Slow(recorded, 0.01) for _ in range(count)]
        done = go(recorded, evaluators, 50, study=study)
        assert [t.number for t in done.trials] == list(range(50))
        assert (done.elsewhere, done.left_to, done.lost) == (0, "", {})
        assert study._connection.rows("SELECT what FROM tunegen_claims") == []
        # The same again does nothing, and more goes on.
        assert go(recorded, evaluators, 50, study=study).past == 50
        assert len(go(recorded, evaluators, 55, study=study).trials) == 55
    tried = Counter(config for each in evaluators for config in each.tried)
    assert set(tried.values()) == {1}
    (info,), _ = list_studies(place)
    assert {s.trial.config for s in info.trials} == set(tried)


def test_two_hosts_with_two_gpus_each(recorded, place):  # noqa: F811
    evaluators = [[Slow(recorded, 0.02) for _ in range(2)] for _ in range(2)]
    done = []

    def host(number):
        with Study.open(place, study_hosts.key_of(recorded)) as study:
            done.append(go(recorded, evaluators[number], 80, study=study))

    hosts = [threading.Thread(target=host, args=(number,)) for number in range(2)]
    for each in hosts:
        each.start()
    for each in hosts:
        each.join()
    tried = [config for pair in evaluators for each in pair for config in each.tried]
    assert len(set(tried)) == len(tried) == 80
    assert min(len(each.tried) for pair in evaluators for each in pair) > 5
    assert sorted(bool(run.left_to) for run in done) == [False, True]
    last = next(run for run in done if not run.left_to)
    assert {t.config for t in last.trials} == set(tried)
    assert 0 < last.elsewhere + last.past < 80


def test_the_search_is_as_good_as_that_of_one(recorded):
    done = go(recorded, [Slow(recorded, 0.001) for _ in range(2)], 150)
    assert recorded.best_us / done.best.outcome.median_us > 0.97


def gone(after):
    def then(tried):
        if len(tried) > after:
            raise DeviceError("the GPU has fallen off the bus")

    return then


@pytest.mark.parametrize("after", [0, 5])
def test_one_that_is_lost_does_not_stop_the_others(recorded, after):
    well = Slow(recorded, 0.005), Slow(recorded, 0.005)
    lost = Slow(recorded, 0.005, gone(after))
    done = go(recorded, (well[0], lost, well[1]), 40)
    assert done.lost == {1: "the GPU has fallen off the bus"}
    assert len(lost.tried) == after + 1
    assert len({t.config for t in done.trials}) == len(done.trials) == 40
    assert lost.tried[-1] in well[0].tried + well[1].tried, "somebody else tries it"
    assert done.stop_reason == "budget"


def test_the_last_one_makes_the_rest_alone(recorded):
    done = go(recorded, (Slow(recorded, 0.001), Slow(recorded, 0.001, gone(3))), 30)
    assert (len(done.trials), set(done.lost)) == (30, {1})


def test_without_the_first_there_is_nobody_to_decide(recorded):
    with pytest.raises(DeviceError, match="fallen off the bus"):
        go(recorded, (Slow(recorded, 0.001, gone(3)), Slow(recorded, 0.001)), 30)
    assert not [t for t in threading.enumerate() if t.name.startswith("tunegen-evaluator")]


def test_what_is_wrong_with_an_evaluator_itself_is_raised(recorded):
    def broken(tried):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go(recorded, (Slow(recorded, 0.001), Slow(recorded, 0.001, broken)), 30)


def test_the_same_code_is_tried_once_even_at_the_same_time():
    """Sixteen configurations, of which two each have one cubin and one plan, and three that would
    try them."""
    spec = with_space(
        ("THREADS", (32, 64, 128, 256), ""), ("ELEMENTS", (1, 2), ""), ("UNROLL", (1, 2), "")
    )
    lock, tried = threading.Lock(), []

    def cubin(source):
        return source.text.split("THREADS = ")[1].split(",")[0].encode()

    class Watching(FakeEvaluator):
        def evaluate(self, candidate, problem):
            with lock:
                tried.append(candidate.kernels[0].cubin)
            time.sleep(0.02)
            return took(100.0)

    result = run(16, spec=spec, compiler=FakeCompiler(cubin), sampler="random",
                 evaluator=Watching(), beside=(Watching(), Watching()))  # fmt: skip
    assert len(result.trials) == 16
    assert Counter(tried) == {b"32": 2, b"64": 2, b"128": 2, b"256": 2}
    assert result.repeats == 8


def test_failures_need_no_evaluator():
    compiler = FakeCompiler(rejection=lambda source: "spills")
    nobody = FakeEvaluator(lambda config: pytest.fail("tried"))
    result = run(20, compiler=compiler, evaluator=nobody, beside=(nobody,))
    assert result.counts == {"rejected": 20}


def test_when_time_is_up_what_is_being_tried_is_kept(recorded, tmp_path):
    with Study.open(url(tmp_path / "s.db"), study_hosts.key_of(recorded)) as study:
        evaluators = [Slow(recorded, 0.2), Slow(recorded, 0.2)]
        done = go(recorded, evaluators, 500, seconds=0.5, study=study)
        assert study._connection.rows("SELECT what FROM tunegen_claims") == []
    assert done.stop_reason == "time"
    assert len(done.trials) == sum(len(each.tried) for each in evaluators) < 20
    assert 0.5 <= done.seconds < 1.5


def test_ctrl_c_leaves_nobody_at_work(recorded, tmp_path):
    def interrupt(tried):
        if len(tried) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with Study.open(url(tmp_path / "s.db"), study_hosts.key_of(recorded)) as study:
        evaluators = [Slow(recorded, 0.02), Slow(recorded, 0.02, interrupt)]
        done = go(recorded, evaluators, 500, study=study)
        assert study._connection.rows("SELECT what FROM tunegen_claims") == []
        assert len(study.trials()) >= len(done.trials) >= 3
    assert done.stop_reason == "interrupted"
    assert not [t for t in threading.enumerate() if t.name.startswith("tunegen-evaluator")]


def test_more_is_asked_for_where_more_can_be_tried():
    """So that there is something for all of them."""
    counts = {}
    for beside in (0, 1):
        gate = threading.Event()

        class Waiting(FakeEvaluator):
            def evaluate(self, candidate, problem, gate=gate):
                assert gate.wait(20)
                return took(total_us(candidate.config))

        compiler = FakeCompiler()
        threading.Timer(0.4, gate.set).start()
        started = []
        threading.Timer(0.3, lambda c=compiler, s=started: s.append(len(c.started))).start()
        run(40, compiler=compiler, evaluator=Waiting(), beside=[Waiting()] * beside)
        counts[beside] = started[0]
    assert counts == {0: tuner.LOOK_AHEAD, 1: 2 * tuner.LOOK_AHEAD}


# --- times of several ----------------------------------------------------------------------------


@pytest.fixture
def judges(tmp_path, monkeypatch):
    """Evaluators on scripted GPUs that differ, made comparable by the default."""
    monkeypatch.setattr(module, "TRY_FLOOR_SECONDS", 0.7)
    stations = []

    def make(*scripts):
        fastest = Fastest()
        made = []
        for number, script in enumerate(scripts):
            station = scripted.station({"log": str(tmp_path / "log"), **script})
            stations.append(station)
            opened = station.open()
            station.prepare(scripted.setup()(PROBLEM, inputs="normal", seed=0, sets=2), 60.0)
            judge = GpuEvaluator(station, DEVICE, fastest=fastest, gpu=number)
            card = dataclasses.replace(H200, index=number)
            made.append((cards.Card(card, station, opened), judge))
        cards.align([c for c, _ in made], [j for _, j in made], candidate(128), PROBLEM)
        return [judge for _, judge in made]

    yield make
    for station in stations:
        station.close()


def test_times_of_gpus_that_differ_are_comparable(judges):
    """The second is 3 % slower and the third 2 % faster."""
    made = judges({}, {"scale": 1.03}, {"scale": 0.98})
    for threads in (64, 256, 1024):
        outcomes = [judge.evaluate(candidate(threads), PROBLEM) for judge in made]
        raw = [outcome.median_us for outcome in outcomes]
        assert raw[1] / raw[0] == pytest.approx(1.03)
        assert raw[2] / raw[0] == pytest.approx(0.98)
        steady = [outcome.measurement.steady_us for outcome in outcomes]
        assert max(steady) / min(steady) < 1.0002
        assert [o.measurement.details["gpu"] for o in outcomes] == [0, 1, 2]


def test_what_one_has_found_is_known_to_the_others(judges):
    """A race is against the best of all, in the times of the GPU on which it is run."""
    one, other = judges({}, {"scale": 1.25})
    assert (one.best_us, other.best_us) == pytest.approx((228.0, 1.25 * 228.0))
    one.evaluate(candidate(32), PROBLEM)
    assert (one.best_us, other.best_us) == pytest.approx((132.0, 1.25 * 132.0))


def test_a_gpu_on_which_the_default_fails_is_taken_for_as_fast(judges):
    one, other = judges({}, {"refused": [128], "scale": 1.03})
    assert one.best_us == pytest.approx(228.0)
    outcome = other.evaluate(candidate(64), PROBLEM)
    assert outcome.measurement.details["drift"] == 1.0


def test_the_search_is_told_times_without_drift(recorded):
    told = study_hosts.contender(recorded)
    outcome = recorded.outcomes[told.name, recorded.default]
    drifted = dataclasses.replace(
        outcome, measurement=dataclasses.replace(
            outcome.measurement, median_us=outcome.median_us * 1.05, details={"drift": 1.05}
        )
    )  # fmt: skip
    values = []
    for seen in (outcome, drifted):
        asked = search.make_search("random", [told], 0)
        asked.tell(asked.ask(), seen)
        values.append(asked._study.best_value)
    assert values[0] == pytest.approx(values[1])


def test_a_worker_outlives_the_thread_that_needed_it():
    with scripted.station({}) as station:
        thread = threading.Thread(target=station.open)
        thread.start()
        thread.join()
        time.sleep(0.1)
        assert station._worker.alive
        assert station.open() is station.open()
        assert station.restarts == 0


# --- which GPUs ----------------------------------------------------------------------------------

SECOND = dataclasses.replace(H200, index=1, uuid="GPU-2")
THIRD = dataclasses.replace(H200, index=2, uuid="GPU-3")


@pytest.mark.parametrize(
    ("written", "meant", "text"),
    [(None, None, ""), (3, (3,), "3"), ("3", (3,), "3"), ("0,1", (0, 1), "0,1"),
     ("1, 0", (1, 0), "1,0"), ([2, 4], (2, 4), "2,4"), ("all", "all", "all")],
)  # fmt: skip
def test_ways_to_say_which(written, meant, text):
    assert check_devices(written) == meant
    assert devices_text(meant) == text


@pytest.mark.parametrize("written", ["", "x", "0,", "0,x", "-1", "0 1", "0;1", "²", [], "0,1,0"])
def test_what_says_nothing_is_refused(written):
    with pytest.raises(UsageError, match="device="):
        check_devices(written)


@pytest.mark.nvrtc
def test_all_is_what_there_is():
    assert choose_gpus("gpu", devices="all", found=found(H200, SECOND)) == (H200, SECOND)
    assert choose_gpus("auto", devices=(1, 0), found=found(H200, SECOND)) == (SECOND, H200)
    assert choose_gpus("auto", found=found(H200, SECOND)) == (H200,)
    assert choose_gpus("auto", found=found()) == ()
    with pytest.raises(DeviceError, match="--device all: no NVIDIA driver"):
        choose_gpus("auto", devices="all", found=found())
    with pytest.raises(UsageError, match="--device 0,1 means nothing"):
        choose_gpus("model", devices=(0, 1))


# --- whole tunes ---------------------------------------------------------------------------------

WORDS = ("--problem", "4096", "--trials", "11", "--json", "--cold")


@pytest.fixture
def two(tune, monkeypatch):  # noqa: F811
    monkeypatch.setattr(gpu, "find_gpus", lambda: found(H200, SECOND))
    return tune


@pytest.mark.nvrtc
@pytest.mark.parametrize("devices", ["0,1", "all"])
def test_two_gpus_tune_together(two, tmp_path, devices):
    """The second is 4 % slower, which shows in what it has measured, and misleads nobody."""
    storage = f"sqlite:///{tmp_path / 's.db'}"
    script = {"try_seconds": 0.05, "gpus": {"GPU-2": {"scale": 1.04}}}
    words = ("--problem", "2^16", "--trials", "24", "--json", "--cold", "--storage", storage)
    code, out, err = two(*words, "--device", devices, operation="axpy", script=script)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["trials"]["counts"] == {"measured": 24}
    record = result["record"]
    assert f"--device {devices} " in record["command"] + " "
    assert record["config"]["THREADS"] == 64
    assert record["measurement"]["median_us"] == pytest.approx(50.0, rel=0.01), "the first's"
    (info,), _ = list_studies(storage)
    trials = [stored.trial for stored in info.trials]
    assert len({trial.config for trial in trials}) == 24
    gpus = Counter(trial.outcome.measurement.details["gpu"] for trial in trials)
    assert set(gpus) == {0, 1}
    assert min(gpus.values()) >= 8
    times = {64: 50.0, 128: 55.0, 256: 58.0, 512: 52.5, 1024: 70.0, 32: 60.0}
    for trial in trials:
        measurement = trial.outcome.measurement
        speed = 1.04 if measurement.details["gpu"] else 1.0
        expected_us = times[trial.config.THREADS]
        assert measurement.steady_us == pytest.approx(expected_us, rel=0.015)
        assert measurement.median_us == pytest.approx(expected_us * speed, rel=0.015)


@pytest.mark.nvrtc
def test_a_worker_that_dies_is_replaced_and_the_other_gpu_goes_on(two, tmp_path):
    script = {"try_seconds": 0.05, "gpus": {"GPU-2": {"killed_once": str(tmp_path / "killed")}}}
    code, out, err = two(*WORDS, "--device", "0,1", script=script)
    assert code == 0, err
    assert (tmp_path / "killed").exists()
    (result,) = json.loads(out)["results"]
    assert result["trials"]["counts"]["measured"] == 6
    assert result["seconds"]["restarting"] > 0


@pytest.mark.nvrtc
def test_a_gpu_that_is_lost_is_said_to_be(two, monkeypatch):
    """Its worker cannot be replaced."""
    evaluate = GpuEvaluator.evaluate

    def losing(self, candidate, problem):
        if self._gpu == {"gpu": 1} and self.best_us is not None and candidate.config.FAULT:
            raise DeviceError("no worker can open the GPU: it is gone")
        return evaluate(self, candidate, problem)

    monkeypatch.setattr(GpuEvaluator, "evaluate", losing)
    code, out, err = two(*WORDS, "--device", "0,1", script={"try_seconds": 0.05})
    assert code == 0, err
    assert "GPU 1 (NVIDIA H200) was lost, the search went on: no worker can open" in err
    (result,) = json.loads(out)["results"]
    assert sum(result["trials"]["counts"].values()) == 11


OTHER_CLASS = {"gpus": {"GPU-2": {"sm_count": 114}}}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("devices", "there", "script", "code", "texts"),
    [
        ("0,9", (H200, SECOND), {}, 1, ["no GPU 9, there is 0 (NVIDIA H200), 1 (NVIDIA H200)"]),
        ("0,1", (H200, A10), {}, 2, ["GPU 0 is NVIDIA H200", "GPU 1 is NVIDIA A10"]),
        ("all", (A10, H200), {}, 2, ["GPU 1 is NVIDIA A10", "GPU 0 is NVIDIA H200"]),
        ("0,1", (H200, SECOND), OTHER_CLASS, 2,
         ["GPU 0 is NVIDIA H200, sm_count 132", "GPU 1 is NVIDIA H200, sm_count 114"]),
        ("0,1", (H200, SECOND), {"gpus": {"GPU-2": {"cannot_open": "NO_DEVICE"}}}, 1,
         ["GPU 1 (NVIDIA H200): NO_DEVICE"]),
        ("0,1", (H200, SECOND), {"gpus": {"GPU-2": {"others": [17]}}}, 1,
         ["another process computes on GPU 1"]),
        ("0,0", (H200, SECOND), {}, 2, ["device='0,0' names a GPU twice"]),
        ("one", (H200, SECOND), {}, 2, ["device='one': it is an index"]),
        ("all", (), {}, 1, ["--device all: no NVIDIA driver"]),
    ],
)  # fmt: skip
def test_gpus_that_cannot_work_together_are_one_line(
    devices, there, script, code, texts, two, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu, "find_gpus", lambda: found(*there))
    got, out, err = two(*WORDS, "--device", devices, script=script)
    assert (got, out) == (code, ""), err
    assert all(text in err for text in texts), err
    assert err.count("\n") == 1, err
    assert not list(tmp_path.rglob("studies.db"))

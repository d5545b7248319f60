# SPDX-License-Identifier: Apache-2.0
"""The contest with Kernel Tuner (tests/gpu): what it is given of our templates, Kernel Tuner
itself on a backend that computes nothing, and the whole of it on a scripted GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from test_acceptance_scripts import play  # noqa: F401 (a fixture)

from tunegen.model import Config
from tunegen.perfmodel import find_chip

SCRIPTS = Path(__file__).resolve().parent / "gpu"

# What they change for themselves is not for the other tests.
with pytest.MonkeyPatch.context() as undo:
    undo.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    undo.syspath_prepend(SCRIPTS)
    import _kernel_tuner
    import kernel_tuner_contest as contest
    import kernel_tuner_simt as simt48

H200 = find_chip("NVIDIA H200")
CASES = contest.CASES
SETTINGS = contest.Settings(trials=12, seed=0, strategy=contest.STRATEGY)
SMALL = {
    "axpy": dataclasses.replace(CASES["axpy"], sizes="2^16"),
    "matmul_nt": dataclasses.replace(CASES["matmul_nt"], sizes="64x96x128"),
}

needs_kernel_tuner = pytest.mark.skipif(
    importlib.util.find_spec("kernel_tuner") is None, reason="Kernel Tuner is not installed"
)


def template(case):
    job = case.job(H200, SETTINGS, 60.0)
    return _kernel_tuner.Template(job.load(), job.problem, job.device)


# --- what Kernel Tuner is given ------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_is_one_plain_launch(name):
    made = template(CASES[name])
    table = made.space.enumerate()
    assert len(table) > 1000
    for row in np.random.default_rng(0).integers(len(table), size=40).tolist():
        values = dict(table[row])
        source = made.source(values)
        assert "__launch_bounds__" in source
        assert f" {made.name}(" in source
        for parameter, value in values.items():
            assert f"{parameter} = {value}," in source
        assert "#include" not in source
        grid, threads = made.grid(values), made.threads(values)
        assert np.prod(grid) > 0
        assert 32 <= np.prod(threads) <= 1024
        if name == "axpy":
            assert threads == (values["THREADS"], 1, 1)
        assert 0 <= made.shared_bytes(values) <= 48 << 10


def test_only_what_kernel_tuner_cannot_launch_is_left_out():
    for case in (CASES["matmul_nt"], SMALL["matmul_nt"]):
        problem = case.job(H200, SETTINGS, 0.0).problem
        whole = simt48.SIMT.space(problem, H200).enumerate()
        part = simt48.SPEC.space(problem, H200).enumerate()
        columns = whole.columns()
        fits = (simt48.shared_bytes(columns, problem) <= 48 << 10) & (columns.SPLIT_K == 1)
        assert len(part) == np.count_nonzero(fits) < len(whole)
        assert part.row(simt48.SPEC.default(problem, H200)) is not None


def test_the_valid_configurations_are_listed():
    made = template(SMALL["axpy"])
    listed = made.listed()
    assert list(map(Config, listed)) == list(made.space.enumerate())
    assert made.parameters().keys() == listed[0].keys()


def test_arguments_have_the_types_of_the_signature():
    made = template(SMALL["matmul_nt"])
    arguments = made.arguments(seed=3)
    a, b, c = arguments[:3]
    assert (a.shape, b.shape, c.shape) == ((1, 64, 128), (1, 96, 128), (1, 64, 96))
    assert {x.dtype for x in (a, b, c)} == {np.dtype(np.float32)}
    assert a.std() > 0.9
    assert [type(x) for x in arguments[3:]] == [np.int32] * 4 + [np.int64] * 6 + [np.float32] * 2
    assert arguments[3:10] == [1, 64, 96, 128, 128, 128, 96]


def test_a_spec_of_several_launches_does_not_fit():
    problem = SMALL["matmul_nt"].job(H200, SETTINGS, 0.0).problem
    made = _kernel_tuner.Template(simt48.SIMT, problem, H200)
    table = made.space.enumerate()
    split = dict(table[int(np.flatnonzero(table.columns().SPLIT_K > 1)[0])])
    with pytest.raises(_kernel_tuner.Unfit, match="one plain launch"):
        made.plan(split)
    with pytest.raises(_kernel_tuner.Unfit, match="needs the kernels"):
        made.source(split)


# --- Kernel Tuner itself -------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    """A backend for CUDA that says how long a launch takes, and notes what it is given."""
    nvcuda = pytest.importorskip("kernel_tuner.backends.nvcuda")
    observer = pytest.importorskip("kernel_tuner.observers.observer")

    class Clock(observer.BenchmarkObserver):
        def __init__(self, device):
            self.device = device

        def get_results(self):
            return {"time": self.device.ms, "times": [self.device.ms]}

    class Backend(nvcuda.GPUBackend):
        units = MappingProxyType({"time": "ms"})
        launches, instances, made = [], [], []
        fails_at = None

        def __init__(self, device=0, iterations=7, compiler_options=None, observers=None):
            self.max_threads, self.name, self.env = 1024, "none", {}
            self.options, self.iterations = compiler_options, iterations
            self.observers = [*(observers or []), Clock(self)]
            Backend.made.append(self)

        def ready_argument_list(self, arguments):
            return arguments

        def compile(self, instance):
            self.names = list(instance.params)  # later it has the result as well
            Backend.instances.append(instance)
            if len(Backend.instances) == Backend.fails_at:
                raise RuntimeError("NVRTC error: something is wrong")
            self.ms = 1.0 + len(set(instance.params.values())) + instance.threads[0] / 1e4
            return instance

        def copy_shared_memory_args(self, smem_args):
            self.shared_bytes = smem_args["size"]

        def run_kernel(self, func, gpu_args, threads, grid, stream=None):
            config = {name: func.params[name] for name in self.names}
            Backend.launches.append((threads, grid, self.shared_bytes, config, gpu_args))

        def kernel_finished(self):
            return True

        def nothing(self, *args, **kwargs):
            pass

        start_event = stop_event = synchronize = memset = memcpy_dtoh = memcpy_htod = nothing
        copy_constant_memory_args = copy_texture_memory_args = refresh_memory = nothing

    monkeypatch.setattr(nvcuda, "CudaFunctions", Backend)
    return Backend


@needs_kernel_tuner
@pytest.mark.parametrize("name", SMALL)
def test_kernel_tuner_searches_our_space(backend, name, tmp_path):
    job = SMALL[name].job(H200, SETTINGS, 60.0)
    found = _kernel_tuner.tune(job, tmp_path / "cache.json")
    made = template(SMALL[name])
    table = made.space.enumerate()
    assert found["error"] == ""
    assert found["configs"] == len(table)
    assert 0 < found["evaluations"] <= SETTINGS.trials
    assert found["failed"] == 0
    assert table.row(found["best"]["config"]) is not None
    assert found["best"]["us"] == min(found["course_us"])
    assert found["course_us"][found["best"]["after"] - 1] == found["best"]["us"]

    (device,) = backend.made
    assert (device.options, device.iterations) == (["-std=c++17", "-default-device"], 7)
    # Seven launches of each, and of the first one more time to warm up.
    assert len(backend.launches) == 7 * (found["evaluations"] + 1)
    for threads, grid, shared_bytes, params, arguments in backend.launches:
        assert table.row(params) is not None
        assert (threads, grid) == (made.threads(params), made.grid(params))
        assert shared_bytes == made.shared_bytes(params)
        assert [type(a) for a in arguments] == [type(a) for a in made.arguments(0)]
    for instance in backend.instances:
        assert instance.kernel_string == made.source(instance.params)
        assert instance.name == made.name


@needs_kernel_tuner
def test_the_same_seed_is_the_same_search(backend, tmp_path):
    job = SMALL["axpy"].job(H200, SETTINGS, 60.0)
    first, again = (
        _kernel_tuner.tune(job, tmp_path / f"{name}.json")["course_us"] for name in ("one", "two")
    )
    other = dataclasses.replace(job, seed=1)
    assert first == again
    assert first != _kernel_tuner.tune(other, tmp_path / "three.json")["course_us"]


@needs_kernel_tuner
def test_what_was_found_before_an_error_counts(backend, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    backend.fails_at = 6  # the first is compiled twice
    job = SMALL["axpy"].job(H200, SETTINGS, 60.0)
    found = _kernel_tuner.tune(job, tmp_path / "cache.json")
    assert found["error"] == "RuntimeError: NVRTC error: something is wrong"
    assert found["evaluations"] == 4
    assert found["best"] is not None
    assert contest.of_theirs(found).evaluations == 4


@needs_kernel_tuner
@pytest.mark.nvrtc
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
@pytest.mark.parametrize("name", SMALL)
def test_its_own_backend_compiles_our_source(name, monkeypatch):
    """All of its compile but the loading: options, the name of an extern "C" kernel, PTX."""
    nvcuda = pytest.importorskip("kernel_tuner.backends.nvcuda")
    core = pytest.importorskip("kernel_tuner.core")
    done = nvcuda.driver.CUresult.CUDA_SUCCESS
    loaded = []
    monkeypatch.setattr(
        nvcuda, "driver",
        SimpleNamespace(
            CUresult=nvcuda.driver.CUresult,
            CUfunction_attribute=nvcuda.driver.CUfunction_attribute,
            cuModuleLoadData=lambda image: (done, loaded.append(bytes(image)) or "module"),
            cuModuleGetFunction=lambda module, name: (done, name),
            cuFuncGetAttribute=lambda attribute, function: (done, 32),
        ),
    )  # fmt: skip
    backend = object.__new__(nvcuda.CudaFunctions)
    backend.compiler_options, backend.cc = list(_kernel_tuner.OPTIONS), "90"
    backend.allocations, backend.green_ctx_cache = [], {}
    made = template(SMALL[name])
    values = dict(made.default)
    instance = core.KernelInstance(
        made.name, None, made.source(values), {}, made.threads(values), made.grid(values), values,
        [],
    )  # fmt: skip
    assert backend.compile(instance) == made.name.encode()
    assert b".target sm_90" in loaded[0]
    assert f".entry {made.name}(".encode() in loaded[0]


# --- the contest ---------------------------------------------------------------------------------


def found(seconds, us=1.0, evaluations=12, **config):
    return contest.Found(Config(config or {"THREADS": 64}), us, seconds, evaluations, {})


def judged(own_s, other_s, own_us, other_us, **rest):
    rng = np.random.default_rng(0)
    times = {
        contest.OURS: own_us * (1 + 0.01 * rng.random(50)),
        contest.THEIRS: other_us * (1 + 0.01 * rng.random(50)),
    }
    both = {contest.OURS: found(own_s), contest.THEIRS: found(other_s, THREADS=128, **rest)}
    return contest.judge(CASES["axpy"], SETTINGS, both, times)


def test_both_the_winner_and_the_time_decide():
    assert judged(10, 20, 1.0, 1.0)["passed"]
    assert judged(10, 30, 1.0, 1.5)["passed"]
    slower = judged(10, 30, 1.05, 1.0)
    assert (slower["passed"], slower["as_good"], slower["as_fast"]) == (False, False, True)
    longer = judged(10, 19, 1.0, 1.5)
    assert (longer["passed"], longer["as_good"], longer["as_fast"]) == (False, True, False)
    assert "in 10.0 s of its 19.0: 0.53 (<= 0.5)" in longer["figure"]
    assert "Kernel Tuner ended early" in judged(10, 20, 1.0, 1.0, evaluations=7)["figure"]
    assert "ended early" not in judged(10, 20, 1.0, 1.0)["figure"]
    json.dumps(slower)


def test_nothing_timed_is_a_failure():
    with pytest.raises(contest.Failure, match="timed nothing: RuntimeError: no"):
        contest.of_theirs({"best": None, "error": "RuntimeError: no"})


def test_caches_are_new(tmp_path):
    setting = SimpleNamespace(work=tmp_path)
    variables = contest.cold(setting, "axpy")
    assert {"XDG_CACHE_HOME", "XDG_DATA_HOME", "CUDA_CACHE_PATH"} <= variables.keys()
    assert not any(map(os.path.exists, variables.values()))
    os.makedirs(variables["CUDA_CACHE_PATH"])
    with pytest.raises(contest.Failure, match="nothing would be cold"):
        contest.cold(setting, "axpy")


def test_wheels_are_unpacked(tmp_path):
    with pytest.raises(contest.Failure, match="no wheels in"):
        contest.unpacked(tmp_path, tmp_path / "packages")
    with zipfile.ZipFile(tmp_path / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    packages = contest.unpacked(tmp_path, tmp_path / "packages")
    assert (packages / "one" / "__init__.py").exists()


AXPY = SMALL["axpy"]

# In the place of Kernel Tuner: evaluates two configurations of the job, and is in no hurry.
STAND_IN = """
import json, pathlib, pickle, sys, time
sys.path[:0] = [{scripts!r}]
import _kernel_tuner
job = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
made = _kernel_tuner.Template(job.load(), job.problem, job.device)
config = dict(made.default) | {{"THREADS": {threads}}}
time.sleep(0.1)
pathlib.Path(sys.argv[2]).write_text(json.dumps({{
    "best": {{"config": config, "us": 50.0, "after": 1}}, "error": "", "evaluations": {trials},
    "seconds": {seconds}, "compiling_s": 1.0, "timing_s": 1.0,
}}))
"""


@pytest.fixture
def contested(play, tmp_path, monkeypatch, capsys):  # noqa: F811 (the fixture)
    def run(*words, threads=256, seconds=1e4, trials=4, times=None):
        play(us=times or {"64": 50.0, "128": 60.0, "256": 70.0, "512": 65.0, "1024": 90.0})
        text = STAND_IN.format(
            scripts=str(SCRIPTS), threads=threads, seconds=seconds, trials=trials
        )
        monkeypatch.setattr(contest, "RIVAL", (sys.executable, "-c", text))
        monkeypatch.setattr(contest, "CASES", {"axpy": AXPY})
        monkeypatch.setattr(contest, "CONTEST_SECONDS", 0.5)
        monkeypatch.setattr(contest.importlib.util, "find_spec", lambda name: "there")
        wanted = [
            "--problems", "axpy", "--trials", "4", "--out", str(tmp_path / "out"),
            "--tune", "--finals-seconds 1", *words,
        ]  # fmt: skip
        code = contest.main(wanted)
        rows = json.loads((tmp_path / "out" / contest.RESULTS).read_text())
        return code, rows, capsys.readouterr().out

    return run


@pytest.mark.thorough
def test_the_whole_contest(contested):
    code, (row,), said = contested()
    assert code == 0, said
    assert "PASS axpy" in said
    assert row["passed"]
    assert row["finished"]
    assert row["found"]["ours"]["evaluations"] == 4
    assert row["ratio"]["median"] > 1.05
    assert row["times_us"].keys() == {"ours", "Kernel Tuner", "default"}
    # It is not done again, and a faster winner in less time fails.
    code, rows, said = contested(threads=64, seconds=1.0)
    assert (code, len(rows)) == (0, 1)
    code, (row,), said = contested("--again", threads=64, seconds=1.0)
    assert code == 1
    assert not row["as_fast"]
    assert "FAIL axpy" in said


@pytest.mark.thorough
def test_what_goes_wrong_is_in_the_row(contested):
    code, (row,), said = contested("--budget", "100")
    assert code == 1
    assert "FAIL axpy" in said
    assert "not begun with 100 s left" in row["figure"]
    code, (_, row), said = contested("--tune", "--sampler tpee")
    assert code == 1
    assert "TuneFailed: tunegen exited with 2" in row["figure"]
    assert not row["finished"]


def test_without_kernel_tuner_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(contest.importlib.util, "find_spec", lambda name: None)
    assert contest.main(["--out", str(tmp_path)]) == 2
    assert "Kernel Tuner is not installed" in capsys.readouterr().err


def test_an_unknown_problem_names_the_known(capsys):
    with pytest.raises(SystemExit):
        contest.main(["--problems", "axpi"])
    assert "no problem axpi; there are matmul_nt, axpy, matmul_nn" in capsys.readouterr().err

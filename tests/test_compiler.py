# SPDX-License-Identifier: Apache-2.0
"""Compiling without a driver: the log, the cache, and every spec on every generation of GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import multiprocessing
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from taken import taken
from tiers import usual

from tunegen import codegen, compiler, kernels
from tunegen.compiler import KernelCache, NvrtcCompiler, identity, read_log, rejection
from tunegen.errors import CompileError, ToolkitError
from tunegen.model import ARCHS, Columns, Config, KernelSource, Resources
from tunegen.perfmodel import default_chip

# --- the log -------------------------------------------------------------------------------------

# Printed by NVRTC 13.5 and, word for word but for the times, by 13.0.
CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tunegen_k' for 'sm_90'
ptxas info    : Function properties for tunegen_k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 6.677 ms
"""
SPILLED = """\
ptxas warning : Value of threads per SM for entry k is out of range. .minnctapersm will be ignored
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_75'
ptxas info    : Function properties for k
ptxas         .     288 bytes stack frame, 556 bytes spill stores, 576 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 288 bytes cumulative stack size, 372 bytes cmem[0]
ptxas info    : Compile time = 32.552 ms
"""  # noqa: E501
UNUSED = """\
k.cu(1): warning #177-D: variable "unused_thing" was declared but never referenced
  extern "C" __global__ void k(float* y){ int unused_thing=3; y[0]=1; }
                                              ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.587 ms
"""
# The same kernel by two toolkits, which word what they inject differently.
SERIALIZED_13_5 = """\
ptxas info    : (C7517) wgmma.wait_group is injected in around line 92 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'k' in line 120
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 58 registers, used 0 barriers
ptxas info    : Compile time = 22.231 ms
"""  # noqa: E501
SERIALIZED_13_0 = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 87 by compiler to allow use of registers in GMMA in function 'k'
ptxas info    : (C7517) warpgroup.wait is injected in around line 92 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 58 registers, used 0 barriers
ptxas info    : Compile time = 13.743 ms
"""  # noqa: E501
SETMAXNREG = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : 0 bytes gmem
ptxas info    : Used 10 registers, used 0 barriers
"""  # noqa: E501


def test_a_clean_log_is_all_report():
    resources, warnings = read_log(CLEAN)
    assert resources == Resources(
        registers=10,
        spill_store_bytes=0,
        spill_load_bytes=0,
        stack_bytes=0,
        shared_bytes=1024,
        constant_bytes=0,
        barriers=1,
    )
    assert warnings == ""
    assert rejection(resources, warnings) == ""


def test_spills_and_what_else_the_log_says():
    resources, warnings = read_log(SPILLED)
    assert (resources.registers, resources.stack_bytes) == (64, 288)
    assert (resources.spill_store_bytes, resources.spill_load_bytes) == (556, 576)
    assert resources.constant_bytes == 372
    assert warnings == SPILLED.splitlines()[0]
    reason = rejection(resources, warnings)
    assert "556" in reason
    assert "576" in reason


def test_a_front_end_warning_is_kept_whole():
    resources, warnings = read_log(UNUSED)
    assert resources.registers == 8
    assert warnings.splitlines() == [line for line in UNUSED.splitlines()[:5] if line]
    assert rejection(resources, warnings) == "", "a warning is no reason not to run"


@pytest.mark.parametrize("log", [SERIALIZED_13_5, SERIALIZED_13_0, SETMAXNREG])
def test_what_does_not_run_as_written_is_rejected(log):
    resources, warnings = read_log(log)
    assert rejection(resources, warnings)
    first = log.index("(C75")
    assert "bytes gmem" not in warnings
    assert log[first : first + 7] in warnings


def test_other_prefixes_read_the_same():
    """Prefixes are the toolkit's business: another one, or none, changes no count."""
    for prefix in ("", "ptxas info    : ", "nvlink info    : "):
        log = CLEAN.replace("ptxas info    : ", prefix).replace("ptxas         . ", prefix)
        assert read_log(log) == read_log(CLEAN)


def test_a_few_spilled_bytes_pass():
    def spilling(stores, loads):
        return Resources(32, stores, loads, 0, 0)

    limit = compiler.SPILL_LIMIT_BYTES
    assert not rejection(spilling(limit // 2, limit - limit // 2), "")
    assert rejection(spilling(limit // 2, limit - limit // 2 + 1), "")


# --- one kernel ----------------------------------------------------------------------------------


def source(text="", *, name="k"):
    text = (
        text or f'extern "C" __global__ void tunegen_{name}(float* y) {{ y[threadIdx.x] = 1; }}\n'
    )
    return KernelSource(name, f"tunegen_{name}", text, codegen.source_digest(text))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_compiles(arch):
    kernel = NvrtcCompiler().compile(source(), arch)
    assert kernel.target == arch
    assert f".target {arch}" in kernel.ptx.decode()
    assert ".entry tunegen_k(" in kernel.ptx.decode()
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.resources.registers > 0
    assert (kernel.warnings, kernel.rejection, kernel.from_cache) == ("", "", False)
    assert kernel.nvrtc == compiler.nvrtc_version()


@pytest.mark.nvrtc
def test_a_suffix_is_part_of_the_target():
    text = (
        'extern "C" __global__ void tunegen_k() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    )
    assert ".target sm_90a" in NvrtcCompiler().compile(source(text), "sm_90a").ptx.decode()
    with pytest.raises(CompileError, match="sm_90"):
        NvrtcCompiler().compile(source(text), "sm_90")


@pytest.mark.nvrtc
def test_what_nvrtc_lacks_is_said_with_its_line_and_nothing_is_kept(tmp_path):
    text = 'extern "C" __global__ void tunegen_k(float* y) {\n  y[0] = __no_such_call(3.0f);\n}\n'
    cache = KernelCache(tmp_path)
    with pytest.raises(CompileError) as caught:
        NvrtcCompiler(cache).compile(source(text), "sm_90")
    error = caught.value
    assert "k.cu(2): error" in error.message
    assert "__no_such_call" in error.message
    assert "y[0] = __no_such_call(3.0f);" in error.log
    assert "\n" not in error.message
    assert cache.report().kernels == 0


@pytest.mark.nvrtc
def test_an_unknown_target_is_an_error():
    with pytest.raises(CompileError, match="sm_70"):
        NvrtcCompiler().compile(source(), "sm_70")


@pytest.mark.nvrtc
def test_images_for_shipping_name_no_place_and_are_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernel = NvrtcCompiler().compile(source(), "sm_90")
    again = NvrtcCompiler().compile(source("// said\n" + source().text), "sm_90")
    for image in (kernel.ptx, kernel.cubin):
        assert str(tmp_path).encode() not in image
    assert again.cubin == kernel.cubin, "a comment is not in the image"
    lined = NvrtcCompiler(KernelCache(tmp_path / "c"), lineinfo=True).compile(source(), "sm_90")
    assert b".loc" in lined.ptx
    assert b".loc" not in kernel.ptx
    assert not (tmp_path / "c").exists(), "images with line information are not cached"


@pytest.mark.nvrtc
def test_threads_compile_side_by_side(tmp_path):
    """What each thread gets is what one thread gets alone."""
    sources = [source(name=f"k{number}") for number in range(12)]
    nvrtc = NvrtcCompiler(KernelCache(tmp_path))
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda one: nvrtc.compile(one, "sm_90"), sources))
    for one, kernel in zip(sources, together, strict=True):
        assert kernel.entry == one.entry
        assert kernel.cubin == NvrtcCompiler().compile(one, "sm_90").cubin


# --- toolkits that do not fit --------------------------------------------------------------------


@pytest.fixture
def fresh():
    """The bindings looked up anew, before the test and after it."""

    def forget():
        compiler._nvrtc.cache_clear()
        compiler.nvrtc_version.cache_clear()

    forget()
    yield
    forget()


def test_bindings_of_another_toolkit_are_named(fresh, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "12.9.1")
    with pytest.raises(ToolkitError) as caught:
        compiler.nvrtc_version()
    assert "cuda-bindings 12.9.1" in caught.value.message
    assert "13" in caught.value.message
    assert "cuda-bindings==13.*" in caught.value.hint


def test_no_bindings_at_all(fresh, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ToolkitError, match="cuda-bindings is not installed") as caught:
        NvrtcCompiler().compile(source(), "sm_90")
    assert "doctor" in caught.value.hint


def test_bindings_without_the_library(fresh, monkeypatch):
    class Bindings:
        @staticmethod
        def nvrtcVersion():
            raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(importlib, "import_module", lambda name: Bindings)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "13.3.1")
    with pytest.raises(ToolkitError, match=r"libnvrtc\.so\.13") as caught:
        compiler.nvrtc_version()
    assert "nvidia-cuda-nvrtc" in caught.value.hint


@pytest.mark.nvrtc
def test_the_version_tells_patch_releases_apart():
    """Two of them compile differently, and what one compiled is no hit for the other."""
    version = compiler.nvrtc_version()
    assert re.fullmatch(r"13\.\d+\.\d+", version)
    kernel = NvrtcCompiler().compile(source(), "sm_90")
    assert kernel.nvrtc == version
    assert f"V{version}\n".encode() in kernel.ptx


@pytest.mark.nvrtc
def test_a_version_without_a_patch_still_does(fresh, monkeypatch):
    monkeypatch.setattr(compiler, "_RELEASE", re.compile(b"no such line"))
    assert re.fullmatch(r"13\.\d+", compiler.nvrtc_version())


# --- identity and cache --------------------------------------------------------------------------


def test_identity_is_source_entry_target_and_options(monkeypatch):
    one = source("int a;\n")
    seen = {
        identity(one, "sm_90"),
        identity(one, "sm_90a"),
        identity(replace(one, entry="tunegen_other"), "sm_90"),
        identity(source("int b;\n"), "sm_90"),
    }
    assert identity(source("// said\nint a;\n"), "sm_90") in seen, "comments are not"
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math"))
    seen.add(identity(one, "sm_90"))
    assert len(seen) == 5


@pytest.fixture
def counted(monkeypatch):
    """How often NVRTC really ran."""
    calls = []
    real = compiler._compile

    def count(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(compiler, "_compile", count)
    return calls


def only_file(folder):
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


@pytest.mark.nvrtc
def test_the_second_time_is_a_hit_with_the_same_content(tmp_path, counted):
    nvrtc = NvrtcCompiler(KernelCache(tmp_path))
    first = nvrtc.compile(source(), "sm_90")
    reworded = source("// said\n" + source().text)
    second = NvrtcCompiler(KernelCache(tmp_path)).compile(reworded, "sm_90")
    assert len(counted) == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert replace(second, from_cache=False) == first


@pytest.mark.nvrtc
def test_each_part_of_the_key_misses(tmp_path, counted, monkeypatch):
    nvrtc = NvrtcCompiler(KernelCache(tmp_path))
    nvrtc.compile(source(), "sm_90")
    nvrtc.compile(source(), "sm_80")
    nvrtc.compile(source(source().text.replace("= 1", "= 2")), "sm_90")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.99")
    assert nvrtc.compile(source(), "sm_90").nvrtc == "13.99"
    assert len(counted) == 4
    assert KernelCache(tmp_path).report().kernels == 4


@pytest.mark.nvrtc
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, counted):
    cache = KernelCache(tmp_path)
    kernel = NvrtcCompiler(cache).compile(source(), "sm_90")
    path = only_file(tmp_path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"\0" * 100,
        whole[:-12],
        whole[:200],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole.replace(b'"registers"', b'"registerz"'),
        whole.replace(b'"ptx_bytes"', b'"ptx_lines"'),
        b"{}\n" + whole.partition(b"\n")[2],
        b"[1]\n" + whole.partition(b"\n")[2],
        b"7\n" + whole.partition(b"\n")[2],
    ):
        path.write_bytes(damaged)
        assert cache.report().damaged == 1
        counted.clear()
        again = NvrtcCompiler(cache).compile(source(), "sm_90")
        assert len(counted) == 1, damaged[:40]
        assert again.cubin == kernel.cubin
        assert cache.report().damaged == 0
        assert NvrtcCompiler(cache).compile(source(), "sm_90").from_cache


def write_many(folder, kernel, times):
    for _ in range(times):
        KernelCache(folder).put("ab" * 32, kernel)


@pytest.mark.nvrtc
def test_writers_at_once_leave_one_whole_file(tmp_path):
    """Readers see nothing or the whole kernel, whoever is writing."""
    kernel = NvrtcCompiler().compile(source(), "sm_90")
    kernel = replace(kernel, cubin=kernel.cubin * 50)  # more than one write call's worth
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, kernel, 60)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        found = KernelCache(tmp_path).get("ab" * 32)
        if found is not None:
            reads += 1
            assert replace(found, from_cache=False) == kernel
        elif reads:
            pytest.fail("a whole file was replaced by a torn one")
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert only_file(tmp_path).suffix == ".kernel"


@pytest.mark.nvrtc
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    kernel = NvrtcCompiler().compile(source(), "sm_90")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    KernelCache(tmp_path).put("ab" * 32, kernel)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.nvrtc
def test_a_cache_that_cannot_be_written_is_none(tmp_path, counted):
    (tmp_path / "file").write_text("not a folder")
    compile_kernel = NvrtcCompiler(KernelCache(tmp_path / "file" / "kernels")).compile
    first, second = (compile_kernel(source(), "sm_90") for _ in range(2))
    assert first.cubin == second.cubin
    assert not second.from_cache
    assert len(counted) == 2
    assert KernelCache(tmp_path / "file" / "kernels").report().kernels == 0


def test_a_cache_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    for ask in (KernelCache(tmp_path).report, KernelCache(tmp_path).clear):
        with pytest.raises(ToolkitError, match="cannot be read: Permission denied") as caught:
            ask()
        assert str(tmp_path) in caught.value.message
        assert "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.nvrtc
def test_report_and_clear(tmp_path):
    cache = KernelCache(tmp_path / "new")
    assert (cache.report().kernels, cache.report().bytes) == (0, 0)
    for arch in ("sm_80", "sm_90"):
        NvrtcCompiler(cache).compile(source(), arch)
    (tmp_path / "new" / "note.txt").write_text("not ours")
    killed = next((tmp_path / "new").glob("??")) / "half.tmp"
    killed.write_text("what a killed writer leaves")
    report = cache.report()
    assert report.folder == str(tmp_path / "new")
    assert report.kernels == 2
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kernel"))
    assert cache.clear() == report
    assert cache.report().kernels == 0
    assert not killed.exists()
    assert (tmp_path / "new" / "note.txt").exists(), "only kernels are removed"


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelCache().folder == tmp_path / "tunegen" / "kernels"


# --- every spec ----------------------------------------------------------------------------------

GENERATIONS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
SAMPLES = 4  # configs per spec and generation; chosen for the time that they take
SEED = 20


def some_problem(spec, chance, device):
    """A problem of a random dtype and layout, with sizes that divide and sizes that do not; one
    that the spec takes, if that is found soon."""
    operation = spec.operation
    for _ in range(20):
        numbers = tuple(chance.choice((96, 1000, 1024, 4097)) for _ in operation.axes)
        if spec.name == "gemv":
            numbers = (chance.choice((1, 5, 16)), *numbers[1:])
        layout = chance.choice(operation.layouts) or None
        dtype = chance.choice(operation.dtypes)
        problem = operation.problem(numbers, dtype=dtype, layout=layout)
        if not spec.refuses(problem, device):
            break
    return problem


def random_columns(space, count, seed):
    """Random points of the space, its constraints left out."""
    generator = np.random.default_rng(seed)
    return {
        parameter.name: generator.choice(np.array(parameter.values, dtype=np.int64), count)
        for parameter in space.parameters
    }


def violations(constraints, columns, count):
    """For each constraint a mask of the points that break it."""
    point = Columns(columns)
    with np.errstate(all="ignore"):  # as a space does: "zero, or a divisor of" divides by zero
        return [
            ~np.broadcast_to(np.asarray(constraint.holds(point), dtype=bool), (count,))
            for constraint in constraints
        ]


def config_at(columns, row):
    return Config({name: int(column[row]) for name, column in columns.items()})


def valid_configs(spec, problem, device, wanted, seed):
    """Some valid configs, the default first; a large space is not enumerated for it."""
    space = spec.space(problem, device)
    found = [spec.default(problem, device)]
    count = 1 << 17
    if space.cartesian_size <= count:
        table = space.enumerate()
        rows = random.Random(seed).sample(range(len(table)), min(wanted, len(table)))
        found += [table.config(row) for row in rows if table.config(row) != found[0]]
        return found[:wanted]
    attempts = 40
    for attempt in range(attempts):
        columns = random_columns(space, count, [seed, attempt])
        broken = np.logical_or.reduce(violations(space.constraints, columns, count))
        for row in np.flatnonzero(~broken):
            config = config_at(columns, row)
            if config not in found:
                found.append(config)
            if len(found) == wanted:
                return found
    pytest.fail(f"only {len(found)} valid among {attempts * count} configs of {spec.name}")


def compile_all(sources, target):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: NvrtcCompiler().compile(one, target), sources))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", usual(GENERATIONS, "sm_90"))
@pytest.mark.parametrize(
    "spec", kernels.SPECS, ids=lambda spec: f"{spec.operation.name}-{spec.name}"
)
def test_valid_configs_compile_without_a_word(spec, arch):
    """No warning, and no static_assert: what Python calls valid, CUDA does too."""
    chance = random.Random(f"{SEED} {spec.operation.name} {spec.name} {arch}")
    device = default_chip(arch)
    sources = []
    for number in range(2):
        problem = some_problem(spec, chance, device)
        if spec.refuses(problem, device):
            continue
        for config in valid_configs(spec, problem, device, SAMPLES // 2, SEED + number):
            rendered = codegen.render(spec, config, problem, arch)
            sources += [(source, f"{problem} {config}") for source in rendered]
    if not sources:
        pytest.skip(f"{spec.name} takes none of these problems on {arch}")
    compiled = compile_all([source for source, _ in sources], spec.target(arch))
    for kernel, (_, what) in zip(compiled, sources, strict=True):
        assert kernel.warnings == "", what
        assert kernel.resources.registers > 0, what
        assert MEMORY.findall(kernel.ptx.decode()) == [], what


# A declaration of device memory, which a load or an attribute is not.
MEMORY = re.compile(
    r"^(?:\.(?:visible|extern|weak|common) +)*\.(?:global|const) .*;$", re.MULTILINE
)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("declaration", "count"),
    [
        ("constexpr int STEP = 4;", 1),
        ("__constant__ int STEP;", 1),
        ("enum : int { STEP = 4 };", 0),
    ],
)
def test_only_enumerators_take_no_device_memory(declaration, count):
    """NVRTC keeps constants of namespace scope as device variables, in every image and although
    nothing refers to them; hence the enumerations in templates."""
    text = f"{declaration}\n{source().text.replace('= 1', '= STEP')}"
    kernel = NvrtcCompiler().compile(source(text), "sm_90")
    assert len(MEMORY.findall(kernel.ptx.decode())) == count, kernel.ptx.decode()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "spec", kernels.SPECS, ids=lambda spec: f"{spec.operation.name}-{spec.name}"
)
def test_a_broken_structural_constraint_trips_its_static_assert(spec):
    """The sentence in Python and the one in CUDA refuse the same configs."""
    device, operation = default_chip("sm_90"), spec.operation
    found = (taken(spec, device, dtype, operation.layouts[0]) for dtype in operation.dtypes)
    problem = next(problem for problem in found if problem is not None)
    space = spec.space(problem, device)
    columns = neighbours(space, valid_configs(spec, problem, device, 60, SEED))
    count = len(next(iter(columns.values())))
    structural = [constraint for constraint in space.constraints if constraint.structural]
    broken = np.array(violations(structural, columns, count))
    for constraint, mask in zip(structural, broken, strict=True):
        alone = np.flatnonzero(mask & (broken.sum(axis=0) == 1))
        if not len(alone):
            continue  # follows from the others, or the space's values cannot break it
        config = config_at(columns, alone[0])
        sources = codegen.render(spec, config, problem, "sm_90")
        with pytest.raises(CompileError) as caught:
            compile_all(sources, spec.target("sm_90"))
        assert constraint.reason in caught.value.log, config


def neighbours(space, configs):
    """What differs from a config in a parameter or two neighbouring ones, whether valid or not."""
    names = [parameter.name for parameter in space.parameters]
    values = [parameter.values for parameter in space.parameters]
    rows = []
    for config in configs:
        row = [config[name] for name in names]
        for position in range(len(names)):
            for replaced in itertools.product(*values[position : position + 2]):
                rows.append([*row[:position], *replaced, *row[position + len(replaced) :]])
    return dict(zip(names, np.array(rows, dtype=np.int64).T, strict=True))

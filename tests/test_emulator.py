# SPDX-License-Identifier: Apache-2.0
"""The emulator can fail: kernels broken on purpose, each in one way, are each caught by it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable

import emulator
import numpy as np
import pytest
from emulator import call
from emulator.numbers import STORED, load, store

from tunegen.kernels import matmul_naive, matmul_simt
from tunegen.model import (
    Argument,
    Array,
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    Limit,
    Operation,
    Space,
    TensorMap,
    ceil_div,
    formula,
)
from tunegen.resources import data_dir

pytestmark = pytest.mark.emulator

DEVICE = DeviceClass(
    name="test", arch="sm_80", sm_count=3, l2_bytes=1 << 20, shared_bytes_per_sm=100 << 10,
    shared_bytes_per_block=99 << 10, threads_per_sm=1536, blocks_per_sm=16, clock_mhz=1000,
    memory_clock_mhz=1000, memory_gbps=100.0, fp32_per_clock=128, fp64_per_clock=2,
)  # fmt: skip

# y[tile of 64] = x[the same tile, reversed], two tiles a block, through shared memory.
REVERSE = """
//% include "lib/types.cuh"
//% include "lib/config.cuh"
//% include "lib/async_copy.cuh"
//% include "lib/vector.cuh"

extern "C" __global__ void __launch_bounds__(64) tunegen_reverse(
    const fp32* __restrict__ x, fp32* __restrict__ y, long long n) {
  extern __shared__ __align__(16) fp32 stage[];
  const int thread = threadIdx.x;
  for (int tile = 0; tile < 2; ++tile) {
    const long long start = (blockIdx.x * 2ll + tile) * 64;
    const int extent = n - start < 64 ? static_cast<int>(n - start) : 64;
    if (thread < extent) {
      copy_async<4>(stage + thread, x + start + thread);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // written
    if (thread < extent) {
      y[start + thread] = stage[extent - 1 - thread];
    }
    __syncthreads();  // read
  }
}
"""

OPERATION = Operation(
    name="reverse",
    summary="each tile of 64 elements reversed",
    axes=("N",),
    dtypes=("fp32",),
    default_sizes=(256,),
    arrays=lambda p: (
        Array("X", (p.N,), (1,), "fp32", "in"),
        Array("Y", (p.N,), (1,), "fp32", "out"),
    ),
    reference=lambda p, operands, scalars: {
        "Y": np.concatenate(
            [operands["X"][start : start + 64][::-1] for start in range(0, p.N, 64)] or [[]]
        )
    },
    flops=lambda p: 0,
)


def reverse_spec(folder, template, *, limits=(), arguments=("X", "Y", "n"), shared_bytes=256):
    """A spec of the kernel ``template``; ``folder`` becomes its template root."""
    (folder / "reverse.cu.jinja").write_text(template)
    types = {"X": "pointer", "Y": "pointer", "n": "int64"}

    def plan(c, p, s):
        values = {"n": formula(s.N)}
        launch = Launch(
            "reverse",
            (formula(ceil_div(s.N, 128)), 1, 1),
            (64, 1, 1),
            tuple(Argument(name, types[name], values.get(name, 0)) for name in arguments),
            shared_bytes,
        )
        return LaunchPlan((launch,))

    return KernelSpec(
        name="reverse",
        operation=OPERATION,
        summary="",
        space=lambda p, d: Space(()),
        default=lambda p, d: Config({}),
        kernels=lambda c, p: (KernelDefinition("reverse", "reverse.cu.jinja"),),
        plan=plan,
        work=lambda c, p, d: None,
        limits=lambda c, p: limits,
        template_root=folder,
    )


def check(spec: KernelSpec, size: int, seed: int = 0, **options) -> None:
    problem = spec.operation.problem((size,))
    emulator.check(emulator.Case(spec, Config({}), problem, DEVICE), seed, **options)


def changed(template: str, change: tuple[str, str]) -> str:
    assert template.count(change[0]) == 1
    return template.replace(*change)


def faults(run: Callable[[int], None], seeds: int = 4) -> set[str]:
    """The kinds of faults under several seeds: sides of the fence, orders of threads, inputs."""
    found = set()
    for seed in range(seeds):
        try:
            run(seed)
        except emulator.WrongKernel as error:
            found.add(error.kind)
    return found


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_passes(tmp_path, size, seed):
    spec = reverse_spec(tmp_path, REVERSE)
    check(spec, size, seed)
    check(spec, size, seed, integers=True)


def test_static_shared_memory_passes(tmp_path):
    dynamic = "extern __shared__ __align__(16) fp32 stage[];"
    static = changed(REVERSE, (dynamic, "__shared__ fp32 stage[64];"))
    spec = reverse_spec(tmp_path, static, shared_bytes=0)
    for seed in range(4):
        check(spec, 1000, seed)
    spec = reverse_spec(tmp_path, changed(static, (WRITTEN, "")), shared_bytes=0)
    assert faults(lambda seed: check(spec, 1000, seed)) <= {"wrong_value", "unset"}
    assert faults(lambda seed: check(spec, 1000, seed))


STORE = "y[start + thread] = stage[extent - 1 - thread];"
COPY = "copy_async<4>(stage + thread, x + start + thread);"
GUARDED_COPY = f"if (thread < extent) {{\n      {COPY}\n    }}"
DECLARE = "const int thread = threadIdx.x;"
WRITTEN = "__syncthreads();  // written"
READ = "__syncthreads();  // read"

# Broken how: what it is caught as, and what is changed in REVERSE.
BROKEN: dict[str, tuple[set[str], tuple[str, str]]] = {
    "no barrier before reading": ({"wrong_value", "unset"}, (WRITTEN, "")),
    "no barrier before writing again": ({"wrong_value", "unset"}, (READ, "")),
    "no wait": ({"wrong_value", "unset"}, ("copy_async_wait<0>();", "")),
    "no commit": ({"wrong_value", "unset"}, ("copy_async_commit();", "")),
    "waits for too little": (
        {"wrong_value", "unset"},
        ("copy_async_wait<0>();", "copy_async_wait<1>();"),
    ),
    "a barrier that some threads skip": ({"barrier"}, (READ, f"if (thread < extent) {READ}")),
    "a barrier after some threads have left": (
        {"barrier"},
        (DECLARE, f"{DECLARE} if (thread > 9) return;"),
    ),
    "two barriers at once": (
        {"barrier"},
        (READ, f"if (thread % 2) {{\n{READ}\n}} else {{\n{READ}\n}}"),
    ),
    "reads past the end": ({"memory"}, (GUARDED_COPY, COPY)),
    "reads before the start": (
        {"memory", "wrong_value"},
        ("x + start + thread", "x + start + thread - 64"),
    ),
    "writes past the end": (
        {"memory", "stray_write"},
        (f"if (thread < extent) {{\n      {STORE}", f"{{\n      {STORE}"),
    ),
    "writes before the start": ({"memory", "stray_write"}, (STORE, f"{STORE} y[-1] = 0;")),
    "writes far away": ({"memory"}, (STORE, f"{STORE} y[1 << 24] = 0;")),
    "writes to its input": ({"memory"}, (STORE, f"{STORE} const_cast<fp32*>(x)[start] = 0;")),
    "writes past its shared memory": ({"memory"}, (STORE, f"{STORE} stage[64] = 0;")),
    "indexes past a local array": (
        {"undefined"},
        (STORE, "fp32 kept[4] = {}; kept[thread % 5] = 1; y[start + thread] = kept[0];"),
    ),
    "leaves an element out": ({"unset"}, (STORE, f"if (thread != 7) {STORE}")),
    "uses what it never set": ({"wrong_value"}, (STORE, "fp32 sum; y[start + thread] = sum;")),
    "a vector at a scalar's address": (
        {"alignment"},
        (STORE, f"{STORE} store_vector(stage + thread, Vector<fp32, 4>{{}});"),
    ),
    "an asynchronous copy of 16 bytes at 4": (
        {"alignment"},
        (COPY, "copy_async<16>(stage + thread, x + start);"),
    ),
    "an index beyond 32 bits": (
        {"undefined"},
        (STORE, "y[start + thread] = (1 << 30) * (thread + 2);"),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_kernel_is_caught(tmp_path, broken):
    kinds, change = BROKEN[broken]
    spec = reverse_spec(tmp_path, changed(REVERSE, change))
    caught = faults(lambda seed: check(spec, 250, seed))
    assert caught
    assert caught <= kinds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arguments": ("X", "Y")}, "takes ppl, the plan gives pp"),
        ({"shared_bytes": 100 << 10}, "102400 shared bytes"),
    ],
)
def test_a_plan_that_does_not_fit_is_caught(tmp_path, options, message):
    spec = reverse_spec(tmp_path, REVERSE, **options)
    with pytest.raises(emulator.WrongKernel, match=message) as caught:
        check(spec, 250)
    assert caught.value.kind == "plan"


def test_a_kernel_that_never_ends_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(call, "LIMIT_S", 1)
    spec = reverse_spec(tmp_path, changed(REVERSE, (STORE, "volatile int i = 1; while (i) {}")))
    with pytest.raises(emulator.WrongKernel) as caught:
        check(spec, 250)
    assert caught.value.kind == "hang"
    assert "thread (" in str(caught.value)


def test_a_fault_is_told_with_thread_operand_and_line(tmp_path):
    template = changed(REVERSE, (STORE, "y[start + thread] = x[start + thread + (1 << 20)];"))
    with pytest.raises(emulator.WrongKernel, match=r"reverse: thread \(\d+, 0, 0\) of block"):
        check(reverse_spec(tmp_path, template), 250)
    template = changed(REVERSE, (STORE, "y[start + thread] = 1 << (thread + 40);"))
    with pytest.raises(emulator.WrongKernel, match=r"in line \d+: y\[start \+ thread\] = 1 <<"):
        check(reverse_spec(tmp_path, template), 250)


def test_the_process_survives_a_fault(tmp_path):
    """Handlers, stacks and memory are as before: a right kernel passes after a wrong one."""
    (tmp_path / "wrong").mkdir()
    (tmp_path / "right").mkdir()
    wrong = reverse_spec(
        tmp_path / "wrong", changed(REVERSE, (STORE, STORE + "y[1ll << 44] = 0;"))
    )
    right = reverse_spec(tmp_path / "right", REVERSE)
    for seed in range(3):
        with pytest.raises(emulator.WrongKernel):
            check(wrong, 250, seed)
        check(right, 250, seed)


def test_alignment_that_limits_promise_is_given_and_no_more(tmp_path):
    """A kernel that needs aligned operands passes with the limit that says so, and only then."""
    load_16 = "copy_async<16>(stage + thread / 4 * 4, x + start + thread / 4 * 4);"
    template = changed(REVERSE, (COPY, load_16))
    promised = reverse_spec(tmp_path, template, limits=(Limit("X", "multiple_of", 16),))
    for seed in range(6):
        check(promised, 256, seed)
    unpromised = reverse_spec(tmp_path, template)
    assert faults(lambda seed: check(unpromised, 256, seed), 6) == {"alignment"}


def naive(folder, *changes: tuple[str, str]) -> KernelSpec:
    """The shipped naive matmul, broken; a change applies wherever its text stands."""
    text = (data_dir("templates") / "matmul/naive.cu.jinja").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "matmul").mkdir()
    (folder / "matmul/naive.cu.jinja").write_text(text)
    return dataclasses.replace(matmul_naive.SPEC, template_root=folder)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (("i < k;", "i < k / 8 * 8;"), {"wrong_value"}),
        (("i < k;", "i <= k;"), {"memory", "wrong_value"}),
        (("if constexpr (READS_C)", "if constexpr (true)"), {"wrong_value"}),
        (("|| col >= n", ""), {"memory", "stray_write"}),
        (("* ldc", "* n"), {"stray_write", "unset"}),
        (("matrix < batch", "matrix < 1"), {"unset"}),
        (("Accumulator sum = 0", "Element narrow{}; Accumulator sum = 0"), set()),
        (("i * ldb + col", "col * ldb + i"), {"memory", "wrong_value"}),
    ],
)
def test_a_broken_matmul_is_caught(tmp_path, change, kinds):
    spec = naive(tmp_path, change)
    problem = spec.operation.problem("2x21x35x19", dtype="bf16", lda=23, ldb=37, ldc=39)
    case = emulator.Case(spec, spec.default(problem, DEVICE), problem, DEVICE)
    found = faults(lambda seed: emulator.check(case, seed))
    assert bool(found) == bool(kinds)
    assert found <= kinds


def test_low_precision_sums_are_caught(tmp_path):
    """Sums rounded to 16 bits on the way are off by more than the output's own rounding."""
    narrow = (
        "sum = convert<Accumulator>(convert<Element>(sum)); sum += convert<Accumulator>(a_value)"
    )
    spec = naive(tmp_path, ("sum += convert<Accumulator>(a_value)", narrow))
    problem = spec.operation.problem("8x8x512", dtype="bf16")
    case = emulator.Case(spec, spec.default(problem, DEVICE), problem, DEVICE)
    with pytest.raises(emulator.WrongKernel) as caught:
        emulator.check(case)
    assert caught.value.kind == "wrong_value"


@pytest.mark.parametrize(
    ("buffers", "asynchronous", "change"),
    [
        (1, 0, ("if constexpr (SHARED_BUFFERS == 1) __syncthreads();", "")),
        (2, 0, ("\n    __syncthreads();\n", "\n")),
        (3, 1, ("\n    __syncthreads();\n", "\n")),
        (3, 1, ("copy_async_wait<AHEAD - 1>", "copy_async_wait<AHEAD>")),
        (2, 0, ("(k_steps + BLOCK_K - 1) / BLOCK_K", "k_steps / BLOCK_K")),
    ],
)
def test_a_broken_pipeline_is_caught(tmp_path, buffers, asynchronous, change):
    """The shipped main loop without one of its barriers, with too short a wait or tail."""
    shutil.copytree(data_dir("templates"), tmp_path, dirs_exist_ok=True)
    fragment = tmp_path / "lib/shared_pipeline.cuh"
    fragment.write_text(changed(fragment.read_text(), change))
    whole = matmul_simt.SPEC
    problem = whole.operation.problem("16x24x50", dtype="fp32")
    config = next(
        config
        for config in whole.space(problem, DEVICE).enumerate()
        if (buffers, asynchronous) == (config.SHARED_BUFFERS, config.ASYNC_COPY)
    )
    emulator.check(emulator.Case(whole, config, problem, DEVICE))
    broken = dataclasses.replace(whole, template_root=tmp_path)
    with pytest.raises(emulator.WrongKernel) as caught:
        emulator.check(emulator.Case(broken, config, problem, DEVICE))
    assert caught.value.kind in ("wrong_value", "unset")


def test_tensor_maps_are_refused(tmp_path):
    spec = reverse_spec(tmp_path, REVERSE)

    def plan(config, problem, sizes):
        (launch,) = spec.plan(config, problem, sizes).launches
        through_map = Argument("x_map", "tensor_map"), *launch.arguments[1:]
        x_map = TensorMap("x_map", "X", "fp32", ("N",), (), (64,), 0, 0)
        return LaunchPlan(
            (dataclasses.replace(launch, arguments=through_map),), tensor_maps=(x_map,)
        )

    with pytest.raises(emulator.Unemulatable, match=r"reverse takes tensor maps \(x_map\)"):
        check(dataclasses.replace(spec, plan=plan), 100)


def test_inline_ptx_is_refused(tmp_path):
    spec = reverse_spec(tmp_path, changed(REVERSE, (STORE, f'asm("exit;");{STORE}')))
    with pytest.raises(emulator.Unemulatable):
        check(spec, 250)


# --- the emulator's own arithmetic -------------------------------------------------------------

CONVERT = """
//% include "lib/types.cuh"
//% include "lib/config.cuh"
extern "C" __global__ void tunegen_convert(const From* x, To* y, long long n) {
  for (long long i = threadIdx.x; i < n; i += blockDim.x) y[i] = convert<To>(x[i]);
}
"""


def convert(folder, values: np.ndarray, source: str, target: str) -> np.ndarray:
    (folder / "convert.cu.jinja").write_text(CONVERT)
    operation = dataclasses.replace(
        OPERATION,
        arrays=lambda p: (
            Array("X", (p.N,), (1,), source, "in"),
            Array("Y", (p.N,), (1,), target, "inout"),
        ),
    )
    definition = KernelDefinition("convert", "convert.cu.jinja", {"From": source, "To": target})
    arguments = (
        Argument("X", "pointer"), Argument("Y", "pointer"), Argument("n", "int64", len(values)),
    )  # fmt: skip
    plan = LaunchPlan((Launch("convert", (1, 1, 1), (32, 1, 1), arguments),))
    spec = dataclasses.replace(
        reverse_spec(folder, REVERSE),
        operation=operation,
        kernels=lambda c, p: (definition,),
        plan=lambda c, p, s: plan,
    )
    problem = operation.problem((len(values),))
    case = emulator.Case(spec, Config({}), problem, DEVICE)
    empty = np.zeros(len(values), STORED[target])
    return emulator.run(case, {"X": values, "Y": empty})["Y"]


ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def hard_floats() -> np.ndarray:
    """fp32 values near every rounding decision of 16-bit floats, and random bits."""
    random = np.random.default_rng(0)
    halves = [load(ALL_16_BITS.view(STORED[dtype]), dtype) for dtype in ("fp16", "bf16")]
    finite = np.concatenate([h[np.isfinite(h)] for h in halves]).astype(np.float32)
    between = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    exact = np.concatenate([finite, between.astype(np.float32)])
    bits = random.integers(0, 1 << 32, 1 << 15, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate(
            [
                exact,
                np.nextafter(exact, np.float32(np.inf)),
                np.nextafter(exact, np.float32(0)),
                bits,
            ]
        )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_floats_widen_as_numpy_does(tmp_path, dtype):
    stored = ALL_16_BITS.view(STORED[dtype])
    found = convert(tmp_path, stored, dtype, "fp32")
    np.testing.assert_array_equal(load(found, "fp32"), load(stored, dtype))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_floats_narrow_to_nearest_even(tmp_path, dtype):
    values = hard_floats()
    found = load(convert(tmp_path, values, "fp32", dtype), dtype)
    with np.errstate(over="ignore"):
        wanted = load(store(values, dtype), dtype)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(
        np.signbit(found), np.signbit(np.where(np.isnan(values), found, values))
    )


def test_bf16_rounds_to_the_nearest_of_its_neighbours():
    """By definition, not by the bit trick: no other bf16 is nearer, and ties go to even bits."""
    random = np.random.default_rng(1)
    values = random.standard_normal(4096).astype(np.float32)
    values[:2048] = load(random.integers(0x3F00, 0x4000, 2048).astype(np.uint16), "bf16")
    values[:2048] *= np.float32(1 + 2.0**-9)  # near or at the middle
    stored = store(values, "bf16")
    own = np.abs(load(stored, "bf16") - values)
    for step in (-1, 1):
        other = np.abs(load((stored.astype(np.int64) + step).astype(np.uint16), "bf16") - values)
        assert np.all(own <= other)
        assert np.all(stored[own == other] % 2 == 0)

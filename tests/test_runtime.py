# SPDX-License-Identifier: Apache-2.0
"""Launching loaded kernels: what reaches the driver, on what memory and stream, and what never
does. The driver is a stand-in that keeps books (``fake_driver``)."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
import types

import numpy as np
import pytest
from fake_driver import Described, FakeDriver
from hypothesis import given
from hypothesis import strategies as st

from tunegen import kernels
from tunegen.device import driver
from tunegen.errors import DeviceError, PlanError, UsageError
from tunegen.kernels import matmul_naive, matmul_simt, vector_add, vector_axpy, vector_fill
from tunegen.model import (
    SM_COUNT,
    Argument,
    Config,
    Launch,
    LaunchPlan,
    Limit,
    Operand,
    TensorMap,
)
from tunegen.perfmodel import default_chip
from tunegen.runtime import Context, Image, Kernel, Program, streams
from tunegen.runtime.arrays import dense_strides

H200 = default_chip("sm_90")
TYPESTR = {"fp64": "<f8", "fp32": "<f4", "fp16": "<f2", "bf16": "<V2"}
BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
LEGACY = 1


def program_of(spec, config=None, sizes=None, **problem) -> Program:
    """A spec's default for a problem, with made-up code."""
    problem = spec.operation.problem(sizes, **problem)
    config = Config({**spec.default(problem, H200), **(config or {})})
    return Program(
        name=f"{spec.operation.name}_{spec.name}",
        operands=spec.operation.operands(problem),
        scalars=tuple(name for name, _ in spec.operation.scalars),
        problem=problem.names,
        limits=spec.limits(config, problem),
        plan=spec.symbolic_plan(config, problem),
        images=tuple(
            Image(definition.name, definition.entry, definition.name.encode())
            for definition in spec.kernels(config, problem)
        ),
        batch_axis=spec.operation.batch_axis,
        source="cubin for sm_90",
    )


class Array:
    """Device memory as CuPy and Numba describe it; strides in elements, None for no gaps."""

    def __init__(self, address, shape, strides=None, dtype="fp32", **more):
        self.nbytes = int(np.prod(shape)) * BYTES[dtype]
        self.__cuda_array_interface__ = {
            "data": (address, more.pop("readonly", False)),
            "shape": tuple(shape),
            "strides": strides and tuple(step * BYTES[dtype] for step in strides),
            "typestr": TYPESTR[dtype],
            "version": 3,
            **more,
        }


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "call", fake)
    return fake


@pytest.fixture
def load(gpu):
    def loaded(program: Program) -> Kernel:
        gpu.signed_by(program.plan)
        return Kernel(program, Context())

    return loaded


@pytest.fixture
def axpy(load):
    return load(program_of(vector_axpy.SPEC))


@pytest.fixture
def matmul(load):
    return load(program_of(matmul_simt.SPEC))


@pytest.fixture
def limited(load):
    """A matmul with a limit on every leading dimension."""
    kernel = load(program_of(matmul_simt.SPEC, layout="tn"))
    assert {"lda", "ldb", "ldc", "align"} <= {limit.quantity for limit in kernel.program.limits}
    return kernel


def vectors(n=1000, **more):
    return {"x": Array(0x1000, (n,), **more), "y": Array(0x2000, (n,), **more), "a": 2.0}


def matrices(m, n, k, **change):
    found = {"A": Array(0x1000, (m, k)), "B": Array(0x2000, (k, n)), "C": Array(0x3000, (m, n))}
    return found | change


def stored(m, n, k, **change):
    """The operands of layout tn."""
    return matrices(m, n, k, A=Array(0x1000, (k, m))) | change


# --- what reaches the driver ---------------------------------------------------------------------

MATMULS = [matmul_naive.SPEC, matmul_simt.SPEC]


@given(
    st.sampled_from(MATMULS),
    st.sampled_from([("fp32", "nn"), ("fp64", "nt"), ("fp16", "tn"), ("bf16", "tt")]),
    st.sampled_from([1, 3]),
    st.tuples(*[st.integers(1, 3)] * 1, *[st.integers(2, 300)] * 3),
    st.tuples(*[st.integers(0, 2)] * 3),
    st.booleans(),
)
def test_a_matmul_gets_what_its_bound_plan_says(spec, kind, split, sizes, gaps, by_address):
    """Sizes from shapes, or given beside raw addresses, lead to the plan of that very problem."""
    dtype, layout = kind
    config = {"SPLIT_K": split} if spec is matmul_simt.SPEC else {}
    program = program_of(spec, config, "64x64x64", dtype=dtype, layout=layout)
    tight = spec.operation.problem(sizes)
    rows = {"lda": "MK"[layout[0] == "n"], "ldb": "KN"[layout[1] == "n"], "ldc": "N"}
    leading = {
        # Whole vectors, as the limits demand.
        name: (-(-getattr(tight, size) // 8) + gap) * 8
        for (name, size), gap in zip(rows.items(), gaps, strict=True)
    }
    call = spec.operation.problem(sizes, dtype=dtype, layout=layout, **leading)
    addresses = {"A": 0x7F0000001000, "B": 0x7F0000002000, "C": 0x7F0000003000}
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeDriver(sm_count=132)
        patch.setattr(driver, "call", gpu)
        gpu.signed_by(program.plan)
        kernel = Kernel(program, Context())
        if by_address:
            operands = addresses
            names = {name: value for name, value in call.names.items() if name != "align"}
        else:
            operands = {
                array.name: Array(addresses[array.name], array.shape, array.strides, array.dtype)
                for array in spec.operation.arrays(call)
            }
            names = None
        kernel.launch(**operands, alpha=0.5, stream=0x55, sizes=names)

    made_for = spec.operation.problem("64x64x64", dtype=dtype, layout=layout)
    full = Config({**spec.default(made_for, H200), **config})
    expected = spec.symbolic_plan(full, made_for).bind({**call.names, SM_COUNT: 132})
    assert [x.grid for x in gpu.launches] == [x.grid for x in expected.launches]
    assert [x.block for x in gpu.launches] == [x.block for x in expected.launches]
    assert [x.shared_bytes for x in gpu.launches] == [x.shared_bytes for x in expected.launches]
    assert {x.stream for x in gpu.launches} == {0x55}
    workspace = next(iter(gpu.blocks), 0)
    assert bool(workspace) == bool(expected.workspace_bytes)
    scalars = {"alpha": 0.5, "beta": 0.0}
    for launched, launch in zip(gpu.launches, expected.launches, strict=True):
        for value, argument in zip(launched.values, launch.arguments, strict=True):
            wanted = {
                "pointer": lambda a: addresses[a.name],
                "workspace": lambda a: workspace + a.value,
                "fp32": lambda a: scalars[a.name],
                "fp64": lambda a: scalars[a.name],
            }.get(argument.type, lambda a: a.value)(argument)
            assert value == wanted, argument


def test_a_persistent_grid_follows_the_device(load, gpu):
    config = {"BLOCKS_PER_SM": 2, "THREADS": 128}
    kernel = load(program_of(vector_axpy.SPEC, config))
    kernel.launch(x=0x100, y=0x200, a=1.0, sizes={"N": 2**24})
    assert gpu.launches[0].grid == (2 * gpu.sm_count, 1, 1)


def test_dynamic_shared_memory_is_opted_in_to(load, gpu):
    large = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "SHARED_BUFFERS": 3, "PADDING": 0}
    program = program_of(matmul_simt.SPEC, large)
    (asked,) = {launch.shared_bytes for launch in program.plan.launches}
    assert asked > 48 * 1024
    load(program)
    assert gpu.allowed == {"tunegen_matmul_simt": asked}


def test_plain_shared_memory_is_not_asked_for(matmul, gpu):
    assert not gpu.allowed
    assert matmul.program.plan.launches[0].shared_bytes > 0


def test_more_shared_memory_than_a_block_has_is_refused(load, gpu):
    gpu.shared_bytes, gpu.static_bytes = 99 * 1024, 90 * 1024
    with pytest.raises(
        DeviceError, match=r"needs \d+ bytes of shared memory .* has 101376"
    ) as why:
        load(program_of(matmul_simt.SPEC))
    assert "NVIDIA H200" in str(why.value)
    assert not gpu.loaded, "what had been loaded is unloaded"


def test_shapes_are_bound_once(axpy, gpu, monkeypatch):
    bound = []
    bind = LaunchPlan.bind
    monkeypatch.setattr(LaunchPlan, "bind", lambda *a: bound.append(a) or bind(*a))
    for _ in range(3):
        axpy.launch(**vectors(1000))
    axpy.launch(**vectors(1000) | {"x": Array(0x9000, (1000,)), "a": 3.0})
    assert len(bound) == 1
    assert [x.values for x in gpu.launches[2:]] == [
        (0x1000, 0x2000, 1000, 2.0), (0x9000, 0x2000, 1000, 3.0)
    ]  # fmt: skip
    axpy.launch(**vectors(1001))
    assert len(bound) == 2


def test_scalars_are_rounded_to_what_the_kernel_takes(axpy, gpu):
    axpy.launch(**vectors() | {"a": 0.1})
    passed = gpu.launches[0].values[-1]
    assert passed == float(np.float32(0.1))
    assert passed != 0.1


def test_integers_that_do_not_fit_are_refused(load):
    plan = LaunchPlan((Launch("k", (1, 1, 1), (32, 1, 1), (Argument("n", "int32", "N"),)),))
    x = Operand("x", "fp32", "out", ("N",), (1,))
    kernel = load(Program("k", (x,), (), {"N": 1}, (), plan, (Image("k", "tunegen_k", b""),)))
    with pytest.raises(PlanError, match=r"n is 2147483648, more than int32 holds"):
        kernel.launch(x=0x100, sizes={"N": 2**31})


def test_shapes_that_are_remembered_are_bounded(axpy, gpu, monkeypatch):
    monkeypatch.setattr("tunegen.runtime.kernel._BINDINGS", 2)
    for n in (1, 2, 3, 4, 5, 1):
        axpy.launch(**vectors(n))
    assert [x.values[2] for x in gpu.launches] == [1, 2, 3, 4, 5, 1]
    assert len(axpy._bindings) <= 2


def test_threads_do_not_mix_their_arguments(axpy, gpu, monkeypatch):
    launch = FakeDriver.cuLaunchKernelEx

    def slowly(self, *arguments):
        time.sleep(0)  # the driver lets other threads run
        launch(self, *arguments)

    monkeypatch.setattr(FakeDriver, "cuLaunchKernelEx", slowly)

    def work(first):
        for i in range(200):
            address = first + 0x100 * i
            axpy.launch(x=address, y=address + 1, a=float(i), sizes={"N": 100 + first % 7})

    threads = [threading.Thread(target=work, args=(0x100000 * t + t,)) for t in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.launches) == 800
    for launched in gpu.launches:
        x, y, n, a = launched.values
        first = x - 0x100 * int(a)
        assert (y, n) == (x + 1, 100 + first % 7)


# --- operands ------------------------------------------------------------------------------------


def test_a_batch_of_one_may_be_left_out(matmul, gpu):
    matmul.launch(**matrices(16, 8, 4))
    matmul.launch(A=Array(0x1000, (1, 16, 4)), B=Array(0x2000, (4, 8)), C=Array(0x3000, (16, 8)))
    first, second = gpu.launches
    assert first.values == second.values


def test_a_batch_that_only_one_operand_has_is_refused(matmul):
    with pytest.raises(UsageError, match=r"B is 1 in B and 3 in A"):
        matmul.launch(**matrices(16, 8, 4, A=Array(0x1000, (3, 16, 4))))


def test_sizes_that_contradict_each_other_are_refused(matmul):
    with pytest.raises(UsageError, match=r"K is 8 in B and 4 in A") as why:
        matmul.launch(**matrices(16, 8, 4, B=Array(0x2000, (8, 8))))
    assert "B is stored row by row as (B, K, N)" in str(why.value)
    with pytest.raises(UsageError, match=r"M is 16 in A and given as 17"):
        matmul.launch(**matrices(16, 8, 4), sizes={"M": 17})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"M": 16, "N": 8}, "K cannot be told from addresses alone"),
        ({"M": 16, "N": 8, "L": 4}, "unknown size of matmul_simt 'L'"),
        ({"M": 16, "N": 8, "K": -4}, "K is -4, sizes are 0 or more"),
        ({"M": 16, "N": 8, "K": 4.5}, r"K=4.5 is no whole number"),
        ({"M": 16, "N": 8, "K": 8, "lda": 4}, "A has stride 4 along M, less than the 8 elements"),
        ({"M": 16, "N": 8, "K": 4, "align": 16}, "unknown size of matmul_simt 'align'"),
    ],
)
def test_sizes_for_addresses_are_checked(matmul, gpu, sizes, message):
    with pytest.raises(UsageError, match=message):
        matmul.launch(A=0x1000, B=0x2000, C=0x3000, sizes=sizes)
    assert not gpu.launches


def test_addresses_mix_with_arrays(matmul, gpu):
    matmul.launch(**matrices(16, 8, 4, A=0x1000))
    matmul.launch(**matrices(16, 8, 4))
    first, second = gpu.launches
    assert first.values == second.values


def test_another_dtype_is_refused(axpy):
    with pytest.raises(UsageError, match=r"x holds fp16, the kernel takes fp32"):
        axpy.launch(**vectors(dtype="fp16"))
    with pytest.raises(UsageError, match=r"x holds <i4, the kernel takes fp32"):
        axpy.launch(**vectors() | {"x": Array(0x1000, (1000,), typestr="<i4")})


def test_gaps_inside_of_rows_are_refused(axpy, matmul):
    with pytest.raises(UsageError, match=r"x has strides \(2,\): the elements of a row are not"):
        axpy.launch(**vectors() | {"x": Array(0x1000, (1000,), (2,))})
    with pytest.raises(UsageError, match=r"A has strides \(8, 2\)"):
        matmul.launch(**matrices(16, 8, 4, A=Array(0x1000, (16, 4), (8, 2))))
    with pytest.raises(UsageError, match=r"A has stride 0 along M, less than the 4 elements"):
        matmul.launch(**matrices(16, 8, 4, A=Array(0x1000, (16, 4), (0, 1))))
    odd = Array(0x1000, (1000,))
    odd.__cuda_array_interface__["strides"] = (6,)
    with pytest.raises(UsageError, match=r"strides of \(6,\) bytes"):
        axpy.launch(**vectors() | {"x": odd})


def test_matrices_of_a_batch_lie_back_to_back(matmul, gpu):
    batch = {
        "A": Array(0x1000, (3, 16, 4), (64, 4, 1)),
        "B": Array(0x2000, (3, 4, 8)),
        "C": Array(0x3000, (3, 16, 8)),
    }
    matmul.launch(**batch)
    assert len(gpu.launches) == 1
    with pytest.raises(UsageError, match=r"A has stride 128 along B, 64 is needed"):
        matmul.launch(**batch | {"A": Array(0x1000, (3, 16, 4), (128, 4, 1))})


def test_a_stride_that_no_element_crosses_means_nothing(limited, gpu):
    """One row: its leading dimension may be anything, also what a limit on it rules out."""
    for strides in (None, (1, 1), (999, 1), (0, 1)):
        limited.launch(**stored(5, 8, 1, A=Array(0x1000, (1, 5), strides)))
    leading = limited.program.plan.launches[0].arguments
    place = [argument.name for argument in leading].index("lda")
    assert {launched.values[place] for launched in gpu.launches} == {8}
    # In a batch it is what leads from one matrix to the next.
    batch = {"B": Array(0x2000, (2, 1, 8)), "C": Array(0x3000, (2, 5, 8))}
    limited.launch(A=Array(0x1000, (2, 1, 5), (12, 999, 1)), **batch)
    assert gpu.launches[-1].values[place] == 12
    with pytest.raises(PlanError, match=r"needs lda a multiple of 4: lda is 5"):
        limited.launch(A=Array(0x1000, (2, 1, 5)), **batch)


def test_a_stride_within_a_column_means_nothing(matmul, gpu):
    matmul.launch(**matrices(5, 8, 1, A=Array(0x1000, (5, 1), (12, 99))))
    matmul.launch(**matrices(5, 8, 1, A=Array(0x1000, (5, 1), (12, 1))))
    first, second = gpu.launches
    assert first.values == second.values


def test_shapes_that_are_formulas_are_compared(load, gpu):
    arguments = (Argument("x", "pointer"), Argument("pairs", "pointer"))
    plan = LaunchPlan((Launch("k", ("N", 1, 1), (32, 1, 1), arguments),))
    operands = (
        Operand("x", "fp32", "in", ("N",), (1,)),
        Operand("pairs", "fp32", "out", ("N / 2", 2), (2, 1)),
    )
    kernel = load(Program("k", operands, (), {"N": 8}, (), plan, (Image("k", "tunegen_k", b""),)))
    kernel.launch(x=Array(0x100, (12,)), pairs=Array(0x200, (6, 2)))
    assert gpu.launches[0].grid == (12, 1, 1)
    with pytest.raises(UsageError, match=r"pairs has shape \(6, 3\), \(6, 2\) is needed"):
        kernel.launch(x=Array(0x100, (12,)), pairs=Array(0x200, (6, 3)))
    with pytest.raises(UsageError, match=r"N cannot be told from addresses alone"):
        kernel.launch(x=0x100, pairs=Array(0x200, (6, 2)))


@pytest.mark.parametrize("layout", ["nt", "tt"])
def test_a_transposed_view_is_turned_back(load, gpu, layout):
    """``weight.T`` of what is stored as ``weight``, for a kernel that takes it as stored."""
    kernel = load(program_of(matmul_simt.SPEC, layout=layout))
    a = Array(0x1000, (16, 4) if layout[0] == "n" else (4, 16))
    c = Array(0x3000, (16, 8))
    kernel.launch(A=a, B=Array(0x2000, (8, 4), (12, 1)), C=c)
    kernel.launch(A=a, B=Array(0x2000, (4, 8), (1, 12)), C=c)
    kernel.launch(A=a, B=Array(0x2000, (1, 4, 8), (96, 1, 12)), C=c)
    first, *others = gpu.launches
    assert [x.values for x in others] == [first.values] * 2


def test_a_row_that_is_a_column_in_memory_is_turned_back(limited, gpu):
    limited.launch(**stored(1, 8, 4, A=Array(0x1000, (4, 1), (12, 1))))
    limited.launch(**stored(1, 8, 4, A=Array(0x1000, (1, 4), (999, 12))))
    first, second = gpu.launches
    assert first.values == second.values


def test_a_transposed_view_of_a_square_is_refused(load, gpu):
    kernel = load(program_of(matmul_simt.SPEC, layout="nt"))
    with pytest.raises(UsageError, match=r"B is square and transposed in memory") as why:
        kernel.launch(**matrices(8, 8, 8, B=Array(0x2000, (8, 8), (1, 8))))
    assert "B is stored row by row as (B, N, K)" in str(why.value)
    kernel.launch(**matrices(8, 8, 8))
    assert len(gpu.launches) == 1


def test_a_transposed_view_for_the_other_layout_is_refused(matmul, gpu):
    with pytest.raises(UsageError, match=r"K is 8 in B and 4 in A") as why:
        matmul.launch(**matrices(16, 8, 4, B=Array(0x2000, (4, 8), (1, 4))))
    assert "taken for a transposed view" in str(why.value)
    assert not gpu.launches


def test_the_number_of_axes_is_checked(matmul, axpy):
    with pytest.raises(UsageError, match=r"A has shape \(64,\) .*\(B, M, K\)"):
        matmul.launch(**matrices(16, 8, 4, A=Array(0x1000, (64,))))
    with pytest.raises(UsageError, match=r"x has shape \(10, 100\)"):
        axpy.launch(**vectors() | {"x": Array(0x1000, (10, 100))})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "x is missing"),
        ("text", "x is of type str, neither an address nor an array of the device"),
        (-1, "x is -1, which is no address"),
        (np.zeros(1000, np.float32), "x is in host memory, the kernel is on device 0"),
        (Array(0x1000, (1000,), mask=object()), "x is a masked array"),
    ],
)
def test_what_is_no_array_of_the_device_is_refused(axpy, gpu, value, message):
    with pytest.raises(UsageError, match=message):
        axpy.launch(**vectors() | {"x": value})
    assert not gpu.launches


def test_read_only_arrays_are_read_only(axpy, gpu):
    constant = Array(0x1000, (1000,), readonly=True)
    axpy.launch(**vectors() | {"x": constant})
    with pytest.raises(UsageError, match="y is written and the array given for it is read-only"):
        axpy.launch(**vectors() | {"y": constant})
    assert len(gpu.launches) == 1


def test_a_null_address_is_refused_where_there_are_elements(axpy, gpu):
    with pytest.raises(UsageError, match="y has elements and a null address"):
        axpy.launch(x=0x1000, y=0, a=1.0, sizes={"N": 10})
    assert not gpu.launches


# --- DLPack --------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Old(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _New(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Dlpack:
    """A tensor that exports itself by DLPack alone, in the old form or the new one."""

    def __init__(self, shape, strides=None, *, code=2, bits=32, lanes=1, device=(2, 0), old=False,
                 flags=0, offset=0):  # fmt: skip
        self.device, self.old, self.stream = device, old, None
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        tensor = _Tensor(
            0x1000, *device, len(shape), code, bits, lanes, ctypes.addressof(self._shape),
            ctypes.addressof(self._strides) if strides else None, offset,
        )  # fmt: skip
        self._managed = _Old(tensor) if old else _New((1, 0), None, None, flags, tensor)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if self.old and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.stream = stream
        name = b"dltensor" if self.old else b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(self._managed), name, None)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("dtype", "code", "bits"), [("fp64", 2, 64), ("fp32", 2, 32), ("fp16", 2, 16), ("bf16", 4, 16)]
)
def test_dlpack_is_read_as_it_is_written(load, gpu, old, dtype, code, bits):
    kernel = load(program_of(matmul_simt.SPEC, dtype=dtype))
    kind = {"code": code, "bits": bits, "old": old}
    a = Dlpack((16, 8), (24, 1), offset=64, **kind)
    kernel.launch(A=a, B=Dlpack((8, 32), **kind), C=Dlpack((16, 32), **kind), stream=0x77)
    kernel.launch(
        A=Array(0x1040, (16, 8), (24, 1), dtype), B=Array(0x1000, (8, 32), dtype=dtype),
        C=Array(0x1000, (16, 32), dtype=dtype), stream=0x77,
    )  # fmt: skip
    first, second = gpu.launches
    assert first.values == second.values
    assert a.stream == 0x77, "its producer is told which stream has to wait"


def test_dlpack_of_numpy_is_understood(axpy, gpu):
    """A capsule that this file has not made, its memory declared to be the device's."""
    x = np.zeros((1000,), np.float32)

    class Claimed:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, *, stream=None, **options):
            assert stream == LEGACY
            return x.__dlpack__(**options)

    axpy.launch(**vectors() | {"x": Claimed()})
    assert gpu.launches[0].values[0] == x.ctypes.data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": (1, 0)}, "x is in host memory, the kernel is on device 0"),
        ({"device": (3, 0)}, "x is in host memory, the kernel is on device 0"),
        ({"device": (2, 1)}, "x is on device 1, the kernel is on device 0"),
        ({"lanes": 4}, "x holds DLPack type 2, 32 bits, 4 lanes, the kernel takes fp32"),
        ({"code": 0}, "x holds DLPack type 0, 32 bits, 1 lanes, the kernel takes fp32"),
    ],
)
def test_dlpack_of_something_else_is_refused(axpy, change, message):
    with pytest.raises(UsageError, match=message):
        axpy.launch(**vectors() | {"x": Dlpack((1000,), **change)})


def test_dlpack_managed_memory_is_the_devices(axpy, gpu):
    axpy.launch(**vectors() | {"x": Dlpack((1000,), device=(13, 0))})
    assert len(gpu.launches) == 1


def test_dlpack_knows_read_only_too(axpy):
    constant = Dlpack((1000,), flags=1)
    axpy.launch(**vectors() | {"x": constant})
    with pytest.raises(UsageError, match="y is written"):
        axpy.launch(**vectors() | {"y": constant})


class Tensor:
    """What is used of a torch.Tensor."""

    def __init__(self, shape, dtype="torch.float32", index=0):
        self.shape, self.dtype, self.is_cuda, self._index = shape, dtype, index >= 0, index

    def data_ptr(self):
        return 0x5000

    def stride(self):
        return dense_strides(self.shape)

    def get_device(self):
        return self._index

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient")


def test_tensors_of_torch_are_asked_directly(axpy, gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    axpy.launch(**vectors() | {"x": Tensor((1000,))})
    assert gpu.launches[0].values[0] == 0x5000
    with pytest.raises(UsageError, match="x is in host memory"):
        axpy.launch(**vectors() | {"x": Tensor((1000,), index=-1)})
    with pytest.raises(UsageError, match=r"x holds torch\.int32, the kernel takes fp32"):
        axpy.launch(**vectors() | {"x": Tensor((1000,), "torch.int32")})


# --- limits --------------------------------------------------------------------------------------


def violations():
    """Every limit of a real kernel, with a call that breaks that one alone."""
    n = (2**31 - 1) - 65536 + 1
    yield "M at most", {"sizes": {"M": n, "N": 8, "K": 4}}
    yield "B at most", {"sizes": {"B": n, "M": 8, "N": 8, "K": 4}}
    yield "N at most", {"sizes": {"M": 8, "N": n, "K": 4}}
    yield "K at most", {"sizes": {"M": 8, "N": 8, "K": n}}
    yield "lda a multiple of 4", {"sizes": {"M": 9, "N": 8, "K": 4}}
    yield "ldb a multiple of 4", {"sizes": {"M": 8, "N": 9, "K": 4, "ldc": 12}}
    yield "ldc a multiple of 4", {"sizes": {"M": 8, "N": 9, "K": 4, "ldb": 12}}
    yield "align a multiple of 16", {"A": 0x1004}
    yield "align a multiple of 16", {"B": 0x1008}
    yield "align a multiple of 16", {"C": 0x1002}


@pytest.mark.parametrize(("limit", "change"), list(violations()))
def test_a_limit_that_does_not_hold_is_named(limited, gpu, limit, change):
    call = {"A": 0x1000, "B": 0x2000, "C": 0x3000, "sizes": {"M": 8, "N": 8, "K": 4}}
    with pytest.raises(PlanError, match=rf"matmul_simt needs {limit}") as why:
        limited.launch(**call | change)
    assert "\n" not in str(why.value)
    assert "use another kernel" in str(why.value)
    assert not gpu.launches
    limited.launch(**call)


def test_every_limit_is_broken_above(limited):
    broken = {text for text, _ in violations()}
    for limit in limited.program.limits:
        assert any(str(limit).startswith(text) for text in broken), limit


def test_a_misaligned_operand_is_named_with_its_address(limited):
    with pytest.raises(PlanError, match=r"in bytes\): B is at 0x2004 \(give an aligned copy"):
        limited.launch(**stored(8, 8, 4, B=Array(0x2004, (4, 8))))


def test_vector_kernels_take_any_base(axpy, gpu):
    axpy.launch(x=0x1004, y=0x2002, a=1.0, sizes={"N": 100})
    assert len(gpu.launches) == 1


def test_a_limit_on_one_operand_is_one_on_its_address(load, gpu):
    program = program_of(vector_axpy.SPEC)
    limits = (*program.limits, Limit("y", "multiple_of", 8))
    kernel = load(dataclasses.replace(program, limits=limits))
    kernel.launch(x=0x1004, y=0x2008, a=1.0, sizes={"N": 100})
    with pytest.raises(PlanError, match=r"needs y a multiple of 8 .*y is at 0x2004"):
        kernel.launch(x=0x1004, y=0x2004, a=1.0, sizes={"N": 100})
    assert len(gpu.launches) == 1


def test_a_limit_on_what_nobody_knows_does_not_hold(load):
    program = dataclasses.replace(
        program_of(vector_axpy.SPEC), limits=(Limit("WARP", "equal", 32),)
    )
    with pytest.raises(PlanError, match="needs WARP equal to 32: WARP is not known"):
        load(program).launch(**vectors())


def test_a_grid_beyond_cudas_is_refused(load, gpu):
    plan = LaunchPlan((Launch("k", (1, "N", 1), (32, 1, 1), (Argument("x", "pointer"),)),))
    x = Operand("x", "fp32", "out", ("N",), (1,))
    kernel = load(Program("k", (x,), (), {"N": 1}, (), plan, (Image("k", "tunegen_k", b""),)))
    with pytest.raises(PlanError, match="65536 blocks in y"):
        kernel.launch(x=0x100, sizes={"N": 65536})
    assert not gpu.launches


# --- scalars -------------------------------------------------------------------------------------


def test_alpha_and_beta_have_the_values_that_leave_them_out(matmul, gpu):
    matmul.launch(**matrices(16, 8, 4))
    assert gpu.launches[0].values[-2:] == (1.0, 0.0)


def test_other_scalars_have_to_be_given(axpy, load):
    with pytest.raises(UsageError, match="a is missing"):
        axpy.launch(x=0x100, y=0x200, sizes={"N": 10})
    with pytest.raises(UsageError, match="value is missing"):
        load(program_of(vector_fill.SPEC)).launch(y=0x200, sizes={"N": 10})


def test_a_kernel_that_does_not_read_c_refuses_beta(matmul, gpu):
    with pytest.raises(PlanError, match=r"was made for beta=0: it needs beta 0, not 0\.5"):
        matmul.launch(**matrices(16, 8, 4), beta=0.5)
    with pytest.raises(PlanError, match="was made for beta=0, not 1"):
        matmul.launch(**matrices(16, 8, 4), sizes={"beta": 1})
    matmul.launch(**matrices(16, 8, 4), beta=0.0, sizes={"beta": 0})
    assert len(gpu.launches) == 1


def test_a_kernel_that_reads_c_refuses_to_be_told_not_to(load, gpu):
    """It would: 0 times NaN is NaN."""
    kernel = load(program_of(matmul_simt.SPEC, beta=1))
    with pytest.raises(PlanError, match=r"it needs beta other than 0, not 0"):
        kernel.launch(**matrices(16, 8, 4))
    kernel.launch(**matrices(16, 8, 4), beta=0.5)
    assert gpu.launches[0].values[-2:] == (1.0, 0.5)


def test_unknown_arguments_are_named(axpy):
    with pytest.raises(UsageError, match=r"unknown argument of axpy_vector 'z'.*known: x, y, a"):
        axpy.launch(**vectors(), z=1)


# --- empty problems ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 8, 4), (8, 0, 4), (0, 8, 4, 4), (0, 0, 0)])
def test_nothing_is_launched_for_an_empty_output(load, gpu, sizes):
    kernel = load(program_of(matmul_simt.SPEC, {"SPLIT_K": 2}))
    problem = kernels.operation("matmul", kernels.SPECS).problem(sizes)
    names = {name: value for name, value in problem.sizes}
    kernel.launch(A=0, B=0, C=0, sizes=names)
    batch, m, n, k = names.values()
    kernel.launch(A=Array(0, (batch, m, k)), B=Array(0, (batch, k, n)), C=Array(0, (batch, m, n)))
    assert not gpu.launches
    assert not gpu.blocks


def test_an_empty_sum_is_launched(matmul, gpu):
    """K = 0 writes zeros; A and B have no elements, addresses and strides mean nothing."""
    c = Array(0x3000, (16, 8))
    matmul.launch(A=Array(0, (16, 0)), B=Array(0, (0, 8)), C=c)
    matmul.launch(A=Array(0, (16, 0), (7, 5)), B=Array(0, (0, 8), (1, 3)), C=c)
    first, second = gpu.launches
    assert first.values == second.values


def test_an_empty_vector_is_not_launched(axpy, gpu):
    axpy.launch(x=0, y=0, a=1.0, sizes={"N": 0})
    assert not gpu.launches


# --- streams -------------------------------------------------------------------------------------


class _Box:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class _CudaCore:
    def __cuda_stream__(self):
        return (0, 0x42)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, LEGACY),
        (0, LEGACY),
        (2, 2),
        (0x42, 0x42),
        (_CudaCore(), 0x42),
        (_Box(__cuda_stream__=(0, 0x42)), 0x42),
        (_Box(cuda_stream=0x42), 0x42),
        (_Box(cuda_stream=0), LEGACY),
        (_Box(ptr=0x42), 0x42),
        (_Box(handle=ctypes.c_void_p(0x42)), 0x42),
        (_Box(handle=ctypes.c_void_p(None)), LEGACY),
        (driver.bindings().CUstream(0x42), 0x42),
        (_Box(handle=driver.bindings().CUstream(0x42)), 0x42),
    ],
    ids=lambda value: type(value).__name__,
)
def test_streams_of_every_kind(axpy, gpu, stream, handle):
    assert streams.handle_of(stream) == handle
    axpy.launch(**vectors(), stream=stream)
    assert gpu.launches[0].stream == handle


def test_the_stream_may_change_from_call_to_call(axpy, gpu):
    for stream in (0x42, None, 0x43, 0x42):
        axpy.launch(**vectors(), stream=stream)
    assert [x.stream for x in gpu.launches] == [0x42, LEGACY, 0x43, 0x42]


@pytest.mark.parametrize("stream", ["main", 1.5, -3])
def test_what_is_no_stream_is_refused(axpy, stream):
    with pytest.raises(UsageError, match="stream"):
        axpy.launch(**vectors(), stream=stream)


def test_a_producers_stream_is_waited_for(axpy, gpu):
    """The array interface names the stream that the elements are produced on."""
    axpy.launch(**vectors() | {"x": Array(0x1000, (1000,), stream=0x99)}, stream=0x42)
    names = [name for name, _ in gpu.calls]
    order = ["cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy", "cuLaunchKernelEx"]
    assert [name for name in names if name in order] == order
    arguments = dict(gpu.calls)
    assert arguments["cuEventRecord"][1] == 0x99
    assert arguments["cuStreamWaitEvent"][0] == 0x42


def test_the_same_stream_is_not_waited_for(axpy, gpu):
    axpy.launch(**vectors(stream=0x42), stream=0x42)
    axpy.launch(**vectors(stream=LEGACY))
    axpy.launch(**vectors(stream=None), stream=0x42)
    assert gpu.count("cuStreamWaitEvent") == 0
    assert len(gpu.launches) == 3


# --- workspace -----------------------------------------------------------------------------------


@pytest.fixture
def split(load):
    return load(program_of(matmul_simt.SPEC, {"SPLIT_K": 4}))


def call(m, n=64, k=64, **more):
    return {"A": 0x1000, "B": 0x2000, "C": 0x3000, "sizes": {"M": m, "N": n, "K": k}, **more}


def workspace_of(launched):
    """The first launch of a split-K plan writes its partial sums where C would be."""
    return launched.values[2]


def test_a_workspace_is_kept_for_each_stream(split, gpu):
    split.launch(**call(64), stream=5)
    split.launch(**call(64), stream=5)
    split.launch(**call(32), stream=5)
    assert gpu.count("cuMemAlloc") == 1
    split.launch(**call(64), stream=6)
    assert gpu.count("cuMemAlloc") == 2
    first, second, third, fourth = (workspace_of(x) for x in gpu.launches[::2])
    assert first == second == third != fourth
    assert {first, fourth} == set(gpu.blocks)
    assert all(x.values[0] == workspace_of(y)
               for x, y in zip(gpu.launches[1::2], gpu.launches[::2], strict=True))  # fmt: skip


def test_a_workspace_grows_when_the_stream_is_done_with_it(split, gpu):
    split.launch(**call(64), stream=5)
    gpu.calls.clear()
    split.launch(**call(256), stream=5)
    names = [name for name, _ in gpu.calls]
    assert (
        names.index("cuStreamSynchronize") < names.index("cuMemFree") < names.index("cuMemAlloc")
    )
    needed = split.workspace_bytes({"M": 256, "N": 64, "K": 64})
    assert needed == 4 * 4 * 256 * 64
    assert dict(gpu.calls)["cuMemAlloc"] == (needed,)
    split.launch(**call(64), stream=5)
    assert len(gpu.blocks) == 1


def test_a_workspace_that_cannot_grow_is_not_used_further(split, gpu):
    split.launch(**call(64))
    gpu.free_bytes = 0
    with pytest.raises(DeviceError, match="0 are free"):
        split.launch(**call(256))
    gpu.free_bytes = 1 << 40
    split.launch(**call(64))
    assert {workspace_of(gpu.launches[-2])} == set(gpu.blocks)


def test_parts_of_a_workspace_lie_at_their_offsets(load, gpu):
    arguments = (Argument("x", "workspace"), Argument("y", "workspace", "4 * N"))
    launch = Launch("k", (1, 1, 1), (32, 1, 1), arguments)
    plan = LaunchPlan((launch, launch), workspace_bytes="8 * N")
    x = Operand("x", "fp32", "out", ("N",), (1,))
    kernel = load(Program("k", (x,), (), {"N": 1}, (), plan, (Image("k", "tunegen_k", b""),)))
    kernel.launch(x=0x100, sizes={"N": 100})
    (base,) = gpu.blocks
    assert [x.values for x in gpu.launches] == [(base, base + 400)] * 2


def zeroed(program):
    plan = dataclasses.replace(program.plan, workspace_init="zero")
    return dataclasses.replace(program, plan=plan)


def test_a_workspace_is_zeroed_where_the_plan_says_so(load, gpu):
    kernel = load(zeroed(program_of(matmul_simt.SPEC, {"SPLIT_K": 4})))
    kernel.launch(**call(64), stream=5)
    (address, memory), needed = *gpu.blocks.items(), kernel.workspace_bytes(call(64)["sizes"])
    held = (ctypes.c_uint8 * needed).from_address(address)
    assert not any(held)
    assert len(memory) >= needed
    ((_, _, size, stream),) = [a for name, a in gpu.calls if name == "cuMemsetD8Async"]
    assert (size, stream) == (needed, 5)
    kernel.launch(**call(64), stream=5)
    assert gpu.count("cuMemsetD8Async") == 1, "a plan leaves it zeroed"


def test_a_workspace_is_left_alone_where_the_plan_does_not_mind(split, gpu):
    split.launch(**call(64))
    assert gpu.count("cuMemsetD8Async") == 0


def test_the_callers_workspace_is_used(split, gpu):
    needed = split.workspace_bytes(call(64)["sizes"])
    split.launch(**call(64), workspace=0x10000)
    split.launch(**call(64), workspace=Array(0x20000, (needed // 4,)))
    assert [workspace_of(x) for x in gpu.launches[::2]] == [0x10000, 0x20000]
    assert not gpu.blocks
    with pytest.raises(UsageError, match=rf"takes {needed:,} bytes, {needed - 4:,} are given"):
        split.launch(**call(64), workspace=Array(0x20000, (needed // 4 - 1,)))
    with pytest.raises(UsageError, match="at 0x10080, not at a multiple of 256"):
        split.launch(**call(64), workspace=0x10080)
    with pytest.raises(UsageError, match="workspace has gaps"):
        split.launch(**call(64), workspace=Array(0x20000, (needed,), (2,)))
    with pytest.raises(UsageError, match="workspace is written"):
        split.launch(**call(64), workspace=Array(0x20000, (needed,), readonly=True))
    assert len(gpu.launches) == 4


def test_the_callers_workspace_is_zeroed_every_time(load, gpu, monkeypatch):
    """Others may have written to it in between."""
    kernel = load(zeroed(program_of(matmul_simt.SPEC, {"SPLIT_K": 4})))
    monkeypatch.setattr(FakeDriver, "cuMemsetD8Async", lambda *a: None)
    for _ in range(2):
        kernel.launch(**call(64), workspace=0x10000)
    assert gpu.count("cuMemsetD8Async") == 2


def test_of_the_callers_workspace_what_must_be_is_zeroed_and_no_more(load, gpu):
    """What it is depends on the sizes. All of a workspace of our own is zeroed: with other sizes
    zeros may end elsewhere."""
    program = zeroed(program_of(matmul_simt.SPEC, {"SPLIT_K": 4}))
    plan = dataclasses.replace(program.plan, zeroed_bytes="4 * M")
    kernel = load(dataclasses.replace(program, plan=plan))
    needed = kernel.workspace_bytes(call(64)["sizes"])
    memory = (ctypes.c_uint8 * (needed + 256))()
    address = -(-ctypes.addressof(memory) // 256) * 256
    held = np.ctypeslib.as_array((ctypes.c_uint8 * needed).from_address(address))
    for m in (64, 32):
        held[:] = 0xFF
        kernel.launch(**call(m), workspace=address, stream=5)
        assert not held[: 4 * m].any()
        assert (held[4 * m :] == 0xFF).all()
    kernel.launch(**call(64), stream=5)
    sizes = [a[2] for name, a in gpu.calls if name == "cuMemsetD8Async"]
    assert sizes == [256, 128, needed]


def test_a_captured_graph_gets_no_workspace_that_may_move(split, gpu):
    split.launch(**call(64))
    gpu.capturing = True
    with pytest.raises(DeviceError, match=r"captured \(give workspace= with 65,536 bytes"):
        split.launch(**call(64))
    split.launch(**call(64), workspace=0x10000)
    assert len(gpu.launches) == 4


def test_too_little_memory_for_a_workspace_names_both_sides(split, gpu):
    gpu.free_bytes = 1000
    with pytest.raises(DeviceError, match=r"needs 65,536 bytes, 1,000 are free on device 0"):
        split.launch(**call(64))
    assert not gpu.launches
    gpu.free_bytes = 1 << 40
    gpu.refuse["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DeviceError, match=r"65,536 bytes on device 0.*OUT_OF_MEMORY"):
        split.launch(**call(64))
    assert not gpu.launches
    del gpu.refuse["cuMemAlloc"]
    split.launch(**call(64))
    assert len(gpu.launches) == 2


# --- tensor maps ---------------------------------------------------------------------------------


@pytest.fixture
def boxes(load):
    """x[N, 64] in fp16, and a padded copy of it, through two launches that share maps."""
    maps = (
        TensorMap("x_map", "x", "fp16", (64, "N"), (128,), (64, 8), 128, 256),
        TensorMap("copy", "workspace", "fp16", (64, "N"), (256,), (64, 8), 0, 0, "16 * N"),
    )
    arguments = (
        Argument("x_map", "tensor_map"), Argument("n", "int32", "N % 1000"),
        Argument("copy", "tensor_map"), Argument("x", "pointer"),
    )  # fmt: skip
    launch = Launch("k", ("N % 1000", 1, 1), (32, 1, 1), arguments)
    plan = LaunchPlan((launch, launch), "272 * N", tensor_maps=maps)
    x = Operand("x", "fp16", "in", ("N", 64), (64, 1))
    return load(Program("k", (x,), (), {"N": 1}, (), plan, (Image("k", "tunegen_k", b""),)))


def test_tensor_maps_describe_the_operands_of_the_call(boxes, gpu):
    boxes.launch(x=0x100, sizes={"N": 20})
    (work,) = gpu.blocks
    (first, second) = gpu.launches
    assert first.values == second.values
    x_map, n, copy, x = first.values
    assert (n, x) == (20, 0x100)
    assert x_map == Described("UINT16", 0x100, (64, 20), (128,), (64, 8), "128B", "L2_256B")
    assert copy == Described("UINT16", work + 320, (64, 20), (256,), (64, 8), "NONE", "NONE")
    assert gpu.count("cuTensorMapEncodeTiled") == 2


def test_tensor_maps_are_encoded_for_new_addresses_only(boxes, gpu):
    def encoded(x, n=20, **more) -> int:
        before = gpu.count("cuTensorMapEncodeTiled")
        boxes.launch(x=x, sizes={"N": n}, **more)
        x_map, _, copy, _ = gpu.launches[-1].values
        work = more.get("workspace") or next(reversed(gpu.blocks))
        assert (x_map.address, copy.address) == (x, work + 16 * n)
        assert x_map.extents == copy.extents == (64, n)
        return gpu.count("cuTensorMapEncodeTiled") - before

    assert encoded(0x100) == 2
    assert encoded(0x100) == 0
    assert encoded(0x200) == 1
    assert encoded(0x100) == 0, "it is known from before"
    assert encoded(0x100, workspace=0x10000) == 1
    assert encoded(0x200, workspace=0x20000) == 1
    assert encoded(0x300, workspace=0x30000) == 2
    assert encoded(0x100, n=10) == 2
    assert encoded(0x100, n=20, stream=7) == 1, "a stream has a workspace of its own"


def test_threads_do_not_mix_their_tensor_maps(boxes, gpu):
    def work(x) -> None:
        for _ in range(30):
            boxes.launch(x=x, sizes={"N": 20})

    threads = [threading.Thread(target=work, args=(0x1000 * i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(x_map.address == x for x_map, _, _, x in (one.values for one in gpu.launches))
    assert {one.values[-1] for one in gpu.launches} == {0x1000 * i for i in range(1, 5)}


def test_an_address_that_no_tensor_map_can_have(boxes, gpu):
    with pytest.raises(PlanError, match="x_map needs x at a multiple of 16 bytes: it is at 0x108"):
        boxes.launch(x=0x108, sizes={"N": 20})
    with pytest.raises(PlanError, match="x_map has an extent of 4294967297"):
        boxes.launch(x=0x100, sizes={"N": 2**32 + 1})
    assert not gpu.launches
    boxes.launch(x=0x100, sizes={"N": 0})
    assert not gpu.launches


def test_a_tensor_map_that_the_driver_refuses(boxes, gpu):
    gpu.refuse["cuTensorMapEncodeTiled"] = "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(DeviceError, match=r"k on device 0.*cuTensorMapEncodeTiled: .*SUPPORTED"):
        boxes.launch(x=0x100, sizes={"N": 20})
    assert not gpu.launches
    gpu.refuse.clear()
    boxes.launch(x=0x100, sizes={"N": 20})
    assert len(gpu.launches) == 2


# --- contexts ------------------------------------------------------------------------------------


def test_the_callers_context_is_used(gpu):
    gpu.devices, gpu.current, gpu.current_device = 2, 0xABC, 1
    context = Context()
    assert (context.index, context.handle) == (1, 0xABC)
    assert Context(1).handle == 0xABC
    assert gpu.count("cuDevicePrimaryCtxRetain") == 0
    assert gpu.current == 0xABC


def test_without_a_context_the_primary_one_is_made_current(gpu):
    context = Context()
    assert (context.index, context.handle) == (0, gpu.primary(0))
    assert gpu.current == gpu.primary(0)


def test_another_device_leaves_the_callers_context_alone(gpu):
    gpu.devices, gpu.current = 2, 0xABC
    program = program_of(vector_axpy.SPEC)
    gpu.signed_by(program.plan)
    kernel = Kernel(program, Context(1))
    assert gpu.current == 0xABC
    kernel.launch(**vectors() | {"x": Dlpack((1000,), device=(2, 1))})
    assert gpu.current == 0xABC
    assert [x.context for x in gpu.launches] == [gpu.primary(1)]
    with pytest.raises(UsageError, match="x is on device 0, the kernel is on device 1"):
        kernel.launch(**vectors() | {"x": Dlpack((1000,))})


def test_a_thread_without_a_context_may_launch(axpy, gpu):
    gpu.current = 0  # contexts are a thread's own
    axpy.launch(**vectors())
    assert [x.context for x in gpu.launches] == [gpu.primary(0)]
    assert gpu.current == 0


@pytest.mark.parametrize("index", [1, -1, 7])
def test_a_device_that_is_not_there(gpu, index):
    with pytest.raises(DeviceError, match=rf"no device {index}: there are 1, numbered from 0"):
        Context(index)


def test_no_device_at_all(gpu):
    gpu.devices = 0
    with pytest.raises(DeviceError, match="the driver sees no device"):
        Context()
    gpu.refuse["cuInit"] = "CUDA_ERROR_NO_DEVICE"
    with pytest.raises(DeviceError, match="CUDA cannot be used: cuInit: CUDA_ERROR_NO_DEVICE"):
        Context()


# --- refusals of the driver ----------------------------------------------------------------------


def test_an_image_that_the_driver_refuses(load, gpu):
    gpu.refuse["cuModuleLoadData"] = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    program = dataclasses.replace(
        program_of(vector_axpy.SPEC), needs="it needs a driver from 580 on"
    )
    with pytest.raises(DeviceError) as why:
        load(program)
    for part in ("axpy_vector", "cubin for sm_90", "NVIDIA H200", "CUDA 13.0", "NO_BINARY", "580"):
        assert part in str(why.value)
    assert "\n" not in str(why.value)


def test_half_loaded_images_are_unloaded(load, gpu):
    gpu.refuse["cuModuleGetFunction"] = "CUDA_ERROR_NOT_FOUND"
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_FOUND"):
        load(program_of(vector_axpy.SPEC))
    assert not gpu.loaded
    assert not gpu._stack, "the context is popped again"


def test_a_launch_that_the_driver_refuses(axpy, gpu):
    gpu.refuse["cuLaunchKernelEx"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(DeviceError, match=r"axpy_vector on device 0.*ILLEGAL_ADDRESS"):
        axpy.launch(**vectors())
    gpu.refuse.clear()
    axpy.launch(**vectors())
    assert len(gpu.launches) == 1


def test_images_end_as_strings_do(load, gpu):
    """PTX is text, which the driver reads up to its zero byte."""
    load(program_of(vector_axpy.SPEC))
    assert gpu.images == [b"axpy_vector\0"]


def test_closing_gives_everything_back(split, gpu):
    with split:
        split.launch(**call(64), stream=5)
        split.launch(**call(64), stream=6)
    names = [name for name, _ in gpu.calls]
    assert names.index("cuCtxSynchronize") < names.index("cuMemFree")
    assert not gpu.blocks
    assert not gpu.loaded
    with pytest.raises(UsageError, match="has been closed"):
        split.launch(**call(64), stream=5)
    split.close()


def test_an_operation_with_two_inputs(load, gpu):
    kernel = load(program_of(vector_add.SPEC, dtype="bf16"))
    arrays = {name: Array(i * 0x100, (77,), dtype="bf16") for i, name in enumerate("xyz", 1)}
    kernel.launch(**arrays)
    assert gpu.launches[0].values == (0x100, 0x200, 0x300, 77)


def test_the_representation_says_what_it_is(axpy):
    assert repr(axpy) == (
        "<Kernel axpy_vector, cubin for sm_90, on device 0, NVIDIA H200 (sm_90, driver for "
        "CUDA 13.0)>"
    )

# SPDX-License-Identifier: Apache-2.0
"""The kernels that draw inputs and check results do what their twins in NumPy do, element by
element, in every dtype and for arrays with gaps."""

from __future__ import annotations

import dataclasses

import check_twins
import numpy as np
import pytest
from emulator.numbers import STORED, load, store
from fake_gpu import FakeGpu, FakeKernel, compiled
from host_kernels import host_kernel

from tunegen import codegen, compiler
from tunegen.errors import TemplateError
from tunegen.kernels.checks import DEFINITIONS
from tunegen.model import ARCHS, DTYPE_BYTES, Array
from tunegen.model import checks as launches
from tunegen.runner.checkers import Checkers, Count
from tunegen.runner.operands import place

DTYPES = tuple(DTYPE_BYTES)

# A few blocks stand for the many that a grid may have on a device.
BLOCKS = 3
LARGE = BLOCKS * launches.THREADS * 2 + 3

# Shapes and strides: empty, one element, dense in one to three dimensions, rows with gaps,
# matrices with gaps, more elements than a grid has threads.
ARRAYS = (
    ((0,), (1,)),
    ((1,), (1,)),
    ((1000,), (1,)),
    ((3, 0, 5), (50, 10, 1)),
    ((7, 5), (5, 1)),
    ((7, 5), (9, 1)),
    ((3, 4, 5), (20, 5, 1)),
    ((3, 4, 5), (40, 8, 1)),
    ((1, 4, 5), (0, 8, 1)),
    ((2, 1, 5), (8, 8, 1)),
    ((4, 3), (13, 4)),
    ((LARGE,), (1,)),
)


def array(shape, strides, dtype="fp32", role="out"):
    return Array("X", shape, strides, dtype, role)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(launches, "MAX_BLOCKS", BLOCKS)


@pytest.fixture(scope="module")
def templates():
    return {definition.name: host_kernel(definition) for definition in DEFINITIONS}


@pytest.fixture(params=["twin", pytest.param("template", marks=pytest.mark.emulator)])
def gpu(request):
    """A GPU whose check kernels are those of the templates, or their twins."""
    own = request.getfixturevalue("templates") if request.param == "template" else {}
    return FakeGpu({**check_twins.kernels(), **own})


@pytest.fixture
def checkers(gpu):
    return Checkers(gpu, [compiled(definition.name) for definition in DEFINITIONS])


def placed(gpu, array, offset=0):
    """An array somewhere in memory, everything poisoned."""
    where = place(array, gpu.allocate(place(array, 0, offset).end), offset)
    gpu.fill(where.buffer, launches.POISON, where.buffer_bytes)
    return where


def elements(gpu, where):
    """Its logical elements, to be read and written."""
    array = where.array
    flat = gpu.memory.view(where.address, array.elements, STORED[array.dtype])
    if not flat.size:
        return flat.reshape(array.shape)
    steps = [stride * flat.itemsize for stride in array.strides]
    return np.lib.stride_tricks.as_strided(flat, array.shape, steps)


# --- random --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(("shape", "strides"), ARRAYS)
def test_elements_are_those_of_seed_and_index(gpu, checkers, shape, strides, dtype, integers):
    where = placed(gpu, array(shape, strides, dtype))
    checkers.draw(where.array, where.address, 2**40 + 7, integers=integers)
    found = load(elements(gpu, where).reshape(-1), dtype)
    draw = check_twins.integers if integers else check_twins.normals
    wanted = draw(2**40 + 7, found.size)
    if integers:
        np.testing.assert_array_equal(found, wanted)
    else:
        # fp32 arithmetic for all but fp64: near 1, the logarithm loses what its argument rounds.
        error = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-3, "bf16": 2e-2}[dtype]
        np.testing.assert_allclose(found, wanted, atol=error, rtol=error)
    assert checkers.stray(where.array, where.buffer, where.buffer_bytes, where.address) == Count()


def test_fp64_elements_use_all_their_bits(gpu, checkers):
    where = placed(gpu, array((4096,), (1,), "fp64"))
    checkers.draw(where.array, where.address, 1, integers=False)
    drawn = elements(gpu, where).reshape(-1)
    assert np.mean(drawn == drawn.astype(np.float32)) < 0.01


def test_normal_elements_are_normal(gpu, checkers):
    where = placed(gpu, array((200_000,), (1,)))
    checkers.draw(where.array, where.address, 3, integers=False)
    drawn = elements(gpu, where).reshape(-1).astype(np.float64)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs(np.mean(drawn**4) - 3) < 0.1
    assert abs(np.mean(drawn[1:] * drawn[:-1])) < 0.01
    assert np.abs(drawn).max() < 6.8


def test_integers_are_equally_likely(gpu, checkers):
    where = placed(gpu, array((100_000,), (1,)))
    checkers.draw(where.array, where.address, 3, integers=True)
    values, counts = np.unique(elements(gpu, where), return_counts=True)
    reach = launches.INTEGER_RANGE
    np.testing.assert_array_equal(values, np.arange(-reach, reach + 1))
    assert np.all(np.abs(counts - 20_000) < 600)


def test_seeds_differ(gpu, checkers):
    drawn = []
    for seed in (0, 1, 2**40):
        where = placed(gpu, array((1000,), (1,)))
        checkers.draw(where.array, where.address, seed, integers=False)
        drawn.append(elements(gpu, where).reshape(-1).astype(np.float64))
    for i in range(3):
        assert abs(np.corrcoef(drawn[i], drawn[i - 1])[0, 1]) < 0.15


# --- compare -------------------------------------------------------------------------------------


@pytest.fixture
def compared(gpu, checkers):
    """Compare given values of a dtype with expected ones."""

    def compare(actual, expected, dtype="fp32", strides=None):
        actual, expected = np.atleast_1d(actual), np.atleast_1d(np.float64(expected))
        shape = actual.shape
        dense = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        where = placed(gpu, array(shape, strides or dense, dtype))
        elements(gpu, where)[...] = store(actual, dtype)
        at = gpu.allocate(max(8, expected.nbytes))
        gpu.upload(at, expected)
        return checkers.compare(where.array, where.address, at)

    return compare


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_have_no_error(compared, dtype):
    values = load(store(np.random.default_rng(0).standard_normal(3000), dtype), dtype)
    found = compared(values, values, dtype)
    assert found.relative_error == found.largest_error == 0
    assert found.unwritten == found.special == found.inexact == Count()
    np.testing.assert_allclose(found.expected_squares, np.sum(values**2))
    np.testing.assert_allclose(found.expected_rms, np.sqrt(np.mean(values**2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_those_of_numpy(compared, dtype):
    random = np.random.default_rng(1)
    size = LARGE
    expected = random.standard_normal(size)
    actual = load(store(expected + 1e-3 * random.standard_normal(size), dtype), dtype)
    actual[size - 2] = load(store(np.array([expected[size - 2] + 9]), dtype), dtype)[0]
    found = compared(actual, expected, dtype)
    errors = actual - expected
    np.testing.assert_allclose(
        found.relative_error, np.sqrt(np.sum(errors**2) / np.sum(expected**2)), rtol=1e-12
    )
    assert found.largest_error == np.abs(errors).max()
    assert found.largest_at == size - 2
    assert found.inexact.count == np.sum(actual != load(store(expected, dtype), dtype))


def test_of_equal_errors_the_first_is_told(compared):
    expected = np.zeros(LARGE)
    block = launches.THREADS
    for places in ((block + 7, block * BLOCKS + 7), (5, 9), (9, block + 9)):
        actual = expected.copy()
        actual[list(places)] = 3
        assert compared(actual, expected).largest_at == places[0]


def test_indices_do_not_count_gaps(compared):
    expected = np.arange(60.0).reshape(3, 4, 5)
    actual = expected.copy()
    actual[2, 1, 3] += 1
    found = compared(actual, expected, strides=(50, 7, 1))
    assert found.largest_at == np.ravel_multi_index((2, 1, 3), (3, 4, 5))
    assert found.inexact == Count(1, found.largest_at)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_must_be_where_they_are_expected(compared, dtype):
    nan, inf = np.nan, np.inf
    expected = np.array([nan, inf, -inf, 1.0, 1.0, nan, inf, inf, 2.0])
    actual = np.array([nan, inf, -inf, nan, inf, 1.0, 1.0, -inf, 2.0])
    found = compared(actual, expected, dtype)
    assert found.special == Count(5, 3)
    assert found.error_squares == 0
    assert found.expected_squares == 4


def test_what_overflows_is_expected_to(compared):
    assert compared([np.inf, -np.inf], [65520.0, -1e6], "fp16").special == Count()
    assert compared([65504.0], [65520.0], "fp16").special == Count(1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nothing_wrote_is_told(gpu, checkers, dtype):
    where = placed(gpu, array((700,), (1,), dtype))
    elements(gpu, where)[:300] = store(np.ones(300), dtype)
    at = gpu.allocate(700 * 8)
    gpu.upload(at, np.ones(700))
    found = checkers.compare(where.array, where.address, at)
    assert found.unwritten == Count(400, 300)
    assert found.special == Count()
    assert found.error_squares == 0


def test_a_result_of_zero_must_be_zero(compared):
    assert compared(np.zeros(5), np.zeros(5)).relative_error == 0
    assert compared(np.full(5, 1e-30), np.zeros(5)).relative_error == np.inf


def test_the_same_bits_come_out_every_time(gpu, checkers):
    where = placed(gpu, array((30_000,), (1,), "fp32"))
    checkers.draw(where.array, where.address, 1, integers=False)
    at = gpu.allocate(30_000 * 8)
    gpu.upload(at, np.random.default_rng(0).standard_normal(30_000))
    first, second = (checkers.compare(where.array, where.address, at) for _ in range(2))
    assert first == second


# --- stray, differences --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "strides"), ARRAYS[:-1])
def test_every_place_around_and_between_is_looked_at(gpu, checkers, shape, strides, dtype):
    where = placed(gpu, array(shape, strides, dtype), offset=3 * DTYPE_BYTES[dtype])
    elements(gpu, where)[...] = store(np.zeros(shape), dtype)
    buffer = (where.buffer, where.buffer_bytes, where.address)
    assert checkers.stray(where.array, *buffer) == Count()
    item = np.dtype(STORED[dtype])
    units = gpu.memory.view(where.buffer, where.buffer_bytes // item.itemsize, item)
    front = (where.address - where.buffer) // item.itemsize
    inside = np.zeros(units.size, bool)
    if 0 not in shape:
        for index in np.ndindex(*shape):
            inside[front + sum(i * s for i, s in zip(index, strides, strict=True))] = True
    outside = np.flatnonzero(~inside)
    poison = units[outside[0]].copy()
    chosen = {0, front - 1, units.size - 1, *np.random.default_rng(0).choice(outside, 3)}
    chosen |= set(outside[(outside > front) & (outside < front + where.array.elements)][:2])
    for at in chosen:
        units[at] = 0
        assert checkers.stray(where.array, *buffer) == Count(1, at - front), at
        units[at] = poison
    units[outside[[0, 5, -1]]] = 0
    assert checkers.stray(where.array, *buffer) == Count(3, -front)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_compared_not_values(gpu, checkers, dtype):
    shape = LARGE
    left, right = (placed(gpu, array((shape,), (1,), dtype)) for _ in range(2))
    for where in (left, right):
        elements(gpu, where)[...] = store(np.full(shape, np.nan), dtype)
    same = checkers.differences(left.array, left.address, right.address)
    assert same == Count()  # NaN is not equal to NaN, but to its bits
    for values, at in ((left, 17), (right, shape - 1)):
        elements(gpu, values)[at] = store(np.array([0.0]), dtype)[0]
    elements(gpu, left)[20] = store(np.array([0.0]), dtype)[0]
    elements(gpu, right)[20] = store(np.array([-0.0]), dtype)[0]
    found = checkers.differences(left.array, left.address, right.address)
    assert found == Count(3, 17)


# --- how they are compiled and called ------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", [ARCHS[0], "sm_90", ARCHS[-1]])
def test_they_compile_without_a_word(arch):
    nvrtc = compiler.NvrtcCompiler()
    for definition in DEFINITIONS:
        kernel = nvrtc.compile(codegen.render_definition(definition, arch), arch)
        assert not kernel.warnings
        assert not kernel.rejection
        assert not kernel.resources.stack_bytes


def test_their_sources_are_the_same_every_time():
    for definition in DEFINITIONS:
        source = codegen.render_definition(definition, "sm_90")
        assert source == codegen.render_definition(definition, "sm_90")
        assert source.text.startswith(f"// {definition.entry}, for sm_90.\n// SPDX-License")
        assert (source.name, source.entry) == (definition.name, definition.entry)
        # What it is for is no part of what it is.
        assert source.digest == codegen.render_definition(definition, "sm_80").digest
    missing = dataclasses.replace(DEFINITIONS[0], template="check/nothing.cu.jinja")
    with pytest.raises(TemplateError, match=r"nothing\.cu\.jinja of random is missing"):
        codegen.render_definition(missing, "sm_90")


def test_a_launch_fits_every_device():
    huge = array((2**40,), (1,))
    for launch in (launches.compare(huge), launches.random(huge, 2**63 - 1, integers=True)):
        assert launch.grid == (BLOCKS, 1, 1)
        assert all(-(2**63) <= int(a.value) < 2**63 for a in launch.arguments)
    with pytest.raises(ValueError, match="dimensions"):
        launches.compare(array((1, 1, 1, 1), (1, 1, 1, 1)))


def test_everything_is_given_back(gpu):
    before = gpu.memory.used
    checkers = Checkers(gpu, [compiled(definition.name) for definition in DEFINITIONS])
    checkers.close()
    assert gpu.memory.used == before
    assert gpu.loaded == 0


def test_the_fake_gpu_knows_what_is_not_its_memory(gpu, checkers):
    wild = array((100,), (1,))
    checkers.draw(wild, 4096, 1, integers=False)
    assert isinstance(gpu.kernels["random"], FakeKernel)
    assert gpu.lost == "CUDA_ERROR_ILLEGAL_ADDRESS" or gpu.lost.startswith("touched memory")

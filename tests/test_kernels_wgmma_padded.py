# SPDX-License-Identifier: Apache-2.0
"""matmul wgmma_padded: the copies of operands whose rows do not lie in whole lines."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import itertools
import mmap
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from emulator import build
from emulator.memory import Region
from hypothesis import given, settings
from hypothesis import strategies as st

from tunegen import codegen, kernels, perfmodel, resources
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import disassemble
from tunegen.kernels import matmul_wgmma, matmul_wgmma_padded
from tunegen.model import SM_COUNT, Config, KernelDefinition

MATMUL = kernels.operation("matmul")
H200 = next(chip for chip in perfmodel.CHIPS if chip.name == "NVIDIA H200")
SPEC = matmul_wgmma_padded.SPEC
POISON = 0xFFFF

# Rows, columns, and from one row to the next: single elements, rows shorter than what is read at
# once, rows that begin at every place inside 16 bytes, more rows than a block begins with.
SHAPES = (
    (1, 1, 1), (3, 7, 7), (2, 8, 9), (5, 15, 15), (4, 16, 17), (9, 23, 23), (3, 24, 31),
    (7, 67, 67), (5, 131, 133), (2, 4099, 4099), (1500, 5, 7), (40, 1003, 1003),
)  # fmt: skip


# The emulator's memory faults by pages, words may lie across the ends of an array inside of one:
# where words are read from is told by the kernel.
WATCHED = """extern "C" unsigned long long first_read = ~0ull, last_read = 0;
template <int N, typename T>
Vector<T, N> load_vector(const T* address) {
  const auto first = reinterpret_cast<unsigned long long>(address);
  if (first < first_read) first_read = first;
  if (first + sizeof(T) * N > last_read) last_read = first + sizeof(T) * N;
"""


@functools.cache
def watching_root():
    folder = tempfile.TemporaryDirectory(prefix="tunegen-watching-")
    atexit.register(folder.cleanup)
    text = (resources.data_dir("templates") / "lib" / "vector.cuh").read_text()
    head, found, body = text.partition("template <int N, typename T>\n")
    assert found
    assert body.partition("\n")[0].endswith("load_vector(const T* address) {")
    library = Path(folder.name) / "lib"
    library.mkdir()
    (library / "vector.cuh").write_text(head + WATCHED + body.partition("\n")[2])
    return Path(folder.name)


def pad_definition(unroll, matrices, programmatic=1):
    constants = {
        "PAD_THREADS": matmul_wgmma_padded.PAD_THREADS,
        "PAD_UNROLL": unroll,
        "PAD_MATRICES": matrices,
        "PROGRAMMATIC_LAUNCH": programmatic,
    }
    return KernelDefinition(matmul_wgmma_padded.PAD, "matmul/pad_rows.cu.jinja", {}, constants)


@functools.cache
def pad_kernel(unroll, matrices):
    return build.build_definition(pad_definition(unroll, matrices), "sm_90", watching_root())


class Copied:
    """A matrix that ends, or begins, where memory does, and the place of its copy."""

    def __init__(self, stack, shape, side, residue, random):
        self.rows, self.columns, self.ld = shape
        self.padded = int(matmul_wgmma_padded.padded(self.columns))
        size = 2 * ((self.rows - 1) * self.ld + self.columns)
        self.source = stack.enter_context(Region(size, side=side, residue=residue, step=2))
        self.target = stack.enter_context(Region(2 * self.rows * self.padded, residue=0))
        self.given[:] = random.integers(0, 2**16, self.given.size)
        self.target.bytes.view(np.uint16)[:] = POISON
        self.source.protect(mmap.PROT_READ)

    @property
    def given(self):
        return self.source.bytes.view(np.uint16)

    def blocks(self, unroll):
        return int(matmul_wgmma_padded.copy_blocks(self.rows, self.columns, unroll))

    def values(self):
        return [
            ctypes.c_uint64(self.source.address), ctypes.c_uint64(self.target.address),
            ctypes.c_int64(self.rows), ctypes.c_int32(self.columns), ctypes.c_int64(self.ld),
            ctypes.c_int64(self.padded),
        ]  # fmt: skip

    def check(self):
        steps = (self.ld * 2, 2)
        wanted = np.lib.stride_tricks.as_strided(self.given, (self.rows, self.columns), steps)
        found = self.target.bytes.view(np.uint16).reshape(self.rows, self.padded)
        whole = -(-self.columns // 8) * 8
        np.testing.assert_array_equal(found[:, : self.columns], wanted)
        assert not found[:, self.columns : whole].any(), "zeros beyond the end of a row"
        assert (found[:, whole:] == POISON).all(), "the copy engine does not look there"


def launch(kernel, blocks, values, seed):
    threads = matmul_wgmma_padded.PAD_THREADS
    fault = kernel(
        build.Launch(build.Vec3(blocks, 1, 1), build.Vec3(threads, 1, 1), 0, seed, 20), values
    )
    assert not fault.kind, fault.message


def copy(shapes, unroll, side, residue, seed):
    """Copy one matrix or two and hold the result, and where words were read, against them."""
    random = np.random.default_rng(seed)
    kernel = pad_kernel(unroll, len(shapes))
    first_read = ctypes.c_uint64.in_dll(kernel.library, "first_read")
    last_read = ctypes.c_uint64.in_dll(kernel.library, "last_read")
    first_read.value, last_read.value = 2**64 - 1, 0
    with ExitStack() as stack:
        matrices = [Copied(stack, shape, side, residue, random) for shape in shapes]
        blocks = [matrix.blocks(unroll) for matrix in matrices]
        values = [matrix.values() for matrix in matrices]
        if len(shapes) == 2:
            values[0].append(ctypes.c_int32(blocks[0]))
        launch(kernel, sum(blocks), [*itertools.chain(*values)], seed)
        for matrix in matrices:
            matrix.check()
        if len(shapes) == 1:
            source = matrices[0].source
            assert first_read.value >= source.address
            assert last_read.value <= source.address + source.size
            assert last_read.value or max(shapes[0]) < 32, "words are read"


@pytest.mark.emulator
@pytest.mark.parametrize("unroll", matmul_wgmma_padded.PAD_UNROLLS)
@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_copied_to_whole_words(shape, side, unroll):
    copy([shape], unroll, side, None, sum(shape))


@pytest.mark.emulator
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    gap=st.integers(0, 9),
    side=st.sampled_from(["start", "end"]),
    residue=st.none() | st.integers(0, 15).map(lambda element: 2 * element),
    unroll=st.sampled_from(matmul_wgmma_padded.PAD_UNROLLS),
)
def test_only_a_matrix_itself_is_read(rows, columns, gap, side, residue, unroll):
    copy([(rows, columns, columns + gap)], unroll, side, residue, rows + columns)


@pytest.mark.emulator
@pytest.mark.parametrize("unroll", matmul_wgmma_padded.PAD_UNROLLS)
@pytest.mark.parametrize(
    "shapes",
    [((40, 1003, 1003), (7, 67, 67)), ((7, 67, 69), (1500, 5, 7)), ((1, 1, 1), (1, 1, 2))],
)
def test_one_launch_copies_two_matrices(shapes, unroll):
    copy(shapes, unroll, "end", None, 0)


@pytest.mark.emulator
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("gap", [{}, {"lda": 128}, {"ldb": 128}, {"align": 2}])
def test_a_plan_copies_what_its_product_reads(layout, gap):
    problem = MATMUL.problem("3x37x53x71", dtype="bf16", layout=layout, **gap)
    config = SPEC.default(problem, H200)
    plan = SPEC.bound_plan(config, problem, H200)
    copying = plan.launches[0]
    (found,) = (d for d in SPEC.kernels(config, problem) if d.name == copying.kernel)
    kernel = build.build_definition(
        dataclasses.replace(found, constants={**config, **found.constants}), "sm_90"
    )
    arrays = {array.name: array for array in MATMUL.arrays(problem)}
    maps = {name: next(m for m in plan.tensor_maps if m.name == f"{name.lower()}_map")
            for name in "AB"}  # fmt: skip
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        regions = {
            name: stack.enter_context(Region(arrays[name].bytes, residue=problem.align % 32))
            for name in "AB"
        }
        workspace = stack.enter_context(Region(int(plan.workspace_bytes), residue=0))
        for region in regions.values():
            region.bytes[:] = random.integers(0, 256, region.size)
        letters = {"pointer": "p", "workspace": "p", "int32": "i", "int64": "l"}
        assert kernel.signature == "".join(letters[a.type] for a in copying.arguments)
        values = []
        for argument in copying.arguments:
            base = {"pointer": regions.get(argument.name), "workspace": workspace}
            region = base.get(argument.type)
            if region is not None:
                values.append(ctypes.c_uint64(region.address + argument.value))
            elif argument.type == "int32":
                values.append(ctypes.c_int32(argument.value))
            else:
                values.append(ctypes.c_int64(argument.value))
        launch(kernel, copying.grid[0], values, 0)
        named = {a.name for a in copying.arguments if a.type == "pointer"}
        assert named == {name for name in "AB" if maps[name].array == "workspace"}
        for name in sorted(named):
            # A map's extents go from the fastest axis on; its strides leave out that axis.
            columns, rows, batch = maps[name].extents
            strides = (maps[name].strides[1], maps[name].strides[0], 2)
            copies = workspace.bytes[maps[name].offset :].view(np.uint16)
            read = np.lib.stride_tricks.as_strided(copies, (batch, rows, columns), strides)
            np.testing.assert_array_equal(read, regions[name].elements(arrays[name]))


@pytest.mark.parametrize("stream_k", [1, 2])
def test_copies_lie_behind_sums_that_others_finish(stream_k):
    problem = MATMUL.problem("2x3001x3003x3005", dtype="bf16", layout="nt")
    config = Config({**SPEC.default(problem, H200), "STREAM_K": stream_k})
    plan = SPEC.bound_plan(config, problem, H200)
    copying, product = plan.launches
    taken = [a.value for a in product.arguments if a.type == "workspace"]
    assert taken == [0, plan.zeroed]
    consumers = 1 if config.PINGPONG else config.CONSUMERS
    assert plan.zeroed >= 4 * consumers * H200.sm_count
    slots_end = plan.zeroed + H200.sm_count * 4 * config.BLOCK_M * config.BLOCK_N
    begins = [a.value for a in copying.arguments if a.type == "workspace"]
    assert begins == [m.offset for m in plan.tensor_maps if m.array == "workspace"]
    assert len(begins) == 2
    assert 0 <= begins[0] - slots_end < 256
    assert begins[1] >= begins[0] + 2 * 3001 * 3008 * 2
    assert plan.workspace_bytes >= begins[1] + 2 * 3003 * 3008 * 2
    other = MATMUL.problem("64x72x79", dtype="bf16", layout="nt")
    assert SPEC.bound_plan(config, other, H200).zeroed == plan.zeroed


@given(
    rows=st.integers(1, 2**20),
    columns=st.integers(1, 2**20),
    unroll=st.sampled_from(matmul_wgmma_padded.PAD_UNROLLS),
)
def test_a_grid_covers_every_vector(rows, columns, unroll):
    vectors = -(-columns // 8) * rows
    each = matmul_wgmma_padded.PAD_THREADS * unroll
    blocks = matmul_wgmma_padded.copy_blocks(rows, columns, unroll)
    assert (blocks - 1) * each < vectors <= blocks * each


@pytest.mark.parametrize("size", ["8x9x11", "3000x5000x77", "700x900x1001", "4095x4097x4099"])
def test_small_copies_are_spread_over_the_device(size):
    problem = MATMUL.problem(size, dtype="bf16", layout="nt")
    blocks = SPEC.bound_plan(SPEC.default(problem, H200), problem, H200).launches[0].grid[0]
    vectors = (problem.M + problem.N) * -(-problem.K // 8)
    most = vectors // matmul_wgmma_padded.PAD_THREADS
    assert blocks >= min(2 * H200.sm_count, most)
    assert blocks <= max(4 * H200.sm_count, most / max(matmul_wgmma_padded.PAD_UNROLLS)) + 2


def test_the_copies_are_one_launch_more():
    problem = MATMUL.problem("999x1001x1003", dtype="bf16", layout="nt")
    config = SPEC.default(problem, H200)
    plain = matmul_wgmma.SPEC.work(config, problem, H200)
    assert SPEC.work(config, problem, H200).extra_launches == plain.extra_launches + 1


def test_a_grid_beyond_the_limits_is_refused():
    rows = 2**30
    problem = MATMUL.problem(f"{rows}x{rows}x8192", dtype="bf16", layout="nt", lda=8193)
    assert "blocks" not in SPEC.refuses(problem, H200), "only A is copied"
    both = MATMUL.problem(f"{rows}x{rows}x8192", dtype="bf16", layout="nt", lda=8193, ldb=8193)
    assert "blocks" in SPEC.refuses(both, H200)


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize("programmatic", [0, 1])
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("unroll", matmul_wgmma_padded.PAD_UNROLLS)
def test_all_loads_are_on_their_way_before_one_is_waited_for(unroll, matrices, programmatic):
    source = codegen.render_definition(pad_definition(unroll, matrices, programmatic), "sm_90")
    kernel = NvrtcCompiler().compile(source, SPEC.target("sm_90"))
    assert not kernel.rejection
    assert not kernel.resources.spill_load_bytes
    assert kernel.resources.registers <= 80, "three blocks share a multiprocessor"
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", disassemble(kernel.cubin))
    loads = [i for i, line in enumerate(code) if "LDG.E.128" in line]
    assert len(loads) == 2 * unroll, "two words of every vector"
    assert all(code[i].startswith("@") for i in loads)
    between = code[loads[0] : loads[-1] + 1]
    assert not [line for line in between if re.search(r"\b(BRA|CALL|BSYNC|EXIT|WARPSYNC)\b", line)]
    for i in loads:
        first = int(re.search(r"LDG\.E\.128 R(\d+),", code[i])[1])
        loaded = {f"R{first + word}" for word in range(4)}
        used = [line for line in code[i + 1 : loads[-1] + 1] if loaded & set(_registers(line))]
        assert not used, f"waits for {code[i]}"


def _registers(line):
    return re.findall(r"\bR\d+\b", line)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("size", ["3x0x300x77", "3x200x0x77", "0x200x300x77"])
def test_nothing_is_copied_for_an_output_without_elements(size, layout):
    problem = MATMUL.problem("3x200x300x77", dtype="bf16", layout=layout)
    plan = SPEC.symbolic_plan(SPEC.default(problem, H200), problem)
    copied = [launch.kernel for launch in plan.bind({**problem.names, SM_COUNT: 132}).launches]
    assert copied.count(matmul_wgmma_padded.PAD) == 1
    empty = MATMUL.problem(size, dtype="bf16", layout=layout)
    bound = plan.bind({**empty.names, SM_COUNT: 132})
    assert (bound.launches, bound.workspace_bytes, bound.tensor_maps) == ((), 0, ())


@pytest.mark.nvrtc
def test_a_default_with_all_of_an_epilogue_is_not_rejected():
    special = {"beta": 1, "bias": 1, "activation": "gelu"}
    for size in ("3000x5000x77", "3000x5001x77"):  # C stored by the copy engine, and by threads
        problem = MATMUL.problem(size, dtype="bf16", layout="nt", **special)
        for source in codegen.render(SPEC, SPEC.default(problem, H200), problem, H200.arch):
            kernel = NvrtcCompiler().compile(source, SPEC.target(H200.arch))
            assert not kernel.rejection

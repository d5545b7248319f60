# SPDX-License-Identifier: Apache-2.0
"""The copy engine of a real GPU reads through tensor maps as they are encoded here."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from tunegen.compiler import NvrtcCompiler
from tunegen.device import CudaError, EncodedMap, find_gpus, open_gpu
from tunegen.model import Argument, KernelSource, Launch, LaunchPlan, TensorMap, capability

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]

ROWS, COLUMNS, PITCH = 5, 70, 72  # of the tensor, in elements of 16 bits
BOX = (64, 8)

# One block brings the box at (x, y) and writes its bytes as they lie in shared memory. The first
# parameter is there so that the map does not lie where the parameters begin.
SOURCE = """
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

extern "C" __global__ void tunegen_box(
    int x, const __grid_constant__ TensorMap map, int y, unsigned short* out) {
  __shared__ __align__(1024) unsigned short box[64 * 8];
  __shared__ unsigned long long barrier;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(box));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        ::"r"(at), "n"(64 * 8 * 2) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(&map), "r"(at), "r"(x), "r"(y)
        : "memory");
  }
  __syncthreads();
  for (unsigned done = 0; !done;) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
        "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at) : "memory");
  }
  for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x) out[i] = box[i];
}
"""


@pytest.fixture(scope="module")
def gpu():
    arch = find_gpus().devices[0].arch
    if capability(arch) < 90:
        pytest.skip(f"{arch} has no copy engine")
    opened, _ = open_gpu(0)
    return opened


@pytest.fixture(scope="module")
def kernels(gpu):
    arch = find_gpus().devices[0].arch
    source = KernelSource("box", "tunegen_box", SOURCE, "box")
    loaded = gpu.load([NvrtcCompiler().compile(source, arch)])
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def bits():
    """Every pattern of 16 bits may lie there: NaNs with payloads, signed zeros, denormals."""
    found = np.random.default_rng(1).integers(0, 2**16, (ROWS, PITCH), dtype=np.uint16)
    found[0, :4] = 0x7F81, 0xFFC1, 0x8000, 0x0001
    return found


def copied(gpu, kernels, bits, x, y, array="x", offset=0, **changes):
    """The box at (x, y), and what of the tensor belongs there."""
    made = TensorMap(
        "map", array, "bf16", (COLUMNS, ROWS), (2 * PITCH,), BOX, 0, 256, offset
    )  # fmt: skip
    arguments = (
        Argument("x", "int32", x), Argument("map", "tensor_map"), Argument("y", "int32", y),
        Argument("out", "pointer"),
    )  # fmt: skip
    plan = LaunchPlan(
        (Launch("box", (1, 1, 1), (128, 1, 1), arguments),), offset + bits.nbytes,
        tensor_maps=(dataclasses.replace(made, **changes),),
    ).bind({})  # fmt: skip
    source, out = gpu.allocate(offset + bits.nbytes), gpu.allocate(2 * BOX[0] * BOX[1])
    try:
        gpu.upload(source + offset, bits)
        gpu.fill(out, 0xA5, 2 * BOX[0] * BOX[1])
        call = kernels.bind(plan, {"x": source, "out": out}, {}, source)
        call.launch(gpu.stream)
        found = gpu.download(out, np.empty(BOX[::-1], np.uint16))
    finally:
        gpu.release(source)
        gpu.release(out)
    padded = np.zeros((y + BOX[1] + ROWS, x + BOX[0] + COLUMNS), np.uint16)
    padded[:ROWS, :COLUMNS] = bits[:, :COLUMNS]
    return found, padded[y : y + BOX[1], x : x + BOX[0]]


@pytest.mark.parametrize("place", [{}, {"array": "workspace", "offset": 4096 + 16}])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 1), (64, 4)])
def test_bits_arrive_and_the_outside_is_zero(gpu, kernels, bits, x, y, dtype, place):
    found, expected = copied(gpu, kernels, bits, x, y, dtype=dtype, **place)
    np.testing.assert_array_equal(found, expected)


def test_a_swizzled_box_has_its_16_byte_parts_exchanged(gpu, kernels, bits):
    """Swizzle 128: part i of row r lies at i ^ r % 8."""
    found, expected = copied(gpu, kernels, bits, 0, 0, swizzle=128)
    parts = expected.reshape(8, 8, 8)
    swizzled = np.stack([[parts[r, i ^ r] for i in range(8)] for r in range(8)])
    np.testing.assert_array_equal(found.reshape(8, 8, 8), swizzled)


@pytest.mark.parametrize("promotion", [0, 64, 128, 256])
def test_every_promotion_is_taken(gpu, kernels, bits, promotion):
    found, expected = copied(gpu, kernels, bits, 0, 0, l2_promotion=promotion)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("dtype", "columns"), [("fp32", 16), ("fp64", 8)])
@pytest.mark.parametrize("swizzle", [0, 64, 128])
def test_wider_elements_and_five_dimensions_are_taken(gpu, dtype, columns, swizzle):
    wide = TensorMap(
        "m", "x", dtype, (100, 4, 4, 4, 4), (2**10, 2**12, 2**14, 2**16), (columns, 2, 1, 1, 1),
        swizzle, 0,
    )  # fmt: skip
    address = gpu.allocate(4 * 2**16)
    encoded = EncodedMap(wide.bind({}))
    encoded.place(address)
    assert any(ctypes.string_at(encoded.address, 128))
    flat = EncodedMap(dataclasses.replace(wide, extents=(100,), strides=(), box=(columns,)))
    flat.place(address)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        flat.place(address + 8)
    gpu.release(address)

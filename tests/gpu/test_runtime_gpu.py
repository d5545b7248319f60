# SPDX-License-Identifier: Apache-2.0
"""Exported kernels on the GPU: in a process that has nothing but the folder, beside torch, and on
devices that they are not for."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tunegen
from tunegen import codegen
from tunegen.bundle import Bundle, BundleEntry, BundleImage, write_bundle
from tunegen.compiler import KernelCache, NvrtcCompiler
from tunegen.device import driver, find_gpus
from tunegen.errors import BundleError, DeviceError, PlanError
from tunegen.kernels import matmul_simt, vector_axpy
from tunegen.model import Config
from tunegen.perfmodel import default_chip
from tunegen.runtime import Context, Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.nvrtc]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def arch():
    return find_gpus().devices[0].arch


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a bundle of specs with configs, cubins for some archs and PTX for one."""
    cache = KernelCache(tmp_path_factory.mktemp("cache"))

    def written(*entries, archs=(), floor=""):
        compiler = NvrtcCompiler(cache)
        made = []
        for spec, config, problem in entries:
            full = Config({**spec.default(problem, default_chip("sm_80")), **config})
            sources = codegen.render(spec, full, problem, "sm_80")
            images = tuple(
                BundleImage(
                    tuple(compiler.compile(source, arch) for source in sources),
                    "default, unmeasured",
                    "built",
                )
                for arch in archs
            )
            lowest = tuple(compiler.compile(source, floor) for source in sources if floor)
            made.append(BundleEntry(spec, problem, full, sources, images, lowest))
        folder = tmp_path_factory.mktemp("bundle") / "shipped"
        write_bundle(folder, made, tunegen_version=tunegen.__version__)
        return folder

    return written


def matmul(split=1, **problem):
    made_for = matmul_simt.SPEC.operation.problem("1024x1024x1024", **problem)
    return matmul_simt.SPEC, {"SPLIT_K": split}, made_for


def axpy(**problem):
    return vector_axpy.SPEC, {}, vector_axpy.SPEC.operation.problem("2^20", **problem)


class OnDevice:
    """A NumPy array copied to the device, strides and all, freed at the end of the block."""

    def __init__(self, array: np.ndarray) -> None:
        owner = array if array.base is None else array.base
        self._owner, self._offset = owner, array.ctypes.data - owner.ctypes.data
        self._array = array
        self.address = int(driver.call("cuMemAlloc", owner.nbytes))
        driver.call("cuMemcpyHtoD", self.address, owner.ctypes.data, owner.nbytes)
        self.__cuda_array_interface__ = {
            "data": (self.address + self._offset, False), "shape": array.shape,
            "strides": array.strides, "typestr": array.dtype.str, "version": 3,
        }  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *raised) -> None:
        driver.call("cuMemFree", self.address)

    def back(self) -> np.ndarray:
        """The elements as they are now, after everything that is on the device has run."""
        driver.call("cuCtxSynchronize")
        driver.call("cuMemcpyDtoH", self._owner.ctypes.data, self.address, self._owner.nbytes)
        return self._array


def drawn(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def relative_error(found, expected):
    wide = found.astype(np.float64) - expected
    return float(np.sqrt(np.mean(wide**2) / np.mean(expected**2)))


# --- a process of its own ------------------------------------------------------------------------

STRANGER = """
import sys
import numpy as np
import tunegen

kernels = {name: tunegen.load(sys.argv[1], operation=name) for name in ("matmul", "axpy")}
foreign = {"optuna", "jinja2", "torch", "tunegen.database", "tunegen.compiler", "tunegen.session"}
assert not foreign & set(sys.modules), foreign & set(sys.modules)

from tunegen.device.driver import call

def upload(values):
    address = int(call("cuMemAlloc", values.nbytes))
    call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)
    return address

def download(address, like):
    values = np.empty_like(like)
    call("cuMemcpyDtoH", values.ctypes.data, address, values.nbytes)
    return values

draw = np.random.default_rng(0)
stream = call("cuStreamCreate", 1)
for m, n, k in ((1000, 1000, 1000), (64, 4096, 512), (1, 8, 4), (300, 200, 0)):
    a, b = (draw.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    c = np.full((m, n), np.nan, np.float32)
    out = upload(c)
    sizes = {"M": m, "N": n, "K": k}
    inputs = [upload(x) if x.size else 0 for x in (a, b)]
    call("cuCtxSynchronize")  # a copy from pageable memory may return before it has arrived
    kernels["matmul"].launch(A=inputs[0], B=inputs[1], C=out, sizes=sizes, stream=stream)
    call("cuStreamSynchronize", stream)
    wide = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(download(out, c) - wide).max() / max(1.0, np.abs(wide).max())
    assert error < 1e-5, (m, n, k, error)

for n in (1, 1000, 2**20 + 3):
    x, y = (draw.standard_normal(n).astype(np.float32) for _ in range(2))
    at = upload(y)
    kernels["axpy"].launch(x=upload(x), y=at, a=0.5, sizes={"N": n})
    call("cuCtxSynchronize")
    np.testing.assert_allclose(download(at, y), 0.5 * x + y, rtol=1e-6, atol=1e-6)
for kernel in kernels.values():
    kernel.close()
print("right")
"""


@pytest.mark.parametrize("split", [1, 3])
def test_a_stranger_runs_the_folder(write, arch, tmp_path, split):
    """A fresh process, its home empty: no database, no cache, no compiler, no torch."""
    folder = write(matmul(split), axpy(), archs=(arch,))
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if "XDG" not in name}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"HOME": str(home), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(folder)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"
    assert not [path for path in home.rglob("*") if "tunegen" in path.name]


# --- operands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("layout", "beta"), [("nn", 0), ("nt", 1)])
def test_strided_and_transposed_operands(write, arch, layout, beta, split):
    folder = write(matmul(split, layout=layout, beta=beta), archs=(arch,))
    with tunegen.load(folder) as kernel:
        for batch, m, n, k in ((1, 1000, 500, 260), (3, 65, 132, 68)):
            a = drawn(batch, m, k + 4)[:, :, :k]
            b = drawn(batch, n, k) if layout == "nt" else drawn(batch, k, n)
            c = drawn(batch, m, n)
            logical = b.swapaxes(1, 2) if layout == "nt" else b
            expected = 0.5 * np.matmul(a, logical, dtype=np.float64)
            expected += 2.0 * c.astype(np.float64) if beta else 0
            if not beta:
                c[...] = np.nan
            with OnDevice(a) as on_a, OnDevice(logical) as on_b, OnDevice(c) as on_c:
                kernel.launch(A=on_a, B=on_b, C=on_c, alpha=0.5, beta=2.0 * beta)
                assert relative_error(on_c.back(), expected) < 1e-6


def test_misaligned_operands(write, arch):
    """A vector kernel takes any base, the matmul says in one line that it does not."""
    folder = write(matmul(), axpy(), archs=(arch,))
    x, y = drawn(10_004)[1:], drawn(10_003)
    expected = 3.0 * x + y
    axpy_kernel = tunegen.load(folder, operation="axpy")
    with axpy_kernel as kernel, OnDevice(x) as on_x, OnDevice(y) as on_y:
        kernel.launch(x=on_x, y=on_y, a=3.0)
        np.testing.assert_allclose(on_y.back(), expected, rtol=1e-6, atol=1e-6)
    with tunegen.load(folder, operation="matmul") as kernel, OnDevice(drawn(64, 64)) as on_a:
        sizes = {"M": 32, "N": 32, "K": 32}
        with pytest.raises(PlanError, match="align a multiple of 16") as why:
            kernel.launch(A=on_a.address, B=on_a.address + 4, C=on_a.address, sizes=sizes)
        assert "\n" not in str(why.value)


def test_a_null_and_an_empty_problem(write, arch):
    with tunegen.load(write(axpy(), archs=(arch,))) as kernel:
        kernel.launch(x=0, y=0, a=1.0, sizes={"N": 0})


def test_torch_tensors_on_its_current_stream(write, arch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with tunegen.load(write(matmul(layout="nt", dtype="bf16"), archs=(arch,))) as kernel:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(512, 128, device="cuda", dtype=torch.bfloat16)
            kernel.launch(A=x, B=weight, C=y, stream=torch.cuda.current_stream())
            again = torch.empty_like(y)
            kernel.launch(A=x, B=weight.T, C=again, stream=side)
        side.synchronize()
        expected = x.double() @ weight.double().T
        assert float((y.double() - expected).norm() / expected.norm()) < 4e-3
        assert torch.equal(y, again)


def test_a_graph_of_torch_captures_the_call(write, arch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with tunegen.load(write(matmul(3), archs=(arch,))) as kernel:
        a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
        c = torch.zeros(64, 64, device="cuda")
        needed = kernel.workspace_bytes({"M": 64, "N": 64, "K": 64})
        scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        kernel.launch(A=a, B=b, C=c, workspace=scratch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            with pytest.raises(DeviceError, match="give workspace="):
                kernel.launch(A=a, B=b, C=c, stream=stream)
            kernel.launch(A=a, B=b, C=c, stream=stream, workspace=scratch)
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = a.double() @ b.double()
        assert float((c.double() - expected).norm() / expected.norm()) < 1e-6


# --- devices -------------------------------------------------------------------------------------


def test_ptx_is_compiled_by_the_driver(write):
    folder = write(axpy(), floor="sm_75")
    x, y = drawn(1000), drawn(1001)[1:]
    expected = 2.0 * x + y
    try:
        kernel = tunegen.load(folder)
    except BundleError as refusal:  # its text says that the toolkit is newer than the driver
        pytest.skip(str(refusal))
    with kernel, OnDevice(x) as on_x, OnDevice(y) as on_y:
        assert kernel.program.source.startswith("PTX")
        kernel.launch(x=on_x, y=on_y, a=2.0)
        np.testing.assert_allclose(on_y.back(), expected, rtol=1e-6, atol=1e-6)


def test_an_image_for_another_arch_is_refused(write, arch):
    other = "sm_120" if arch != "sm_120" else "sm_90"
    with pytest.raises(BundleError) as why:
        tunegen.load(write(axpy(), archs=(other,)))
    assert arch in str(why.value)
    assert other in str(why.value)


def test_the_driver_refuses_a_wrong_image_and_lives(write, arch):
    """A manifest can lie: what it calls ours is for another architecture."""
    other = "sm_120" if arch != "sm_120" else "sm_90"
    bundle = Bundle.open(write(axpy(), archs=(other, arch)))
    entry = bundle.manifest.entries[0]
    right = tunegen.load(bundle.folder)
    images = tuple(
        dataclasses.replace(image, content=bundle.read(shipped))
        for image, shipped in zip(
            right.program.images, bundle.image(entry, other).kernels, strict=True
        )
    )
    with pytest.raises(DeviceError, match="does not load on device") as why:
        Kernel(dataclasses.replace(right.program, images=images), Context())
    assert "\n" not in str(why.value)
    x, y = drawn(1000), drawn(1001)[1:]
    with right, OnDevice(x) as on_x, OnDevice(y) as on_y:
        right.launch(x=on_x, y=on_y, a=0.0)
        np.testing.assert_array_equal(on_y.back(), drawn(1001)[1:])


def test_a_device_that_is_not_there(write, arch):
    with pytest.raises(DeviceError, match=r"no device 99: there are \d+, numbered from 0"):
        tunegen.load(write(axpy(), archs=(arch,)), device=99)


def test_a_workspace_that_does_not_fit(write, arch):
    """Partial sums of a matrix that no card holds; nothing is launched, and the next call runs."""
    with tunegen.load(write(matmul(3), archs=(arch,))) as kernel, OnDevice(drawn(64, 64)) as some:
        huge = {"M": 2**20, "N": 2**20, "K": 64}
        with pytest.raises(DeviceError, match=r"needs [\d,]+ bytes, [\d,]+ are free on device"):
            kernel.launch(A=some.address, B=some.address, C=some.address, sizes=huge)
        with OnDevice(drawn(64, 64)) as out:
            kernel.launch(A=some, B=some, C=out)
            expected = np.matmul(drawn(64, 64), drawn(64, 64), dtype=np.float64)
            assert relative_error(out.back(), expected) < 1e-6

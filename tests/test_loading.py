# SPDX-License-Identifier: Apache-2.0
"""From a bundle or a record to a kernel that launches: the right image for the device, or one
line that says why there is none. The driver is a stand-in; with g++, what it launches runs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_driver import FakeDriver

import tunegen
from tunegen import codegen, loading
from tunegen.bundle import BundleEntry, BundleImage, cuda_branch, write_bundle
from tunegen.device import driver
from tunegen.errors import BundleError, DatabaseError, DeviceError, UsageError
from tunegen.kernels import matmul_naive, matmul_simt, vector_axpy
from tunegen.model import CompiledKernel, Config, FoundGpus, Resources
from tunegen.perfmodel import default_chip

ROOT = Path(__file__).resolve().parents[1]


def compiled(source, target, *, shared=0, isa="9.0"):
    """A kernel as the compiler would hand it over, with made-up code that says what it is for."""
    return CompiledKernel(
        name=source.name,
        entry=source.entry,
        target=target,
        ptx=f"//\n.version {isa}\n.target {target}\n".encode(),
        cubin=f"\x7fELF {source.name} {target}".encode(),
        resources=Resources(32, 0, 0, 0, shared),
        warnings="",
        rejection="",
        nvrtc="13.0",
        seconds=0.1,
        from_cache=False,
    )


def entry_of(spec, targets=("sm_90",), floor="", config=None, sizes=None, isa="9.0", shared=0,
             **problem):  # fmt: skip
    problem = spec.operation.problem(sizes, **problem)
    config = Config({**spec.default(problem, default_chip("sm_80")), **(config or {})})
    sources = codegen.render(spec, config, problem, "sm_80")

    def kernels(target):
        return tuple(compiled(source, target, isa=isa, shared=shared) for source in sources)

    images = tuple(BundleImage(kernels(target), "default, unmeasured", "built")
                   for target in targets)  # fmt: skip
    return BundleEntry(spec, problem, config, sources, images, kernels(floor) if floor else ())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def gpu(monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    fake = FakeDriver()
    monkeypatch.setattr(driver, "call", fake)
    use_driver(monkeypatch, "580.65.06")
    yield fake
    loading._kernel_driver.cache_clear()


def use_driver(monkeypatch, version):
    loading._kernel_driver.cache_clear()
    monkeypatch.setattr(loading, "find_gpus", lambda: FoundGpus(driver=version))


@pytest.fixture
def folder(tmp_path):
    def written(*entries):
        write_bundle(tmp_path / "shipped", entries, tunegen_version="1.2.3")
        return tmp_path / "shipped"

    return written


def launch_axpy(kernel, gpu):
    gpu.signed_by(kernel.program.plan)
    kernel.launch(x=0x100, y=0x200, a=2.0, sizes={"N": 1000})


# --- which image ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "loaded"),
    [(80, "sm_80"), (86, "sm_80"), (90, "sm_90"), (89, "sm_80"), (100, ".target sm_75")],
)
def test_the_image_for_the_device_is_loaded(gpu, folder, arch, loaded):
    gpu.arch = arch
    kernel = tunegen.load(folder(entry_of(vector_axpy.SPEC, ("sm_80", "sm_90"), "sm_75")))
    assert [loaded in image.decode() for image in gpu.images] == [True]
    launch_axpy(kernel, gpu)
    assert gpu.launches[0].values == (0x100, 0x200, 1000, 2.0)


def test_an_image_for_another_arch_is_refused_in_one_line(gpu, folder):
    """The error can be caught and names both sides; no load is attempted."""
    gpu.arch, gpu.name = 86, "NVIDIA RTX A4000"
    with pytest.raises(BundleError) as why:
        tunegen.load(folder(entry_of(vector_axpy.SPEC, ("sm_90", "sm_100"))))
    for part in ("sm_86", "sm_90 does not run", "sm_100 does not run", "no PTX"):
        assert part in str(why.value)
    assert "\n" not in str(why.value)
    assert not gpu.images


def test_a_driver_that_is_too_old_is_refused(gpu, folder, monkeypatch):
    use_driver(monkeypatch, "570.124.06")
    gpu.cuda = 12080
    with pytest.raises(BundleError) as why:
        tunegen.load(folder(entry_of(vector_axpy.SPEC, ("sm_90",), "sm_75")))
    for part in ("driver 570.124.06", "sm_90 needs a driver from 580 on", "PTX for sm_75"):
        assert part in str(why.value)
    assert "\n" not in str(why.value)
    assert not gpu.images


def test_a_driver_that_cannot_be_told_is_tried(gpu, folder, monkeypatch):
    use_driver(monkeypatch, "")
    gpu.cuda = 12080
    tunegen.load(folder(entry_of(vector_axpy.SPEC)))
    assert len(gpu.images) == 1


def test_a_driver_that_refuses_is_named_with_what_is_needed(gpu, folder, monkeypatch):
    use_driver(monkeypatch, "")
    gpu.cuda = 12080
    gpu.refuse["cuModuleLoadData"] = "CUDA_ERROR_INVALID_IMAGE"
    with pytest.raises(DeviceError) as why:
        tunegen.load(folder(entry_of(vector_axpy.SPEC)))
    for part in ("cubin for sm_90", "CUDA 12.8", "INVALID_IMAGE", "a driver from 580 on"):
        assert part in str(why.value)


def test_a_newer_cuda_library_beside_an_older_driver_counts(gpu, folder, monkeypatch):
    """The cuda-compat packages."""
    use_driver(monkeypatch, "535.104.05")
    gpu.cuda = 13000
    tunegen.load(folder(entry_of(vector_axpy.SPEC)))
    assert len(gpu.images) == 1


def test_branches_of_cuda():
    assert cuda_branch("13.0") == "580"
    assert cuda_branch("12.8") == ""


def test_ptx_of_a_newer_toolkit_is_left_for_the_cubin(gpu, folder):
    """The driver of CUDA 13.0 loads the cubins of any toolkit 13, but no PTX 9.2."""
    shipped = folder(entry_of(vector_axpy.SPEC, ("sm_90",), "sm_75", isa="9.2"))
    tunegen.load(shipped)
    assert b"ELF" in gpu.images[0]
    gpu.arch = 120
    with pytest.raises(BundleError, match=r"version 9\.2, which needs a driver from 595"):
        tunegen.load(shipped)
    assert len(gpu.images) == 1


def test_a_block_that_does_not_fit_is_refused(gpu, folder):
    gpu.arch, gpu.shared_bytes = 86, 99 * 1024
    large = entry_of(vector_axpy.SPEC, ("sm_80",), shared=100 * 1024)
    with pytest.raises(BundleError, match="needs 102400 bytes of shared memory per block, sm_86"):
        tunegen.load(folder(large))
    assert not gpu.images


def test_the_device_that_is_asked_for(gpu, folder):
    gpu.devices = 2
    shipped = folder(entry_of(vector_axpy.SPEC))
    kernel = tunegen.load(shipped, device=1)
    launch_axpy(kernel, gpu)
    assert gpu.launches[0].context == gpu.primary(1)
    with pytest.raises(DeviceError, match="no device 2: there are 2, numbered from 0"):
        tunegen.load(shipped, device=2)


# --- which entry ---------------------------------------------------------------------------------


def test_an_entry_is_chosen_by_what_it_computes(gpu, folder):
    shipped = folder(
        entry_of(vector_axpy.SPEC),
        entry_of(vector_axpy.SPEC, dtype="bf16"),
        entry_of(matmul_naive.SPEC, sizes="64x64x64"),
        entry_of(matmul_naive.SPEC, sizes="64x64x64", layout="nt"),
    )
    half = tunegen.load(shipped, operation="axpy", dtype="bf16")
    assert {operand.dtype for operand in half.program.operands} == {"bf16"}
    other = tunegen.load(shipped, operation="matmul", layout="nt", spec="naive")
    assert other.program.operands[1].shape == ("B", "N", "K")
    assert tunegen.load(shipped, name=half.program.name).program.name == half.program.name
    with pytest.raises(BundleError, match=r"2 entries fit \(choose by name: axpy_vector_bf16"):
        tunegen.load(shipped, operation="axpy")
    with pytest.raises(UsageError, match="unknown dtype"):
        tunegen.load(shipped, operation="axpy", dtype="fp8")


def test_a_single_entry_needs_no_choice(gpu, folder):
    assert tunegen.load(folder(entry_of(vector_axpy.SPEC))).program.name.startswith("axpy_vector")


def test_a_damaged_file_is_not_loaded(gpu, folder):
    shipped = folder(entry_of(vector_axpy.SPEC))
    (cubin,) = shipped.rglob("*.cubin")
    cubin.write_bytes(cubin.read_bytes() + b"!")
    with pytest.raises(BundleError, match="is not the file in the manifest"):
        tunegen.load(shipped)
    assert not gpu.images


def test_no_bundle_needs_no_driver(gpu, tmp_path):
    with pytest.raises(BundleError, match="is no bundle"):
        tunegen.load(tmp_path / "nothing")
    assert not gpu.calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": ["Q"]}, "it uses Q, which is no size of its problem"),
        ({"strides": [1, 1]}, "x has 1 axes, 2 strides"),
        ({"shape": ["N +"]}, "it cannot be evaluated"),
        ({"shape": None}, "damaged manifest"),
    ],
)
def test_operands_that_make_no_sense_are_found_on_opening(gpu, folder, change, message):
    shipped = folder(entry_of(vector_axpy.SPEC))
    manifest = json.loads((shipped / "manifest.json").read_text())
    manifest["entries"][0]["operands"][0] |= change
    (shipped / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        tunegen.load(shipped)


# --- what a process needs ------------------------------------------------------------------------

PROBE = """
import json, sys
import tunegen.loading, tunegen.runtime
from tunegen.device import driver
driver.bindings()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("tunegen."))))
"""


def test_loading_a_bundle_needs_neither_compiler_nor_search():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packages, ours = map(json.loads, done.stdout.splitlines())
    others = set(packages) - set(sys.stdlib_module_names)
    heavy = {"optuna", "jinja2", "click", "rich", "filelock", "platformdirs", "pynvml", "torch"}
    assert not others & heavy
    assert {"numpy", "msgspec", "cuda"} <= others
    tools = {"codegen", "compiler", "database", "kernels", "search", "session", "tuner"}
    assert not {name.split(".")[1] for name in ours} & tools


# --- kernels that run ----------------------------------------------------------------------------


class OnHost:
    """A NumPy array that claims to be on the device: the stand-in's launches run on the host."""

    def __init__(self, array, typestr=None):
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False), "shape": array.shape, "strides": array.strides,
            "typestr": typestr or array.dtype.str, "version": 3,
        }  # fmt: skip


def aligned(shape, dtype=np.float32):
    """An array whose address is a multiple of 64, as an allocation on a device is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def drawn(shape, seed):
    values = aligned(shape)
    values[...] = np.random.default_rng(seed).standard_normal(shape)
    return values


def emulate(gpu, entry: BundleEntry):
    from emulator import build

    made = build.build(entry.spec, entry.config, entry.problem, "sm_80")
    for kernel in made.values():
        gpu.kernels[kernel.source.entry] = kernel


@pytest.mark.emulator
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("layout", "beta"), [("nn", 0), ("nt", 1)])
def test_a_loaded_matmul_computes_it(gpu, folder, split, layout, beta):
    """The arguments as the driver gets them, handed to the real kernel: matrices in larger ones,
    a transposed view, a batch."""
    config = {"SPLIT_K": split}
    entry = entry_of(matmul_simt.SPEC, config=config, sizes="64x64x64", layout=layout, beta=beta)
    emulate(gpu, entry)
    kernel = tunegen.load(folder(entry))
    gpu.signed_by(kernel.program.plan)
    for batch, m, n, k in ((1, 70, 40, 36), (2, 33, 12, 68)):
        a, c = drawn((batch, m, k + 4), 1)[:, :, :k], drawn((batch, m, n), 2)
        b = drawn((batch, n, k) if layout == "nt" else (batch, k, n), 3)
        product = np.matmul(a, b.swapaxes(1, 2) if layout == "nt" else b, dtype=np.float64)
        expected = 0.5 * product + (2.0 * c.astype(np.float64) if beta else 0)
        if not beta:
            c[...] = np.nan  # C is not read
        logical = b.swapaxes(1, 2) if layout == "nt" else b
        given = [array[0] if batch == 1 else array for array in (a, logical, c)]
        on_a, on_b, on_c = map(OnHost, given)
        kernel.launch(A=on_a, B=on_b, C=on_c, alpha=0.5, beta=2.0 * beta)
        np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.emulator
def test_a_loaded_axpy_computes_it(gpu, folder):
    entry = entry_of(vector_axpy.SPEC, sizes="4096")
    emulate(gpu, entry)
    kernel = tunegen.load(folder(entry))
    gpu.signed_by(kernel.program.plan)
    for n in (10007, 1, 0):
        x, y = drawn((n + 1,), 1)[1:], drawn((n,), 2)  # x is misaligned
        expected = 1.5 * x + y
        kernel.launch(x=OnHost(x), y=OnHost(y), a=1.5)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert len(gpu.launches) == 2


# --- records -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory, cache):
    """A predicted record; whether it was measured changes nothing about loading."""
    db = tmp_path_factory.mktemp("db")
    done = tunegen.tune(
        "matmul", arch="sm_90", problem="64x64x64", spec="naive", trials=1, evaluator="model",
        db=db, cache=cache,
    )  # fmt: skip
    return done.record


@pytest.mark.nvrtc
def test_a_record_is_compiled_and_loaded(gpu, record):
    kernel = tunegen.load(record)
    assert gpu.images[0][:4] == b"\x7fELF"
    assert f"the one that was predicted for {record.device.name}" in kernel.program.source
    gpu.signed_by(kernel.program.plan)
    kernel.launch(A=0x100, B=0x200, C=0x300, sizes={"M": 5, "N": 6, "K": 7})
    assert gpu.launches[0].values[:7] == (0x100, 0x200, 0x300, 1, 5, 6, 7)


@pytest.mark.nvrtc
def test_a_record_rebuilt_into_other_bytes_says_so(gpu, record):
    images = (dataclasses.replace(record.images[0], cubin_sha256="0" * 64),)
    kernel = tunegen.load(dataclasses.replace(record, images=images))
    assert "rebuilt, other bytes than those predicted" in kernel.program.source


@pytest.mark.nvrtc
def test_a_record_for_another_arch_is_refused(gpu, record):
    gpu.arch, gpu.name = 86, "NVIDIA RTX A4000"
    with pytest.raises(DeviceError) as why:
        tunegen.load(record)
    for part in ("sm_90", record.device.name, "sm_86", "NVIDIA RTX A4000"):
        assert part in str(why.value)
    assert not gpu.images


@pytest.mark.nvrtc
def test_a_record_of_another_chip_of_the_arch_says_where_it_is_from(gpu, record):
    gpu.name = "NVIDIA GH200"
    kernel = tunegen.load(record)
    assert f"for {record.device.name}" in kernel.program.source
    assert "GH200" in repr(kernel)


@pytest.mark.nvrtc
def test_a_record_needs_a_driver_for_its_cubin(gpu, record, monkeypatch):
    use_driver(monkeypatch, "570.124.06")
    gpu.cuda = 12080
    with pytest.raises(DeviceError, match=r"needs a driver from 580 on, .* has 570\.124\.06"):
        tunegen.load(record)
    assert not gpu.images


@pytest.mark.nvrtc
def test_a_stale_or_illegal_record_is_refused(gpu, record):
    images = (dataclasses.replace(record.images[0], source_digest="0" * 64),)
    with pytest.raises(DatabaseError, match="stale: the template has changed"):
        tunegen.load(dataclasses.replace(record, images=images))
    with pytest.raises(DatabaseError, match="BLOCK_M"):
        tunegen.load(dataclasses.replace(record, config={**record.config, "BLOCK_M": 7}))
    assert not gpu.images


@pytest.mark.nvrtc
def test_a_choice_has_to_agree_with_the_record(gpu, record):
    tunegen.load(record, operation="matmul", dtype="fp32", layout="nn", spec="naive")
    with pytest.raises(UsageError, match="the record has dtype 'fp32', not 'bf16'"):
        tunegen.load(record, dtype="bf16")
    with pytest.raises(UsageError, match="name='matmul' chooses from a folder"):
        tunegen.load(record, name="matmul")

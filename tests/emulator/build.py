# SPDX-License-Identifier: Apache-2.0
"""Generated CUDA source in, function in this process out: g++ instead of NVRTC."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tunegen import codegen
from tunegen.model import (
    Config,
    KernelDefinition,
    KernelSource,
    KernelSpec,
    Problem,
    capability,
)

HERE = Path(__file__).resolve().parent

# Everything the sanitizer finds becomes a fault with its line; alignment is what the hardware
# demands and x86 does not.
_SANITIZERS = ",".join(
    ("bounds", "alignment", "signed-integer-overflow", "integer-divide-by-zero", "shift",
     "unreachable")
)  # fmt: skip
_OPTIONS = (
    "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-w",
)  # fmt: skip

# Dynamic shared memory, declared inside of a function, is an array without an extent; a host has
# only pointers for that.
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\w+\)\s+|alignas\(\w+\)\s+)?([\w ]+?)\s+(\w+)\[\]\s*;"
)


class Unemulatable(Exception):
    """A kernel uses what only a GPU has: inline PTX, tensor maps."""


class Vec3(ctypes.Structure):
    """``emulator_uint3``."""

    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Launch(ctypes.Structure):
    """``EmulatorLaunch``."""

    _fields_ = [
        ("grid", Vec3),
        ("block", Vec3),
        ("shared_bytes", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("limit_s", ctypes.c_uint),
        ("cluster", Vec3),
    ]


class Fault(ctypes.Structure):
    """``EmulatorFault``."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("line", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("block", Vec3),
        ("thread", Vec3),
        ("message", ctypes.c_char * 200),
    ]


@dataclasses.dataclass(frozen=True)
class HostKernel:
    """A kernel built for the host. ``signature`` has one letter per parameter: pointer, int (i),
    long long (l), float, double."""

    source: KernelSource
    library: ctypes.CDLL
    signature: str

    def __call__(self, launch: Launch, values: list[ctypes._SimpleCData]) -> Fault:  # type: ignore[type-arg]
        """Run every thread of every block; ``values`` are the arguments."""
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        fault = Fault()
        self.library.emulator_launch(ctypes.byref(launch), pointers, ctypes.byref(fault))
        return fault


def build(spec: KernelSpec, config: Config, problem: Problem, arch: str) -> dict[str, HostKernel]:
    """Every kernel that ``config`` needs, by name, built once per source and architecture.

    Raises :class:`Unemulatable`, and ``AssertionError`` with g++'s words where it refuses one.
    """
    emulated = dataclasses.replace(spec, template_root=_template_root(spec.template_root))
    return {
        source.name: _built(source, capability(spec.target(arch)))
        for source in codegen.render(emulated, config, problem, arch)
    }


def build_definition(
    definition: KernelDefinition, arch: str, root: Path | None = None
) -> HostKernel:
    """A kernel of a template, the shipped ones' or those under ``root``, as :func:`build` does."""
    source = codegen.render_definition(definition, arch, _template_root(root))
    return _built(source, capability(arch))


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="tunegen-emulator-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _template_root(own: Path | None) -> Path:
    """The folder whose ``lib`` replaces the shipped one, with a spec's own templates beside it."""
    if own is None:
        return HERE
    merged = Path(tempfile.mkdtemp(dir=_folder()))
    shutil.copytree(own, merged, dirs_exist_ok=True)
    shutil.copytree(HERE / "lib", merged / "lib", dirs_exist_ok=True)
    return merged


_kernels: dict[tuple[str, str, int], HostKernel] = {}


def _built(source: KernelSource, architecture: int) -> HostKernel:
    key = (source.digest, source.entry, architecture)
    if key not in _kernels:
        _kernels[key] = _build(source, architecture)
    return _kernels[key]


def _build(source: KernelSource, architecture: int) -> HostKernel:
    code = codegen.strip_comments(source.text)
    if re.search(r"\basm\b", code):
        raise Unemulatable(f"{source.name} contains inline PTX that the emulator has no words for")
    _runtime()
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    text = _DYNAMIC_SHARED.sub(
        r"\1* const \2 = static_cast<\1*>(emulator_dynamic_shared());", source.text
    )
    (folder / "kernel.cu").write_text(f"{text}\nEMULATOR_EXPORT({source.entry})\n")
    _run(
        "g++", "-c", "-x", "c++", *_kernel_options(), f"-D__CUDA_ARCH__={architecture * 10}",
        "-include", str(_shim()), str(folder / "kernel.cu"), "-o", str(folder / "kernel.o"),
    )  # fmt: skip
    # Linked without the sanitizer's own library: its handlers are the runtime's.
    library = _link(folder / "kernel.o", ctypes.RTLD_LOCAL)
    library.emulator_signature.restype = ctypes.c_char_p
    return HostKernel(source, library, library.emulator_signature().decode())


def _kernel_options() -> tuple[str, ...]:
    return ("-O1", *_OPTIONS, *_pattern(), f"-fsanitize={_SANITIZERS}")


@functools.cache
def _shim() -> Path:
    """The header before every kernel; g++ takes the precompiled one that lies beside it, which
    spares each kernel a third of its time."""
    for name in ("shim.h", "runtime.h"):
        shutil.copy(HERE / name, _folder())
    shim = _folder() / "shim.h"
    _run("g++", "-x", "c++-header", *_kernel_options(), str(shim), "-o", f"{shim}.gch")
    return shim


@functools.cache
def _runtime() -> ctypes.CDLL:
    target = _folder() / "runtime.o"
    _run("g++", "-c", "-O1", *_OPTIONS, str(HERE / "runtime.cpp"), "-o", str(target))
    return _link(target, ctypes.RTLD_GLOBAL)


def _link(target: Path, mode: int) -> ctypes.CDLL:
    shared_object = target.with_suffix(".so")
    _run("g++", "-shared", str(target), "-o", str(shared_object))
    return ctypes.CDLL(str(shared_object), mode=mode)


@functools.cache
def _pattern() -> tuple[str, ...]:
    """Registers that nothing has written hold large numbers, not zeros; g++ 12 and later."""
    version = int(_run("g++", "-dumpversion").split(".")[0])
    return ("-ftrivial-auto-var-init=pattern",) if version >= 12 else ()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout

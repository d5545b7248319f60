# SPDX-License-Identifier: Apache-2.0
"""Source in, PTX + cubin + resources out. NVRTC does it all; no driver and no nvcc are needed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from tunegen.errors import CompileError, ToolkitError
from tunegen.model import CompiledKernel, KernelSource, Resources

# One compilation gives PTX, cubin and, through -v, the resource report. Generic lambdas in device
# code count as host functions for NVRTC 13.0 without -default-device. These options are part of a
# kernel's identity.
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")

# Where there is a driver, NVRTC keeps results in the driver's cache, and a kernel from there comes
# without its resource report. Results are the same, so this is no part of the identity.
_NO_DRIVER_CACHE = "--no-cache"

# cuda-bindings' major follows the toolkit's; 13 is the first without Volta, and what is tested.
BINDINGS_MAJOR = 13

# A spilled word costs a local-memory round trip wherever it is used. A few bytes are usually
# addresses spilled around a prologue; past this many, the main loop pays.
SPILL_LIMIT_BYTES = 64


class NvrtcCompiler:
    """The compiler protocol by NVRTC, with a disk cache in front of it when one is given.

    ``lineinfo`` maps PTX and SASS back to source lines. It writes the working directory into the
    images, so it is for reading them, never for shipping, and such images are not cached.
    """

    def __init__(self, cache: KernelCache | None = None, *, lineinfo: bool = False) -> None:
        self._cache = None if lineinfo else cache
        self._lineinfo = lineinfo
        self._lock = threading.Lock()
        self._running: dict[str, Future[CompiledKernel]] = {}

    def compile(self, source: KernelSource, target: str) -> CompiledKernel:
        """Compile for ``target``; see :class:`tunegen.model.Compiler`.

        Threads that ask for the same kernel at once share one compilation.
        """
        version = nvrtc_version()
        key = hashlib.sha256(f"{identity(source, target)} {version}".encode()).hexdigest()
        if self._cache and (found := self._cache.get(key)):
            return found
        with self._lock:
            running = self._running.get(key)
            if running is None:
                mine = self._running[key] = Future[CompiledKernel]()
        if running is not None:
            return running.result()
        try:
            kernel = _compile(source, target, version, lineinfo=self._lineinfo)
            if self._cache:
                self._cache.put(key, kernel)
            mine.set_result(kernel)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]
        return kernel


def identity(source: KernelSource, target: str) -> str:
    """Digest of everything that decides what is compiled, the compiler's version apart.

    It is what a record keeps as its source digest: a release, a reworded comment or another
    toolkit leaves it as it is.
    """
    text = "\n".join((source.digest, source.entry, target, *OPTIONS))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _nvrtc() -> Any:
    """The bindings, checked. Raises :class:`ToolkitError` naming what was found and is needed."""
    try:
        found = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if found and int(found.split(".")[0]) != BINDINGS_MAJOR:
        raise ToolkitError(
            f"cuda-bindings {found} is installed, tunegen needs {BINDINGS_MAJOR}.x",
            hint=f"pip install 'cuda-bindings=={BINDINGS_MAJOR}.*'",
        )
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise ToolkitError(
            f"cuda-bindings {found or 'is not installed'}: {error}", hint="tunegen doctor"
        ) from error
    return nvrtc


# In the head of all PTX: "// Cuda compilation tools, release 13.0, V13.0.88".
_RELEASE = re.compile(rb"^// Cuda compilation tools.*\bV(\d+(?:\.\d+)+)$", re.MULTILINE)


@functools.cache
def nvrtc_version() -> str:
    """``13.0.88`` or the like; raises :class:`ToolkitError` where no NVRTC library can be loaded.

    The library's own call leaves out the last number, and patch releases compile differently, so
    this compiles nothing once (15 ms) and reads the head of the PTX.
    """
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings load the library at the first call
        raise ToolkitError(
            f"the NVRTC library cannot be loaded: {error}",
            hint=f"pip install 'nvidia-cuda-nvrtc=={BINDINGS_MAJOR}.*'",
        ) from error
    _check(status, "nvrtcVersion")
    with _program("", "empty.cu") as program:
        _check(_run(program, ()), "nvrtcCompileProgram")
        found = _RELEASE.search(_fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))
    return found[1].decode() if found else f"{major}.{minor}"


def _check(status: Any, call: str) -> None:
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise ToolkitError(f"{call} returned {status.name}", hint="tunegen doctor")


@contextlib.contextmanager
def _program(text: str, name: str) -> Iterator[Any]:
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    _check(status, "nvrtcCreateProgram")
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _run(program: Any, options: Sequence[str]) -> Any:
    (status,) = _nvrtc().nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    return status


def _compile(source: KernelSource, target: str, version: str, *, lineinfo: bool) -> CompiledKernel:
    nvrtc = _nvrtc()
    options = [f"-arch={target}", *OPTIONS, _NO_DRIVER_CACHE]
    options += ["-lineinfo"] if lineinfo else []
    started = time.perf_counter()
    with _program(source.text, f"{source.name}.cu") as program:
        status = _run(program, options)
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in text.splitlines() if "error" in line), status.name)
            raise CompileError(f"{source.name} does not compile for {target}: {first}", log=text)
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program, keep_end=True)
    resources, warnings = read_log(text)
    return CompiledKernel(
        name=source.name,
        entry=source.entry,
        target=target,
        ptx=ptx,
        cubin=cubin,
        resources=resources,
        warnings=warnings,
        rejection=rejection(resources, warnings),
        nvrtc=version,
        seconds=time.perf_counter() - started,
        from_cache=False,
    )


def _fetch(size_of: Any, fill: Any, program: Any, *, keep_end: bool = False) -> bytes:
    status, size = size_of(program)
    _check(status, size_of.__name__)
    buffer = bytearray(size)
    (status,) = fill(program, buffer)
    _check(status, fill.__name__)
    return bytes(buffer) if keep_end else bytes(buffer).rstrip(b"\0")


# The ptxas report. Prefixes differ between toolkits ("ptxas info    :", "ptxas         ."), so
# only the words are matched. This log is the one text that is read this way.
_REPORT = re.compile(
    r"Compiling entry function|Function properties for|bytes stack frame|Used \d+ registers"
    r"|bytes gmem|Compile time ="
)
_COUNTS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
    "constant_bytes": re.compile(r"(\d+) bytes cmem\[0\]"),
    "barriers": re.compile(r"used (\d+) barriers"),
}

# Warnings that mean the kernel runs, but not as written: C7508 and C7510 to C7519.
_SERIALIZED = re.compile(
    r"setmaxnreg[^\n]*ignored|wgmma[^\n]*serializ[^\n]*|C75(?:08|1[0-9])[^\n]*", re.IGNORECASE
)


def read_log(log: str) -> tuple[Resources, str]:
    """The resource report of one kernel, and whatever else the compiler had to say.

    Raises :class:`ToolkitError` where the report is missing.
    """
    counts = {}
    if not _COUNTS["registers"].search(log):
        # A kernel without a report must not pass for one that neither uses registers nor spills.
        raise ToolkitError("ptxas left no resource report in the log", hint="compile it again")
    for name, pattern in _COUNTS.items():
        found = [int(number) for number in pattern.findall(log)]
        counts[name] = max(found, default=0)
    other = [line for line in log.splitlines() if line.strip() and not _REPORT.search(line)]
    return Resources(**counts), "\n".join(other)


def rejection(resources: Resources, warnings: str) -> str:
    """Why a compiled kernel is not worth running, or the empty string."""
    if match := _SERIALIZED.search(warnings):
        return match[0].strip()
    spilled = resources.spill_store_bytes + resources.spill_load_bytes
    if spilled > SPILL_LIMIT_BYTES:
        return (
            f"spills {resources.spill_store_bytes} bytes and reloads "
            f"{resources.spill_load_bytes} at {resources.registers} registers"
        )
    return ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a kernel cache holds: where, how many kernels, their bytes, and damaged files."""

    folder: str
    kernels: int
    bytes: int
    damaged: int


class KernelCache:
    """Compiled kernels on disk, keyed by source, options and NVRTC version.

    One file per kernel, a JSON line and then PTX and cubin; written to a temporary file and
    renamed, so that readers never see half of one. A file whose checksum fails is a miss, and is
    replaced by the next compilation. A cache is never in the way: where it cannot be written, on a
    full disk or in a read-only home, kernels are compiled each time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache_dir()

    def get(self, key: str) -> CompiledKernel | None:
        """The kernel, or None where there is none that can be read."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        return _unpack(content)

    def put(self, key: str, kernel: CompiledKernel) -> None:
        """Keep a kernel, if the folder can be written."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _pack(kernel))

    def report(self) -> CacheReport:
        """What there is; raises :class:`ToolkitError` where the folder cannot be read."""
        kernels = size = damaged = 0
        for path in self._files(".kernel"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # cleared meanwhile
                continue
            except OSError as error:
                raise self._refused("read", error) from error
            kernels += 1
            size += len(content)
            damaged += _unpack(content) is None
        return CacheReport(str(self.folder), kernels, size, damaged)

    def clear(self) -> CacheReport:
        """Remove every cached kernel; the report says what there was."""
        report = self.report()
        for path in self._files(".kernel", ".tmp"):  # the latter of writers that were killed
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._refused("cleared", error) from error
        return report

    def _files(self, *suffixes: str) -> list[Path]:
        groups = (group for group in self._entries(self.folder) if len(group.name) == 2)
        files = (path for group in groups for path in self._entries(group))
        return sorted(path for path in files if path.suffix in suffixes)

    def _entries(self, folder: Path) -> list[Path]:
        try:
            return list(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refused("read", error) from error

    def _refused(self, what: str, error: OSError) -> ToolkitError:
        return ToolkitError(
            f"the kernel cache {self.folder} cannot be {what}: {error.strerror or error}",
            hint="export XDG_CACHE_HOME=DIR",
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.kernel"


def default_cache_dir() -> Path:
    """``~/.cache/tunegen/kernels``, or as ``XDG_CACHE_HOME`` says."""
    return Path(platformdirs.user_cache_dir("tunegen")) / "kernels"


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _pack(kernel: CompiledKernel) -> bytes:
    facts = asdict(replace(kernel, ptx=b"", cubin=b""))
    del facts["ptx"], facts["cubin"], facts["from_cache"]
    body = kernel.ptx + kernel.cubin
    facts["ptx_bytes"] = len(kernel.ptx)
    facts["sha256"] = hashlib.sha256(body).hexdigest()
    return json.dumps(facts).encode() + b"\n" + body


def _unpack(content: bytes) -> CompiledKernel | None:
    head, _, body = content.partition(b"\n")
    try:
        facts = json.loads(head)
        if facts.pop("sha256") != hashlib.sha256(body).hexdigest():
            return None
        cut = facts.pop("ptx_bytes")
        resources = Resources(**facts.pop("resources"))
        return CompiledKernel(
            **facts, resources=resources, ptx=body[:cut], cubin=body[cut:], from_cache=True
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # cut short, or written by another release

# SPDX-License-Identifier: Apache-2.0
"""The same operation by NumPy on the CPU: what a GPU has to beat before it is worth the trip."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.kernels.matmul import ACTIVATIONS, activated
from tunegen.model import Operation, Problem

# What one core does in some seconds; more is not waited for.
MOST_FLOPS_PER_CORE = 2e11

# The part of the free memory that operands may take.
_MEMORY_SHARE = 0.5

_LEAST_RUNS, _MOST_RUNS = 3, 200

# So many random elements are drawn and repeated: times do not depend on them.
_DRAWN = 1 << 20

_DTYPES: Mapping[str, Any] = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}

Arrays = Mapping[str, NDArray[Any]]
Scalars = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CpuRun:
    """Times of warm calls in microseconds, on the host's clock.

    ``dtype`` is the one that was computed in, ``how`` names the call, the library behind it and
    its threads. ``refusal`` says why nothing was timed, else it is empty.
    """

    samples_us: tuple[float, ...] = ()
    dtype: str = ""
    how: str = ""
    refusal: str = ""


def run_on_cpu(
    operation: Operation, problem: Problem, seconds: float = 1.0, seed: int = 0
) -> CpuRun:
    """Time the operation for about ``seconds``, after a call that is not timed.

    16-bit types that NumPy lacks (bf16), or for which it has no library (products of fp16), are
    computed in fp32. Leading dimensions are those of arrays without gaps.
    """
    if operation.name not in _CALLS:
        return CpuRun(refusal=f"no NumPy call is known for {operation.name}")
    if operation.flops(problem) > MOST_FLOPS_PER_CORE * cores():
        return CpuRun(refusal="it would take NumPy too long")
    make, uses_blas = _CALLS[operation.name]
    native = problem.dtype in _DTYPES and not (uses_blas and problem.dtype == "fp16")
    dtype = problem.dtype if native else "fp32"
    arrays = operation.arrays(problem)
    needed = sum(math.prod(array.shape) for array in arrays) * np.dtype(_DTYPES[dtype]).itemsize
    if needed > _MEMORY_SHARE * free_bytes():
        return CpuRun(refusal=f"its operands take {needed / 1e9:.1f} GB of host memory")
    rng = np.random.default_rng(seed)
    operands = {array.name: _draw(array.shape, _DTYPES[dtype], rng) for array in arrays}
    call, expression = make(problem, operands, dict(operation.scalars))
    call()
    samples: list[float] = []
    while len(samples) < _LEAST_RUNS or (sum(samples) < seconds * 1e6):
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1e6)
        if len(samples) == _MOST_RUNS or (len(samples) == 1 and samples[0] > seconds * 1e6):
            break
    library = f", {blas()}" if uses_blas else ", 1 thread"
    note = "" if native else f", in {dtype}: " + (
        "NumPy has no library for products of fp16" if problem.dtype == "fp16"
        else f"NumPy has no {problem.dtype}"
    )  # fmt: skip
    return CpuRun(tuple(samples), dtype, f"NumPy {np.__version__} {expression}{library}{note}")


def _draw(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> NDArray[Any]:
    size = math.prod(shape)
    drawn = rng.standard_normal(max(1, min(size, _DRAWN)), dtype=np.float32).astype(dtype)
    return np.resize(drawn, shape)


# --- the calls -----------------------------------------------------------------------------------

Call = tuple[Callable[[], Any], str]


def _matmul(p: Problem, operands: Arrays, scalars: Scalars) -> Call:
    a, b, c = (operands[name] for name in "ABC")
    if p.layout[0] == "t":
        a = a.swapaxes(1, 2)
    if p.layout[1] == "t":
        b = b.swapaxes(1, 2)
    if c.shape[0] == 1:
        a, b, c = a[0], b[0], c[0]
    steps, finish = _epilogue(p, operands.get("bias"))
    if not p.beta:

        def multiply() -> None:
            np.matmul(a, b, out=c)
            finish(c)

        return multiply, " and ".join(("matmul", *steps))
    product = np.empty_like(c)

    def multiply_add() -> None:
        np.matmul(a, b, out=product)
        np.add(product, c, out=c)
        finish(c)

    return multiply_add, " and ".join(("matmul", "add", *steps))


def _epilogue(
    p: Problem, bias: NDArray[Any] | None
) -> tuple[tuple[str, ...], Callable[[NDArray[Any]], None]]:
    """What is done to C after the product, in place, and how that is called."""
    name = ACTIVATIONS[p.activation]

    def finish(c: NDArray[Any]) -> None:
        if bias is not None:
            np.add(c, bias, out=c)
        if name != "none":
            c[...] = activated(c, name)

    # NumPy has no error function.
    how = {"none": (), "gelu": ("gelu by math.erf",)}.get(name, (name,))
    steps = (*(("bias",) if bias is not None else ()), *how)
    return steps, finish


def _fill(p: Problem, operands: Arrays, scalars: Scalars) -> Call:
    return lambda: operands["y"].fill(scalars["value"]), "fill"


def _copy(p: Problem, operands: Arrays, scalars: Scalars) -> Call:
    return lambda: np.copyto(operands["y"], operands["x"]), "copyto"


def _add(p: Problem, operands: Arrays, scalars: Scalars) -> Call:
    return lambda: np.add(operands["x"], operands["y"], out=operands["z"]), "add"


def _axpy(p: Problem, operands: Arrays, scalars: Scalars) -> Call:
    x, y = operands["x"], operands["y"]
    product, factor = np.empty_like(x), x.dtype.type(scalars["a"])

    def multiply_add() -> None:
        np.multiply(x, factor, out=product)
        np.add(product, y, out=y)

    return multiply_add, "multiply and add"


_CALLS: Mapping[str, tuple[Callable[[Problem, Arrays, Scalars], Call], bool]] = {
    "matmul": (_matmul, True),
    "fill": (_fill, False),
    "copy": (_copy, False),
    "add": (_add, False),
    "axpy": (_axpy, False),
}


# --- the machine ---------------------------------------------------------------------------------


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_bytes() -> int:
    """Host memory that a program can have, caches included, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def blas() -> str:
    """The library behind NumPy's products, with its threads: ``openblas 0.3.30, 2 threads``."""
    built: Any = np.show_config(mode="dicts")
    found = built.get("Build Dependencies", {}).get("blas", {})
    name = " ".join(str(found[key]) for key in ("name", "version") if found.get(key)) or "no BLAS"
    threads = _blas_threads()
    return f"{name}, {threads} threads" if threads else f"{name}, up to {cores()} threads"


# How the libraries tell their threads: part of the file's name, and the functions to ask.
_THREADS = {
    "openblas": (
        "scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads",
        "openblas_get_num_threads64_", "openblas_get_num_threads",
    ),
    "mkl_rt": ("MKL_Get_Max_Threads",),
    "libblis": ("bli_thread_get_num_threads",),
}  # fmt: skip


def _blas_threads() -> int | None:
    """The threads of the library that this process has loaded; None where it does not tell."""
    for path in _loaded_libraries():
        for part, functions in _THREADS.items():
            if part not in path.name:
                continue
            library = ctypes.CDLL(str(path))
            for function in functions:
                if hasattr(library, function):
                    return int(getattr(library, function)())
    return None


def _loaded_libraries() -> list[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" /") and ".so" in line}
    return sorted(Path(path) for path in paths if path.startswith("/"))

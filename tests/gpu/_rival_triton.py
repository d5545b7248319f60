# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the contest: which configurations are tried for a problem, compiled ahead
without a GPU, and launched like any other kernel.

Only Triton's compiler is used. Its own launcher needs a C compiler, and its autotuner another way
of timing than that of the contest: the best configuration is chosen by trials as in a search.
There is no split-K among them, as in Triton's tutorials, nor warp specialisation, which Triton 3.6
makes for Blackwell only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import _tree  # noqa: F401 (makes tunegen importable)

from tunegen.model import (
    Argument,
    CompiledKernel,
    DeviceClass,
    Launch,
    LaunchPlan,
    Problem,
    Resources,
    ceil_div,
)
from tunegen.runner.protocol import Executable

GROUP_M = 8

# Indices of elements are 32 bits wide in the kernels.
_MOST_ELEMENTS = 2**31 - 1

# What Triton makes of a pointer or a stride that is a multiple of 16 is the same for every larger
# one. 8 elements of two bytes are one access of 16 bytes: Triton's launcher would not say so.
_MOST_DIVISOR = 16

_SIZES = ("m", "n", "k", "lda", "ldb", "ldc", "batch_a", "batch_b", "batch_c")
_DIVIDED = ("k", "lda", "ldb", "ldc", "batch_a", "batch_b", "batch_c")


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """A kernel of :mod:`_triton_kernels` and its parameters."""

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int

    def __str__(self) -> str:
        return (
            f"{self.kernel} {self.block_m}x{self.block_n}x{self.block_k}, {self.stages} stages, "
            f"{self.warps} warps"
        )


# Configurations by the size of the smaller side of C, from those that Triton's tutorials and the
# compilers of PyTorch list for H100, and narrow ones for few rows or columns.
_LARGE = (
    *((block, s, w) for block in ((128, 256, 64), (256, 128, 64)) for s, w in ((3, 8), (4, 8))),
    ((128, 128, 64), 3, 4), ((128, 128, 64), 4, 4), ((128, 128, 64), 4, 8),
    ((128, 128, 128), 3, 8), ((64, 256, 64), 4, 4), ((64, 128, 64), 4, 4), ((128, 64, 64), 4, 4),
    ((64, 64, 64), 6, 4), ((64, 64, 128), 4, 4), ((64, 32, 128), 5, 4), ((128, 256, 32), 4, 8),
    ((128, 128, 32), 5, 4),
)  # fmt: skip
_PERSISTENT = (
    ((128, 256, 64), 3, 8), ((128, 256, 64), 4, 8), ((256, 128, 64), 3, 8), ((128, 128, 64), 4, 4),
    ((128, 128, 64), 4, 8), ((128, 128, 128), 3, 8),
)  # fmt: skip
# Of a narrow side: the other one's block, block_k, stages, warps.
_NARROW = (
    (16, 256, 5, 4), (32, 128, 6, 4), (32, 256, 4, 4), (64, 64, 6, 4), (64, 128, 4, 4),
    (64, 256, 3, 4), (128, 64, 5, 4), (128, 128, 3, 4), (128, 64, 4, 8), (256, 64, 3, 8),
)  # fmt: skip
_NARROW_SIDE = 128
_SHARED_BYTES = 227 << 10
_LEAST_BLOCK = 16


def missing() -> str:
    """Why there is no Triton here, or the empty string."""
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def version() -> str:
    """``Triton 3.6.0``, or that it is missing."""
    if missing():
        return "no Triton"
    return f"Triton {importlib.metadata.version('triton')}"


def configs(problem: Problem) -> tuple[TritonConfig, ...]:
    """The configurations to try, none where the kernels cannot index the operands."""
    sizes = (problem.M * problem.lda, problem.N * problem.ldb, problem.K * problem.lda,
             problem.K * problem.ldb, problem.M * problem.ldc)  # fmt: skip
    if max(sizes) * problem.B > _MOST_ELEMENTS:
        return ()
    fitting = (config for config in _configs(problem) if _fits(config, problem))
    return tuple(dict.fromkeys(fitting))


def _fits(config: TritonConfig, problem: Problem) -> bool:
    """Whether the shared memory of a block on sm_90 has room for it."""
    elements = config.stages * config.block_k * (config.block_m + config.block_n)
    if config.kernel == "descriptors":  # the copy engine writes C from there
        elements += config.block_m * config.block_n
    return elements * problem.element_bytes < _SHARED_BYTES


def _configs(problem: Problem) -> Iterator[TritonConfig]:
    m, n = problem.M, problem.N
    if min(m, n) <= _NARROW_SIDE:
        side = max(_LEAST_BLOCK, 1 << (min(m, n) - 1).bit_length())
        for other, k, stages, warps in _NARROW:
            blocks = (side, other) if m <= n else (other, side)
            yield TritonConfig("tiled", *blocks, k, stages, warps)
        if min(m, n) < 64:
            return
    for block, stages, warps in _LARGE:
        yield TritonConfig("tiled", *block, stages, warps)
    if problem.B > 1:
        return
    for block, stages, warps in _PERSISTENT:
        yield TritonConfig("persistent", *block, stages, warps)
        if _has_whole_rows(problem):
            yield TritonConfig("descriptors", *block, stages, warps)


def _has_whole_rows(problem: Problem) -> bool:
    """Whether the copy engine can take the operands."""
    rows = (problem.lda, problem.ldb, problem.ldc)
    return all(row * problem.element_bytes % 16 == 0 for row in rows)


@dataclass(frozen=True, slots=True)
class Source:
    """What compiled code depends on: a configuration, and what of a problem it is made for."""

    config: TritonConfig
    dtype: str
    layout: str
    even_k: bool
    divisors: tuple[int, ...]
    capability: int


def source(config: TritonConfig, problem: Problem, arch: str) -> Source:
    values = _values(problem)
    return Source(
        config=config,
        dtype=problem.dtype,
        layout=problem.layout,
        even_k=problem.K % config.block_k == 0,
        divisors=tuple(math.gcd(values[name], _MOST_DIVISOR) for name in _DIVIDED),
        capability=int(arch.removeprefix("sm_")),
    )


def _values(p: Problem) -> dict[str, int]:
    strides = (
        (p.M if p.layout[0] == "n" else p.K) * p.lda,
        (p.K if p.layout[1] == "n" else p.N) * p.ldb,
        p.M * p.ldc,
    )
    return dict(zip(_SIZES, (p.M, p.N, p.K, p.lda, p.ldb, p.ldc, *strides), strict=True))


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and what Triton's launcher would read from its metadata."""

    cubin: bytes
    entry: str
    shared_bytes: int
    threads: int
    scratch_bytes: int
    seconds: float


def compile(source: Source) -> Compiled:  # in a process of a pool
    """Raises whatever Triton does where it cannot."""
    import _triton_kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.perf_counter()
    config = source.config
    kernel = getattr(_triton_kernels, config.kernel)
    constants = {
        "TRANSPOSE_A": source.layout[0] == "t", "TRANSPOSE_B": source.layout[1] == "t",
        "EVEN_K": source.even_k, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "GROUP_M": GROUP_M,
    }  # fmt: skip
    signature = {
        name: "constexpr" if name in constants else "i32" if name in _SIZES else f"*{source.dtype}"
        for name in kernel.arg_names
    }
    divisors = dict(zip(_DIVIDED, source.divisors, strict=True))
    divisors |= {name: _MOST_DIVISOR for name, kind in signature.items() if kind[0] == "*"}
    attributes = {
        (position,): [["tt.divisibility", divisors[name]]]
        for position, name in enumerate(kernel.arg_names)
        if divisors.get(name, 1) > 1
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", source.capability, 32),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )
    return Compiled(
        cubin=made.asm["cubin"],
        entry=made.metadata.name,
        shared_bytes=made.metadata.shared,
        threads=32 * made.metadata.num_warps,
        scratch_bytes=made.metadata.global_scratch_size,
        seconds=time.perf_counter() - started,
    )


def executable(
    config: TritonConfig, compiled: Compiled, problem: Problem, device: DeviceClass
) -> Executable:
    """Compiled code with the launch of a problem. Triton's kernels take two more pointers than
    they are written with: to memory of their own, and to that of a profiler."""
    tiles = ceil_div(problem.M, config.block_m) * ceil_div(problem.N, config.block_n)
    programs = tiles
    if config.kernel != "tiled":
        both = 2 * (compiled.shared_bytes + device.shared_bytes_reserved)
        twice = config.warps <= 4 and both <= device.shared_bytes_per_sm
        programs = min(tiles, device.sm_count * (2 if twice else 1))
    scratch = (
        Argument("scratch", "workspace")
        if compiled.scratch_bytes
        else Argument("scratch", "int64")
    )
    launch = Launch(
        kernel=compiled.entry,
        grid=(programs, problem.B if config.kernel == "tiled" else 1, 1),
        block=(compiled.threads, 1, 1),
        arguments=(
            *(Argument(name, "pointer") for name in "ABC"),
            *(Argument(name, "int32", value) for name, value in _values(problem).items()),
            scratch,
            Argument("profile", "int64"),
        ),
        shared_bytes=compiled.shared_bytes,
    )
    kernel = CompiledKernel(
        name=compiled.entry, entry=compiled.entry, target=device.arch, ptx=b"",
        cubin=compiled.cubin, resources=Resources(0, 0, 0, 0, compiled.shared_bytes), warnings="",
        rejection="", nvrtc="none, but by Triton", seconds=compiled.seconds, from_cache=False,
    )  # fmt: skip
    plan = LaunchPlan((launch,), workspace_bytes=compiled.scratch_bytes * programs)
    return Executable((kernel,), plan.bind({}))

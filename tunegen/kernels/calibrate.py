# SPDX-License-Identifier: Apache-2.0
"""Kernels that measure a device: what its memories deliver, what it computes, what a launch costs.

A probe is one thing to measure, with the contenders that do it: the best of them is the figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunegen.kernels import vector_add, vector_copy, vector_fill
from tunegen.model import (
    Argument,
    ArgumentType,
    Array,
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Launch,
    LaunchPlan,
    ceil_div,
)

# Elements of fp32 in each operand of a stream: from what is over before memory is busy to what
# hides every start and end.
STREAM_ELEMENTS = tuple(2**exponent for exponent in (20, 22, 24, 26, 28))

# Operands of a stream are rotated over so much more than L2 holds, that none is still there.
COLD_L2_MULTIPLE = 3

# What a kernel that is bound by the SMs should take: long to a clock, short to a time-out.
TARGET_US = 300.0

# Launches in the plan that tells what one more dependent launch costs.
CHAIN_LAUNCHES = 16

# Bytes that every SM's shared memory delivers per clock: 32 banks of 4 bytes.
SHARED_BYTES_PER_CLOCK = 128


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work of a probe, bound to its sizes."""

    name: str
    definitions: tuple[KernelDefinition, ...]
    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to measure.

    A call of any contender moves ``amount`` bytes, or for a "peak" does so many operations. In a
    "launch" nothing is moved, and contenders do not compete: each has a figure of its own.
    Calls go round ``sets`` of the operands.
    """

    name: str
    kind: Literal["stream", "memory", "peak", "launch"]
    amount: float
    arrays: tuple[Array, ...]
    contenders: tuple[Contender, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    sets: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of device memory that its operands take."""
        return self.sets * sum(array.bytes for array in self.arrays)


def _vector(name: str, elements: int, role: str, dtype: str = "fp32") -> Array:
    return Array(name, (elements,), (1,), dtype, "in" if role == "in" else "out")


# --- streams -------------------------------------------------------------------------------------

# The operation that makes each mix of reads and writes; "read" has a kernel of its own.
STREAMS: Mapping[str, KernelSpec] = {
    "add": vector_add.SPEC,
    "copy": vector_copy.SPEC,
    "write": vector_fill.SPEC,
}

# Threads, bytes of a vector, vectors in flight, policies of loads and stores, bytes that a miss
# fetches. The first eight won tunes of copy and add on an H200, at 2^20 to 2^28 elements; blocks
# that take a few KiB each are ahead of larger ones there by a percent.
_STREAM_ROWS = (
    (128, 8, 2, 0, 0, 128),
    (128, 4, 4, 0, 2, 0),
    (128, 16, 1, 0, 2, 0),
    (64, 4, 4, 0, 2, 128),
    (64, 4, 4, 1, 0, 128),
    (64, 16, 4, 1, 1, 0),
    (512, 8, 2, 1, 0, 128),
    (128, 4, 8, 1, 0, 0),
    (128, 16, 8, 1, 1, 128),
    (256, 16, 1, 1, 1, 128),
    (128, 16, 1, 0, 1, 0),
    (256, 16, 4, 2, 0, 0),
    (512, 16, 4, 3, 1, 0),
)

# Threads, vectors of 16 bytes in flight, blocks per SM (0: one per tile).
_READ_ROWS = ((256, 8, 0), (256, 4, 0), (512, 4, 0), (128, 8, 0), (512, 4, 2), (256, 8, 4))


def streams(device: DeviceClass, most_bytes: int) -> Iterator[Probe]:
    """Reading, adding (two reads a write), copying and writing, by falling size.

    Sizes of which two sets of operands take more than ``most_bytes`` are left out.
    """
    for count in sorted(STREAM_ELEMENTS, reverse=True):
        for probe in (_read(device, count), *(_stream(name, device, count) for name in STREAMS)):
            if probe.bytes <= most_bytes:
                yield probe


def _stream(name: str, device: DeviceClass, elements: int) -> Probe:
    spec = STREAMS[name]
    operation = spec.operation
    problem = operation.problem((elements,), dtype="fp32")
    space = spec.space(problem, device)
    contenders = []
    for threads, width, unroll, load, store, prefetch in _STREAM_ROWS:
        values = {
            "THREADS": threads, "VECTOR_BYTES": width, "UNROLL": unroll, "BLOCKS_PER_SM": 0,
            "STORE_POLICY": store, "LOAD_POLICY": load, "L2_PREFETCH_BYTES": prefetch,
        }  # fmt: skip
        config = Config({parameter: values[parameter] for parameter in space.names})
        if not space.violated(config):
            definitions = tuple(
                dataclasses.replace(definition, constants={**config, **definition.constants})
                for definition in spec.kernels(config, problem)
            )
            plan = spec.bound_plan(config, problem, device)
            contenders.append(Contender(str(config), definitions, plan))
    return _cold(
        Probe(
            name=name,
            kind="stream",
            amount=operation.bytes(problem),
            arrays=operation.arrays(problem),
            contenders=tuple(contenders),
            scalars=dict(operation.scalars),
        ),
        device,
    )


def _cold(probe: Probe, device: DeviceClass) -> Probe:
    sets = max(2, ceil_div(COLD_L2_MULTIPLE * device.l2_bytes, probe.bytes))
    return dataclasses.replace(probe, sets=sets)


def _read(device: DeviceClass, elements: int) -> Probe:
    contenders = tuple(
        _reader(device, elements, threads, unroll, blocks, passes=1)
        for threads, unroll, blocks in _READ_ROWS
    )
    return _cold(
        Probe(
            name="read",
            kind="stream",
            amount=4 * elements,
            arrays=_read_arrays(elements, contenders),
            contenders=contenders,
        ),
        device,
    )


def _read_arrays(elements: int, contenders: Sequence[Contender]) -> tuple[Array, ...]:
    sums = max(int(contender.plan.launches[0].grid[0]) for contender in contenders)
    return _vector("x", elements, "in"), _vector("sums", sums, "out")


def _reader(
    device: DeviceClass, elements: int, threads: int, unroll: int, per_sm: int, passes: int
) -> Contender:
    constants = {"THREADS": threads, "UNROLL": unroll}
    tiles = ceil_div(elements * 4, 16 * threads * unroll)
    blocks = min(tiles, per_sm * device.sm_count) if per_sm else tiles
    arguments = (
        Argument("x", "pointer"),
        Argument("sums", "pointer"),
        Argument("n", "int64", elements),
        Argument("passes", "int32", passes),
    )
    return _contender("read", constants, {"Element": "fp32"}, blocks, arguments)


def _contender(
    kernel: str,
    constants: Mapping[str, int],
    types: Mapping[str, str],
    blocks: int,
    arguments: tuple[Argument, ...],
) -> Contender:
    name = f"calibrate_{kernel}"
    definition = KernelDefinition(name, f"calibrate/{kernel}.cu.jinja", types, constants)
    threads = constants.get("THREADS", 32)
    launch = Launch(name, (blocks, 1, 1), (threads, 1, 1), arguments)
    words = [*(f"{key}={value}" for key, value in constants.items()), f"blocks={blocks}"]
    return Contender(" ".join(words), (definition,), LaunchPlan((launch,)))


# --- inside the chip -----------------------------------------------------------------------------


def l2_read(device: DeviceClass) -> Probe:
    """Reading an eighth of what L2 holds, over and over."""
    elements = max(device.l2_bytes // 8 // 4 // 2**18, 1) * 2**18
    guessed = device.l2_gbps or 32e-3 * device.sm_count * device.clock_mhz
    passes = max(2, round(TARGET_US * guessed * 1e3 / (4 * elements)))
    contenders = tuple(
        _reader(device, elements, threads, unroll, per_sm, passes)
        for threads, unroll, per_sm in ((256, 4, 4), (512, 4, 2), (512, 2, 4), (256, 2, 8))
    )
    return Probe(
        name="l2_read",
        kind="memory",
        amount=4 * elements * passes,
        arrays=_read_arrays(elements, contenders),
        contenders=contenders,
    )


def shared_read(device: DeviceClass) -> Probe:
    """Reading shared memory without bank conflicts, on every SM."""
    threads, unroll, per_sm = 512, 4, 2
    sm_bytes = per_sm * threads * unroll * 16  # of a round
    rounds = _rounds(device, sm_bytes / SHARED_BYTES_PER_CLOCK)
    blocks = per_sm * device.sm_count
    contender = _contender(
        "shared",
        {"THREADS": threads, "UNROLL": unroll},
        {},
        blocks,
        (Argument("sums", "pointer"), Argument("rounds", "int32", rounds)),
    )
    return Probe(
        name="shared_read",
        kind="memory",
        amount=sm_bytes * device.sm_count * rounds,
        arrays=(_vector("sums", blocks * threads, "out"),),
        contenders=(contender,),
    )


def _rounds(device: DeviceClass, cycles: float) -> int:
    """Rounds of so many cycles that take about the target time."""
    return max(4, round(TARGET_US * device.clock_mhz / cycles))


# Chains hide the latency of a multiply-add; more than these only cost registers.
_CHAINS, _UNROLL, _FMA_THREADS = 8, 16, 256


def peaks(device: DeviceClass) -> Iterator[Probe]:
    """Multiply-adds outside of tensor cores; those of 16-bit numbers in pairs."""
    yield _fma("fp32", device, device.fp32_per_clock, "fma", {}, {"Element": "fp32"})
    yield _fma("fp64", device, device.fp64_per_clock, "fma", {}, {"Element": "fp64"})
    # Nobody states the rate of pairs: that of fp32 or twice as much.
    pairs = 2 * device.fp32_per_clock
    yield _fma("fp16_packed", device, pairs, "fma_packed", {"FORMAT_BF16": 0}, {})
    if device.capability >= 80:
        yield _fma("bf16_packed", device, pairs, "fma_packed", {"FORMAT_BF16": 1}, {})


def _fma(
    name: str,
    device: DeviceClass,
    rate: int,
    kernel: str,
    constants: Mapping[str, int],
    types: Mapping[str, str],
) -> Probe:
    """``rate`` is about how many numbers an SM takes per clock."""
    per_lane = 1 if types else 2
    contenders = []
    # Of a round, on one SM: the same whether threads are many or have many chains.
    operations = 4 * _FMA_THREADS * _CHAINS * _UNROLL * per_lane
    rounds = _rounds(device, operations / rate)
    arguments = [Argument("sums", "pointer"), Argument("rounds", "int32", rounds)]
    if types:
        scalar: ArgumentType = "fp64" if types["Element"] == "fp64" else "fp32"
        arguments += [Argument("a", scalar), Argument("b", scalar)]
    for per_sm in (4, 8):
        if per_sm * _FMA_THREADS <= device.threads_per_sm:
            chosen = {"THREADS": _FMA_THREADS, "CHAINS": 4 * _CHAINS // per_sm, "UNROLL": _UNROLL}
            contenders.append(
                _contender(
                    kernel,
                    {**chosen, **constants},
                    types,
                    per_sm * device.sm_count,
                    tuple(arguments),
                )
            )
    sums = max(int(c.plan.launches[0].grid[0]) for c in contenders) * _FMA_THREADS
    return Probe(
        name=name,
        kind="peak",
        amount=2 * operations * rounds * device.sm_count,
        # Pairs take the room of an fp32; only their kernel knows how to read them.
        arrays=(_vector("sums", sums, "out", types.get("Element", "fp32")),),
        contenders=tuple(contenders),
        scalars={"a": -0.75, "b": 0.5},
    )


def launches() -> Probe:
    """A launch of an empty kernel, "once", and a "chain" of them that wait for each other."""
    once = _contender("empty", {}, {}, 1, ())
    chain = LaunchPlan(once.plan.launches * CHAIN_LAUNCHES)
    return Probe(
        name="launch",
        kind="launch",
        amount=0,
        # Calls are made on operands: one that nobody reads.
        arrays=(_vector("unused", 32, "out"),),
        contenders=(
            dataclasses.replace(once, name="once"),
            dataclasses.replace(once, name="chain", plan=chain),
        ),
    )


def every(device: DeviceClass, most_bytes: int) -> Iterator[Probe]:
    """All probes of a device, those with operands of at most ``most_bytes``."""
    yield launches()
    yield from peaks(device)
    yield shared_read(device)
    yield l2_read(device)
    yield from streams(device, most_bytes)

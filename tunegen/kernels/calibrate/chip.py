# SPDX-License-Identifier: Apache-2.0
"""What is inside the chip: L2, shared memory, multiply-adds, and what a launch costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tunegen.kernels.calibrate.probe import Probe, contender_of, operand
from tunegen.kernels.calibrate.streaming import reader
from tunegen.model import Argument, ArgumentType, DeviceClass, LaunchPlan

# What a kernel that is bound by the SMs should take: long to a clock, short to a time-out.
TARGET_US = 300.0

# Launches in the plan that tells what one more dependent launch costs.
CHAIN_LAUNCHES = 16

# Bytes that every SM's shared memory delivers per clock: 32 banks of 4 bytes.
SHARED_BYTES_PER_CLOCK = 128


def l2_read(device: DeviceClass) -> Probe:
    """Reading an eighth of what L2 holds, over and over."""
    elements = max(device.l2_bytes // 8 // 4 // 2**18, 1) * 2**18
    guessed = device.l2_gbps or 32e-3 * device.sm_count * device.clock_mhz
    passes = max(2, round(TARGET_US * guessed * 1e3 / (4 * elements)))
    contenders = tuple(
        reader(device, elements, threads, unroll, per_sm, passes)
        for threads, unroll, per_sm in ((256, 4, 4), (512, 4, 2), (512, 2, 4), (256, 2, 8))
    )
    sums = max(int(contender.plan.launches[0].grid[0]) for contender in contenders)
    return Probe(
        name="l2_read",
        kind="memory",
        amount=4 * elements * passes,
        arrays=(operand("x", elements, "in"), operand("sums", sums, "out")),
        contenders=contenders,
    )


def shared_read(device: DeviceClass) -> Probe:
    """Reading shared memory without bank conflicts, on every SM."""
    threads, unroll, per_sm = 512, 4, 2
    sm_bytes = per_sm * threads * unroll * 16  # of a round
    rounds = _rounds(device, sm_bytes / SHARED_BYTES_PER_CLOCK)
    blocks = per_sm * device.sm_count
    contender = contender_of(
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
        arrays=(operand("sums", blocks * threads, "out"),),
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
                contender_of(
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
        arrays=(operand("sums", sums, "out", types.get("Element", "fp32")),),
        contenders=tuple(contenders),
        scalars={"a": -0.75, "b": 0.5},
    )


def launches() -> Probe:
    """A launch of an empty kernel, "once", and a "chain" of them that wait for each other."""
    once = contender_of("empty", {}, {}, 1, ())
    chain = LaunchPlan(once.plan.launches * CHAIN_LAUNCHES)
    return Probe(
        name="launch",
        kind="launch",
        amount=0,
        # Calls are made on operands: one that nobody reads.
        arrays=(operand("unused", 32, "out"),),
        contenders=(
            dataclasses.replace(once, name="once"),
            dataclasses.replace(once, name="chain", plan=chain),
        ),
    )

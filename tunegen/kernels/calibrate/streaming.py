# SPDX-License-Identifier: Apache-2.0
"""Streams of device memory: reading, writing, and mixes of both, from small to large."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tunegen.kernels import vector, vector_add, vector_copy, vector_fill
from tunegen.kernels.calibrate.probe import Choices, Contender, Probe, contender_of, operand
from tunegen.model import (
    Argument,
    Config,
    Constraint,
    DeviceClass,
    KernelSpec,
    Space,
    ceil_div,
    parameters,
)

# Elements of fp32 in each operand of a stream: from what is over before memory is busy to what
# hides every start and end.
STREAM_ELEMENTS = tuple(2**exponent for exponent in (20, 22, 24, 26, 28))

# Operands of a stream are rotated over so much more than L2 holds, that none is still there.
COLD_L2_MULTIPLE = 3

# The operation that makes each mix of reads and writes; "read" has a kernel of its own.
STREAMS: Mapping[str, KernelSpec] = {
    "add": vector_add.SPEC,
    "copy": vector_copy.SPEC,
    "write": vector_fill.SPEC,
}

# Threads, bytes of a vector, vectors in flight, policies of loads and stores, bytes that a miss
# fetches. All but the last two won tunes of copy and add on an H200, or came close, at 2^20 to
# 2^28 elements; blocks that take a few KiB each are ahead of larger ones there by a percent.
_STREAM_ROWS = (
    (512, 16, 1, 1, 0, 0),
    (1024, 16, 2, 1, 1, 128),
    (1024, 8, 2, 1, 1, 0),
    (128, 16, 1, 0, 0, 0),
    (128, 16, 1, 1, 0, 0),
    (128, 16, 1, 0, 1, 0),
    (128, 16, 1, 1, 1, 0),
    (256, 16, 1, 1, 1, 128),
    (128, 8, 2, 0, 0, 128),
    (128, 4, 4, 0, 2, 0),
    (64, 4, 4, 1, 0, 128),
    (64, 16, 4, 1, 1, 0),
    (256, 16, 4, 2, 0, 0),
    (128, 16, 8, 1, 1, 128),
)

# Threads, vectors of 16 bytes in flight, blocks per SM (0: one per tile).
_READ_ROWS = ((256, 8, 0), (256, 4, 0), (512, 4, 0), (128, 8, 0), (512, 4, 2), (256, 8, 4))

# A block that reads less than this has a sum to write that is a part of the traffic.
_LEAST_READ_BYTES = 4096


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

    def bind(config: Config) -> Contender:
        definitions = tuple(
            dataclasses.replace(definition, constants={**config, **definition.constants})
            for definition in spec.kernels(config, problem)
        )
        plan = spec.bound_plan(config, problem, device)
        return Contender(str(config), definitions, plan, config)

    choices = Choices(space, bind)
    return _cold(
        Probe(
            name=name,
            kind="stream",
            amount=operation.bytes(problem),
            arrays=operation.arrays(problem),
            contenders=choices.contenders(_rows(space)),
            scalars=dict(operation.scalars),
            choices=choices,
        ),
        device,
    )


def _rows(space: Space) -> Iterator[Config]:
    """The rows without the parameters that an operation does not have."""
    for threads, width, unroll, load, store, prefetch in _STREAM_ROWS:
        values = {
            "THREADS": threads, "VECTOR_BYTES": width, "UNROLL": unroll, "BLOCKS_PER_SM": 0,
            "STORE_POLICY": store, "LOAD_POLICY": load, "L2_PREFETCH_BYTES": prefetch,
        }  # fmt: skip
        yield Config({parameter: values[parameter] for parameter in space.names})


def _cold(probe: Probe, device: DeviceClass) -> Probe:
    sets = max(2, ceil_div(COLD_L2_MULTIPLE * device.l2_bytes, probe.bytes))
    return dataclasses.replace(probe, sets=sets)


def _read(device: DeviceClass, elements: int) -> Probe:
    space = _read_space(device, elements)

    def bind(config: Config) -> Contender:
        threads, unroll, per_sm = config.values()
        contender = reader(device, elements, threads, unroll, per_sm, passes=1)
        return dataclasses.replace(contender, config=config)

    choices = Choices(space, bind)
    rows = (Config(dict(zip(space.names, row, strict=True))) for row in _READ_ROWS)
    most_blocks = ceil_div(4 * elements, _LEAST_READ_BYTES)
    return _cold(
        Probe(
            name="read",
            kind="stream",
            amount=4 * elements,
            arrays=(operand("x", elements, "in"), operand("sums", most_blocks, "out")),
            contenders=choices.contenders(rows),
            choices=choices,
        ),
        device,
    )


def _read_space(device: DeviceClass, elements: int) -> Space:
    rows = (
        ("THREADS", (64, 128, 256, 512, 1024), "threads per block"),
        ("UNROLL", (1, 2, 4, 8, 16), "vectors of 16 bytes that a thread has in flight"),
        ("BLOCKS_PER_SM", (0, 1, 2, 4, 8, 16), "persistent blocks, or 0: one block per tile"),
    )
    constraints = (
        Constraint(
            "a block reads much more than it writes",
            lambda c: 16 * c.THREADS * c.UNROLL >= _LEAST_READ_BYTES,
        ),
        Constraint(
            "a block's registers hold its vectors and 32 more per thread",
            lambda c: (4 * c.UNROLL + vector.OTHER_REGISTERS) * c.THREADS <= 65536,
        ),
        *vector.persistent_grid(
            device, lambda c: ceil_div(4 * elements, 16 * c.THREADS * c.UNROLL)
        ),
    )
    return Space(parameters(rows), constraints)


def reader(
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
    return contender_of("read", constants, {"Element": "fp32"}, blocks, arguments)

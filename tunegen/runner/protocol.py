# SPDX-License-Identifier: Apache-2.0
"""What the parent and its worker process say to each other.

The worker is the only process that touches the GPU. It is told what to do in frozen values and
answers each request with one of its own; what a kernel does wrong is part of the answer, a worker
that dies or does not answer in time is the parent's to see and to replace.

The parent starts ``python -m tunegen.runner.worker READ_FD WRITE_FD PARENT_PID`` in a session of
its own, with the ends of two pipes. A frame is :data:`HEADER`, the length of what follows, and a
pickle. One request is under way at a time. The worker ends when it reads the end of the pipe, and
with its parent (:func:`tunegen.runner.lifeline.die_with_parent`, called first thing); what is
printed in it goes to a file that the parent quotes from. ``CUDA_VISIBLE_DEVICES`` names its one
GPU by UUID, so CUDA's device 0 may have any index in NVML: look it up by UUID.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from tunegen.model import (
    Array,
    CompiledKernel,
    DeviceClass,
    LaunchPlan,
    Operation,
    Outcome,
    Problem,
    Telemetry,
)

InputKind = Literal["normal", "integers"]

# How a time is taken. "burst": intervals of less than a millisecond on cold operands, with pauses,
# at boost clocks. "sustained": intervals of 20 ms one after the other, as long as one cares to
# wait. "warm": as burst, but on one set of operands, which stay in L2 as far as they fit.
Policy = Literal["burst", "sustained", "warm"]

# The worker's exit code after it has answered that the device context is lost.
CONTEXT_LOST = 86

# In the worker's environment: "torch" has it import torch before it reads its first request, since
# that takes seconds. The device is not touched before :class:`Open`.
PRELOAD = "TUNEGEN_WORKER_PRELOAD"

# The bytes of the pickle that follows, 64 bits, little-endian.
HEADER = struct.Struct("<Q")


def pack(message: Any) -> bytes:
    """A message as a frame."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def send(file: BinaryIO, message: Any) -> None:
    """Write a frame; ``BrokenPipeError`` where nobody reads any more."""
    file.write(pack(message))
    file.flush()


def receive(file: BinaryIO) -> Any:
    """The next message of a blocking file; ``EOFError`` at its end, also within a frame."""
    (size,) = HEADER.unpack(_exactly(file, HEADER.size))
    return pickle.loads(_exactly(file, size))


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError(f"{len(content)} of {size} bytes")
    return content


@dataclass(frozen=True, slots=True)
class Executable:
    """Compiled kernels with the launch plan, bound to sizes, that calls them."""

    kernels: tuple[CompiledKernel, ...]
    plan: LaunchPlan


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Open a device. Answered by :class:`Opened`."""

    index: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Allocate and fill the operands of a problem. Answered by :class:`Prepared`.

    Each of ``sets`` copies of the operands lies between guard bands; all of them hold the same
    values. Inputs are drawn on the device from ``seed``, "normal" ones or small integers whose
    result is exact in any order of summation, or ``given`` as they are stored (bf16 as 16-bit
    integers). ``reference`` writes the expected outputs in fp64, as arrays without gaps, one
    pointer argument ``reference_<operand>`` for each; ``expected`` gives them where there is no
    such kernel. Without either a problem can only be timed. ``checks`` are the kernels of
    :mod:`tunegen.kernels.checks`, compiled. ``offsets`` shifts operands from their aligned place,
    in bytes. What was prepared before is released, and contenders leave.
    """

    arrays: tuple[Array, ...]
    scalars: Mapping[str, float]
    seed: int
    sets: int
    checks: tuple[CompiledKernel, ...]
    inputs: InputKind = "normal"
    reference: Executable | None = None
    given: Mapping[str, NDArray[np.generic]] | None = None
    expected: Mapping[str, NDArray[np.float64]] | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Try:
    """One trial: check the result of one launch, then race it. Answered by :class:`Tried`, or by
    :class:`Failed` where the kernels took the device context with them.

    Outputs are poisoned before the launch. ``tolerance`` is the largest relative RMS error;
    ``best_us`` the best time so far, None for the first: what is more than ``drop`` times slower
    after a few launches is not timed further and says ``raced_out`` in its details. About
    ``budget_ms`` of timing is spent on what is close.
    """

    executable: Executable
    tolerance: float
    policy: Policy
    best_us: float | None = None
    drop: float = 1.5
    budget_ms: float = 40.0


@dataclass(frozen=True, slots=True)
class Verify:
    """Check the whole result, the guard bands, the inputs, and ``repeats`` further runs bit by
    bit. Answered by :class:`Verdict`, or by :class:`Failed` where the kernels could not be run.
    ``exact`` demands no error but the output type's own rounding (integer inputs)."""

    executable: Executable
    tolerance: float
    exact: bool = False
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Enter:
    """Load a contender of a contest under a name, in the place of one that has it, and run it
    once. Answered by :class:`Entered`.

    ``executable`` None enters the vendor's library (through torch, only in a process that may
    load it) for ``operation``, with the ``activation`` of its results.
    """

    name: str
    executable: Executable | None
    operation: str = ""
    layout: str = ""
    activation: str = "none"

    @classmethod
    def vendor(cls, name: str, operation: Operation, problem: Problem) -> Enter:
        """The vendor's library for a problem."""
        attributes = operation.named(dict(problem.attributes))
        activation = str(attributes.get("activation", "none"))
        return cls(name, None, operation.name, problem.layout, activation)


@dataclass(frozen=True, slots=True)
class Block:
    """Time one contender for about ``seconds`` under ``policy``. Answered by :class:`Timed`."""

    name: str
    policy: Policy
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy ``bytes`` between host and device ``repeats`` times. Answered by :class:`Transferred`.

    ``pinned`` host memory is page-locked, which the device reads and writes by itself; from other
    memory the driver copies by way of a buffer of its own.
    """

    bytes: int
    to_device: bool
    pinned: bool
    repeats: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Unload every contender. Answered by :class:`Entered`."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the worker. Not answered."""


Request = Open | Prepare | Try | Verify | Enter | Block | Transfer | Leave | Close


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The device: its class and UUID, the driver's version ("580.65.06"), free memory, the
    worker's process number, and the card before anything ran on it. ``nvml_pids`` are the numbers
    under which NVML knows this worker, to be told from ``other_pids`` of a second worker."""

    device: DeviceClass
    driver: str
    free_bytes: int
    pid: int
    uuid: str = ""
    nvml_pids: tuple[int, ...] = ()
    telemetry: Telemetry = field(default_factory=Telemetry)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the operands take, and the seconds it took to make them."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of a trial and where its seconds went."""

    outcome: Outcome
    verify_seconds: float
    timing_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is right. ``reason`` is empty for a right one, else it says what is wrong
    and where; ``relative_error`` is the RMS error over the RMS of the expected result."""

    reason: str
    relative_error: float
    largest_error: float
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Entered:
    """A contender is loaded; ``relative_error`` that of its result on the prepared inputs."""

    relative_error: float = 0.0
    description: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a block: microseconds per call, one for each interval that was timed.

    ``calls`` is how often the contender ran in the block, ``seconds`` the device time it took;
    both have untimed calls in them, and time and energy that of restoring what was changed in
    place.
    """

    samples_us: tuple[float, ...]
    calls: int
    seconds: float
    before: Telemetry
    after: Telemetry


@dataclass(frozen=True, slots=True)
class Transferred:
    """Microseconds of each copy on the host's clock, until the data is there."""

    samples_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be served. ``sticky``: the device context is lost, end the worker;
    ``kind`` is "device" for what is wrong with device or memory, "kernel" for what an executable
    did."""

    reason: str
    sticky: bool
    kind: Literal["device", "kernel"]


Answer = Opened | Prepared | Tried | Verdict | Entered | Timed | Transferred | Failed

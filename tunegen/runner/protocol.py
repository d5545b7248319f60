# SPDX-License-Identifier: Apache-2.0
"""What the parent and its worker process say to each other.

The worker is the only process that touches the GPU. It is told what to do in frozen values and
answers each request with one of its own; what a kernel does wrong is part of the answer, a worker
that dies or does not answer in time is the parent's to see and to replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tunegen.model import Array, CompiledKernel, DeviceClass, LaunchPlan, Outcome

InputKind = Literal["normal", "integers"]


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

    Each of ``sets`` copies of the operands lies between guard bands; inputs are drawn on the
    device from ``seed``: "normal" values, or small integers whose result is exact in any order of
    summation. ``reference`` writes the expected outputs in fp64, as arrays without gaps, one
    pointer argument ``reference_<operand>`` for each; ``expected`` gives them where there is no
    such kernel. ``checks`` are the compiled kernels that fill and compare, for the dtypes of
    ``arrays``. ``offsets`` shifts operands from their aligned place, in bytes. What was prepared
    before is released.
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
    """One trial: check the result of one launch, then race it. Answered by :class:`Tried`.

    Outputs are poisoned before the launch. ``tolerance`` is the largest relative RMS error;
    ``best_us`` the best time so far, None for the first: what is more than ``drop`` times slower
    after a few launches is not timed further. About ``budget_ms`` of timing is spent on what is
    close.
    """

    executable: Executable
    tolerance: float
    policy: str
    best_us: float | None = None
    drop: float = 1.5
    budget_ms: float = 40.0


@dataclass(frozen=True, slots=True)
class Verify:
    """Check the whole result, the guard bands, the inputs, and a second run bit by bit. Answered
    by :class:`Verdict`. ``exact`` demands no error at all (integer inputs)."""

    executable: Executable
    tolerance: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Enter:
    """Load a contender of a contest under a name, and keep it. Answered by :class:`Entered`.

    ``executable`` None enters the vendor's library (through torch, only in a process that may
    load it) for ``operation``.
    """

    name: str
    executable: Executable | None
    operation: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Time one contender for about ``seconds`` under ``policy``. Answered by :class:`Timed`."""

    name: str
    policy: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Unload every contender. Answered by :class:`Entered`."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the worker. Not answered."""


Request = Open | Prepare | Try | Verify | Enter | Block | Leave | Close


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The device: its class, the driver's version, free memory, the worker's process number."""

    device: DeviceClass
    driver: str
    free_bytes: int
    pid: int


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
class Telemetry:
    """The card as NVML describes it: clocks in MHz, power in W, temperature in degrees Celsius,
    reasons for throttling in words, energy since the driver was loaded in mJ; None: not told."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    energy_mj: int | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of a block: microseconds per call, one for each interval that was timed.

    ``calls`` is how often the contender ran in the block, ``seconds`` the device time it took.
    """

    samples_us: tuple[float, ...]
    calls: int
    seconds: float
    before: Telemetry
    after: Telemetry


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be served. ``sticky``: the device context is lost, end the worker;
    ``kind`` is "device" for what is wrong with device or memory, "kernel" for what an executable
    did."""

    reason: str
    sticky: bool
    kind: Literal["device", "kernel"]


Answer = Opened | Prepared | Tried | Verdict | Entered | Timed | Failed

# SPDX-License-Identifier: Apache-2.0
"""The device memory that plans need besides their operands: one block for each stream, kept."""

from __future__ import annotations

from typing import Any

from tunegen.device import driver
from tunegen.errors import DeviceError, UsageError
from tunegen.runtime.arrays import read_memory
from tunegen.runtime.context import Context
from tunegen.runtime.program import Program

# Alignment of what cuMemAlloc returns, which plans rely on.
_ALIGNMENT = 256


class Workspaces:
    """Blocks that grow and never shrink. Calls on one stream follow each other, so they share a
    block; calls on different streams may not."""

    def __init__(self, program: Program, context: Context) -> None:
        self._purpose = f"the workspace of {program.name}"
        self._zeroed = program.plan.workspace_init == "zero"
        self._context = context
        self._blocks: dict[int, tuple[int, int]] = {}  # stream: address, bytes

    def of(self, stream: int, size: int) -> int:
        """Address of ``size`` bytes for launches on ``stream``, initialised as the plan wants:
        what it zeroes may end elsewhere for other sizes, so all of a new block is zeroed.

        Raises :class:`DeviceError` where they do not fit, and while ``stream`` is captured: a
        graph would go on using a block that a later, larger call replaces.
        """
        idle = driver.bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        if driver.call("cuStreamIsCapturing", stream) != idle:
            raise DeviceError(
                f"{self._purpose} cannot be kept for a graph that is captured",
                hint=f"give workspace= with {size:,} bytes that live as long as the graph",
            )
        address, held = self._blocks.get(stream, (0, 0))
        if held >= size:
            return address
        if held:
            driver.call("cuStreamSynchronize", stream)
            del self._blocks[stream]
            driver.call("cuMemFree", address)
        address = self._context.allocate(size, self._purpose)
        self._blocks[stream] = (address, size)
        if self._zeroed:
            driver.call("cuMemsetD8Async", address, 0, size, stream)
        return address

    def given(self, memory: Any, stream: int, size: int, zeroed: int) -> int:
        """Address of the caller's memory, an address or an array. Others may have written to it
        since the last call, so the first ``zeroed`` bytes, which have to be zero, are made so.

        Raises :class:`UsageError` where it is too small or does not start at a multiple of 256.
        """
        address, held = read_memory("workspace", memory, self._context.index, stream)
        if held is not None and held < size:
            raise UsageError(f"{self._purpose} takes {size:,} bytes, {held:,} are given")
        if not address or address % _ALIGNMENT:
            raise UsageError(
                f"{self._purpose} is given at {address:#x}, not at a multiple of {_ALIGNMENT}"
            )
        if zeroed:
            driver.call("cuMemsetD8Async", address, 0, zeroed, stream)
        return address

    def release(self) -> None:
        """Free every block; nothing may be using them any more."""
        while self._blocks:
            _, (address, _) = self._blocks.popitem()
            driver.call("cuMemFree", address)

# SPDX-License-Identifier: Apache-2.0
"""What a configuration makes the device do, in the units the performance model counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# A number for one configuration, or a column for many. NumPy broadcasts between the two.
Count = Any

Unit = Literal["fp32", "fp64", "tensor16", "tensor64"]


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one call, main launch only unless said otherwise.

    All are totals of the arithmetic that the template does, not measurements. Where a figure is
    unknown, say what a perfect kernel would need: the model is a floor with penalties on top.
    """

    blocks: Count
    """Thread blocks of the main launch."""
    threads: Count
    """Threads per block."""
    registers: Count
    """Registers per thread, estimated; replaced by the compiler's figure once there is one."""
    shared_bytes: Count
    """Shared memory per block."""
    fma: Count
    """Multiply-adds (or other full-rate operations) per block, tail waste included."""
    instructions: Count
    """Warp instructions issued per block, all kinds."""
    shared_wavefronts: Count
    """Cycles of the shared-memory pipe per block: one per 128 bytes without bank conflicts."""
    l1_wavefronts: Count
    """Cycles of the global load and store pipe per block: one per 128-byte line touched."""
    l2_bytes: Count
    """Bytes the whole launch requests from L2."""
    dram_bytes: Count
    """Bytes the whole launch moves to and from device memory, L2 hits taken off."""
    inflight_bytes: Count
    """Bytes of global loads that one thread keeps in flight: what hides memory latency."""
    steps: Count
    """Dependent steps per block, in each of which it waits once for what it asked for."""
    overlap: Count
    """0 where a block computes only while no load of its own is in flight, 1 where always."""
    unit: Unit = "fp32"
    """What does ``fma``: the CUDA cores at the rate of a type, or the tensor cores on 16-bit or
    64-bit operands."""
    extra_launches: Count = 0
    """Launches besides the main one."""
    extra_bytes: Count = 0
    """Bytes that those launches move."""
    programmatic: Count = 0
    """1 where a launch begins while the one ahead of it ends, so that starting its blocks costs
    nothing; less where that is not all that they do then."""
    register_limit: Count = 255
    """Registers per thread that the launch bounds leave; what is estimated beyond them spills."""

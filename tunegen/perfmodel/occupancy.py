# SPDX-License-Identifier: Apache-2.0
"""How many blocks are resident on a multiprocessor, as CUDA's occupancy calculator counts them.

The rules are those of ``cuda_occupancy.h`` in the CUDA 13 runtime headers, with the largest
shared-memory carve-out. They are the same from Turing to Blackwell, but for the granularity of
shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tunegen.model import DeviceClass, ceil_div

WARP_THREADS = 32
MAX_BLOCK_THREADS = 1024
MAX_THREAD_REGISTERS = 255
SUBPARTITIONS = 4  # each has its own scheduler and a quarter of the registers
_REGISTER_UNIT = 256  # registers are allocated to a warp in such portions


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps resident on one multiprocessor; ``fraction`` is of the most warps it holds.

    ``limiter`` is what allows no more blocks: "threads", "registers", "shared memory" or "blocks",
    the first of these where several do. With 0 blocks, it is what does not fit.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limiter: str


def occupancy(device: DeviceClass, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel with so many threads per block, registers per thread and bytes of
    shared memory (static and dynamic) per block."""
    allowed = _allowed(device, threads, registers, shared_bytes)
    limiter = min(allowed, key=lambda name: int(allowed[name]))
    blocks = int(allowed[limiter])
    warps = blocks * ceil_div(threads, WARP_THREADS)
    most_warps = device.threads_per_sm // WARP_THREADS
    return Occupancy(blocks, warps, warps / most_warps, limiter)


def blocks_per_sm(device: DeviceClass, threads: Any, registers: Any, shared_bytes: Any) -> Any:
    """Resident blocks per multiprocessor, for numbers or columns of them; 0 where none fits."""
    allowed = _allowed(device, threads, registers, shared_bytes)
    blocks = allowed["blocks"]
    for limit in allowed.values():
        blocks = np.minimum(blocks, limit)
    return int(blocks) if np.ndim(blocks) == 0 else blocks


def _allowed(
    device: DeviceClass, threads: Any, registers: Any, shared_bytes: Any
) -> dict[str, Any]:
    """For each limit, the blocks that it allows."""
    # At least one warp, so that nothing divides by 0; a block of no threads never fits anyway.
    warps = np.maximum(ceil_div(threads, WARP_THREADS), 1)
    fits = (np.asarray(threads) > 0) & (np.asarray(threads) <= MAX_BLOCK_THREADS)
    return {
        "threads": np.where(fits, device.threads_per_sm // WARP_THREADS // warps, 0),
        "registers": _by_registers(device, warps, registers),
        "shared memory": _by_shared_memory(device, shared_bytes),
        "blocks": device.blocks_per_sm,
    }


def _by_registers(device: DeviceClass, warps: Any, registers: Any) -> Any:
    per_warp = _round_up(np.maximum(registers, 1) * WARP_THREADS, _REGISTER_UNIT)
    per_subpartition = device.registers_per_sm // SUBPARTITIONS // per_warp
    fits = np.asarray(registers) <= MAX_THREAD_REGISTERS
    return np.where(fits, per_subpartition * SUBPARTITIONS // warps, 0)


def _by_shared_memory(device: DeviceClass, shared_bytes: Any) -> Any:
    unit = 128 if device.capability >= 80 else 256
    per_block = _round_up(shared_bytes + device.shared_bytes_reserved, unit)
    fits = np.asarray(shared_bytes) <= device.shared_bytes_per_block
    return np.where(fits, device.shared_bytes_per_sm // np.maximum(per_block, unit), 0)


def _round_up(value: Any, unit: int) -> Any:
    return ceil_div(value, unit) * unit

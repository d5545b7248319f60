# SPDX-License-Identifier: Apache-2.0
"""Counted work in, microseconds out.

One multiprocessor is followed through its waves of resident blocks, which run side by side. A wave
is bound by

* its pipes: multiply-adds or issue slots, whichever takes longer, and the load/store unit, which
  overlap the better the more warps there are;
* latency: the path of one block, whose steps have a barrier each and the part of a load's latency
  that its own arithmetic does not cover; or Little's law, by which the bytes that all threads keep
  in flight arrive once per latency.

The launch is the sum of its waves, bound in turn by what L2 and device memory deliver, and by how
fast blocks can be started. Two bounds make more than the larger one, since near the corner neither
hides the other wholly: the root of the sum of their squares for memory, of cubes inside an SM. The
cost of launching is added. Without the compiled kernel's :class:`Resources`, the estimate in
:class:`Work` stands for its registers, and what exceeds their limit is taken to spill.

The model is there to put configurations in order, not to replace a clock. Its form was chosen on
two exhaustive public measurements of another SIMT matmul (4096^3 in fp32, 17,956 configurations
each on RTX 3090 and TITAN RTX; benchmark_hub, doi 10.5281/zenodo.15364124), which the formula
orders with a rank correlation of 0.85 and 0.84; the constants marked "fitted" on about 1,100
configurations of matmul and of the vector kernels that were timed on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunegen.errors import PlanError
from tunegen.model import Calibration, DeviceClass, Resources, Work
from tunegen.perfmodel.occupancy import (
    MAX_THREAD_REGISTERS,
    SUBPARTITIONS,
    WARP_THREADS,
    Occupancy,
    blocks_per_sm,
    occupancy,
)

# Raised whenever a prediction changes, so that predictions of two formulas are never compared.
POLICY = "model-3"

# Cost of one more launch in a CUDA graph of dependent kernels. Estimate: 1 to 1.5 us on Hopper.
LAUNCH_US = 1.0

# Share of the multiply-add peak that is left after register bank conflicts. Estimate.
FMA_EFFICIENCY = 0.95

# Cycles of latency. Measured on A100 and H800: L2 262 and 263, device memory 466 and 479 (Luo et
# al., arXiv 2402.13499); with memory as busy as a kernel makes it, more: fitted.
L2_LATENCY_CYCLES = 270
DRAM_LATENCY_CYCLES = 800

# What a step adds to the path of a warp besides its instructions: barrier, first dependent load
# from shared memory (29 cycles, same paper), end of the loop. Fitted.
STEP_CYCLES = 40

# A block's launch, its index arithmetic and the first fetch of its parameters. Estimate.
BLOCK_START_CYCLES = 300

# So many warps per scheduler hide half of the shorter pipe behind the longer one. Fitted.
OVERLAP_WARPS = 2

# The device starts no more than one block in so many clocks: 64 threads with an element each take
# an H200 as long whether they copy or only write. Fitted.
BLOCK_DISPATCH_CYCLES = 1.2

# SMs get unequal shares of device memory, so that those of a wave do not end together. It matters
# where all blocks run at once, as in a persistent grid: a share of the wave's time. Fitted.
UNEVEN_WAVE = 0.07

# Times that a spilled register is stored or reloaded per multiply-add that needs it. Fitted.
SPILL_ACCESSES = 5

# What copies usually reach of the memory rate; the best reach some more. Fitted.
DRAM_COPY_EFFICIENCY = 0.88

# What the path from L2 to one SM carries per clock.
L2_SM_BYTES_PER_CLOCK = 64

# Assumed per SM and clock where a device class has no L2 rate: A100 measures 32, H800 39.
_L2_DEFAULT_BYTES_PER_CLOCK = 32


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one call is expected to take, and why.

    ``parts`` are microseconds by name: what the launch would take if it were bound by this alone
    (fma, issue, shared, l1, l2, dram, latency, dispatch), and what is added to it (launch; extra,
    the bytes of further launches). They overlap: ``time_us`` is more than the largest and less
    than the sum. ``bound`` names the largest. ``waves`` counts full loads of the device, 2.5 being
    two and a half. ``bytes`` go to and from device memory, tail waste is counted in ``flops``.
    """

    time_us: float
    parts: dict[str, float]
    bound: str
    occupancy: Occupancy
    waves: float
    bytes: float
    flops: float


def calibrated(device: DeviceClass, calibration: Calibration | None) -> DeviceClass:
    """A device class with the rates that were measured in place of the datasheet's, in which a
    prediction uses them: memory by what copies reached, L2, and the clock at which arithmetic ran.
    """
    if calibration is None:
        return device
    copy, peak = calibration.largest("copy"), calibration.peak_tflops.get("fp32")
    memory_gbps, l2_gbps, clock_mhz = device.memory_gbps, device.l2_gbps, device.clock_mhz
    if copy is not None:
        memory_gbps = copy.gbps.median / DRAM_COPY_EFFICIENCY
    if calibration.l2_read_gbps is not None:
        l2_gbps = calibration.l2_read_gbps.median
    if peak is not None:
        clock_mhz = round(peak.median * 1e6 / (2 * device.fp32_per_clock * device.sm_count))
    return replace(device, memory_gbps=memory_gbps, l2_gbps=l2_gbps, clock_mhz=clock_mhz)


def predict_us(work: Work, device: DeviceClass, resources: Resources | None = None) -> Any:
    """Microseconds of one call: a number, or a column where ``work`` has columns.

    Infinite where no block fits on a multiprocessor, so that such rows sort last.
    """
    load = _load(work, device, resources)
    time_us, _ = _times(load)
    time_us = np.where(load.resident > 0, time_us, np.inf)
    return float(time_us) if time_us.ndim == 0 else time_us


def explain(work: Work, device: DeviceClass, resources: Resources | None = None) -> Prediction:
    """The prediction for one configuration with its parts.

    Raises :class:`PlanError` where no block fits on a multiprocessor.
    """
    load = _load(work, device, resources)
    threads, registers = int(load.threads), int(load.registers)
    found = occupancy(device, threads, registers, int(load.shared_bytes))
    if not found.blocks_per_sm:
        raise PlanError(
            f"no block fits on an SM of {device.name}, for want of {found.limiter}: it has "
            f"{threads} threads of {registers} registers and "
            f"{int(load.shared_bytes):,} bytes of shared memory"
        )
    time_us, columns = _times(load)
    parts = {name: float(us) for name, us in columns.items()}
    return Prediction(
        time_us=float(time_us),
        parts=parts,
        bound=max(parts, key=lambda name: parts[name]),
        occupancy=found,
        waves=float(load.blocks) / (device.sm_count * found.blocks_per_sm),
        bytes=float(load.dram_bytes + load.extra_bytes),
        flops=float(2 * load.blocks * work.fma),
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """A launch in units of its device. Each is a float64 number or column; cycles per block."""

    device: DeviceClass
    blocks: Any
    resident: Any  # blocks per SM
    threads: Any
    warps: Any
    registers: Any
    shared_bytes: Any
    fma_cycles: Any
    issue_cycles: Any
    shared_cycles: Any
    l1_cycles: Any
    wait_cycles: Any
    l2_bytes: Any
    dram_bytes: Any
    extra_launches: Any
    extra_bytes: Any


def _load(work: Work, device: DeviceClass, resources: Resources | None) -> _Load:
    blocks, threads = _float(work.blocks), _float(work.threads)
    warps = np.maximum(np.ceil(threads / WARP_THREADS), 1)
    registers, spills = _registers(work, device, resources, warps)
    shared_bytes = _float(work.shared_bytes)
    if resources is not None:
        shared_bytes = np.maximum(shared_bytes, resources.shared_bytes)
    instructions = work.instructions + spills
    rates = {
        "fp32": device.fp32_per_clock,
        "fp64": device.fp64_per_clock,
        "tensor16": device.tensor16_per_clock,
        "tensor64": device.tensor64_per_clock,
    }
    # Tensor cores of a rate that nobody tells are taken to be no faster than the CUDA cores.
    lanes = rates[work.unit] or device.fp32_per_clock
    return _Load(
        device=device,
        blocks=blocks,
        resident=_float(
            blocks_per_sm(
                device, threads.astype(np.int64), registers.astype(np.int64),
                shared_bytes.astype(np.int64),
            )
        ),
        threads=threads,
        warps=warps,
        registers=registers,
        shared_bytes=shared_bytes,
        fma_cycles=_float(work.fma) / (lanes * FMA_EFFICIENCY),
        issue_cycles=instructions / SUBPARTITIONS,
        shared_cycles=_float(work.shared_wavefronts),
        l1_cycles=work.l1_wavefronts + spills,
        wait_cycles=_waits(work, warps, instructions / warps),
        l2_bytes=_float(work.l2_bytes),
        dram_bytes=_float(work.dram_bytes),
        extra_launches=_float(work.extra_launches),
        extra_bytes=_float(work.extra_bytes),
    )  # fmt: skip


def _registers(
    work: Work, device: DeviceClass, resources: Resources | None, warps: Any
) -> tuple[Any, Any]:
    """Registers per thread, and the warp instructions per block that access spilled ones."""
    if resources is not None:
        words = (resources.spill_store_bytes + resources.spill_load_bytes) / 4
        return _float(resources.registers), words * warps * work.steps
    wanted = np.maximum(_float(work.registers), 1)
    # A block must fit by itself, with warps spread evenly and registers given out in eights.
    share = device.registers_per_sm / WARP_THREADS / SUBPARTITIONS
    fitting = np.floor(share / np.ceil(warps / SUBPARTITIONS) / 8) * 8
    limit = np.minimum(np.minimum(fitting, MAX_THREAD_REGISTERS), work.register_limit)
    excess = np.maximum(wanted - limit, 0)
    spills = work.fma / WARP_THREADS * SPILL_ACCESSES * excess / wanted
    return np.minimum(wanted, limit), spills


def _waits(work: Work, warps: Any, instructions_per_warp: Any) -> Any:
    """Cycles that one block takes however much of the SM it has."""
    l2_bytes = np.maximum(_float(work.l2_bytes), 1)
    missed = np.minimum(work.dram_bytes / l2_bytes, 1)
    latency = L2_LATENCY_CYCLES + (DRAM_LATENCY_CYCLES - L2_LATENCY_CYCLES) * missed
    path = (
        BLOCK_START_CYCLES * (1 - _float(work.programmatic))
        + instructions_per_warp
        + work.steps * (STEP_CYCLES + (1 - work.overlap) * latency)
    )
    in_flight = np.maximum(_float(work.inflight_bytes) * work.threads, 1)
    round_trips = np.minimum(l2_bytes / np.maximum(work.blocks, 1) / in_flight, work.steps)
    return np.maximum(path, round_trips * latency)


def _times(load: _Load) -> tuple[Any, dict[str, Any]]:
    """Microseconds of one call, and its parts."""
    device = load.device
    at_once = device.sm_count * np.maximum(load.resident, 1)
    full_waves = np.floor(load.blocks / at_once)
    tail = np.ceil((load.blocks - full_waves * at_once) / device.sm_count)
    full_cycles, full = _wave(load, np.maximum(load.resident, 1))
    last_cycles, last = _wave(load, tail)
    sm_us = (full_waves * full_cycles + last_cycles) / device.clock_mhz
    parts = {name: (full_waves * full[name] + last[name]) / device.clock_mhz for name in full}
    parts["l2"] = load.l2_bytes / np.minimum(_l2_bytes_per_us(device), _sms_bytes_per_us(load))
    uneven = 1 + UNEVEN_WAVE * np.minimum(1, at_once / np.maximum(load.blocks, 1))
    parts["dram"] = load.dram_bytes / _dram_bytes_per_us(device) * uneven
    parts["dispatch"] = load.blocks * BLOCK_DISPATCH_CYCLES / device.clock_mhz
    launch_us = LAUNCH_US * (1 + load.extra_launches)
    extra_us = _extra_us(load)
    # What device memory delivers passes through L2 on its way, so these two run in step.
    memory_us = np.maximum(parts["l2"], parts["dram"])
    main_us = np.maximum(np.sqrt(sm_us**2 + memory_us**2), parts["dispatch"])
    return main_us + launch_us + extra_us, {**parts, "launch": launch_us, "extra": extra_us}


def _wave(load: _Load, resident: Any) -> tuple[Any, dict[str, Any]]:
    """Cycles in which an SM is done with ``resident`` blocks side by side, and their parts."""
    warps = np.maximum(resident * load.warps / SUBPARTITIONS, 0.25)  # per scheduler
    # Warps never change their scheduler: the one with most of them ends last.
    uneven = resident * (np.ceil(warps) / warps)
    fma, issue = load.fma_cycles * uneven, load.issue_cycles * uneven
    shared, l1 = load.shared_cycles * resident, load.l1_cycles * resident
    arithmetic, access = np.maximum(fma, issue), shared + l1
    hidden = OVERLAP_WARPS / (OVERLAP_WARPS + warps)
    pipes = np.maximum(arithmetic, access) + hidden * np.minimum(arithmetic, access)
    latency = np.where(resident > 0, load.wait_cycles, 0)
    parts = {"fma": fma, "issue": issue, "shared": shared, "l1": l1, "latency": latency}
    # Products, since powers of a column are not rounded like those of a number.
    return np.cbrt(pipes * pipes * pipes + latency * latency * latency), parts


def _l2_bytes_per_us(device: DeviceClass) -> float:
    default = _L2_DEFAULT_BYTES_PER_CLOCK * device.sm_count * device.clock_mhz
    return device.l2_gbps * 1e3 or default


def _sms_bytes_per_us(load: _Load) -> Any:
    """What L2 can hand over to the SMs that have a block at all."""
    busy_sms = np.clip(load.blocks, 1, load.device.sm_count)
    return busy_sms * L2_SM_BYTES_PER_CLOCK * load.device.clock_mhz


def _extra_us(load: _Load) -> Any:
    """What further launches take to read and write what the main one left, in L2 if it fits."""
    fits = load.extra_bytes <= load.device.l2_bytes
    rate = np.where(fits, _l2_bytes_per_us(load.device), _dram_bytes_per_us(load.device))
    return load.extra_bytes / rate


def _dram_bytes_per_us(device: DeviceClass) -> float:
    return device.memory_gbps * DRAM_COPY_EFFICIENCY * 1e3


def _float(value: Any) -> Any:
    return np.asarray(value, dtype=np.float64)

# SPDX-License-Identifier: Apache-2.0
"""Records for tests, and processes that write them: run as a script, so that they can be killed.

``write FOLDER WRITERS COUNT VICTIM`` writes with many processes at once and kills one of them.
Each notes the BLOCK_M of a record in ``FOLDER.<writer>.log`` once it is reported as written.
``crash FOLDER`` kills a writer at every line it executes, and looks at what is left each time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tunegen.database import Database, files
from tunegen.kernels import matmul
from tunegen.model import (
    DeviceClass,
    DeviceIdentity,
    KernelImage,
    Limit,
    Measurement,
    Problem,
    TuningRecord,
)

H200 = DeviceClass(
    name="NVIDIA H200",
    arch="sm_90",
    sm_count=132,
    l2_bytes=50 << 20,
    shared_bytes_per_sm=228 << 10,
    shared_bytes_per_block=227 << 10,
    threads_per_sm=2048,
    blocks_per_sm=32,
    clock_mhz=1980,
    memory_clock_mhz=3201,
    memory_gbps=4800.0,
    fp32_per_clock=128,
    fp64_per_clock=64,
)


def problem(sizes: str = "4096x4096x4096", dtype: str = "fp32", **attributes: int) -> Problem:
    return matmul.OPERATION.problem(sizes, dtype=dtype, layout="nn", **attributes)


def make_record(
    sizes: str = "4096x4096x4096",
    *,
    device: DeviceClass = H200,
    median_us: float = 1000.0,
    policy: str = "sustained",
    dtype: str = "fp32",
    attributes: dict[str, int] | None = None,
    block_m: int = 128,
    shared_bytes: int = 32768,
    **changes: object,
) -> TuningRecord:
    fields: dict[str, object] = {
        "operation": "matmul",
        "spec": "simt",
        "arch": device.arch,
        "target": device.arch,
        "problem": problem(sizes, dtype, **(attributes or {})),
        "config": {"BLOCK_M": block_m, "BLOCK_N": 64},
        "device": DeviceIdentity.of(device),
        "evidence": "measured",
        "measurement": Measurement(median_us, policy),
        "default_us": 2000.0,
        "images": (
            KernelImage(
                name="matmul_simt",
                source_digest="a" * 64,
                cubin_sha256="b" * 64,
                registers=128,
                spill_bytes=0,
                shared_bytes=shared_bytes,
            ),
        ),
        "limits": (Limit("M", "at_most", 1 << 30),),
        "nvrtc": "13.0",
        "tunegen": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "trials": 100,
        "seed": 0,
        "command": "tunegen tune matmul --arch sm_90",
    }
    return TuningRecord(**{**fields, **changes})  # type: ignore[arg-type]


def write(folder: Path, writers: int, count: int, victim: int) -> None:
    """``count`` records of each writer; the victim goes on until it is killed."""
    logs = [folder.with_name(f"{folder.name}.{writer}.log") for writer in range(writers)]
    children = []
    for writer, log in enumerate(logs):
        log.touch()
        child = os.fork()
        if child == 0:
            _write(folder, writer, 10**6 if writer == victim else count, log)
            os._exit(0)
        children.append(child)
    while logs[victim].read_text().count("\n") < 3:
        time.sleep(0.001)
    os.kill(children[victim], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expected = [-signal.SIGKILL if writer == victim else 0 for writer in range(writers)]
    assert codes == expected, codes


def _write(folder: Path, writer: int, count: int, log: Path) -> None:
    """In turn a record that nobody else writes, and one for a problem that all of them tune."""
    database = Database(folder, folder / "none")
    with log.open("w") as out:
        for turn in range(count):
            block_m = writer * 1000 + turn
            sizes = "4096x4096x4096" if turn % 2 else f"{1 + writer}x{1 + turn}x64"
            database.put(make_record(sizes, block_m=block_m, median_us=100.0 + block_m))
            print(block_m, file=out, flush=True)


def crash(folder: Path) -> None:
    first, second = make_record(block_m=1), make_record(block_m=2)
    path = Database(folder, folder / "none").put(first)
    old = path.read_bytes()
    new = Database(folder / "other", folder / "none").put(first)
    Database(folder / "other", folder / "none").put(second)
    new_content = new.read_bytes()
    outcomes: Counter[str] = Counter()
    line = 0
    while True:
        line += 1
        child = os.fork()
        if child == 0:
            _die_at_line(line)
            Database(folder, folder / "none").put(second)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        content = path.read_bytes()
        assert content in (old, new_content), f"torn by a kill at line {line}"
        if not os.WIFSIGNALED(status):
            assert content == new_content, "reported as written, and is not there"
            break
        outcomes["old" if content == old else "new"] += 1
        outcomes["temporary"] += any(path.parent.glob(".*.tmp"))
        # The next writer is neither kept out nor does it trip over what the killed one left.
        Database(folder, folder / "none").put(second)
        assert path.read_bytes() == new_content
        assert not list(path.parent.glob(".*.tmp")), f"left behind by a kill at line {line}"
        path.write_bytes(old)
    print(outcomes["old"], outcomes["new"], outcomes["temporary"])


def _die_at_line(number: int) -> None:
    """SIGKILL before the ``number``-th line that files.py executes from here on."""
    remaining = number

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal remaining
        if frame.f_code.co_filename != files.__file__:  # type: ignore[attr-defined]
            return None
        if event == "line":
            remaining -= 1
            if not remaining:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", folder, writers, count, victim]:
            write(Path(folder), int(writers), int(count), int(victim))
        case ["crash", folder]:
            crash(Path(folder))

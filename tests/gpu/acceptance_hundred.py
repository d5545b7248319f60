# SPDX-License-Identifier: Apache-2.0
"""100 trials of a large matmul: how long they take, in how much memory, and how fast the winner
is beside cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acceptance_common import Setting, Verdict, command, keep, result_of, tune_words
from acceptance_processes import Memory


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with the ratio to the vendor's library that is demanded."""

    name: str
    words: tuple[str, ...]
    least_ratio: float


def _matmul(size: int, least_ratio: float) -> Case:
    sizes = f"{size}x{size}x{size}"
    words = ("matmul", "--problem", sizes, "--dtype", "fp32", "--layout", "nn")
    return Case(f"tune_{size}_seed0", words, least_ratio)


CASES = (_matmul(4096, 0.88), _matmul(2048, 0.9))
TRIALS = 100
MOST_SECONDS = 120.0
MOST_BYTES = 1.5 * 2**30


def run(setting: Setting) -> Verdict:
    passed, figures, details = True, [], {}
    for case in CASES:
        passed_one, figure, found = _tune(setting, case)
        passed &= passed_one
        figures.append(figure)
        details[case.name] = found
    return Verdict(passed, "; ".join(figures), details)


def _tune(setting: Setting, case: Case) -> tuple[bool, str, dict[str, Any]]:
    watched: list[Memory] = []

    def watch(pid: int) -> Memory:
        watched.append(Memory(pid))
        return watched[0]

    words = tune_words(setting, case.name, *case.words, "--trials", str(TRIALS), "--seed", "0")
    # Nothing is compiled yet.
    cache = setting.work / f"{case.name}_cache"
    done = command(words, watch=watch, XDG_CACHE_HOME=str(cache))
    result, memory = result_of(done), watched[0]
    keep(setting, case.name, result)
    return judge(case, result, done.seconds, memory)


def judge(
    case: Case, result: Mapping[str, Any], seconds: float, memory: Memory
) -> tuple[bool, str, dict[str, Any]]:
    """Whether a tune is what is demanded of it, in words and figures."""
    record = result["record"]
    made = sum(result["trials"]["counts"].values())
    ratio = record["baseline_ratio"]
    vendor = record["measurement"]["details"].get("vendor", {})
    passed = (
        made == TRIALS
        and seconds <= MOST_SECONDS
        and memory.together_bytes < MOST_BYTES
        and ratio is not None
        and ratio >= case.least_ratio
    )
    of_vendor = (
        f"ratio to the vendor {ratio:.3f} [{vendor['low']:.3f}, {vendor['high']:.3f}] "
        f"(>= {case.least_ratio})"
        if ratio is not None
        else f"no ratio: {result['contest']['no_vendor']}"
    )
    figure = (
        f"{result['problem']}: {made} trials in {seconds:.1f} s (<= {MOST_SECONDS:.0f}), "
        f"{of_vendor}, memory {gib(memory.together_bytes)} GiB (< {gib(int(MOST_BYTES))}: parent "
        f"{gib(memory.parent_bytes)}, worker {gib(memory.worker_bytes)}; "
        f"torch apart {gib(memory.vendor_bytes)})"
    )
    found = {
        "seconds": seconds,
        "ratio": ratio,
        "vendor": vendor,
        "median_us": record["measurement"]["median_us"],
        "together_bytes": memory.together_bytes,
        "parent_bytes": memory.parent_bytes,
        "worker_bytes": memory.worker_bytes,
        "vendor_bytes": memory.vendor_bytes,
        "memory_samples": memory.samples,
        "spent": result["seconds"],
    }
    return passed, figure, found


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"

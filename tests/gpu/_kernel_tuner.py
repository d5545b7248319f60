# SPDX-License-Identifier: Apache-2.0
"""Kernel Tuner on a template of ours, in a process of its own.

``python _kernel_tuner.py JOB RESULT [PACKAGES]``; what is not installed is looked for in the
folder of packages.

It tunes as its documentation says, by its own backend for CUDA (cuda-python) and its own timing:
the source is a function of the configuration, compiled by NVRTC when it is asked for, and timed by
events in seven launches after one another. What it is spared makes it faster, never slower: it
checks no result, and the valid configurations are listed for it, so that its own solver of
constraints has nothing to do; only what it does with them is in its time.

Two things have no option there and are given to it from outside: that list, and the threads of a
block, which follow from several parameters.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pickle
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _tree  # noqa: F401 (makes tunegen importable)
import numpy as np

from tunegen import codegen, kernels
from tunegen.model import Array, Config, DeviceClass, KernelSpec, LaunchPlan, Problem, Space
from tunegen.session.setups import draw

# Its own default.
ITERATIONS = 7

# What our compiler is given as well; the arch it finds by itself.
OPTIONS = ("-std=c++17", "-default-device")

_SCALARS = {"int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64}


class Unfit(Exception):
    """A spec of which Kernel Tuner can launch not every configuration."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be tuned; ``kernel`` is the kernel file that has the spec, if none of ours."""

    operation: str
    problem: Problem
    device: DeviceClass
    spec: str
    kernel: str | None
    strategy: str
    evaluations: int
    seconds: float
    seed: int

    def load(self) -> KernelSpec:
        own = (kernels.load(Path(self.kernel)),) if self.kernel else ()
        (spec,) = kernels.specs_of(self.operation, (*own, *kernels.SPECS), only=self.spec)
        return spec


@dataclass(slots=True)
class Template:
    """A spec's problem in the words of Kernel Tuner, each a function of the parameters' values."""

    spec: KernelSpec
    problem: Problem
    device: DeviceClass
    space: Space = field(init=False)
    default: Config = field(init=False)
    name: str = field(init=False)
    _plan: tuple[Config | None, LaunchPlan | None] = field(default=(None, None), init=False)

    def __post_init__(self) -> None:
        self.space = self.spec.space(self.problem, self.device)
        self.default = self.spec.default(self.problem, self.device)
        if self.space.violated(self.default):
            raise Unfit(f"the default is not in the space: {self.default}")
        self.name = self.spec.kernels(self.default, self.problem)[0].entry

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.spec.operation.arrays(self.problem)

    def source(self, values: Mapping[str, int]) -> str:
        sources = codegen.render(self.spec, self._config(values), self.problem, self.device.arch)
        if len(sources) != 1 or sources[0].entry != self.name:
            raise Unfit(f"{dict(values)} needs the kernels {[s.entry for s in sources]}")
        return sources[0].text

    def plan(self, values: Mapping[str, int]) -> LaunchPlan:
        config = self._config(values)
        if self._plan[0] != config:
            self._plan = config, self.spec.bound_plan(config, self.problem, self.device)
        plan = self._plan[1]
        assert plan is not None
        plain = len(plan.launches) == 1 and plan.launches[0].cluster == (1, 1, 1)
        if not plain or plan.workspace_bytes or plan.tensor_maps:
            raise Unfit(f"{config} needs more than operands and one plain launch")
        return plan

    def grid(self, values: Mapping[str, int]) -> tuple[int, int, int]:
        x, y, z = self.plan(values).launches[0].grid
        return int(x), int(y), int(z)

    def threads(self, values: Mapping[str, int], names: Any = None) -> tuple[int, int, int]:
        return self.plan(values).launches[0].block

    def shared_bytes(self, values: Mapping[str, int]) -> int:
        return self.plan(values).launches[0].shared_bytes

    def arguments(self, seed: int) -> list[Any]:
        """Operands with random elements, and numbers of the types in the kernel's signature."""
        rng = np.random.default_rng(seed)
        operands = {array.name: draw(array, "normal", rng) for array in self.arrays}
        scalars = dict(self.spec.operation.scalars)
        found: list[Any] = []
        for argument in self.plan(self.default).launches[0].arguments:
            if argument.type == "pointer":
                found.append(operands[argument.name])
            elif argument.type in ("fp32", "fp64"):
                found.append(_SCALARS[argument.type](scalars[argument.name]))
            else:
                found.append(_SCALARS[argument.type](argument.value))
        return found

    def parameters(self) -> dict[str, list[int]]:
        return {parameter.name: list(parameter.values) for parameter in self.space.parameters}

    def listed(self) -> list[dict[str, int]]:
        """Every valid configuration."""
        columns = self.space.enumerate().require(self.spec.name).columns()
        names = self.space.names
        values = zip(*(getattr(columns, name).tolist() for name in names), strict=True)
        return [dict(zip(names, row, strict=True)) for row in values]

    def _config(self, values: Mapping[str, int]) -> Config:
        return Config({name: int(values[name]) for name in self.space.names})


@contextlib.contextmanager
def given(template: Template, space: Any) -> Iterator[None]:
    """Inside, Kernel Tuner finds the ``space`` built and the threads of a block known."""
    from kernel_tuner import interface, util

    built, threads = interface.Searchspace, util.get_thread_block_dimensions
    interface.Searchspace = lambda *args, **options: space
    util.get_thread_block_dimensions = template.threads
    try:
        yield
    finally:
        interface.Searchspace, util.get_thread_block_dimensions = built, threads


def tune(job: Job, cache: Path) -> dict[str, Any]:
    """What Kernel Tuner finds: how many configurations it evaluated, the best, and its seconds.

    Whatever ends it early is its ``error``; what it had found by then counts. ``cache`` is a file
    that it writes, and that must not be there yet.
    """
    import kernel_tuner
    from kernel_tuner.searchspace import Searchspace

    template = Template(job.load(), job.problem, job.device)
    started = time.perf_counter()
    cached = {"tune_params": template.parameters(), "cache": dict(enumerate(template.listed()))}
    space = Searchspace(None, None, None, from_cache=cached)
    del cached
    arguments = template.arguments(job.seed)
    listing = time.perf_counter() - started
    random.seed(job.seed)
    np.random.seed(job.seed)  # the generators that its strategies draw from
    error = ""
    started = time.perf_counter()
    with warnings.catch_warnings(), given(template, space):
        warnings.simplefilter("ignore")  # that no parameter is the size of a block
        try:
            kernel_tuner.tune_kernel(
                template.name, template.source, template.grid, arguments, template.parameters(),
                grid_div_x=[], grid_div_y=[], grid_div_z=[], lang="NVCUDA", defines={},
                smem_args={"size": template.shared_bytes}, compiler_options=list(OPTIONS),
                iterations=ITERATIONS, strategy=job.strategy, cache=str(cache), seed=job.seed,
                strategy_options={"max_fevals": job.evaluations, "time_limit": job.seconds},
            )  # fmt: skip
        except Exception as raised:  # of Kernel Tuner, or of what it calls
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
            traceback.print_exc()
    seconds = time.perf_counter() - started
    return {
        **_found(cache, list(template.parameters())),
        "configs": space.size,
        "listing_s": listing,
        "seconds": seconds,
        "error": error,
        "kernel_tuner": importlib.metadata.version("kernel_tuner"),
        "bindings": importlib.metadata.version("cuda-bindings"),
    }


def _found(cache: Path, names: list[str]) -> dict[str, Any]:
    """What stands in its own file of evaluations, in order."""
    from kernel_tuner.util import read_cache

    rows = list(read_cache(str(cache), open_cache=False)["cache"].values()) if _kept(cache) else []
    times_us = [row["time"] * 1e3 if _is_time(row.get("time")) else None for row in rows]
    timed = [(us, number) for number, us in enumerate(times_us) if us is not None]
    best = None
    if timed:
        us, number = min(timed)
        config = {name: int(rows[number][name]) for name in names}
        best = {"config": config, "us": us, "after": number + 1}
    return {
        "evaluations": len(rows),
        "failed": len(rows) - len(timed),
        "best": best,
        "compiling_s": sum(row["compile_time"] for row in rows) / 1e3,
        "timing_s": sum(row["benchmark_time"] for row in rows) / 1e3,
        "course_us": times_us,
    }


def _is_time(value: Any) -> bool:
    return isinstance(value, float | int)


def _kept(cache: Path) -> bool:
    return cache.exists() and cache.stat().st_size > 0


def main(words: list[str]) -> None:
    job_file, result_file, *packages = (Path(word).resolve() for word in words)
    sys.path += map(str, packages)
    job = pickle.loads(job_file.read_bytes())
    os.chdir(result_file.parent)  # it writes the sources of what fails there
    result_file.write_text(json.dumps(tune(job, result_file.with_suffix(".cache.json"))))


if __name__ == "__main__":
    main(sys.argv[1:])

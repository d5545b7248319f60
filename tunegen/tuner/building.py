# SPDX-License-Identifier: Apache-2.0
"""Configurations on their way to the evaluator: planned, rendered, compiled."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from tunegen.codegen import render
from tunegen.errors import CompileError, PlanError
from tunegen.model import (
    CompiledKernel,
    Compiler,
    Config,
    DeviceClass,
    KernelSpec,
    LaunchPlan,
    Outcome,
    Problem,
)


@dataclass(frozen=True, slots=True)
class Built:
    """A configuration ready to be tried, or the outcome that it has come to already."""

    plan: LaunchPlan | None = None
    kernels: tuple[CompiledKernel, ...] | None = None
    failure: Outcome | None = None
    seconds: float = 0.0

    @property
    def identity(self) -> object:
        """Equal for what runs the same code in the same launches."""
        # Digests, since a thousand cubins are hundreds of megabytes.
        cubins = (hashlib.sha256(kernel.cubin).digest() for kernel in self.kernels or ())
        return tuple(cubins), self.plan


@dataclass(frozen=True, slots=True)
class Builder:
    """Configuration in, launch plan and kernels out; without a compiler the plan alone."""

    problem: Problem
    device: DeviceClass
    compiler: Compiler | None

    def __call__(self, spec: KernelSpec, config: Config) -> Built:
        started = time.perf_counter()
        try:
            plan = spec.bound_plan(config, self.problem, self.device)
        except PlanError as error:
            return Built(failure=Outcome("rejected", reason=str(error)))
        if self.compiler is None:
            return Built(plan)
        kernels: list[CompiledKernel] = []
        failure = None
        try:
            for source in render(spec, config, self.problem, self.device.arch):
                kernels.append(self.compiler.compile(source, spec.target(self.device.arch)))
        except CompileError as error:
            failure = Outcome("compile_failed", reason=str(error))
        for kernel in kernels:
            if kernel.rejection and failure is None:
                failure = Outcome("rejected", reason=f"{kernel.name} {kernel.rejection}")
        return Built(plan, tuple(kernels), failure, time.perf_counter() - started)

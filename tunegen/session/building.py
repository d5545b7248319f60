# SPDX-License-Identifier: Apache-2.0
"""Config in, compiled kernels out: render and compile, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunegen import codegen, compiler, kernels
from tunegen.model import (
    Candidate,
    CompiledKernel,
    Config,
    KernelSource,
    KernelSpec,
    LaunchPlan,
    Limit,
)
from tunegen.session.resolve import Request, complete_config, request


@dataclass(frozen=True, slots=True)
class Build:
    """A configuration made into code: sources, compiled kernels, launch plan and limits.

    ``plan`` is bound to the problem's sizes; ``formulas`` is the same plan over symbolic sizes.
    """

    request: Request
    spec: KernelSpec
    config: Config
    target: str
    sources: tuple[KernelSource, ...]
    kernels: tuple[CompiledKernel, ...]
    plan: LaunchPlan
    formulas: LaunchPlan
    limits: tuple[Limit, ...]

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.spec, self.config, self.kernels)


def build(
    wanted: Request,
    spec: KernelSpec,
    config: Config,
    *,
    lineinfo: bool = False,
    cache: compiler.KernelCache | None = None,
    target: str | None = None,
) -> Build:
    """Render and compile every kernel of ``config``.

    Raises :class:`tunegen.errors.CompileError` with NVRTC's log, and
    :class:`tunegen.errors.PlanError` where the grid is beyond CUDA's limits.
    """
    target = target or spec.target(wanted.arch)
    sources = codegen.render(spec, config, wanted.problem, wanted.arch)
    nvrtc = compiler.NvrtcCompiler(cache or compiler.KernelCache(), lineinfo=lineinfo)
    return Build(
        request=wanted,
        spec=spec,
        config=config,
        target=target,
        sources=sources,
        kernels=tuple(nvrtc.compile(source, target) for source in sources),
        plan=spec.bound_plan(config, wanted.problem, wanted.device),
        formulas=spec.symbolic_plan(config, wanted.problem),
        limits=spec.limits(config, wanted.problem),
    )


def compile(  # the verb that users look for, as in re.compile
    operation: str,
    *,
    arch: str | None = None,
    chip: str | None = None,
    problem: str | Sequence[int] | Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    params: Mapping[str, int] | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Build:
    """Compile one configuration of an operation, for any arch, with no GPU and no driver.

    ``params`` fixes parameters; the others are as near to the spec's default as constraints
    allow. ``problem`` is written as on the command line (``"4096x4096x4096"``) or given as
    numbers. Raises :class:`tunegen.errors.UsageError` for names and values that do not exist.

    >>> build = compile("matmul", arch="sm_90", problem="1024x1024x1024")
    >>> build.kernels[0].cubin[:4]
    b'\\x7fELF'
    """
    wanted = request(
        operation, arch=arch, chip=chip, problem=problem, dtype=dtype, layout=layout,
        attributes=attributes, spec=spec, specs=specs,
    )  # fmt: skip
    chosen = wanted.spec()
    start = chosen.default(wanted.problem, wanted.device)
    return build(wanted, chosen, complete_config(chosen, wanted, start, params or {}))

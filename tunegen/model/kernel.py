# SPDX-License-Identifier: Apache-2.0
"""Kernel specs, and what becomes of a configuration on its way: source, image, candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunegen.model.device_class import DeviceClass
from tunegen.model.expr import Expr
from tunegen.model.plan import LaunchPlan, Limit
from tunegen.model.problem import ACCUMULATOR, ROUNDOFF, Operation, Problem
from tunegen.model.space import Config, Point, Space
from tunegen.model.work import Work


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    """One generated kernel: its name, its template and what the template is told besides.

    The entry point is ``tunegen_<name>``. ``types`` become ``using`` declarations, ``constants``
    and the config's parameters ``constexpr int``.
    """

    name: str
    template: str
    types: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)

    @property
    def entry(self) -> str:
        return f"tunegen_{self.name}"


# What a plan may ask of the device it runs on: the number of multiprocessors, for a grid of so
# many blocks on each. A manifest's formulas name it beside the sizes.
SM_COUNT = "SM_COUNT"


class Sizes:
    """Sizes and attributes of a problem by name: numbers, or symbols that give formulas."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, int | Expr]) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(name)
        return self._names[name]

    @classmethod
    def symbols(cls, problem: Problem) -> Sizes:
        """A symbol for every size and attribute, and for the device's ``SM_COUNT``."""
        return cls({name: Expr(name) for name in (*problem.names, SM_COUNT)})


@dataclass(frozen=True)
class KernelSpec:
    """One template and one search space: how an operation can be computed.

    Every callable is pure. ``space`` lists parameters and constraints for a problem on a device;
    ``default`` is the configuration that is always tried first, valid wherever any is;
    ``kernels`` names what has to be generated and compiled for a configuration, ``plan`` the
    launches, written over symbolic sizes; ``work`` counts what the performance model needs, for
    one configuration or for columns of them; ``limits`` are the preconditions a record carries.
    ``refuses`` gives the reason why a problem or device is out of reach, or the empty string.
    ``suffix`` is the target suffix ("a") that the instructions used need, ``error_factor`` how
    much more error than usual its results may have (see :meth:`tolerance`). ``preferred_dtype``
    is the dtype that the operation has by default where this spec does not refuse the problem in
    it: that of the tensor cores, for one that uses them. ``template_root`` is where its templates
    are and ``file`` the name of the file that defines it, when they are not among the shipped
    ones.
    """

    name: str
    operation: Operation
    summary: str
    space: Callable[[Problem, DeviceClass], Space]
    default: Callable[[Problem, DeviceClass], Config]
    kernels: Callable[[Config, Problem], tuple[KernelDefinition, ...]]
    plan: Callable[[Config, Problem, Sizes], LaunchPlan]
    work: Callable[[Point, Problem, DeviceClass], Work]
    limits: Callable[[Config, Problem], tuple[Limit, ...]]
    refuses: Callable[[Problem, DeviceClass], str] = field(default=lambda problem, device: "")
    suffix: str = ""
    template_root: Path | None = None
    file: str = ""
    error_factor: float = 1.0
    preferred_dtype: str = ""

    def tolerance(self, problem: Problem) -> float:
        """The largest relative RMS error of a right result, against fp64:
        ``error_factor * (u(output) + u(accumulator) * sqrt(terms))``, u being the unit roundoff.

        A sum of normal values in order, one rounding a term, comes to about 0.3 of the second
        part, rounding the result to 0.4 of the first.
        """
        summing = ROUNDOFF[ACCUMULATOR[problem.dtype]] * math.sqrt(self.operation.terms(problem))
        outputs = (array for array in self.operation.arrays(problem) if array.role != "in")
        rounding = max(ROUNDOFF[array.dtype] for array in outputs)
        return self.error_factor * (rounding + summing)

    def target(self, arch: str) -> str:
        """The compiler target for a capability: ``sm_90`` or ``sm_90a``."""
        return arch + self.suffix

    def symbolic_plan(self, config: Config, problem: Problem) -> LaunchPlan:
        """The launch plan as formulas over sizes and ``SM_COUNT``: what a manifest ships."""
        return self.plan(config, problem, Sizes.symbols(problem))

    def bound_plan(self, config: Config, problem: Problem, device: DeviceClass) -> LaunchPlan:
        """The launch plan of this very problem on a device, in numbers; no launches for an empty
        output.

        Raises :class:`tunegen.errors.PlanError` for a grid beyond CUDA's limits or a tensor map
        that the driver would refuse.
        """
        names = {**problem.names, SM_COUNT: device.sm_count}
        return self.symbolic_plan(config, problem).bind(names)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated, self-contained ``.cu`` file.

    ``digest`` identifies it without its comments and banner, so that a reworded comment makes no
    record stale.
    """

    name: str
    entry: str
    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says a compiled kernel needs. Registers are per thread, all bytes per thread
    but ``shared_bytes`` (static, per block) and ``constant_bytes``."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    constant_bytes: int = 0
    barriers: int = 0


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """PTX and cubin of one kernel for one target, with what the compiler said.

    ``warnings`` is the log without the resource report, empty for a clean compile; ``rejection``
    the reason why the result should not be run (it spills, wgmma was serialised), or empty.
    """

    name: str
    entry: str
    target: str
    ptx: bytes
    cubin: bytes
    resources: Resources
    warnings: str
    rejection: str
    nvrtc: str
    seconds: float
    from_cache: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on its way to an outcome: spec, config, and its kernels where they are compiled."""

    spec: KernelSpec
    config: Config
    kernels: tuple[CompiledKernel, ...] | None = None

# SPDX-License-Identifier: Apache-2.0
"""What the caller wrote, checked and turned into values: operation, problem, device, config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunegen import kernels
from tunegen.errors import NoValidConfig, UsageError
from tunegen.model import (
    Config,
    DeviceClass,
    KernelSpec,
    Operation,
    Problem,
    Space,
    check_arch,
)
from tunegen.perfmodel import default_chip, find_chip


@dataclass(frozen=True, slots=True)
class Request:
    """One problem of one operation on one device class, and the specs that may compute it."""

    operation: Operation
    problem: Problem
    device: DeviceClass
    specs: tuple[KernelSpec, ...]

    @property
    def arch(self) -> str:
        return self.device.arch

    def spec(self) -> KernelSpec:
        """The spec whose default configuration stands for the operation: the first that does not
        refuse. Raises :class:`NoValidConfig` with every spec's reason."""
        for spec in self.specs:
            if not spec.refuses(self.problem, self.device):
                return spec
        raise NoValidConfig(
            f"no spec of {self.operation.name} takes this problem: "
            + "; ".join(f"{s.name}: {s.refuses(self.problem, self.device)}" for s in self.specs)
        )


def request(
    operation: str,
    *,
    arch: str | None = None,
    chip: str | None = None,
    problem: str | Sequence[int] | Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Request:
    """Check what the caller wrote. Raises :class:`UsageError` with the nearest valid names.

    Without a ``dtype`` it is the one that the first spec prefers which takes the problem on this
    device, see ``preferred_dtype`` of :class:`KernelSpec`; else the first of the operation.
    """
    known = tuple(specs)
    found = kernels.operation(operation, known)
    sizes = problem if isinstance(problem, str | Mapping) or problem is None else tuple(problem)

    def ask(dtype: str | None) -> Problem:
        return found.problem(sizes, dtype=dtype, layout=layout, **(attributes or {}))

    asked = ask(dtype)
    device = device_class(arch, chip)
    chosen = kernels.specs_of(operation, known, only=spec)
    if dtype is None:
        asked = _preferred(ask, chosen, device) or asked
    return Request(operation=found, problem=asked, device=device, specs=chosen)


def _preferred(
    ask: Callable[[str], Problem], specs: Sequence[KernelSpec], device: DeviceClass
) -> Problem | None:
    """The problem in the dtype of the first spec that prefers one and takes it."""
    for spec in specs:
        if spec.preferred_dtype:
            problem = ask(spec.preferred_dtype)
            if not spec.refuses(problem, device):
                return problem
    return None


def device_class(arch: str | None, chip: str | None = None) -> DeviceClass:
    """The device class for an arch: the chip named, or the arch's best-known one."""
    if chip is None:
        if arch is None:
            raise UsageError("no GPU here to take the arch from", hint="add --arch sm_90")
        return default_chip(check_arch(arch))
    device = find_chip(chip)
    if arch is not None and device.arch != check_arch(arch):
        raise UsageError(f"{device.name} is {device.arch}, not {arch}")
    return device


def complete_config(
    spec: KernelSpec, wanted: Request, start: Config, overrides: Mapping[str, int]
) -> Config:
    """The valid configuration with the values of ``overrides`` that is nearest to ``start``.

    Nearest means fewest parameters changed, then the smallest steps. Raises :class:`UsageError`
    for unknown names and values, :class:`NoValidConfig` with the constraints to blame where no
    valid configuration has these values.
    """
    space = spec.space(wanted.problem, wanted.device)
    start = space.config({**start, **overrides})
    if not space.violated(start):
        return start
    pinned = Space(
        tuple(
            replace(parameter, values=(overrides[parameter.name],))
            if parameter.name in overrides
            else parameter
            for parameter in space.parameters
        ),
        space.constraints,
    )
    values = " ".join(f"{name}={value}" for name, value in overrides.items())
    table = pinned.enumerate().require(f"{spec.name} with {values}")
    changed = np.zeros(len(table), dtype=np.float32)
    for position, parameter in enumerate(pinned.parameters):
        if parameter.name in overrides:
            continue
        steps = np.abs(
            table.indices[position].astype(np.int16)
            - parameter.values.index(start[parameter.name])
        )
        # A changed parameter counts 1, each step a little, so that steps only break ties.
        changed += (steps > 0) + steps * np.float32(1e-3)
    return table.config(int(np.argmin(changed)))

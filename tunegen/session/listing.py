# SPDX-License-Identifier: Apache-2.0
"""What can be tuned: operations, specs, parameters, constraints and what each one removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunegen import kernels
from tunegen.model import Config, KernelSpec, Parameter
from tunegen.session.resolve import Request


@dataclass(frozen=True, slots=True)
class SpecListing:
    """One spec for one problem and device: its space, and what is left of it.

    ``removed`` pairs each constraint's reason with the configurations it removes, given those
    before it. ``refusal`` is the reason why the spec does not take the problem, or empty.
    """

    spec: KernelSpec
    parameters: tuple[Parameter, ...]
    default: Config | None
    cartesian: int
    valid: int
    removed: tuple[tuple[str, int], ...]
    refusal: str


def describe(wanted: Request) -> list[SpecListing]:
    """Every spec of the requested operation, enumerated for the problem."""
    return [_describe_spec(spec, wanted) for spec in wanted.specs]


def _describe_spec(spec: KernelSpec, wanted: Request) -> SpecListing:
    if refusal := spec.refuses(wanted.problem, wanted.device):
        return SpecListing(spec, (), None, 0, 0, (), refusal)
    space = spec.space(wanted.problem, wanted.device)
    table = space.enumerate()
    return SpecListing(
        spec=spec,
        parameters=space.parameters,
        default=spec.default(wanted.problem, wanted.device),
        cartesian=space.cartesian_size,
        valid=len(table),
        removed=table.removed,
        refusal="",
    )


def overview(specs: Sequence[KernelSpec] = kernels.SPECS) -> dict[str, list[KernelSpec]]:
    """The specs of every operation, in the order of the registry."""
    listed: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        listed.setdefault(spec.operation.name, []).append(spec)
    return listed

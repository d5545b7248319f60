# SPDX-License-Identifier: Apache-2.0
"""Problems that a spec takes: not every spec computes every problem of its operation."""

from __future__ import annotations

from collections.abc import Iterator

from tunegen import kernels
from tunegen.model import DeviceClass, KernelSpec, Problem

# Specs that compute everything everywhere: what is tested of all of them in one way.
PORTABLE = tuple(spec for spec in kernels.SPECS if spec.name in ("simt", "naive", "vector"))


def tried(
    spec: KernelSpec, dtype: str, layout: str | None, **attributes: int | str
) -> Iterator[Problem]:
    """The operation's own sizes, few rows, and odd sizes."""
    operation = spec.operation
    sizes = operation.default_sizes
    odd = tuple(1000 + number for number in range(len(sizes)))
    for shape in (sizes, (8, *sizes[1:]), odd):
        yield operation.problem(shape, dtype=dtype, layout=layout or None, **attributes)


def taken(
    spec: KernelSpec, device: DeviceClass, dtype: str, layout: str | None, **attributes: int | str
) -> Problem | None:
    """The first of those that a spec does not refuse on a device; None where it refuses all."""
    found = tried(spec, dtype, layout, **attributes)
    return next((problem for problem in found if not spec.refuses(problem, device)), None)

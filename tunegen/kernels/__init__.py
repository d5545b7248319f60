# SPDX-License-Identifier: Apache-2.0
"""The registry of kernel specs. A new kernel is one template, one file here and one line below."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from tunegen.errors import UsageError, unknown
from tunegen.kernels import (
    matmul_gemv,
    matmul_mma,
    matmul_naive,
    matmul_simt,
    matmul_wgmma,
    matmul_wgmma_padded,
    vector_add,
    vector_axpy,
    vector_copy,
    vector_fill,
)
from tunegen.model import KernelSpec, Operation

# The first spec of an operation that takes a problem gives the default configuration.
SPECS: tuple[KernelSpec, ...] = (
    matmul_gemv.SPEC,
    matmul_wgmma.SPEC,
    matmul_wgmma_padded.SPEC,
    matmul_mma.SPEC,
    matmul_simt.SPEC,
    matmul_naive.SPEC,
    vector_fill.SPEC,
    vector_copy.SPEC,
    vector_add.SPEC,
    vector_axpy.SPEC,
)


def operations(specs: tuple[KernelSpec, ...] = SPECS) -> dict[str, Operation]:
    """Every operation by name, in the order of the registry."""
    return {spec.operation.name: spec.operation for spec in specs}


def operation(name: str, specs: tuple[KernelSpec, ...] = SPECS) -> Operation:
    """The operation ``name``; raises :class:`UsageError` naming the nearest ones."""
    known = operations(specs)
    if name not in known:
        raise unknown("operation", name, known, hint="tunegen kernels lists them")
    return known[name]


def specs_of(
    name: str, specs: tuple[KernelSpec, ...] = SPECS, *, only: str | None = None
) -> tuple[KernelSpec, ...]:
    """The specs that compute an operation; ``only`` picks one by its name."""
    operation(name, specs)
    found = tuple(spec for spec in specs if spec.operation.name == name)
    if only is None:
        return found
    chosen = tuple(spec for spec in found if spec.name == only)
    if not chosen:
        raise unknown(f"spec of {name}", only, [spec.name for spec in found])
    return chosen


def load(path: Path) -> KernelSpec:
    """The ``SPEC`` of a kernel file kept outside this package; its templates lie beside it.

    The file is Python and is run; what it raises by itself is not caught. Raises
    :class:`UsageError` where it cannot be read or has no ``SPEC``.
    """
    if not os.path.isfile(path):  # Path raises for a place that may not be looked into
        raise UsageError(f"no kernel file {path}")
    module_spec = importlib.util.spec_from_file_location(f"tunegen_user_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (OSError, SyntaxError, ImportError) as error:
        raise UsageError(f"kernel file {path} does not load: {error}") from error
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, KernelSpec):
        raise UsageError(f"{path} defines no SPEC of type KernelSpec")
    return replace(spec, file=path.name)

# SPDX-License-Identifier: Apache-2.0
"""The way in for other programs: a bundle or a record in, a kernel to launch out.

Loading from a bundle imports neither compiler nor search: a program that ships a bundle needs
NumPy, msgspec, cuda-bindings and the driver.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunegen.bundle import Bundle, Entry, Selection, cuda_branch, driver_too_old, min_driver
from tunegen.device import find_gpus
from tunegen.errors import DatabaseError, DeviceError, UsageError
from tunegen.model import TuningRecord
from tunegen.runtime import Context, Image, Kernel, Program

if TYPE_CHECKING:
    from tunegen.model import KernelSpec
    from tunegen.session import Build


def load(
    source: Path | str | TuningRecord,
    *,
    operation: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    spec: str | None = None,
    name: str | None = None,
    device: int | None = None,
    specs: Sequence[KernelSpec] | None = None,
) -> Kernel:
    """A kernel, ready to launch on ``device``, from an exported folder or a tuning record.

    Of a folder with several entries, ``operation``, ``dtype``, ``layout``, ``spec`` and ``name``
    choose one; the cubin or PTX for the device is chosen from its arch and driver. A record is
    rendered and compiled here, which needs NVRTC; ``specs`` are its kernels where they are not
    tunegen's own.

    ``device`` counts as CUDA does, CUDA_VISIBLE_DEVICES obeyed. Without one the device of the
    calling thread's current context is taken, else the first.

    Raises :class:`tunegen.errors.BundleError` for a folder that is no bundle, is damaged, or has
    nothing for the device; :class:`DeviceError` where there is no such device, it is of another
    arch than the record, or its driver is too old or refuses; :class:`DatabaseError` for a record
    that no longer describes what its spec generates; :class:`UsageError` where the choice fits
    nothing.

    >>> kernel = load("shipped", operation="matmul", dtype="fp32")  # doctest: +SKIP
    >>> kernel.launch(A=a, B=b, C=c, stream=torch.cuda.current_stream())  # doctest: +SKIP
    """
    if isinstance(source, TuningRecord):
        given = {"operation": operation, "dtype": dtype, "layout": layout, "spec": spec}
        _demand_same(source, given, name)
        return _load_record(source, Context(device), specs)
    bundle = Bundle.open(source)
    entry = bundle.entry(operation, dtype=dtype, layout=layout, spec=spec, name=name)
    context = Context(device)
    selection = bundle.select(entry, context.arch, _driver(context))
    return Kernel(_shipped_program(bundle, entry, selection), context)


def _shipped_program(bundle: Bundle, entry: Entry, selection: Selection) -> Program:
    if selection.kind == "ptx":
        needed = entry.ptx.min_driver if entry.ptx else ""
    else:
        needed = bundle.image(entry, selection.target).min_driver
    return Program(
        name=entry.name,
        operands=entry.operands,
        scalars=entry.scalars,
        problem=entry.problem,
        limits=entry.limits,
        plan=entry.plan,
        images=tuple(
            Image(kernel.kernel, kernel.entry, bundle.read(kernel)) for kernel in selection.kernels
        ),
        batch_axis=entry.batch_axis,
        source=selection.reason,
        needs=_needs(needed),
    )


def _load_record(
    record: TuningRecord, context: Context, specs: Sequence[KernelSpec] | None
) -> Kernel:
    if record.arch != context.arch:
        raise DeviceError(
            f"the record is for {record.arch} ({record.device.name}), this is {context}",
            hint=f"tunegen tune {record.operation} --arch {context.arch}",
        )
    built = _build(record, specs)
    needed, driver = min_driver(built.kernels[0]), _driver(context)
    if driver_too_old(driver, needed):
        raise DeviceError(
            f"a cubin of NVRTC {built.kernels[0].nvrtc} needs a driver from "
            f"{needed or 'an unknown branch'} on, {context} has {driver}"
        )
    return Kernel(_built_program(built, record), context)


def _build(record: TuningRecord, specs: Sequence[KernelSpec] | None) -> Build:
    # Not at the top: these bring the compiler, the templates and the search with them.
    from tunegen import kernels
    from tunegen.session.building import build
    from tunegen.session.records import device_of, legality, staleness
    from tunegen.session.resolve import Request

    known = kernels.SPECS if specs is None else tuple(specs)
    if objection := legality(record, known) or staleness(record, known):
        raise DatabaseError(
            f"the record of {record.operation} cannot be loaded: {objection}", hint=record.command
        )
    (spec,) = kernels.specs_of(record.operation, known, only=record.spec)
    problem = spec.operation.complete(record.problem)
    wanted = Request(spec.operation, problem, device_of(record), (spec,))
    return build(wanted, spec, spec.space(problem, wanted.device).config(record.config))


def _built_program(built: Build, record: TuningRecord) -> Program:
    operation, problem = built.request.operation, built.request.problem
    hashes = [hashlib.sha256(kernel.cubin).hexdigest() for kernel in built.kernels]
    same = hashes == [image.cubin_sha256 for image in record.images]
    how = "the one that was" if same else "rebuilt, other bytes than those"
    return Program(
        name=f"{operation.name} {built.spec.name}",
        operands=operation.operands(problem),
        scalars=tuple(scalar for scalar, _ in operation.scalars),
        problem=problem.names,
        limits=built.limits,
        plan=built.formulas,
        images=tuple(Image(k.name, k.entry, k.cubin) for k in built.kernels),
        batch_axis=operation.batch_axis,
        source=f"cubin for {built.target}: {how} {record.evidence} for {record.device.name}",
        needs=_needs(min_driver(built.kernels[0])),
    )


def _demand_same(record: TuningRecord, given: dict[str, str | None], name: str | None) -> None:
    if name is not None:
        raise UsageError(f"name={name!r} chooses from a folder, a record is one kernel")
    actual = {"operation": record.operation, "dtype": record.problem.dtype,
              "layout": record.problem.layout, "spec": record.spec}  # fmt: skip
    for what, wanted in given.items():
        if wanted is not None and wanted != actual[what]:
            raise UsageError(f"the record has {what} {actual[what]!r}, not {wanted!r}")


def _driver(context: Context) -> str | None:
    """The driver's version, None where it cannot be told.

    The kernel module's, as NVML names it, or the branch of the CUDA library in use where that is
    newer: the cuda-compat packages bring such a library.
    """
    versions = [known for known in (_kernel_driver(), cuda_branch(context.cuda)) if known]
    return max(versions, key=lambda known: [int(part) for part in known.split(".")], default=None)


@functools.cache
def _kernel_driver() -> str:
    return find_gpus().driver


def _needs(branch: str) -> str:
    return f"it needs a driver from {branch} on" if branch else ""

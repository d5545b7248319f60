# SPDX-License-Identifier: Apache-2.0
"""Reading generated code: source, PTX and SASS under the lines they came from, resources."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunegen import compiler, disasm, kernels, perfmodel
from tunegen.database import Database
from tunegen.errors import unknown
from tunegen.model import CompiledKernel, Config, KernelSpec, TuningRecord
from tunegen.session.building import Build, build
from tunegen.session.records import find
from tunegen.session.resolve import complete_config, request

Emit = Literal["cuda", "ptx", "sass", "resources"]
EMITS: tuple[Emit, ...] = ("cuda", "ptx", "sass", "resources")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one compiled kernel on a device class, and what limits its occupancy."""

    kernel: CompiledKernel
    threads: int
    shared_bytes: int
    occupancy: perfmodel.Occupancy


@dataclass(frozen=True, slots=True)
class Inspection:
    """A configuration laid open.

    ``origin`` says where the configuration comes from. ``code`` says how the inspected code
    relates to a recorded one: the very cubin, the same code section, or different code.
    """

    build: Build
    origin: str
    code: str
    texts: tuple[tuple[str, str], ...]
    resources: tuple[KernelResources, ...]
    prediction: perfmodel.Prediction


def inspect(
    operation: str,
    *,
    emit: str = "ptx",
    arch: str | None = None,
    chip: str | None = None,
    problem: str | Sequence[int] | Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    spec: str | None = None,
    params: Mapping[str, int] | None = None,
    db: Path | str | None = None,
    cache: Path | str | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> Inspection:
    """Generate and compile one configuration and lay it open.

    Without ``params`` the recorded winner for the problem is taken where there is one, else the
    spec's default; with them, the valid configuration nearest to that. ``emit`` is "cuda", "ptx"
    (under the CUDA lines it came from), "sass" (likewise) or "resources".

    Raises :class:`tunegen.errors.ToolkitError` for "sass" where nvdisasm is not installed.
    """
    if emit not in EMITS:
        raise unknown("emit", emit, EMITS)
    wanted = request(
        operation, arch=arch, chip=chip, problem=problem, dtype=dtype, layout=layout,
        attributes=attributes, spec=spec, specs=specs,
    )  # fmt: skip
    match = find(Database(Path(db) if db else None), wanted)
    record = match.record if not params else None
    if match.record is not None:
        chosen = next(s for s in wanted.specs if s.name == match.record.spec)
        start = Config(match.record.config)
        origin = f"{match.record.evidence} record ({match.rung})"
    else:
        chosen = wanted.spec()
        start = chosen.default(wanted.problem, wanted.device)
        origin = "default of the spec, unmeasured"
    config = complete_config(chosen, wanted, start, params or {})
    if params:
        origin = (
            "parameters given" if config == {**start, **params} else "nearest valid to those given"
        )
    kernel_cache = compiler.KernelCache(Path(cache) if cache else None)
    plain = build(wanted, chosen, config, cache=kernel_cache)
    texts: tuple[tuple[str, str], ...] = ()
    if emit == "cuda":
        texts = tuple((source.name, source.text) for source in plain.sources)
    elif emit in ("ptx", "sass"):
        traced = build(wanted, chosen, config, lineinfo=True)
        texts = tuple(
            (
                source.name,
                disasm.annotate_ptx(kernel.ptx.decode(), source.text)
                if emit == "ptx"
                else disasm.annotate_sass(kernel.cubin, source.text),
            )
            for source, kernel in zip(traced.sources, traced.kernels, strict=True)
        )
    return Inspection(
        build=plain,
        origin=origin,
        code=compare_code(plain, record),
        texts=texts,
        resources=resources(plain),
        prediction=predict(plain),
    )


def compare_code(built: Build, record: TuningRecord | None) -> str:
    """How the code just built relates to what a record says was measured."""
    if record is None:
        return "no record to compare with"
    digests = [hashlib.sha256(kernel.cubin).hexdigest() for kernel in built.kernels]
    if digests == [image.cubin_sha256 for image in record.images]:
        return "the very cubin of the record"
    sources = [compiler.identity(source, built.target) for source in built.sources]
    nvrtc = built.kernels[0].nvrtc
    if [disasm.code_digest(kernel.cubin) for kernel in built.kernels] == [
        image.code_sha256 for image in record.images
    ]:
        return "other notes in the cubin than the record's, but the same code"
    if sources == [image.source_digest for image in record.images]:
        return f"same source, other code: NVRTC {nvrtc} here, {record.nvrtc} in the record"
    return "the template has changed since the record: it is stale"


def resources(built: Build) -> tuple[KernelResources, ...]:
    """Resources and occupancy of every kernel of a build."""
    launches = {launch.kernel: launch for launch in built.formulas.launches}
    listed = []
    for kernel in built.kernels:
        launch = launches[kernel.name]
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        shared = launch.shared_bytes + kernel.resources.shared_bytes
        listed.append(
            KernelResources(
                kernel,
                threads,
                shared,
                perfmodel.occupancy(
                    built.request.device, threads, kernel.resources.registers, shared
                ),
            )
        )
    return tuple(listed)


def predict(built: Build) -> perfmodel.Prediction:
    """What the performance model says of a build."""
    request = built.request
    work = built.spec.work(built.config, request.problem, request.device)
    return perfmodel.explain(work, request.device, built.kernels[0].resources)

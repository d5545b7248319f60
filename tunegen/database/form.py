# SPDX-License-Identifier: Apache-2.0
"""The file form: what stands in ``<capability>/<operation>.json``, and the way there and back.

The bytes are a function of the records: records in the order of their identity, keys sorted,
every field written, two spaces of indent, no NaN or infinity. One object keeps the order it was
given, ``sizes``, which are in the order in which a problem is written.

Every write rewrites the whole file, so a field this release does not know would be lost in
silence. Therefore unknown fields are refused, and a field that is added later raises ``SCHEMA``;
a field that is missing takes its default, so that older files still load.
"""

from __future__ import annotations

import functools
import json
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tunegen.errors import DatabaseError
from tunegen.model import (
    DeviceIdentity,
    Evidence,
    KernelImage,
    Limit,
    Measurement,
    Problem,
    TuningRecord,
)

SCHEMA = 1


class _Form(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    pass


class ProblemForm(_Form):
    """What is computed. Sizes in the order in which a problem is written, attributes by name.

    An attribute that chooses among names (the activation, the output of matmul) is the position
    of the name, as ``tunegen kernels --json`` lists them; the record's ``command`` spells it out.
    Attributes that are missing are at their defaults.
    """

    sizes: dict[str, int]
    dtype: str
    layout: str = ""
    attributes: dict[str, int] = {}


class DeviceForm(_Form):
    """The device class that the time belongs to; shared memory is what one block may have."""

    name: str
    sm_count: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_clock_mhz: int


class MeasurementForm(_Form):
    """Time of one call in microseconds. Times of different policies are never compared."""

    median_us: float
    policy: str
    low_us: float = 0.0
    high_us: float = 0.0
    samples: int = 1
    details: dict[str, Any] = {}


class ImageForm(_Form):
    """One compiled kernel. Registers and spilled bytes per thread, shared memory per block."""

    name: str
    source_digest: str
    cubin_sha256: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    code_sha256: str = ""


class LimitForm(_Form):
    """What dispatch must check; the quantity is a size, an attribute, or an operand's address."""

    quantity: str
    rule: Literal["multiple_of", "at_most", "at_least", "equal"]
    value: int


class RecordForm(_Form):
    """One winner: a configuration of a spec for a problem on a device class."""

    operation: str
    spec: str
    arch: str
    target: str
    problem: ProblemForm
    config: dict[str, int]
    device: DeviceForm
    evidence: Evidence
    measurement: MeasurementForm
    default_us: float | None
    images: list[ImageForm]
    limits: list[LimitForm]
    nvrtc: str
    tunegen: str
    created: str
    trials: int
    seed: int
    command: str
    baseline: str = ""
    baseline_ratio: float | None = None
    relative_error: float | None = None
    tolerance: float | None = None
    deterministic: bool | None = None
    driver: str = ""
    min_driver: str = ""
    extra: dict[str, float] = {}


class FileForm(_Form):
    """The tuning records of one operation for one compute capability."""

    schema: int
    records: list[RecordForm]


class _Header(msgspec.Struct):
    """The one field that is read before anything else is believed."""

    schema: int


def encode(records: Iterable[TuningRecord]) -> bytes:
    """The canonical bytes of a file that holds ``records``.

    Raises :class:`DatabaseError` for a number that JSON does not have and a value of a wrong type.
    """
    ordered = sorted(records, key=lambda record: record.identity)
    content = {"records": [document(record) for record in ordered], "schema": SCHEMA}
    return msgspec.json.format(_dumps(content), indent=2) + b"\n"


def decode(content: bytes, path: Path) -> list[TuningRecord]:
    """The records of a file; ``path`` is for the message.

    Raises :class:`DatabaseError` for anything that does not follow the schema, and for a file of a
    later schema, naming both versions.
    """
    try:
        found = msgspec.json.decode(content, type=_Header).schema
        if found > SCHEMA:
            raise DatabaseError(
                f"{path} has schema {found}, this release reads up to {SCHEMA}",
                hint="pip install --upgrade tunegen",
            )
        if found < 1:
            raise DatabaseError(f"{path} has schema {found}, the first one is 1")
        form = msgspec.json.decode(content, type=FileForm)
    except msgspec.DecodeError as error:
        raise DatabaseError(
            f"{path} does not follow schema {SCHEMA}: {error}",
            hint="mend it or move it away; tunegen db check lists what else is wrong",
        ) from error
    return [_record(record) for record in form.records]


def document(record: TuningRecord) -> dict[str, Any]:
    """A record as it stands in a file, in plain Python values.

    Raises :class:`DatabaseError` for a value of a type that JSON does not have.
    """
    try:
        plain: dict[str, Any] = msgspec.to_builtins(
            record, order="sorted", str_keys=True, enc_hook=_encode_other
        )
    except (TypeError, ValueError) as error:
        raise DatabaseError(
            f"this record of {record.operation} cannot be kept: {error}"
        ) from error
    problem = record.problem
    if problem.operation != record.operation:
        raise DatabaseError(f"a record of {record.operation} for a problem of {problem.operation}")
    plain["problem"] = {
        "attributes": dict(sorted(problem.attributes)),
        "dtype": problem.dtype,
        "layout": problem.layout,
        "sizes": dict(problem.sizes),
    }
    return plain


def settle(record: TuningRecord) -> TuningRecord:
    """``record`` as it will be read back: plain Python numbers, every type checked.

    Raises :class:`DatabaseError` where it does not follow the schema.
    """
    try:
        return _record(msgspec.json.decode(_dumps(document(record)), type=RecordForm))
    except msgspec.ValidationError as error:
        raise DatabaseError(
            f"this record of {record.operation} cannot be kept: {error}"
        ) from error


def json_schema() -> str:
    """The published JSON schema of a file, which stands in ``tuned_db/schema.json``."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tunegen tuning records",
        **msgspec.json.schema(FileForm),
    }
    return json.dumps(schema, indent=2) + "\n"


def _dumps(content: Any) -> bytes:
    try:
        # msgspec would write NaN as null.
        return json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise DatabaseError(f"a record cannot be kept: {error}") from error


def _encode_other(value: Any) -> Any:
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in a database")


def _record(form: RecordForm) -> TuningRecord:
    fields = msgspec.structs.asdict(form)
    problem = form.problem
    fields["problem"] = Problem(
        form.operation,
        tuple(problem.sizes.items()),
        problem.dtype,
        problem.layout,
        tuple(sorted(problem.attributes.items())),
    )
    fields["device"] = _device(*msgspec.structs.astuple(form.device))
    fields["measurement"] = Measurement(**msgspec.structs.asdict(form.measurement))
    fields["images"] = tuple(KernelImage(**msgspec.structs.asdict(i)) for i in form.images)
    fields["limits"] = _limits(tuple(msgspec.structs.astuple(limit) for limit in form.limits))
    return TuningRecord(**fields)


# Thousands of records share a few devices and sets of limits. Making each of these once halves the
# objects that loading a large file creates, and with them its time.
@functools.lru_cache(maxsize=256)
def _device(
    name: str, sm_count: int, shared_bytes_per_block: int, l2_bytes: int, memory_clock_mhz: int
) -> DeviceIdentity:
    return DeviceIdentity(
        name=name,
        sm_count=sm_count,
        shared_bytes_per_block=shared_bytes_per_block,
        l2_bytes=l2_bytes,
        memory_clock_mhz=memory_clock_mhz,
    )


@functools.lru_cache(maxsize=1024)
def _limits(limits: tuple[tuple[Any, ...], ...]) -> tuple[Limit, ...]:
    return tuple(Limit(*fields) for fields in limits)

# SPDX-License-Identifier: Apache-2.0
"""The manifest of a bundle: what each file is, and how to launch it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tunegen.model import LaunchPlan, Limit, Operand

SCHEMA = 1
GENERATOR: Literal["tunegen"] = "tunegen"

Provenance = Literal["measured", "predicted", "default, unmeasured"]
Status = Literal["verified", "rebuilt, code equal", "rebuilt, code differs", "built"]

File = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*$")]
"""A file of the bundle, relative to its folder, with forward slashes, never outside of it."""
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Target = Annotated[str, msgspec.Meta(pattern=r"^sm_\d{2,3}[af]?$")]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: a field that is not known here is an error, not ignored."""


class Source(_Part, frozen=True):
    """A generated ``.cu`` file; ``digest`` is that of its text without comments."""

    kernel: str
    file: File
    sha256: Sha256
    digest: Sha256


class ShippedKernel(_Part, frozen=True):
    """One cubin or PTX file. ``shared_bytes`` is static shared memory, per block; what a launch
    asks for besides stands in the plan. Registers are per thread."""

    kernel: str
    entry: str
    file: File
    sha256: Sha256
    registers: int
    shared_bytes: int


class RecordFacts(_Part, frozen=True):
    """What the tuning record behind an image says of it; times in microseconds."""

    median_us: float
    policy: str
    default_us: float | None
    device: str
    sm_count: int
    nvrtc: str
    tunegen: str


class Image(_Part, frozen=True):
    """Cubins of every kernel of the plan for one target.

    ``provenance`` is what is known of the config on this target; ``status`` compares the cubins
    with those of its record: "verified" are the very bytes that were measured or predicted.
    ``min_driver`` is a driver branch, empty where it is not known.
    """

    target: Target
    status: Status
    provenance: Provenance
    nvrtc: str
    min_driver: str
    kernels: tuple[ShippedKernel, ...]
    record: RecordFacts | None = None


class Floor(_Part, frozen=True):
    """PTX of every kernel, for devices newer than any image; ``isa`` is the PTX version."""

    target: Target
    isa: str
    nvrtc: str
    min_driver: str
    kernels: tuple[ShippedKernel, ...]


class Entry(_Part, frozen=True):
    """One operation computed by one config of one spec.

    ``problem`` names every size and attribute that formulas of the plan may use, with the values
    it was tuned for; the kernels serve every problem that meets ``limits``. Formulas are C (and
    Python, with ``/`` as ``//``) in 64-bit integers over these names and ``SM_COUNT``, the
    device's number of multiprocessors; ``min(a, b)`` and ``max(a, b)`` are the only calls.
    ``operands`` are the "pointer" arguments of the plan: what a call does to each, its shape and
    its strides in elements. A "tensor_map" argument is 128 bytes by value, the CUtensorMap that
    cuTensorMapEncodeTiled makes of the plan's tensor map of that name for the address of its
    operand; see :class:`tunegen.model.TensorMap`. ``batch_axis`` is the size
    that counts as 1 where it is not given, or empty. A scalar that has the name of a 0 in
    ``problem`` has to be 0, one that has the name of another value must not be.
    """

    name: str
    operation: str
    spec: str
    dtype: str
    layout: str
    problem: dict[str, int]
    batch_axis: str
    config: dict[str, int]
    operands: tuple[Operand, ...]
    scalars: tuple[str, ...]
    limits: tuple[Limit, ...]
    plan: LaunchPlan
    sources: tuple[Source, ...]
    images: tuple[Image, ...]
    ptx: Floor | None = None


class Manifest(_Part, frozen=True):
    """``manifest.json``: canonical JSON, the same bytes for the same input."""

    schema: int
    generator: Literal["tunegen"]
    version: str
    license: str
    entries: tuple[Entry, ...]


def encode(manifest: Manifest) -> bytes:
    """Canonical JSON: keys sorted, two spaces, one newline at the end."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def decode(content: bytes) -> Manifest:
    """The manifest in ``content``.

    Raises ``msgspec.DecodeError`` for what is no manifest of this schema, in one line that says
    where.
    """
    schema = msgspec.json.decode(content, type=_Version).schema
    if schema != SCHEMA:
        raise msgspec.ValidationError(f"schema {schema}, this tunegen reads schema {SCHEMA}")
    return msgspec.json.decode(content, type=Manifest)


class _Version(msgspec.Struct):
    schema: int


def manifest_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of ``manifest.json``."""
    schema = msgspec.json.schema(Manifest)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: tensors in device memory as the copy engine (TMA) of sm_90 and later sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tunegen.errors import PlanError
from tunegen.model.expr import evaluate
from tunegen.model.problem import DTYPE_BYTES

# Where the copy engine lets tensors begin, and how far apart their rows: whole 16 bytes.
MAP_ALIGNMENT = 16

# The rest of what cuTensorMapEncodeTiled takes. CUDA driver API, "Tensor Map Object Management".
_RANKS = range(1, 6)
_MAX_EXTENT = 2**32
_MAX_STRIDE = 2**40  # excluded
_MAX_BOX = 256
_SWIZZLES = (0, 32, 64, 128)
_L2_PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor that a launch takes as its "tensor_map" argument ``name``: 128 bytes by value,
    made by the driver's ``cuTensorMapEncodeTiled``.

    Dimensions go innermost first, as there. Its globalAddress is ``offset`` bytes into the operand
    ``array``, or into the plan's workspace where that is "workspace"; globalDim is ``extents`` in
    elements; globalStrides is ``strides`` in bytes, the innermost dimension left out; boxDim is
    ``box`` in elements. ``swizzle`` (0, 32, 64, 128) and ``l2_promotion`` (0, 64, 128, 256) are
    bytes, 0 for none. The type of elements is UINT16, UINT32 or UINT64 by the width of ``dtype``,
    so that no bit changes on the way; elementStrides are 1, nothing is interleaved, and what lies
    outside of the tensor is read as zero.
    """

    name: str
    array: str
    dtype: str
    extents: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int
    offset: int | str = 0

    @property
    def in_workspace(self) -> bool:
        return self.array == "workspace"

    @property
    def end(self) -> int:
        """Bytes from the start of ``array`` to the end of the last element, of a bound map."""
        first, *others = (int(extent) for extent in self.extents)
        steps = zip(others, map(int, self.strides), strict=True)
        last_row = sum((extent - 1) * stride for extent, stride in steps)
        return int(self.offset) + last_row + first * DTYPE_BYTES[self.dtype]

    def bind(self, sizes: Mapping[str, int]) -> TensorMap:
        """The map with every formula evaluated; raises :class:`PlanError` for what the driver
        would refuse."""
        bound = replace(
            self,
            extents=tuple(evaluate(extent, sizes) for extent in self.extents),
            strides=tuple(evaluate(stride, sizes) for stride in self.strides),
            offset=evaluate(self.offset, sizes),
        )
        if objection := next(_objections(bound), ""):
            raise PlanError(f"tensor map {self.name} {objection}")
        return bound


def _objections(bound: TensorMap) -> Iterator[str]:
    """What the driver would refuse in a map in numbers; each holds only where those before do."""
    rank, element = len(bound.extents), DTYPE_BYTES.get(bound.dtype)
    if element is None:
        yield f"has elements of {bound.dtype}, there are {', '.join(DTYPE_BYTES)}"
        return
    if rank not in _RANKS:
        yield f"has {rank} dimensions, the copy engine takes {_RANKS[0]} to {_RANKS[-1]}"
    if len(bound.strides) != rank - 1:
        yield f"has {len(bound.strides)} strides, {rank} dimensions need {rank - 1}"
    if len(bound.box) != rank:
        yield f"has a box of {len(bound.box)} dimensions, the tensor has {rank}"
    for what, value, known in (
        ("swizzle", bound.swizzle, _SWIZZLES),
        ("L2 promotion", bound.l2_promotion, _L2_PROMOTIONS),
    ):
        if value not in known:
            yield f"has {what} {value}, there are {', '.join(map(str, known))}"
    if (offset := int(bound.offset)) < 0 or offset % MAP_ALIGNMENT:
        yield f"begins {offset} bytes into {bound.array}, it needs a multiple of {MAP_ALIGNMENT}"
    for extent in map(int, bound.extents):
        if not 1 <= extent <= _MAX_EXTENT:
            yield f"has an extent of {extent}, the copy engine takes 1 to {_MAX_EXTENT}"
    for stride in map(int, bound.strides):
        if not 0 <= stride < _MAX_STRIDE or stride % MAP_ALIGNMENT:
            yield (
                f"has a stride of {stride} bytes, the copy engine takes multiples of "
                f"{MAP_ALIGNMENT} below {_MAX_STRIDE}"
            )
    for extent in bound.box:
        if not 1 <= extent <= _MAX_BOX:
            yield f"has a box of {extent} elements along a dimension, 1 to {_MAX_BOX} are possible"
    row = bound.box[0] * element
    if row % MAP_ALIGNMENT:
        yield f"has a box with rows of {row} bytes, they need a multiple of {MAP_ALIGNMENT}"
    if bound.swizzle and row > bound.swizzle:
        yield f"has a box with rows of {row} bytes, swizzle {bound.swizzle} takes no longer ones"

# SPDX-License-Identifier: Apache-2.0
"""Tensor maps as the driver encodes them, in host memory that kernel parameters are read from."""

from __future__ import annotations

import ctypes
from typing import Any

from tunegen.device import driver
from tunegen.model import DTYPE_BYTES, MAP_ALIGNMENT, TensorMap

# CUtensorMap: 128 bytes that begin at a multiple of 64.
MAP_BYTES = 128
_HOST_ALIGNMENT = 64

# Encodings that a map keeps at hand; one with more of them starts over.
_KNOWN = 1024


class EncodedMap:
    """A bound tensor map at ``address``, in host memory that lives as long as this object.

    It describes nothing before :meth:`place`.
    """

    def __init__(self, tensor_map: TensorMap) -> None:
        self.tensor_map = tensor_map
        # cuda.bindings' own CUtensorMap may begin anywhere.
        self._memory = (ctypes.c_uint8 * (MAP_BYTES + _HOST_ALIGNMENT - 1))()
        start = ctypes.addressof(self._memory)
        self.address = -(-start // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
        self._base: int | None = None
        self._known: dict[int, bytes] = {}

    def place(self, base: int) -> None:
        """Describe the tensor in an array, or a workspace, that begins at ``base`` on the device.

        The encodings of earlier places are kept: what is in a map is its parameters and an
        address, whatever lies there. Raises :class:`CudaError` for an address that is no multiple
        of 16, and on devices without a copy engine.
        """
        if base == self._base:
            return
        content = self._known.get(base)
        if content is None:
            content = _encode(self.tensor_map, base + int(self.tensor_map.offset))
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[base] = content
        ctypes.memmove(self.address, content, MAP_BYTES)
        self._base = base


def _encode(tensor_map: TensorMap, address: int) -> bytes:
    api = driver.bindings()
    bits = 8 * DTYPE_BYTES[tensor_map.dtype]
    # One dimension has none to tell, but the driver takes no null pointer.
    strides = tensor_map.strides or (MAP_ALIGNMENT,)
    made: Any = driver.call(
        "cuTensorMapEncodeTiled",
        getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_UINT{bits}"),
        len(tensor_map.extents),
        address,
        [api.cuuint64_t(int(extent)) for extent in tensor_map.extents],
        [api.cuuint64_t(int(stride)) for stride in strides],
        [api.cuuint32_t(extent) for extent in tensor_map.box],
        [api.cuuint32_t(1) for _ in tensor_map.box],
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _choice(api.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_", tensor_map.swizzle),
        _choice(
            api.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION_L2_", tensor_map.l2_promotion
        ),
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(made.getPtr(), MAP_BYTES)


def _choice(kinds: Any, prefix: str, size: int) -> Any:
    """The member of a driver's enum for so many bytes; that for none is its zero."""
    return getattr(kinds, f"{prefix}{size}B") if size else kinds(0)

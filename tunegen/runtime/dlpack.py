# SPDX-License-Identifier: Apache-2.0
"""DLPack, as far as a kernel's operands need it: address, shape, strides and type of a tensor.

Layouts from the DLPack specification, version 1.1 (``dlpack.h``), read with ctypes: the structures
are small, and this needs neither a C extension nor the library that made the tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

# Device types kDLCUDA and kDLCUDAManaged. Pinned host memory is not among them: a kernel can reach
# it, at a fraction of the speed.
DEVICE_MEMORY = (2, 13)

_FLOAT, _BFLOAT = 2, 4
_DTYPES = {(_FLOAT, 64): "fp64", (_FLOAT, 32): "fp32", (_FLOAT, 16): "fp16",
           (_BFLOAT, 16): "bf16"}  # fmt: skip
_READ_ONLY = 1


class Tensor(NamedTuple):
    """``strides`` are in elements, None for an array without gaps."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    readonly: bool


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


# Prototypes of our own: setting types on ctypes.pythonapi would change them for the whole process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def export(value: Any, stream: int) -> Tensor:
    """What ``value.__dlpack__`` exports; its producer makes ``stream`` wait for the elements.

    The capsule is read and dropped unconsumed, so the tensor stays the caller's to keep alive.
    """
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # from before version 1.0, which added max_version
        capsule = value.__dlpack__(stream=stream)
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        return _tensor(managed.dl_tensor, bool(managed.flags & _READ_ONLY))
    return _tensor(_DLTensor.from_address(_get_pointer(capsule, b"dltensor")), False)


def _tensor(tensor: _DLTensor, readonly: bool) -> Tensor:
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    dtype = _DTYPES.get((code, bits)) if lanes == 1 else None
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else (),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        dtype or f"DLPack type {code}, {bits} bits, {lanes} lanes",
        readonly,
    )

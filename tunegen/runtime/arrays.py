# SPDX-License-Identifier: Apache-2.0
"""Operands as callers hand them over: raw addresses, and arrays of other libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tunegen.errors import UsageError
from tunegen.model import Operand
from tunegen.runtime import dlpack

# Array interface protocol; 16-bit floats with an 8-bit exponent have no code of their own, and
# torch writes them as two opaque bytes.
_TYPESTR = {"<f8": "fp64", "<f4": "fp32", "<f2": "fp16", "<V2": "bf16", "|V2": "bf16"}
_TORCH = {"torch.float64": "fp64", "torch.float32": "fp32", "torch.float16": "fp16",
          "torch.bfloat16": "bf16"}  # fmt: skip


class View(NamedTuple):
    """Where the elements of an operand lie. A raw address has neither shape nor dtype.

    ``strides`` are in elements. ``stream`` is the one that the elements are produced on, where the
    array says so and has not been made to wait.
    """

    address: int
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: str = ""
    stream: int | None = None


def read(operand: Operand, value: Any, device: int, stream: int) -> View:
    """The view of what was given for an operand that is used on ``stream`` of ``device``.

    Raises :class:`UsageError` for what is no array of the device, for another dtype, and for a
    read-only array where the operand is written.
    """
    if isinstance(value, int):
        if value < 0:
            raise UsageError(f"{operand.name} is {value}, which is no address")
        return View(value)
    view = _view(operand, value, device, stream)
    if view.dtype != operand.dtype:
        raise UsageError(f"{operand.name} holds {view.dtype}, the kernel takes {operand.dtype}")
    return view


def read_memory(name: str, value: Any, device: int, stream: int) -> tuple[int, int | None]:
    """Address and bytes of memory that is written whatever its dtype; None for unknown bytes.

    Raises :class:`UsageError` for what is not on the device or has gaps.
    """
    if isinstance(value, int):
        return value, None
    view = _view(Operand(name, "", "out", (), ()), value, device, stream)
    assert view.shape is not None  # only addresses have none
    if view.strides != dense_strides(view.shape):
        raise UsageError(f"{name} has gaps between its elements")
    return view.address, getattr(value, "nbytes", None)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array without gaps, the last axis innermost."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _view(operand: Operand, value: Any, device: int, stream: int) -> View:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_view(operand, value, device)
    if hasattr(value, "__dlpack__"):
        return _dlpack_view(operand, value, device, stream)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _interface_view(operand, interface)
    if value is None:
        raise UsageError(f"{operand.name} is missing")
    raise UsageError(
        f"{operand.name} is of type {type(value).__name__}, neither an address nor an array of "
        "the device (__dlpack__ or __cuda_array_interface__)"
    )


def _torch_view(operand: Operand, tensor: Any, device: int) -> View:
    # Torch has both protocols, at several microseconds each, and refuses them for tensors that
    # require gradients.
    _demand_device(operand, tensor.is_cuda, tensor.get_device(), device)
    return View(tensor.data_ptr(), tensor.shape, tensor.stride(), _torch_dtype(tensor.dtype))


@functools.cache
def _torch_dtype(dtype: Any) -> str:
    return _TORCH.get(str(dtype), str(dtype))


def _dlpack_view(operand: Operand, value: Any, device: int, stream: int) -> View:
    kind, index = value.__dlpack_device__()
    _demand_device(operand, kind in dlpack.DEVICE_MEMORY, index, device)
    tensor = dlpack.export(value, stream)
    if tensor.readonly and operand.role != "in":
        raise UsageError(f"{operand.name} is written and the array given for it is read-only")
    strides = dense_strides(tensor.shape) if tensor.strides is None else tensor.strides
    return View(tensor.address, tensor.shape, strides, tensor.dtype)


def _interface_view(operand: Operand, interface: dict[str, Any]) -> View:
    address, readonly = interface["data"]
    if readonly and operand.role != "in":
        raise UsageError(f"{operand.name} is written and the array given for it is read-only")
    if interface.get("mask") is not None:
        raise UsageError(f"{operand.name} is a masked array")
    typestr, shape, steps = interface["typestr"], interface["shape"], interface.get("strides")
    if steps is None:
        strides = dense_strides(shape)
    else:
        size = int(typestr[2:])
        if any(step % size for step in steps):
            raise UsageError(f"{operand.name} has strides of {steps} bytes, no whole elements")
        strides = tuple(step // size for step in steps)
    dtype = _TYPESTR.get(typestr, typestr)
    return View(address, tuple(shape), strides, dtype, interface.get("stream"))


def _demand_device(operand: Operand, on_device: bool, index: int, device: int) -> None:
    if not on_device:
        raise UsageError(f"{operand.name} is in host memory, the kernel is on device {device}")
    if index != device:
        raise UsageError(f"{operand.name} is on device {index}, the kernel is on device {device}")

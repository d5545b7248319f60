# SPDX-License-Identifier: Apache-2.0
"""The vendor's library on the same operands, through torch: cuBLAS, and torch's own kernels.

torch is imported here only, in a process of its own: it brings its libraries, its memory pool and
seconds of loading with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tunegen.device import Gpu
from tunegen.errors import DeviceError
from tunegen.model import DTYPE_BYTES
from tunegen.runner.operands import Operands, Placed

# The array interface has no bf16: it travels as 16-bit integers and is viewed as what it is.
_TYPESTR = {"fp64": "<f8", "fp32": "<f4", "fp16": "<f2", "bf16": "<i2"}

# In a graph, torch's copy becomes a node that is slower than what the same call does outside of
# one: an H200 copied 4 GiB at 2.7 TB/s instead of 4.2. From this size on the device is slower than
# the host that launches, so that no graph is needed.
_DIRECT_COPY_BYTES = 64 << 20

Tensors = Mapping[str, Any]


class VendorCall:
    """Calls of the library for an operation, one for each set of operands.

    ``description`` names library and versions; ``direct`` calls had better not be recorded in a
    graph. This process launches on the stream of ``gpu`` from then on.

    Raises :class:`DeviceError` where torch is not installed or no call is known for the operation.
    """

    def __init__(self, gpu: Gpu, operands: Operands, operation: str, layout: str) -> None:
        torch = _load_torch()
        if operation not in _CALLS:
            raise DeviceError(f"no library call is known for {operation}")
        device = f"cuda:{gpu.index}"
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(gpu.stream), device=device))
        # fp32 is fp32: no tf32.
        torch.set_float32_matmul_precision("highest")
        self._calls: list[Callable[[], Any]] = []
        for placed in operands.sets:
            tensors = {name: _tensor(torch, p, device) for name, p in placed.items()}
            self._calls.append(_CALLS[operation](torch, tensors, operands, layout))
        bytes_of_one = max(placed.array.bytes for placed in operands.sets[0].values())
        self.direct = operation == "copy" and bytes_of_one >= _DIRECT_COPY_BYTES
        self.description = _describe(torch, operation)

    def launch(self, index: int) -> None:
        """Put a call on the stream that works on one set of operands."""
        self._calls[index]()


def preload() -> None:
    """Import torch, which takes seconds, before it is needed; where it is missing, nothing."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")


def _load_torch() -> Any:
    """torch; raises :class:`DeviceError` where it is not installed or sees no GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise DeviceError(f"torch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise DeviceError(f"torch {torch.__version__} is installed, but cannot use the GPU")
    return torch


class _Interface:
    """An operand as others see it: https://nvidia.github.io/numba-cuda/user/cuda_array_interface"""

    def __init__(self, placed: Placed) -> None:
        array, element = placed.array, DTYPE_BYTES[placed.array.dtype]
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": array.shape,
            "strides": tuple(stride * element for stride in array.strides),
            "typestr": _TYPESTR[array.dtype],
            "data": (placed.address, False),
        }


def _tensor(torch: Any, placed: Placed, device: str) -> Any:
    tensor = torch.as_tensor(_Interface(placed), device=device)
    return tensor.view(torch.bfloat16) if placed.array.dtype == "bf16" else tensor


# --- the calls -----------------------------------------------------------------------------------


def _matmul(torch: Any, tensors: Tensors, operands: Operands, layout: str) -> Callable[[], Any]:
    a, b, c = (tensors[name] for name in "ABC")
    if layout[0] == "t":
        a = a.transpose(1, 2)
    if layout[1] == "t":
        b = b.transpose(1, 2)
    alpha, beta = operands.scalars["alpha"], operands.scalars["beta"]
    one = c.shape[0] == 1
    if one:  # cuBLAS has faster kernels for a single product
        a, b, c = a[0], b[0], c[0]
    if operands.in_place:
        add = c.addmm_ if one else c.baddbmm_
        return lambda: add(a, b, beta=beta, alpha=alpha)
    if alpha == 1:
        multiply = torch.mm if one else torch.bmm
        return lambda: multiply(a, b, out=c)
    multiply_add = torch.addmm if one else torch.baddbmm
    # With beta = 0 the first argument is not read.
    return lambda: multiply_add(c, a, b, beta=0, alpha=alpha, out=c)


def _fill(torch: Any, tensors: Tensors, operands: Operands, layout: str) -> Callable[[], Any]:
    value = operands.scalars["value"]
    return lambda: tensors["y"].fill_(value)


def _copy(torch: Any, tensors: Tensors, operands: Operands, layout: str) -> Callable[[], Any]:
    return lambda: tensors["y"].copy_(tensors["x"])


def _add(torch: Any, tensors: Tensors, operands: Operands, layout: str) -> Callable[[], Any]:
    return lambda: torch.add(tensors["x"], tensors["y"], out=tensors["z"])


def _axpy(torch: Any, tensors: Tensors, operands: Operands, layout: str) -> Callable[[], Any]:
    factor = operands.scalars["a"]
    return lambda: tensors["y"].add_(tensors["x"], alpha=factor)


_CALLS = {"matmul": _matmul, "fill": _fill, "copy": _copy, "add": _add, "axpy": _axpy}


def _describe(torch: Any, operation: str) -> str:
    library = f"torch {torch.__version__}"
    if operation != "matmul":
        return library
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    partials = "" if reduced else ", fp32 partial sums"
    return f"{_cublas(torch)} through {library}, tf32 off{partials}"


def _cublas(torch: Any) -> str:
    """``cuBLAS 13.1.0``, as the library that torch has loaded says."""
    cuda = str(torch.version.cuda)
    numbers = []
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.split('.')[0]}")
        for part in range(3):  # major, minor, patch
            number = ctypes.c_int()
            library.cublasGetProperty(part, ctypes.byref(number))
            numbers.append(str(number.value))
    except (OSError, AttributeError):
        return f"cuBLAS of CUDA {cuda}"
    return f"cuBLAS {'.'.join(numbers)}"

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
from tunegen.runner.protocol import Enter

# The array interface has no bf16: it travels as 16-bit integers and is viewed as what it is.
_TYPESTR = {"fp64": "<f8", "fp32": "<f4", "fp16": "<f2", "bf16": "<i2"}

# In a graph, torch's copy becomes a node that is slower than what the same call does outside of
# one: an H200 copied 4 GiB at 2.7 TB/s instead of 4.2. From this size on the device is slower than
# the host that launches, so that no graph is needed.
_DIRECT_COPY_BYTES = 64 << 20

Tensors = Mapping[str, Any]

# Calls of torch with their names, one after the other: what computes an operation.
Calls = list[tuple[str, Callable[[], Any]]]


class VendorCall:
    """Calls of the library for an operation, one for each set of operands.

    ``description`` names library and versions; ``direct`` calls had better not be recorded in a
    graph. This process launches on the stream of ``gpu`` from then on.

    Raises :class:`DeviceError` where torch is not installed or no call is known for the operation.
    """

    def __init__(self, gpu: Gpu, operands: Operands, request: Enter) -> None:
        torch = _load_torch()
        operation = request.operation
        if operation not in _CALLS:
            raise DeviceError(f"no library call is known for {operation}")
        device = f"cuda:{gpu.index}"
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(gpu.stream), device=device))
        # fp32 is fp32: no tf32.
        torch.set_float32_matmul_precision("highest")
        self._calls: list[Calls] = []
        for placed in operands.sets:
            tensors = {name: _tensor(torch, p, device) for name, p in placed.items()}
            self._calls.append(_CALLS[operation](torch, tensors, operands, request))
        bytes_of_one = max(placed.array.bytes for placed in operands.sets[0].values())
        self.direct = operation == "copy" and bytes_of_one >= _DIRECT_COPY_BYTES
        self.description = _describe(torch, operation, self._calls[0])

    def launch(self, index: int) -> None:
        """Put a call on the stream that works on one set of operands."""
        for _, call in self._calls[index]:
            call()


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


def _matmul(torch: Any, tensors: Tensors, operands: Operands, request: Enter) -> Calls:
    """The product with as much of the rest as torch fuses: the bias in the product, relu with it
    where C is not read; then, in place, what is left. Another 16-bit type than that of A and B
    comes from a product in fp32."""
    a, b, c = (tensors[name] for name in "ABC")
    bias = tensors.get("bias")
    if request.layout[0] == "t":
        a = a.transpose(1, 2)
    if request.layout[1] == "t":
        b = b.transpose(1, 2)
    if c.shape[0] == 1:  # cuBLAS has faster kernels for a single product
        a, b, c = a[0], b[0], c[0]
    if c.dtype == a.dtype:
        return _product(torch, a, b, c, bias, operands, request.activation, None)
    if _version(torch) < (2, 8):
        raise DeviceError(f"torch {torch.__version__} has no products with another output type")
    if c.dtype == torch.float32:
        return _product(torch, a, b, c, bias, operands, request.activation, torch.float32)
    wide = torch.empty(c.shape, dtype=torch.float32, device=c.device)
    wide_bias = None if bias is None else bias.to(torch.float32)
    product = _product(torch, a, b, wide, wide_bias, operands, request.activation, torch.float32)
    before: Calls = [("copy_", lambda: wide.copy_(c))] if operands.in_place else []
    return [*before, *product, ("copy_", lambda: c.copy_(wide))]


def _product(
    torch: Any, a: Any, b: Any, c: Any, bias: Any, operands: Operands, activation: str, out: Any
) -> Calls:
    """``out`` is the dtype of C where it is not that of A and B."""
    alpha, beta = operands.scalars["alpha"], operands.scalars["beta"]
    one = len(c.shape) == 2
    typed: dict[str, Any] = {} if out is None else {"out_dtype": out}
    calls: Calls
    if operands.in_place:
        if out is None:
            name = "addmm_" if one else "baddbmm_"
            add = getattr(c, name)
            calls = [(name, lambda: add(a, b, beta=beta, alpha=alpha))]
        else:
            name = "addmm" if one else "baddbmm"
            into = getattr(torch, name)
            calls = [(name, lambda: into(c, a, b, beta=beta, alpha=alpha, out=c, **typed))]
        if bias is not None:
            calls.append(("add_", lambda: c.add_(bias)))
    elif one and activation == "relu" and alpha == 1 and out is None:
        # Fused with a bias only: zeros where there is none.
        added = torch.zeros(c.shape[1], dtype=c.dtype, device=c.device) if bias is None else bias
        fused = torch._addmm_activation
        return [("_addmm_activation", lambda: fused(added, a, b, out=c))]
    elif bias is None and alpha == 1:
        name = "mm" if one else "bmm"
        multiply = getattr(torch, name)
        calls = [(name, lambda: multiply(a, b, out=c, **typed))]
    else:
        name = "addmm" if one else "baddbmm"
        multiply_add = getattr(torch, name)
        first, factor = (c, 0) if bias is None else (bias, 1)
        # With beta = 0 the first argument is not read.
        calls = [
            (name, lambda: multiply_add(first, a, b, beta=factor, alpha=alpha, out=c, **typed))
        ]
    return [*calls, *_activation(torch, c, activation)]


def _activation(torch: Any, c: Any, name: str) -> Calls:
    aten = torch.ops.aten
    match name:
        case "relu":
            return [("relu_", lambda: aten.relu_(c))]
        case "gelu":
            return [("gelu_", lambda: aten.gelu_(c, approximate="none"))]
        case "silu":
            return [("silu_", lambda: aten.silu_(c))]
        case _:
            return []


def _version(torch: Any) -> tuple[int, ...]:
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def _fill(torch: Any, tensors: Tensors, operands: Operands, request: Enter) -> Calls:
    value = operands.scalars["value"]
    return [("fill_", lambda: tensors["y"].fill_(value))]


def _copy(torch: Any, tensors: Tensors, operands: Operands, request: Enter) -> Calls:
    return [("copy_", lambda: tensors["y"].copy_(tensors["x"]))]


def _add(torch: Any, tensors: Tensors, operands: Operands, request: Enter) -> Calls:
    return [("add", lambda: torch.add(tensors["x"], tensors["y"], out=tensors["z"]))]


def _axpy(torch: Any, tensors: Tensors, operands: Operands, request: Enter) -> Calls:
    factor = operands.scalars["a"]
    return [("add_", lambda: tensors["y"].add_(tensors["x"], alpha=factor))]


_CALLS = {"matmul": _matmul, "fill": _fill, "copy": _copy, "add": _add, "axpy": _axpy}


# Calls that are a product and nothing else.
_PLAIN = {"mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"}


def _describe(torch: Any, operation: str, calls: Calls) -> str:
    """The library, and where there is more to it than a product, the calls."""
    library = f"torch {torch.__version__}"
    if operation != "matmul":
        return library
    names = [name for name, _ in calls]
    if len(names) > 1 or names[0] not in _PLAIN:
        library += f" ({' and '.join(names)})"
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

# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver API, checked: every call raises what went wrong, by name.

cuda.bindings mirrors the C API one to one. cuda.core would be the more comfortable layer, but as
of 1.2 it has no setter for a kernel's dynamic shared memory and no public exception type, and
the worker must tell a fault that ends the process from one that does not.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tunegen.errors import DeviceError

# Errors after which the context is lost and every further call fails: only a new process helps.
_STICKY = {
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_UNKNOWN",
}


class CudaError(Exception):
    """A driver call failed. ``code`` is the driver's name for it; ``sticky`` errors lose the
    context, so that the process has to end."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code
        self.sticky = code in _STICKY


@functools.cache
def bindings() -> Any:
    """``cuda.bindings.driver``; raises :class:`DeviceError` where it cannot be imported."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(f"cuda-bindings: {error}", hint="tunegen doctor") from error


def call(name: str, *arguments: Any) -> Any:
    """``name(*arguments)`` of the driver API; its results without the status.

    Raises :class:`CudaError` for a status other than success, :class:`DeviceError` where the
    driver library is missing.
    """
    driver = bindings()
    try:
        status, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # libcuda could not be loaded
        raise DeviceError(f"no CUDA driver: {error}", hint="tunegen doctor") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(name, status.name)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)

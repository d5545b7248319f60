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

# Errors of which cuda.h says that the context is lost and every further call fails: only a new
# process helps.
_STICKY = {
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_UNKNOWN",
}

# Those that no kernel of this process brings about: the memory, the links, other processes.
_FOREIGN = {
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
}


class CudaError(Exception):
    """A driver call failed. ``code`` is the driver's name for it; ``sticky`` errors lose the
    context, so that the process has to end; ``foreign`` ones are not the fault of its kernels."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code
        self.sticky = code in _STICKY
        self.foreign = code in _FOREIGN


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
    except RuntimeError as error:  # libcuda cannot be loaded, or is too old to have the function
        raise DeviceError(f"no usable CUDA driver: {error}", hint="tunegen doctor") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(name, status.name)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def attribute(device: Any, name: str) -> int:
    """A device's ``CU_DEVICE_ATTRIBUTE_<name>``."""
    kind = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", kind, device))


def arch_of(device: Any) -> str:
    """``sm_90`` for a device of compute capability 9.0."""
    major = attribute(device, "COMPUTE_CAPABILITY_MAJOR")
    return f"sm_{major * 10 + attribute(device, 'COMPUTE_CAPABILITY_MINOR')}"


def driver_cuda() -> str:
    """The newest CUDA that the driver knows: ``13.0``."""
    number = int(call("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"

# SPDX-License-Identifier: Apache-2.0
"""One GPU in one process: memory, graphs, events, all in the order of one stream."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen.device.driver import CudaError, arch_of, attribute, bindings, call
from tunegen.device.loading import LoadedKernels
from tunegen.device.telemetry import Monitor
from tunegen.errors import DeviceError
from tunegen.model import CompiledKernel, DeviceClass, capability

# Rates per clock and multiprocessor by capability: (fp32, fp64), CUDA programming guide, table of
# arithmetic throughput.
_RATES = {
    75: (64, 2), 80: (64, 32), 86: (128, 2), 87: (128, 2), 88: (128, 2), 89: (128, 2),
    90: (128, 64), 100: (128, 64), 103: (128, 2), 110: (128, 2), 120: (128, 2), 121: (128, 2),
}  # fmt: skip

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the stream does not wait for the default stream


def open_gpu(index: int = 0) -> tuple[Gpu, Monitor]:
    """A device, numbered as CUDA does, opened by this process, and what watches it."""
    monitor = Monitor(_uuid(_device(index)))  # before there is a context
    gpu = Gpu(index)
    monitor.opened()
    return gpu, monitor


def _device(index: int) -> Any:
    try:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
    except CudaError as error:
        raise DeviceError(f"CUDA does not start: {error}", hint="tunegen doctor") from error
    if not 0 <= index < count:
        raise DeviceError(
            f"no device {index}: there are {count}, numbered from 0", hint="tunegen doctor"
        )
    return call("cuDeviceGet", index)


def _name(device: Any) -> str:
    text: bytes = call("cuDeviceGetName", 128, device)
    return text.split(b"\0")[0].decode()


def _uuid(device: Any) -> str:
    """``GPU-...``, or ``MIG-...`` where the device is a slice of a card: what NVML calls it."""
    octets = uuid.UUID(bytes=bytes(call("cuDeviceGetUuid", device).bytes))
    return f"{'MIG' if ' MIG ' in _name(device) else 'GPU'}-{octets}"


class Gpu:
    """A GPU opened by this process, with one stream of its own.

    Everything that touches device memory goes through that stream, so it happens in the order of
    the calls. Raises :class:`DeviceError` where there is no driver or no such device, naming what
    there is. A CUDA error in any method is a :class:`tunegen.device.CudaError`; it may be that of
    a kernel launched before.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._device = _device(index)
        # The primary context is the one that torch and the CUDA runtime use too.
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", self._device))
        self.stream = call("cuStreamCreate", _NON_BLOCKING)

    def device_class(self) -> DeviceClass:
        """What kind of GPU it is, as the driver describes it."""
        arch = arch_of(self._device)
        memory_mhz = self._attribute("MEMORY_CLOCK_RATE") // 1000
        width = self._attribute("GLOBAL_MEMORY_BUS_WIDTH")
        fp32, fp64 = _RATES.get(capability(arch), (128, 2))
        return DeviceClass(
            name=_name(self._device),
            arch=arch,
            sm_count=self._attribute("MULTIPROCESSOR_COUNT"),
            l2_bytes=self._attribute("L2_CACHE_SIZE"),
            shared_bytes_per_sm=self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            shared_bytes_per_block=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            threads_per_sm=self._attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
            blocks_per_sm=self._attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            clock_mhz=self._attribute("CLOCK_RATE") // 1000,
            memory_clock_mhz=memory_mhz,
            # Double data rate: two transfers per clock on every pin of the bus.
            memory_gbps=2 * memory_mhz * 1e6 * width / 8 / 1e9,
            fp32_per_clock=fp32,
            fp64_per_clock=fp64,
            registers_per_sm=self._attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            shared_bytes_reserved=self._attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
            source="the driver",
        )

    def _attribute(self, name: str) -> int:
        return attribute(self._device, name)

    # --- memory ------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes of device memory that are free now."""
        return int(call("cuMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        """Address of ``size`` new bytes; raises :class:`DeviceError` with the bytes needed and
        free where they do not fit."""
        free = self.free_bytes()
        try:
            if size <= free:
                return int(call("cuMemAlloc", max(size, 1)))
        except CudaError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        raise DeviceError(f"{size:,} bytes of device memory are needed, {free:,} are free")

    def release(self, address: int) -> None:
        """Give memory back once the stream is done with it."""
        self.synchronize()
        call("cuMemFree", address)

    def upload(self, address: int, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values)
        if values.nbytes:
            # Not cuMemcpyHtoD: that goes through the default stream, which this one does not
            # wait for.
            source = values.ctypes.data
            call("cuMemcpyHtoDAsync", address, source, values.nbytes, self.stream)
            self.synchronize()

    def download(self, address: int, out: NDArray[Any]) -> NDArray[Any]:
        """Fill ``out``, which lies in memory without gaps, from an address."""
        if out.nbytes:
            call("cuMemcpyDtoHAsync", out.ctypes.data, address, out.nbytes, self.stream)
            self.synchronize()
        return out

    def fill(self, address: int, byte: int, size: int) -> None:
        if size:
            call("cuMemsetD8Async", address, byte, size, self.stream)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within the device."""
        if size:
            call("cuMemcpyDtoDAsync", to, source, size, self.stream)

    # --- kernels -----------------------------------------------------------------------------

    def load(self, kernels: Sequence[CompiledKernel]) -> LoadedKernels:
        """Load the cubins; :meth:`LoadedKernels.close` unloads them."""
        return LoadedKernels(kernels)

    def synchronize(self) -> None:
        """Wait for the stream; raises what its kernels did wrong."""
        call("cuStreamSynchronize", self.stream)

    # --- graphs and timing -------------------------------------------------------------------

    def graph(self, record: Callable[[], None]) -> Graph:
        """What ``record`` puts on the stream, as a graph that replays it.

        Kernels must have been launched once before: loading them is not allowed meanwhile.
        """
        mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.stream, mode)
        try:
            record()
        except BaseException:
            # What went wrong is raised, not that it spoiled the capture.
            with contextlib.suppress(CudaError):
                call("cuGraphDestroy", call("cuStreamEndCapture", self.stream))
            raise
        captured = call("cuStreamEndCapture", self.stream)
        try:
            return Graph(call("cuGraphInstantiate", captured, 0), self.stream)
        finally:
            call("cuGraphDestroy", captured)

    def mark(self) -> Mark:
        """Mark this place of the stream, to be waited for and timed."""
        return Mark(self.stream)


class Graph:
    """A recorded sequence of launches."""

    def __init__(self, handle: Any, stream: Any) -> None:
        self._handle = handle
        self._stream = stream
        # Otherwise the first launch does it, and takes longer than the others.
        call("cuGraphUpload", handle, stream)

    def launch(self) -> None:
        call("cuGraphLaunch", self._handle, self._stream)

    def close(self) -> None:
        """Destroy it once it has run; a context that is lost has destroyed it already."""
        with contextlib.suppress(CudaError):
            call("cuStreamSynchronize", self._stream)
        with contextlib.suppress(CudaError):
            call("cuGraphExecDestroy", self._handle)


class Mark:
    """A place of the stream: an event that is recorded there."""

    def __init__(self, stream: Any) -> None:
        self._event = call("cuEventCreate", 0)
        call("cuEventRecord", self._event, stream)

    def wait(self) -> None:
        """Wait until the stream has come here; raises what its kernels did wrong."""
        call("cuEventSynchronize", self._event)

    def since_us(self, earlier: Mark) -> float:
        """Microseconds of device time from an earlier mark to this one, which are both reached.

        The clock's resolution is about half a microsecond.
        """
        return float(call("cuEventElapsedTime", earlier._event, self._event)) * 1e3

    def close(self) -> None:
        with contextlib.suppress(CudaError):
            call("cuEventDestroy", self._event)

# SPDX-License-Identifier: Apache-2.0
"""Streams as callers name them."""

from __future__ import annotations

from typing import Any

from tunegen.device import driver
from tunegen.errors import UsageError

# CU_STREAM_LEGACY. The null handle means it too, unless a process chose per-thread streams.
LEGACY = 1


def handle_of(stream: Any) -> int:
    """The driver's handle of a stream: a number, an object with ``__cuda_stream__`` (cuda.core),
    ``cuda_stream`` (torch), ``ptr`` (CuPy) or ``handle``; None is the legacy default stream.

    Raises :class:`UsageError` for anything else.
    """
    if stream is None:
        return LEGACY
    if isinstance(stream, int):
        if stream < 0:
            raise UsageError(f"stream is {stream}, which is no handle")
        return stream or LEGACY
    if isinstance(stream, driver.bindings().CUstream):
        return int(stream) or LEGACY
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle) or LEGACY
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if handle is not None:
            # A ctypes pointer to nothing has None as its value.
            return int(getattr(handle, "value", handle) or 0) or LEGACY
    raise UsageError(f"{type(stream).__name__} is no stream: give its handle as a number")

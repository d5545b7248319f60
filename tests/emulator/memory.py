# SPDX-License-Identifier: Apache-2.0
"""Device memory for the emulator: poisoned, and fenced by memory that faults when touched."""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType
from typing import Literal

import numpy as np

from emulator.numbers import STORED
from tunegen.model import Array

# Two NaNs in every floating-point type that no kernel computes: what memory holds that a kernel
# may write but has not, and what surrounds its operands.
UNSET = 0xFFFF
OUTSIDE = 0xFFFD

Side = Literal["start", "end"]

# Base addresses matter to kernels modulo this: the largest vector is 32 bytes.
MODULUS = 32

# Regions beyond this, of rows that lie far apart, are neither filled nor looked at between them.
_SPARSE = 64 << 20

# Wide enough that an offset gone wrong does not reach other memory; costs address space only.
_FENCE = 256 << 20
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000  # no memory is set aside for what is not touched
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """``size`` bytes between two fences, one of which they touch.

    ``side`` says at which end, and ``residue`` is the address modulo :data:`MODULUS`; None puts
    them as close to the fence as a multiple of ``step`` bytes allows. What is left of the pages in
    between is :data:`OUTSIDE`, as the bytes themselves are to begin with.
    """

    def __init__(
        self, size: int, *, side: Side = "end", residue: int | None = None, step: int = 16
    ) -> None:
        self.size = size
        self._bytes = (size + MODULUS + mmap.PAGESIZE) // mmap.PAGESIZE * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _libc.mmap(None, self._bytes + 2 * _FENCE, _PROT_NONE, flags, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no {self._bytes + 2 * _FENCE} bytes of address space")
        self._base: int = base
        self._start = base + _FENCE
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)
        if side == "start":
            self.address = self._start + (residue or 0)
        else:
            slack = -size % step if residue is None else (-size - residue) % MODULUS
            self.address = self._start + self._bytes - size - slack
        self._sparse = self._bytes > _SPARSE
        if not self._sparse:
            self._all.view(np.uint16)[:] = OUTSIDE

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _libc.munmap(self._base, self._bytes + 2 * _FENCE)

    @property
    def _all(self) -> np.ndarray:
        return _view(self._start, self._bytes)

    @property
    def bytes(self) -> np.ndarray:
        """The ``size`` bytes as they are now, uint8; valid while the region is open."""
        return _view(self.address, self.size)

    def protect(self, protection: int) -> None:
        """Set the page protection (``mmap.PROT_*``) of everything between the fences."""
        if _libc.mprotect(self._start, self._bytes, protection):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def elements(self, array: Array) -> np.ndarray:
        """The logical elements of the operand that lies in this region, without its gaps."""
        return _elements(self.bytes, array)

    def intact(self, array: Array) -> bool:
        """Whether everything but the elements of ``array`` is as it was to begin with."""
        if self._sparse:
            return True
        content = self._all.copy()
        offset = self.address - self._start
        _set(_elements(content[offset : offset + self.size], array), OUTSIDE)
        return bool(np.all(content.view(np.uint16) == OUTSIDE))

    def owns(self, address: int) -> bool:
        """Whether ``address`` lies in the region or on one of its fences."""
        return self._base <= address < self._base + self._bytes + 2 * _FENCE


def _view(address: int, size: int) -> np.ndarray:
    view: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return view


def _elements(content: np.ndarray, array: Array) -> np.ndarray:
    dtype = np.dtype(STORED[array.dtype])
    if not array.elements:
        return np.zeros(array.shape, dtype)
    strides = [stride * dtype.itemsize for stride in array.strides]
    return np.lib.stride_tricks.as_strided(content.view(dtype), array.shape, strides)


def _set(elements: np.ndarray, pattern: int) -> None:
    elements[...] = np.full(elements.itemsize // 2, pattern, np.uint16).view(elements.dtype)[0]


def unset(elements: np.ndarray) -> None:
    """Make elements what a kernel has not written yet."""
    _set(elements, UNSET)


def is_unset(elements: np.ndarray) -> np.ndarray:
    """Which elements are, bit for bit, what nothing has written."""
    bits = np.ascontiguousarray(elements)[..., None].view(np.uint16)
    found: np.ndarray = np.all(bits == UNSET, axis=-1)
    return found

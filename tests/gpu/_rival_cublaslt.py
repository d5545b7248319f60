# SPDX-License-Identifier: Apache-2.0
"""The algorithms that cublasLt offers for a matrix product, through ctypes.

Types, numbers and signatures are those of cublasLt.h in cuBLAS 13; they have been the same since
CUDA 11.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _tree  # noqa: F401 (makes tunegen importable)

from tunegen.errors import DeviceError
from tunegen.model import Array

ASKED = 16
WORKSPACE_BYTES = 64 << 20

_DATA_TYPES = {"fp32": 0, "fp16": 2, "bf16": 14}  # cudaDataType
_COMPUTE_32F, _SCALE_32F = 68, 0
_TRANSPOSED = {"n": 0, "t": 1}  # cublasOperation_t
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_PREFERENCE_WORKSPACE = 1
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D
_MOST_ALIGNMENT = 256


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = [("data", c_uint64 * 8)]


class Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


# Of functions that return a status. Handles and descriptors are pointers.
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (
        POINTER(c_void_p), c_int, c_uint64, c_uint64, ctypes.c_int64
    ),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    # handle, product, layouts of A, B, C and D, preference, asked, offers, how many
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p,) * 7, c_int, POINTER(Offer), POINTER(c_int)
    ),
    # handle, product, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout,
    # algorithm, workspace, its bytes, stream
    "cublasLtMatmul": (
        *(c_void_p,) * 12, POINTER(Algorithm), c_void_p, c_size_t, c_void_p
    ),
}  # fmt: skip


def load(maps: Path = Path("/proc/self/maps")) -> Any:
    """The cublasLt that this process has loaded with torch, else the one that the system finds.

    Raises :class:`DeviceError` where there is none.
    """
    loaded = re.findall(r"(/\S*libcublasLt\.so\S*)", maps.read_text()) if maps.exists() else []
    tried = []
    for name in (*dict.fromkeys(loaded), "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            return declared(ctypes.CDLL(name))
        except (OSError, AttributeError) as error:
            tried.append(str(error))
    raise DeviceError(f"cublasLt cannot be loaded: {'; '.join(tried)}")


def declared(library: Any) -> Any:
    """A library whose functions know their arguments."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.cublasLtGetStatusString.argtypes = (c_int,)
    library.cublasLtGetStatusString.restype = c_char_p
    library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = (), c_size_t
    return library


class Library:
    """cublasLt with a handle in the current context."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    @property
    def version(self) -> str:
        """``13.1.0``"""
        number = int(self._library.cublasLtGetVersion())
        return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Raises :class:`DeviceError` for any status but success."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cublasLtGetStatusString(status) or b"unknown"
            raise DeviceError(f"{name}: {text.decode(errors='replace')} ({status})")

    def make(self, undo: ExitStack, kind: str, *arguments: Any) -> c_void_p:
        """A descriptor that is destroyed with ``undo``."""
        made = c_void_p()
        self.call(f"cublasLt{kind}Create", byref(made), *arguments)
        undo.callback(self.call, f"cublasLt{kind}Destroy", made)
        return made

    def set(self, kind: str, descriptor: c_void_p, attribute: int, value: Any) -> None:
        self.call(
            f"cublasLt{kind}SetAttribute", descriptor, attribute, byref(value),
            ctypes.sizeof(value),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A row-major array as the column-major matrices that cublasLt knows: transposed."""

    rows: int
    columns: int
    leading: int
    batch: int
    stride: int

    @classmethod
    def of(cls, array: Array) -> _Matrices:
        batch, rows, columns = array.shape
        stride, leading, _ = array.strides
        return cls(columns, rows, leading, batch, stride)


class Product:
    """C = A B of row-major operands: to cublasLt it is C^T = B^T A^T, so A and B trade places.

    ``alignment`` is that of the base addresses in bytes. Raises :class:`DeviceError` where
    cublasLt has no algorithm for it.
    """

    def __init__(
        self, library: Library, arrays: Mapping[str, Array], layout: str, alignment: int
    ) -> None:
        self._library = library
        self._one, self._zero = c_float(1.0), c_float(0.0)
        with ExitStack() as undo:
            self._product = library.make(undo, "MatmulDesc", _COMPUTE_32F, _SCALE_32F)
            for attribute, letter in ((_DESC_TRANSA, layout[1]), (_DESC_TRANSB, layout[0])):
                library.set("MatmulDesc", self._product, attribute, c_int(_TRANSPOSED[letter]))
            self._layouts = {name: self._layout(undo, array) for name, array in arrays.items()}
            self.offers = self._ask(min(alignment, _MOST_ALIGNMENT))
            self._undo = undo.pop_all()

    def _layout(self, undo: ExitStack, array: Array) -> c_void_p:
        if array.dtype not in _DATA_TYPES:
            raise DeviceError(f"cublasLt is asked for no product of {array.dtype}")
        stored = _Matrices.of(array)
        made = self._library.make(
            undo, "MatrixLayout", _DATA_TYPES[array.dtype], stored.rows, stored.columns,
            stored.leading,
        )  # fmt: skip
        if stored.batch > 1:
            for attribute, value in (
                (_LAYOUT_BATCH_COUNT, c_int(stored.batch)),
                (_LAYOUT_BATCH_STRIDE, ctypes.c_int64(stored.stride)),
            ):
                self._library.set("MatrixLayout", made, attribute, value)
        return made

    def _ask(self, alignment: int) -> tuple[Offer, ...]:
        offers, count = (Offer * ASKED)(), c_int()
        library, layouts = self._library, self._layouts
        with ExitStack() as undo:
            preference = library.make(undo, "MatmulPreference")
            workspace = c_uint64(WORKSPACE_BYTES)
            library.set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, workspace)
            for attribute in _PREFERENCE_ALIGNMENTS:
                library.set("MatmulPreference", preference, attribute, c_uint32(alignment))
            library.call(
                "cublasLtMatmulAlgoGetHeuristic", library.handle, self._product, layouts["B"],
                layouts["A"], layouts["C"], layouts["C"], preference, ASKED, offers, byref(count),
            )  # fmt: skip
        found = tuple(offer for offer in offers[: count.value] if not offer.state)
        if not found:
            raise DeviceError("cublasLt offers no algorithm")
        return found

    def launch(
        self, offer: Offer, addresses: Mapping[str, int], workspace: int, stream: int
    ) -> Callable[[], None]:
        """A call with one of the algorithms that are offered, to be made as often as one likes."""
        layouts = self._layouts
        arguments = (
            self._library.handle, self._product, byref(self._one), addresses["B"], layouts["B"],
            addresses["A"], layouts["A"], byref(self._zero), addresses["C"], layouts["C"],
            addresses["C"], layouts["C"], byref(offer.algorithm), workspace, WORKSPACE_BYTES,
            stream,
        )  # fmt: skip
        return lambda: self._library.call("cublasLtMatmul", *arguments)

    def close(self) -> None:
        self._undo.close()

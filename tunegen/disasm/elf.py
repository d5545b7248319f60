# SPDX-License-Identifier: Apache-2.0
"""Cubins as ELF files: which code they hold, and whether two hold the same.

A cubin is a little-endian ELF64 file. Its hash changes with line information, with the names of
debug sections and with the toolkit's notes; the code does not. What a GPU executes is the machine
code (``.text.*``), the constant banks (``.nv.constant*``), and global and shared memory as the
loader makes them (``.nv.global*``, ``.nv.shared*``): these sections are the code of a cubin.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tunegen.errors import ToolkitError

_CODE = (".text.", ".nv.constant", ".nv.global", ".nv.shared.")
_NOBITS = 8  # SHT_NOBITS: memory that is reserved, with nothing in the file
_SECTION = struct.Struct("<IIQQQQIIQQ")


class _Header(NamedTuple):
    """The fields of an ELF64 header that matter here, in file order."""

    abi: int
    machine: int
    section_table: int
    flags: int
    section_count: int
    names_index: int


_HEADER = struct.Struct("<8xB9xH20xQI8xHH")
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_MACHINE_CUDA = 190  # EM_CUDA


def code_sections(cubin: bytes) -> dict[str, bytes]:
    """The sections that make up the code, by name; of those that are only reserved, the size.

    Raises :class:`ToolkitError` where ``cubin`` is not a whole ELF64 file for CUDA.
    """
    return {name: body for name, body in _sections(cubin) if name.startswith(_CODE)}


def code_digest(cubin: bytes) -> str:
    """SHA-256 over the code of a cubin: equal for a build with and without line information."""
    digest = hashlib.sha256()
    for name, body in sorted(code_sections(cubin).items()):
        digest.update(f"{name}\0{len(body)}\0".encode())
        digest.update(body)
    return digest.hexdigest()


def same_code(left: bytes, right: bytes) -> bool:
    """Whether two cubins execute the same: same capability, and every code section equal."""
    return cubin_capability(left) == cubin_capability(right) and code_sections(
        left
    ) == code_sections(right)


def cubin_capability(cubin: bytes) -> int:
    """The capability a cubin was assembled for: 90 for ``sm_90`` and ``sm_90a``.

    It stands in the ELF header's flags: in the lowest byte up to ABI version 7, in the one above
    it from version 8 on (LLVM's ``BinaryFormat/ELF.h``: ``EF_CUDA_SM``, ``EF_CUDA_SM_MASK``).
    """
    header = _header(cubin)
    return header.flags >> 8 & 0xFF if header.abi >= 8 else header.flags & 0xFF


def _header(cubin: bytes) -> _Header:
    if len(cubin) < _HEADER.size or not cubin.startswith(_ELF64_LITTLE_ENDIAN):
        raise ToolkitError("not a cubin: it does not begin as a little-endian ELF64 file")
    header = _Header(*_HEADER.unpack_from(cubin))
    if header.machine != _MACHINE_CUDA:
        raise ToolkitError(f"not a cubin: an ELF file for machine {header.machine}")
    return header


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    header = _header(cubin)
    try:
        sections = [
            _SECTION.unpack_from(cubin, header.section_table + i * _SECTION.size)
            for i in range(header.section_count)
        ]
        names = sections[header.names_index][4]
        for name, kind, _, _, offset, size, *_ in sections:
            start = names + name
            text = cubin[start : cubin.index(b"\0", start)].decode(errors="replace")
            if kind == _NOBITS:
                yield text, size.to_bytes(8, "little")
            elif offset + size > len(cubin):
                raise ValueError(f"section {text} is cut short")
            else:
                yield text, cubin[offset : offset + size]
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ToolkitError(f"damaged cubin: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""PTX in, cubin out, as a driver would do it: by nvJitLink, which needs none."""

from __future__ import annotations

from cuda.bindings import nvjitlink


def assemble(ptx: bytes, arch: str) -> bytes:
    content = ptx + b"\0"
    linker = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, content, len(content), "k.ptx")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    finally:
        nvjitlink.destroy(linker)
    return bytes(cubin)

# SPDX-License-Identifier: Apache-2.0
"""A libcuda for machines without a GPU, for processes of their own: the real bindings call it, and
the kernels are those that the emulator builds."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path

from emulator import build
from fake_gpu import compiled

from tunegen.model import CompiledKernel, KernelDefinition

_SOURCE = Path(__file__).with_name("libcuda.cpp")


@functools.cache
def environment() -> dict[str, str]:
    """What makes a process find the driver."""
    folder = build._folder() / "driver"
    folder.mkdir()
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(library),
         "-Wl,-soname,libcuda.so.1"],
        check=True,
    )  # fmt: skip
    return {
        "LD_LIBRARY_PATH": str(folder),
        "TUNEGEN_EMULATOR_RUNTIME": build._runtime()._name,
        "CUDA_VISIBLE_DEVICES": "0",
    }


def image(
    definition: KernelDefinition, root: Path | None = None, config: Mapping[str, int] | None = None
) -> CompiledKernel:
    """A kernel whose cubin this driver loads; ``config`` are constants as well."""
    constants = {**(config or {}), **definition.constants}
    complete = dataclasses.replace(definition, constants=constants)
    kernel = build.build_definition(complete, "sm_90", root)
    return compiled(definition.name, kernel.library._name + "\0")

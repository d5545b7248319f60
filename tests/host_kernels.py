# SPDX-License-Identifier: Apache-2.0
"""Kernels of templates for the fake GPU: the emulator builds and runs them."""

from __future__ import annotations

import ctypes

from emulator import build
from fake_gpu import FakeKernel, Fault, Memory, Values

from tunegen.model import KernelDefinition, Launch

_LIMIT_S = 20
_TYPES = {
    "pointer": ctypes.c_uint64, "workspace": ctypes.c_uint64, "int32": ctypes.c_int32,
    "int64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
_LETTERS = {"pointer": "p", "workspace": "p", "int32": "i", "int64": "l", "fp32": "f",
            "fp64": "d"}  # fmt: skip


def host_kernel(definition: KernelDefinition, arch: str = "sm_90", us: float = 1.0) -> FakeKernel:
    """A kernel as the template has it."""
    kernel = build.build_definition(definition, arch)

    def run(memory: Memory, launch: Launch, values: Values) -> None:
        if launch.tensor_maps:
            raise build.Unemulatable(f"{launch.kernel} takes tensor maps: there is no copy engine")
        signature = "".join(_LETTERS[argument.type] for argument in launch.arguments)
        assert signature == kernel.signature
        fault = kernel(
            build.Launch(
                build.Vec3(*launch.grid), build.Vec3(*launch.block), launch.shared_bytes, 1,
                _LIMIT_S,
            ),
            [_TYPES[a.type](values[a.name]) for a in launch.arguments],
        )  # fmt: skip
        if fault.kind:
            raise Fault(f"{fault.message.decode()} in line {fault.line}")

    return FakeKernel(run, us)

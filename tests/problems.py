# SPDX-License-Identifier: Apache-2.0
"""Small problems with kernels in Python, right ones and broken ones, as a worker is given them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import check_twins
import numpy as np
from fake_gpu import FakeGpu, FakeKernel, FakeMonitor, Memory, Values, compiled

from tunegen.kernels.checks import DEFINITIONS
from tunegen.model import Argument, Array, Launch, LaunchPlan
from tunegen.runner.protocol import Executable, Open, Prepare
from tunegen.runner.worker import Worker

N = 1024
CHECKS = tuple(compiled(definition.name) for definition in DEFINITIONS)


def pointers(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "pointer") for name in names)


def executable(name: str, arguments: tuple[Argument, ...], **plan: Any) -> Executable:
    launch = Launch(name, (1, 1, 1), (32, 1, 1), arguments)
    return Executable((compiled(name),), LaunchPlan((launch,), **plan))


def fp32(memory: Memory, address: int, count: int = N) -> np.ndarray:
    return memory.view(address, count, np.float32)


def fp64(memory: Memory, address: int, count: int = N) -> np.ndarray:
    return memory.view(address, count, np.float64)


@dataclasses.dataclass
class Doubling:
    """y = 2 x, or x = 2 x in place: what is prepared, and a worker that has prepared it.

    ``kernels`` are added by :meth:`kernel`, which gives what is to be tried.
    """

    in_place: bool = False
    sets: int = 2
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        self.gpu = FakeGpu(check_twins.kernels(), memory_bytes=self.memory_bytes)
        self.worker = Worker(lambda index: (self.gpu, FakeMonitor(self.gpu)))  # type: ignore[arg-type, return-value]
        self.gpu.kernels["reference"] = FakeKernel(self._reference)

    @property
    def out(self) -> str:
        return "x" if self.in_place else "y"

    def _reference(self, memory: Memory, launch: Launch, values: Values) -> None:
        wanted = fp64(memory, values[f"reference_{self.out}"])
        wanted[:] = 2.0 * fp32(memory, values["x"])

    def prepare_request(self) -> Prepare:
        x = Array("x", (N,), (1,), "fp32", "inout" if self.in_place else "in")
        arrays = (x,) if self.in_place else (x, Array("y", (N,), (1,), "fp32", "out"))
        reference = executable("reference", pointers("x", f"reference_{self.out}"))
        given: dict[str, Any] = {
            "arrays": arrays, "scalars": {}, "seed": 5, "sets": self.sets, "checks": CHECKS,
            "reference": reference,
        }  # fmt: skip
        return Prepare(**{**given, **self.request})

    def prepare(self) -> Any:
        self.worker.handle(Open(0))
        return self.worker.handle(self.prepare_request())

    def kernel(
        self,
        run: Callable[[Memory, Values], None],
        us: float | Callable[[Values], float] = 10.0,
        name: str = "mine",
        **plan: Any,
    ) -> Executable:
        self.gpu.kernels[name] = FakeKernel(lambda memory, _, values: run(memory, values), us)
        arguments = pointers("x") if self.in_place else pointers("x", "y")
        if plan.get("workspace_bytes"):
            arguments += (Argument("scratch", "workspace"),)
        return executable(name, arguments, **plan)

    def right(
        self, us: float | Callable[[Values], float] = 10.0, name: str = "right"
    ) -> Executable:
        return self.kernel(self.double, us, name)

    def double(self, memory: Memory, values: Values) -> None:
        fp32(memory, values[self.out])[:] = 2 * fp32(memory, values["x"])

    def set_of(self, address: int) -> int:
        """The number of the set that an operand belongs to."""
        placed = self.worker._operands.sets
        return next(
            i for i, one in enumerate(placed) if address in {p.address for p in one.values()}
        )

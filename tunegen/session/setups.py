# SPDX-License-Identifier: Apache-2.0
"""Problems as a worker needs them: with the kernels that fill and check, and expected results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegen import codegen
from tunegen.errors import NoValidConfig
from tunegen.kernels.checks import DEFINITIONS
from tunegen.kernels.references import REFERENCES
from tunegen.model import (
    Array,
    CompiledKernel,
    Compiler,
    Config,
    DeviceClass,
    KernelDefinition,
    KernelSpec,
    Operation,
    Problem,
)
from tunegen.model.checks import INTEGER_RANGE
from tunegen.runner.protocol import Executable, InputKind, Prepare

# An operation of which there is no plain kernel is computed by NumPy in fp64 on the CPU: so many
# elements of all operands together take a second or two, and so do so many operations.
NUMPY_ELEMENTS = 1 << 26
NUMPY_FLOPS = 1 << 34

# Inputs and outputs of one call after the other lie so many L2 sizes apart, so that each comes
# from memory; the smallest problems stay partly warm all the same.
_L2_SIZES = 3

# What works in place is applied at most once to each set in a timed interval, so an interval is no
# longer than one pass over the sets. On an H200 (60 MB of L2, 4.8 TB/s) an axpy passes over three
# L2 sizes in less than 60 us, too short for events to read to a percent; over eleven in 200 us.
_L2_SIZES_IN_PLACE = 11

_LEAST_SETS, _MOST_SETS = 2, 256

# The part of the free memory for sets: the vendor's library has a process, and sets, of its own.
_MEMORY_SHARE = 0.4

# Run-time factors for integer inputs: none is 1, so that a forgotten one is seen.
_INTEGER_SCALARS = (2.0, -1.0, 3.0, -2.0)

_NO_CONFIG = Config({})


def rotation(operation: Operation, problem: Problem, l2_bytes: int, free_bytes: int) -> int:
    """How many sets of operands to take turns with."""
    arrays = operation.arrays(problem)
    bytes_of_one = max(1, sum(array.bytes for array in arrays))
    in_place = any(array.role == "inout" for array in arrays)
    l2_sizes = _L2_SIZES_IN_PLACE if in_place else _L2_SIZES
    wanted = math.ceil(l2_sizes * l2_bytes / bytes_of_one)
    fitting = int(free_bytes * _MEMORY_SHARE / bytes_of_one)
    return max(_LEAST_SETS, min(wanted, fitting, _MOST_SETS))


@dataclass(slots=True)
class ProblemSetup:
    """Makes the :class:`Prepare` of a problem of one operation; kernels are compiled once.

    ``integers`` draws small ones, with factors of which none is 1.
    """

    operation: Operation
    device: DeviceClass
    compiler: Compiler
    _compiled: dict[str, CompiledKernel] = field(default_factory=dict)

    def __call__(
        self,
        problem: Problem,
        *,
        inputs: InputKind,
        seed: int,
        sets: int = 1,
        offsets: tuple[tuple[str, int], ...] = (),
        checked: bool = True,
    ) -> Prepare:
        """Without ``checked``, nothing is expected: the problem can only be timed.

        Raises :class:`NoValidConfig` for a problem that nothing can compute in time.
        """
        scalars = dict(self.operation.scalars)
        if inputs == "integers":
            scalars = dict(zip(scalars, _INTEGER_SCALARS, strict=False))
        reference = self._reference(problem, scalars) if checked else None
        given, expected = None, None
        if checked and reference is None:
            given, expected = self._on_the_cpu(problem, scalars, inputs, seed)
        return Prepare(
            arrays=self.operation.arrays(problem),
            scalars=scalars,
            seed=seed,
            sets=sets,
            checks=tuple(self._compile(definition) for definition in DEFINITIONS),
            inputs=inputs,
            reference=reference,
            given=given,
            expected=expected,
            offsets=dict(offsets),
        )

    def _reference(self, problem: Problem, scalars: dict[str, float]) -> Executable | None:
        spec = reference_of(self.operation)
        if spec is None or spec.refuses(problem, self.device):
            return None
        plan = spec.bound_plan(_NO_CONFIG, problem, self.device)
        kernels = spec.kernels(_NO_CONFIG, problem)
        return Executable(tuple(self._compile(kernel) for kernel in kernels), plan)

    def _compile(self, definition: KernelDefinition) -> CompiledKernel:
        source = codegen.render_definition(definition, self.device.arch)
        if source.digest not in self._compiled:
            self._compiled[source.digest] = self.compiler.compile(source, self.device.arch)
        return self._compiled[source.digest]

    def _on_the_cpu(
        self, problem: Problem, scalars: dict[str, float], inputs: InputKind, seed: int
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, NDArray[np.float64]]]:
        arrays = self.operation.arrays(problem)
        elements = sum(math.prod(array.shape) for array in arrays)
        if elements > NUMPY_ELEMENTS or self.operation.flops(problem) > NUMPY_FLOPS:
            raise NoValidConfig(
                f"results of {self.operation.name} are checked against NumPy, which is too slow "
                f"for {self.operation.text(problem)}: it does up to {NUMPY_ELEMENTS:,} elements "
                f"and {NUMPY_FLOPS:,} operations"
            )
        rng = np.random.default_rng(seed)
        given = {a.name: draw(a, inputs, rng) for a in arrays if a.role != "out"}
        wide = {name: widened(values) for name, values in given.items()}
        expected = self.operation.reference(problem, wide, scalars)
        return given, {
            name: np.ascontiguousarray(values, dtype=np.float64)
            for name, values in expected.items()
        }


def reference_of(operation: Operation) -> KernelSpec | None:
    """The plain kernel that computes an operation in fp64, None where there is none."""
    spec = REFERENCES.get(operation.name)
    return spec if spec is not None and spec.operation is operation else None


def draw(array: Array, inputs: InputKind, rng: np.random.Generator) -> NDArray[Any]:
    """Random elements in the array's type; bf16 as the bits of 16-bit integers."""
    values: NDArray[Any]
    if inputs == "integers":
        values = rng.integers(-INTEGER_RANGE, INTEGER_RANGE, array.shape, endpoint=True)
    else:
        values = rng.standard_normal(array.shape)
    match array.dtype:
        case "fp64":
            return values.astype(np.float64)
        case "fp16":
            return values.astype(np.float16)
        case "bf16":
            bits = values.astype(np.float32).view(np.uint32)
            # To nearest, ties to even: half of what is cut off, less one, and the last bit kept.
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        case _:
            return values.astype(np.float32)


def widened(values: NDArray[Any]) -> NDArray[np.float64]:
    """What :func:`draw` drew, as numbers."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)

# SPDX-License-Identifier: Apache-2.0
"""Generated kernels on the CPU: the numbers, the addresses and the barriers, without a GPU.

The same templates are rendered over host versions of the fragments that hold PTX (``lib``), built
by g++ and run through the spec's own launch plan. Operands end or begin at pages that fault, all
that a kernel must not rely on is poison, and threads run in a drawn order between barriers.
"""

from emulator.build import Unemulatable
from emulator.call import Case, Kind, WrongKernel, run
from emulator.checking import check, inputs
from emulator.numbers import load, store

__all__ = [
    "Case", "Kind", "Unemulatable", "WrongKernel", "check", "inputs", "load", "run", "store",
]  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Tuned kernels in other people's programs: images, plan and limits in, launches out.

Needs the driver and nothing that makes kernels: no compiler, no database, no torch.
"""

from tunegen.runtime.context import Context
from tunegen.runtime.kernel import Kernel
from tunegen.runtime.program import Image, Program

__all__ = ["Context", "Image", "Kernel", "Program"]

# SPDX-License-Identifier: Apache-2.0
"""The GPU: which are there, and one of them opened by this process.

Finding GPUs loads no driver; :class:`Gpu` does, and is imported only where one is opened.
"""

from tunegen.device.detect import find_gpus, visible
from tunegen.device.driver import CudaError
from tunegen.device.gpu import Call, Gpu, Graph, LoadedKernels

__all__ = ["Call", "CudaError", "Gpu", "Graph", "LoadedKernels", "find_gpus", "visible"]

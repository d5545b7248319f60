# SPDX-License-Identifier: Apache-2.0
"""The GPU: which are there, and one of them opened by this process.

Finding GPUs loads no driver; :class:`Gpu` does, and is imported only where one is opened.
"""

from tunegen.device.detect import find_gpus, visible
from tunegen.device.driver import CudaError
from tunegen.device.gpu import Gpu, Graph, Mark, open_gpu
from tunegen.device.loading import Call, LoadedKernels
from tunegen.device.telemetry import Monitor
from tunegen.device.tensor_map import EncodedMap

__all__ = [
    "Call", "CudaError", "EncodedMap", "Gpu", "Graph", "LoadedKernels", "Mark", "Monitor",
    "find_gpus", "open_gpu", "visible",
]  # fmt: skip

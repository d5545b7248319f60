# SPDX-License-Identifier: Apache-2.0
"""tunegen: generate CUDA kernels from templates, search their configurations, ship the winners.

>>> import tunegen
>>> result = tunegen.tune("matmul", arch="sm_90", problem="4096x4096x4096")  # doctest: +SKIP
>>> build = tunegen.compile("axpy", arch="sm_80", problem="2^24")            # doctest: +SKIP
>>> records = tunegen.Database().records(arch="sm_90")                       # doctest: +SKIP
>>> kernel = tunegen.load("shipped", operation="axpy")                       # doctest: +SKIP
>>> ceilings = tunegen.calibrate().calibration                               # doctest: +SKIP
>>> for result in tunegen.bench("matmul", ["1024x1024x1024"]):               # doctest: +SKIP
...     print(result.kernel_us, result.cpu_us)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tunegen.database import Database
    from tunegen.errors import TunegenError
    from tunegen.loading import load
    from tunegen.search import PortfolioSampler
    from tunegen.session import bench, calibrate, compile, export, inspect, tune

__all__ = [
    "Database", "PortfolioSampler", "TunegenError", "__version__", "bench", "calibrate", "compile",
    "export", "inspect", "load", "tune",
]  # fmt: skip

# Public names and where they are; loaded when first used, since NVRTC, Optuna and NumPy are slow.
_LAZY = {
    "Database": "tunegen.database",
    "PortfolioSampler": "tunegen.search",
    "TunegenError": "tunegen.errors",
    "bench": "tunegen.session",
    "calibrate": "tunegen.session",
    "compile": "tunegen.session",
    "export": "tunegen.session",
    "inspect": "tunegen.session",
    "load": "tunegen.loading",
    "tune": "tunegen.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tunegen' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

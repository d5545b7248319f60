# SPDX-License-Identifier: Apache-2.0
"""The installation: what is there, and what is kept on disk."""

from __future__ import annotations

from tunegen import compiler, device, disasm, doctor, store
from tunegen.database import default_folder


def cache_report() -> compiler.CacheReport:
    """What the cache of compiled kernels holds."""
    return compiler.KernelCache().report()


def clear_cache() -> compiler.CacheReport:
    """Remove every compiled kernel; what there was is returned."""
    return compiler.KernelCache().clear()


def examine() -> tuple[doctor.Check, ...]:
    """What is installed, what fits together, what is missing and what mends it."""
    return doctor.examine(
        device.find_gpus(),
        nvrtc_version=compiler.nvrtc_version,
        nvdisasm=disasm.find_nvdisasm,
        folders={"database": default_folder()},
        files={"studies": store.default_path()},
        caches={"kernel cache": compiler.default_cache_dir()},
    )

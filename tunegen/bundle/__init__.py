# SPDX-License-Identifier: Apache-2.0
"""Records in, a folder out that other projects embed: sources, cubins, PTX and launch plans."""

from tunegen.bundle.compatibility import (
    cuda_branch,
    driver_too_old,
    min_driver,
    ptx_min_driver,
)
from tunegen.bundle.manifest import (
    Entry,
    Floor,
    Image,
    Manifest,
    ShippedKernel,
    encode,
    manifest_schema,
)
from tunegen.bundle.reader import Bundle, Finding, Selection
from tunegen.bundle.writer import BundleEntry, BundleImage, write_bundle

__all__ = [
    "Bundle",
    "BundleEntry",
    "BundleImage",
    "Entry",
    "Finding",
    "Floor",
    "Image",
    "Manifest",
    "Selection",
    "ShippedKernel",
    "cuda_branch",
    "driver_too_old",
    "encode",
    "manifest_schema",
    "min_driver",
    "ptx_min_driver",
    "write_bundle",
]

# SPDX-License-Identifier: Apache-2.0
"""Imported before tunegen by the scripts here: they use the tree that they stand in, installed or
not, and so do the processes that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUNED_DB = ROOT / "tuned_db"

# The calibrations that shipped records were measured with, beside them.
CALIBRATION = "calibration"

sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part
)

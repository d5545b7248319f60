# SPDX-License-Identifier: Apache-2.0
"""Config or compiled kernel in, predicted time out: the tool that stands in for a GPU."""

from tunegen.perfmodel.chips import CHIPS, chips_of, default_chip, find_chip
from tunegen.perfmodel.evaluator import ModelEvaluator
from tunegen.perfmodel.occupancy import Occupancy, blocks_per_sm, occupancy
from tunegen.perfmodel.predict import (
    LAUNCH_US,
    POLICY,
    Prediction,
    calibrated,
    explain,
    predict_us,
)
from tunegen.perfmodel.ranking import rank
from tunegen.perfmodel.roofline import Floor, floor

__all__ = [
    "CHIPS",
    "LAUNCH_US",
    "POLICY",
    "Floor",
    "ModelEvaluator",
    "Occupancy",
    "Prediction",
    "blocks_per_sm",
    "calibrated",
    "chips_of",
    "default_chip",
    "explain",
    "find_chip",
    "floor",
    "occupancy",
    "predict_us",
    "rank",
]

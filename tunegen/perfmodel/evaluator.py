# SPDX-License-Identifier: Apache-2.0
"""The performance model as an evaluator: what stands in for a GPU where there is none."""

from __future__ import annotations

from tunegen.errors import PlanError
from tunegen.model import (
    Calibration,
    Candidate,
    DeviceClass,
    Evidence,
    Measurement,
    Outcome,
    Problem,
)
from tunegen.perfmodel.predict import POLICY, calibrated, explain


class ModelEvaluator:
    """Evaluator of candidates by the model, for one device class (:class:`DeviceClass`).

    With compiled kernels it takes their registers, spills and shared memory from the compiler; the
    first kernel is the main one, as everywhere. Without, it knows only the formula. With a
    calibration its rates take the place of the datasheet's, and the policy says so.
    """

    evidence: Evidence = "predicted"
    needs_kernels = True

    def __init__(self, device: DeviceClass, calibration: Calibration | None = None) -> None:
        self.device = calibrated(device, calibration)
        self.policy = POLICY if calibration is None else f"{POLICY}-calibrated"

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        for kernel in candidate.kernels or ():
            if kernel.rejection:
                return Outcome("rejected", reason=f"{kernel.name} {kernel.rejection}")
        main = candidate.kernels[0].resources if candidate.kernels else None
        work = candidate.spec.work(candidate.config, problem, self.device)
        try:
            prediction = explain(work, self.device, main)
        except PlanError as error:
            return Outcome("launch_failed", reason=str(error))
        details = {
            "parts_us": prediction.parts,
            "bound": prediction.bound,
            "waves": prediction.waves,
            "blocks_per_sm": prediction.occupancy.blocks_per_sm,
            "occupancy": prediction.occupancy.fraction,
            "limiter": prediction.occupancy.limiter,
        }
        return Outcome("predicted", Measurement(prediction.time_us, self.policy, details=details))

# SPDX-License-Identifier: Apache-2.0
"""A tune that says what it has done, a line of JSON for each trial: the child that is killed.

``python acceptance_child.py '{"operation": ..., ...}'``, the arguments of ``tunegen.tune``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from acceptance_common import ROOT as ROOT  # puts the tree first in the path

from tunegen import session
from tunegen.model import Trial


def identity(trial: Trial) -> list[Any]:
    """What tells a trial from another, as JSON has it."""
    us = trial.outcome.median_us if trial.outcome.ok else None
    return [trial.spec, sorted(trial.config.items()), trial.outcome.kind, us]


def main(text: str) -> None:
    def tell(trial: Trial, progress: object) -> None:
        print(json.dumps({"number": trial.number, "trial": identity(trial)}), flush=True)

    result = session.tune(**json.loads(text), evaluator="gpu", warm=False, on_event=tell)
    finals = result.run.contest is not None
    print(json.dumps({"done": len(result.run.trials), "finals": finals}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

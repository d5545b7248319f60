# SPDX-License-Identifier: Apache-2.0
"""The rows of a storage: which studies are ours, and what their trials say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunegen.store.form import StoredTrial, decode
from tunegen.store.salvage import FACTS_KEY, TRIAL_KEY

if TYPE_CHECKING:
    from tunegen.store.connection import Connection

_STUDIES = """
SELECT studies.study_id, studies.study_name, study_user_attributes.value_json
FROM studies JOIN study_user_attributes ON study_user_attributes.study_id = studies.study_id
WHERE study_user_attributes.key = :key
ORDER BY studies.study_id
"""

# A trial is one row of JSON here. Optuna's own reading makes an object of every parameter of every
# trial: 7 s of processor time for 10,000 trials of 17 parameters, ten times what this takes.
_TRIALS = """
SELECT trials.study_id, trials.trial_id, trial_user_attributes.value_json
FROM trials JOIN trial_user_attributes ON trial_user_attributes.trial_id = trials.trial_id
WHERE trial_user_attributes.key = :key AND trials.study_id IN :studies
AND trials.trial_id > :after
ORDER BY trials.trial_id
"""


@dataclass(frozen=True, slots=True)
class Row:
    study_id: int
    name: str
    facts: Mapping[str, Any]


def newest_of(rows: Iterable[Row]) -> Mapping[str, int]:
    """The generation of each family that is used today."""
    newest = Counter[str]()
    for row in rows:
        family = row.facts["family"]
        newest[family] = max(newest[family], row.facts["generation"])
    return newest


def studies_of(connection: Connection) -> list[Row]:
    """The studies that are ours, in the order of creation."""
    rows = connection.rows(_STUDIES, key=FACTS_KEY)
    return [Row(study_id, name, json.loads(facts)) for study_id, name, facts in rows]


@dataclass(frozen=True, slots=True)
class Text:
    """What is stored of a trial, with the storage's ids of its study and itself."""

    study_id: int
    trial_id: int
    text: str


def texts(connection: Connection, studies: Iterable[int], after: int = -1) -> list[Text]:
    """Every trial of some studies in the order in which it was added; those of a higher id than
    ``after``."""
    rows = connection.rows(_TRIALS, key=TRIAL_KEY, studies=list(studies), after=after)
    return [Text(*row) for row in rows]


def read(
    connection: Connection, studies: Iterable[int]
) -> Iterator[tuple[int, StoredTrial | None]]:
    """Every trial of some studies with the study's id; None for one that is damaged."""
    return ((found.study_id, decode(found.text)) for found in texts(connection, studies))

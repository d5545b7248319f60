# SPDX-License-Identifier: Apache-2.0
"""Every trial, durable: Optuna's relational storage, an SQLite file unless a URL says otherwise.

A study is what may be compared: one problem on one device class, judged one way. It is named by
all of that and by the digest of its space; where only the space differs, studies share their
trials. A trial is stored in one transaction when it has finished, with its whole outcome and the
digests of its sources, and is on disk when :meth:`Study.add` returns.
"""

from tunegen.store.form import StoredTrial
from tunegen.store.key import StudyKey
from tunegen.store.listing import StudyInfo, list_studies
from tunegen.store.sqlite import default_path
from tunegen.store.study import Study
from tunegen.store.transfer import Carried, Received, collect, read_file, receive, write

__all__ = [
    "Carried",
    "Received",
    "StoredTrial",
    "Study",
    "StudyInfo",
    "StudyKey",
    "collect",
    "default_path",
    "list_studies",
    "read_file",
    "receive",
    "write",
]

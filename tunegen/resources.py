# SPDX-License-Identifier: Apache-2.0
"""Where ``templates`` and ``tuned_db`` are: in the installed package, or beside it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder ``name`` ("templates" or "tuned_db"); read-only, never written by tunegen."""
    packaged = _PACKAGE / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name

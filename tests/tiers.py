# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test belong to the long part of the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], *chosen: Any, name: Callable[[Any], str] = str) -> list[Any]:
    """``values`` as parameters of a test, of which only those that are called as in ``chosen`` are
    in the short part."""
    found = [(value, name(value)) for value in values]
    assert set(chosen) <= {called for _, called in found}, "a chosen one is not there"
    return [
        pytest.param(value, id=called, marks=() if called in chosen else pytest.mark.thorough)
        for value, called in found
    ]

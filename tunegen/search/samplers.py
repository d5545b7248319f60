# SPDX-License-Identifier: Apache-2.0
"""The ways of choosing by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType

from tunegen.errors import ToolkitError, UsageError, unknown
from tunegen.search.borrowed import Cmaes, Gp, Nsga, Qmc
from tunegen.search.portfolio import Portfolio
from tunegen.search.strategies import Chance, InOrder, Strategy
from tunegen.search.tpe import Tpe

DEFAULT_SAMPLER = "portfolio"

SAMPLERS: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        "portfolio": Portfolio,
        "tpe": Tpe,
        "random": Chance,
        "bruteforce": InOrder,
        "nsga": Nsga,
        "gp": Gp,
        "cmaes": Cmaes,
        "qmc": Qmc,
    }
)

# Packages that Optuna's samplers need and that are installed with neither it nor tunegen.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "gp": ("torch", "scipy"),
    "cmaes": ("cmaes",),
    "qmc": ("scipy",),
}


def missing_packages(name: str) -> tuple[str, ...]:
    """What would have to be installed for the sampler ``name``."""
    return tuple(p for p in _NEEDED.get(name, ()) if importlib.util.find_spec(p) is None)


def check_choice(name: str, seed: int) -> None:
    """Raise :class:`UsageError` for a name of no sampler or a seed of more than 32 bits, and
    :class:`ToolkitError` for a sampler that needs a package that is not installed."""
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"seed {seed} is not between 0 and 2^32 - 1")
    if missing := missing_packages(name):
        raise ToolkitError(
            f"sampler {name} needs {' and '.join(missing)}, not installed here",
            hint=f"pip install {' '.join(missing)}",
        )

# SPDX-License-Identifier: Apache-2.0
"""Which configuration next, by a sampler of its own or by Optuna's.

A search proposes valid configurations only, none of them twice, until there is none left. It
starts with the default of every spec, the points that its caller knows to be good elsewhere, and
those that the performance model ranks highest; then a sampler chooses. What is proposed depends on
the seed, on its number, on those first points and on what has been told until then, never on time,
so a caller that asks a fixed number of proposals ahead gets the same trials on every machine. Nor
does it matter in how many runs the trials were made: a search that is told its past goes on as if
it had never stopped, but for the outcomes that it knows now and that were still under way when it
was stopped.
"""

from tunegen.search.opening import FirstPoint, Origin
from tunegen.search.portfolio_sampler import PortfolioSampler
from tunegen.search.proposing import Proposal, Search, make_search
from tunegen.search.sampler import ConfigSampler, Suggestion
from tunegen.search.samplers import DEFAULT_SAMPLER, SAMPLERS, check_choice
from tunegen.search.unseen import Contender

__all__ = [
    "DEFAULT_SAMPLER",
    "SAMPLERS",
    "ConfigSampler",
    "Contender",
    "FirstPoint",
    "Origin",
    "PortfolioSampler",
    "Proposal",
    "Search",
    "Suggestion",
    "check_choice",
    "make_search",
]

# SPDX-License-Identifier: Apache-2.0
"""The three straight lines (tune, inspect, export) and what is asked beside them."""

from tunegen.session.building import Build, build, compile
from tunegen.session.environment import cache_report, clear_cache, examine
from tunegen.session.inspection import Inspection, inspect
from tunegen.session.listing import SpecListing, describe, overview
from tunegen.session.records import check, find, legality, staleness
from tunegen.session.resolve import Request, request
from tunegen.session.shipping import export
from tunegen.session.tuning import TuneResult, tune

__all__ = [
    "Build",
    "Inspection",
    "Request",
    "SpecListing",
    "TuneResult",
    "build",
    "cache_report",
    "check",
    "clear_cache",
    "compile",
    "describe",
    "examine",
    "export",
    "find",
    "inspect",
    "legality",
    "overview",
    "request",
    "staleness",
    "tune",
]

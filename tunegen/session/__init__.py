# SPDX-License-Identifier: Apache-2.0
"""The three straight lines (tune, inspect, export) and what is asked beside them."""

from tunegen.session.benchmark import BenchResult, bench
from tunegen.session.building import Build, build, compile
from tunegen.session.calibrating import CalibrationResult, calibrate
from tunegen.session.devices import GpuListing, list_gpus
from tunegen.session.environment import cache_report, clear_cache, examine
from tunegen.session.inspection import Inspection, inspect
from tunegen.session.listing import SpecListing, describe, overview
from tunegen.session.records import check, find, legality, staleness
from tunegen.session.resolve import Request, request
from tunegen.session.restamping import Restamping, restamp
from tunegen.session.searching import SearchBench, SearchScore, bench_search
from tunegen.session.shapes import Shape, name_shapes, read_shapes
from tunegen.session.shipping import export
from tunegen.session.spare import Slice, Spare
from tunegen.session.studies import (
    export_studies,
    find_study,
    import_studies,
    list_studies,
    open_study,
)
from tunegen.session.tuning import TuneResult, tune
from tunegen.session.warmstart import KnownPoint

__all__ = [
    "BenchResult",
    "Build",
    "CalibrationResult",
    "GpuListing",
    "Inspection",
    "KnownPoint",
    "Request",
    "Restamping",
    "SearchBench",
    "SearchScore",
    "Shape",
    "Slice",
    "Spare",
    "SpecListing",
    "TuneResult",
    "bench",
    "bench_search",
    "build",
    "cache_report",
    "calibrate",
    "check",
    "clear_cache",
    "compile",
    "describe",
    "examine",
    "export",
    "find",
    "export_studies",
    "find_study",
    "import_studies",
    "inspect",
    "legality",
    "list_gpus",
    "list_studies",
    "name_shapes",
    "open_study",
    "overview",
    "read_shapes",
    "request",
    "restamp",
    "staleness",
    "tune",
]

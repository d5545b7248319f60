# SPDX-License-Identifier: Apache-2.0
"""Tuning records in, the best usable record out; JSON files, layers, and the look-up ladder."""

from tunegen.database.checks import Finding, FindingKind, faults
from tunegen.database.form import SCHEMA, document, json_schema
from tunegen.database.ladder import Match, Rung, Skipped, describe
from tunegen.database.layers import Database, Location, MergeReport, default_folder
from tunegen.database.ranges import RANGE_FACTOR

__all__ = [
    "RANGE_FACTOR",
    "SCHEMA",
    "Database",
    "Finding",
    "FindingKind",
    "Location",
    "Match",
    "MergeReport",
    "Rung",
    "Skipped",
    "default_folder",
    "describe",
    "document",
    "faults",
    "json_schema",
]

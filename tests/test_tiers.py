# SPDX-License-Identifier: Apache-2.0
"""Missing tiers skip with their reason, or fail where they are required."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PROBE = """
import pytest
pytestmark = pytest.mark.emulator
def test_runs():
    pass
"""


@pytest.fixture
def probe(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test of the emulator tier under the real conftest, where g++ is not to be found."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = emulator: x\n")
    pytester.makepyfile(PROBE)
    monkeypatch.setenv("PATH", str(pytester.path))
    monkeypatch.delenv("TUNEGEN_REQUIRE_TIERS", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def test_a_missing_tier_skips_with_its_reason(probe):
    result = probe.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no emulator tier: g++ is not installed*"])


def test_a_required_tier_fails_with_its_reason(probe, monkeypatch):
    monkeypatch.setenv("TUNEGEN_REQUIRE_TIERS", "nvrtc,emulator")
    result = probe.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the emulator tier is required: g++ is not installed*"])


def test_other_required_tiers_leave_it_skipped(probe, monkeypatch):
    monkeypatch.setenv("TUNEGEN_REQUIRE_TIERS", "gpu")
    probe.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=1)


def test_an_unknown_tier_is_refused(probe, monkeypatch):
    monkeypatch.setenv("TUNEGEN_REQUIRE_TIERS", "emulatr")
    result = probe.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR

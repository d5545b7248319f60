# SPDX-License-Identifier: Apache-2.0
"""Tiers: a test that needs more than Python is marked with what it needs, and skips with the
reason where that is missing. ``TUNEGEN_REQUIRE_TIERS=nvrtc,nvdisasm`` makes a missing tier a
failure instead: what can be installed is never skipped unnoticed."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tunegen import compiler, device, resources
from tunegen.disasm.tool import find_nvdisasm
from tunegen.errors import ToolkitError

REQUIRED = "TUNEGEN_REQUIRE_TIERS"

# A busy machine is no failure: properties have no time limit per example.
settings.register_profile("tunegen", settings(), deadline=None)
settings.load_profile("tunegen")


def _reason(find: Callable[[], object]) -> str:
    try:
        find()
    except ToolkitError as error:
        return str(error)
    return ""


def _nvjitlink() -> str:
    try:
        importlib.import_module("cuda.bindings.nvjitlink").version()
    except (ImportError, RuntimeError):  # the bindings load the library at the first call
        return "nvJitLink is not installed (pip install 'nvidia-nvjitlink==13.*')"
    return ""


def _emulator() -> str:
    return "" if shutil.which("g++") else "g++ is not installed (apt-get install g++)"


# Each gives the reason why its tier cannot run, or the empty string.
TIERS: dict[str, Callable[[], str]] = {
    "nvrtc": lambda: _reason(compiler.nvrtc_version),
    "nvdisasm": lambda: _reason(find_nvdisasm),
    "nvjitlink": _nvjitlink,
    "emulator": _emulator,
    "gpu": lambda: device.find_gpus().reason,
}


@functools.cache
def missing(tier: str) -> str:
    return TIERS[tier]()


def _required() -> list[str]:
    return [tier for tier in os.environ.get(REQUIRED, "").split(",") if tier]


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(_required()) - set(TIERS)
    if unknown:
        raise pytest.UsageError(
            f"{REQUIRED} names {', '.join(sorted(unknown))}; tiers are {', '.join(TIERS)}"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for tier in TIERS:
        if item.get_closest_marker(tier) is None or not missing(tier):
            continue
        if tier in _required():
            pytest.fail(f"the {tier} tier is required: {missing(tier)}", pytrace=False)
        pytest.skip(f"no {tier} tier: {missing(tier)}")


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay until the end: the garbage collector need not go
    through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests have the database to themselves: what is shipped changes with every release, what is
    the user's with every tune, and a search begins from both. The tests of what is shipped read
    the folder in the tree."""
    empty = tmp_path_factory.mktemp("shipped") / "tuned_db"
    empty.mkdir()
    shutil.copy(resources.data_dir("tuned_db") / "schema.json", empty)
    real = resources.data_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            resources, "data_dir", lambda name: empty if name == "tuned_db" else real(name)
        )
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _migrations_read_once() -> Iterator[None]:
    """Optuna reads all of its migration scripts several times for each file of studies that is
    made, and tests make a thousand of them."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    read = ScriptDirectory.from_config
    found: dict[str | None, ScriptDirectory] = {}

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in found:
            found[place] = read(config)
        return found[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield

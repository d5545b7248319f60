# SPDX-License-Identifier: Apache-2.0
"""Calibrations on disk: one JSON file for each device class, in the user's data directory."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from tunegen.errors import DatabaseError
from tunegen.model import Calibration, DeviceClass, DeviceIdentity, Figure, StreamPoint

# Raised when the form of the file changes; files of another form are not read.
SCHEMA = 1

_AGAIN = "tunegen calibrate writes it anew"


def default_folder() -> Path:
    """``~/.local/share/tunegen/calibration``, or as ``XDG_DATA_HOME`` says."""
    return Path(platformdirs.user_data_dir("tunegen")) / "calibration"


def find(device: DeviceClass, folder: Path | None = None) -> Calibration | None:
    """The calibration of a device class, or None where it was never calibrated.

    Raises :class:`DatabaseError` where the file is damaged.
    """
    identity = DeviceIdentity.of(device)
    path = path_of(device.arch, identity, folder)
    if not path.exists():
        return None
    found = _parse(path, _read(path))
    # Two classes of one name would share a file: the name of a file is no identity.
    return found if found.device == identity and found.arch == device.arch else None


def stored(folder: Path | None = None) -> list[Calibration]:
    """Every calibration in the folder, in the order of the files' names.

    Raises :class:`DatabaseError` where one is damaged.
    """
    return [
        _parse(path, _read(path)) for path in sorted((folder or default_folder()).glob("*.json"))
    ]


def save(calibration: Calibration, folder: Path | None = None) -> Path:
    """Keep a calibration in place of an earlier one of its device class; where it went.

    Readers see the old file or the new one. Raises :class:`DatabaseError` where the folder cannot
    be written.
    """
    path = path_of(calibration.arch, calibration.device, folder)
    document = {"schema": SCHEMA, **dataclasses.asdict(calibration)}
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as error:
        raise DatabaseError(f"{path} cannot be written: {error.strerror}") from error
    return path


def path_of(arch: str, device: DeviceIdentity, folder: Path | None = None) -> Path:
    """The file of a device class."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    memory = f"{device.l2_bytes >> 20}mib-{device.memory_clock_mhz}mhz"
    shared = f"{device.shared_bytes_per_block >> 10}kib"
    file = f"{arch}-{name}-{device.sm_count}sm-{shared}-{memory}.json"
    return (folder or default_folder()) / file


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _parse(path: Path, content: bytes) -> Calibration:
    try:
        document = json.loads(content)
        if document.pop("schema") != SCHEMA:
            raise DatabaseError(f"{path} has another form than this release's", hint=_AGAIN)
        return _calibration(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(
            f"{path} holds no calibration ({type(error).__name__}: {error})", hint=_AGAIN
        ) from error


def _calibration(document: dict[str, Any]) -> Calibration:
    streams = {
        name: tuple(StreamPoint(int(p["bytes"]), _figure(p["us"])) for p in points)
        for name, points in document.pop("streams").items()
    }
    for name, points in streams.items():
        if [p.bytes for p in points] != sorted({p.bytes for p in points}):
            raise ValueError(f"the sizes of {name} do not ascend")
    clocks = document.pop("sm_clock_mhz")
    return Calibration(
        device=DeviceIdentity(**document.pop("device")),
        streams=streams,
        l2_read_gbps=_optional(document.pop("l2_read_gbps")),
        shared_read_gbps=_optional(document.pop("shared_read_gbps")),
        peak_tflops={k: _figure(v) for k, v in document.pop("peak_tflops").items()},
        launch_us=_figure(document.pop("launch_us")),
        dependent_launch_us=_figure(document.pop("dependent_launch_us")),
        sm_clock_mhz=(int(clocks[0]), int(clocks[1])) if clocks is not None else None,
        throttle=tuple(document.pop("throttle")),
        **document,
    )


def _optional(values: Mapping[str, Any] | None) -> Figure | None:
    return None if values is None else _figure(values)


def _figure(values: Mapping[str, Any]) -> Figure:
    figure = Figure(**values)
    if not (0 < figure.low <= figure.median <= figure.high < math.inf):
        raise ValueError(f"{figure.low}, {figure.median}, {figure.high} is no figure")
    return figure

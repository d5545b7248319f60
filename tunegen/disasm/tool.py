# SPDX-License-Identifier: Apache-2.0
"""The nvdisasm tool: where it is, and what it says of a cubin."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tunegen.errors import ToolkitError

WHEEL = "nvidia-cuda-nvdisasm"


def find_nvdisasm() -> Path:
    """The nvdisasm of the wheel, else the one on ``PATH``, else that of ``CUDA_HOME``.

    Raises :class:`ToolkitError` naming the wheel where there is none.
    """
    for candidate in (_from_wheel(), _from_path(), _from_toolkit()):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise ToolkitError(
        "nvdisasm is not installed, so there is no SASS to show",
        hint=f"pip install '{WHEEL}==13.*'",
    )


def _from_wheel() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)


def _from_path() -> Path | None:
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def _from_toolkit() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(home) / "bin" / "nvdisasm" if home else None


def disassemble(cubin: bytes, *, line_info: bool = False) -> str:
    """The SASS of every kernel in a cubin, as ``nvdisasm -c`` prints it.

    ``line_info`` adds a comment with file and line above each instruction whose line differs,
    where the cubin was built with line information. Raises :class:`ToolkitError` where nvdisasm
    is missing or does not read the cubin.
    """
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", *(["-gi"] if line_info else []), file.name]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            raise ToolkitError(f"{tool} does not run: {error}", hint="tunegen doctor") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").replace(file.name, "the cubin").split()
        raise ToolkitError(f"{tool.name} failed: {' '.join(words) or done.returncode}")
    return done.stdout.decode(errors="replace")

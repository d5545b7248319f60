# SPDX-License-Identifier: Apache-2.0
"""Every exception tunegen raises on purpose.

::

    TunegenError                exit code 1
    ├── UsageError              2   a value the caller gave is not one we know or can use
    ├── NoValidConfig           1   constraints leave nothing to choose from
    ├── PlanError               1   a configuration cannot be launched for this problem
    ├── TemplateError           1   a template does not render
    ├── CompileError            1   NVRTC refused the source; carries its log
    ├── ToolkitError            1   a library or tool is missing, or versions do not fit together
    ├── DeviceError             1   no usable GPU, or it refused
    ├── DatabaseError           1   a database file cannot be read or written
    ├── BundleError             1   an exported folder is incomplete or does not fit
    └── CheckFailed             3   a check ran and found something wrong

The message of each says what was found; ``hint`` is the next command to try. What a
configuration does on its way (it does not compile, it hangs, it is wrong) is no exception but an
:class:`tunegen.model.Outcome`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TunegenError(Exception):
    """Base of all errors raised on purpose; the command line prints them in one line."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """What was found, without the hint."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(TunegenError):
    """A value that the caller gave is unknown or malformed."""

    exit_code = 2


class NoValidConfig(TunegenError):
    """No configuration of any spec meets the constraints for this problem."""


class PlanError(TunegenError):
    """A configuration cannot be launched for a problem, for example past a grid limit."""


class TemplateError(TunegenError):
    """A template is missing or does not render."""


class CompileError(TunegenError):
    """NVRTC refused the source. ``log`` is its whole output, with line numbers of the source."""

    def __init__(self, message: str, *, log: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log


class ToolkitError(TunegenError):
    """A library or tool is missing, or the versions found do not fit together."""


class DeviceError(TunegenError):
    """There is no usable GPU, or it refused what was asked of it."""


class DatabaseError(TunegenError):
    """A database file cannot be read or written, or does not follow the schema."""


class BundleError(TunegenError):
    """An exported folder is incomplete, damaged, or has no image for the device."""


class CheckFailed(TunegenError):
    """A check ran to its end and found something wrong."""

    exit_code = 3


def unknown(kind: str, value: object, known: Iterable[object], *, hint: str = "") -> UsageError:
    """The error for a name that is not among ``known``, with the nearest ones first.

    >>> str(unknown("dtype", "fp23", ["fp32", "fp64"]))
    "unknown dtype 'fp23': did you mean fp32 or fp64? known: fp32, fp64"
    """
    names = [str(name) for name in known]
    near = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    listed = ", ".join(names) if names else "none"
    return UsageError(f"unknown {kind} {str(value)!r}: {guess}known: {listed}", hint=hint)

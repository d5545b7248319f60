# SPDX-License-Identifier: Apache-2.0
"""What really changed between two versions of PTX or SASS."""

from __future__ import annotations

import difflib
import re

# Names that a compiler hands out afresh each time, and what is left of them.
_PTX_REGISTER = re.compile(r"%(p|rs|rd|rq|r|fd|f|h|b)(?:\d+\b|<\d+>)")
_PTX_LABEL = re.compile(r"\$L__\w+")
_SASS_REGISTER = re.compile(r"\b(UR|UP|R|P|B|SB)\d+\b")
_SASS_LABEL = re.compile(r"\.L_x_\d+")
_OFFSET_OR_ENCODING = re.compile(r"/\*[0-9a-fx]+\*/")
_COMMENT = re.compile(r"//[^\n]*")
_NOISE = re.compile(r"\.(?:loc|file)\b")
_SECTION = re.compile(r"\.section[ \t]+\.debug\w*\s*\{[^}]*\}")


def normalize(text: str) -> list[str]:
    """Instructions and declarations one a line, without register numbers, label numbers, offsets,
    comments, line information and the register-cache hint ``.reuse``."""
    text = _COMMENT.sub("", _SECTION.sub("", text))
    lines = []
    for line in text.splitlines():
        line = _OFFSET_OR_ENCODING.sub("", line)
        line = _PTX_LABEL.sub("$L", _PTX_REGISTER.sub(r"%\1", line))
        line = _SASS_LABEL.sub(".L", _SASS_REGISTER.sub(r"\1", line)).replace(".reuse", "")
        line = " ".join(line.split())
        if line and not _NOISE.match(line):
            lines.append(line)
    return lines


def diff(old: str, new: str) -> str:
    """Unified diff of two PTX or two SASS texts after :func:`normalize`; empty where only
    registers, labels, offsets or comments differ."""
    lines = difflib.unified_diff(normalize(old), normalize(new), "old", "new", lineterm="")
    return "".join(f"{line}\n" for line in lines)

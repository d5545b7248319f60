# SPDX-License-Identifier: Apache-2.0
"""Source lines above the PTX and SASS that came from them.

What is added are comments, so that annotated PTX still assembles. Each reads ``// line | text``;
``|>`` marks a line of a function that was inlined into the line above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tunegen.disasm.tool import disassemble

# Line numbers from the kernel's own line inwards through what was inlined; empty for code that
# the compiler made on its own account or moved away from any one line.
Frames = tuple[int, ...]

_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_DROPPED = re.compile(r"\.file\b|// (?:begin|end) inline asm$")
_SASS_LINE = re.compile(r'//## File "[^"]*", line (\d+)')
_SASS_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s")
_SASS_LABEL = re.compile(r"[^\s/].*:$")


class _Source:
    """Source lines by number, shown when the origin of the code changes."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._shown: set[int] = set()
        self._current: Frames | None = None

    def before(self, frames: Frames) -> list[str]:
        """The comment lines to stand above code from ``frames``; none where nothing changed."""
        previous, self._current = self._current, frames
        if frames == previous:
            return []
        if not frames:
            return ["// ---- | no single source line"]
        same = 0
        for left, right in zip(frames, previous or (), strict=False):
            if left != right:
                break
            same += 1
        # Back in a caller: its line is named again, for what follows is its own.
        first = min(same, len(frames) - 1)
        return [
            line
            for depth in range(first, len(frames))
            for line in self._show(frames[depth], depth)
        ]

    def _show(self, number: int, depth: int) -> Iterable[str]:
        if not 1 <= number <= len(self._lines):
            return
        first = number
        if number not in self._shown:
            # The remarks above a line are shown with it, once.
            while first > 1 and self._lines[first - 2].lstrip().startswith("//"):
                first -= 1
        self._shown.add(number)
        for line in range(first, number + 1):
            yield f"// {line:4} |{'>' * depth} {self._lines[line - 1]}".rstrip()


def annotate_ptx(ptx: str, source: str) -> str:
    """PTX compiled with line information, under the lines of ``source`` that it came from.

    Header and declarations stay, in PTX order; what only serves debuggers goes (``.loc``,
    ``.file``, debug sections). The result is PTX with the same instructions. PTX without line
    information comes back as it is, without comments on inline assembly.
    """
    lines = _Source(source)
    output: list[str] = []
    pending: Frames | None = None
    callers: dict[tuple[int, ...], tuple[int, ...]] = {}
    in_section = False
    for line in ptx.splitlines():
        text = line.strip()
        if in_section or text.startswith(".section"):
            in_section = text != "}"
        elif match := _LOC.match(text):
            position = tuple(map(int, match.groups()[:3]))
            if match[4]:
                callers[position] = tuple(map(int, match.groups()[3:]))
            pending = _frames(position, callers if match[4] else {})
        elif _DROPPED.match(text):
            continue
        elif not text:
            if output and output[-1]:
                output.append("")
        else:
            if pending is not None and not text.endswith(":") and text != "}":
                output += lines.before(pending)
                pending = None
            output.append(line.rstrip())
    return "\n".join(output).rstrip("\n") + "\n"


def _frames(position: tuple[int, ...], callers: dict[tuple[int, ...], tuple[int, ...]]) -> Frames:
    """Line numbers from the outermost caller to ``position``.

    The generated file is self-contained, hence file 1; other files are no source of ours.
    """
    numbers: list[int] = []
    seen: set[tuple[int, ...]] = set()
    while position not in seen:
        seen.add(position)
        file, line, _ = position
        if file == 1 and line:
            numbers.append(line)
        if position not in callers:
            break
        position = callers[position]
    return tuple(reversed(numbers))


def annotate_sass(cubin: bytes, source: str) -> str:
    """The SASS of a cubin built with line information, under the lines of ``source``.

    Raises :class:`tunegen.errors.ToolkitError` as :func:`disassemble` does.
    """
    return interleave_sass(disassemble(cubin, line_info=True), source)


def interleave_sass(sass: str, source: str) -> str:
    """The work of :func:`annotate_sass` on what ``nvdisasm -gi`` printed.

    Kept are instructions with their offsets, and labels; the assembler directives go.
    """
    lines = _Source(source)
    output: list[str] = []
    origin: list[int] = []  # innermost first, as nvdisasm lists a chain of inlined calls
    pending: Frames | None = None
    for line in sass.splitlines():
        if match := _SASS_LINE.search(line):
            origin.append(int(match[1]))
            pending = tuple(number for number in reversed(origin) if number)
            continue
        origin = []
        if _SASS_INSTRUCTION.match(line):
            if pending is not None:
                output += lines.before(pending)
                pending = None
            output.append(line.rstrip())
        elif _SASS_LABEL.match(line) and not line.startswith(".text."):
            output += ["", line] if output and not line.startswith(".L") else [line]
    return "\n".join(output) + "\n"

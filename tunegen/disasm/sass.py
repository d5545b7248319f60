# SPDX-License-Identifier: Apache-2.0
"""SASS text as instructions: their kinds and where control goes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunegen.disasm.flow import Instruction

_LINE = re.compile(
    r"\s*/\*(?P<offset>[0-9a-f]+)\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"(?P<name>[^\s/][^:]*):$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TABLE = re.compile(r"\.L_x_\d+")
_WIDTH = re.compile(r"[US]?(8|16|32|64|128|256)")

# Loads and stores, whose width is part of their kind.
SIZED = frozenset({"LD", "LDG", "LDS", "LDL", "ST", "STG", "STS", "STL", "LDGSTS"})


@dataclass(frozen=True, slots=True)
class Function:
    """The instructions of one function, with the names of the places that have any."""

    code: tuple[Instruction, ...]
    names: dict[int, str]


def parse_sass(text: str) -> tuple[Function, ...]:
    """The functions of a disassembly as ``nvdisasm -c`` prints it."""
    functions = []
    rows: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if label["name"].startswith(".text.") and rows:
                functions.append(_function(rows, labels))
                rows, labels = [], {}
            labels[label["name"]] = len(rows)
        elif row := _LINE.match(line):
            rows.append(row)
    if rows:
        functions.append(_function(rows, labels))
    return tuple(functions)


def _function(rows: list[re.Match[str]], labels: dict[str, int]) -> Function:
    code = tuple(
        Instruction(
            _kind(row),
            tuple(sorted(target for target in _successors(row, i, labels) if target < len(rows))),
        )
        for i, row in enumerate(rows)
    )
    names = {i: f"/*{row['offset']}*/" for i, row in enumerate(rows)}
    names |= {at: name for name, at in reversed(labels.items()) if name.startswith(".L")}
    return Function(code, names)


def _successors(row: re.Match[str], index: int, labels: dict[str, int]) -> set[int]:
    base, *modifiers = row["opcode"].split(".")
    always = row["guard"] in (None, "PT", "UPT")
    targets = {labels[name] for name in _TARGET.findall(row["operands"]) if name in labels}
    match base:
        case "EXIT" | "RET" | "KILL":
            return set() if always else {index + 1}
        case "BRA" | "JMP":
            # A predicate stands before the instruction or among its operands.
            some = {"ANY", "CONV", "DIV"} & set(modifiers) or "," in row["operands"]
            return targets if always and not some else targets | {index + 1}
        case "BRX" | "JMX":
            return {labels[name] for name in _TABLE.findall(row["operands"]) if name in labels}
        case "CALL":
            return targets | {index + 1}
    return {index + 1}


def _kind(row: re.Match[str]) -> str:
    base, *modifiers = row["opcode"].split(".")
    if row["guard"] in ("!PT", "!UPT"):
        return "NOP"
    if base in SIZED:
        widths = [match[1] for m in modifiers if (match := _WIDTH.fullmatch(m))]
        return f"{base}.{widths[-1] if widths else 32}"
    if base in ("HFMA2", "HADD2"):
        sources = [operand.strip().lstrip("-") for operand in row["operands"].split(",")[1:]]
        if base == "HFMA2" and sources[:2] == ["RZ", "RZ"]:
            return "MOV"  # 0 * 0 + constant: how the compiler loads one on the half pipe
        if "F32" in modifiers:
            return "HADD2.F32"  # a widening conversion
    return base

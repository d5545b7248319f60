# SPDX-License-Identifier: Apache-2.0
"""PTX text as instructions, under the names of the SASS instructions they usually become."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tunegen.disasm.flow import Instruction
from tunegen.disasm.sass import Function

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NO_CODE = re.compile(
    r"^[ \t]*\.(?:section[^{]*\{[^}]*\}|(?:loc|file|version|target|address_size)\b[^\n]*)",
    re.MULTILINE,
)
_LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(?P<guard>!?%?\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<rest>.*)")
_TYPE = re.compile(r"[a-z]+(\d+)(?:x\d)?")

_Scope = tuple[int, ...]


@dataclass(slots=True)
class _Body:
    """A function while it is read. Labels are looked up from the scope of a branch outwards."""

    statements: list[tuple[str, _Scope]] = field(default_factory=list)
    labels: dict[tuple[_Scope, str], int] = field(default_factory=dict)

    def find(self, scope: _Scope, name: str) -> int | None:
        for depth in range(len(scope), -1, -1):
            if (found := self.labels.get((scope[:depth], name))) is not None:
                return found
        return None


def parse_ptx(text: str) -> tuple[Function, ...]:
    """The functions of a PTX file that have a body."""
    return tuple(_function(body) for body in _bodies(_NO_CODE.sub("", _COMMENT.sub("", text))))


def _bodies(text: str) -> Iterator[_Body]:
    """Statements and labels per function.

    A brace opens a scope where a statement could begin, and belongs to a vector operand or an
    initialiser everywhere else; inline assembly brings scopes with labels of their own.
    """
    body = _Body()
    scope: _Scope = ()
    scopes = operand_depth = 0
    statement = ""
    for piece in re.split(r"([;{}])", text):
        if piece not in (";", "{", "}"):
            statement += piece
            while scope and (match := _LABEL.match(statement)):
                body.labels[scope, match[1]] = len(body.statements)
                statement = statement[match.end() :]
        elif piece == "{" and not operand_depth and _opens(statement):
            scopes += 1
            scope = (*scope, scopes)
            statement = ""
        elif piece == "}" and not operand_depth:
            scope = scope[:-1]
            statement = ""
            if not scope:
                yield body
                body = _Body()
        elif piece == ";" and not operand_depth:
            if scope and not statement.lstrip().startswith("."):
                body.statements.append((" ".join(statement.split()), scope))
            statement = ""
        else:
            operand_depth += {"{": 1, "}": -1, ";": 0}[piece]
            statement += piece


def _opens(statement: str) -> bool:
    return not statement.strip() or re.search(r"\.(entry|func)\b", statement) is not None


def _function(body: _Body) -> Function:
    rows = [(match, scope) for text, scope in body.statements
            if (match := _INSTRUCTION.fullmatch(text))]  # fmt: skip
    code = tuple(
        Instruction(
            ptx_kind(row["opcode"], row["rest"]),
            tuple(sorted(t for t in _successors(row, i, scope, body) if t < len(rows))),
        )
        for i, (row, scope) in enumerate(rows)
    )
    names = {at: name for (_, name), at in reversed(body.labels.items())}
    return Function(code, names)


def _successors(row: re.Match[str], index: int, scope: _Scope, body: _Body) -> set[int]:
    after = {index + 1} if row["guard"] else set()
    match row["opcode"].split(".")[0]:
        case "ret" | "exit" | "trap":
            return after
        case "bra":
            target = body.find(scope, row["rest"].strip())
            return after if target is None else after | {target}
        case "brx":
            # Targets stand in a table that is not code: any label may follow.
            return set(body.labels.values())
    return {index + 1}


_FLOAT = {
    "fma": ("FFMA", "DFMA", "HFMA2"),
    "mad": ("FFMA", "DFMA", "HFMA2"),
    "mul": ("FMUL", "DMUL", "HMUL2"),
    "add": ("FADD", "DADD", "HADD2"),
    "sub": ("FADD", "DADD", "HADD2"),
}
_LOADS = {"global": "LDG", "shared": "LDS", "local": "LDL", "param": "LDC", "const": "LDC"}
_STORES = {"global": "STG", "shared": "STS", "local": "STL"}
_OTHERS = {
    "ldmatrix": "LDSM", "stmatrix": "STSM", "mbarrier": "SYNCS", "membar": "MEMBAR",
    "bar": "BAR", "barrier": "BAR", "exit": "EXIT", "ret": "EXIT",
}  # fmt: skip


def ptx_kind(opcode: str, operands: str) -> str:
    """The SASS name for a PTX instruction, its own in capitals where there is no counterpart.

    >>> ptx_kind("ld.shared.v4.f32", "{%f1, %f2, %f3, %f4}, [%r1]")
    'LDS.128'
    """
    base, *modifiers = opcode.replace("::", ":").split(".")
    spaces = [modifier.split(":")[0] for modifier in modifiers]
    match base:
        case "ld" | "st":
            table, plain = (_LOADS, "LD") if base == "ld" else (_STORES, "ST")
            name = next((table[space] for space in spaces if space in table), plain)
            return name if name == "LDC" else f"{name}.{_width(modifiers)}"
        case "fma" | "mad" | "mul" | "add" | "sub":
            return _arithmetic(base, modifiers)
        case "mma":
            return "DMMA" if "f64" in modifiers else "IMMA" if "s32" in modifiers else "HMMA"
        case "wgmma":
            if "mma_async" not in modifiers:
                return "WARPGROUP"
            return "IGMMA" if "s32" in modifiers else "HGMMA"
        case "tcgen05":
            return "UTCHMMA" if "mma" in modifiers else "TCGEN05"
        case "cp":
            return _copy(spaces, operands)
        case "fence":
            # Proxy fences order the copy engine only; the others are full memory fences.
            return "FENCE" if {"proxy", "mbarrier_init"} & set(spaces) else "MEMBAR"
    return _OTHERS.get(base, base.upper())


def _width(modifiers: list[str]) -> int:
    count = next((int(m[1:]) for m in modifiers if re.fullmatch(r"v[248]", m)), 1)
    bits = next((int(match[1]) for m in reversed(modifiers) if (match := _TYPE.fullmatch(m))), 32)
    return count * bits


def _arithmetic(base: str, modifiers: list[str]) -> str:
    kind = modifiers[-1] if modifiers else ""
    if kind in ("f32", "f32x2"):
        return _FLOAT[base][0]
    if kind == "f64":
        return _FLOAT[base][1]
    if "f16" in kind:  # f16, bf16 and their pairs
        return _FLOAT[base][2]
    return "IMAD" if base in ("mad", "mul") else "IADD"


def _copy(spaces: list[str], operands: str) -> str:
    if spaces[0] != "async":
        return "CP"
    if spaces[-1] in ("commit_group", "wait_all") or "wait_group" in spaces:
        return "DEPBAR"
    if "mbarrier" in spaces and "bulk" not in spaces:
        return "SYNCS"
    if "bulk" in spaces:
        if "tensor" not in spaces:
            return "UBLKCP"
        moves = [space for space in spaces if space in ("global", "shared")]
        return "UTMASTG" if moves[:1] == ["global"] else "UTMALDG"
    size = re.search(r"\]\s*,\s*(\d+)", operands)
    return f"LDGSTS.{8 * int(size[1])}" if size else "LDGSTS.32"

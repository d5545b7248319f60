# SPDX-License-Identifier: Apache-2.0
"""Lists of problems to tune in one go: from a JSON file, or as they stand on a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegen import kernels
from tunegen.errors import UsageError, unknown
from tunegen.model import KernelSpec, Operation

_WORDS = ("dtype", "layout")


@dataclass(frozen=True, slots=True)
class Shape:
    """A problem with a name, in a group of problems. Sizes, dtype and layout are as ``request``
    and ``tune`` take them: None leaves the default of the operation, or of the arch. ``text`` is
    how the sizes are written."""

    name: str
    group: str
    text: str
    sizes: Mapping[str, int] | None
    dtype: str | None = None
    layout: str | None = None


def read_shapes(
    operation: str,
    file: Path | str,
    *,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> tuple[Shape, ...]:
    """The problems that a file lists for an operation, all of them checked.

    The file holds one JSON object: under the name of each operation a list of entries, as in
    ``{"name": "S4", "group": "square", "m": 4096, "n": 4096, "k": 4096}``, whose sizes are the
    operation's axes in small letters, ``batch`` for a batch; and ``dtype`` and ``layout`` for
    every entry that does not have its own. ``dtype`` and ``layout`` given here stand above those
    of the file. ``attributes`` hold for every entry.

    Raises :class:`UsageError` that names the file and the entry.
    """
    found = kernels.operation(operation, tuple(specs))
    content = _read(file)
    listed = _lists(file, content)
    if not listed.get(operation):
        there = ", ".join(name for name in listed if listed[name]) or "none"
        raise UsageError(f"{file} lists no problem of {operation}; operations with some: {there}")
    general = {word: content[word] for word in _WORDS if word in content}
    if found.layouts == ("",):  # a layout that is for the file's other operations
        general.pop("layout", None)
    above = {"dtype": dtype, "layout": layout}
    above = {word: value for word, value in above.items() if value is not None}
    shapes: dict[str, Shape] = {}
    for number, entry in enumerate(listed[operation], 1):
        where = f"{file}: entry {number} of {operation}"
        try:
            if not isinstance(entry, dict):
                raise UsageError(f"an entry is an object, not {entry!r}")
            if "name" in entry:
                where += f" ({entry['name']})"
            shape = _shape(found, {**general, **entry, **above}, attributes or {})
            if shape.name in shapes:
                raise UsageError("another entry has this name")
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
        shapes[shape.name] = shape
    return tuple(shapes.values())


def name_shapes(
    operation: str,
    problems: Sequence[str],
    *,
    dtype: str | None = None,
    layout: str | None = None,
    attributes: Mapping[str, int | str] | None = None,
    specs: Sequence[KernelSpec] = kernels.SPECS,
) -> tuple[Shape, ...]:
    """Problems as they are written on a command line, all of them checked; without any, the
    operation's default. Their names are what was written."""
    found = kernels.operation(operation, tuple(specs))
    if not problems:
        return (Shape("", "", "", None, dtype, layout),)
    shapes = []
    for text in problems:
        problem = found.problem(text, dtype=dtype, layout=layout, **(attributes or {}))
        shapes.append(Shape(text, "", found.text(problem), dict(problem.sizes), dtype, layout))
    return tuple(shapes)


def _lists(file: Path | str, content: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The lists of entries by operation, in a file that is right outside of them."""
    lists = {}
    for name, value in content.items():
        if name in _WORDS:
            if not isinstance(value, str):
                raise UsageError(f"{file}: {name} is a text, not {value!r}")
        elif isinstance(value, list):
            lists[name] = value
        else:
            error = unknown("key", name, _WORDS)
            raise UsageError(f"{file}: {error.message}; an operation has a list")
    return lists


def _shape(
    operation: Operation, entry: Mapping[str, Any], attributes: Mapping[str, int | str]
) -> Shape:
    axes = {axis.lower(): axis for axis in operation.axes}
    batch = {"batch": operation.batch_axis} if operation.batch_axis else {}
    for key in entry:
        known = ("name", "group", *axes, *batch, *_WORDS)
        if key not in known:
            raise unknown("key", key, known)
    for key in ("name", "group", *axes):
        if key not in entry:
            raise UsageError(f"{key} is missing")
    for key in ("name", "group", *_WORDS):
        value = entry.get(key, "-")
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise UsageError(f"{key} is a text of one line, not {value!r}")
    sizes = {}
    for key, axis in {**batch, **axes}.items():
        value = entry.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{key} is a whole number, not {value!r}")
        sizes[axis] = value
    dtype, layout = entry.get("dtype"), entry.get("layout")
    problem = operation.problem(sizes, dtype=dtype, layout=layout, **attributes)
    return Shape(entry["name"], entry["group"], operation.text(problem), sizes, dtype, layout)


def _read(file: Path | str) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        content = json.loads(Path(file).read_bytes(), object_pairs_hook=_object)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no JSON object")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{twice!r} stands twice in one object")
    return found
